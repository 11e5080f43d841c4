"""Packed blocks in memory: the slabs, codecs and checks of the disk tier, in memory that ends with the process.

Blocks in host memory are read in place by clients, so what is packed lies apart. A slab is a memfd (memfd_create(2)):
no file system has a name for it, so however the process ends nothing is left to sweep, and no limit of /dev/shm holds.
"""

from __future__ import annotations

import itertools
import os
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.errors import ConfigError, StorageError
from kvstore.tiers.coded_transfer import CodedTransfer
from kvstore.tiers.directory import SECRET_BYTES
from kvstore.tiers.disk import IO_THREADS, DiskTier
from kvstore.tiers.disk_opening import DiskFiles
from kvstore.tiers.disk_services import DiskServices
from kvstore.tiers.faults import FaultCounts
from kvstore.tiers.file_io import FileSystemSpace, SystemIo
from kvstore.tiers.memory_limit import memory_limit
from kvstore.tiers.slab_folder import SlabFolder
from kvstore.tiers.slab_volume import SlabVolume
from kvstore.tiers.superblock import Superblock, SuperblockFile
from kvstore.tiers.transfer import SlotTransfer

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

_PLACE = Path("packed memory")
_NO_BOOT = bytes(16)


class PackedTier(DiskTier):
    """A PersistentTier whose blocks end with the process: nothing is found again, and flush() has nothing to do."""

    @classmethod
    def in_memory(cls, capacity_bytes: int, *, io_threads: int = IO_THREADS) -> PackedTier:
        """Serve `capacity_bytes` of memory, taken slab by slab. Raises StorageError where there are no memory files."""
        files = MemoryIo(capacity_bytes)
        try:
            with ExitStack() as undo:
                undo.callback(files.close_all)
                tier = cls(_open(files, capacity_bytes, io_threads, undo))
                undo.pop_all()
        except OSError as error:
            raise StorageError(f"cannot make files in memory: {error.strerror or error}") from error
        return tier

    @property
    def label(self) -> str:
        """What statistics call it; see VolatileTier."""
        return "packed"

    def flush(self) -> None:
        """Nothing written here is found again, so there is nothing to wait for."""
        self._check_open()


def require_memory(packed_bytes: int, host_bytes: int) -> None:
    """Raise ConfigError where the machine and its control groups do not leave so much, before any of it is taken."""
    limit = memory_limit()
    if limit is not None and packed_bytes + host_bytes > limit.available_bytes:
        raise ConfigError(
            f"packed_bytes is {packed_bytes} beside {host_bytes} bytes of host memory, more than the "
            f"{limit.available_bytes} that the {limit.source} leaves; lower one, or raise the limit"
        )


class MemoryIo(SystemIo):
    """Files in memory, by paths that no file system knows. Thread-safe. The last descriptor frees a file's bytes."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._files: dict[Path, int] = {}

    def open(self, path: Path, flags: int) -> int:
        """A descriptor of its own; O_DIRECT means nothing here."""
        with self._lock:
            if path not in self._files:
                if not flags & os.O_CREAT:
                    raise FileNotFoundError(path)
                self._files[path] = os.memfd_create(f"kvstore-{path.name}", os.MFD_CLOEXEC)
            elif flags & os.O_TRUNC:
                os.ftruncate(self._files[path], 0)
            return os.dup(self._files[path])

    def unlink(self, path: Path) -> None:
        """Forget the name."""
        with self._lock:
            fd = self._files.pop(path, None)
        if fd is None:
            raise FileNotFoundError(path)
        os.close(fd)

    def replace(self, source: Path, target: Path) -> None:
        """Give a file another name, over one that has it."""
        with self._lock:
            before = self._files.pop(target, None)
            self._files[target] = self._files.pop(source)
        if before is not None:
            os.close(before)

    def sync(self, fd: int) -> None:
        """Memory has nothing more stable than itself."""

    def space(self, path: Path) -> FileSystemSpace:  # noqa: ARG002  # that of FileIo
        """All of the capacity, which the owner of the slabs keeps account of."""
        return FileSystemSpace(self._capacity_bytes, self._capacity_bytes)

    def close_all(self) -> None:
        """Forget all names; idempotent."""
        with self._lock:
            files, self._files = self._files, {}
        for fd in files.values():
            os.close(fd)


class MemoryPlace:
    """Stands where a data directory does: files in memory, which go at the end."""

    path = _PLACE

    def __init__(self, files: MemoryIo) -> None:
        self._files = files

    def close(self) -> None:
        """Free what is there still; idempotent."""
        self._files.close_all()


class NoIndex:
    """Stands where the index of slots does: nothing is to be found again."""

    file_bytes = 0

    def put(self, rows: Iterable[tuple[bytes, bytes]]) -> bool:  # noqa: ARG002  # those of SlotIndex
        """Nothing to write."""
        return True

    def delete(self, keys: Iterable[bytes]) -> bool:  # noqa: ARG002
        """Nothing to delete."""
        return True

    def sync(self) -> bool:
        """Nothing to wait for."""
        return True

    def close(self) -> None:
        """Nothing to close."""


class MemoryHints:
    """Stands where the files of policies and pins do: what was saved last of each namespace. Thread-safe."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._lock = threading.Lock()
        self._saved: dict[bytes, bytes] = {}

    @property
    def file_bytes(self) -> int:
        """Bytes of all that is saved."""
        with self._lock:
            return sum(map(len, self._saved.values()))

    def keep(self, ns_ids: Container[bytes]) -> None:
        """Forget what is of other namespaces."""
        with self._lock:
            self._saved = {ns_id: content for ns_id, content in self._saved.items() if ns_id in ns_ids}

    def load(self, ns_id: bytes) -> bytes | None:
        """What was saved last of a namespace; None where there is nothing."""
        with self._lock:
            return self._saved.get(ns_id)

    def save(self, ns_id: bytes, content: bytes) -> bool:
        """Replace it; false, and the old one is there still, where it has no room."""
        with self._lock:
            others = sum(len(saved) for name, saved in self._saved.items() if name != ns_id)
            if others + len(content) > self.bytes_max:
                return False
            self._saved[ns_id] = content
        return True

    def refuse(self) -> None:
        """What was of no use to its reader stays until it is replaced."""

    def remove(self, ns_id: bytes) -> None:
        """Forget what was saved of a namespace."""
        with self._lock:
            self._saved.pop(ns_id, None)


def _open(io: MemoryIo, capacity_bytes: int, io_threads: int, undo: ExitStack) -> DiskFiles:
    """An empty tier. Raises OSError."""
    faults = FaultCounts()
    volume = SlabVolume(io, _PLACE, faults, free_floor_bytes=0)
    folder = SlabFolder([volume], faults, capacity_bytes=capacity_bytes)
    transfer = SlotTransfer(io, faults, io_threads)
    undo.callback(transfer.close)
    next_sequence = itertools.count(1).__next__
    coded = CodedTransfer(transfer, io, None, next_sequence)
    superblock = SuperblockFile(io, _PLACE / "superblock", Superblock(1, _NO_BOOT, clean=False))
    services = DiskServices(folder, transfer, coded, NoIndex(), superblock, faults, next_sequence)
    policies, pins = (MemoryHints(folder.policy_bytes_max // 2) for _ in range(2))
    return DiskFiles(MemoryPlace(io), (), services, os.urandom(SECRET_BYTES), policies, pins, [], {})
