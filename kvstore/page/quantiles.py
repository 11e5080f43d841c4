"""Quantiles of durations that were counted in buckets."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def quantile(bounds: Sequence[float], in_bucket: Sequence[int], share: float) -> float | None:
    """The duration below which `share` of them lie, straight lines assumed inside buckets; None: there are none.

    `in_bucket` has one more than `bounds`: what is beyond the last one, for which that bound is the answer.
    This is what Prometheus' histogram_quantile computes.
    """
    wanted = share * sum(in_bucket)
    if not wanted:
        return None
    below = 0
    for number, count in enumerate(in_bucket[: len(bounds)]):
        if below + count >= wanted:
            lower = bounds[number - 1] if number else 0.0
            return lower + (bounds[number] - lower) * (wanted - below) / count
        below += count
    return bounds[-1]
