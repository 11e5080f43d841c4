"""The superblock: what a data directory knows about itself. Little-endian; on disk: never renumber.

 offset  bytes  field
      0      8  magic "KVSSUPER"
      8      4  format version, 3
     12      4  1 after a clean stop, else 0
     16      8  start count: how often the directory was opened
     24     16  boot id of the machine at the last start
     40      8  number of clear generations n
     48      4  number of quarantined slots q
     52      4  number of further folders f
     56      4  number of keys k
     60   24*n  for each: ns_id (16), generation (8)
            8*q  for each: slab number (4), slot number inside the slab (4)
              f  for each: number (4), 1 if it was there at the last start (4), its id (16), path length (4), path
           24*k  for each key that encrypted blocks: its name (8), what tells it from others of that name (16)
              8  XXH3-64 of all bytes before

Older ones are read too: version 2 has no keys, nor their number; version 1 ends behind the clear generations, which
begin at offset 48.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvstore.errors import StorageFormatError
from kvstore.tiers.checksum import DIGEST_BYTES, is_sealed, sealed
from kvstore.tiers.file_io import write_file_durably

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from kvstore.tiers.file_io import FileIo

SUPERBLOCK_MAGIC = b"KVSSUPER"
SUPERBLOCK_VERSION = 3
QUARANTINED_MAX = 1024
KEYS_MAX = 1024

_FIXED = struct.Struct("<8sIIQ16sQ")
_COUNTS = struct.Struct("<II")
_KEY_COUNT = struct.Struct("<I")
_GENERATION = struct.Struct("<16sQ")
_PLACE = struct.Struct("<II")
_FOLDER = struct.Struct("<II16sI")
_KEY = struct.Struct("<8s16s")

Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class FolderRecord:
    """A further folder of slabs: its number among the folders of this store, and where it was at the last start."""

    number: int
    was_present: bool
    folder_id: bytes
    path: str


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """A key that encrypted blocks: its name, and a digest that another key of that name does not have."""

    key_id: bytes
    check: bytes


@dataclass(frozen=True, slots=True)
class Superblock:
    """State of a data directory that must survive a power cut.

    `quarantined` has slots that are not to be used, as slab and slot numbers; at most QUARANTINED_MAX.
    """

    start_count: int
    boot_id: bytes
    clean: bool
    generations: dict[bytes, int] = field(default_factory=dict)
    quarantined: frozenset[Place] = frozenset()
    folders: tuple[FolderRecord, ...] = ()
    keys: tuple[KeyRecord, ...] = ()

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
        body = [_GENERATION.pack(*item) for item in sorted(self.generations.items())]
        body += [_PLACE.pack(*place) for place in sorted(self.quarantined)]
        for folder in self.folders:
            path = os.fsencode(folder.path)
            body.append(_FOLDER.pack(folder.number, int(folder.was_present), folder.folder_id, len(path)) + path)
        body += [_KEY.pack(key.key_id, key.check) for key in self.keys]
        counts = _COUNTS.pack(len(self.quarantined), len(self.folders)) + _KEY_COUNT.pack(len(self.keys))
        return sealed(head + counts + b"".join(body))


class SuperblockFile:
    """The owner of a data directory's superblock: every change is on stable storage before it counts. Thread-safe.

    Each change raises OSError, and has not happened, if it cannot be written.
    """

    def __init__(self, io: FileIo, path: Path, current: Superblock) -> None:
        """Writes `current`."""
        self._io = io
        self._path = path
        self._lock = threading.Lock()
        self._current = current
        save_superblock(io, path, current)

    @property
    def current(self) -> Superblock:
        """What is on disk."""
        return self._current

    def clear(self, ns_id: bytes) -> int:
        """Begin the next clear generation of a namespace, and return it."""
        with self._lock:
            generations = self._current.generations
            generation = generations.get(ns_id, 0) + 1
            self._save(replace(self._current, generations={**generations, ns_id: generation}))
            return generation

    def quarantine(self, places: Iterable[Place]) -> None:
        """Remember slots that are not to be used; what exceeds QUARANTINED_MAX is not remembered."""
        with self._lock:
            known = self._current.quarantined
            new = sorted(set(places) - known)[: QUARANTINED_MAX - len(known)]
            if new:
                self._save(replace(self._current, quarantined=known.union(new)))

    def release(self, places: Iterable[Place]) -> None:
        """Forget slots that may be used again."""
        with self._lock:
            left = self._current.quarantined.difference(places)
            if left != self._current.quarantined:
                self._save(replace(self._current, quarantined=left))

    def note_key(self, key: KeyRecord) -> None:
        """Remember a key before it encrypts a block. Raises OSError, too, where there are KEYS_MAX of them already."""
        with self._lock:
            known = self._current.keys
            if key in known:
                return
            if len(known) == KEYS_MAX:
                raise OSError(errno.ENOSPC, f"{KEYS_MAX} keys encrypted what is there")
            self._save(replace(self._current, keys=(*known, key)))

    def mark_clean(self) -> None:
        """Say that the directory was closed in order."""
        with self._lock:
            self._save(replace(self._current, clean=True))

    def _save(self, changed: Superblock) -> None:
        save_superblock(self._io, self._path, changed)
        self._current = changed


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
    _, version, *_ = _FIXED.unpack_from(data)
    if not 1 <= version <= SUPERBLOCK_VERSION:
        raise StorageFormatError(
            f"{path} has format version {version}, this kvstore reads {SUPERBLOCK_VERSION}; "
            "use the version that wrote it or another data directory"
        )
    try:
        return _unpack(data)
    except (struct.error, ValueError):
        raise StorageFormatError(
            f"{path} is damaged; delete the data directory (it is a cache) or choose another"
        ) from None


def _unpack(data: bytes) -> Superblock:
    """Raises ValueError or struct.error where the bytes are no superblock."""
    if not is_sealed(data):
        raise ValueError("the checksum is wrong")
    _, version, clean, start_count, boot_id, generation_count = _FIXED.unpack_from(data)
    position = _FIXED.size
    place_count = folder_count = key_count = 0
    if version > 1:
        place_count, folder_count = _COUNTS.unpack_from(data, position)
        position += _COUNTS.size
    if version > 2:  # the number is the format's
        (key_count,) = _KEY_COUNT.unpack_from(data, position)
        position += _KEY_COUNT.size
    middle = position + generation_count * _GENERATION.size
    end = middle + place_count * _PLACE.size
    if end > len(data) - DIGEST_BYTES:
        raise ValueError("the length is wrong")
    generations = dict(_GENERATION.iter_unpack(data[position:middle]))
    places = frozenset(_PLACE.iter_unpack(data[middle:end]))
    folders = []
    for _ in range(folder_count):
        number, was_present, folder_id, path_bytes = _FOLDER.unpack_from(data, end)
        start, end = end + _FOLDER.size, end + _FOLDER.size + path_bytes
        folders.append(FolderRecord(number, bool(was_present), folder_id, os.fsdecode(data[start:end])))
    keys = tuple(KeyRecord(*_KEY.unpack_from(data, end + number * _KEY.size)) for number in range(key_count))
    if end + key_count * _KEY.size != len(data) - DIGEST_BYTES:
        raise ValueError("the length is wrong")
    return Superblock(start_count, boot_id, bool(clean), generations, places, tuple(folders), keys)
