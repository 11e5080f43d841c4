"""The spaces of all namespaces under one lock, with the tiers they draw from."""

from __future__ import annotations

import secrets
import threading
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kvstore import hashing
from kvstore.errors import NoSpaceError
from kvstore.events import EventLog
from kvstore.store.accounting import Accounting
from kvstore.store.budget import StoreBudget, default_bytes_per_second
from kvstore.store.codecs import coding
from kvstore.store.pins import PinTable
from kvstore.store.snapshot import PolicySnapshots, SnapshotOwner
from kvstore.store.space import Space
from kvstore.store.sparse import SparseGroup, SparseParts
from kvstore.store.state_records import PIECE_NUMBERS, StateRecords
from kvstore.store.states import StateTable
from kvstore.tiers.persistent import CodingTier
from kvstore.types import Tier, require_namespace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvstore.clock import Clock
    from kvstore.store.settings import Quota, StoreSettings
    from kvstore.store.space import Freed
    from kvstore.tiers.base import Pool, RecoveredBlock, SlotRange
    from kvstore.tiers.host import HostPool, HostTier
    from kvstore.tiers.persistent import PersistentPool, PersistentTier
    from kvstore.types import BlockIds, KvLayout, Namespace, Slots

_SECRET_BYTES = 32
_TICKS_PER_SECOND = 1_000_000
# Room below for the ticks of earlier runs: 2.2 years of them, and 6.7 years of this one above.
_FIRST_TICK = 1 << 46


# What the marks of a layout without full attention may take: this bounds its index, too. One takes two pages on disk.
_MARKS_RATIO = {Tier.HOST: 1 / 128, Tier.DISK: 1 / 8}


@dataclass(frozen=True, slots=True)
class Giver:
    """A space from which a block may leave a tier, and what that block is worth."""

    space: Space
    worth: float


@dataclass(frozen=True, slots=True)
class Share:
    """Most bytes that dense blocks, and those that each sparse group, may take up in a tier; None for no limit."""

    dense: int | None
    sparse: int


class Index:
    """Owner of the index lock and of everything it guards: every space's tree, the counters, the tick.

    Lock order, outermost first: a lease's or stage's own lock, the room lock (room.py), a space's `removing`, `lock`.
    No I/O and no copy of blocks happens under `lock`, and no more work at a time than a call's arguments ask for and
    one slice of the tree (kvstore.radix.tree). `_opening` serialises the making of spaces and is taken before `lock`.
    """

    def __init__(self, settings: StoreSettings, host: HostTier, disk: PersistentTier | None, clock: Clock) -> None:
        self.settings = settings
        self.host = host
        self.disk = disk
        self.clock = clock
        self.lock = threading.Lock()
        self.accounting = Accounting(settings.request_ids_max)
        start = f"{disk.start_count}-" if disk is not None else ""
        self.events = EventLog(f"{start}{secrets.token_hex(8)}", settings.events_bytes)
        own_secret = disk.node_secret if disk is not None else secrets.token_bytes(_SECRET_BYTES)
        self._node_secret = own_secret if settings.node_secret is None else settings.node_secret
        self.pins = PinTable(self)
        self._opening = threading.Lock()
        self._spaces: dict[Namespace, Space] = {}
        self._opened_at = clock.monotonic()
        self._tick = _FIRST_TICK
        self._snapshots = PolicySnapshots(self)
        self._store_bytes_per_second = settings.store_bytes_per_second or default_bytes_per_second()

    def namespace_id(self, namespace: Namespace) -> bytes:
        """The public name of a namespace here; makes no space for it."""
        return hashing.namespace_id(namespace, self._node_secret)

    def next_tick(self) -> int:
        """The time in microseconds, for a request: larger than any before; `lock` must be held."""
        now = _FIRST_TICK + int((self.clock.monotonic() - self._opened_at) * _TICKS_PER_SECOND)
        self._tick = max(self._tick + 1, now)
        return self._tick

    @property
    def latest_tick(self) -> int:
        """The tick of the latest request; `lock` must be held."""
        return self._tick

    def spaces(self) -> list[Space]:
        """All spaces opened so far."""
        return list(self._spaces.values())

    def settled_spaces(self) -> list[Space]:
        """The same, with those that are being opened at the moment; waits for them."""
        with self._opening:
            return self.spaces()

    def space(self, namespace: Namespace) -> Space:
        """The space of a namespace, made at its first use from what the disk holds of it."""
        require_namespace(namespace)
        space = self._spaces.get(namespace)
        if space is not None:
            return space
        with self._opening:
            space = self._spaces.get(namespace)
            if space is None:
                if len(self._spaces) >= self.settings.namespaces_max and not self._retire_empty_space():
                    raise NoSpaceError(f"the store holds {len(self._spaces)} namespaces, its limit (namespaces_max)")
                space = self._make_space(namespace)
                self._spaces[namespace] = space
            return space

    def count_failed_move(self) -> None:
        """Count a job of the movers that raised."""
        with self.lock:
            self.accounting.prefetches["failed_move"] += 1

    def save_policies(self) -> None:
        """Write down what the eviction policies know, for the next start. No lock may be held."""
        for space in self.spaces():
            self._snapshots.save(space)

    def settle(self, freed: Freed) -> None:
        """Return slots to their pools, and free what the call that freed them left condemned. No lock may be held."""
        freed.settle()
        if freed.more:
            self.drain(freed.space)

    def drain(self, space: Space) -> None:
        """Free what was cut off in a space, or wait for the thread that does."""
        with space.removing:
            reaped = self.reap_all(space)
        for freed in reaped:
            freed.settle_disk()

    def reap_all(self, space: Space) -> list[Freed]:
        """Free what was cut off, holding `lock` for a slice at a time; `space.removing` must be held.

        The caller lets go of it and then returns the slots of the disk: others wait for it, and should not for I/O.
        """
        reaped: list[Freed] = []
        while True:
            with self.lock:
                freed = space.reap() if space.tree.condemned else None
            if freed is None:
                return reaped
            freed.settle_host()
            reaped.append(freed)

    def prepare_keys(self, space: Space, ids: BlockIds) -> None:
        """Make the keys of blocks in use cheap to ask for. `lock` is held for a slice at a time."""
        is_ready = False
        while not is_ready:
            with self.lock:
                is_ready = space.tree.prepare_keys(ids)

    def condemned_space(self) -> Space | None:
        """A space in which something that was cut off holds its slots still; `lock` must be held."""
        return next((space for space in self._spaces.values() if space.tree.condemned), None)

    def givers(self, tier: Tier, asking: Space, pool: Pool | None = None) -> list[Giver]:
        """Spaces from which blocks may leave `tier` for one that asks, the least worth first; `lock` must be held.

        It asks for `pool`, that of its dense blocks if not given. What is worth least is judged as of the latest
        request. Others give nothing of what their quota ensures them, and nothing at all for a pool at its own limit;
        one that has less than its quota ensures it gives last. Since taking from others moves whole extents, their
        blocks count as worth a little more than they are.
        """
        found: list[Giver] = []
        pool = asking.pool(tier) if pool is None else pool
        spaces = [asking] if pool is None or pool.at_limit else self._spaces.values()
        for space in spaces:
            if space is not asking and space.least_bytes(tier) and not space.spare_blocks(tier):
                continue
            value = space.victim_value(tier, self._tick)
            if value is not None:
                found.append(Giver(space, space.worth(value)))
        is_owed = asking.missing_bytes(tier) > 0

        def order(giver: Giver) -> tuple[bool, float, float]:
            is_own = giver.space is asking
            price = giver.worth if is_own else giver.worth * asking.moving_factor
            return (is_owed and is_own, price, giver.space.quota.priority)

        return sorted(found, key=order)

    def worth_of(self, space: Space, block_id: int) -> float:
        """What a block is worth as of the latest request; `lock` must be held."""
        return space.worth(space.tree.value_of(block_id, self._tick))

    def _retire_empty_space(self) -> bool:
        """Forget a namespace that has no blocks or states, staged ones included; `_opening` must be held."""
        with self.lock:
            empty = next((item for item in self._spaces.items() if item[1].is_empty), None)
            if empty is None:
                return False
            namespace, space = empty
            space.retired = True
            del self._spaces[namespace]
        for pool_id in space.pool_ids:
            self.host.forget(pool_id)
            if self.disk is not None:
                self.disk.forget(pool_id)
        return True

    def _make_space(self, namespace: Namespace) -> Space:
        ns_id = self.namespace_id(namespace)
        layout = namespace.layout
        saved = self._snapshots.load(SnapshotOwner(self.settings.eviction_policy, ns_id, layout.block_symbols))
        quota = self.settings.quota(namespace)
        shares = self._shares(layout, quota)
        disk_pool = None
        if self.disk is not None:
            numbers = layout.block_symbols if layout.state is None else PIECE_NUMBERS
            disk_pool = self.disk.pool(ns_id, layout.part_sizes, numbers, bytes_max=shares[Tier.DISK].dense)
            self._use_coding(ns_id, namespace, None)
        host_pool = self.host.pool(ns_id, layout.part_sizes, bytes_max=shares[Tier.HOST].dense)
        ns_key = hashing.namespace_key(namespace, self._node_secret)
        space = Space(
            ns_id=ns_id,
            ns_key=ns_key,
            namespace=namespace,
            host=host_pool,
            disk=disk_pool,
            events=self.events,
            policy=self.settings.eviction_policy,
            sparse=self._make_sparse(ns_id, namespace, shares),
            states=self._make_states(layout, ns_key, host_pool, disk_pool),
            quota=quota,
            hash_seed=None if saved is None else saved.hash_seed,
            budget=StoreBudget(
                self._store_bytes_per_second,
                self.host.capacity_bytes,
                self.clock.monotonic(),
            ),
        )
        if self.disk is not None and disk_pool is not None:
            with self.lock:
                tick = self.next_tick()
            pins = self.pins.saved(ns_id)
            ends = {end.key for pin in pins for end in pin.ends}
            _adopt(self.disk, disk_pool, ns_id, partial(space.adopt, tick=tick, ends=ends))
            for number, group in enumerate(space.sparse.groups):
                if group.disk is not None:
                    pool_id = hashing.group_pool_id(ns_id, number)
                    _adopt(self.disk, group.disk, pool_id, partial(space.adopt_sparse, number))
            with self.lock:
                self.pins.restore(space, pins)
            space.end_adoption()
            if saved is not None:
                self._snapshots.restore(space, saved, tick)
        return space

    def _make_states(
        self, layout: KvLayout, ns_key: bytes, host: HostPool, disk: PersistentPool | None
    ) -> StateTable | None:
        if layout.state is None:
            return None
        records = StateRecords(ns_key, layout.state.piece_bytes)
        return StateTable(layout.state, host, disk, records, bytes_max=self.settings.state_index_bytes)

    def _shares(self, layout: KvLayout, quota: Quota) -> dict[Tier, Share]:
        """What dense blocks and each sparse group of a namespace may take up in each tier."""
        disk_bytes = 0 if self.disk is None else self.disk.capacity_bytes
        limits = {Tier.HOST: (quota.host_max, self.host.capacity_bytes), Tier.DISK: (quota.disk_max, disk_bytes)}
        if not layout.groups:
            return {tier: Share(dense=most, sparse=0) for tier, (most, _) in limits.items()}
        shares = {}
        for tier, (most, capacity) in limits.items():
            whole = capacity if most is None else min(most, capacity)
            sparse = int(whole * self.settings.sparse_ratio_max)
            if not layout.layers:
                sparse = whole - int(whole * _MARKS_RATIO[tier])
            shares[tier] = Share(dense=whole - sparse, sparse=sparse // len(layout.groups))
        return shares

    def _use_coding(self, pool_id: bytes, namespace: Namespace, group: int | None) -> None:
        """Tell a tier that has codecs how a pool's blocks are stored, and what they are: old ones are read by that."""
        if isinstance(self.disk, CodingTier):
            self.disk.use_coding(pool_id, coding(self.settings.codecs, namespace, group))

    def _make_sparse(self, ns_id: bytes, namespace: Namespace, shares: dict[Tier, Share]) -> SparseParts:
        layout = namespace.layout
        groups = []
        for number, rule in enumerate(layout.groups):
            pool_id = hashing.group_pool_id(ns_id, number)
            sizes = layout.group_sizes(number)
            host = self.host.pool(pool_id, sizes, bytes_max=shares[Tier.HOST].sparse)
            disk = None
            if self.disk is not None:
                disk = self.disk.pool(pool_id, sizes, layout.block_symbols, bytes_max=shares[Tier.DISK].sparse)
                self._use_coding(pool_id, namespace, number)
            groups.append(SparseGroup(rule, layout.group_parts(number), host, disk))
        return SparseParts(layout, groups)


def _adopt(
    disk: PersistentTier, pool: PersistentPool, pool_id: bytes, take: Callable[[Iterable[RecoveredBlock]], Slots]
) -> None:
    """Have a space take what the disk holds of one pool; what has no place there, or is beyond its limit, goes."""
    excess = _excess_ranges(pool)
    recovered = disk.recovered(pool_id)
    orphans = take([block for block in recovered if not _lies_in(block, excess)])
    beyond = [block.slot for block in recovered if _lies_in(block, excess)]
    gone = np.concatenate([orphans, np.array(beyond, dtype=np.uint32)])
    if gone.size:
        pool.free(gone)
    for slot_range in excess:
        pool.give_back(slot_range)


def _excess_ranges(pool: PersistentPool) -> list[SlotRange]:
    """The last slabs of a pool that has more than it may: the limit was lowered while the store was closed."""
    left_bytes = pool.bytes_max
    excess = []
    for slot_range in pool.ranges():
        if left_bytes is not None:
            left_bytes -= pool.range_bytes(slot_range)
            if left_bytes < 0:
                excess.append(slot_range)
    return excess


def _lies_in(block: RecoveredBlock, ranges: list[SlotRange]) -> bool:
    return any(found.first <= block.slot < found.first + found.count for found in ranges)
