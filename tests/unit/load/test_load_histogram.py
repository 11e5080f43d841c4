from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from kvstore.load.histogram import LatencyHistogram

TIMES = st.lists(st.integers(0, 10**12), min_size=1, max_size=200)


@given(TIMES, st.sampled_from([50.0, 90.0, 99.0, 99.9, 100.0]))
def test_percentiles_are_those_of_a_sorted_list_within_three_percent(times: list[int], percent: float):
    histogram = LatencyHistogram()
    for time in times:
        histogram.record(time)
    exact = sorted(times)[max(1, math.ceil(len(times) * percent / 100)) - 1]
    told = histogram.percentile_seconds(percent)
    assert told is not None
    assert exact <= round(told * 1e9) <= exact * (1 + 1 / 32)
    assert len(times) == histogram.total


@given(TIMES, TIMES)
def test_merged_histograms_are_that_of_all_times(one: list[int], other: list[int]):
    parts = []
    for times in (one, other, one + other):
        parts.append(LatencyHistogram())
        for time in times:
            parts[-1].record(time)
    first, second, both = parts
    first.merge(LatencyHistogram(second.counts))
    assert (both.counts, both.total) == (first.counts, first.total)


def test_no_times_have_no_percentile():
    assert LatencyHistogram().percentile_seconds(50) is None


def test_memory_stays_bounded_however_many_times_are_recorded():
    histogram = LatencyHistogram()
    for time in range(0, 10**10, 10**5):
        histogram.record(time)
    assert len(histogram.counts) < 32 * 40
