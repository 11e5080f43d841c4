"""Opening a store in this process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.clock import SystemClock
from kvstore.codec_config import DISK_KIND, PACKED_BYTES_MIN
from kvstore.config import DISK_BYTES_MIN
from kvstore.errors import ConfigError
from kvstore.store.settings import StoreSettings
from kvstore.store.store import Store
from kvstore.tier_config import DEFAULT_DISK_BYTES
from kvstore.tiers.codecs.keys import FileKeys
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.host import POISON, HostTier
from kvstore.tiers.packed import PackedTier, require_memory
from kvstore.tiers.persistent import find_factory

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from kvstore.clock import Clock
    from kvstore.tiers.persistent import PersistentTier, TierFactory


def open_store(
    path: str | os.PathLike[str] | None = None,
    *,
    host_bytes: int,
    disk_bytes: int | None = None,
    packed_bytes: int = 0,
    further_paths: Sequence[str | os.PathLike[str]] = (),
    free_floor_bytes: int | None = None,
    disk_kind: str = DISK_KIND,
    key_file: str | os.PathLike[str] | None = None,
    settings: StoreSettings | None = None,
    clock: Clock | None = None,
    writer: int | None = None,
) -> Store:
    """Open a store in this process; `kvstore.open`.

    `path` is the data directory, made if it is missing and locked while open. `disk_bytes` is 10 GiB where there is
    a path and 0 where there is none; with 0 there is no disk tier. Blocks are spread over `further_paths` too, within
    the same bytes; `free_floor_bytes` stay free on each file system (by default 1 GiB or 2 %, at most a tenth);
    `packed_bytes` of memory stand in the place of a disk: blocks that leave host memory are kept there as the codecs of
    `settings` store them, until the process ends. `disk_kind` names a tier that another package offers; `key_file` has
    the keys of encryption at rest; `writer` is kept with the blocks that are stored here, a random id if it is not
    given. Raises ConfigError for sizes that cannot be, StorageError where the directory or the memory is not to be had.
    """
    if disk_bytes is None:
        disk_bytes = DEFAULT_DISK_BYTES if path is not None else 0
    _check_sizes(host_bytes, disk_bytes, packed_bytes)
    if disk_bytes and path is None:
        raise ConfigError(f"disk_bytes is {disk_bytes} but there is no path for it; name a data directory")
    if further_paths and not disk_bytes:
        raise ConfigError(
            f"further_paths names {len(further_paths)} folders but there is no disk tier; give a path too"
        )
    clock = SystemClock() if clock is None else clock
    settings = StoreSettings() if settings is None else settings
    if packed_bytes:
        _check_packed(packed_bytes, host_bytes, disk_bytes, settings)
    settings.check_capacities(host_bytes, packed_bytes or disk_bytes)
    host = HostTier(
        host_bytes,
        extent_bytes=settings.extent_bytes,
        freed_fill=POISON if settings.poison_freed else None,
        memory=settings.host_memory,
    )
    disk: PersistentTier | None = None
    try:
        if packed_bytes:
            disk = PackedTier.in_memory(packed_bytes)
        elif disk_bytes and path is not None:
            disk = _disk_opener(disk_kind, key_file, settings)(
                Path(path),
                capacity_bytes=disk_bytes,
                further_paths=[Path(further) for further in further_paths],
                free_floor_bytes=free_floor_bytes,
            )
    except BaseException:
        host.close()
        raise
    return Store(host, disk, settings, clock, writer)


def _check_sizes(host_bytes: int, disk_bytes: int, packed_bytes: int) -> None:
    """Raise ConfigError for sizes that tiers cannot have."""
    sizes = (("host_bytes", host_bytes, 1), ("disk_bytes", disk_bytes, 0), ("packed_bytes", packed_bytes, 0))
    for name, value, least in sizes:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{name} is {value!r}, expected a whole number of bytes, at least {least}")
    if 0 < disk_bytes < DISK_BYTES_MIN:
        raise ConfigError(f"disk_bytes is {disk_bytes}, expected at least {DISK_BYTES_MIN}, or 0 for no disk tier")
    if 0 < packed_bytes < PACKED_BYTES_MIN:
        raise ConfigError(f"packed_bytes is {packed_bytes}, expected at least {PACKED_BYTES_MIN}, or 0 for none")


def _check_packed(packed_bytes: int, host_bytes: int, disk_bytes: int, settings: StoreSettings) -> None:
    """Raise ConfigError where there cannot be packed memory of that size."""
    if disk_bytes:
        raise ConfigError(
            f"packed_bytes is {packed_bytes} and disk_bytes is {disk_bytes}, expected one of them to be 0: packed "
            "memory stands in the place of a disk"
        )
    if any(rule.encryption != "none" for rule in settings.codecs):
        raise ConfigError("codecs encrypt blocks but packed memory has no keys; leave the encryption out")
    require_memory(packed_bytes, host_bytes)


def _disk_opener(kind: str, key_file: str | os.PathLike[str] | None, settings: StoreSettings) -> TierFactory:
    """What opens the disk tier. Raises ConfigError where it would not store blocks as the settings say."""
    encrypting = any(rule.encryption != "none" for rule in settings.codecs)
    if kind == DISK_KIND:
        if encrypting and key_file is None:
            raise ConfigError("codecs encrypt blocks but there is no key_file; name one")
        return partial(DiskTier.open, keys=None if key_file is None else FileKeys(key_file))
    if settings.codecs or key_file is not None:
        raise ConfigError(f"codecs and key_file are for disk_kind {DISK_KIND!r}, but that is {kind!r}; leave them out")
    return find_factory(kind)
