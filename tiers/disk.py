"""The disk tier: blocks in slab files that survive a restart, verified whenever they are read."""

from __future__ import annotations

import itertools
import logging
import threading
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.errors import ClosedError, InvalidLayoutError, LayoutMismatchError, StorageError
from kvstore.tiers.directory import DataDirectory, boot_id
from kvstore.tiers.disk_pool import DiskPool, DiskServices
from kvstore.tiers.faults import DiskFault, FaultCounts
from kvstore.tiers.file_io import SystemIo
from kvstore.tiers.manifest import Manifest, read_rows, row_key
from kvstore.tiers.policy_files import PolicyFiles
from kvstore.tiers.recovery import blocks_from_rows, blocks_from_slabs, newest_copies
from kvstore.tiers.slab import PARTS_MAX, slot_geometry
from kvstore.tiers.slab_folder import SlabFolder
from kvstore.tiers.slots import as_slots
from kvstore.tiers.superblock import Superblock, load_superblock, save_superblock
from kvstore.tiers.transfer import SlotTransfer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstore.tiers.base import RecoveredBlock
    from kvstore.tiers.file_io import FileIo
    from kvstore.tiers.recovery import FoundBlock
    from kvstore.tiers.slab import Slab

logger = logging.getLogger(__name__)

IO_THREADS = 4
# Sequences carry the start count above these bits, so that they rise over restarts without being written anywhere.
_SEQUENCE_BITS = 40
# LMDB's hard limit, a share of the capacity; the slab folder reckons with less for the rows of its slots.
_INDEX_SHARE = 8
_INDEX_MAP_BYTES_MIN = 1 << 20


@dataclass(frozen=True, slots=True)
class RecoveredNamespace:
    """A namespace that had slabs on disk at the start, and how many of its blocks nobody has taken yet."""

    ns_id: bytes
    part_sizes: tuple[int, ...]
    block_tokens: int
    blocks: int


class DiskTier:
    """A data directory of fixed capacity, held by one process at a time. Made by open(). Thread-safe.

    Blocks written before flush() or close() are found again by the next open(); after a kill or a power cut each
    block is found right, or not at all. Nothing that a disk does wrong while it serves raises: it is a miss or a
    refused store, counted in `faults`.

    Locks: the superblock's lock, held while that file is written, before the tier's lock, which guards the fields
    below; neither is held while a pool's lock is taken.
    """

    def __init__(self, directory: DataDirectory, io: FileIo, superblock: Superblock, services: DiskServices) -> None:
        self._directory = directory
        self._io = io
        self._superblock = superblock
        self._services = services
        self._secret = directory.secret(io)
        self.policy_files = PolicyFiles(io, directory.policy_path, services.faults, services.folder.policy_bytes_max)
        self._superblock_lock = threading.Lock()
        self._lock = threading.Lock()
        self._pools: dict[bytes, DiskPool] = {}
        self._recovered: dict[bytes, list[RecoveredBlock]] = {}
        self._closed = False

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        capacity_bytes: int,
        free_floor_bytes: int | None = None,
        io_threads: int = IO_THREADS,
        io: FileIo | None = None,
    ) -> DiskTier:
        """Lock the directory, recover what it holds, and serve it within `capacity_bytes` of real bytes.

        Whole slabs are dropped, the highest numbers first, where they exceed the capacity. `free_floor_bytes` stay
        free on the file system (None: see SlabFolder). Raises DirectoryLockedError, StorageFormatError, or
        StorageError when the directory cannot be used.
        """
        io = io or SystemIo()
        faults = FaultCounts()
        try:
            with ExitStack() as undo:
                directory = DataDirectory(Path(path))
                undo.callback(directory.close)
                folder = SlabFolder(
                    io, directory.slabs_path, faults, capacity_bytes=capacity_bytes, free_floor_bytes=free_floor_bytes
                )
                undo.callback(folder.close)
                transfer = SlotTransfer(io, faults, io_threads)
                undo.callback(transfer.close)
                tier = _recover(directory, io, folder, transfer, faults)
                undo.pop_all()
        except OSError as error:
            raise StorageError(
                f"cannot use the data directory {path}: {error.strerror or error}; "
                "check its permissions and free space, or choose another"
            ) from error
        return tier

    @property
    def node_secret(self) -> bytes:
        """32 random bytes of this directory, made once."""
        return self._secret

    @property
    def start_count(self) -> int:
        """How often the directory was opened, this time included."""
        return self._superblock.start_count

    @property
    def capacity_bytes(self) -> int:
        """Real bytes that the directory may take."""
        return self._services.folder.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Real bytes of the slab files, the index and the policy files."""
        services = self._services
        return services.folder.file_bytes + services.manifest.file_bytes + self.policy_files.file_bytes

    @property
    def direct_io(self) -> bool:
        """Whether slabs are read and written past the page cache."""
        return self._services.folder.direct_io

    @property
    def faults(self) -> dict[str, int]:
        """What went wrong since the start, by kind (kvstore.tiers.faults.DiskFault)."""
        return self._services.faults.snapshot()

    @property
    def busy_buffers(self) -> int:
        """I/O buffers in use now; 0 when nothing moves."""
        return self._services.transfer.busy_buffers

    def pool(
        self, ns_id: bytes, part_sizes: tuple[int, ...], block_tokens: int, *, bytes_max: int | None = None
    ) -> DiskPool:
        """The pool of a namespace, made at the first call. Raises LayoutMismatchError if it has other blocks.

        From a call with `bytes_max` on it makes no slab that would bring its slabs above so many bytes.
        """
        if len(part_sizes) > PARTS_MAX:
            raise InvalidLayoutError(f"a block has {len(part_sizes)} parts, the disk tier takes at most {PARTS_MAX}")
        with self._lock:
            self._check_open()
            pool = self._pools.get(ns_id)
            if pool is None:
                generation = self._superblock.generations.get(ns_id, 0)
                geometry = slot_geometry(part_sizes, block_tokens)
                pool = self._pools[ns_id] = DiskPool(ns_id, geometry, generation, self._services)
        if (pool.part_sizes, pool.block_tokens) != (part_sizes, block_tokens):
            raise LayoutMismatchError(
                f"namespace {ns_id.hex()} has blocks of {pool.block_tokens} tokens with parts of {pool.part_sizes} "
                f"bytes on disk, not {block_tokens} with {part_sizes}"
            )
        if bytes_max is not None:
            pool.bytes_max = bytes_max
        return pool

    def recovered_namespaces(self) -> list[RecoveredNamespace]:
        """The namespaces that have blocks from before the start which nobody has taken yet."""
        with self._lock:
            return [
                RecoveredNamespace(ns_id, self._pools[ns_id].part_sizes, self._pools[ns_id].block_tokens, len(blocks))
                for ns_id, blocks in self._recovered.items()
            ]

    def recovered(self, ns_id: bytes) -> list[RecoveredBlock]:
        """Hand over the blocks of a namespace from before the start, once; a second call gives none.

        Their slots are used; the caller frees those it does not take. No two are copies of one block.
        """
        with self._lock:
            return self._recovered.pop(ns_id, [])

    def forget(self, ns_id: bytes) -> None:
        """Let go of a namespace's pool, with its slabs; one whose slots are in use stays."""
        with self._lock:
            pool = self._pools.get(ns_id)
            if pool is None or pool.used_slots:
                return
            del self._pools[ns_id]
        self.policy_files.remove(ns_id)
        for slot_range in pool.ranges():
            pool.give_back(slot_range)

    def clear(self, ns_id: bytes) -> None:
        """When this returns, no restart brings back a block written so far. Raises StorageError if it may.

        Slots stay with their holders, who read them until they free them.
        """
        with self._superblock_lock:
            self._check_open()
            generation = self._superblock.generations.get(ns_id, 0) + 1
            changed = replace(self._superblock, generations={**self._superblock.generations, ns_id: generation})
            try:
                save_superblock(self._io, self._directory.superblock_path, changed)
            except OSError as error:
                raise StorageError(
                    f"cannot clear namespace {ns_id.hex()} on disk: {error.strerror or error}; try again"
                ) from error
            with self._lock:
                self._superblock = changed
                pool = self._pools.get(ns_id)
                if pool is not None:
                    pool.generation = generation
                untaken = self._recovered.pop(ns_id, [])
        self.policy_files.remove(ns_id)
        if pool is not None and untaken:
            pool.free(as_slots([block.slot for block in untaken]))

    def flush(self) -> None:
        """Return when all blocks written so far are on stable storage. Raises StorageError if they cannot be."""
        self._check_open()
        self._sync()

    def close(self) -> None:
        """Flush, mark the directory clean, and let other processes in; idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._services.transfer.close()
        try:
            self._sync()
            self._mark_clean()
        except (OSError, StorageError) as error:
            # Without the mark the next start verifies more; nothing is lost that was not lost already.
            logger.warning("disk tier not closed cleanly: path=%s cause=%s", self._directory.path, error)
        finally:
            self._services.manifest.close()
            self._services.folder.close()
            self._directory.close()

    def adopt(self, slabs: Iterable[Slab], found: Iterable[FoundBlock]) -> None:
        """Take over the slabs that were there, with the blocks found in them; only open() calls this."""
        by_slab: dict[int, list[FoundBlock]] = {}
        for block in found:
            by_slab.setdefault(block.slab.number, []).append(block)
        for slab in slabs:
            header = slab.header
            pool = self.pool(header.ns_id, header.part_sizes, header.block_tokens)
            recovered = pool.adopt(slab, by_slab.get(slab.number, ()))
            if recovered:
                self._recovered.setdefault(header.ns_id, []).extend(recovered)
        self.policy_files.keep(self._recovered)

    def _sync(self) -> None:
        synced = [self._services.transfer.sync(slab) for slab in self._services.folder.open_slabs()]
        if not all((*synced, self._services.manifest.sync())):
            raise StorageError(f"cannot flush {self._directory.path}: the disk reports errors; check the kernel log")

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the disk tier is closed")

    def _mark_clean(self) -> None:
        with self._superblock_lock:
            save_superblock(self._io, self._directory.superblock_path, replace(self._superblock, clean=True))


def _recover(
    directory: DataDirectory, io: FileIo, folder: SlabFolder, transfer: SlotTransfer, faults: FaultCounts
) -> DiskTier:
    """Find what the directory holds, write a new index of it, and count the start."""
    before = load_superblock(directory.superblock_path)
    slabs = folder.open_all()
    if before is None:
        # Without clear generations nobody knows which blocks may be served.
        for slab in slabs:
            folder.remove(slab)
        slabs, before = [], Superblock(0, b"\0" * 16, clean=True)
    found, superseded = newest_copies(_find_blocks(directory, before, slabs, transfer, faults))
    with ExitStack() as undo:
        manifest = Manifest(directory.index_path, max(_INDEX_MAP_BYTES_MIN, folder.capacity_bytes // _INDEX_SHARE))
        undo.callback(manifest.close)
        rows = [(row_key(block.slab.number, block.index), block.header.pack()) for block in found]
        if not manifest.put(sorted(rows)):
            faults.add(DiskFault.INDEX_FULL)
        for block in superseded:
            transfer.erase(block.slab, [block.index])
        superblock = replace(before, start_count=before.start_count + 1, boot_id=boot_id(), clean=False)
        save_superblock(io, directory.superblock_path, superblock)
        next_sequence = itertools.count(superblock.start_count << _SEQUENCE_BITS).__next__
        services = DiskServices(folder, transfer, manifest, faults, next_sequence)
        tier = DiskTier(directory, io, superblock, services)
        tier.adopt(slabs, found)
        undo.pop_all()
    return tier


def _find_blocks(
    directory: DataDirectory, before: Superblock, slabs: list[Slab], transfer: SlotTransfer, faults: FaultCounts
) -> list[FoundBlock]:
    """From the index if it can be trusted, else from the headers.

    After another boot without a clean stop the index may have any mixture of old and new pages.
    """
    trusted = before.clean or before.boot_id == boot_id()
    rows = read_rows(directory.index_path) if trusted and slabs else None
    if rows is not None:
        return blocks_from_rows(rows, {slab.number: slab for slab in slabs}, before.generations)
    if slabs:
        faults.add(DiskFault.LOST_INDEX)
    return blocks_from_slabs(slabs, transfer, before.generations)
