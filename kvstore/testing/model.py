"""A naive model of the radix tree: the same contract in dicts, slow and easy to believe.

Every answer of `kvstore.radix.tree.RadixTree` is compared with it. Of the eviction policies it knows LRU; of the others
it knows which blocks may leave (`take`). Ids differ between the two and are never reused here. Where the contract
leaves an order open, the model gives one and the comparison ignores it.

Nothing is ever condemned here: what the tree takes out in slices goes at once. So what several calls removed is
compared when the tree has nothing left to reap. Users of blocks notice nothing else: condemned ones are like detached.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from kvstore.hashing import block_keys
from kvstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# A root key and the token ids of each block from the root on: what a block is.
Path: TypeAlias = tuple[bytes, tuple[tuple[int, ...], ...]]

TIERS = (Tier.HOST, Tier.DISK)
NEARLY_EQUAL = 1.01


@dataclass(slots=True)
class ModelBlock:
    """One block. `attached` is false once it was removed while in use."""

    path: Path
    tick: int
    holds: int = 0
    slots: dict[Tier, int] = field(default_factory=dict)
    leaving: set[Tier] = field(default_factory=set)
    attached: bool = True

    @property
    def depth(self) -> int:
        """Index of the block in its prefix."""
        return len(self.path[1]) - 1

    @property
    def in_use(self) -> bool:
        """Whether somebody may still read its slots."""
        return self.holds > 0 or bool(self.leaving)

    def resident(self, tier: Tier) -> bool:
        """Whether it is in the tier and not about to leave it."""
        return tier in self.slots and tier not in self.leaving


@dataclass(slots=True)
class ModelRemoved:
    """What `kvstore.radix.tree.Removed` says, with slots and keys in no particular order."""

    blocks: int = 0
    kept: int = 0
    slots: dict[Tier, list[int]] = field(default_factory=lambda: {tier: [] for tier in TIERS})
    displaced_keys: list[bytes] = field(default_factory=list)
    dropped_keys: list[bytes] = field(default_factory=list)


class ModelTree:
    """The contract of `RadixTree`, method by method; see there."""

    def __init__(self, block_tokens: int, *, ns_key: bytes) -> None:
        self.block_tokens = block_tokens
        self.blocks: dict[int, ModelBlock] = {}
        self._ns_key = ns_key
        self._ids: dict[Path, int] = {}
        self._next_id = 0

    @property
    def block_count(self) -> int:
        """Blocks in the tree."""
        return len(self._ids)

    @property
    def node_count(self) -> int:
        """A run begins below a root and below every branch; here it is one node, however long."""
        children = Counter(_parent(path) for path in self._ids)
        return sum(1 for path in self._ids if len(path[1]) == 1 or children[_parent(path)] > 1)

    @property
    def root_count(self) -> int:
        """Roots that have blocks."""
        return len({root for root, _ in self._ids})

    def tier_blocks(self, tier: Tier) -> int:
        """Blocks in the tree that have a slot in the tier."""
        return sum(tier in block.slots for block in self._attached())

    def match(self, root: bytes, tokens: Sequence[int]) -> list[int]:
        """Ids of the longest committed prefix."""
        ids = self._present(root, tokens)
        staged = [index for index, block_id in enumerate(ids) if not self.blocks[block_id].slots]
        return ids[: staged[0]] if staged else ids

    def touch(self, ids: Iterable[int], tick: int) -> None:
        """Raise ticks."""
        for block_id in ids:
            self.blocks[block_id].tick = max(self.blocks[block_id].tick, tick)

    def lease(self, ids: Iterable[int]) -> None:
        """Add a hold to each."""
        for block_id in ids:
            self.blocks[block_id].holds += 1

    def release(self, ids: Sequence[int]) -> ModelRemoved:
        """Take a hold from each; what nobody wants any more goes."""
        removed = ModelRemoved()
        for block_id in ids:
            self.blocks[block_id].holds -= 1
        for block_id in ids:
            block = self.blocks.get(block_id)
            if block is None or block.holds:
                continue
            if not block.attached:
                self._free_unless_used(block_id, removed)
            elif not block.slots:
                self._cut(self._below(block.path), removed)
        return removed

    def stage(self, root: bytes, tokens: Sequence[int], from_block: int, tick: int) -> tuple[int, list[int]]:
        """Add what is missing of a prompt as staged blocks; lease and touch the whole path."""
        ids = self._present(root, tokens)
        existing = len(ids)
        if existing < from_block:
            return existing, []
        for path in self._paths(root, tokens)[existing:]:
            self.blocks[self._next_id] = ModelBlock(path, tick)
            self._ids[path] = self._next_id
            ids.append(self._next_id)
            self._next_id += 1
        self.lease(ids)
        self.touch(ids, tick)
        return existing, ids

    def place(self, ids: Sequence[int], tier: Tier, slots: Sequence[int]) -> list[bool]:
        """Set slots where there is a block without one."""
        placed = []
        for block_id, slot in zip(ids, slots, strict=True):
            block = self.blocks[block_id]
            placed.append(block.attached and tier not in block.slots)
            if placed[-1]:
                block.slots[tier] = slot
        return placed

    def hint_next_use(self, block_id: int) -> int:
        """Blocks of the only prompt that goes on from this one, as far up as no other prompt shares them."""
        block = self.blocks[block_id]
        if not block.attached:
            return 0
        below = [self.blocks[other].path for other in self._below(block.path)]
        root, blocks = max(below, key=lambda path: len(path[1]))
        prompt = [(root, blocks[: end + 1]) for end in range(len(blocks))]
        children = Counter(_parent(path) for path in self._ids)
        shared = sum(any(children[path] > 1 for path in prompt[depth:]) for depth in range(len(prompt)))
        return 0 if shared > block.depth else len(prompt) - shared

    def victim_value(self, tier: Tier) -> int | None:
        """Tick of the next victim of LRU."""
        victim = self._next_victim(tier)
        return None if victim is None else self.blocks[victim].tick

    def take_victims(self, tier: Tier, limit: int, worth: float = inf) -> list[int]:
        """Take the lowest (tick, slot) among the blocks that may leave, again and again."""
        victims: list[int] = []
        while len(victims) < limit and (victim := self._next_victim(tier)) is not None:
            if self.blocks[victim].tick > worth * NEARLY_EQUAL:
                break
            self.blocks[victim].leaving.add(tier)
            victims.append(victim)
        return victims

    def take(self, tier: Tier, victims: Iterable[int]) -> bool:
        """Take what another policy chose, in its order; false, and the rest is left, where one of them may not go."""
        for block_id in victims:
            if not self._may_leave(tier, self.blocks[block_id]):
                return False
            self.blocks[block_id].leaving.add(tier)
        return True

    def take_range(self, tier: Tier, first_slot: int, slot_count: int) -> list[int]:
        """Take what is unheld in a range of slots, deepest first."""
        wanted = range(first_slot, first_slot + slot_count)
        victims = [
            self._ids[block.path]
            for block in self._attached()
            if block.resident(tier) and not block.holds and block.slots[tier] in wanted
        ]
        victims.sort(key=lambda block_id: (-self.blocks[block_id].depth, self.blocks[block_id].slots[tier]))
        for block_id in victims:
            self.blocks[block_id].leaving.add(tier)
        return victims

    def evict(self, ids: Sequence[int], tier: Tier) -> ModelRemoved:
        """End evictions: keep, displace, or remove with the subtree."""
        removed = ModelRemoved()
        last_copies: list[Path] = []
        for block_id in ids:
            block = self.blocks[block_id]
            was_leaving = tier in block.leaving
            block.leaving.discard(tier)
            if block.holds or not was_leaving:
                removed.kept += 1
            elif not block.attached:
                self._free_unless_used(block_id, removed)
            elif len(block.slots) > 1:
                removed.slots[tier].append(block.slots.pop(tier))
                removed.displaced_keys.append(self.key(block_id))
            else:
                last_copies.append(block.path)
        for path in last_copies:
            self._cut(self._below(path), removed)
        return removed

    def drop(self, ids: Sequence[int]) -> ModelRemoved:
        """Remove subtrees whoever holds them."""
        removed = ModelRemoved()
        for path in [self.blocks[block_id].path for block_id in ids if self.blocks[block_id].attached]:
            self._cut(self._below(path), removed)
        return removed

    def drop_unheld(self, root: bytes, tokens: Sequence[int], from_block: int) -> ModelRemoved:
        """Remove what nobody holds of the subtree of one block."""
        removed = ModelRemoved()
        present = self._present(root, tokens)
        if from_block < len(present):
            below = self._below(self.blocks[present[from_block]].path)
            self._cut([block_id for block_id in below if not self.blocks[block_id].holds], removed)
        return removed

    def clear(self) -> ModelRemoved:
        """Remove everything."""
        removed = ModelRemoved()
        self._cut(list(self._ids.values()), removed)
        return removed

    def missing_in(self, tier: Tier, source_tier: Tier) -> list[int]:
        """All blocks that are in one tier and not in the other, ancestors first."""
        ids = [
            block_id
            for block_id in self._ids.values()
            if source_tier in self.blocks[block_id].slots and tier not in self.blocks[block_id].slots
        ]
        return sorted(ids, key=lambda block_id: self.blocks[block_id].depth)

    def boundaries(self, every: int) -> list[int]:
        """All committed blocks at whose end the prefix has a multiple of `every` blocks."""
        return [
            block_id
            for block_id in self._ids.values()
            if self.blocks[block_id].slots and len(self.blocks[block_id].path[1]) % every == 0
        ]

    def keys(self, block_id: int) -> tuple[bytes, bytes]:
        """The parent's key and the block's own."""
        root, path = self.blocks[block_id].path
        tokens = np.array([token for block in path for token in block], dtype=np.uint32)
        chain = [root, *(row.tobytes() for row in block_keys(self._ns_key, root, tokens, self.block_tokens))]
        return chain[-2], chain[-1]

    def key(self, block_id: int) -> bytes:
        """The block's own key."""
        return self.keys(block_id)[1]

    def _attached(self) -> Iterable[ModelBlock]:
        return (self.blocks[block_id] for block_id in self._ids.values())

    def _paths(self, root: bytes, tokens: Sequence[int]) -> list[Path]:
        count = len(tokens) // self.block_tokens
        blocks = [tuple(tokens[i * self.block_tokens : (i + 1) * self.block_tokens]) for i in range(count)]
        return [(root, tuple(blocks[: i + 1])) for i in range(count)]

    def _present(self, root: bytes, tokens: Sequence[int]) -> list[int]:
        ids = []
        for path in self._paths(root, tokens):
            if path not in self._ids:
                break
            ids.append(self._ids[path])
        return ids

    def _below(self, path: Path) -> list[int]:
        """The block at `path` and all that lies below it; nothing where it is gone."""
        root, blocks = path
        return [
            block_id
            for (other_root, other), block_id in self._ids.items()
            if other_root == root and other[: len(blocks)] == blocks
        ]

    def _next_victim(self, tier: Tier) -> int | None:
        candidates = [
            (block.tick, block.slots[tier], self._ids[block.path])
            for block in self._attached()
            if self._may_leave(tier, block)
        ]
        return min(candidates)[2] if candidates else None

    def _may_leave(self, tier: Tier, block: ModelBlock) -> bool:
        return block.attached and block.resident(tier) and not block.holds and self._is_last_in(tier, block.path)

    def _is_last_in(self, tier: Tier, path: Path) -> bool:
        return sum(self.blocks[block_id].resident(tier) for block_id in self._below(path)) == 1

    def _cut(self, ids: Sequence[int], removed: ModelRemoved) -> None:
        for block_id in ids:
            block = self.blocks[block_id]
            if block.slots:
                removed.dropped_keys.append(self.key(block_id))
            removed.blocks += 1
            del self._ids[block.path]
            block.attached = False
            self._free_unless_used(block_id, removed)

    def _free_unless_used(self, block_id: int, removed: ModelRemoved) -> None:
        if self.blocks[block_id].in_use:
            return
        for tier, slot in self.blocks.pop(block_id).slots.items():
            removed.slots[tier].append(slot)


def _parent(path: Path) -> Path:
    root, blocks = path
    return root, blocks[:-1]
