"""A lock that goes to who has waited for it longest."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType


class _Turn:
    """One who asks. `signal` is locked while it waits; `came` is guarded by the lock's `_guard`."""

    __slots__ = ("came", "signal")

    def __init__(self) -> None:
        self.signal = threading.Lock()
        self.came = False


class TurnLock:
    """A mutex whose holder may let go between two steps of long work, and others get their turn then.

    A plain lock goes back to whoever asks first, which is the thread that just released it. Not reentrant.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()  # of the two below; held for a few instructions
        self._is_held = False
        self._waiting: deque[_Turn] = deque()

    @property
    def has_waiting(self) -> bool:
        """Whether somebody waits for it."""
        return bool(self._waiting)

    def acquire(self, timeout: float = -1.0) -> bool:
        """Wait for its turn, at most so many seconds if not negative; whether it came."""
        turn = _Turn()
        try:
            return self._take_or_wait(turn) or turn.signal.acquire(timeout=timeout) or self._came_after_all(turn)
        except BaseException:
            # Who is interrupted holds nothing, also where its turn had come: nobody else would ever get one.
            if self._came_after_all(turn):
                self.release()
            raise

    def release(self) -> None:
        """Hand it to who waits longest."""
        with self._guard:
            assert self._is_held, "only who holds the lock releases it"
            if self._waiting:
                turn = self._waiting.popleft()
                turn.came = True
                turn.signal.release()
            else:
                self._is_held = False

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _take_or_wait(self, turn: _Turn) -> bool:
        """Whether it is free, and taken; else the turn waits from now on."""
        with self._guard:
            if not self._is_held:
                self._is_held = turn.came = True
                return True
            turn.signal.acquire()
            self._waiting.append(turn)
            return False

    def _came_after_all(self, turn: _Turn) -> bool:
        """End a wait; true where it was handed the lock meanwhile."""
        with self._guard:
            if not turn.came and turn in self._waiting:
                self._waiting.remove(turn)
            return turn.came
