"""The slots of one namespace on disk."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvstore.tiers.base import RecoveredBlock
from kvstore.tiers.faults import DiskFault
from kvstore.tiers.manifest import row_key
from kvstore.tiers.slab import slab_bytes
from kvstore.tiers.slots import HolderTable, SlotMap, as_slots
from kvstore.tiers.transfer import IO_BYTES_MAX, Occupant

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvstore.tiers.base import BlockIdentity, Bytes1D, Bytes2D, Mask, SlotRange
    from kvstore.tiers.faults import FaultCounts
    from kvstore.tiers.manifest import Manifest
    from kvstore.tiers.recovery import FoundBlock
    from kvstore.tiers.slab import Slab, SlotGeometry
    from kvstore.tiers.slab_folder import SlabFolder
    from kvstore.tiers.slab_volume import SlabVolume
    from kvstore.tiers.slots import SlotRun
    from kvstore.tiers.superblock import SuperblockFile
    from kvstore.tiers.transfer import SlotTransfer
    from kvstore.types import Slots

ERASE_SLOTS_MAX = 64
RETRIED_SLOTS_MAX = 256


@dataclass(frozen=True, slots=True)
class DiskServices:
    """What all pools of a disk tier use together."""

    folder: SlabFolder
    transfer: SlotTransfer
    manifest: Manifest
    superblock: SuperblockFile
    faults: FaultCounts
    next_sequence: Callable[[], int]


class DiskPool:
    """The slots of one namespace on disk; implements PersistentPool (persistent.py). Thread-safe.

    A block goes through: delete the slot's index row, write the slot, put the index row. So a row never speaks of
    bytes that are not there yet, and whatever a crash leaves is found out by the header.
    I/O holds no lock: slots belong to their caller, and slabs with used slots never go away.
    """

    def __init__(self, ns_id: bytes, geometry: SlotGeometry, generation: int, services: DiskServices) -> None:
        self.generation = generation
        self.bytes_max: int | None = None  # of all slabs; those that are there already stay
        self._ns_id = ns_id
        self._geometry = geometry
        self._services = services
        self._transfer = services.transfer
        self._all_parts = tuple(range(len(geometry.part_sizes)))
        self._grow_lock = threading.Lock()
        self._lock = threading.Lock()
        self._slots = SlotMap()
        self._table: HolderTable[Slab] = HolderTable()
        self._quarantined: set[int] = set()
        self._firsts: dict[SlabVolume, set[int]] = {volume: set() for volume in services.folder.volumes}
        self._turn = 0

    @property
    def part_sizes(self) -> tuple[int, ...]:
        """Exact bytes of each part of a block."""
        return self._geometry.part_sizes

    @property
    def block_tokens(self) -> int:
        """Tokens of each block."""
        return self._geometry.block_tokens

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slab that a block takes up."""
        return self._geometry.slot_bytes

    @property
    def reserved_bytes(self) -> int:
        """Real bytes of the pool's slab files."""
        return sum(self.range_bytes(slot_range) for slot_range in self.ranges())

    @property
    def at_limit(self) -> bool:
        """Whether its own limit, not the tier's capacity, keeps the pool from another slab."""
        if self.bytes_max is None:
            return False
        return self.bytes_max - self.reserved_bytes < slab_bytes(self._geometry, 1)

    @property
    def free_slots(self) -> int:
        """Slots that allocate() can hand out without another slab."""
        with self._lock:
            return self._slots.free_slots

    @property
    def used_slots(self) -> int:
        """Slots handed out and not freed, and slots in quarantine."""
        with self._lock:
            return self._slots.used_slots

    @property
    def quarantined_slots(self) -> int:
        """Slots that were freed but whose I/O had failed: they are not used before a scrub finds them to work."""
        return len(self._quarantined)

    @property
    def slabs(self) -> tuple[Slab, ...]:
        """The slab files of this pool."""
        return self._table.holders

    def allocate(self, count: int) -> Slots:
        """Up to `count` slots, ascending; fewer or none when the tier or the file system is full.

        May create slab files (an fallocate of at most 64 MiB each), but never waits for space.
        """
        while self.free_slots < count and self._grow(count):
            pass
        with self._lock:
            return self._take(count)

    def free(self, slots: Slots) -> None:
        """Give slots back. No restart finds their blocks again; slots whose I/O failed go into quarantine.

        Where others have filled a file system down to its floor, slabs in which nothing is used are deleted.
        """
        slots = as_slots(slots)
        self._release(slots, self._erase_all(slots))

    def free_for_good(self, slots: Slots) -> bool:
        """Like `free`, but no power cut brings their blocks back either; false if one may.

        Costs a sync of each slab concerned, which is much more than the rest.
        """
        slots = as_slots(slots)
        usable = self._erase_all(slots)
        synced = self._transfer.map(self._transfer.sync, {run.holder for run in self._table.runs(slots)})
        self._release(slots, usable)
        return all(synced)

    def ranges(self) -> tuple[SlotRange, ...]:
        """The slabs the pool holds now."""
        with self._lock:
            return self._slots.ranges()

    def range_bytes(self, slot_range: SlotRange) -> int:
        """Real bytes of a slab's file."""
        return slab_bytes(self._geometry, slot_range.count)

    def is_kept(self, slot_range: SlotRange) -> bool:
        """Whether a slot of one slab is in quarantine, which would be forgotten with the slab."""
        slots = range(slot_range.first, slot_range.first + slot_range.count)
        with self._lock:
            return any(slot in slots for slot in self._quarantined)

    def give_back(self, slot_range: SlotRange) -> bool:
        """Delete one slab if all its slots are free; false and unchanged otherwise."""
        with self._lock:
            if not self._slots.remove(slot_range):
                return False
            slab = self._table.holder_of(slot_range)
            self._table = self._table.without(slot_range)
            self._firsts[slab.volume].discard(slot_range.first)
        self._services.folder.remove(slab)
        return True

    def write(self, slots: Slots, identities: Sequence[BlockIdentity], sources: Sequence[Sequence[Bytes1D]]) -> Mask:
        """Write blocks; sources[i] has one readable array for each part of block i. True where a block is stored.

        A slot whose write failed still belongs to the caller, who frees it.
        """
        slots = as_slots(slots)
        assert len(slots) == len(identities) == len(sources), (len(slots), len(identities), len(sources))
        generation = self.generation
        self._vacate(slots)

        def write_piece(piece: SlotRun[Slab]) -> tuple[list[int], list[bytes | None]]:
            occupants = [
                Occupant(identity, self._services.next_sequence(), generation) for identity in identities[piece.places]
            ]
            headers = self._transfer.write(piece, occupants, sources[piece.places])
            return [occupant.sequence for occupant in occupants], headers

        pieces = list(self._transfer.pieces(self._table.runs(slots)))
        stored = np.zeros(len(slots), dtype=np.bool_)
        rows: list[tuple[bytes, bytes]] = []
        outcomes = self._transfer.map(write_piece, pieces)
        for piece, (_, headers) in zip(pieces, outcomes, strict=True):
            rows.extend((key, header) for key, header in zip(_row_keys(piece), headers, strict=True) if header)
            stored[piece.places] = [header is not None for header in headers]
        if rows and not self._services.manifest.put(rows):
            self._services.faults.add(DiskFault.INDEX_FULL, len(rows))
            stored[:] = False
        for piece, (sequences, _) in zip(pieces, outcomes, strict=True):
            piece.holder.sequences[piece.indices] = np.where(stored[piece.places], sequences, 0)
            piece.holder.generations[piece.indices] = generation
        return stored

    def read(
        self, slots: Slots, identities: Sequence[BlockIdentity], rows: Bytes2D, *, part: int | None = None
    ) -> Mask:
        """Read blocks into rows: [n, part_bytes] of one part, or [n, block_bytes] with all parts one after the other.

        True only where the slot holds exactly this block, as last written, with a right checksum. Rows are undefined
        where the answer is false.
        """
        slots = as_slots(slots)
        parts = self._all_parts if part is None else (part,)
        width = sum(self.part_sizes[number] for number in parts)
        assert len(slots) == len(identities), (len(slots), len(identities))
        assert rows.shape == (len(slots), width), (rows.shape, len(slots), width)

        def read_piece(piece: SlotRun[Slab]) -> Mask:
            sequences = piece.holder.sequences[piece.indices].tolist()
            generations = piece.holder.generations[piece.indices].tolist()
            occupants = list(map(Occupant, identities[piece.places], sequences, generations))
            return self._transfer.read(piece, occupants, rows[piece.places], parts)

        runs = self._table.runs(slots)
        whole = parts == self._all_parts
        pieces = list(self._transfer.pieces(runs) if whole else (one for run in runs for one in run.cut(1)))
        good = np.zeros(len(slots), dtype=np.bool_)
        for piece, mask in zip(pieces, self._transfer.map(read_piece, pieces), strict=True):
            good[piece.places] = mask
        return good

    def slot_of(self, slab: Slab, index: int) -> int | None:
        """The pool's number of a slab's slot; None if the slab is not its own (any more)."""
        table = self._table
        if slab not in table.holders:
            return None
        return table.ranges[table.holders.index(slab)].first + index

    def retry_quarantined(self) -> int:
        """Write and read again slots in quarantine, at most RETRIED_SLOTS_MAX; those that work are free from then on.

        Returns how many.
        """
        with self._grow_lock:  # one thread at a time
            return self._retry_quarantined()

    def _retry_quarantined(self) -> int:
        with self._lock:
            slots = as_slots(sorted(self._quarantined)[:RETRIED_SLOTS_MAX])
        runs = [run for whole in self._table.runs(slots) for run in whole.cut(1)]
        works = np.array(self._transfer.map(lambda run: self._transfer.try_slot(run.holder, run.index), runs), bool)
        good = [run for run, fine in zip(runs, works, strict=True) if fine]
        if not good:
            return 0
        try:
            self._services.superblock.release((run.holder.number, run.index) for run in good)
        except OSError:
            self._services.faults.add(DiskFault.WRITE_ERROR)
            return 0
        with self._lock:
            released = slots[works]
            self._quarantined.difference_update(released.tolist())
            self._slots.release(released)
        return len(good)

    def adopt(self, slab: Slab, blocks: Iterable[FoundBlock], quarantined: Sequence[int] = ()) -> list[RecoveredBlock]:
        """Take over a slab that was there at the start; the slots of `blocks` count as used from now on."""
        with self._lock:
            slot_range = self._add(slab)
            recovered = []
            for block in blocks:
                slab.sequences[block.index] = block.header.sequence
                slab.generations[block.index] = block.header.generation
                slot = slot_range.first + block.index
                recovered.append(RecoveredBlock(block.header.identity, slot, block.header.sequence))
            slots = [slot_range.first + index for index in quarantined]
            self._quarantined.update(slots)
            self._slots.take_these(as_slots([*(block.slot for block in recovered), *slots]))
        return recovered

    def _take(self, count: int) -> Slots:
        """Free slots: large requests from all folders alike, small ones from each in turn; `_lock` must be held."""
        volumes = self._services.folder.volumes
        if len(volumes) == 1:
            return self._slots.take(count)
        self._turn += 1
        turned = [volumes[(self._turn + i) % len(volumes)] for i in range(len(volumes))]
        working = [volume for volume in turned if not volume.failing]
        share = max(-(-count // max(1, len(working))), IO_BYTES_MAX // self.slot_bytes)
        taken: list[Slots] = []
        left = count
        for volume in working:
            taken.append(self._slots.take(min(share, left), within=self._firsts[volume]))
            left -= len(taken[-1])
        taken.append(self._slots.take(left))
        return np.sort(np.concatenate(taken))

    def _erase_all(self, slots: Slots) -> Mask:
        """Forget blocks in memory, in the index and in the slots; which slots can be used again."""
        self._vacate(slots)
        pieces = [piece for run in self._table.runs(slots) for piece in run.cut(ERASE_SLOTS_MAX)]
        usable = np.zeros(len(slots), dtype=np.bool_)
        for piece, erased in zip(pieces, self._transfer.map(self._erase, pieces), strict=True):
            usable[piece.places] = erased & ~piece.holder.suspect[piece.indices]
        return usable

    def _release(self, slots: Slots, usable: Mask) -> None:
        volumes = {run.holder.volume for run in self._table.runs(slots)}
        if not usable.all():
            self._quarantine(slots[~usable])
        with self._lock:
            self._slots.release(slots[usable])
        self._relieve(volumes)

    def _quarantine(self, slots: Slots) -> None:
        """Keep used slots from being used again, also after a restart."""
        self._services.faults.add(DiskFault.QUARANTINED_SLOT, len(slots))
        with self._lock:
            self._quarantined.update(slots.tolist())
        try:
            self._services.superblock.quarantine(
                (run.holder.number, index)
                for run in self._table.runs(slots)
                for index in range(run.index, run.index + run.count)
            )
        except OSError:
            self._services.faults.add(DiskFault.WRITE_ERROR)

    def _relieve(self, volumes: Iterable[SlabVolume]) -> None:
        """Delete the idle slabs on file systems that have come below their floor."""
        short = [volume for volume in volumes if volume.left_bytes() < 0]
        for slot_range, slab in zip(self._table.ranges, self._table.holders, strict=True) if short else ():
            if slab.volume in short:
                self.give_back(slot_range)

    def _grow(self, count: int) -> bool:
        """Add a slab unless another thread just did; false if there is no room."""
        with self._grow_lock:
            if self.free_slots >= count:
                return True
            left_bytes = None if self.bytes_max is None else self.bytes_max - self.reserved_bytes
            slab = self._services.folder.create(self._ns_id, self._geometry, left_bytes)
            if slab is None:
                return False
            with self._lock:
                self._add(slab)
            return True

    def _add(self, slab: Slab) -> SlotRange:
        """Take in a slab, all free; `_lock` must be held."""
        slot_range = self._slots.add(slab.header.slot_count)
        self._table = self._table.with_added(slot_range, slab)
        self._firsts[slab.volume].add(slot_range.first)
        return slot_range

    def _vacate(self, slots: Slots) -> None:
        """Forget the blocks in slots, in memory and in the index."""
        keys: list[bytes] = []
        for run in self._table.runs(slots):
            if run.holder.sequences[run.indices].any():
                keys.extend(_row_keys(run))
                run.holder.sequences[run.indices] = 0
        # A row that stays is harmless: the slot's header will not match it.
        if keys and not self._services.manifest.delete(keys):
            self._services.faults.add(DiskFault.INDEX_FULL, len(keys))

    def _erase(self, piece: SlotRun[Slab]) -> Mask:
        return self._transfer.erase(piece.holder, range(piece.index, piece.index + piece.count))


def _row_keys(run: SlotRun[Slab]) -> list[bytes]:
    return [row_key(run.holder.number, index) for index in range(run.index, run.index + run.count)]
