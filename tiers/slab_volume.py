"""One folder of slab files on one file system: how much room there is, and whether its device still answers."""

from __future__ import annotations

import errno
import os
import re
from typing import TYPE_CHECKING

from kvstore.tiers.buffers import PAGE_BYTES, aligned_bytes
from kvstore.tiers.faults import DiskFault
from kvstore.tiers.slab import Slab, unpack_slab_header

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.tiers.faults import FaultCounts
    from kvstore.tiers.file_io import FileIo
    from kvstore.tiers.slab import SlabHeader

FREE_FLOOR_BYTES = 1 << 30
# Slab numbers carry the number of their folder above these bits.
NUMBER_BITS = 24
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)

_FAILURES_MAX = 4
_NAME = re.compile(r"slab-(\d{8,10})\.kvs")
_NAME_UNFINISHED = re.compile(r"slab-\d{8,10}\.kvs\.new")


class SlabVolume:
    """The slab files in one folder. Its owner, SlabFolder, makes one change at a time.

    `free_floor_bytes` stay free on the file system; by default 1 GiB or 2 % of it, whichever is more, but at most a
    tenth of it. `file_bytes` are the real bytes of its slabs.
    """

    def __init__(
        self, io: FileIo, path: Path, faults: FaultCounts, *, number: int = 0, free_floor_bytes: int | None = None
    ) -> None:
        """Raises OSError if the folder cannot be written."""
        self.number = number
        self.path = path
        self.file_bytes = 0
        self._io = io
        self._faults = faults
        self._failures = 0
        self._next_index = 0
        total_bytes = io.space(path).total_bytes
        default_bytes = min(max(FREE_FLOOR_BYTES, total_bytes // 50), total_bytes // 10)
        self.free_floor_bytes = default_bytes if free_floor_bytes is None else free_floor_bytes
        self._flags = os.O_RDWR | (os.O_DIRECT if _direct_io_works(io, path / "probe") else 0)

    @property
    def direct_io(self) -> bool:
        """Whether slabs are read and written past the page cache."""
        return bool(self._flags & os.O_DIRECT)

    @property
    def failing(self) -> bool:
        """Whether its last calls all failed: other folders are used first, until one of its own goes well."""
        return self._failures >= _FAILURES_MAX

    def failed(self) -> None:
        """Count a call that failed for another reason than a lack of space."""
        self._failures += 1

    def worked(self) -> None:
        """Note that its device does answer."""
        self._failures = 0

    def left_bytes(self) -> int:
        """Room on the file system above the floor; below 0 where others have filled it."""
        try:
            return self._io.space(self.path).free_bytes - self.free_floor_bytes
        except OSError:
            self.failed()
            return 0

    def next_number(self) -> int:
        """The number of the next slab: none that was in use since the start."""
        number = self.number << NUMBER_BITS | self._next_index % (1 << NUMBER_BITS)
        self._next_index += 1
        return number

    def found(self) -> list[tuple[int, Path]]:
        """Numbers and paths of the slab files that are there, in order. Unfinished ones are removed. Raises OSError."""
        numbered = []
        for path in self.path.iterdir():
            if _NAME_UNFINISHED.fullmatch(path.name):
                self._io.unlink(path)
            elif match := _NAME.fullmatch(path.name):
                numbered.append((int(match[1]), path))
        numbered.sort()
        own = [number for number, _ in numbered if number >> NUMBER_BITS == self.number]
        self._next_index = max((number % (1 << NUMBER_BITS) + 1 for number in own), default=0)
        return numbered

    def read_header(self, path: Path) -> SlabHeader | None:
        """The header of a slab file; None if it is damaged or cannot be read.

        Raises StorageFormatError if another version of kvstore wrote it.
        """
        page = aligned_bytes(PAGE_BYTES)
        try:
            fd = self._io.open(path, os.O_RDONLY)
            try:
                got = self._io.read(fd, [page], 0)
            finally:
                self._io.close(fd)
        except OSError:
            self._faults.add(DiskFault.READ_ERROR)
            return None
        return unpack_slab_header(page[:got].tobytes(), path)

    def open(self, header: SlabHeader, path: Path) -> Slab:
        """Open a slab file that is there. Raises OSError."""
        return Slab(header, path, self._io.open(path, self._flags), self)

    def make(self, header: SlabHeader, size_bytes: int) -> Slab:
        """A new file of `size_bytes`, which gets its name when it is whole. Raises OSError; `discard` what is left."""
        path = self._slab_path(header)
        try:
            slab = Slab(header, path, self._make_file(header, path, size_bytes), self)
        except OSError as error:
            full = error.errno in NO_SPACE
            self._faults.add(DiskFault.NO_SPACE if full else DiskFault.WRITE_ERROR)
            if not full:
                self.failed()
            raise
        self.worked()
        return slab

    def discard(self, header: SlabHeader) -> bool:
        """Remove what is left of a file that could not be made; false if the system refuses."""
        path = self._slab_path(header)
        return self.unlink(_unfinished(path)) and self.unlink(path)

    def settle(self, slab: Slab) -> None:
        """Sync a slab that will be removed: should a power cut bring its file back, nothing is in it."""
        try:
            self._io.sync(slab.fd)
        except OSError:
            self._faults.add(DiskFault.SYNC_ERROR)

    def close(self, slab: Slab) -> None:
        """Close a slab's file; waits while it is synced."""
        with slab.open_lock:
            slab.removed = True
            self._io.close(slab.fd)

    def unlink(self, path: Path) -> bool:
        """Remove a file; false, and a fault, if the system refuses."""
        try:
            self._io.unlink(path)
        except FileNotFoundError:
            return True
        except OSError:
            self._faults.add(DiskFault.WRITE_ERROR)
            return False
        return True

    def _slab_path(self, header: SlabHeader) -> Path:
        return self.path / f"slab-{header.number:08d}.kvs"

    def _make_file(self, header: SlabHeader, path: Path, size_bytes: int) -> int:
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
        if error.errno in NO_SPACE:
            raise
        return False
    finally:
        io.unlink(probe)
