"""Moving sparse parts: making room for them, writing them to disk, and reading them.

A group keeps to its share of each tier (`sparse_ratio_max`). Up to that it takes extents from whoever gives first,
then what of its own was needed longest ago leaves: host memory for the disk, the disk for good. All groups together
take no room from dense blocks beyond that share of the tier; what they have beyond it they give back where anyone needs
room, the group that has most first. Where anyone needs host memory, what stands at blocks that left it follows them. A
part for which there is no room is not stored, and a match is shorter for it; no dense block is refused for that.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kvstore.store.disk_writes import write_blocks
from kvstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kvstore.store.index import Index
    from kvstore.store.room import RoomMaker
    from kvstore.store.space import Space
    from kvstore.store.sparse import FreedSparse, SparseBlock, SparseGroup
    from kvstore.tiers.base import Pool
    from kvstore.types import BlockIds, Slots

_BATCH_BYTES = 64 << 20
_PREFETCHED_BYTES = 16 << 20
_TRIES_MAX = 4  # with nothing gained: what was freed went elsewhere, or the system refuses the memory


class SparseMover:
    """Moves sparse parts between tiers and buffers. The room lock is held while they change their tier."""

    def __init__(self, index: Index, room: RoomMaker) -> None:
        self._index = index
        self._room = room

    def reserve(self, space: Space, group: SparseGroup, count: int) -> Slots:
        """Up to `count` host slots of a group, after letting others leave where needed; fewer if none may in time."""
        slots = self._reserve(group, count, lambda rest: self._free(space, group, Tier.HOST, rest))
        with self._index.lock:
            space.budget.spend(int(slots.size) * group.host.slot_bytes)
        return slots

    def bring_up(self, space: Space, group: SparseGroup, blocks: Sequence[SparseBlock], price: float) -> bool:
        """Have held parts that lie on disk alone come up into host memory; false where that brought not all.

        They take room only from parts of their group needed before them, and from dense blocks worth at most `price`.
        """
        with self._index.lock:
            missing = [block for block in blocks if Tier.HOST not in block.slots]
        step = max(1, _PREFETCHED_BYTES // group.host.slot_bytes)
        return all(
            self._bring_up(space, group, missing[start : start + step], price) for start in range(0, len(missing), step)
        )

    def leave_cooled(self, space: Space) -> bool:
        """Let sparse parts follow their dense blocks out of host memory; the room lock must be held. False if none."""
        found = False
        for group in space.sparse.groups:
            with self._index.lock:
                victims = group.take_cooled(_batch(group))
            found |= self._leave(space, group, Tier.HOST, victims)
        return found

    def give_excess(self, tier: Tier) -> bool:
        """Have the group that has most of a tier give back an extent, or slab, where all have more than their share.

        What was needed longest ago leaves; the room lock must be held. False where nothing could.
        """
        if not self._has_excess(tier):
            return False
        held = [(pool.reserved_bytes, space, group) for space, group, pool in self._groups(tier)]
        _, space, group = max(held, key=lambda one: one[0])
        return self._empty_one(space, group, tier)

    def flush(self, space: Space) -> None:
        """Write the sparse parts in host memory alone that a restart would find; the room lock must be held."""
        for group in space.sparse.groups:
            with self._index.lock:
                blocks = group.blocks()
            self._write_standing(space, group, blocks)

    def write_through(self, space: Space, ids: BlockIds) -> None:
        """The same for those at some blocks that the caller holds; the room lock must be held."""
        for group in space.sparse.groups:
            with self._index.lock:
                blocks = group.find(ids.tolist())
            self._write_standing(space, group, blocks)

    def load(
        self, space: Space, group: SparseGroup, blocks: Sequence[SparseBlock], rows: NDArray[np.uint8], part: int
    ) -> int:
        """As `read`, for a lease: what is loaded earns budget."""
        good = self.read(group, blocks, rows, part)
        with self._index.lock:
            space.budget.earn(good * rows.shape[1])
        return good

    def read(self, group: SparseGroup, blocks: Sequence[SparseBlock], rows: NDArray[np.uint8], part: int) -> int:
        """Copy one part of held blocks into rows; returns how many leading ones are right.

        `part` counts within the group. What does not come from disk as it was written is dropped.
        """
        done = 0
        while done < len(blocks):
            with self._index.lock:
                slots = [block.slots.get(Tier.HOST) for block in blocks[done:]]
            run = _run_length(slots)
            if slots[0] is not None:
                group.host.read(np.array(slots[:run], dtype=np.uint32), rows[done : done + run], part=part)
                good = run
            else:
                good = self._read_from_disk(group, blocks[done : done + run], rows[done : done + run], part)
            done += good
            if good < run:
                break
        return done

    def _bring_up(self, space: Space, group: SparseGroup, blocks: list[SparseBlock], price: float) -> bool:
        before = min(block.needed_at for block in blocks)
        slots = self._reserve(group, len(blocks), lambda rest: self._free_older(space, group, rest, before, price))
        try:
            read = blocks[: slots.size]
            rows = np.empty((len(read), group.host.slot_bytes), dtype=np.uint8)
            good = self._read_verified(group, read, rows, None) if read else 0
        except BaseException:
            group.host.free(slots)
            raise
        self._place_on_host(group, read[:good], rows[:good], slots)
        return good == len(blocks)

    def _reserve(self, group: SparseGroup, count: int, free_some: Callable[[int], bool]) -> Slots:
        slots = group.host.allocate(count)
        wait_seconds = self._index.settings.room_seconds_max
        if slots.size == count or not self._room.lock.acquire(timeout=wait_seconds):
            return slots
        try:
            return self._allocate(group.host, count, slots, free_some)
        finally:
            self._room.lock.release()

    def _free_older(self, space: Space, group: SparseGroup, count: int, before: int, price: float) -> bool:
        """Let what was needed before, or is worth no more, leave host memory; the room lock must be held."""
        if not group.host.at_limit and self._room.return_extent(space, group, Tier.HOST, price):
            return True
        with self._index.lock:
            victims = group.take_victims(Tier.HOST, min(count, _batch(group)), before)
        return self._leave(space, group, Tier.HOST, victims)

    def _free(self, space: Space, group: SparseGroup, tier: Tier, count: int) -> bool:
        """Let something leave a tier so that a group finds slots there; false if nothing could."""
        pool = group.pool(tier)
        if pool is None:
            return False
        if not pool.at_limit and not self._has_excess(tier) and self._room.return_extent(space, group, tier):
            return True
        if self._evict(space, group, tier, min(count, _batch(group))):
            return True
        return not pool.at_limit and self.give_excess(tier)

    def _groups(self, tier: Tier) -> list[tuple[Space, SparseGroup, Pool]]:
        """All groups of all namespaces with their pools in a tier."""
        return [
            (space, group, pool)
            for space in self._index.spaces()
            for group in space.sparse.groups
            if (pool := group.pool(tier)) is not None
        ]

    def _has_excess(self, tier: Tier) -> bool:
        """Whether sparse parts have all of a tier, or more, that they may take from dense blocks."""
        capacity_bytes = self._index.host.capacity_bytes
        if tier is Tier.DISK:
            capacity_bytes = 0 if self._index.disk is None else self._index.disk.capacity_bytes
        held_bytes = sum(pool.reserved_bytes for _, _, pool in self._groups(tier))
        return held_bytes >= capacity_bytes * self._index.settings.sparse_ratio_max

    def _empty_one(self, space: Space, group: SparseGroup, tier: Tier) -> bool:
        """Let all leave one extent or slab of a group, of which nothing was needed for longest."""
        pool = group.pool(tier)
        assert pool is not None, "only groups with a pool in the tier have most of it"
        with self._index.lock:
            ranges = sorted((group.needed_at(tier, one), one.first, one) for one in pool.ranges())
        for _, _, one in [found for found in ranges if not pool.is_kept(found[2])][:_TRIES_MAX]:
            with self._index.lock:
                victims = group.take_range(tier, one)
            self._leave(space, group, tier, victims)
            if pool.give_back(one):
                return True
        return False

    def _evict(self, space: Space, group: SparseGroup, tier: Tier, count: int) -> bool:
        with self._index.lock:
            victims = group.take_victims(tier, count)
        return self._leave(space, group, tier, victims)

    def _leave(self, space: Space, group: SparseGroup, tier: Tier, victims: list[SparseBlock]) -> bool:
        left: list[FreedSparse] = []
        try:
            if tier is Tier.HOST:
                self._write(space, group, self._admitted(space, victims))
        finally:
            with self._index.lock:
                left = group.leave(victims, tier)
                self._index.accounting.evicted_blocks[f"sparse_{tier.name.lower()}"] += sum(
                    int(freed.slots.size) for freed in left if freed.tier is tier
                )
            _settle(left)
        return any(freed.tier is tier for freed in left)

    def _admitted(self, space: Space, blocks: Sequence[SparseBlock]) -> list[SparseBlock]:
        """Those in host memory alone that go to disk: where the dense block is there, or would be admitted."""
        alone = [block for block in blocks if Tier.DISK not in block.slots]
        terms = self._room.disk_terms(space, len(alone))
        with self._index.lock:
            standing = [block for block in alone if block.attached]
            ids = np.array([block.block_id for block in standing], dtype=np.uint32)
            admitted = self._room.is_admitted(space, ids, terms)
        return [block for block, goes in zip(standing, admitted.tolist(), strict=True) if goes]

    def _write_standing(self, space: Space, group: SparseGroup, blocks: Sequence[SparseBlock]) -> None:
        """Write those in host memory alone whose dense blocks lie on disk: no restart finds others a place."""
        step = _batch(group)
        for start in range(0, len(blocks), step):
            with self._index.lock:
                standing = [block for block in blocks[start : start + step] if block.attached]
                ids = np.array([block.block_id for block in standing], dtype=np.uint32)
                on_disk = space.lies_in(ids, (Tier.DISK,)).tolist()
                held = group.hold_unwritten(block for block, there in zip(standing, on_disk, strict=True) if there)
            try:
                self._write(space, group, held)
            finally:
                with self._index.lock:
                    freed = group.release(held)
                _settle(freed)

    def _write(self, space: Space, group: SparseGroup, blocks: list[SparseBlock]) -> None:
        """Write held blocks to disk, as many as find room there."""
        if group.disk is None or not blocks:
            return
        slots = self._allocate(
            group.disk,
            len(blocks),
            group.disk.allocate(len(blocks)),
            lambda rest: self._free(space, group, Tier.DISK, rest),
        )
        blocks = blocks[: slots.size]
        placed = np.zeros(slots.size, dtype=np.bool_)
        try:
            sources = [group.host.views(block.slots[Tier.HOST]) for block in blocks]
            written = write_blocks(
                group.disk,
                slots,
                ([block.identity for block in blocks], sources),
                partial(self._free, space, group, Tier.DISK),
            )
            with self._index.lock:
                for index in np.flatnonzero(written.stored):
                    placed[index] = group.place(blocks[index], Tier.DISK, int(slots[index]))
                self._index.accounting.rejected_blocks.update(written.refused)
                self._index.accounting.written_bytes += int(placed.sum()) * group.host.slot_bytes
        finally:
            if not placed.all():
                group.disk.free(slots[~placed])

    def _allocate(self, pool: Pool, count: int, slots: Slots, free_some: Callable[[int], bool]) -> Slots:
        """Allocate until `count` slots are there, letting others leave; gives up where that brings none, or in time.

        Owns `slots` until it returns: an exception gives them back.
        """
        deadline = self._index.clock.monotonic() + self._index.settings.room_seconds_max
        tries = 0
        try:
            while slots.size < count and tries < _TRIES_MAX and self._index.clock.monotonic() < deadline:
                if not free_some(count - int(slots.size)):
                    break
                more = pool.allocate(count - int(slots.size))
                tries = 0 if more.size else tries + 1
                slots = np.concatenate([slots, more])
        except BaseException:
            pool.free(slots)
            raise
        return slots

    def _read_from_disk(
        self, group: SparseGroup, blocks: Sequence[SparseBlock], rows: NDArray[np.uint8], part: int
    ) -> int:
        good = self._read_verified(group, blocks, rows, part)
        if len(group.parts) == 1:
            self._place_on_host(group, blocks[:good], rows[:good], group.host.allocate(good))
        return good

    def _read_verified(
        self, group: SparseGroup, blocks: Sequence[SparseBlock], rows: NDArray[np.uint8], part: int | None
    ) -> int:
        """Read held blocks, of one part or whole, from disk; how many leading ones are right. The next is dropped."""
        if group.disk is None:
            raise AssertionError("a held block lies in no tier")
        with self._index.lock:
            slots = np.array([block.slots[Tier.DISK] for block in blocks], dtype=np.uint32)
        verified = group.disk.read(slots, [block.identity for block in blocks], rows, part=part)
        good = int(verified.size if verified.all() else verified.argmin())
        if good < len(blocks):
            with self._index.lock:
                freed = group.forget(blocks[good : good + 1])
                self._index.accounting.corrupt_blocks += 1
            _settle(freed)
        return good

    def _place_on_host(
        self, group: SparseGroup, blocks: Sequence[SparseBlock], rows: NDArray[np.uint8], slots: Slots
    ) -> None:
        """Keep what was read from disk in host memory too, as far as there are slots; the others are freed."""
        count = min(len(blocks), int(slots.size))
        placed = np.zeros(slots.size, dtype=np.bool_)
        try:
            group.host.write(slots[:count], rows[:count])
            with self._index.lock:
                for index in range(count):
                    placed[index] = group.place(blocks[index], Tier.HOST, int(slots[index]))
        finally:
            if not placed.all():
                group.host.free(slots[~placed])


def _settle(freed: list[FreedSparse]) -> None:
    for one in freed:
        one.pool.free(one.slots)


def _run_length(slots: Sequence[int | None]) -> int:
    """How many leading entries are of the kind of the first one."""
    is_there = [slot is not None for slot in slots]
    return is_there.index(not is_there[0]) if (not is_there[0]) in is_there else len(is_there)


def _batch(group: SparseGroup) -> int:
    return max(1, _BATCH_BYTES // group.host.slot_bytes)
