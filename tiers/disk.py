"""The disk tier: blocks in slab files that survive a restart, verified whenever they are read."""

from __future__ import annotations

import logging
import os
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.errors import ClosedError, ConfigError, InvalidLayoutError, LayoutMismatchError, StorageError
from kvstore.tiers.directory import DataDirectory
from kvstore.tiers.disk_opening import DiskSettings, open_files
from kvstore.tiers.disk_pool import DiskPool
from kvstore.tiers.disk_scrub import scrub_step
from kvstore.tiers.file_io import SystemIo
from kvstore.tiers.persistent import RecoveredNamespace
from kvstore.tiers.slab import PARTS_MAX, slot_geometry
from kvstore.tiers.slots import as_slots

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.stats import CodecStats
    from kvstore.tiers.base import RecoveredBlock
    from kvstore.tiers.codecs.coding import PoolCoding
    from kvstore.tiers.codecs.keys import KeyProvider
    from kvstore.tiers.disk_opening import DiskFiles, HintFiles
    from kvstore.tiers.file_io import FileIo
    from kvstore.tiers.persistent import ScrubStep
    from kvstore.types import Slots

logger = logging.getLogger(__name__)

IO_THREADS = 4


class DiskTier:
    """A data directory of fixed capacity, held by one process at a time; a PersistentTier. Made by open(). Thread-safe.

    Blocks written before flush() or close() are found again by the next open(); after a kill or a power cut each
    block is found right, or not at all. Nothing that a disk does wrong while it serves raises: it is a miss or a
    refused store, counted in `faults`.

    Locks: the tier's lock guards the fields below; it is not held while a pool's lock is taken or a file is written.
    """

    def __init__(self, files: DiskFiles) -> None:
        """Takes over what is open and recovered; only what opens it calls this."""
        self._place = files.place
        self._folders = files.folders
        self._services = files.services
        self._secret = files.secret
        self.policy_files = files.policy_files
        self.pin_files = files.pin_files
        self._clearing = threading.Lock()
        self._lock = threading.Lock()
        self._pools: dict[bytes, DiskPool] = {}
        self._recovered: dict[bytes, list[RecoveredBlock]] = {}
        self._closed = False
        self._adopt(files)

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        capacity_bytes: int,
        further_paths: Sequence[str | Path] = (),
        free_floor_bytes: int | None = None,
        io_threads: int = IO_THREADS,
        io: FileIo | None = None,
        keys: KeyProvider | None = None,
    ) -> DiskTier:
        """Lock the directory, recover what it holds, and serve it within `capacity_bytes` of real bytes.

        Slabs are spread over the directory and `further_paths`; see FolderSet for folders that are foreign or not
        there. Whole slabs are dropped, the highest numbers first, where they exceed the capacity. `free_floor_bytes`
        stay free on each file system (None: see SlabVolume); there are `io_threads` for each folder. `keys` are for
        pools that encrypt, and for what was encrypted before. Raises DirectoryLockedError, StorageFormatError,
        ConfigError where a key that encrypted blocks is missing, or StorageError when the directory cannot be used.
        """
        io = io or SystemIo()
        settings = DiskSettings(
            capacity_bytes=capacity_bytes,
            further_paths=tuple(Path(os.path.abspath(further)) for further in further_paths),
            free_floor_bytes=free_floor_bytes,
            io_threads=io_threads,
            keys=keys,
        )
        try:
            with ExitStack() as undo:
                tier = cls(open_files(DataDirectory(Path(path)), settings, io, undo))
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
        return self._services.superblock.current.start_count

    @property
    def capacity_bytes(self) -> int:
        """Real bytes that the directory may take."""
        return self._services.folder.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Real bytes of the slab files, the index, and the files of policy and pins."""
        services = self._services
        return (
            services.folder.file_bytes + services.manifest.file_bytes + sum(files.file_bytes for files in self._hints)
        )

    @property
    def direct_io(self) -> bool:
        """Whether slabs are read and written past the page cache."""
        return self._services.folder.direct_io

    @property
    def faults(self) -> dict[str, int]:
        """What went wrong since the start, by kind (kvstore.tiers.faults.DiskFault)."""
        return self._services.faults.snapshot()

    @property
    def codec_stats(self) -> dict[str, CodecStats]:
        """What was encoded and decoded since the start, by the names of pipelines."""
        return self._services.coded.counts.snapshot()

    @property
    def quarantined_slots(self) -> int:
        """Slots that are not used since their I/O failed."""
        with self._lock:
            return sum(pool.quarantined_slots for pool in self._pools.values())

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
                generation = self._services.superblock.current.generations.get(ns_id, 0)
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

    def use_coding(self, ns_id: bytes, coding: PoolCoding) -> None:
        """How the blocks of a pool are written from now on. Raises ConfigError where there is no key to do it."""
        if coding.pipeline is not None and coding.pipeline.encrypts and self._services.coded.cipher is None:
            raise ConfigError('a pipeline encrypts, but the disk tier has no keys; set "tiers.disk.key_file"')
        with self._lock:
            self._check_open()
            self._pools[ns_id].use_coding(coding)

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

    def untaken(self, ns_id: bytes) -> list[RecoveredBlock]:
        """What `recovered` would hand over now."""
        with self._lock:
            return list(self._recovered.get(ns_id, ()))

    def drop_untaken(self, ns_id: bytes, slots: Slots) -> bool:
        """Drop those of a namespace that lie there, unless they were taken; false if a power cut may bring one back."""
        dropped = set(slots.tolist())
        with self._lock:
            blocks = self._recovered.get(ns_id, [])
            gone = as_slots([block.slot for block in blocks if block.slot in dropped])
            blocks[:] = [block for block in blocks if block.slot not in dropped]
        return not gone.size or self._pools[ns_id].free_for_good(gone)

    def forget(self, ns_id: bytes) -> None:
        """Let go of a namespace's pool, with its slabs; one whose slots are in use stays."""
        with self._lock:
            pool = self._pools.get(ns_id)
            if pool is None or pool.used_slots or pool.quarantined_slots:
                return
            del self._pools[ns_id]
        self._remove_hints(ns_id)
        for slot_range in pool.ranges():
            pool.give_back(slot_range)

    def clear(self, ns_id: bytes) -> None:
        """When this returns, no restart brings back a block written so far. Raises StorageError if it may.

        Slots stay with their holders, who read them until they free them.
        """
        with self._clearing:
            self._check_open()
            try:
                generation = self._services.superblock.clear(ns_id)
            except OSError as error:
                raise StorageError(
                    f"cannot clear namespace {ns_id.hex()} on disk: {error.strerror or error}; try again"
                ) from error
            with self._lock:
                pool = self._pools.get(ns_id)
                if pool is not None:
                    pool.generation = generation
                untaken = self._recovered.pop(ns_id, [])
        self._remove_hints(ns_id)
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
            self._services.superblock.mark_clean()
        except (OSError, StorageError) as error:
            # Without the mark the next start verifies more; nothing is lost that was not lost already.
            logger.warning("disk tier not closed cleanly: path=%s cause=%s", self._place.path, error)
        finally:
            self._services.manifest.close()
            self._services.folder.close()
            for further in self._folders:
                further.close()
            self._place.close()

    def scrub(self, after: int, limit_bytes: int) -> ScrubStep:
        """Read and verify the blocks behind a position, at most `limit_bytes` of slots but at least one.

        The last step also tries whether slots in quarantine can be used again.
        """
        self._check_open()
        with self._lock:
            pools = dict(self._pools)
        step = scrub_step(pools, self._services, after, limit_bytes)
        for block in step.bad:
            self._drop_recovered(block.ns_id, block.slot)
        return step

    def _adopt(self, files: DiskFiles) -> None:
        """Take over the slabs that were there, with the blocks found in them.

        Where there are none of a namespace its slabs go: nobody would come to give them back.
        """
        for slab in files.slabs:
            header = slab.header
            pool = self.pool(header.ns_id, header.part_sizes, header.block_tokens)
            recovered = pool.adopt(slab, files.blocks_of(slab), files.quarantined_in(slab))
            if recovered:
                self._recovered.setdefault(header.ns_id, []).extend(recovered)
        for hints in self._hints:
            hints.keep(self._recovered)
        for ns_id in self._pools.keys() - self._recovered.keys():
            self.forget(ns_id)

    @property
    def _hints(self) -> tuple[HintFiles, ...]:
        return self.policy_files, self.pin_files

    def _remove_hints(self, ns_id: bytes) -> None:
        for hints in self._hints:
            hints.remove(ns_id)

    def _drop_recovered(self, ns_id: bytes, slot: int) -> None:
        """Give up a block from before the start if nobody has taken it yet."""
        with self._lock:
            blocks = self._recovered.get(ns_id, [])
            gone: Slots = as_slots([block.slot for block in blocks if block.slot == slot])
            blocks[:] = [block for block in blocks if block.slot != slot]
        if gone.size:
            self._pools[ns_id].free(gone)

    def _sync(self) -> None:
        synced = [self._services.transfer.sync(slab) for slab in self._services.folder.open_slabs()]
        if not all((*synced, self._services.manifest.sync())):
            raise StorageError(f"cannot flush {self._place.path}: the disk reports errors; check the kernel log")

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the disk tier is closed")
