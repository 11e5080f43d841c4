"""A lock that goes to who has waited for it longest."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType


class TurnLock:
    """A mutex whose holder may let go between two steps of long work, and others get their turn then.

    A plain lock goes back to whoever asks first, which is the thread that just released it. Not reentrant.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()  # of the two below; held for a few instructions
        self._is_held = False
        self._waiting: deque[threading.Lock] = deque()  # a locked lock for each thread, unlocked when it is its turn

    @property
    def has_waiting(self) -> bool:
        """Whether somebody waits for it."""
        return bool(self._waiting)

    def acquire(self, timeout: float = -1.0) -> bool:
        """Wait for its turn, at most so many seconds if not negative; whether it came."""
        with self._guard:
            if not self._is_held:
                self._is_held = True
                return True
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        came = False
        try:
            came = turn.acquire(timeout=timeout)
        finally:
            if not came:
                came = self._came_after_all(turn)
        return came

    def release(self) -> None:
        """Hand it to who waits longest."""
        with self._guard:
            assert self._is_held, "only who holds the lock releases it"
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._is_held = False

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _came_after_all(self, turn: threading.Lock) -> bool:
        """End a wait; true where it was handed the lock meanwhile."""
        with self._guard:
            if turn in self._waiting:
                self._waiting.remove(turn)
                return False
        return True
