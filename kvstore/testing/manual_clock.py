"""A clock that stands still until a test moves it."""

from __future__ import annotations


class ManualClock:
    """A kvstore.clock.Clock; `advance` moves both of its readings."""

    def __init__(self, unix: float = 1_700_000_000.0) -> None:
        self._monotonic = 0.0
        self._unix = unix

    def monotonic(self) -> float:
        """Seconds that were advanced so far."""
        return self._monotonic

    def unix(self) -> float:
        """The time given at the start, plus what was advanced."""
        return self._unix

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._monotonic += seconds
        self._unix += seconds
