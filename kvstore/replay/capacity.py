"""Capacities as people write them: a percentage of the trace's unique blocks, a number of blocks, or bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from kvstore.errors import InvalidArgumentError
from kvstore.quantities import parse_size

_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%", re.ASCII)
_EXPECTED = "expected a percentage such as 1%, a number of blocks such as 4534, or a size such as 64GiB"


@dataclass(frozen=True, slots=True)
class Capacity:
    """A capacity in blocks, with the text it was given by."""

    text: str
    blocks: int


def parse_capacity(text: str, *, unique_blocks: int, block_bytes: int) -> Capacity:
    """Whole blocks, rounded down, but one at least of what is given in percent.

    Raises InvalidArgumentError for any other text, and for less than one block.
    """
    text = text.strip()
    percent = _PERCENT.fullmatch(text)
    try:
        if percent is not None:
            share = Fraction(percent[1]) * unique_blocks / 100
            blocks = int(share) if share >= 1 else ceil(share)
        elif text.isascii() and text.isdigit():
            blocks = int(text)
        else:
            blocks = parse_size(text) // block_bytes
    except ValueError as err:
        raise InvalidArgumentError(f"capacity {text!r}: {_EXPECTED}") from err
    if blocks < 1:
        raise InvalidArgumentError(f"capacity {text!r} is less than one block of {block_bytes} bytes")
    return Capacity(text, blocks)
