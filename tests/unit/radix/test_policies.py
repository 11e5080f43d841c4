"""The order in which each policy gives blocks up; of those from papers, compared with the papers' algorithms."""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.radix.tree import EVEN_TOKENS, POLICIES, SLICE_BLOCKS, RadixTree
from kvstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

NS_KEY = bytes(range(16))
ROOT = b"r" * 16
SECOND = 1_000_000
GHOSTS_LEAST = 1024


class Paper(Protocol):
    """A policy on objects of one size. `evict` is called before `insert` where the cache is full."""

    def hit(self, key: int) -> None: ...

    def insert(self, key: int) -> None: ...

    def evict(self) -> int: ...


class Lru:
    def __init__(self) -> None:
        self.order: OrderedDict[int, None] = OrderedDict()

    def hit(self, key: int) -> None:
        self.order.move_to_end(key)

    def insert(self, key: int) -> None:
        self.order[key] = None

    def evict(self) -> int:
        return self.order.popitem(last=False)[0]


class Fifo(Lru):
    def hit(self, key: int) -> None:
        pass


class Lfu(Lru):
    """The least used; of these the least recently used."""

    def __init__(self) -> None:
        super().__init__()
        self.uses: dict[int, int] = {}

    def hit(self, key: int) -> None:
        super().hit(key)
        self.uses[key] += 1

    def insert(self, key: int) -> None:
        super().insert(key)
        self.uses[key] = 1

    def evict(self) -> int:
        victim = min(self.order, key=self.uses.__getitem__)
        del self.order[victim]
        return victim


class Sieve:
    """Zhang et al., NSDI 2024, algorithm 1. The oldest is the tail, at index 0."""

    def __init__(self) -> None:
        self.queue: list[int] = []
        self.visited: set[int] = set()
        self.hand: int | None = None

    def hit(self, key: int) -> None:
        self.visited.add(key)

    def insert(self, key: int) -> None:
        self.queue.append(key)

    def evict(self) -> int:
        at = 0 if self.hand is None else self.queue.index(self.hand)
        while self.queue[at] in self.visited:
            self.visited.remove(self.queue[at])
            at = (at + 1) % len(self.queue)
        victim = self.queue.pop(at)
        self.hand = self.queue[at] if at < len(self.queue) else None
        return victim


class S3Fifo:
    """Yang et al., SOSP 2023, algorithm 1."""

    def __init__(self) -> None:
        self.small: OrderedDict[int, int] = OrderedDict()
        self.main: OrderedDict[int, int] = OrderedDict()
        self.ghosts: OrderedDict[int, None] = OrderedDict()

    def hit(self, key: int) -> None:
        queue = self.small if key in self.small else self.main
        queue[key] = min(3, queue[key] + 1)

    def insert(self, key: int) -> None:
        if key in self.ghosts:
            del self.ghosts[key]
            self.main[key] = 0
        else:
            self.small[key] = 0

    def evict(self) -> int:
        while True:
            is_full = 10 * len(self.small) >= len(self.small) + len(self.main)
            if self.small and (is_full or not self.main):
                key, uses = self.small.popitem(last=False)
                if uses <= 1:
                    self.ghosts[key] = None
                    assert len(self.ghosts) < GHOSTS_LEAST
                    return key
                self.main[key] = 0
            else:
                key, uses = self.main.popitem(last=False)
                if uses == 0:
                    return key
                self.main[key] = uses - 1


PAPERS: dict[str, type[Paper]] = {"lru": Lru, "fifo": Fifo, "lfu": Lfu, "sieve": Sieve, "s3fifo": S3Fifo}


class Cache:
    """A tree of prompts that are told by their blocks, with room for some blocks."""

    def __init__(self, policy: str, block_tokens: int = 1, slice_blocks: int = SLICE_BLOCKS) -> None:
        self.tree = RadixTree(block_tokens, ns_key=NS_KEY, hash_seed=1, policy=policy, slice_blocks=slice_blocks)
        self.tick = 0
        self.next_slot = 0

    def prompt(self, first: int, blocks: int = 1) -> np.ndarray:
        """A prompt that differs from those with another `first` in its first block."""
        tokens = np.arange(blocks * self.tree.block_tokens, dtype=np.uint32)
        tokens[0] = 10**6 + first
        return tokens

    def touch(self, prompt: np.ndarray, tick: int) -> int:
        """Blocks found."""
        ids = self.tree.match(ROOT, prompt)
        self.tree.touch(ids, tick, prompt.size // self.tree.block_tokens)
        return int(ids.size)

    def store(self, prompt: np.ndarray, tick: int) -> np.ndarray:
        """Ids of the prompt."""
        existing, ids = self.tree.stage(ROOT, prompt, 0, tick)
        fresh = ids[existing:]
        slots = np.arange(self.next_slot, self.next_slot + fresh.size, dtype=np.uint32)
        self.next_slot += fresh.size
        self.tree.place(fresh, Tier.HOST, slots)
        self.tree.release(ids)
        return ids

    def serve(self, prompt: np.ndarray, tick: int) -> np.ndarray:
        """A request: what is found is touched, the rest is stored."""
        self.touch(prompt, tick)
        return self.store(prompt, tick)

    def evict(self, count: int) -> list[int]:
        """The first tokens of the victims."""
        victims = self.tree.take_victims(Tier.HOST, count)
        tokens = self.tree.tokens(victims)[:, 0].tolist()
        self.tree.evict(victims, Tier.HOST)
        return tokens


def compare_with_paper(policy: str, keys: list[int], capacity: int) -> None:
    cache, paper = Cache(policy), PAPERS[policy]()
    for at, key in enumerate(keys, 1):
        prompt = cache.prompt(key)
        tick = at * 1000
        if cache.touch(prompt, tick):
            paper.hit(key)
            continue
        if cache.tree.block_count == capacity:
            assert [10**6 + paper.evict()] == cache.evict(1)
        paper.insert(key)
        cache.store(prompt, tick)
    assert [] == cache.tree.check_integrity()


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(PAPERS)), st.lists(st.integers(0, 12), max_size=150), st.integers(1, 9))
def test_victims_are_those_of_the_paper(policy: str, keys: list[int], capacity: int) -> None:
    compare_with_paper(policy, keys, capacity)


@pytest.mark.parametrize("policy", sorted(PAPERS))
def test_victims_of_a_long_run_are_those_of_the_paper(policy: str) -> None:
    source = random.Random(policy)
    compare_with_paper(policy, [int(source.paretovariate(0.6)) % 400 for _ in range(4000)], 60)


@pytest.mark.parametrize("policy", sorted(PAPERS))
@pytest.mark.parametrize("seed", range(20))
def test_victims_of_skewed_keys_are_those_of_the_paper(policy: str, seed: int) -> None:
    source = random.Random(seed)
    compare_with_paper(policy, [int(source.paretovariate(0.9)) % 40 for _ in range(300)], 2 + seed)


def test_sparing_is_bounded_by_a_slice() -> None:
    cache = Cache("sieve", slice_blocks=8)
    for key in range(100):
        cache.serve(cache.prompt(key), key + 1)
        cache.touch(cache.prompt(key), 1000 + key)
    before = cache.tree.steps
    assert [10**6 + 8] == cache.evict(1)
    assert cache.tree.steps - before < 8 * 4


@pytest.mark.parametrize("policy", POLICIES)
def test_a_full_tree_of_shared_prefixes_stays_whole(policy: str) -> None:
    source = random.Random(policy)
    cache = Cache(policy, block_tokens=16)
    chats = [cache.prompt(key % 3, 40) for key in range(20)]
    for request in range(400):
        at = source.randrange(len(chats))
        chats[at] = np.append(chats[at][: 16 * source.randrange(1, 60)], cache.prompt(request, source.randrange(1, 12)))
        cache.serve(chats[at], request * SECOND)
        while cache.tree.block_count > 300:
            cache.evict(source.randrange(1, 50))
        assert [] == cache.tree.check_integrity()


# ---- survival ----

SHORT, LONG = 2, 256  # blocks of 16 tokens


def trained(short_keys: Callable[[int], Iterable[int]]) -> tuple[Cache, int]:
    """Each second some short prompts, and a long one that never comes back. And the time."""
    cache = Cache("survival", block_tokens=16)
    for second in range(600):
        for at, key in enumerate(short_keys(second)):
            cache.serve(cache.prompt(key, SHORT), second * SECOND + at)
        cache.serve(cache.prompt(1000 + second, LONG), second * SECOND + 500_000)
        if cache.tree.block_count > 8 * LONG:
            cache.evict(LONG)
    return cache, 600 * SECOND


def returning(second: int) -> Iterable[int]:
    """Twenty prompts, each every ten seconds."""
    return range(second % 10, 20, 10)


def new_ones(second: int) -> Iterable[int]:
    """As many prompts that never come back."""
    return range(10_000 + 2 * second, 10_002 + 2 * second)


def value(cache: Cache, prompt: np.ndarray, tick: int) -> float:
    return cache.tree.value_of(int(cache.tree.match(ROOT, prompt)[-1]), tick)


def test_what_came_back_survives_what_never_did() -> None:
    cache, _ = trained(returning)
    found = [cache.tree.match(ROOT, cache.prompt(key, SHORT)).size for key in range(20)]
    assert [SHORT] * 20 == found


def test_the_index_falls_for_kinds_that_never_come_back_and_rises_for_those_that_do() -> None:
    values = {}
    untrained = Cache("survival", block_tokens=16)
    for name, (cache, now) in {
        "untrained": (untrained, 0),
        "nothing returns": trained(new_ones),
        "short ones return": trained(returning),
    }.items():
        for kind, blocks in (("short", SHORT), ("long", LONG)):
            prompt = cache.prompt(5000 + blocks, blocks)
            cache.serve(prompt, now + 1)
            values[name, kind] = value(cache, prompt, now + 5 * SECOND)
        again = cache.prompt(3, SHORT)
        for at in (2, 3):
            cache.serve(again, now + at)
        values[name, "again"] = value(cache, again, now + 5 * SECOND)
    for name in ("nothing returns", "short ones return"):
        assert values[name, "long"] < values["untrained", "long"] / 100
    assert values["short ones return", "again"] > 5 * values["nothing returns", "again"]
    assert values["short ones return", "short"] > 5 * values["nothing returns", "short"]
    assert values["short ones return", "short"] > values["short ones return", "long"]
    assert values["short ones return", "again"] > 5 * values["short ones return", "long"]


def test_a_block_worth_less_than_the_victims_gets_no_room() -> None:
    cache, now = trained(returning)
    cache.evict(cache.tree.block_count - 20 * SHORT)  # what returns is left alone
    assert 20 * SHORT == cache.tree.block_count
    now += SECOND
    for key in range(20):
        cache.serve(cache.prompt(key, SHORT), now + key)
    newcomer = cache.prompt(9000, LONG)
    _, path = cache.tree.stage(ROOT, newcomer, 0, now + SECOND)
    worth = cache.tree.value_of(int(path[-1]), now + SECOND)
    lowest = cache.tree.victim_value(Tier.HOST, now + SECOND)
    assert lowest is not None
    assert worth < lowest
    assert 0 == cache.tree.take_victims(Tier.HOST, LONG, worth).size
    assert 1 == cache.tree.take_victims(Tier.HOST, 1, lowest).size


def test_what_is_said_to_have_ended_goes_first_and_what_is_expected_soon_stays_longer() -> None:
    cache = Cache("survival", block_tokens=16)
    prompts = {first: cache.prompt(first, 8) for first in range(6)}
    for first, prompt in prompts.items():
        cache.serve(prompt, first)
    for first, seconds in ((2, None), (4, 3.0)):
        end = int(cache.tree.match(ROOT, prompts[first])[-1])
        assert 8 == cache.tree.hint_next_use(end, 10, seconds)
    values = {first: value(cache, prompt, 2 * SECOND) for first, prompt in prompts.items()}
    assert values[2] == min(values.values())
    assert values[2] < values[0] / 3
    assert values[4] == max(values.values())
    order = [cache.evict(8)[-1] - 10**6 for _ in range(6)]
    assert (2, 4) == (order[0], order[-1])


def test_an_expected_use_that_did_not_come_is_forgotten_again() -> None:
    cache, now = trained(new_ones)
    prompt = cache.prompt(1, 8)
    ids = cache.serve(prompt, now)
    cache.tree.hint_next_use(int(ids[-1]), now, 4.0)
    soon = value(cache, prompt, now + 3 * SECOND)
    assert value(cache, prompt, now + 3600 * SECOND) < soon / 3


def test_only_blocks_of_one_prompt_are_hinted() -> None:
    cache = Cache("survival", block_tokens=16)
    stem = cache.prompt(1, 8)
    branches = [np.append(stem, cache.prompt(key, 2)) for key in (5, 6)]
    ends = [int(cache.serve(branch, tick)[-1]) for tick, branch in enumerate(branches)]
    assert 2 == cache.tree.hint_next_use(ends[0], 10, None)
    assert 0 == cache.tree.hint_next_use(int(cache.tree.match(ROOT, stem)[-1]), 10, None)
    values = [value(cache, prompt, SECOND) for prompt in (branches[0], stem, branches[1])]
    assert values[0] < min(values[1:])


@pytest.mark.parametrize("policy", ["survival", "lru"])
def test_blocks_of_equal_histories_go_from_the_tail(policy: str) -> None:
    cache = Cache(policy, block_tokens=16)
    ids = cache.serve(cache.prompt(1, 40), 1)
    assert ids[:20:-1].tolist() == cache.tree.take_victims(Tier.HOST, 19).tolist()
    assert ids[20::-1].tolist() == cache.tree.take_victims(Tier.HOST, 40).tolist()


def test_what_left_and_came_back_is_known_again() -> None:
    cache, now = trained(returning)
    prompt = cache.prompt(7777, SHORT)
    cache.serve(prompt, now + 1)
    first = value(cache, prompt, now + SECOND)
    ids = cache.tree.match(ROOT, prompt)
    cache.tree.drop(ids)
    cache.serve(prompt, now + SECOND)
    assert value(cache, prompt, now + 2 * SECOND) > 1.5 * first


def test_what_is_learnt_and_remembered_is_bounded() -> None:
    cache = Cache("survival", block_tokens=16)
    for key in range(300):
        cache.serve(cache.prompt(key, LONG), key * SECOND)
        if key > 20:
            cache.evict(LONG)
    assert cache.tree.policy_bytes < 16 * 2**20


# ---- survival, with hits worth what they cost ----


@pytest.mark.parametrize(("policy", "ratio"), [("survival", 1), ("survival_flops", 4)])
def test_a_deep_block_is_worth_as_much_more_as_it_costs(policy: str, ratio: float) -> None:
    cache = Cache(policy, block_tokens=16)
    prompt = cache.prompt(1, 3 * EVEN_TOKENS // 16 + 1)
    cache.serve(prompt, SECOND)
    values = cache.tree.values(cache.tree.match(ROOT, prompt), 2 * SECOND)
    assert ratio == pytest.approx(values[-1] / values[0])
    assert np.all(np.diff(values) >= 0)


@pytest.mark.parametrize(("policy", "left"), [("survival", [False, True]), ("survival_flops", [True, False])])
def test_of_prompts_alike_the_costlier_stays_where_hits_are_worth_their_cost(policy: str, left: list[bool]) -> None:
    cache = Cache(policy, block_tokens=16)
    trunks = [cache.prompt(1, 3 * EVEN_TOKENS // 16), cache.prompt(2, 16)]
    prompts = [np.append(trunk, cache.prompt(9, 16)) for trunk in trunks]
    for second, prompt in enumerate([*trunks, *prompts]):
        cache.serve(prompt, second * SECOND)
    cache.evict(16)
    assert left == [cache.tree.match(ROOT, prompt).size * 16 == prompt.size for prompt in prompts]
    assert [] == cache.tree.check_integrity()
