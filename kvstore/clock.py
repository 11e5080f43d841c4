"""Time as an argument, so that tests decide what time it is."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """What may be asked of time. `monotonic` never jumps and serves deadlines; `unix` is for people and files."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary start."""
        ...

    def unix(self) -> float:
        """Seconds since 1970, as the machine believes."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def monotonic(self) -> float:
        """Seconds of CLOCK_MONOTONIC."""
        return time.monotonic()

    def unix(self) -> float:
        """Seconds of CLOCK_REALTIME."""
        return time.time()
