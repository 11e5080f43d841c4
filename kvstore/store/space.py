"""One namespace inside the store: its tree and its pools, and what it means for a block to leave them."""

from __future__ import annotations

import secrets
import sys
import threading
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from kvstore import hashing
from kvstore.events import EventKind
from kvstore.radix.tree import NO_BLOCK, NO_SLOT, RadixTree, Removed
from kvstore.store.block_writers import BlockWriters
from kvstore.store.budget import StoreBudget
from kvstore.store.placement import leading
from kvstore.store.settings import MEASURING_POLICIES, NO_QUOTA
from kvstore.store.sparse import NO_HOLD, FreedSparse, SparseParts
from kvstore.tiers.base import BlockIdentity, RecoveredBlock
from kvstore.types import PLAIN_ROOT, Tier, TierRun, require_root

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from numpy.typing import NDArray

    from kvstore.events import EventLog
    from kvstore.store.settings import Quota
    from kvstore.store.sparse import SparseHold
    from kvstore.store.states import StateTable, StoredState
    from kvstore.tiers.base import Pool, SlotRange
    from kvstore.tiers.host import HostPool
    from kvstore.tiers.persistent import PersistentPool
    from kvstore.types import BlockIds, Namespace, Root, Slots, TokenArray

_ROOTS_REMEMBERED = 4096
_RUNS_REMEMBERED = 1024
# How much less a block of another namespace must be worth to be taken: each tree learns by itself, so its values differ
# by as much where use does not, and namespaces alike would take extents from each other all the time.
_MOVING_FACTOR = 1.5
_SCALE_MIN = sys.float_info.min
_NO_SLOTS = np.empty(0, dtype=np.uint32)
# From here on slots of the disk are numbers only, of blocks that change their place in host memory; see Space.move.
_PASSING_SLOT = 0xFFF0_0000


@dataclass(frozen=True, slots=True)
class Freed:
    """Slots that left the index under its lock; `settle()` gives them back to their pools outside of it.

    `sparse` are those of sparse parts. With `more`, what this call cut off was too much for one hold of the lock:
    Index.settle frees the rest.
    """

    space: Space
    blocks: int
    host: Slots
    disk: Slots
    more: bool
    sparse: tuple[FreedSparse, ...] = ()

    def settle(self) -> None:
        """Return the slots. Freeing disk slots does I/O, so no lock of the index may be held."""
        self.settle_host()
        self.settle_disk()

    def settle_host(self) -> None:
        """Return the slots of host memory alone; `settle_disk` must follow."""
        if self.host.size:
            self.space.host.free(self.host)
        self.settle_sparse(Tier.HOST)

    def settle_disk(self) -> None:
        """Return the slots of the disk."""
        if self.disk.size and self.space.disk is not None:
            self.space.disk.free(self.disk)
        self.settle_sparse(Tier.DISK)

    def settle_sparse(self, tier: Tier) -> None:
        """Return the slots of sparse parts in one tier alone."""
        for freed in self.sparse:
            if freed.tier is tier:
                freed.pool.free(freed.slots)


@dataclass(frozen=True, slots=True)
class Found:
    """A match made without the index lock, and what tells whether it still holds."""

    root_key: bytes
    prompt: TokenArray
    ids: BlockIds
    removals: int


class Space:
    """A namespace's radix tree, host pool and disk pool, and its sparse parts with theirs, or its sequence states.

    Every method that reads or changes the tree is called with the index lock held, but for `find`; the pools have
    locks of their own. `removing` is held by the thread that frees, slice by slice, what was cut off from the tree.
    """

    def __init__(
        self,
        *,
        ns_id: bytes,
        ns_key: bytes,
        namespace: Namespace,
        host: HostPool,
        disk: PersistentPool | None,
        events: EventLog,
        policy: str,
        sparse: SparseParts | None = None,
        states: StateTable | None = None,
        quota: Quota = NO_QUOTA,
        hash_seed: int | None = None,
        budget: StoreBudget | None = None,
    ) -> None:
        self.ns_id = ns_id
        self.retired = False  # set under the index lock: nothing may be stored here any more
        self.removing = threading.Lock()
        self.namespace = namespace
        layout = self.layout = namespace.layout
        self.host = host
        self.disk = disk
        self.sparse = SparseParts(layout) if sparse is None else sparse
        self.states = states  # then the tree stays empty, and both pools hold pieces of states
        self.quota = quota
        self.budget = StoreBudget(1.0, 0, 0.0) if budget is None else budget
        self.hash_seed = secrets.randbits(64) if hash_seed is None else hash_seed
        self.tree = RadixTree(layout.block_symbols, hash_seed=self.hash_seed, ns_key=ns_key, policy=policy)
        self.writers = BlockWriters()
        self.is_measured = policy in MEASURING_POLICIES
        self.moving_factor = _MOVING_FACTOR if self.is_measured else 1.0
        # The lowest priorities per byte are not told from each other, for worth is divided by this.
        self._scale = max(_SCALE_MIN, quota.priority / (layout.block_bytes if self.is_measured else 1))
        self._ns_key = ns_key
        self._events = events
        self._adopted: dict[BlockIdentity, int] = {}  # ids of blocks that came from disk, while the space is made
        self._adopted_ends: dict[bytes, int] = {}  # ids of blocks that came from disk and end what was pinned, likewise
        self._clearing = False  # what is condemned was cleared: the event that said so names no keys
        self._roots: OrderedDict[bytes, Root] = OrderedDict()  # by key, guarded by _roots_lock
        self._roots_lock = threading.Lock()
        self._root_key = lru_cache(maxsize=_ROOTS_REMEMBERED)(self._make_root_key)

    def pool(self, tier: Tier) -> Pool | None:
        """What it has of a tier; None where there is no such tier."""
        return self.host if tier is Tier.HOST else self.disk

    @property
    def pool_ids(self) -> list[bytes]:
        """The names of its pools, that of its dense blocks first."""
        return [self.ns_id, *(hashing.group_pool_id(self.ns_id, number) for number in range(len(self.sparse.groups)))]

    def pools(self, tier: Tier) -> list[Pool]:
        """All that it has of a tier, sparse parts included."""
        pools = [self.pool(tier), *(group.pool(tier) for group in self.sparse.groups)]
        return [pool for pool in pools if pool is not None]

    @property
    def is_empty(self) -> bool:
        """Whether nothing is stored here, or being stored."""
        return not self.tree.block_count and (self.states is None or self.states.is_idle)

    @property
    def block_count(self) -> int:
        """Blocks, staged ones included, and states."""
        return self.tree.block_count + (0 if self.states is None else len(self.states))

    @property
    def index_bytes(self) -> int:
        """Memory of the index."""
        return (
            self.tree.memory_bytes + self.writers.memory_bytes + (0 if self.states is None else self.states.index_bytes)
        )

    def tier_blocks(self, tier: Tier) -> int:
        """Blocks, and pieces of states, in a tier."""
        return self.tree.tier_blocks(tier) + (0 if self.states is None else self.states.pieces(tier))

    def victim_value(self, tier: Tier, tick: int) -> float | None:
        """The value of what leaves a tier next; None if nothing may."""
        if self.states is None:
            return self.tree.victim_value(tier, tick)
        state = self.states.victim(tier, tick)
        return None if state is None else self.state_value(state, tick)

    def state_value(self, state: StoredState, tick: int) -> float:
        """The value of a state, as that of a block in a tree of the same policy."""
        return state.uses_per_second(tick) if self.is_measured else float(state.used_at)

    def least_bytes(self, tier: Tier) -> int:
        """Bytes of blocks of which other namespaces take nothing."""
        return self.quota.host_min if tier is Tier.HOST else self.quota.disk_min

    def missing_bytes(self, tier: Tier) -> int:
        """How much it holds less than what it is owed; below 0 where it holds more."""
        pool = self.pool(tier)
        return self.least_bytes(tier) - (0 if pool is None else pool.used_slots * pool.slot_bytes)

    def spare_blocks(self, tier: Tier) -> int:
        """How many blocks others may take from it."""
        pool = self.pool(tier)
        return 0 if pool is None else max(0, -self.missing_bytes(tier) // pool.slot_bytes)

    def held_bytes(self, ids: BlockIds) -> int:
        """Bytes that a match keeps from leaving when it is held: its dense parts, and the sparse ones it needs."""
        needed = (len(self.layout.needed_blocks(part, ids.size)) for part in range(len(self.layout.parts)))
        sizes = (part.size_bytes for part in self.layout.parts)
        return sum(count * size for count, size in zip(needed, sizes, strict=True))

    def worth(self, value: float) -> float:
        """What a block of that value in the tree is worth: comparable between namespaces."""
        return value * self._scale

    def value(self, worth: float) -> float:
        """The value in the tree of a block that is worth so much."""
        return worth / self._scale

    def root_key(self, root: Root | None) -> bytes:
        """The 16-byte key of a root, the plain one for None."""
        require_root(root)
        return self._root_key(PLAIN_ROOT if root is None else root)

    def root_of(self, root_key: bytes) -> Root | None:
        """The root of a key; None if that is not remembered."""
        with self._roots_lock:
            return self._roots.get(root_key)

    def find(self, root_key: bytes, prompt: TokenArray) -> Found:
        """Match a prompt without the index lock, so that long lookups run side by side; `confirm` it under the lock."""
        removals = self.tree.removals
        return Found(root_key, prompt, self.tree.match(root_key, prompt), removals)

    def confirm(self, found: Found) -> BlockIds:
        """Ids of a match that are right while the index lock is held: those found, or fresh ones if any block left."""
        if self.tree.removals == found.removals:
            return found.ids
        return self.tree.match(found.root_key, found.prompt)

    def tier_runs(self, ids: BlockIds) -> tuple[TierRun, ...]:
        """Consecutive runs by the tier of each block's best copy; see PrefixMatch.tiers."""
        if not self.sparse.groups and self.tree.leading(ids, Tier.HOST) == ids.size:
            return _host_runs(ids.size)
        on_host = self.tree.slots(ids, Tier.HOST) != NO_SLOT
        if self.sparse.groups:
            on_host[self.host_blocks(ids) : leading(on_host)] = False
        edges = np.flatnonzero(np.diff(on_host)) + 1
        starts = [0, *edges.tolist()] if ids.size else []
        ends = [*starts[1:], ids.size]
        return tuple(
            TierRun(Tier.HOST if on_host[start] else Tier.DISK, end - start)
            for start, end in zip(starts, ends, strict=False)
        )

    def host_blocks(self, ids: BlockIds) -> int:
        """How many leading blocks can be loaded from host memory alone, with the sparse parts that this takes."""
        dense = leading(self.tree.slots(ids, Tier.HOST) != NO_SLOT)
        return int(self.sparse.usable(ids[:dense], (Tier.HOST,)).size)

    def lies_in(self, ids: BlockIds, tiers: Collection[Tier]) -> NDArray[np.bool_]:
        """Whether each block has a copy in one of the tiers; only host memory and disk are asked."""
        there = np.zeros(ids.size, dtype=np.bool_)
        for tier in (Tier.HOST, Tier.DISK):
            if tier in tiers:
                there |= self.tree.slots(ids, tier) != NO_SLOT
        return there

    def identities(self, ids: BlockIds) -> list[BlockIdentity]:
        """Full identities of blocks, for headers."""
        keys = self.tree.keys(ids)
        tokens = self.tree.tokens(ids)
        writers = self.writers.of(ids).tolist()
        return [
            BlockIdentity(self.tree.root_of(int(block)), pair[0].tobytes(), pair[1].tobytes(), row.tobytes(), writer)
            for block, pair, row, writer in zip(ids, keys, tokens, writers, strict=True)
        ]

    def prompt_keys(self, root_key: bytes, prompt: TokenArray) -> list[bytes]:
        """Keys of all whole blocks of a prompt, the root key first. Needs no lock."""
        keys = hashing.block_keys(self._ns_key, root_key, prompt, self.layout.block_symbols)
        return [root_key, *hashing.split_keys(keys)]

    def evict(self, ids: BlockIds, tier: Tier) -> Freed:
        """Let blocks leave a tier; a last copy goes with everything below it. Held blocks are kept."""
        return self._report(self.tree.evict(ids, tier), tier)

    def keep(self, ids: BlockIds) -> Freed:
        """Let victims of host memory stay where they are."""
        self.tree.lease(ids)
        self.tree.evict(ids, Tier.HOST)
        return self._freed(self.tree.release(ids))

    def move(self, ids: BlockIds, slots: Slots, extent: SlotRange, first_id: int) -> Freed:
        """Give victims of host memory other slots there, to which they were copied; those without one stay.

        `ids` are what `take_range` gave for `extent` from `first_id` on. What somebody leased meanwhile stays, too.
        A block that leaves its only tier is gone, so each one that has no copy on disk gets a slot there for the
        moment, which exists by its number alone. Nobody sees it: the lock is held for all of it.
        """
        kept = self.keep(ids)
        targets = dict(zip(ids.tolist(), slots.tolist(), strict=False))
        unheld, _ = self.tree.take_range(Tier.HOST, extent.first, extent.count, first_id)
        is_moving = np.array([block in targets for block in unheld.tolist()], dtype=np.bool_)
        self.keep(unheld[~is_moving])
        moving = unheld[is_moving]
        moved_to = np.array([targets.pop(block) for block in moving.tolist()], dtype=np.uint32)
        self.tree.place(moving, Tier.DISK, np.arange(moving.size, dtype=np.uint32) + np.uint32(_PASSING_SLOT))
        moved_from = self.tree.evict(moving, Tier.HOST).slots(Tier.HOST)
        self.tree.place(moving, Tier.HOST, moved_to)
        passing, _ = self.tree.take_range(Tier.DISK, _PASSING_SLOT, moving.size, first_id)
        self.tree.evict(passing, Tier.DISK)
        unused = np.array(list(targets.values()), dtype=np.uint32)
        host = np.concatenate([kept.host, moved_from, unused])
        return Freed(self, kept.blocks, host, kept.disk, kept.more, kept.sparse)

    def drop(self, ids: BlockIds) -> Freed:
        """Remove blocks and all below them whatever their holds; held ones give their slots back at the release."""
        return self._report(self.tree.drop(ids), None)

    def drop_unheld(
        self, root_key: bytes, prompt: TokenArray, first: int, resume: tuple[int, int] | None
    ) -> tuple[Freed, tuple[int, int] | None]:
        """Remove what is not held of a prompt from block `first` on, with all below it; with where to resume, if so."""
        removed = self.tree.drop_unheld(root_key, prompt, first, resume)
        return self._report(removed, None), removed.resume

    def clear(self) -> Freed:
        """Remove everything, as `drop` does."""
        removed = self.tree.clear()
        self._events.append(EventKind.CLEARED, self.ns_id, tenant=self.namespace.tenant)
        self._clearing = True
        freed = self._freed(removed)
        return freed if self.states is None else replace(freed, sparse=freed.sparse + self.states.clear())

    def reap(self) -> Freed:
        """Free one more slice of what was cut off."""
        return self._report(self.tree.reap(), None)

    def release(self, ids: BlockIds, sparse: SparseHold = NO_HOLD) -> Freed:
        """End one hold on each block, and one on sparse parts."""
        freed = self._freed(self.tree.release(ids))
        return replace(freed, sparse=freed.sparse + self.sparse.release(sparse)) if sparse is not NO_HOLD else freed

    def release_state(self, state: StoredState) -> Freed:
        """End one hold on a state."""
        assert self.states is not None, "who holds a state has a table of them"
        return replace(self.nothing_freed(), sparse=self.states.release(state))

    def nothing_freed(self) -> Freed:
        """What is freed by the end of a hold on nothing."""
        return Freed(self, 0, _NO_SLOTS, _NO_SLOTS, more=False)

    def announce(self, tier: Tier, keys: Sequence[bytes], *, root_key: bytes = b"", parent_key: bytes = b"") -> None:
        """Tell the event log that blocks entered a tier; root and parent where they are new on this node."""
        if keys:
            self._events.append(
                EventKind.STORED,
                self.ns_id,
                tenant=self.namespace.tenant,
                root_key=root_key,
                tier=tier,
                parent_key=parent_key,
                keys=tuple(keys),
            )

    def announce_new(self, keys: Sequence[bytes], path_keys: Sequence[bytes], first: int) -> None:
        """Tell the event log of new blocks in host memory, from block `first` of a path on, which its keys begin with
        that of the root."""
        if keys:
            self._events.append(
                EventKind.STORED,
                self.ns_id,
                tenant=self.namespace.tenant,
                root_key=path_keys[0],
                tier=Tier.HOST,
                parent_key=path_keys[first],
                keys=tuple(keys),
                first_block=first,
                block_tokens=self.layout.block_tokens,
            )

    def announce_states(self, states: Iterable[StoredState], tier: Tier | None, *, is_last_copy: bool) -> None:
        """Tell the event log that states left a tier, or all of them."""
        keys = tuple(state.key for state in states)
        if keys:
            self._tell_removed(tier, keys, last_copy=is_last_copy)

    def adopt(self, recovered: Iterable[RecoveredBlock], tick: int, ends: Collection[bytes] = frozenset()) -> Slots:
        """Take what the disk held into the (still empty) tree; returns the slots of what has no place in it.

        Left out are blocks whose key is not the one that this namespace gives them, whose ancestors are not all
        there, and second copies; of states, what is not whole. For the policy all were used at `tick`, until it is told
        better. `ends` are keys by which adopted_path() will be asked.
        """
        if self.states is not None:
            return self.states.adopt(recovered, tick)
        found = list(recovered)
        children: defaultdict[tuple[bytes, bytes], list[RecoveredBlock]] = defaultdict(list)
        for block in found:
            if self._has_right_key(block.identity):
                children[block.identity.root_key, block.identity.parent_key].append(block)
        taken: dict[int, int] = {}
        for root_key in {block.identity.root_key for block in found}:
            tokens = np.empty(0, dtype=np.uint32)
            for path, first_new in _paths(root_key, children):
                tokens = self._extended(tokens, path, first_new)
                taken.update(self._adopt_path(root_key, path, tokens, tick))
        self._adopted_ends = {
            block.identity.key: taken[block.slot]
            for block in found
            if block.identity.key in ends and block.slot in taken
        }
        if self.sparse.groups:
            self._adopted = {block.identity: taken[block.slot] for block in found if block.slot in taken}
        return np.array([block.slot for block in found if block.slot not in taken], dtype=np.uint32)

    def adopt_sparse(self, number: int, recovered: Iterable[RecoveredBlock]) -> Slots:
        """The same for the parts of a sparse group, after `adopt`: only where their dense block is there."""
        group = self.sparse.groups[number]
        orphans = []
        for block in recovered:
            block_id = self._adopted.get(block.identity)
            if block_id is None or not group.put(block_id, block.identity, Tier.DISK, block.slot):
                orphans.append(block.slot)
        return np.array(orphans, dtype=np.uint32)

    def adopted_path(self, keys: Iterable[bytes]) -> BlockIds:
        """The blocks from the root to the first of some keys that was adopted; none where none was. O(blocks)."""
        end = next((self._adopted_ends[key] for key in keys if key in self._adopted_ends), None)
        path: list[int] = []
        while end is not None:
            path.append(end)
            above = int(self.tree.parents(np.array([end], dtype=np.uint32))[0])
            end = None if above == NO_BLOCK else above
        return self.sparse.usable(np.array(path[::-1], dtype=np.uint32))

    def end_adoption(self) -> None:
        """Forget what was adopted where."""
        self._adopted = {}
        self._adopted_ends = {}

    def _make_root_key(self, root: Root) -> bytes:
        key = hashing.root_key(self._ns_key, root)
        with self._roots_lock:
            self._roots[key] = root
            if len(self._roots) > _ROOTS_REMEMBERED:
                self._roots.popitem(last=False)
        return key

    def _has_right_key(self, identity: BlockIdentity) -> bool:
        tokens = np.frombuffer(identity.tokens, dtype=np.uint32)
        if tokens.size != self.layout.block_symbols:
            return False
        keys = hashing.block_keys(self._ns_key, identity.parent_key, tokens, self.layout.block_symbols)
        return keys.tobytes() == identity.key

    def _extended(self, tokens: TokenArray, path: Sequence[RecoveredBlock], first_new: int) -> TokenArray:
        """The tokens of a path that has its blocks before `first_new` in common with the path of `tokens`."""
        new = [np.frombuffer(block.identity.tokens, dtype=np.uint32) for block in path[first_new:]]
        return np.concatenate([tokens[: first_new * self.layout.block_symbols], *new])

    def _adopt_path(
        self, root_key: bytes, path: Sequence[RecoveredBlock], tokens: TokenArray, tick: int
    ) -> dict[int, int]:
        """The ids of what was taken, by slot."""
        existing, ids = self.tree.stage(root_key, tokens, 0, tick)
        slots = np.array([block.slot for block in path[existing:]], dtype=np.uint32)
        self.writers.note_each(ids[existing:], [block.identity.writer for block in path[existing:]])
        self.tree.place(ids[existing:], Tier.DISK, slots)
        self.tree.release(ids)
        return dict(zip(slots.tolist(), ids[existing:].tolist(), strict=True))

    def _report(self, removed: Removed, tier: Tier | None) -> Freed:
        if tier is not None:
            self._announce_removed(removed.displaced_keys, tier, last_copy=False)
        if tier is Tier.HOST:
            self.sparse.cool(removed.displaced_keys)
        self._announce_removed(removed.dropped_keys, tier, last_copy=True)
        return self._freed(removed)

    def _announce_removed(
        self, keys: np.ndarray[tuple[int, int], np.dtype[np.uint8]], tier: Tier | None, *, last_copy: bool
    ) -> None:
        if len(keys) and not self._clearing:
            self._tell_removed(tier, tuple(hashing.split_keys(keys)), last_copy=last_copy)

    def _tell_removed(self, tier: Tier | None, keys: tuple[bytes, ...], *, last_copy: bool) -> None:
        tenant = self.namespace.tenant
        self._events.append(EventKind.REMOVED, self.ns_id, tenant=tenant, tier=tier, keys=keys, last_copy=last_copy)

    def _freed(self, removed: Removed) -> Freed:
        is_condemned = self.tree.condemned
        self._clearing = self._clearing and is_condemned
        more = is_condemned and removed.blocks > 0
        sparse = self.sparse.forget_keys(removed.dropped_keys) if self.sparse.block_count else ()
        return Freed(self, removed.blocks, removed.slots(Tier.HOST), removed.slots(Tier.DISK), more, sparse)


@lru_cache(maxsize=_RUNS_REMEMBERED)
def _host_runs(blocks: int) -> tuple[TierRun, ...]:
    """The runs of a match that lies in host memory."""
    return (TierRun(Tier.HOST, blocks),) if blocks else ()


def _paths(
    root_key: bytes, children: dict[tuple[bytes, bytes], list[RecoveredBlock]]
) -> Iterable[tuple[list[RecoveredBlock], int]]:
    """Every path from the root to a leaf, with the number of blocks it has in common with the one before."""
    path: list[RecoveredBlock] = []
    common = 0
    waiting = [(block, 0) for block in children.get((root_key, root_key), ())]
    while waiting:
        block, depth = waiting.pop()
        common = min(common, depth)
        del path[depth:]
        path.append(block)
        below = children.get((root_key, block.identity.key), ())
        waiting.extend((child, depth + 1) for child in below)
        if not below:
            yield path, common
            common = len(path)
