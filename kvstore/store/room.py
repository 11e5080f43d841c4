"""Making room: which blocks leave host or disk so that others can come, and the copies to disk this takes.

Among namespaces the one gives whose next block is worth least per byte; within one its eviction policy decides, leaves
first. What a store may take, and what of that which leaves host memory goes to disk, placement.py decides; here it is
done. A namespace at its own limit makes room within itself, and no other one takes what its quota ensures it.
Everything here runs on the thread that asked for room, one thread at a time, within a time limit.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from kvstore.radix.tree import NO_SLOT
from kvstore.store.demotion import demotion
from kvstore.store.disk_writes import write_blocks
from kvstore.store.moving import is_movable, move_out
from kvstore.store.placement import (
    DiskAdmission,
    DiskTerms,
    StoreRequest,
    admit_host,
    may_leave,
    room_price,
    shortage,
)
from kvstore.store.sparse_moves import SparseMover
from kvstore.store.state_moves import StateMover
from kvstore.store.turn_lock import TurnLock
from kvstore.store.turnover import Turnover
from kvstore.tiers.persistent import PinKeepingTier, VolatileTier
from kvstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kvstore.store.index import Index
    from kvstore.store.space import Found, Space
    from kvstore.store.sparse import SparseGroup
    from kvstore.tiers.base import Mask, Pool, SlotRange
    from kvstore.tiers.persistent import PersistentPool
    from kvstore.types import BlockIds, Slots

_BATCH_BYTES = 64 << 20
_RECLAIM_TRIES = 4
_GIVERS_MAX = 4
_TRIES_MAX = 4
_EMPTY = np.empty(0, dtype=np.uint32)


@dataclass(frozen=True, slots=True)
class Reserved:
    """Slots of host memory for the first blocks asked for, and how many were refused, by reason."""

    slots: Slots
    refused: Counter[str] = field(default_factory=Counter)


class RoomMaker:
    """Reserves slots, demotes and evicts. `lock` is the room lock: it is held while blocks move between tiers.

    For a batch of blocks, a state, or an extent at a time: so who evicts by request waits for no more than that.
    """

    def __init__(self, index: Index) -> None:
        self._index = index
        self.lock = TurnLock()
        self.sparse = SparseMover(index, self)
        self.states = StateMover(index, self)
        self._admission = DiskAdmission(index.settings.disk_admission)
        self._disk_is_full = False  # the last blocks that went there had to drive others out; guarded by `lock`
        self._turnover: Turnover | None = None  # guarded by `lock`
        if index.disk is not None:
            self._turnover = Turnover(index.disk.capacity_bytes, index.clock.monotonic())

    def reserve(self, space: Space, path: BlockIds, count: int) -> Reserved:
        """Host slots for the last `count` blocks of a path, the first of them first, after evicting others if needed.

        Fewer where the budget of the namespace has no more, or nothing may leave in time.
        """
        request = StoreRequest(count, space.layout.block_bytes, present=int(path.size) - count)
        with self._index.lock:
            price = self._price(space, path)
            admitted = admit_host(request, space.budget.left(self._index.clock.monotonic()))
            space.budget.spend(admitted * request.block_bytes)
        slots = self.host_slots(space, admitted, price)
        refused = Counter({"budget": count - admitted})
        missing_count = admitted - int(slots.size)
        if missing_count:
            with self._index.lock:
                space.budget.refund(missing_count * request.block_bytes)
                refused[self._shortage(space, price)] += missing_count
        return Reserved(slots, +refused)

    def host_slots(self, space: Space, count: int, price: float) -> Slots:
        """Up to `count` host slots, after evicting what is worth no more than `price`; fewer if too little leaves."""
        clock = self._index.clock
        deadline = clock.monotonic() + self._index.settings.room_seconds_max
        slots = space.host.allocate(count)
        if slots.size == count or not self.lock.acquire(timeout=self._index.settings.room_seconds_max):
            return slots
        try:
            return _allocate_with(
                space.host,
                count,
                slots,
                lambda rest: clock.monotonic() < deadline and self._free_host(space, rest, price),
            )
        finally:
            self.lock.release()

    def write_through(self, space: Space, found: Found) -> None:
        """Write what is there of a match to disk, ancestors first, as far as it is in host memory alone."""
        with self.lock:
            with self._index.lock:
                ids = space.confirm(found)
                alone = (space.tree.slots(ids, Tier.DISK) == NO_SLOT) & (space.tree.slots(ids, Tier.HOST) != NO_SLOT)
                space.tree.lease(ids)
            with self._releasing(space, ids):
                self._index.prepare_keys(space, ids)
                self._copy_to_disk(space, ids[alone])
                self.sparse.write_through(space, ids)

    def return_extent(self, space: Space, group: SparseGroup, tier: Tier, worth: float = inf) -> bool:
        """Have a tier get back an extent or slab that a sparse group of a space can take; `lock` must be held.

        One in which nothing is used, else one of dense blocks that are worth no more than `worth`, of the space that
        gives first. False if none could.
        """
        pools = [pool for other in self._index.spaces() for pool in other.pools(tier)]
        if _give_back_idle(pools):
            return True
        if tier is Tier.DISK:
            if self._drop_unclaimed():
                return True
        elif self._follow_out():
            _give_back_idle(pools)  # the group that asks may have got free slots by it, or takes the extent anew
            return True
        with self._index.lock:
            givers = self._index.givers(tier, space, group.pool(tier))[:_GIVERS_MAX]
        return any(self._reclaim(giver.space, tier, worth) for giver in givers if may_leave(giver.worth, worth))

    def flush(self) -> None:
        """Write every committed block that is in host memory alone to disk, as far as the disk has room.

        Sparse parts follow their dense blocks. Nothing goes where it would end with the process.
        """
        disk = self._index.disk
        if disk is None or isinstance(disk, VolatileTier):
            return
        for space in self._index.spaces():
            next_id: int | None = 0
            while next_id is not None:
                next_id = self._flush_slice(space, next_id)
            with self.lock:
                self.sparse.flush(space)
            if space.states is not None:
                self.states.flush(space)
        disk.flush()

    def _flush_slice(self, space: Space, first_id: int) -> int | None:
        """Flush a slice of the tree; where to go on, None at its end or where the disk has no more room.

        Between two batches the room lock is free, and nothing is held.
        """
        planned: BlockIds | None = None
        while True:
            with self.lock:
                with self._index.lock:
                    ids, next_id = space.tree.missing_in(Tier.DISK, Tier.HOST, first_id)
                    space.tree.lease(ids)
                with self._releasing(space, ids):
                    planned = self._planned(space, ids) if planned is None else planned[np.isin(planned, ids)]
                    batch, planned = np.split(planned, [_batch_blocks(space)])
                    has_room = self._copy_to_disk(space, batch)
            if not has_room:
                return None
            if not planned.size:
                return next_id

    def _planned(self, space: Space, ids: BlockIds) -> BlockIds:
        """Those of some blocks that a flush writes, in that order."""
        self._index.prepare_keys(space, ids)
        # What is lost otherwise is all of host memory, so it need not be likely to be used soon.
        terms = DiskTerms(self.disk_terms(space, int(ids.size)).victim_value, None)
        return self._demoted(space, ids[::-1].copy(), terms)

    @contextmanager
    def _releasing(self, space: Space, ids: BlockIds) -> Iterator[None]:
        """End one hold on blocks, however this ends."""
        try:
            yield
        finally:
            with self._index.lock:
                freed = space.release(ids)
            self._index.settle(freed)

    def _price(self, space: Space, path: BlockIds) -> float:
        """What blocks may be worth, at most, that leave for those at the end of a path; the index lock must be held."""
        worth = self._index.worth_of(space, int(path[-1]))
        return room_price(worth, has_disk=self._index.disk is not None, is_owed=space.missing_bytes(Tier.HOST) > 0)

    def _shortage(self, space: Space, price: float) -> str:
        """Why there were fewer slots than asked for, as counters call it; the index lock must be held."""
        givers = [giver.worth for giver in self._index.givers(Tier.HOST, space)]
        return shortage(givers, price, at_limit=space.host.at_limit)

    def _free_host(self, space: Space, wanted: int, price: float) -> bool:
        """Let some blocks leave host memory; false if none could."""
        others = [pool for other in self._index.spaces() for pool in other.pools(Tier.HOST) if pool is not space.host]
        if (not space.host.at_limit and _give_back_idle(others)) or self._free_condemned():
            return True
        if not space.host.at_limit and self._follow_out() and _give_back_idle(others):
            return True
        return self._free(space, Tier.HOST, wanted, price) or self._free_excess(space, Tier.HOST)

    def _free_excess(self, space: Space, tier: Tier) -> bool:
        """Have sparse parts give back what they have beyond their share, to a space that can take it."""
        pool = space.pool(tier)
        return pool is not None and not pool.at_limit and self.sparse.give_excess(tier)

    def _follow_out(self) -> bool:
        """Let sparse parts leave host memory whose dense blocks left it before; true if there were any."""
        return sum(self.sparse.leave_cooled(space) for space in self._index.spaces()) > 0

    def _free(self, space: Space, tier: Tier, wanted: int, worth: float) -> bool:
        """Let blocks leave a tier that are worth no more than `worth`, the least worth first; false if none could."""
        with self._index.lock:
            givers = self._index.givers(tier, space)
        tries = 0
        for giver in givers:
            if not may_leave(giver.worth, worth):
                continue
            if giver.space is space:
                freed = self._evict(space, tier, min(wanted, _batch_blocks(space)), worth)
            else:
                tries += 1
                freed = tries <= _GIVERS_MAX and self._reclaim(giver.space, tier, worth)
            if freed:
                return True
        return False

    def _free_condemned(self) -> bool:
        """Free what was dropped already in some space, before anything else has to leave; true if there was one."""
        with self._index.lock:
            condemned = self._index.condemned_space()
        if condemned is None:
            return False
        self._index.drain(condemned)
        return True

    def _evict(self, space: Space, tier: Tier, count: int, worth: float) -> bool:
        """Let up to `count` blocks of one space leave a tier, as its policy says; true if a slot came free.

        Of states one leaves, of whatever size.
        """
        if space.states is not None:
            return self.states.evict(space, tier, worth)
        with self._index.lock:
            ids = space.tree.take_victims(tier, count, space.value(worth))
        return self._leave(space, tier, ids)

    def _leave(self, space: Space, tier: Tier, ids: BlockIds) -> bool:
        return self._leave_host(space, ids) if tier is Tier.HOST else self._leave_disk(space, ids)

    def _leave_host(self, space: Space, ids: BlockIds) -> bool:
        """Copy taken victims to disk, those that are admitted there, then evict; true if a slot came free."""
        try:
            self._index.prepare_keys(space, ids)
            if space.disk is not None:
                self._copy_to_disk(space, self._demoted(space, ids, self.disk_terms(space, int(ids.size))))
        finally:
            with self._index.lock:
                freed = space.evict(ids, Tier.HOST)
                self._index.accounting.evicted_blocks["host"] += freed.host.size
            self._index.settle(freed)
        return bool(freed.host.size)

    def disk_terms(self, space: Space, count: int) -> DiskTerms:
        """What so many blocks would meet on disk; `lock` must be held."""
        if self._admission is not DiskAdmission.WORTH or space.disk is None or self._turnover is None:
            return DiskTerms(None, None)
        if not self._disk_is_full or space.disk.free_slots >= count:
            return DiskTerms(None, None)
        seconds = self._turnover.seconds(self._index.clock.monotonic()) if space.is_measured else None
        with self._index.lock:
            givers = self._index.givers(Tier.DISK, space)
        return DiskTerms(space.value(givers[0].worth) if givers else None, seconds)

    def is_admitted(self, space: Space, ids: BlockIds, terms: DiskTerms) -> Mask:
        """Which of some blocks are on disk or would go there now; the index lock must be held."""
        on_disk = space.lies_in(ids, (Tier.DISK,))
        going = demotion(space.tree, ids, self._admission, terms, self._index.latest_tick).ids
        return np.asarray(on_disk | np.isin(ids, going))

    def _demoted(self, space: Space, ids: BlockIds, terms: DiskTerms) -> BlockIds:
        """Those of some blocks, deeper ones first, that go to disk, in the order of writing."""
        with self._index.lock:
            found = demotion(space.tree, ids, self._admission, terms, self._index.latest_tick)
            self._index.accounting.rejected_blocks["not_admitted"] += found.refused_count
        return found.ids

    def _copy_to_disk(self, space: Space, ids: BlockIds) -> bool:
        """Write blocks to disk, root to leaf, as many as find room. They are held or taken by the caller.

        False where there was no room for all of them.
        """
        step = _batch_blocks(space)
        for start in range(0, ids.size, step):
            batch = ids[start : start + step]
            slots = self.disk_slots(space, batch.size)
            refused = self._write_batch(space, batch[: slots.size], slots)
            with self._index.lock:
                reason = "quota" if space.disk is not None and space.disk.at_limit else "disk_full"
                self._index.accounting.rejected_blocks[reason] += batch.size - slots.size
                self._index.accounting.rejected_blocks.update(refused)
            if slots.size < batch.size:
                return False
        return True

    def _write_batch(self, space: Space, ids: BlockIds, slots: Slots) -> Counter[str]:
        """Write blocks to slots that are theirs from now on; how many were refused, by reason."""
        if space.disk is None or not ids.size:
            return Counter()
        placed = np.zeros(ids.size, dtype=np.bool_)
        try:
            with self._index.lock:
                identities = space.identities(ids)
                host_slots = space.tree.slots(ids, Tier.HOST)
            sources = [space.host.views(int(slot)) for slot in host_slots]
            written = write_blocks(space.disk, slots, (identities, sources), partial(self.free_disk, space))
            stored = written.stored
            with self._index.lock:
                placed[stored] = space.tree.place(ids[stored], Tier.DISK, slots[stored])
                self._index.accounting.written_bytes += int(placed.sum()) * space.layout.block_bytes
                space.announce(Tier.DISK, [identities[i].key for i in np.flatnonzero(placed)])
        finally:
            if not placed.all():
                space.disk.free(slots[~placed])
        if self._turnover is not None:
            self._turnover.note(int(placed.sum()) * space.disk.slot_bytes, self._index.clock.monotonic())
        return written.refused

    def disk_slots(self, space: Space, count: int) -> Slots:
        """Up to `count` slots on disk, after evicting others if needed; `lock` must be held."""
        if space.disk is None:
            return _EMPTY
        slots = space.disk.allocate(count)
        self._disk_is_full = bool(slots.size < count)
        return _allocate_with(space.disk, count, slots, lambda rest: self.free_disk(space, rest))

    def free_disk(self, space: Space, wanted: int) -> bool:
        """Let some blocks leave the disk; false if none could. `lock` must be held."""
        others = [pool for other in self._index.spaces() for pool in other.pools(Tier.DISK) if pool is not space.disk]
        if space.disk is not None and not space.disk.at_limit and (_give_back_idle(others) or self._drop_unclaimed()):
            return True
        if self._free_condemned() or self._free(space, Tier.DISK, wanted, inf):
            return True
        return self._free_excess(space, Tier.DISK)

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
        disk.policy_files.remove(found.ns_id)
        if isinstance(disk, PinKeepingTier):
            disk.pin_files.remove(found.ns_id)
        return _give_back_idle([pool])

    def _reclaim(self, space: Space, tier: Tier, worth: float) -> bool:
        """Return one extent or slab of a space to its tier, for another space to have; true if that was done."""
        if space.states is not None:
            return self.states.reclaim(space, tier, worth)
        if tier is Tier.HOST:
            return self._reclaim_extent(space, worth)
        if space.disk is None:
            return False
        if space.least_bytes(tier):
            return self._reclaim_by_worth(space, space.disk)
        return self._reclaim_slab(space, space.disk)

    def _reclaim_extent(self, space: Space, worth: float) -> bool:
        """Let as much leave as the emptiest extent holds, by worth, and move what is left in that one elsewhere."""
        for extent in sorted(space.host.ranges(), key=space.host.used_in):
            # What somebody holds cannot move. Looking on loses nothing: pins may hold any number of extents for long.
            # Last, who maps the extent is asked for it, so that nobody is where that would be for nothing.
            if not is_movable(self._index, space, extent) or space.host.is_kept(extent):
                continue
            used_count = space.host.used_in(extent)
            missing_count = used_count - (space.host.free_slots - (extent.count - used_count))
            if missing_count > 0 and not self._evict_all(space, missing_count, worth):
                return False
            move_out(self._index, space, extent)
            if space.host.give_back(extent):
                return True
        return False

    def _evict_all(self, space: Space, count: int, worth: float) -> bool:
        """Let `count` blocks that others may take leave host memory; false, and none leaves, where there are fewer."""
        if count > space.spare_blocks(Tier.HOST):
            return False
        with self._index.lock:
            ids = space.tree.take_victims(Tier.HOST, count, space.value(worth))
            freed = space.keep(ids) if ids.size < count else None
        if freed is None:
            return self._leave_host(space, ids)
        self._index.settle(freed)
        return False

    def _reclaim_by_worth(self, space: Space, disk: PersistentPool) -> bool:
        """Let blocks leave by worth until some slab is empty: what it is ensured is kept to the block.

        Four slabs' worth of free slots among used ones say that no slab will be empty soon.
        """
        step = max((slab.count for slab in disk.ranges() if not disk.is_kept(slab)), default=0)
        while disk.free_slots < _RECLAIM_TRIES * step:
            count = min(step, space.spare_blocks(Tier.DISK))
            if not count or not self._evict(space, Tier.DISK, count, inf):
                return False
            if _give_back_idle([disk]):
                return True
        return False

    def _reclaim_slab(self, space: Space, disk: PersistentPool) -> bool:
        """Empty a slab as it lies."""
        tries = 0
        for slab in disk.ranges():
            if tries == _RECLAIM_TRIES:
                break
            if disk.is_kept(slab):
                continue
            # Where everything is held nothing is lost by looking on: pins may hold any number of slabs for long.
            tries += self._leave_slab(space, slab)
            if disk.give_back(slab):
                return True
        return False

    def _leave_slab(self, space: Space, slab: SlotRange) -> bool:
        """Evict what is not held in a range of slots, a slice of the tree at a time; true if there was something."""
        found = False
        next_id: int | None = 0
        while next_id is not None:
            with self._index.lock:
                ids, next_id = space.tree.take_range(Tier.DISK, slab.first, slab.count, next_id)
            if not ids.size:
                continue
            found = True
            self._leave_disk(space, ids)
        return found


def _give_back_idle(pools: Iterable[Pool]) -> bool:
    """Return the extents or slabs in which nothing is used to their tier; true if there was one."""
    return sum(pool.give_back(slot_range) for pool in pools for slot_range in pool.ranges()) > 0


def _batch_blocks(space: Space) -> int:
    return max(1, _BATCH_BYTES // space.layout.block_bytes)


def _allocate_with(pool: Pool, count: int, slots: Slots, free_some: Callable[[int], bool]) -> Slots:
    """Allocate until `count` slots are there or `free_some(missing)` says that nothing more comes free.

    Gives up, too, where what comes free brings nothing a few times: the system refuses the memory, or others were
    faster. Owns `slots` until it returns: an exception, Ctrl-C above all, gives them back.
    """
    tries = 0
    try:
        while slots.size < count and tries < _TRIES_MAX and free_some(count - slots.size):
            more = pool.allocate(count - slots.size)
            tries = 0 if more.size else tries + 1
            slots = np.concatenate([slots, more])
    except BaseException:
        pool.free(slots)
        raise
    return slots
