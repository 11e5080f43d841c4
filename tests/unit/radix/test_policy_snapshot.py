"""What a policy knew comes back in another tree that has the same blocks: the order of victims is what it was."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.radix.tree import POLICIES, RadixTree
from kvstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.types import BlockIds, TokenArray

BLOCK_TOKENS = 2
NS_KEY = bytes(range(16))
ROOTS = (b"r" * 16, b"s" * 16)
FIRST_TICK = 1 << 46
SECOND = 1_000_000
RUN_BYTES = 40
SAVED_STEPS_MAX = 3 * 128
ALL = 1 << 20

# A request: root, how much it shares with which earlier one, its new blocks, seconds since the one before.
REQUESTS = st.lists(
    st.tuples(st.sampled_from(ROOTS), st.integers(0, 9), st.integers(0, 12), st.integers(1, 9), st.integers(1, 5000)),
    min_size=1,
    max_size=25,
)


@dataclass
class Saved:
    """The parts of a snapshot, and how many steps the longest slice took."""

    tables: bytes
    runs: bytes
    ghosts: bytes
    steps_max: int = field(compare=False)


@dataclass
class Cache:
    """A tree on disk alone, with all its prompts, in which each new block has the next slot."""

    policy: str
    edge_blocks: int = 1024
    tick: int = FIRST_TICK
    prompts: list[tuple[bytes, TokenArray]] = field(default_factory=list)
    next_slot: int = 0

    def __post_init__(self) -> None:
        self.tree = new_tree(self.policy, self.edge_blocks)

    def request(self, root: bytes, prompt: TokenArray, seconds: int = 1) -> None:
        """Look a prompt up, and store what is missing."""
        self.tick += seconds * SECOND
        self.tree.touch(self.tree.match(root, prompt), self.tick, prompt.size // BLOCK_TOKENS)
        existing, ids = self.tree.stage(root, prompt, 0, self.tick)
        new = ids.size - existing
        self.tree.place(ids[existing:], Tier.DISK, np.arange(self.next_slot, self.next_slot + new, dtype=np.uint32))
        self.next_slot += new
        self.tree.release(ids)
        self.prompts.append((root, prompt))

    def play(self, requests: list[tuple[bytes, int, int, int, int]]) -> None:
        """Requests that go on from one another; every fifth is followed by evictions."""
        for number, (root, of, shared, new, seconds) in enumerate(requests):
            before = self.prompts[of % len(self.prompts)][1] if self.prompts else np.empty(0, dtype=np.uint32)
            fresh = np.arange(new * BLOCK_TOKENS, dtype=np.uint32) + 1000 * (number + 1)
            self.request(root, np.concatenate([before[: shared * BLOCK_TOKENS], fresh]), seconds)
            if number % 5 == 4:
                self.tree.evict(self.tree.take_victims(Tier.DISK, 6), Tier.DISK)

    def victims(self) -> list[int]:
        """Slots in the order in which they leave, all of them."""
        return victims(self.tree)

    def values(self) -> list[list[float]]:
        """What each block of each prompt is worth now."""
        return [
            [self.tree.value_of(int(block), self.tick) for block in self.tree.match(*prompt)] for prompt in self.prompts
        ]

    def save(self) -> Saved:
        """All slices of all parts."""
        steps: list[int] = []
        parts = [
            part(self.tree, take, steps)
            for take in (
                self.tree.save_tables,
                lambda first: self.tree.save_runs(Tier.DISK, first),
                self.tree.save_ghosts,
            )
        ]
        return Saved(*parts, steps_max=max(steps))

    def reopened(self) -> Cache:
        """Another process's tree with the same blocks in the same slots, of which it knows nothing."""
        again = Cache(self.policy, self.edge_blocks, self.tick, list(self.prompts))
        for root, prompt in self.prompts:
            ids = self.tree.match(root, prompt)
            existing, new = again.tree.stage(root, prompt[: ids.size * BLOCK_TOKENS], 0, self.tick)
            again.tree.place(new[existing:], Tier.DISK, self.tree.slots(ids, Tier.DISK)[existing:])
            again.tree.release(new)
        return again

    def restore(self, saved: Saved, shift: int = 0) -> None:
        """Tell the policy what was saved."""
        self.tree.restore(saved.tables, saved.runs, saved.ghosts, shift=shift, tick=self.tick + max(0, shift))


def new_tree(policy: str, edge_blocks: int = 1024) -> RadixTree:
    return RadixTree(BLOCK_TOKENS, ns_key=NS_KEY, hash_seed=7, policy=policy, edge_blocks=edge_blocks)


def part(tree: RadixTree, take: Callable[[int], tuple[bytes, int | None]], steps: list[int]) -> bytes:
    pieces = []
    first: int | None = 0
    while first is not None:
        before = tree.steps
        piece, first = take(first)
        steps.append(tree.steps - before)
        pieces.append(piece)
    return b"".join(pieces)


def victims(tree: RadixTree) -> list[int]:
    taken: list[BlockIds] = []
    while (ids := tree.take_victims(Tier.DISK, ALL)).size:
        taken.append(tree.slots(ids, Tier.DISK))
    return np.concatenate(taken).tolist() if taken else []


def runs_of(saved: Saved) -> list[bytes]:
    return sorted(saved.runs[at : at + RUN_BYTES] for at in range(0, len(saved.runs), RUN_BYTES))


def prompt_of(blocks: int, first: int = 0) -> TokenArray:
    return np.arange(first, first + blocks * BLOCK_TOKENS, dtype=np.uint32)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=25, deadline=None)
@given(requests=REQUESTS)
def test_victims_leave_in_the_same_order_after_a_restart(
    policy: str, requests: list[tuple[bytes, int, int, int, int]]
) -> None:
    cache = Cache(policy)
    cache.play(requests)
    saved = cache.save()
    again = cache.reopened()
    again.restore(saved)
    assert [] == again.tree.check_integrity()
    assert (saved.tables, saved.ghosts) == (again.save().tables, again.save().ghosts)
    assert cache.victims() == again.victims()


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=25, deadline=None)
@given(requests=REQUESTS)
def test_blocks_are_worth_the_same_where_edges_are_cut_elsewhere(
    policy: str, requests: list[tuple[bytes, int, int, int, int]]
) -> None:
    cache = Cache(policy, edge_blocks=3)
    cache.play(requests)
    again = cache.reopened()
    again.restore(cache.save())
    assert [] == again.tree.check_integrity()
    assert cache.values() == again.values()
    assert sorted(cache.victims()) == sorted(again.victims())


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_saved_is_the_same_after_a_restart(policy: str) -> None:
    cache = Cache(policy)
    cache.play([(ROOTS[0], number, number % 7, 5, 60) for number in range(40)])
    again = cache.reopened()
    again.restore(cache.save())
    assert runs_of(cache.save()) == runs_of(again.save())


@pytest.mark.parametrize("policy", POLICIES)
def test_blocks_that_were_stored_after_it_was_saved_are_as_new(policy: str) -> None:
    cache = Cache(policy)
    cache.request(ROOTS[0], prompt_of(4))
    saved = cache.save()
    cache.request(ROOTS[0], prompt_of(3, first=100), seconds=100)
    again = cache.reopened()
    again.restore(saved)
    assert [] == again.tree.check_integrity()
    assert [*range(3, -1, -1)] == [slot for slot in again.victims() if slot < 4]


def test_blocks_that_are_gone_leave_those_above_them_their_history() -> None:
    cache = Cache("lru")
    cache.request(ROOTS[0], prompt_of(8))
    cache.request(ROOTS[0], prompt_of(8, first=100))
    saved = cache.save()
    taken = cache.tree.take_victims(Tier.DISK, 5)
    cache.tree.evict(taken, Tier.DISK)
    again = cache.reopened()
    again.restore(saved)
    assert [2, 1, 0, *range(15, 7, -1)] == again.victims()


def test_ages_go_on_over_a_restart() -> None:
    cache = Cache("lru")
    cache.request(ROOTS[0], prompt_of(2))
    saved = cache.save()
    again = cache.reopened()
    again.restore(saved, shift=-50 * SECOND)
    assert cache.tick - 50 * SECOND == again.tree.victim_value(Tier.DISK, again.tick)


def test_ticks_before_all_time_are_the_first_one() -> None:
    cache = Cache("lru")
    cache.request(ROOTS[0], prompt_of(2))
    again = cache.reopened()
    again.restore(cache.save(), shift=-(1 << 48) + 1)
    assert 0 == again.tree.victim_value(Tier.DISK, again.tick)


@pytest.mark.parametrize("shift", [1 << 48, -(1 << 48), (1 << 63) - 1, -(1 << 63)])
def test_a_shift_beyond_all_ticks_is_refused(shift: int) -> None:
    cache = Cache("lru")
    cache.request(ROOTS[0], prompt_of(2))
    again = cache.reopened()
    before, saved = again.save(), cache.save()
    with pytest.raises(ValueError, match=r"shift is -?\d+, above 2\^48 - 1 either way"):
        again.tree.restore(saved.tables, saved.runs, saved.ghosts, shift=shift, tick=again.tick)
    assert before == again.save()


def test_a_run_whose_blocks_are_in_memory_alone_is_not_saved() -> None:
    tree = new_tree("lru")
    _, ids = tree.stage(ROOTS[0], prompt_of(4), 0, FIRST_TICK)
    tree.place(ids, Tier.HOST, np.arange(4, dtype=np.uint32))
    assert (b"", None) == tree.save_runs(Tier.DISK)


def test_a_slice_is_bounded_whatever_the_tree() -> None:
    cache = Cache("survival")
    for first in range(0, 40_000, 1000):
        cache.request(ROOTS[0], np.concatenate([prompt_of(5000), prompt_of(30, first=100_000 + first)]))
    long = cache.tree.match(ROOTS[0], prompt_of(5000))
    cache.tree.touch(long[::2].copy(), cache.tick + 1, 5000)  # every block a run of its own
    cache.tree.evict(cache.tree.take_victims(Tier.DISK, 600), Tier.DISK)
    saved = cache.save()
    assert len(saved.runs) >= 5000 * RUN_BYTES
    assert saved.steps_max <= SAVED_STEPS_MAX


def test_what_changes_between_two_slices_breaks_nothing() -> None:
    cache = Cache("survival")
    pieces = []
    first: int | None = 0
    number = 0
    while first is not None:
        number += 1
        cache.request(ROOTS[0], prompt_of(40, first=number % 7 * 1000 + number) if number < 60 else prompt_of(1))
        if number % 3 == 0:
            cache.tree.evict(cache.tree.take_victims(Tier.DISK, 15), Tier.DISK)
        piece, first = cache.tree.save_runs(Tier.DISK, first)
        pieces.append(piece)
    saved = cache.save()
    again = cache.reopened()
    again.restore(Saved(saved.tables, b"".join(pieces), saved.ghosts, 0))
    assert [] == again.tree.check_integrity()
    assert cache.tree.block_count == len(again.victims())


@pytest.mark.parametrize("policy", POLICIES)
def test_a_cut_or_grown_part_is_refused_and_changes_nothing(policy: str) -> None:
    cache = Cache(policy)
    cache.play([(ROOTS[0], number, number % 7, 5, 60) for number in range(12)])
    saved = cache.save()
    again = cache.reopened()
    before = again.save()
    parts = {"tables": saved.tables, "runs": saved.runs, "ghosts": saved.ghosts}
    bad = [{name: content[:-1]} for name, content in parts.items() if content]
    bad += [{name: content + b"\0"} for name, content in parts.items()]
    for change in bad:
        with pytest.raises(ValueError, match=r"saved|policy|table|hand|cut off"):
            again.tree.restore(**{**parts, **change}, shift=0, tick=again.tick)
    assert (before, []) == (again.save(), again.tree.check_integrity())


@pytest.mark.parametrize(("own", "other"), [*pairwise(POLICIES), ("survival", "lru"), ("lru", "survival")])
def test_what_another_policy_saved_gives_an_error_or_a_sound_tree(own: str, other: str) -> None:
    cache = Cache(other)
    cache.play([(ROOTS[0], number, number % 7, 5, 60) for number in range(30)])
    saved = cache.save()
    again = Cache(own)
    for root, prompt in cache.prompts:
        again.request(root, prompt)
    before = again.save()
    try:
        again.restore(saved)
    except ValueError:
        assert before == again.save()
    assert [] == again.tree.check_integrity()
    assert again.tree.block_count == len(again.victims())


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_damage_inside_gives_an_error_or_a_sound_tree(data: st.DataObject) -> None:
    policy = data.draw(st.sampled_from(POLICIES))
    cache = Cache(policy)
    cache.play([(ROOTS[0], number, number % 7, 5, 60) for number in range(12)])
    saved = cache.save()
    parts = {"tables": saved.tables, "runs": saved.runs, "ghosts": saved.ghosts}
    name = data.draw(st.sampled_from([name for name, content in parts.items() if content]))
    damaged = bytearray(parts[name])
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    again = cache.reopened()
    with suppress(ValueError):
        again.tree.restore(**{**parts, name: bytes(damaged)}, shift=0, tick=again.tick)
    assert [] == again.tree.check_integrity()
    again.request(ROOTS[0], prompt_of(9, first=77_000))
    assert again.tree.block_count == len(again.victims())
