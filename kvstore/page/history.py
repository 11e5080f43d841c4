"""What the counters were at each of the last moments: the page's own memory, so that it needs no database.

A reading is a few hundred bytes, and there are READINGS_MAX at most: an hour.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvstore.metrics import CallTotals
    from kvstore.page.sources import PageSources

READING_SECONDS = 5.0
READINGS_MAX = 721  # an hour has 720 steps between them


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters at one moment, since the node's start; `seconds` are of a clock that never goes back."""

    seconds: float
    lookup_tokens: int
    hit_tokens: Mapping[str, int]
    loaded_tokens: Mapping[str, int]
    written_bytes: int
    peer_bytes: int
    calls: Mapping[str, CallTotals]


@dataclass(frozen=True, slots=True)
class Step:
    """What happened between two readings."""

    began: Reading
    ended: Reading

    @property
    def seconds(self) -> float:
        """How long it took; above 0."""
        return self.ended.seconds - self.began.seconds

    @property
    def lookup_tokens(self) -> int:
        """Tokens looked up."""
        return self.ended.lookup_tokens - self.began.lookup_tokens

    def hit_ratio(self, tier: str) -> float | None:
        """Share of the tokens looked up that were found in a tier; None: nothing was looked up."""
        if not self.lookup_tokens:
            return None
        return (self.ended.hit_tokens.get(tier, 0) - self.began.hit_tokens.get(tier, 0)) / self.lookup_tokens

    def loaded_tokens_per_second(self, tier: str) -> float:
        """Tokens handed to engines from a tier."""
        loaded = self.ended.loaded_tokens.get(tier, 0) - self.began.loaded_tokens.get(tier, 0)
        return loaded / self.seconds


class History:
    """Readings of one node, the oldest first. Thread-safe; `read` is called by one thread."""

    def __init__(self, sources: PageSources) -> None:
        self._sources = sources
        self._lock = threading.Lock()
        self._readings: deque[Reading] = deque(maxlen=READINGS_MAX)  # guarded by _lock

    def read(self) -> None:
        """Take one reading. Costs what one scrape of the counters costs."""
        stats = self._sources.stats()
        reading = Reading(
            self._sources.clock.monotonic(),
            stats.lookup_tokens,
            dict(stats.hit_tokens),
            dict(stats.loaded_tokens),
            stats.written_bytes,
            self._sources.peers().bytes,
            self._sources.calls.totals(),
        )
        with self._lock:
            if not self._readings or reading.seconds > self._readings[-1].seconds:
                self._readings.append(reading)

    def steps(self) -> list[Step]:
        """What happened between each two readings."""
        with self._lock:
            readings = list(self._readings)
        return [Step(began, ended) for began, ended in itertools.pairwise(readings)]

    def last(self, seconds: float) -> Step | None:
        """What happened in the last so many seconds, or since the first reading; None: there are no two readings."""
        with self._lock:
            readings = list(self._readings)
        if len(readings) < 2:
            return None
        ended = readings[-1]
        began = next(reading for reading in readings if reading.seconds >= ended.seconds - seconds)
        return Step(readings[-2] if began is ended else began, ended)
