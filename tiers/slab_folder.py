"""The folder of slab files: which there are, and that all together never exceed the capacity in real bytes."""

from __future__ import annotations

import errno
import os
import re
import threading
from typing import TYPE_CHECKING

from kvstore.tiers.buffers import PAGE_BYTES, aligned_bytes, whole_pages
from kvstore.tiers.faults import DiskFault
from kvstore.tiers.header import packed_bytes
from kvstore.tiers.manifest import INDEX_BYTES_MIN, row_bytes_max
from kvstore.tiers.slab import Slab, SlabHeader, slab_bytes, slot_geometry, unpack_slab_header

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.tiers.faults import FaultCounts
    from kvstore.tiers.file_io import FileIo
    from kvstore.tiers.slab import SlotGeometry

SLAB_BYTES_MAX = 64 << 20
FREE_FLOOR_BYTES = 64 << 20
# Superblock, secret and lock, with their temporary files.
METADATA_BYTES = 128 << 10
# What policy files may take of the capacity: 40 bytes for each run of blocks, twice while one is replaced.
POLICY_SHARE = 128

_NAME = re.compile(r"slab-(\d{8,10})\.kvs")
_NAME_UNFINISHED = re.compile(r"slab-\d{8,10}\.kvs\.new")
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class SlabFolder:
    """Makes, finds and removes slab files within `capacity_bytes`. Thread-safe: one change at a time.

    The capacity covers the slabs, what the index may need for their slots, and the other files of the data
    directory. `free_floor_bytes` stay free on the file system; by default 64 MiB or 1 % of it, whichever is more,
    but at most a tenth of it.
    """

    def __init__(
        self, io: FileIo, path: Path, faults: FaultCounts, *, capacity_bytes: int, free_floor_bytes: int | None
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self._io = io
        self._path = path
        self._faults = faults
        self._lock = threading.Lock()
        self._next_number = 0
        self._open_slabs: dict[int, Slab] = {}
        self._closed = False
        self._file_bytes = 0
        self._row_bytes = INDEX_BYTES_MIN
        total_bytes = io.space(path).total_bytes
        default_bytes = min(max(FREE_FLOOR_BYTES, total_bytes // 100), total_bytes // 10)
        self._free_floor_bytes = default_bytes if free_floor_bytes is None else free_floor_bytes
        self._flags = os.O_RDWR | (os.O_DIRECT if _direct_io_works(io, path / "probe") else 0)

    @property
    def direct_io(self) -> bool:
        """Whether slabs are read and written past the page cache."""
        return bool(self._flags & os.O_DIRECT)

    @property
    def policy_bytes_max(self) -> int:
        """Bytes that no slab is made of, for the files of the eviction policy."""
        return self.capacity_bytes // POLICY_SHARE

    @property
    def file_bytes(self) -> int:
        """Real bytes of all slab files."""
        return self._file_bytes

    def create(self, ns_id: bytes, geometry: SlotGeometry, bytes_max: int | None = None) -> Slab | None:
        """A new, preallocated slab of at most `bytes_max`.

        None when that, the capacity or the file system has no room for one, and after close().
        """
        with self._lock:
            slot_count = 0 if self._closed else self._affordable_slots(geometry)
            if bytes_max is not None:
                slot_count = min(slot_count, (bytes_max - slab_bytes(geometry, 0)) // geometry.slot_bytes)
            if slot_count <= 0:
                return None
            header = SlabHeader(self._next_number, ns_id, slot_count, geometry.part_sizes, geometry.block_tokens)
            path = self._path / f"slab-{header.number:08d}.kvs"
            self._next_number += 1
            self._charge(geometry, slot_count)
            try:
                slab = Slab(header, path, self._make_file(header, path, slab_bytes(geometry, slot_count)))
            except OSError as error:
                self._faults.add(DiskFault.NO_SPACE if error.errno in _NO_SPACE else DiskFault.WRITE_ERROR)
                if self._unlink(_unfinished(path)) and self._unlink(path):
                    self._charge(geometry, -slot_count)
                return None
            self._open_slabs[slab.number] = slab
            return slab

    def remove(self, slab: Slab) -> None:
        """Delete a slab's file; a no-op after close(). Its bytes stay charged if the system refuses."""
        with self._lock:
            if self._open_slabs.pop(slab.number, None) is None:
                return
            _close_slab(self._io, slab)
            if self._unlink(slab.path):
                self._charge(slab.geometry, -slab.header.slot_count)

    def close(self) -> None:
        """Close all slab files; from now on no file is made or removed. Idempotent."""
        with self._lock:
            self._closed = True
            for slab in self._open_slabs.values():
                _close_slab(self._io, slab)
            self._open_slabs.clear()

    def open_slabs(self) -> tuple[Slab, ...]:
        """The slabs that are open now."""
        with self._lock:
            return tuple(self._open_slabs.values())

    def open_all(self) -> list[Slab]:
        """The slabs that are there, by number. Damaged ones and those beyond the capacity are deleted.

        Raises OSError, or StorageFormatError if another version wrote one.
        """
        slabs: list[Slab] = []
        numbered = []
        for path in self._path.iterdir():
            if _NAME_UNFINISHED.fullmatch(path.name):
                self._io.unlink(path)
            elif match := _NAME.fullmatch(path.name):
                numbered.append((int(match[1]), path))
        for number, path in sorted(numbered):
            self._next_number = number + 1
            slab = self._open_slab(number, path)
            if slab is not None:
                slabs.append(slab)
            else:
                self._faults.add(DiskFault.DROPPED_SLAB)
                self._io.unlink(path)
        return slabs

    def _open_slab(self, number: int, path: Path) -> Slab | None:
        header = self._read_header(path)
        if header is None or header.number != number:
            return None
        geometry = slot_geometry(header.part_sizes, header.block_tokens)
        if _charged_bytes(geometry, header.slot_count) > self._left_bytes():
            return None
        slab = Slab(header, path, self._io.open(path, self._flags))
        slab.written[:] = True
        self._charge(geometry, header.slot_count)
        self._open_slabs[number] = slab
        return slab

    def _read_header(self, path: Path) -> SlabHeader | None:
        fd = self._io.open(path, os.O_RDONLY)
        page = aligned_bytes(PAGE_BYTES)
        try:
            got = self._io.read(fd, [page], 0)
        except OSError:
            self._faults.add(DiskFault.READ_ERROR)
            return None
        finally:
            self._io.close(fd)
        return unpack_slab_header(page[:got].tobytes(), path)

    def _make_file(self, header: SlabHeader, path: Path, size_bytes: int) -> int:
        """The file gets its name when it is whole. Returns the descriptor."""
        page = aligned_bytes(PAGE_BYTES)
        packed = header.pack()
        page[: len(packed)] = memoryview(packed)
        fd = self._io.open(_unfinished(path), self._flags | os.O_CREAT | os.O_TRUNC)
        try:
            self._io.allocate(fd, size_bytes)
            if self._io.write(fd, [page], 0) != PAGE_BYTES:
                raise OSError(errno.EIO, "short write")
            self._io.sync(fd)
            self._io.replace(_unfinished(path), path)
        except OSError:
            self._io.close(fd)
            raise
        return fd

    def _affordable_slots(self, geometry: SlotGeometry) -> int:
        """Slots of the next slab: the usual size, at least one slot, at most what capacity and file system leave."""
        usual_bytes = min(SLAB_BYTES_MAX, whole_pages(self.capacity_bytes // 16)) - PAGE_BYTES
        usual_count = max(1, usual_bytes // geometry.slot_bytes)
        empty_bytes = _charged_bytes(geometry, 0)
        slot_bytes = _charged_bytes(geometry, 1) - empty_bytes
        allowed_count = max(0, min(usual_count, (self._left_bytes() - empty_bytes) // slot_bytes))
        fitting_count = max(0, min(allowed_count, (self._file_system_left_bytes() - empty_bytes) // slot_bytes))
        if fitting_count < allowed_count:
            self._faults.add(DiskFault.FREE_FLOOR)
        return fitting_count

    def _file_system_left_bytes(self) -> int:
        try:
            return self._io.space(self._path).free_bytes - self._free_floor_bytes
        except OSError:
            return 0

    def _left_bytes(self) -> int:
        return self.capacity_bytes - METADATA_BYTES - self.policy_bytes_max - self._row_bytes - self._file_bytes

    def _charge(self, geometry: SlotGeometry, slot_count: int) -> None:
        """Charge a slab, or refund it where `slot_count` is negative."""
        sign = 1 if slot_count > 0 else -1
        file_bytes = slab_bytes(geometry, abs(slot_count))
        self._file_bytes += sign * file_bytes
        self._row_bytes += sign * (_charged_bytes(geometry, abs(slot_count)) - file_bytes)

    def _unlink(self, path: Path) -> bool:
        try:
            self._io.unlink(path)
        except FileNotFoundError:
            return True
        except OSError:
            self._faults.add(DiskFault.WRITE_ERROR)
            return False
        return True


def _charged_bytes(geometry: SlotGeometry, slot_count: int) -> int:
    """What a slab costs: its file, a page for the file's extent tree, and the index rows of its slots."""
    rows_bytes = slot_count * row_bytes_max(packed_bytes(geometry.block_tokens))
    return slab_bytes(geometry, slot_count) + PAGE_BYTES + rows_bytes


def _close_slab(io: FileIo, slab: Slab) -> None:
    with slab.open_lock:
        slab.removed = True
        io.close(slab.fd)


def _unfinished(path: Path) -> Path:
    return path.with_name(path.name + ".new")


def _direct_io_works(io: FileIo, probe: Path) -> bool:
    """Whether aligned O_DIRECT writes and reads work here: some file systems refuse them only at the first call.

    Raises OSError if the folder cannot be written at all.
    """
    io.close(io.open(probe, os.O_RDWR | os.O_CREAT))
    page = aligned_bytes(PAGE_BYTES)
    try:
        fd = io.open(probe, os.O_RDWR | os.O_DIRECT)
        try:
            return io.write(fd, [page], 0) == PAGE_BYTES == io.read(fd, [page], 0)
        finally:
            io.close(fd)
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise
        return False
    finally:
        io.unlink(probe)
