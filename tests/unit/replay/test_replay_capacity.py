from __future__ import annotations

import pytest

from kvstore.errors import InvalidArgumentError
from kvstore.replay.capacity import parse_capacity


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("1%", 10),
        ("0.25%", 2),
        ("0.01%", 1),
        (" 100 % ", 1099),
        ("4534", 4534),
        ("64GiB", 1024),
        ("200MiB", 3),
        ("67108864B", 1),
    ],
)
def test_a_capacity_is_percent_blocks_or_bytes(text, blocks):
    assert blocks == parse_capacity(text, unique_blocks=1099, block_bytes=64 << 20).blocks


@pytest.mark.parametrize("text", ["", "-1", "1e3", "x", "%", "1 %%", "4 blocks", "٣"])
def test_another_text_is_refused(text):
    with pytest.raises(InvalidArgumentError, match="expected a percentage"):
        parse_capacity(text, unique_blocks=1000, block_bytes=1)


@pytest.mark.parametrize("text", ["0", "0%", "1MiB"])
def test_less_than_a_block_is_refused(text):
    with pytest.raises(InvalidArgumentError, match="less than one block"):
        parse_capacity(text, unique_blocks=1000, block_bytes=2 << 20)
