"""Making room: which blocks leave host or disk so that others can come, and the copies to disk this takes.

The order of leaving is the index's (coldest first, leaves first); a block that leaves host memory goes to disk where
there is one. Everything here runs on the thread that asked for room, one thread at a time, within a time limit.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from kvstore.radix.tree import NO_SLOT
from kvstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvstore.store.index import Index
    from kvstore.store.space import Space
    from kvstore.tiers.base import Pool, SlotRange
    from kvstore.types import BlockIds, Slots

_BATCH_BYTES = 64 << 20
_RECLAIM_TRIES = 4
_EMPTY = np.empty(0, dtype=np.uint32)


class RoomMaker:
    """Reserves slots, demotes and evicts. `lock` is the room lock: it is held while blocks move between tiers."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self.lock = threading.Lock()

    def reserve(self, space: Space, count: int) -> Slots:
        """Up to `count` host slots, after evicting colder blocks where needed; fewer when nothing may leave in time."""
        clock = self._index.clock
        deadline = clock.monotonic() + self._index.settings.room_seconds_max
        slots = space.host.allocate(count)
        if slots.size == count or not self.lock.acquire(timeout=self._index.settings.room_seconds_max):
            return slots
        try:
            return _allocate_with(
                space.host, count, slots, lambda rest: clock.monotonic() < deadline and self._free_host(space, rest)
            )
        finally:
            self.lock.release()

    def flush(self) -> None:
        """Write every committed block that is in host memory alone to disk, as far as the disk has room."""
        disk = self._index.disk
        if disk is None:
            return
        with self.lock:
            for space in self._index.spaces():
                self._flush_space(space)
        disk.flush()

    def _flush_space(self, space: Space) -> None:
        next_id: int | None = 0
        has_room = True
        while has_room and next_id is not None:
            with self._index.lock:
                ids, next_id = space.tree.missing_in(Tier.DISK, Tier.HOST, next_id)
                space.tree.lease(ids)
            try:
                self._index.prepare_keys(space, ids)
                has_room = self._copy_to_disk(space, ids)
            finally:
                with self._index.lock:
                    freed = space.release(ids)
                self._index.settle(freed)

    def _free_host(self, space: Space, wanted: int) -> bool:
        """Let some blocks leave host memory; false if none could."""
        others = [other.host for other in self._index.spaces() if other is not space]
        if _give_back_idle(others) or self._free_condemned():
            return True
        with self._index.lock:
            coldest = self._index.coldest_space(Tier.HOST)
        if coldest is None:
            return False
        if coldest is not space and self._reclaim(coldest, coldest.host, Tier.HOST):
            return True
        return self._evict_host(space, wanted)

    def _free_condemned(self) -> bool:
        """Free what was dropped already in some space, before anything else has to leave; true if there was one."""
        with self._index.lock:
            condemned = self._index.condemned_space()
        if condemned is None:
            return False
        self._index.drain(condemned)
        return True

    def _evict_host(self, space: Space, wanted: int) -> bool:
        with self._index.lock:
            ids = space.tree.take_victims(Tier.HOST, min(wanted, _batch_blocks(space)))
        return self._leave_host(space, ids)

    def _leave_host(self, space: Space, ids: BlockIds) -> bool:
        """Copy taken victims to disk where host memory holds their only copy, then evict; true if a slot came free."""
        try:
            self._index.prepare_keys(space, ids)
            if space.disk is not None:
                with self._index.lock:
                    alone = ids[space.tree.slots(ids, Tier.DISK) == NO_SLOT]
                self._copy_to_disk(space, alone[::-1].copy())
        finally:
            with self._index.lock:
                freed = space.evict(ids, Tier.HOST)
                self._index.accounting.evicted_blocks["host"] += freed.host.size
            self._index.settle(freed)
        return bool(freed.host.size)

    def _copy_to_disk(self, space: Space, ids: BlockIds) -> bool:
        """Write blocks to disk, root to leaf, as many as find room. They are held or taken by the caller.

        False where there was no room for all of them.
        """
        step = _batch_blocks(space)
        for start in range(0, ids.size, step):
            batch = ids[start : start + step]
            slots = self._reserve_disk(space, batch.size)
            written = self._write_batch(space, batch[: slots.size], slots)
            with self._index.lock:
                self._index.accounting.rejected_blocks["disk_full"] += batch.size - slots.size
                self._index.accounting.rejected_blocks["disk_error"] += slots.size - written
            if slots.size < batch.size:
                return False
        return True

    def _write_batch(self, space: Space, ids: BlockIds, slots: Slots) -> int:
        if space.disk is None or not ids.size:
            return 0
        placed = np.zeros(ids.size, dtype=np.bool_)
        try:
            with self._index.lock:
                identities = space.identities(ids)
                host_slots = space.tree.slots(ids, Tier.HOST)
            sources = [space.host.views(int(slot)) for slot in host_slots]
            written = space.disk.write(slots, identities, sources)
            with self._index.lock:
                placed[written] = space.tree.place(ids[written], Tier.DISK, slots[written])
                space.announce(Tier.DISK, [identities[i].key for i in np.flatnonzero(placed)])
        finally:
            if not placed.all():
                space.disk.free(slots[~placed])
        return int(written.sum())

    def _reserve_disk(self, space: Space, count: int) -> Slots:
        if space.disk is None:
            return _EMPTY
        slots = space.disk.allocate(count)
        return _allocate_with(space.disk, count, slots, lambda rest: self._free_disk(space, rest))

    def _free_disk(self, space: Space, wanted: int) -> bool:
        """Let some blocks leave the disk; false if none could."""
        others = [other.disk for other in self._index.spaces() if other is not space and other.disk is not None]
        if _give_back_idle(others) or self._free_condemned() or self._drop_unclaimed():
            return True
        with self._index.lock:
            coldest = self._index.coldest_space(Tier.DISK)
        if coldest is None:
            return False
        if coldest is not space and coldest.disk is not None and self._reclaim(coldest, coldest.disk, Tier.DISK):
            return True
        with self._index.lock:
            ids = space.tree.take_victims(Tier.DISK, wanted)
        return self._leave_disk(space, ids)

    def _leave_disk(self, space: Space, ids: BlockIds) -> bool:
        try:
            self._index.prepare_keys(space, ids)
        finally:
            with self._index.lock:
                freed = space.evict(ids, Tier.DISK)
                self._index.accounting.evicted_blocks["disk"] += freed.disk.size
            self._index.settle(freed)
        return bool(freed.disk.size)

    def _drop_unclaimed(self) -> bool:
        """Give up what an earlier run left of a namespace that nobody has used since."""
        disk = self._index.disk
        unclaimed = disk.recovered_namespaces() if disk is not None else []
        if disk is None or not unclaimed:
            return False
        found = unclaimed[0]
        pool = disk.pool(found.ns_id, found.part_sizes, found.block_tokens)
        pool.free(np.array([block.slot for block in disk.recovered(found.ns_id)], dtype=np.uint32))
        return _give_back_idle([pool])

    def _reclaim(self, space: Space, pool: Pool, tier: Tier) -> bool:
        """Empty one extent or slab of a colder space and return it to the tier, so that another space can have it."""
        tries = 0
        for slot_range in pool.ranges():
            if tries == _RECLAIM_TRIES:
                break
            # Where everything is held nothing is lost by looking on: pins may hold any number of extents for long.
            tries += self._leave_range(space, tier, slot_range)
            if pool.give_back(slot_range):
                return True
        return False

    def _leave_range(self, space: Space, tier: Tier, slot_range: SlotRange) -> bool:
        """Evict what is not held in a range of slots, a slice of the tree at a time; true if there was something."""
        found = False
        next_id: int | None = 0
        while next_id is not None:
            with self._index.lock:
                ids, next_id = space.tree.take_range(tier, slot_range.first, slot_range.count, next_id)
            if not ids.size:
                continue
            found = True
            if tier is Tier.HOST:
                self._leave_host(space, ids)
            else:
                self._leave_disk(space, ids)
        return found


def _give_back_idle(pools: Iterable[Pool]) -> bool:
    """Return the extents or slabs in which nothing is used to their tier; true if there was one."""
    return sum(pool.give_back(slot_range) for pool in pools for slot_range in pool.ranges()) > 0


def _batch_blocks(space: Space) -> int:
    return max(1, _BATCH_BYTES // space.layout.block_bytes)


def _allocate_with(pool: Pool, count: int, slots: Slots, free_some: Callable[[int], bool]) -> Slots:
    """Allocate until `count` slots are there or `free_some(missing)` says that nothing more comes free.

    Owns `slots` until it returns: an exception, Ctrl-C above all, gives them back.
    """
    try:
        while slots.size < count and free_some(count - slots.size):
            slots = np.concatenate([slots, pool.allocate(count - slots.size)])
    except BaseException:
        pool.free(slots)
        raise
    return slots
