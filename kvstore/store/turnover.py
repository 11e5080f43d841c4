"""How long blocks stay on disk: the time in which as much is written as the disk holds."""

from __future__ import annotations

_WINDOWS = 4  # of a capacity: how much is written before the estimate is renewed
_RATIO_MIN = 0.02  # of a capacity: with less written than that nothing is known


class Turnover:
    """Counts what is written. Guarded by the room lock; `amount` is in bytes, or in blocks, throughout.

    The last whole window is what counts, or the one under way where that takes longer already.
    """

    def __init__(self, capacity: int, now: float) -> None:
        self._capacity = capacity
        self._began_at = now
        self._written = 0
        self._last_seconds: float | None = None

    def note(self, amount: int, now: float) -> None:
        """Count what was written just now."""
        self._written += amount
        if self._written >= self._capacity / _WINDOWS:
            self._last_seconds = (now - self._began_at) * self._capacity / self._written
            self._began_at = now
            self._written = 0

    def seconds(self, now: float) -> float | None:
        """The estimate; None while too little was written for one."""
        elapsed = now - self._began_at
        if self._last_seconds is not None:
            return max(self._last_seconds, elapsed * _WINDOWS)
        if self._written < self._capacity * _RATIO_MIN:
            return None
        return elapsed * self._capacity / self._written
