"""Settings of where blocks lie; a part of kvstore.config."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.codec_config import DISK_KIND, PackedConfig
from kvstore.quantities import format_size
from kvstore.quota_config import SIZE_BYTES_MAX
from kvstore.setting_values import Kind, setting

DEFAULT_DISK_BYTES = 10 * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class HostConfig:
    """The host tier."""

    capacity_bytes: int | None = setting(
        None,
        Kind.SIZE,
        "Host memory for blocks; more than the machine or its cgroup has is refused.",
        minimum=2**20,
        maximum=SIZE_BYTES_MAX,
        auto="a quarter of what the machine and its control groups leave at start, 64MiB to 64GiB",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskConfig:
    """The disk tier."""

    capacity_bytes: int | None = setting(
        None,
        Kind.SIZE,
        "Disk space under data_dir, all files counted, at least 1MiB; 0: no disk tier.",
        maximum=SIZE_BYTES_MAX,
        auto=f"{format_size(DEFAULT_DISK_BYTES)} with data_dir, else 0",
    )
    further_dirs: tuple[str, ...] = setting(
        (), Kind.LIST, "Further folders, best on other devices, over which blocks are spread within that space."
    )
    free_floor_bytes: int | None = setting(
        None,
        Kind.SIZE,
        "What stays free on each file system: below it no file of blocks is made.",
        maximum=SIZE_BYTES_MAX,
        auto="1GiB or 2 %, whichever is more, at most a tenth",
    )
    key_file: str = setting(
        "", Kind.TEXT, "File with the keys of encryption at rest, the newest first; others may not read it."
    )
    kind: str = setting(DISK_KIND, Kind.TEXT, "Which tier: slabs, or one that another package offers by that name.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TiersConfig:
    """Where blocks lie."""

    host: HostConfig = field(default_factory=HostConfig)
    packed: PackedConfig = field(default_factory=PackedConfig)
    disk: DiskConfig = field(default_factory=DiskConfig)
