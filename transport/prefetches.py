"""The prefetches of one session, by id; those that are still under way when it ends are cancelled."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kvstore.errors import ClosedError, InvalidArgumentError, NoSpaceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.api import Prefetch


class Prefetches:
    """Thread-safe; its lock is never held while calling out. An id whose prefetch has ended is forgotten."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._held: dict[int, Prefetch | None] = {}  # None while it is being started; guarded by _lock, as below
        self._closed = False

    def get_or_start(self, prefetch_id: int, start: Callable[[], Prefetch]) -> Prefetch:
        """The prefetch of that id, started if there is none. One that is cancelled meanwhile ends once it is there."""
        known = self._reserve(prefetch_id)
        if known is not None:
            return known
        try:
            prefetch = start()
        except BaseException:
            with self._lock:
                self._held.pop(prefetch_id, None)
            raise
        with self._lock:
            is_wanted = prefetch_id in self._held and not self._closed
            if is_wanted:
                self._held[prefetch_id] = prefetch
        if not is_wanted:
            prefetch.cancel()
            raise ClosedError(f"prefetch {prefetch_id} was cancelled before it had begun")
        return prefetch

    def _reserve(self, prefetch_id: int) -> Prefetch | None:
        with self._lock:
            held = self._held.get(prefetch_id)
            if held is not None:
                return held
            if not prefetch_id or prefetch_id in self._held:
                raise InvalidArgumentError(f"prefetch id {prefetch_id} is 0 or being started, expected a new one")
            if len(self._held) >= self._limit:
                self._held = {held_id: one for held_id, one in self._held.items() if one is None or not one.done}
            if len(self._held) >= self._limit:
                raise NoSpaceError(f"the session has {self._limit} prefetches, the most it may; cancel one first")
            self._held[prefetch_id] = None
        return None

    def forget(self, prefetch_id: int) -> None:
        """Let go of one that has ended."""
        with self._lock:
            self._held.pop(prefetch_id, None)

    def cancel(self, prefetch_id: int) -> None:
        """End one; nothing happens if there is none of that id."""
        with self._lock:
            prefetch = self._held.pop(prefetch_id, None)
        if prefetch is not None:
            prefetch.cancel()

    def close(self) -> None:
        """End all; idempotent."""
        with self._lock:
            self._closed = True
            held = list(self._held.values())
            self._held.clear()
        for prefetch in held:
            if prefetch is not None:
                prefetch.cancel()
