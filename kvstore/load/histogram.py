"""Latencies in buckets that grow with them: constant memory however many are recorded, 3 % of error at most."""

from __future__ import annotations

from collections import Counter

_SUB_BUCKETS = 32  # of each doubling, so that a bucket is at most 1/32 wide of what it starts at


class LatencyHistogram:
    """Durations, in nanoseconds. Used by one thread; merge those of several."""

    def __init__(self, counts: dict[int, int] | None = None) -> None:
        self._counts: Counter[int] = Counter(counts)
        self.total = self._counts.total()

    @property
    def counts(self) -> dict[int, int]:
        """By bucket, for another process."""
        return dict(self._counts)

    def record(self, nanoseconds: int) -> None:
        """Add one duration."""
        self._counts[_bucket(nanoseconds)] += 1
        self.total += 1

    def merge(self, other: LatencyHistogram) -> None:
        """Add all of another one."""
        self._counts.update(other._counts)
        self.total += other.total

    def percentile_seconds(self, percent: float) -> float | None:
        """A time that this share of the durations does not exceed by more than 3 %; None if there are none."""
        if not self.total:
            return None
        wanted = max(1.0, self.total * percent / 100)
        seen = 0
        bucket = 0
        for bucket in sorted(self._counts):
            seen += self._counts[bucket]
            if seen >= wanted:
                break
        return _upper_end(bucket) / 1e9


def _bucket(value: int) -> int:
    if value < _SUB_BUCKETS:
        return max(0, value)
    doublings = value.bit_length() - _SUB_BUCKETS.bit_length()
    return doublings * _SUB_BUCKETS + (value >> doublings)


def _upper_end(bucket: int) -> int:
    """The largest value of a bucket."""
    if bucket < 2 * _SUB_BUCKETS:
        return bucket
    doublings = bucket // _SUB_BUCKETS - 1
    return ((bucket - doublings * _SUB_BUCKETS + 1) << doublings) - 1
