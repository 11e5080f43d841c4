"""No call does more work than a slice and what its arguments ask for, however large the tree: counted, not timed."""

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import pytest

from kvstore.hashing import block_keys
from kvstore.radix.tree import EDGE_BLOCKS, SLICE_BLOCKS, RadixTree, Removed
from kvstore.types import Tier

NS_KEY = bytes(range(16))
ROOT = b"r" * 16
BLOCKS = 100_000
# A block that is removed is visited twice: hashed, then freed. The last node may lie across the end of the slice. What
# condemns and then reaps does both in one call.
STEPS_MAX = 3 * (SLICE_BLOCKS + EDGE_BLOCKS)

Result = TypeVar("Result")


class Counted:
    """A tree of one-token blocks, and the most steps that one of the calls took beyond the size of its arguments."""

    def __init__(self) -> None:
        self.tree = RadixTree(1, ns_key=NS_KEY, hash_seed=0xC0FFEE)
        self.next_slot = 0
        self.steps_max = 0

    def call(self, call: Callable[[], Result], argument_blocks: int = 0) -> Result:
        before = self.tree.steps
        result = call()
        self.steps_max = max(self.steps_max, self.tree.steps - before - argument_blocks)
        return result

    def store(self, prompt: np.ndarray, tick: int = 1, root: bytes = ROOT) -> np.ndarray:
        existing, ids = self.call(lambda: self.tree.stage(root, prompt, 0, tick), prompt.size)
        fresh = ids[existing:]
        slots = np.arange(self.next_slot, self.next_slot + fresh.size, dtype=np.uint32)
        self.next_slot += fresh.size
        self.call(lambda: self.tree.place(fresh, Tier.HOST, slots), 2 * fresh.size)
        self.call(lambda: self.tree.release(ids), 2 * ids.size)
        return ids

    def reaped(self, removed: Removed) -> tuple[int, list[int], list[bytes]]:
        """Blocks, slots and keys of a removal and of all that it left to reap."""
        parts = [removed]
        while self.tree.condemned:
            parts.append(self.call(self.tree.reap))
        slots = np.concatenate([part.slots(Tier.HOST) for part in parts])
        keys = np.concatenate([part.dropped_keys for part in parts])
        return sum(part.blocks for part in parts), sorted(slots.tolist()), [row.tobytes() for row in keys]


@pytest.fixture
def counted() -> Counted:
    return Counted()


def prompt_of(blocks: int, first: int = 0) -> np.ndarray:
    return np.arange(first, first + blocks, dtype=np.uint32)


def fan(counted: Counted, trunk_blocks: int, leaves: int) -> np.ndarray:
    """A trunk with many short branches at its end; returns the ids of the trunk."""
    trunk = prompt_of(trunk_blocks)
    ids = counted.store(trunk)
    for leaf in range(leaves):
        counted.store(np.append(trunk, np.uint32(10**6 + leaf)))
    return ids


def test_a_long_path_is_cleared_in_slices(counted: Counted) -> None:
    prompt = prompt_of(BLOCKS)
    counted.store(prompt)
    removed = counted.call(counted.tree.clear)
    assert 0 == counted.tree.match(ROOT, prompt).size
    assert counted.tree.condemned
    blocks, slots, keys = counted.reaped(removed)
    assert (BLOCKS, list(range(BLOCKS))) == (blocks, slots)
    assert block_keys(NS_KEY, ROOT, prompt, 1).tobytes() == b"".join(keys)
    assert counted.steps_max <= STEPS_MAX
    assert (0, 0, 0) == (counted.tree.block_count, counted.tree.node_count, counted.tree.root_count)
    assert [] == counted.tree.check_integrity()


def test_many_roots_are_cleared_in_slices(counted: Counted) -> None:
    for root in range(BLOCKS // 10):
        counted.store(prompt_of(4), root=root.to_bytes(16, "big"))
    blocks, slots, _ = counted.reaped(counted.call(counted.tree.clear))
    assert (BLOCKS // 10 * 4, list(range(BLOCKS // 10 * 4))) == (blocks, slots)
    assert counted.steps_max <= STEPS_MAX
    assert [] == counted.tree.check_integrity()


def test_a_wide_subtree_is_dropped_in_slices(counted: Counted) -> None:
    leaves = BLOCKS // 10
    ids = fan(counted, 20, leaves)
    blocks, _, keys = counted.reaped(counted.call(lambda: counted.tree.drop(ids[10:11])))
    assert leaves + 10 == blocks == len(set(keys))
    assert ids[:10].tolist() == counted.tree.match(ROOT, prompt_of(20)).tolist()
    assert counted.steps_max <= STEPS_MAX
    assert [] == counted.tree.check_integrity()


def test_a_last_copy_takes_a_large_subtree_along_in_slices(counted: Counted) -> None:
    ids = counted.store(prompt_of(BLOCKS))
    victims, _ = counted.tree.take_range(Tier.HOST, 5, 1)
    assert ids[5:6].tolist() == victims.tolist()
    blocks, _, _ = counted.reaped(counted.call(lambda: counted.tree.evict(victims, Tier.HOST)))
    assert (BLOCKS - 5, 5) == (blocks, counted.tree.block_count)
    assert counted.steps_max <= STEPS_MAX


def drop_unheld(counted: Counted, prompt: np.ndarray, from_block: int) -> tuple[int, int]:
    """Blocks dropped, and the number of slices it took to find them."""
    blocks = slices = 0
    resume: tuple[int, int] | None = None
    while slices == 0 or resume is not None:
        removed = counted.call(lambda: counted.tree.drop_unheld(ROOT, prompt, from_block, resume))  # noqa: B023
        blocks += removed.blocks
        resume = removed.resume
        slices += 1
    return blocks + counted.reaped(removed)[0] - removed.blocks, slices


def test_what_is_not_held_below_a_held_trunk_is_dropped_in_slices(counted: Counted) -> None:
    leaves = BLOCKS // 10
    ids = fan(counted, 20, leaves)
    counted.tree.lease(ids)
    blocks, slices = drop_unheld(counted, prompt_of(20), 3)
    assert (leaves, True) == (blocks, slices > 1)
    assert (20, ids.tolist()) == (counted.tree.block_count, counted.tree.match(ROOT, prompt_of(20)).tolist())
    assert counted.steps_max <= STEPS_MAX
    assert [] == counted.tree.check_integrity()


def test_a_subtree_that_is_held_as_a_whole_is_walked_in_slices(counted: Counted) -> None:
    leaves = BLOCKS // 10
    ids = fan(counted, 20, leaves)
    leased = [counted.tree.match(ROOT, np.append(prompt_of(20), np.uint32(10**6 + leaf))) for leaf in range(leaves)]
    for path in leased:
        counted.tree.lease(path)
    blocks, slices = drop_unheld(counted, prompt_of(20), 0)
    assert (0, True) == (blocks, slices > 1)
    assert leaves + 20 == counted.tree.block_count
    assert counted.steps_max <= STEPS_MAX
    assert ids.size == 20


@pytest.mark.parametrize("resume", [(2**32 - 1, 0), (0, 0), (10**6, 1)])
def test_a_resume_of_another_call_begins_anew(counted: Counted, resume: tuple[int, int]) -> None:
    counted.store(prompt_of(8))
    other = counted.store(prompt_of(8, first=100))
    resume = (int(other[3]) if resume == (0, 0) else resume[0], counted.tree.removals)
    assert 6 == counted.tree.drop_unheld(ROOT, prompt_of(8), 2, resume).blocks
    assert other.tolist() == counted.tree.match(ROOT, prompt_of(8, first=100)).tolist()


def test_scans_of_all_blocks_come_in_slices(counted: Counted) -> None:
    ids = counted.store(prompt_of(BLOCKS))
    missing: list[int] = []
    taken: list[int] = []
    next_id: int | None = 0
    while next_id is not None:
        found, next_id = counted.call(lambda: counted.tree.missing_in(Tier.DISK, Tier.HOST, next_id))  # noqa: B023
        missing += found.tolist()
        counted.tree.place(found, Tier.DISK, found)
    next_id = 0
    while next_id is not None:
        found, next_id = counted.call(lambda: counted.tree.take_range(Tier.HOST, 10, 70_000, next_id))  # noqa: B023
        taken += found.tolist()
    assert ids.tolist() == missing
    assert sorted(ids[10:70_010].tolist()) == sorted(taken)
    assert counted.steps_max <= STEPS_MAX


@pytest.mark.parametrize("shape", ["a path", "a fan", "a condemned fan", "many roots"])
def test_all_invariants_are_checked_in_slices(counted: Counted, shape: str) -> None:
    leaves = BLOCKS // 10
    if shape == "a path":
        ids = counted.store(prompt_of(BLOCKS))
        counted.tree.keys(ids[-1:])
    elif shape == "many roots":
        for root in range(leaves):
            counted.store(prompt_of(1), root=root.to_bytes(16, "big"))
    else:
        ids = fan(counted, 3, leaves)
        counted.tree.keys(ids)
        if shape == "a condemned fan":
            counted.call(lambda: counted.tree.drop(ids[:1]))
    counted.steps_max = slices = 0
    found: list[str] | None = None
    while found is None:
        found = counted.call(counted.tree.check_slice)
        slices += 1
    assert ([], True) == (found, slices > 3)
    assert counted.steps_max <= SLICE_BLOCKS + 4 * EDGE_BLOCKS


def test_evicting_the_tail_of_a_long_path_block_by_block_costs_its_blocks(counted: Counted) -> None:
    prompt = prompt_of(20_000)
    counted.store(prompt)
    victims = counted.tree.take_victims(Tier.HOST, 1)
    while not counted.call(lambda: counted.tree.prepare_keys(victims)):
        pass
    before = counted.tree.steps
    keys = []
    for _ in range(4000):
        keys.append(counted.tree.evict(victims, Tier.HOST).dropped_keys.tobytes())
        victims = counted.tree.take_victims(Tier.HOST, 1)
    assert block_keys(NS_KEY, ROOT, prompt, 1)[:-4001:-1].tobytes() == b"".join(keys)
    # Of each block its key, up to 31 before it from one that was kept, and its end; of each node all keys once.
    assert counted.tree.steps - before <= 4000 * 40
    assert counted.steps_max <= STEPS_MAX
    assert [] == counted.tree.check_integrity()


def test_splitting_and_merging_copies_no_more_than_an_edge(counted: Counted) -> None:
    trunk = prompt_of(BLOCKS)
    counted.store(trunk)
    # The number of nodes says whether what fits was merged again: a path of full nodes is the shortest.
    nodes_min = -(-BLOCKS // EDGE_BLOCKS)
    assert nodes_min == counted.tree.node_count
    for at in range(7, 20_000, 333):
        branch = counted.store(np.append(trunk[:at], np.uint32(2**31)))
        counted.call(lambda: counted.tree.drop(branch[-1:]))  # noqa: B023
    assert counted.steps_max <= STEPS_MAX
    assert counted.tree.node_count <= 2 * nodes_min
    assert trunk.size == counted.tree.match(ROOT, trunk).size
    assert [] == counted.tree.check_integrity()


def test_victims_are_found_beside_condemned_blocks_that_are_colder(counted: Counted) -> None:
    fan(counted, 2, 6000)
    warm = counted.store(prompt_of(3, first=500), tick=9)
    counted.call(lambda: counted.tree.drop(counted.tree.match(ROOT, prompt_of(1))))
    assert counted.tree.condemned
    assert {9, None} >= {counted.call(lambda: counted.tree.victim_value(Tier.HOST, 9))}
    assert 9 == counted.call(lambda: counted.tree.victim_value(Tier.HOST, 9))
    assert warm[::-1].tolist() == counted.call(lambda: counted.tree.take_victims(Tier.HOST, 9)).tolist()
    assert counted.steps_max <= STEPS_MAX


def test_users_of_condemned_blocks_notice_what_users_of_detached_ones_do() -> None:
    tree = RadixTree(1, ns_key=NS_KEY, hash_seed=1, slice_blocks=1, edge_blocks=2)
    prompt = prompt_of(9)
    _, ids = tree.stage(ROOT, prompt, 0, 1)
    tree.place(ids[:8], Tier.HOST, prompt[:8])
    assert 2 == tree.drop(ids[:1]).blocks
    assert tree.condemned
    assert [False, False] == tree.place(ids[7:], Tier.DISK, prompt[7:]).tolist()
    assert prompt.tolist() == tree.tokens(ids).ravel().tolist()
    assert block_keys(NS_KEY, ROOT, prompt, 1).tobytes() == tree.keys(ids)[:, 1].tobytes()
    assert [ROOT] * 9 == [tree.root_of(int(block_id)) for block_id in ids]
    assert 0 == tree.drop(ids).blocks
    freed = tree.release(ids).slots(Tier.HOST).tolist()
    while tree.condemned:
        freed += tree.reap().slots(Tier.HOST).tolist()
    assert list(range(8)) == sorted(freed)
    assert 0 == tree.block_count
    assert [] == tree.check_integrity()


def test_a_match_visits_what_it_finds_and_a_node_for_each_edge(counted: Counted) -> None:
    trunk = prompt_of(20_000)
    counted.store(trunk)
    nodes = counted.tree.node_count
    before = counted.tree.steps
    assert trunk.size == counted.tree.match(ROOT, trunk).size
    assert trunk.size + nodes == counted.tree.steps - before


def test_a_miss_costs_the_same_beside_one_prompt_and_beside_thousands(counted: Counted) -> None:
    fan(counted, 20, 6000)
    stranger = np.append(prompt_of(20), np.uint32(2**31))
    before = counted.tree.steps
    assert 20 == counted.tree.match(ROOT, stranger).size
    assert counted.tree.steps - before <= 20 + 2
