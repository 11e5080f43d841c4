"""Sparse parts of one namespace: at which blocks they are, in which slots, and who may leave first.

They have pools of their own in each tier, one for each group, named after the namespace (kvstore.hashing), and belong
to the dense block at which they stand: when it leaves the tree, they leave too. All parts of a group stand or go
together; losing them only makes matches shorter. Nothing here takes a lock: whoever calls holds the index lock.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from kvstore.hashing import split_keys
from kvstore.store.match_rules import usable_blocks
from kvstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from numpy.typing import NDArray

    from kvstore.layer_groups import LayerGroup
    from kvstore.radix.tree import RadixTree
    from kvstore.tiers.base import BlockIdentity, Pool, SlotRange
    from kvstore.tiers.host import HostPool
    from kvstore.tiers.persistent import PersistentPool
    from kvstore.types import BlockIds, KvLayout, Slots

    Mask = NDArray[np.bool_]

_TIERS = (Tier.HOST, Tier.DISK)
_IDS_MIN = 1024


@dataclass(slots=True, eq=False)
class SparseBlock:
    """The parts that one group has at one block.

    `holds` are those of leases, of pins and of who moves it. Detached it can be matched no more, and its slots come
    back when the last hold ends. `needed_at` says which was needed later, by a count of the group's requests.
    """

    block_id: int
    identity: BlockIdentity
    slots: dict[Tier, int] = field(default_factory=dict)
    holds: int = 0
    attached: bool = True
    needed_at: int = 0


@dataclass(frozen=True, slots=True)
class FreedSparse:
    """Slots that nothing refers to any more; the caller gives them back to their pool without the index lock."""

    pool: Pool
    tier: Tier
    slots: Slots


@dataclass(frozen=True, slots=True)
class SparseHold:
    """What a match needs of each group, held: the blocks from `first_blocks[g]` on are `blocks[g]`."""

    first_blocks: tuple[int, ...] = ()
    blocks: tuple[tuple[SparseBlock, ...], ...] = ()


NO_HOLD = SparseHold()


class SparseGroup:
    """One group's table from blocks to slots, and the order in which its blocks leave each tier."""

    def __init__(self, rule: LayerGroup, parts: range, host: HostPool, disk: PersistentPool | None) -> None:
        self.rule = rule
        self.parts = parts
        self.host = host
        self.disk = disk
        self._by_id: dict[int, SparseBlock] = {}
        self._by_key: dict[bytes, SparseBlock] = {}
        self._order: dict[Tier, OrderedDict[int, SparseBlock]] = {tier: OrderedDict() for tier in _TIERS}
        self._cooled: dict[int, SparseBlock] = {}
        self._requests = 0
        self._is_there = np.zeros(_IDS_MIN, dtype=np.bool_)  # by block id; the last one is false, for all beyond

    def __len__(self) -> int:
        return len(self._by_id)

    def blocks(self) -> list[SparseBlock]:
        """All that can be matched."""
        return list(self._by_id.values())

    def pool(self, tier: Tier) -> Pool | None:
        """Its pool in a tier; None where there is no such tier."""
        return self.host if tier is Tier.HOST else self.disk

    def mask(self, ids: BlockIds) -> Mask:
        """At which of these blocks it is."""
        return self._is_there.take(ids, mode="clip")

    def mask_in(self, ids: BlockIds, tiers: Collection[Tier] | None) -> Mask:
        """At which of these blocks it is with a copy in one of these tiers; None for any."""
        mask = self.mask(ids)
        if tiers is None:
            return mask
        for index in np.flatnonzero(mask).tolist():
            mask[index] = not self._by_id[int(ids[index])].slots.keys().isdisjoint(tiers)
        return mask

    def find(self, ids: Iterable[int]) -> list[SparseBlock]:
        """Its parts at those of these blocks that have them."""
        return [found for block_id in ids if (found := self._by_id.get(block_id)) is not None]

    def put(self, block_id: int, identity: BlockIdentity, tier: Tier, slot: int) -> bool:
        """Take parts that lie in a slot; false, with the slot left to the caller, where the block has them."""
        known = self._by_id.get(block_id)
        assert known is None or known.identity.key == identity.key, "parts stand at a block that left the tree"
        if known is not None or identity.key in self._by_key:
            return False
        block = SparseBlock(block_id, identity, needed_at=self._requests)
        self._by_id[block_id] = self._by_key[identity.key] = block
        if block_id >= self._is_there.size - 1:
            grown = np.zeros(2 * block_id + 2, dtype=np.bool_)
            grown[: self._is_there.size] = self._is_there
            self._is_there = grown
        self._is_there[block_id] = True
        self.place(block, tier, slot)
        return True

    def place(self, block: SparseBlock, tier: Tier, slot: int) -> bool:
        """Give a block a slot in another tier; false, with the slot left to the caller, where it cannot have it."""
        if not block.attached or tier in block.slots:
            return False
        block.slots[tier] = slot
        self._order[tier][block.block_id] = block
        return True

    def touch(self, blocks: Iterable[SparseBlock]) -> None:
        """A request needed these."""
        self._requests += 1
        for block in blocks:
            self._cooled.pop(block.block_id, None)
            block.needed_at = self._requests
            if block.attached:
                for tier in block.slots:
                    self._order[tier].move_to_end(block.block_id)

    def hold(self, blocks: Iterable[SparseBlock]) -> None:
        """Keep these where they are until they are released; who is held does not follow its dense block."""
        for block in blocks:
            self._cooled.pop(block.block_id, None)
            block.holds += 1

    def take_victims(self, tier: Tier, count: int, before: int | None = None) -> list[SparseBlock]:
        """Up to `count` blocks that nobody holds, those needed longest ago; held until `leave` is called for them.

        None that was needed at request `before` or later, if given.
        """
        victims: list[SparseBlock] = []
        for block in self._order[tier].values():
            if len(victims) == count or (before is not None and block.needed_at >= before):
                break
            if not block.holds:
                block.holds += 1
                victims.append(block)
        return victims

    def take_range(self, tier: Tier, slots: SlotRange) -> list[SparseBlock]:
        """The blocks that lie in these slots of a tier and that nobody holds; as `take_victims`."""
        wanted = range(slots.first, slots.first + slots.count)
        victims = [block for block in self._order[tier].values() if not block.holds and block.slots[tier] in wanted]
        for block in victims:
            block.holds += 1
        return victims

    def needed_at(self, tier: Tier, slots: SlotRange) -> int:
        """When something in these slots of a tier was needed last; what somebody holds is needed now."""
        wanted = range(slots.first, slots.first + slots.count)
        found = (block for block in self._order[tier].values() if block.slots[tier] in wanted)
        return max((self._requests + 1 if block.holds else block.needed_at for block in found), default=0)

    def cool(self, keys: Iterable[bytes]) -> None:
        """The blocks of these keys left host memory: what stands at them is the first to follow, until it is needed."""
        for key in keys:
            block = self._by_key.get(key)
            if block is not None and Tier.HOST in block.slots:
                self._order[Tier.HOST].move_to_end(block.block_id, last=False)
                self._cooled[block.block_id] = block

    def take_cooled(self, count: int) -> list[SparseBlock]:
        """Up to `count` victims of host memory whose dense blocks left it before; as `take_victims`."""
        cooled = [self._cooled.pop(block_id) for block_id in list(islice(self._cooled, count))]
        victims = [block for block in cooled if not block.holds]
        for block in victims:
            block.holds += 1
        return victims

    def hold_unwritten(self, blocks: Iterable[SparseBlock]) -> list[SparseBlock]:
        """Those of these that are in host memory alone, held until they are released."""
        found = [block for block in blocks if block.attached and tuple(block.slots) == (Tier.HOST,)]
        for block in found:
            block.holds += 1
        return found

    def leave(self, victims: Iterable[SparseBlock], tier: Tier) -> list[FreedSparse]:
        """Let victims leave a tier; who was leased meanwhile stays."""
        freed: dict[Tier, list[int]] = {one: [] for one in _TIERS}
        for block in victims:
            block.holds -= 1
            if block.holds:
                continue
            if block.attached and len(block.slots) > 1:
                del self._order[tier][block.block_id]
                self._cooled.pop(block.block_id, None)
                freed[tier].append(block.slots.pop(tier))
            else:
                self._detach(block)
                _free(block, freed)
        return self._freed(freed)

    def release(self, blocks: Iterable[SparseBlock]) -> list[FreedSparse]:
        """End one hold on each."""
        freed: dict[Tier, list[int]] = {tier: [] for tier in _TIERS}
        for block in blocks:
            block.holds -= 1
            if not block.holds and not block.attached:
                _free(block, freed)
        return self._freed(freed)

    def forget(self, blocks: Iterable[SparseBlock]) -> list[FreedSparse]:
        """Let go of these, whoever holds them."""
        freed: dict[Tier, list[int]] = {tier: [] for tier in _TIERS}
        for block in blocks:
            self._detach(block)
            if not block.holds:
                _free(block, freed)
        return self._freed(freed)

    def forget_keys(self, keys: Iterable[bytes]) -> list[FreedSparse]:
        """Let go of what stands at blocks that left the tree."""
        return self.forget([block for key in keys if (block := self._by_key.get(key)) is not None])

    def _detach(self, block: SparseBlock) -> None:
        if not block.attached:
            return
        block.attached = False
        del self._by_id[block.block_id], self._by_key[block.identity.key]
        self._cooled.pop(block.block_id, None)
        self._is_there[block.block_id] = False
        for tier in block.slots:
            del self._order[tier][block.block_id]

    def _freed(self, freed: dict[Tier, list[int]]) -> list[FreedSparse]:
        return [
            FreedSparse(pool, tier, np.array(slots, dtype=np.uint32))
            for tier, slots in freed.items()
            if slots and (pool := self.pool(tier)) is not None
        ]


class SparseParts:
    """All sparse groups of a namespace; most have none."""

    def __init__(self, layout: KvLayout, groups: Sequence[SparseGroup] = ()) -> None:
        assert len(groups) == len(layout.groups), (len(groups), len(layout.groups))
        self.groups = tuple(groups)
        self._rules = layout.groups
        self._block_tokens = layout.block_tokens

    @property
    def block_count(self) -> int:
        """Blocks that have sparse parts, counted in each group."""
        return sum(len(group) for group in self.groups)

    def usable(self, ids: BlockIds, tiers: Collection[Tier] | None = None) -> BlockIds:
        """As much of a dense match as all groups allow by what they have in these tiers; None for any."""
        if not self.groups:
            return ids
        backs = [group.rule.blocks_back(self._block_tokens) for group in self.groups]
        if all(group.mask_in(ids[-back:], tiers).all() for group, back in zip(self.groups, backs, strict=True)):
            return ids  # nearly always, and a tenth of the work
        held = [group.mask_in(ids, tiers) for group in self.groups]
        return ids[: usable_blocks(ids.size, self._rules, self._block_tokens, held)]

    def touch(self, ids: BlockIds) -> None:
        """A request was told of this usable match."""
        for group, (_, blocks) in zip(self.groups, self._needed(ids), strict=True):
            group.touch(blocks)

    def hold(self, ids: BlockIds) -> SparseHold:
        """Hold what a usable match needs."""
        if not self.groups:
            return NO_HOLD
        needed = self._needed(ids)
        for group, (_, blocks) in zip(self.groups, needed, strict=True):
            group.hold(blocks)
        return SparseHold(tuple(first for first, _ in needed), tuple(tuple(blocks) for _, blocks in needed))

    def release(self, hold: SparseHold) -> tuple[FreedSparse, ...]:
        """End a hold."""
        released = (group.release(blocks) for group, blocks in zip(self.groups, hold.blocks, strict=False))
        return tuple(freed for one in released for freed in one)

    def forget_keys(self, keys: NDArray[np.uint8]) -> tuple[FreedSparse, ...]:
        """Let go of what stands at blocks that left the tree, whose keys are the rows."""
        if not len(keys):
            return ()
        names = split_keys(keys)
        return tuple(freed for group in self.groups for freed in group.forget_keys(names))

    def cool(self, keys: NDArray[np.uint8]) -> None:
        """The blocks whose keys are the rows left host memory and are on disk still."""
        names = split_keys(keys) if self.block_count else []
        for group in self.groups:
            group.cool(names)

    def problems(self, tree: RadixTree, number: int, listed: Sequence[SparseBlock]) -> list[str]:
        """A sentence for each thing about these blocks of a group that does not agree with the tree."""
        group = self.groups[number]
        blocks = [block for block in listed if block.attached]  # others left since they were listed
        ids = np.array([block.block_id for block in blocks], dtype=np.uint32)
        keys = tree.keys(ids) if ids.size else ()
        wrong = sum(pair[1].tobytes() != block.identity.key for block, pair in zip(blocks, keys, strict=True))
        found = []
        if wrong:
            found.append(f"{wrong} blocks of sparse group {number} stand at other blocks than they name")
        if not all(block.slots for block in blocks) or int(group.mask(ids).sum()) != len(blocks):
            found.append(f"sparse group {number} counts blocks that are nowhere")
        return found

    def _needed(self, ids: BlockIds) -> list[tuple[int, list[SparseBlock]]]:
        """For each group the first block that a usable match needs of it, and its parts from there on."""
        needed = []
        for group in self.groups:
            first = max(0, ids.size - group.rule.blocks_back(self._block_tokens))
            needed.append((first, group.find(ids[first:].tolist())))
        return needed


def _free(block: SparseBlock, freed: dict[Tier, list[int]]) -> None:
    for tier, slot in block.slots.items():
        freed[tier].append(slot)
    block.slots = {}
