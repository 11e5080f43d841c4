"""How the page counts and writes: quantiles of buckets, and numbers with three digits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.page.quantiles import quantile
from kvstore.page.wording import ago, amount, duration, percent, size

BOUNDS = (1.0, 2.0, 4.0, 8.0)


@given(st.lists(st.floats(0.01, 8.0), min_size=1), st.sampled_from([0.5, 0.9, 0.99]))
def test_a_quantile_lies_in_the_bucket_of_the_value_of_that_rank(values, share):
    counts = [sum(low < value <= high for value in values) for low, high in zip((0.0, *BOUNDS), BOUNDS, strict=False)]
    rank = next(at for at in range(len(values)) if (at + 1) / len(values) >= share)
    exact = sorted(values)[rank]
    found = quantile(BOUNDS, [*counts, 0], share)
    high = next(bound for bound in BOUNDS if exact <= bound)
    assert high / 2 * (high > 1) <= found <= high


def test_of_no_calls_there_is_no_quantile_and_beyond_the_last_bound_it_is_that_bound():
    assert quantile(BOUNDS, [0] * 5, 0.5) is None
    assert quantile(BOUNDS, [1, 0, 0, 0, 9], 0.5) == 8.0


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (percent(0.1234), "12.3%"),
        (percent(None), "-"),
        (amount(999), "999"),
        (amount(1234), "1.23 k"),
        (amount(45_600_000), "45.6 M"),
        (size(512), "512 B"),
        (size(1536), "1.50 KiB"),
        (size(12 * 2**30), "12.0 GiB"),
        (duration(0.000072), "72 µs"),
        (duration(0.0123), "12.3 ms"),
        (duration(2.5), "2.50 s"),
        (duration(None), "-"),
        (ago(0), "now"),
        (ago(45), "45 s ago"),
        (ago(1800), "30 min ago"),
    ],
)
def test_numbers_are_written_for_people(written, text):
    assert text == written
