"""The slots of one namespace on disk."""

from __future__ import annotations

import threading
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kvstore.tiers.base import RecoveredBlock
from kvstore.tiers.buffers import whole_pages
from kvstore.tiers.codecs.coding import encode_block, no_coding
from kvstore.tiers.coded_slot import block_bytes, block_bytes_max, usual_bytes
from kvstore.tiers.coded_transfer import BlockToWrite
from kvstore.tiers.faults import DiskFault
from kvstore.tiers.kind_ranges import KindRanges
from kvstore.tiers.manifest import row_key
from kvstore.tiers.size_classes import RecentSizes, class_bytes, fit
from kvstore.tiers.slab import coded_geometry, file_bytes, slab_bytes
from kvstore.tiers.slots import HolderTable, SlotMap, as_slots
from kvstore.tiers.transfer import IO_BYTES_MAX, Occupant

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvstore.tiers.base import BlockIdentity, Bytes1D, Bytes2D, Mask, SlotRange
    from kvstore.tiers.codecs.coding import EncodedBlock, PoolCoding
    from kvstore.tiers.disk_services import DiskServices
    from kvstore.tiers.recovery import FoundBlock
    from kvstore.tiers.slab import Slab, SlotGeometry
    from kvstore.tiers.slab_volume import SlabVolume
    from kvstore.tiers.slots import SlotRun
    from kvstore.types import Slots

    Encode = Callable[[Sequence[Bytes1D]], EncodedBlock]

ERASE_SLOTS_MAX = 64
RETRIED_SLOTS_MAX = 256
_REQUESTS_AHEAD = 4


class DiskPool:
    """The slots of one namespace on disk; implements PersistentPool (persistent.py). Thread-safe.

    A block goes through: delete the slot's index row, write the slot, put the index row. So a row never speaks of
    bytes that are not there yet, and whatever a crash leaves is found out by the header.
    I/O holds no lock: slots belong to their caller, and slabs with used slots never go away.

    With a pipeline (`use_coding`) blocks differ in size, and lie in slabs of coded slots, each of one size class. What
    a block needs is known only when it is written: write() exchanges slots that were allocated for others, in place.
    """

    def __init__(self, ns_id: bytes, geometry: SlotGeometry, generation: int, services: DiskServices) -> None:
        self.generation = generation
        self.bytes_max: int | None = None  # of all slabs; those that are there already stay
        self.unfitting_blocks = 0  # that found no slot of their size, since the start
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
        self._ranges = KindRanges(self._slots, services.folder.volumes)
        self._used_bytes = 0
        self._coding = no_coding(len(geometry.part_sizes))
        self._usual_bytes: int | None = None
        self._recent = RecentSizes()

    def use_coding(self, coding: PoolCoding) -> None:
        """How blocks are written from now on, and what their parts are. Blocks that are there stay as they are.

        A pipeline that encrypts needs a tier with keys.
        """
        with self._grow_lock, self._lock:
            if coding.pipeline != self._coding.pipeline:
                self._recent = RecentSizes()
            self._coding = coding
            self._usual_bytes = usual_bytes(coding, self.part_sizes, self.block_tokens)

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
        """Bytes of a slab that a block takes up: on the mean of those that are there, where they differ."""
        if self._coding.pipeline is None:
            return self._geometry.slot_bytes
        with self._lock:
            used = self._slots.used_slots - len(self._quarantined)
            return max(1, self._used_bytes // used) if used else self._recent.largest(self._first_kind)

    @property
    def reserved_bytes(self) -> int:
        """Real bytes of the pool's slab files."""
        return file_bytes(self._table.holders)

    @property
    def at_limit(self) -> bool:
        """Whether its own limit, not the tier's capacity, keeps the pool from another slab."""
        if self.bytes_max is None:
            return False
        return self.bytes_max - self.reserved_bytes < slab_bytes(self._geometry_of(self._wanted_kind), 1)

    @property
    def free_slots(self) -> int:
        """Slots that allocate() can hand out without another slab."""
        with self._lock:
            kinds = self._kinds()
            if self._ranges.kinds() <= set(kinds):
                return self._slots.free_slots
            return sum(self._ranges.free_slots(kind) for kind in kinds)

    @property
    def used_slots(self) -> int:
        """Slots handed out and not freed; those in quarantine, which hold nothing, do not count."""
        with self._lock:
            return self._slots.used_slots - len(self._quarantined)

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
            taken = [as_slots(())]
            for kind in self._kinds():
                taken.append(self._take(count - sum(map(len, taken)), kind))
            return np.sort(np.concatenate(taken))

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
        table = self._table
        known = slot_range in table.ranges
        geometry = table.holder_of(slot_range).geometry if known else self._geometry
        return slab_bytes(geometry, slot_range.count)

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
            self._ranges.remove(slab, slot_range.first)
        self._services.folder.remove(slab)
        return True

    def write(self, slots: Slots, identities: Sequence[BlockIdentity], sources: Sequence[Sequence[Bytes1D]]) -> Mask:
        """Write blocks; sources[i] has one readable array for each part of block i. True where a block is stored.

        A slot whose write failed still belongs to the caller, who frees it. With a pipeline `slots` is changed in
        place: a block may lie in another slot than it was given, and that one is free again.
        """
        slots = as_slots(slots)
        assert len(slots) == len(identities) == len(sources), (len(slots), len(identities), len(sources))
        self._vacate(slots)
        coding = self._coding
        if coding.pipeline is None:
            return self._write_plain(slots, identities, sources)
        encode = partial(encode_block, coding.pipeline, coding.forms)
        stored, left = np.zeros(len(slots), dtype=np.bool_), list(range(len(slots)))
        if self._usual_bytes is not None and self._kinds_of(slots) == {self._first_kind}:
            stored, left = self._write_usual(slots, identities, sources, encode)
        others = slots[left]
        try:
            if left:
                blocks = [identities[i] for i in left], [sources[i] for i in left]
                stored[left] = self._write_sized(others, *blocks, encode)
        finally:
            slots[left] = others
        return stored

    def _write_usual(
        self, slots: Slots, identities: Sequence[BlockIdentity], sources: Sequence[Sequence[Bytes1D]], encode: Encode
    ) -> tuple[Mask, list[int]]:
        """Write blocks into slots of the size that their codec makes: each I/O by the thread that encoded its blocks,
        so that cores and disk are both busy. Gives, too, the places of those beside blocks that need another size."""
        generation, kind = self.generation, self._first_kind
        left: list[int] = []

        def write_piece(piece: SlotRun[Slab]) -> list[tuple[int, bytes] | None]:
            blocks = list(map(encode, sources[piece.places]))
            if any(self._class_of(block) != kind for block in blocks):
                left.extend(range(piece.start, piece.start + piece.count))
                return [None] * piece.count
            return self._write_encoded(piece, list(zip(identities[piece.places], blocks, strict=True)), generation)

        stored = self._write_pieces(slots, generation, write_piece)
        with self._lock:
            self._recent.note([kind] * (len(slots) - len(left)))
        return stored, sorted(left)

    def _write_sized(
        self, slots: Slots, identities: Sequence[BlockIdentity], sources: Sequence[Sequence[Bytes1D]], encode: Encode
    ) -> Mask:
        """Encode all blocks, put slots of their sizes in the place of those that were given, and write."""
        blocks = self._transfer.map(encode, sources)
        fitting = self._exchange(slots, [self._class_of(block) for block in blocks])
        stored = np.zeros(len(slots), dtype=np.bool_)
        places = np.flatnonzero(fitting)
        # Neighbours on disk are one I/O only where they are neighbours here.
        places = places[np.argsort(slots[places], kind="stable")]
        stored[places] = self._write_coded(slots[places], [(identities[i], blocks[i]) for i in places.tolist()])
        return stored

    def _write_plain(
        self, slots: Slots, identities: Sequence[BlockIdentity], sources: Sequence[Sequence[Bytes1D]]
    ) -> Mask:
        generation = self.generation

        def write_piece(piece: SlotRun[Slab]) -> list[tuple[int, bytes] | None]:
            occupants = [
                Occupant(identity, self._services.next_sequence(), generation) for identity in identities[piece.places]
            ]
            headers = self._transfer.write(piece, occupants, sources[piece.places])
            pairs = zip(occupants, headers, strict=True)
            return [(occupant.sequence, header) if header is not None else None for occupant, header in pairs]

        return self._write_pieces(slots, generation, write_piece)

    def _write_coded(self, slots: Slots, blocks: Sequence[tuple[BlockIdentity, EncodedBlock]]) -> Mask:
        generation = self.generation

        def write_piece(piece: SlotRun[Slab]) -> list[tuple[int, bytes] | None]:
            return self._write_encoded(piece, blocks[piece.places], generation)

        return self._write_pieces(slots, generation, write_piece)

    def _write_encoded(
        self, piece: SlotRun[Slab], blocks: Sequence[tuple[BlockIdentity, EncodedBlock]], generation: int
    ) -> list[tuple[int, bytes] | None]:
        to_write = [BlockToWrite(identity, generation, encoded) for identity, encoded in blocks]
        written = self._services.coded.write(piece, to_write)
        return [(block.sequence, block.header) if block is not None else None for block in written]

    def _kinds_of(self, slots: Slots) -> set[int]:
        return {run.holder.geometry.kind for run in self._table.runs(slots)}

    def _write_pieces(
        self, slots: Slots, generation: int, write_piece: Callable[[SlotRun[Slab]], list[tuple[int, bytes] | None]]
    ) -> Mask:
        """Write slots by runs; `write_piece` gives sequence and header of each block that it wrote."""
        pieces = list(self._transfer.pieces(self._table.runs(slots)))
        stored = np.zeros(len(slots), dtype=np.bool_)
        rows: list[tuple[bytes, bytes]] = []
        outcomes = self._transfer.map(write_piece, pieces)
        for piece, written in zip(pieces, outcomes, strict=True):
            pairs = zip(_row_keys(piece), written, strict=True)
            rows.extend((key, block[1]) for key, block in pairs if block is not None)
            stored[piece.places] = [block is not None for block in written]
        if rows and not self._services.manifest.put(rows):
            self._services.faults.add(DiskFault.INDEX_FULL, len(rows))
            stored[:] = False
        for piece, written in zip(pieces, outcomes, strict=True):
            sequences = [0 if block is None else block[0] for block in written]
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
            if piece.holder.geometry.coded:
                return self._services.coded.read(piece, occupants, rows[piece.places], parts, self._coding)
            return self._transfer.read(piece, occupants, rows[piece.places], parts)

        whole = parts == self._all_parts
        pieces: list[SlotRun[Slab]] = []
        for run in self._table.runs(slots):
            pieces.extend(self._transfer.pieces([run]) if whole or run.holder.geometry.coded else run.cut(1))
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
            self._used_bytes += len(recovered) * slab.geometry.slot_bytes
        return recovered

    @property
    def _largest_bytes(self) -> int:
        """The largest slot that a block can need."""
        pipeline = self._coding.pipeline
        encrypts = pipeline is not None and pipeline.encrypts
        return whole_pages(block_bytes_max(self.part_sizes, self.block_tokens, encrypts=encrypts))

    @property
    def _first_kind(self) -> int:
        """The size of slots while it is not known what blocks need: what is usual, else the largest."""
        return self._largest_bytes if self._usual_bytes is None else whole_pages(self._usual_bytes)

    @property
    def _wanted_kind(self) -> int:
        """The kind of slots of the next slab."""
        if self._coding.pipeline is None:
            return 0
        with self._lock:
            return self._recent.largest(self._first_kind)

    def _kinds(self) -> list[int]:
        """Kinds of slots that are handed out, in order; `_lock` must be held."""
        if self._coding.pipeline is None:
            return [0]
        return self._recent.in_order(self._ranges.kinds() - {0}, self._first_kind)

    def _geometry_of(self, kind: int) -> SlotGeometry:
        return coded_geometry(self.part_sizes, self.block_tokens, kind) if kind else self._geometry

    def _class_of(self, block: EncodedBlock) -> int:
        return class_bytes(block_bytes(block, self.block_tokens), self._largest_bytes, self._usual_bytes)

    def _exchange(self, slots: Slots, needed: Sequence[int]) -> Mask:
        """Put slots of the sizes that are needed in the place of those that were given; which blocks got one.

        What is not used of either is free then; a block that got none keeps one that was given.
        """
        kinds = np.zeros(len(slots), dtype=np.intp)
        for run in self._table.runs(slots):
            kinds[run.places] = run.holder.geometry.kind
        given = list(zip(kinds.tolist(), slots.tolist(), strict=True))
        with self._lock:
            self._recent.note(needed)
        missing = Counter(needed)
        missing.subtract(kind for kind, _ in given)
        more: list[tuple[int, int]] = []
        try:
            for kind, count in missing.items():
                self._take_more(kind, count, more)
            fitted = fit(needed, [*given, *more])
            if len(fitted) < len(needed):
                more += self._spare_larger(min(needed), len(needed) - len(fitted))
                fitted = fit(needed, [*given, *more])
            fitting = np.array([position in fitted for position in range(len(needed))], dtype=np.bool_)
            spare = sorted({slot for _, slot in (*given, *more)}.difference(fitted.values()))
            exchanged = slots.copy()
            exchanged[fitting] = [fitted[position] for position in sorted(fitted)]
            exchanged[~fitting] = spare[: len(needed) - len(fitted)]
            slots[:] = exchanged
        finally:
            # However it ends, Ctrl-C included, the caller has what `slots` says, and nobody the others.
            unused = {slot for _, slot in (*given, *more)}.difference(slots.tolist())
            if unused:
                self.free(as_slots(sorted(unused)))
        if not fitting.all():
            unfitting_count = int((~fitting).sum())
            self._services.faults.add(DiskFault.NO_SLOT_OF_SIZE, unfitting_count)
            with self._lock:
                self.unfitting_blocks += unfitting_count
        return fitting

    def _take_more(self, kind: int, count: int, more: list[tuple[int, int]]) -> None:
        """Up to `count` more slots of a kind, from another slab if there is room for one, to the end of `more`."""
        left = count
        while left > 0:
            with self._lock:
                taken = self._take(left, kind).tolist()
                more += [(kind, slot) for slot in taken]
            left -= len(taken)
            if left > 0 and not self._grow_kind(kind, left):
                return

    def _spare_larger(self, size: int, count: int) -> list[tuple[int, int]]:
        """Free slots of sizes above one, the smallest first, so many of each."""
        with self._lock:
            kinds = sorted(kind for kind in self._ranges.kinds() if kind > size)
            return [(kind, slot) for kind in kinds for slot in self._take(count, kind).tolist()]

    def _take(self, count: int, kind: int) -> Slots:
        """Free slots of a kind; `_lock` must be held."""
        slot_bytes = kind or self._geometry.slot_bytes
        slots = self._ranges.take(count, kind, share_min=IO_BYTES_MAX // slot_bytes)
        self._used_bytes += len(slots) * slot_bytes
        return slots

    def _give_up(self, slots: Slots) -> None:
        """Make slots free; `_lock` must be held."""
        self._slots.release(slots)
        self._used_bytes -= self._bytes_of(slots)

    def _bytes_of(self, slots: Slots) -> int:
        return sum(run.count * run.holder.geometry.slot_bytes for run in self._table.runs(slots))

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
            self._give_up(slots[usable])
        self._relieve(volumes)

    def _quarantine(self, slots: Slots) -> None:
        """Keep used slots from being used again, also after a restart."""
        self._services.faults.add(DiskFault.QUARANTINED_SLOT, len(slots))
        with self._lock:
            self._quarantined.update(slots.tolist())
            self._used_bytes -= self._bytes_of(slots)
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
            return self.free_slots >= count or self._add_slab(self._wanted_kind, count)

    def _grow_kind(self, kind: int, count: int) -> bool:
        """The same for slots of one kind."""
        with self._grow_lock:
            with self._lock:
                free_count = self._ranges.free_slots(kind)
            return free_count >= count or self._add_slab(kind, count)

    def _add_slab(self, kind: int, count: int) -> bool:
        """Make a slab for a request; idle ones of other kinds go for it where they must. `_grow_lock` must be held."""
        slab = self._make_slab(kind, count)
        if slab is None and self._give_back_others(kind):
            slab = self._make_slab(kind, count)
        if slab is None:
            return False
        with self._lock:
            self._add(slab)
        return True

    def _make_slab(self, kind: int, count: int) -> Slab | None:
        """As large as what is there of the kind, or a few times what is asked for: neighbours for some requests."""
        left_bytes = None if self.bytes_max is None else self.bytes_max - self.reserved_bytes
        geometry = self._geometry_of(kind)
        present_bytes = file_bytes(slab for slab in self.slabs if slab.geometry.kind == kind)
        needed_bytes = max(present_bytes, slab_bytes(geometry, _REQUESTS_AHEAD * count))
        return self._services.folder.create(self._ns_id, geometry, needed_bytes=needed_bytes, bytes_max=left_bytes)

    def _give_back_others(self, kind: int) -> bool:
        table = self._table
        others = [found for found, slab in zip(table.ranges, table.holders, strict=True) if slab.geometry.kind != kind]
        return sum(self.give_back(slot_range) for slot_range in others) > 0

    def _add(self, slab: Slab) -> SlotRange:
        """Take in a slab, all free; `_lock` must be held."""
        slot_range = self._slots.add(slab.header.slot_count)
        self._table = self._table.with_added(slot_range, slab)
        self._ranges.add(slab, slot_range.first)
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
