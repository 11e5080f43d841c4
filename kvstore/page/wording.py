"""How the page writes numbers."""

from __future__ import annotations

UNKNOWN = "-"

_DECIMAL = ("", " k", " M", " G", " T")
_BINARY = (" B", " KiB", " MiB", " GiB", " TiB")


def percent(ratio: float | None) -> str:
    """A share, 0..1; a dash where nothing is known."""
    return UNKNOWN if ratio is None else f"{ratio:.1%}"


def amount(count: float) -> str:
    """A count with three digits: 999, 1.23 k, 45.6 M."""
    return _scaled(count, 1000, _DECIMAL)


def size(size_bytes: float) -> str:
    """Bytes with three digits: 512 B, 1.50 KiB, 12.0 GiB."""
    return _scaled(size_bytes, 1024, _BINARY)


def duration(seconds: float | None) -> str:
    """A duration from microseconds to seconds; a dash where nothing is known."""
    if seconds is None:
        return UNKNOWN
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def ago(seconds: float) -> str:
    """How long ago something was: now, 40 s ago, 12 min ago."""
    if seconds < 1:
        return "now"
    return f"{seconds:.0f} s ago" if seconds < 120 else f"{seconds / 60:.0f} min ago"


def _scaled(value: float, base: int, names: tuple[str, ...]) -> str:
    power = 0
    while abs(value) >= base and power < len(names) - 1:
        value /= base
        power += 1
    if power == 0:
        return f"{value:.0f}{names[0]}"
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:.{digits}f}{names[power]}"
