"""Replay in scaled time: requests start as far apart as in the trace, divided by a factor."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.clock import Clock


class Pacer:
    """Waits until a moment of the trace has come. The first moment asked for is now."""

    def __init__(self, speed: float, *, clock: Clock, sleep: Callable[[float], None]) -> None:
        self._speed = speed
        self._clock = clock
        self._sleep = sleep
        self._offset_seconds: float | None = None

    def wait_for(self, trace_seconds: float) -> None:
        """Return when `trace_seconds` of the trace, at this speed, have passed; at once where they already have."""
        due = trace_seconds / self._speed
        now = self._clock.monotonic()
        if self._offset_seconds is None:
            self._offset_seconds = now - due
        left = due + self._offset_seconds - now
        if left > 0:
            self._sleep(left)
