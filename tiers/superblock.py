"""The superblock: what a data directory knows about itself. Little-endian; on disk: never renumber.

 offset  bytes  field
      0      8  magic "KVSSUPER"
      8      4  format version, 1
     12      4  1 after a clean stop, else 0
     16      8  start count: how often the directory was opened
     24     16  boot id of the machine at the last start
     40      8  number of clear generations n
     48   24*n  for each: ns_id (16), generation (8)
48+24*n      8  XXH3-64 of all bytes before
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore.errors import StorageFormatError
from kvstore.tiers.checksum import DIGEST_BYTES, is_sealed, sealed
from kvstore.tiers.file_io import write_file_durably

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.tiers.file_io import FileIo

SUPERBLOCK_MAGIC = b"KVSSUPER"
SUPERBLOCK_VERSION = 1

_FIXED = struct.Struct("<8sIIQ16sQ")
_GENERATION = struct.Struct("<16sQ")


@dataclass(frozen=True, slots=True)
class Superblock:
    """State of a data directory that must survive a power cut."""

    start_count: int
    boot_id: bytes
    clean: bool
    generations: dict[bytes, int] = field(default_factory=dict)

    def pack(self) -> bytes:
        """The superblock as it lies on disk."""
        head = _FIXED.pack(
            SUPERBLOCK_MAGIC,
            SUPERBLOCK_VERSION,
            int(self.clean),
            self.start_count,
            self.boot_id,
            len(self.generations),
        )
        return sealed(head + b"".join(_GENERATION.pack(*item) for item in sorted(self.generations.items())))


def save_superblock(io: FileIo, path: Path, superblock: Superblock) -> None:
    """Write it durably and atomically. Raises OSError."""
    write_file_durably(io, path, superblock.pack())


def load_superblock(path: Path) -> Superblock | None:
    """The superblock, or None where there is no file. Raises StorageFormatError if it is not one we can read."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    if data[: len(SUPERBLOCK_MAGIC)] != SUPERBLOCK_MAGIC or len(data) < _FIXED.size + DIGEST_BYTES:
        raise StorageFormatError(f"{path} is not a kvstore superblock; choose another data directory")
    _, version, clean, start_count, boot_id, count = _FIXED.unpack_from(data)
    if version != SUPERBLOCK_VERSION:
        raise StorageFormatError(
            f"{path} has format version {version}, this kvstore reads {SUPERBLOCK_VERSION}; "
            "use the version that wrote it or another data directory"
        )
    if not is_sealed(data) or len(data) != _FIXED.size + count * _GENERATION.size + DIGEST_BYTES:
        raise StorageFormatError(f"{path} is damaged; delete the data directory (it is a cache) or choose another")
    generations = dict(_GENERATION.iter_unpack(data[_FIXED.size : -DIGEST_BYTES]))
    return Superblock(start_count, boot_id, bool(clean), generations)
