"""Sizes and durations at the edge."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.quantities import format_size, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("0", 0), ("4096", 4096), ("64MiB", 2**26), (" 64 GiB ", 2**36), ("1.5KiB", 1536), ("1GB", 10**9), ("7B", 7)],
)
def test_sizes_are_read_in_whole_bytes(text, size_bytes):
    assert size_bytes == parse_size(text)


@pytest.mark.parametrize("text", ["", "-1", "1G", "1 gib", "0.3KiB", "1e9", "٣", "1GiB2", "9" * 5000])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match=r".+"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("250ms", 0.25), ("2s", 2.0), ("2", 2.0), ("1.5h", 5400.0), ("1d", 86400)]
)
def test_durations_are_read_in_seconds(text, seconds):
    assert seconds == parse_duration(text)


@pytest.mark.parametrize("text", ["", "-1s", "2 weeks", "1e3", "s"])
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(ValueError, match=r".+"):
        parse_duration(text)


@given(st.integers(min_value=0, max_value=2**62))
def test_a_shown_size_reads_back_as_the_same_number(size_bytes):
    assert size_bytes == parse_size(format_size(size_bytes))
