"""How much memory this process may still take: the machine's free memory and the limits of its control groups."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


_MIB = 1 << 20
SHARE_BYTES_MIN = 64 * _MIB
SHARE_BYTES_MAX = 65536 * _MIB  # who has more to give says so: all of it is taken at the start


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Bytes that may still be taken, and who says so."""

    available_bytes: int
    source: str


def memory_limit(root: Path = Path("/")) -> MemoryLimit | None:
    """The tightest limit that holds for this process now; None where the system tells nothing.

    `root` is where /proc and /sys are looked for. Page cache that a control group could reclaim counts as available.
    """
    limits = [*_machine_limits(root), *_cgroup_limits(root)]
    return min(limits, key=lambda limit: limit.available_bytes, default=None)


def share_bytes(limit: MemoryLimit | None) -> int:
    """What host memory takes where nobody says how much: a quarter of what is left, within SHARE_BYTES_MIN and _MAX."""
    quarter_bytes = 0 if limit is None else limit.available_bytes // 4
    return min(max(SHARE_BYTES_MIN, quarter_bytes // _MIB * _MIB), SHARE_BYTES_MAX)


def _machine_limits(root: Path) -> Iterator[MemoryLimit]:
    for line in _lines(root / "proc/meminfo"):
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            yield MemoryLimit(int(rest.split()[0]) * 1024, "free memory of this machine")


def _cgroup_limits(root: Path) -> Iterator[MemoryLimit]:
    mount = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _limits_up(mount, path, "memory.max", "memory.current", "inactive_file")
            # Beyond this one the kernel slows the whole group down.
            yield from _limits_up(mount, path, "memory.high", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _limits_up(mount / "memory", path, *files)


def _limits_up(mount: Path, path: str, limit_name: str, usage_name: str, cache_name: str) -> Iterator[MemoryLimit]:
    """Limits of a group and of all groups above it. In a container the path may not exist: its mount is the group."""
    group = mount / path.strip("/")
    for folder in (group, *group.parents):
        limit = _number(folder / limit_name)
        if limit is not None:
            used = (_number(folder / usage_name) or 0) - _stat_field(folder / "memory.stat", cache_name)
            yield MemoryLimit(max(0, limit - max(0, used)), f"control group ({folder / limit_name})")
        if folder == mount:
            return


def _number(path: Path) -> int | None:
    for line in _lines(path):
        return int(line) if line.strip().isdigit() else None
    return None


def _stat_field(path: Path, name: str) -> int:
    return next((int(line.split()[1]) for line in _lines(path) if line.startswith(name + " ")), 0)


def _lines(path: Path) -> list[str]:
    """The lines of a small system file, none where it cannot be read: a system without it sets no such limit."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
