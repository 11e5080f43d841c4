"""The native tree and its naive model do the same things and must give the same answers.

The model removes at once what the tree may remove in slices, with any other calls between them. It knows LRU; of the
victims of other policies it only knows whether they may leave.
"""

from collections import Counter
from math import inf

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.radix.tree import EDGE_BLOCKS, NO_BLOCK, NO_SLOT, POLICIES, SLICE_BLOCKS, RadixTree, Removed
from kvstore.testing.model import TIERS, ModelRemoved, ModelTree

NS_KEY = b"model namespace!"
ROOTS = (b"root-a".ljust(16, b"."), b"root-b".ljust(16, b"."))
SLOT_SPACE = 4096
PROMPT_BLOCKS_MAX = 7

roots = st.sampled_from(ROOTS)
tiers = st.sampled_from(TIERS)
SECOND = 1_000_000
ticks = st.integers(0, 7).map(lambda seconds: seconds * SECOND)
prompts = st.lists(st.integers(0, 2), max_size=PROMPT_BLOCKS_MAX)
depths = st.integers(0, 5)
picks = st.integers(0, 2**16)


def ids_array(ids: list[int]) -> np.ndarray:
    return np.array(ids, dtype=np.uint32)


def contents(removed: Removed | ModelRemoved) -> Counter[object]:
    """What was removed, piece by piece, so that what several calls removed can be added up."""
    pieces: Counter[object] = Counter(blocks=removed.blocks)
    for tier in TIERS:
        slots = removed.slots[tier] if isinstance(removed, ModelRemoved) else removed.slots(tier).tolist()
        pieces.update((tier, slot) for slot in slots)
    pieces.update(("displaced", bytes(key)) for key in removed.displaced_keys)
    pieces.update(("dropped", bytes(key)) for key in removed.dropped_keys)
    return pieces


class RadixComparison(RuleBasedStateMachine):
    policies = st.just("lru")

    @initialize(
        pick_policy=st.data(),
        block_tokens=st.integers(1, 3),
        hash_bits=st.sampled_from([0, 2, 32]),
        slice_blocks=st.sampled_from([1, 2, 4, SLICE_BLOCKS]),
        edge_blocks=st.sampled_from([1, 2, 3, EDGE_BLOCKS]),
    )
    def start(
        self, pick_policy: st.DataObject, block_tokens: int, hash_bits: int, slice_blocks: int, edge_blocks: int
    ) -> None:
        self.policy = pick_policy.draw(self.policies, "policy")
        self.tree = RadixTree(
            block_tokens,
            ns_key=NS_KEY,
            hash_seed=0x5EED,
            policy=self.policy,
            hash_bits=hash_bits,
            slice_blocks=slice_blocks,
            edge_blocks=edge_blocks,
        )
        self.model = ModelTree(block_tokens, ns_key=NS_KEY)
        self.has_long_edges = edge_blocks >= PROMPT_BLOCKS_MAX
        self.unreaped: Counter[object] = Counter()
        self.native_of: dict[int, int] = {}
        self.slots_handed_out = 0
        self.slots_outside = {tier: set() for tier in TIERS}
        self.stages: list[tuple[int, list[int]]] = []
        self.leases: list[list[int]] = []
        self.evictions: list[tuple[list[int], object]] = []

    # All lists of ids below are the model's; `native` translates them.

    def native(self, ids: list[int]) -> np.ndarray:
        return ids_array([self.native_of[block_id] for block_id in ids])

    def tokens(self, blocks: list[int]) -> list[int]:
        """Each symbol of a prompt becomes one block; the trailing token makes a partial one."""
        pad = [9] * (self.tree.block_tokens - 1)
        return [token for symbol in blocks for token in [*pad, symbol]] + [7] * (self.tree.block_tokens > 1)

    def new_slots(self, tier: object, count: int) -> list[int]:
        """Fresh slots whose order says nothing about the order of the blocks."""
        slots = [(self.slots_handed_out + i) * 1597 % SLOT_SPACE for i in range(count)]
        self.slots_handed_out += count
        self.slots_outside[tier].update(slots)
        return slots

    def compare_removed(self, removed: Removed, expected: ModelRemoved) -> None:
        assert expected.kept == removed.kept
        for tier in TIERS:
            self.slots_outside[tier].update(expected.slots[tier])
        self.unreaped.update(contents(expected))
        self.settle(removed)

    def settle(self, removed: Removed) -> None:
        """Only what was to go may go; all of it is gone when nothing is condemned."""
        self.unreaped.subtract(contents(removed))
        assert min(self.unreaped.values(), default=0) >= 0
        if not self.tree.condemned:
            assert not +self.unreaped

    def reap_all(self) -> None:
        while self.tree.condemned:
            self.settle(self.tree.reap())

    @precondition(lambda self: self.tree.condemned)
    @rule()
    def reap(self) -> None:
        removed = self.tree.reap()
        assert removed.blocks > 0
        self.settle(removed)

    def place(self, ids: list[int], tier: object) -> None:
        slots = self.new_slots(tier, len(ids))
        expected = self.model.place(ids, tier, slots)
        assert expected == self.tree.place(self.native(ids), tier, ids_array(slots)).tolist()
        self.slots_outside[tier] -= {slot for slot, placed in zip(slots, expected, strict=True) if placed}

    @rule(root=roots, prompt=prompts, from_block=st.integers(0, 3), tick=ticks)
    def stage(self, root: bytes, prompt: list[int], from_block: int, tick: int) -> None:
        tokens = self.tokens(prompt)
        existing, ids = self.model.stage(root, tokens, from_block, tick)
        native_existing, native_ids = self.tree.stage(root, ids_array(tokens), from_block, tick)
        assert (existing, len(ids)) == (native_existing, len(native_ids))
        if not ids:
            return
        assert self.native(ids[:existing]).tolist() == native_ids[:existing].tolist()
        live = {self.native_of[block_id] for block_id in self.model.blocks if block_id in self.native_of}
        assert live.isdisjoint(native_ids[existing:].tolist())
        self.native_of.update(zip(ids, native_ids.tolist(), strict=True))
        self.stages.append((existing, ids))

    @precondition(lambda self: self.stages)
    @rule(pick=picks, tier=tiers, first=st.integers(0, 2), count=depths)
    def place_staged(self, pick: int, tier: object, first: int, count: int) -> None:
        existing, ids = self.stages[pick % len(self.stages)]
        begin = max(0, existing + first - 1)
        self.place(ids[begin : begin + count], tier)

    @precondition(lambda self: self.stages)
    @rule(pick=picks, tier=tiers)
    def commit(self, pick: int, tier: object) -> None:
        existing, ids = self.stages.pop(pick % len(self.stages))
        self.place(ids[existing:], tier)
        self.compare_removed(self.tree.release(self.native(ids)), self.model.release(ids))

    @precondition(lambda self: self.stages)
    @rule(pick=picks)
    def release_stage(self, pick: int) -> None:
        _, ids = self.stages.pop(pick % len(self.stages))
        self.compare_removed(self.tree.release(self.native(ids)), self.model.release(ids))

    @rule(root=roots, prompt=prompts, length=st.integers(1, 7), tick=ticks)
    def match_touch_and_lease(self, root: bytes, prompt: list[int], length: int, tick: int) -> None:
        tokens = self.tokens(prompt)
        ids = self.model.match(root, tokens)
        assert self.native(ids).tolist() == self.tree.match(root, ids_array(tokens)).tolist()
        self.model.touch(ids[:length], tick)
        self.tree.touch(self.native(ids[:length]), tick, max(length, len(prompt)))
        self.model.lease(ids[:length])
        self.tree.lease(self.native(ids[:length]))
        self.leases.append(ids[:length])

    @rule(root=roots, stem=st.lists(st.integers(0, 2), min_size=1, max_size=3), tier=tiers)
    def store_branches_below_a_lease(self, root: bytes, stem: list[int], tier: object) -> None:
        for branch in ([0, 1, 2], [1], [2, 2]):
            self.stage(root, [*stem, *branch], 0, 0)
            self.commit(-1, tier)
        self.match_touch_and_lease(root, stem, len(stem), 0)

    @precondition(lambda self: self.leases)
    @rule(pick=picks)
    def release_lease(self, pick: int) -> None:
        ids = self.leases.pop(pick % len(self.leases))
        self.compare_removed(self.tree.release(self.native(ids)), self.model.release(ids))

    @rule(tier=tiers, limit=st.integers(0, 6), worth=st.sampled_from([inf, inf, 3 * SECOND, 0]))
    def take_victims(self, tier: object, limit: int, worth: float) -> None:
        victims = self.tree.take_victims(tier, limit, worth).tolist()
        # Beside condemned blocks it may give up early.
        limit = len(victims) if self.tree.condemned else limit
        if self.policy == "lru":
            ids = self.model.take_victims(tier, limit, worth)
            assert self.native(ids).tolist() == victims
        else:
            ids = self.model_ids(victims)
            assert self.model.take(tier, ids)
            assert len(ids) == limit or worth < inf or self.model.victim_value(tier) is None
        self.evictions.append((ids, tier))

    def model_ids(self, natives: list[int]) -> list[int]:
        model_of = {native: block_id for block_id, native in self.native_of.items() if block_id in self.model.blocks}
        return [model_of[native] for native in natives]

    @precondition(lambda self: self.model.blocks)
    @rule(pick=picks, tick=ticks, seconds=st.sampled_from([None, 0.0, 5.0, 1e9, inf]))
    def hint_next_use(self, pick: int, tick: int, seconds: float | None) -> None:
        live = list(self.model.blocks)
        block_id = live[pick % len(live)]
        hinted = self.tree.hint_next_use(self.native_of[block_id], tick, seconds)
        assert self.model.hint_next_use(block_id) == hinted

    @rule(tier=tiers, first_slot=st.integers(0, SLOT_SPACE), slot_count=st.integers(0, SLOT_SPACE // 2))
    def take_range(self, tier: object, first_slot: int, slot_count: int) -> None:
        ids = self.model.take_range(tier, first_slot, slot_count)
        slices = []
        next_id: int | None = 0
        while next_id is not None:
            found, next_id = self.tree.take_range(tier, first_slot, slot_count, next_id)
            slices.append(found.tolist())
        order = {native: place for place, native in enumerate(self.native(ids).tolist())}
        for found in slices:
            assert sorted(found, key=order.__getitem__) == found
        assert sorted(order) == sorted(native for found in slices for native in found)
        self.evictions.append((ids, tier))

    @precondition(lambda self: self.evictions)
    @rule(pick=picks, count=depths)
    def place_victims_elsewhere(self, pick: int, count: int) -> None:
        ids, tier = self.evictions[pick % len(self.evictions)]
        other = TIERS[1 - TIERS.index(tier)]
        self.place(ids[:count], other)

    @precondition(lambda self: self.evictions)
    @rule(pick=picks, order=st.sampled_from([1, -1]))
    def evict(self, pick: int, order: int) -> None:
        ids, tier = self.evictions.pop(pick % len(self.evictions))
        ids = ids[::order]
        self.compare_removed(self.tree.evict(self.native(ids), tier), self.model.evict(ids, tier))

    @rule(pick=picks, tier=tiers)
    def evict_what_is_no_victim(self, pick: int, tier: object) -> None:
        live = [block_id for block_id, block in self.model.blocks.items() if tier not in block.leaving]
        ids = live[pick % len(live) :][:2] if live else []
        self.compare_removed(self.tree.evict(self.native(ids), tier), self.model.evict(ids, tier))

    @precondition(lambda self: self.model.blocks)
    @rule(pick=picks, count=st.integers(1, 2))
    def drop(self, pick: int, count: int) -> None:
        live = list(self.model.blocks)
        ids = [live[(pick + i * 5) % len(live)] for i in range(count)]
        self.compare_removed(self.tree.drop(self.native(ids)), self.model.drop(ids))

    @rule(root=roots, prompt=prompts, from_block=depths)
    def drop_unheld(self, root: bytes, prompt: list[int], from_block: int) -> None:
        self.drop_unheld_of(root, self.tokens(prompt), from_block)

    @precondition(lambda self: any(self.leases))
    @rule(pick=picks, from_block=st.integers(0, 1))
    def drop_unheld_below_a_lease(self, pick: int, from_block: int) -> None:
        leases = [ids for ids in self.leases if ids]
        root, blocks = self.model.blocks[leases[pick % len(leases)][-1]].path
        self.drop_unheld_of(root, [token for block in blocks for token in block], from_block)

    def drop_unheld_of(self, root: bytes, tokens: list[int], from_block: int) -> None:
        expected = self.model.drop_unheld(root, tokens, from_block)
        removed = self.tree.drop_unheld(root, ids_array(tokens), from_block)
        self.unreaped.update(contents(expected))
        while removed.resume is not None:
            self.unreaped.subtract(contents(removed))
            removed = self.tree.drop_unheld(root, ids_array(tokens), from_block, removed.resume)
        for tier in TIERS:
            self.slots_outside[tier].update(expected.slots[tier])
        self.settle(removed)

    @precondition(lambda self: self.model.block_count > 6)
    @rule()
    def clear(self) -> None:
        self.compare_removed(self.tree.clear(), self.model.clear())

    @rule(tier=tiers)
    def missing_in(self, tier: object) -> None:
        source = TIERS[1 - TIERS.index(tier)]
        expected = self.model.missing_in(tier, source)
        found: list[int] = []
        next_id: int | None = 0
        while next_id is not None:
            ids, next_id = self.tree.missing_in(tier, source, next_id)
            assert len(ids) == len(set(ids.tolist()))
            found += self.model_ids(ids.tolist())
        found = list(dict.fromkeys(found))
        assert sorted(expected) == sorted(found)
        for index, block_id in enumerate(found):
            root, path = self.model.blocks[block_id].path
            ancestors = {
                other
                for other in expected
                if self.model.blocks[other].path[0] == root
                and len(self.model.blocks[other].path[1]) < len(path)
                and self.model.blocks[other].path[1] == path[: len(self.model.blocks[other].path[1])]
            }
            assert ancestors <= set(found[:index])

    @rule(every=st.integers(1, 3))
    def boundaries(self, every: int) -> None:
        found: list[int] = []
        next_id: int | None = 0
        while next_id is not None:
            ids, next_id = self.tree.boundaries(every, next_id)
            found += self.model_ids(ids.tolist())
        assert sorted(self.model.boundaries(every)) == sorted(found)

    @invariant()
    def the_tree_is_sound(self) -> None:
        assert [] == self.tree.check_integrity()
        assert self.tree.check_slice() in (None, [])  # one check goes on over many steps
        assert self.model.root_count == self.tree.root_count
        for tier in TIERS:
            expected = self.model.victim_value(tier)
            value = self.tree.victim_value(tier, 0)
            if value is None:
                assert self.tree.condemned or expected is None
            elif self.policy == "lru":
                assert expected == value
            else:
                assert expected is not None

    @invariant()
    def counts_agree(self) -> None:
        if self.tree.condemned:
            return
        assert self.model.block_count == self.tree.block_count
        if self.has_long_edges:
            assert self.model.node_count == self.tree.node_count
        for tier in TIERS:
            assert self.model.tier_blocks(tier) == self.tree.tier_blocks(tier)

    @invariant()
    def blocks_agree(self) -> None:
        live = list(self.model.blocks)
        native = self.native(live)
        keys = self.tree.keys(native)
        tokens = self.tree.tokens(native)
        slots = {tier: self.tree.slots(native, tier) for tier in TIERS}
        for tier, found in slots.items():
            absent = np.flatnonzero(found == NO_SLOT)
            assert (absent[0] if absent.size else len(live)) == self.tree.leading(native, tier)
        values = self.tree.values(native, 0).tolist()
        assert values == [self.tree.value_of(int(block), 0) for block in native]
        self.compare_relations(live, native)
        for row, block_id in enumerate(live):
            block = self.model.blocks[block_id]
            assert self.model.keys(block_id) == (keys[row, 0].tobytes(), keys[row, 1].tobytes())
            assert block.path[1][-1] == tuple(tokens[row].tolist())
            assert block.path[0] == self.tree.root_of(int(native[row]))
            if self.policy == "lru":
                assert (block.tick if block.attached else 0) == self.tree.value_of(int(native[row]), 0)
            for tier in TIERS:
                assert block.slots.get(tier, NO_SLOT) == slots[tier][row]

    def compare_relations(self, live: list[int], native: np.ndarray) -> None:
        if self.tree.condemned:
            return
        parents = self.tree.parents(native)
        carries = {tier: self.tree.carries(native, tier) for tier in TIERS}
        for row, block_id in enumerate(live):
            root, path = self.model.blocks[block_id].path
            attached = self.model.blocks[block_id].attached
            above = [
                i for i in live if self.model.blocks[i].attached and (root, path[:-1]) == self.model.blocks[i].path
            ]
            expected = int(self.native(above)[0]) if attached and above else NO_BLOCK
            assert expected == parents[row]
            below = [block for block in self.model.blocks.values() if block.attached and block.path[0] == root]
            for tier in TIERS:
                is_below = (
                    len(b.path[1]) > len(path) and b.path[1][: len(path)] == path and b.resident(tier) for b in below
                )
                assert (attached and any(is_below)) == carries[tier][row]

    @invariant()
    def no_slot_is_lost_or_shared(self) -> None:
        for tier in TIERS:
            inside = [block.slots[tier] for block in self.model.blocks.values() if tier in block.slots]
            assert len(inside) == len(set(inside))
            assert self.slots_outside[tier].isdisjoint(inside)

    def teardown(self) -> None:
        """When all users have let go and all is cleared, nothing is left."""
        if not hasattr(self, "tree"):
            return
        for ids, tier in self.evictions:
            self.compare_removed(self.tree.evict(self.native(ids), tier), self.model.evict(ids, tier))
        for ids in [*self.leases, *(ids for _, ids in self.stages)]:
            self.compare_removed(self.tree.release(self.native(ids)), self.model.release(ids))
        self.compare_removed(self.tree.clear(), self.model.clear())
        self.reap_all()
        assert not self.model.blocks
        assert (0, 0, 0) == (self.tree.block_count, self.tree.node_count, self.tree.root_count)
        assert [] == self.tree.check_integrity()


class OtherPoliciesComparison(RadixComparison):
    policies = st.sampled_from([name for name in POLICIES if name != "lru"])


TestRadixComparison = RadixComparison.TestCase
TestRadixComparison.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestOtherPoliciesComparison = OtherPoliciesComparison.TestCase
TestOtherPoliciesComparison.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
