"""The index of slots: an LMDB file that is written behind and read only when the tier opens.

    key    slab number (u32), slot number inside the slab (u32), both big-endian
    value  the packed header of part 0 (kvstore.tiers.header)

LMDB ends the process when it meets damaged pages, so the server never opens an index that it did not make itself:
a child process reads the old one out, and a new one is written from what could be verified.
"""

from __future__ import annotations

import logging
import os
import shutil
import struct
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Protocol

import lmdb

from kvstore.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

logger = logging.getLogger(__name__)

INDEX_BYTES_MIN = 128 << 10
READ_SECONDS_MAX = 600

_ROW_KEY = struct.Struct(">II")
_ROW_SIZES = struct.Struct("<II")
_END = b"\xff" * _ROW_SIZES.size
_FILE_NAME = "data.mdb"
_BLOCKS_512 = 512

# Runs alone in a child process: rows to stdout, each behind its two sizes, and a mark that all rows came.
_READ_OUT = f"""
import struct, sys, lmdb
with lmdb.open(sys.argv[1], readonly=True, lock=False) as env, env.begin() as transaction:
    for key, value in transaction.cursor():
        sys.stdout.buffer.write(struct.pack({_ROW_SIZES.format!r}, len(key), len(value)) + key + value)
    sys.stdout.buffer.write({_END!r})
    sys.stdout.buffer.flush()
"""


def row_key(slab: int, slot: int) -> bytes:
    """The key of a slot's row."""
    return _ROW_KEY.pack(slab, slot)


def parse_row_key(key: bytes) -> tuple[int, int] | None:
    """Slab and slot of a row key, None if it is none."""
    if len(key) != _ROW_KEY.size:
        return None
    slab, slot = _ROW_KEY.unpack(key)
    return slab, slot


def row_bytes_max(header_bytes: int) -> int:
    """Real bytes to reckon with for a row: LMDB merges pages only when they are less than a quarter full."""
    return 4 * (header_bytes + 32)


def index_bytes(path: Path) -> int:
    """Real bytes of the index in folder `path`."""
    try:
        return os.stat(path / _FILE_NAME).st_blocks * _BLOCKS_512
    except FileNotFoundError:
        return 0


def read_rows(path: Path) -> list[tuple[bytes, bytes]] | None:
    """All rows of an index that may be damaged; None if it is missing, unreadable, or kills its reader."""
    if not (path / _FILE_NAME).exists() or not sys.executable:
        return None
    command = [sys.executable, "-P", "-c", _READ_OUT, str(path)]
    try:
        child = subprocess.run(command, capture_output=True, timeout=READ_SECONDS_MAX, check=True)
        return list(_parse_rows(memoryview(child.stdout)))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        logger.warning("disk index cannot be read, rebuilding it from the slabs: path=%s cause=%s", path, error)
        return None


def _parse_rows(output: memoryview) -> Iterator[tuple[bytes, bytes]]:
    """Rows of the child's output. Raises ValueError if the output ends early."""
    position = 0
    while output[position:] != _END:
        start = position + _ROW_SIZES.size
        if start > len(output):
            raise ValueError("the list of rows is cut off")
        key_bytes, value_bytes = _ROW_SIZES.unpack_from(output, position)
        position = start + key_bytes + value_bytes
        yield bytes(output[start : start + key_bytes]), bytes(output[start + key_bytes : position])


class SlotIndex(Protocol):
    """What pools and their tier ask of an index."""

    @property
    def file_bytes(self) -> int:
        """Real bytes of the index."""
        ...

    def put(self, rows: Iterable[tuple[bytes, bytes]]) -> bool:
        """Write all rows, or none and return false."""
        ...

    def delete(self, keys: Iterable[bytes]) -> bool:
        """Delete all rows that are there, or none and return false."""
        ...

    def sync(self) -> bool:
        """Return when all rows are on stable storage; false if they are not."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


class Manifest:
    """A new, empty index in folder `path`; an old one there is deleted. Thread-safe, one transaction at a time.

    Rows survive the end of the process at once, a power cut only after sync(). Raises OSError or StorageError.
    """

    def __init__(self, path: Path, bytes_max: int) -> None:
        if path.exists():
            shutil.rmtree(path)
        self._path = path
        self._lock = threading.Lock()
        try:
            # The data directory's lock keeps other processes out; threads are kept apart by ours.
            self._env = lmdb.open(
                str(path), map_size=bytes_max, sync=False, metasync=False, lock=False, readahead=False, mode=0o600
            )
        except lmdb.Error as error:
            raise StorageError(f"cannot make the disk index in {path}: {error}") from error

    @property
    def file_bytes(self) -> int:
        """Real bytes of the index."""
        return index_bytes(self._path)

    def put(self, rows: Iterable[tuple[bytes, bytes]]) -> bool:
        """Write all rows, or none and return false when the index is full or cannot be written."""
        try:
            with self._lock, self._env.begin(write=True) as transaction:
                for key, value in rows:
                    transaction.put(key, value)
        except lmdb.Error:
            return False
        return True

    def delete(self, keys: Iterable[bytes]) -> bool:
        """Delete all rows that are there, or none and return false when the index cannot be written."""
        try:
            with self._lock, self._env.begin(write=True) as transaction:
                for key in keys:
                    transaction.delete(key)
        except lmdb.Error:
            return False
        return True

    def sync(self) -> bool:
        """Return when all rows are on stable storage; false if the system says they are not."""
        try:
            with self._lock:
                self._env.sync(True)
        except lmdb.Error:
            return False
        return True

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._env.close()
