"""Sizes and durations as people write them: "64GiB" and "250ms" become bytes and seconds at the edge, once."""

from __future__ import annotations

import re
from fractions import Fraction

_UNIT_BYTES = {
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_UNIT_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SHOWN_UNITS = ("TiB", "GiB", "MiB", "KiB")
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", re.ASCII)


def parse_size(text: str) -> int:
    """Bytes of "4096", "64MiB" or "1.5GB"; raises ValueError that says what is expected."""
    number, unit = _split(text, "a size such as 67108864, 64MiB or 1GB")
    if unit and unit not in _UNIT_BYTES:
        raise ValueError(f"unknown unit {unit!r}, expected one of {', '.join(_UNIT_BYTES)}")
    size = Fraction(number) * _UNIT_BYTES[unit or "B"]
    if size.denominator != 1:
        raise ValueError("expected a whole number of bytes")
    return size.numerator


def parse_duration(text: str) -> float:
    """Seconds of "2", "2.5s", "250ms", "5m", "12h" or "1d"; raises ValueError that says what is expected."""
    number, unit = _split(text, "a duration such as 250ms, 2s or 5m")
    if unit and unit not in _UNIT_SECONDS:
        raise ValueError(f"unknown unit {unit!r}, expected one of {', '.join(_UNIT_SECONDS)}")
    return float(number) * _UNIT_SECONDS[unit or "s"]


def format_size(size_bytes: int) -> str:
    """The shortest exact text that parse_size reads back as the same number."""
    for unit in _SHOWN_UNITS:
        if size_bytes and size_bytes % _UNIT_BYTES[unit] == 0:
            return f"{size_bytes // _UNIT_BYTES[unit]}{unit}"
    return str(size_bytes)


def _split(text: str, expected: str) -> tuple[str, str]:
    found = _QUANTITY.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"expected {expected}")
    return found[1], found[2]
