"""What a full index tells of other capacities, and when it leaves the survival index for recency."""

from __future__ import annotations

import heapq
import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvstore.radix.tree import RadixTree
from kvstore.replay.node import Node
from kvstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

BLOCK_TOKENS = 128
SECOND = 1.0


def tree(policy: str = "survival") -> RadixTree:
    return RadixTree(BLOCK_TOKENS, ns_key=bytes(16), hash_seed=5, policy=policy)


def prompt(path: Sequence[int]) -> NDArray[np.uint32]:
    return np.repeat(np.array(path, dtype=np.uint32), BLOCK_TOKENS)


def chats(seed: int, requests: int) -> Iterator[list[int]]:
    """Conversations behind three system prompts: each goes on for a few turns, some for many."""
    rng = random.Random(seed)
    open_chats: list[list[int]] = []
    fresh = 1000
    for _ in range(requests):
        if not open_chats or rng.random() < 0.4:
            open_chats.append([system := rng.randrange(3), system + 10, system + 20])
        chat = rng.choice(open_chats[-40:])
        for _ in range(rng.randrange(1, 6)):
            chat.append(fresh := fresh + 1)
        yield list(chat)
        if rng.random() < 0.25:
            open_chats.remove(chat)


def served(policy: str, capacity: int, paths: list[list[int]]) -> tuple[float, RadixTree]:
    """The share of blocks found, and the tree."""
    index = tree(policy)
    node = Node(index, host_blocks=capacity, disk_blocks=0)
    found = sum(node.serve(prompt(path), at * SECOND).blocks for at, path in enumerate(paths))
    return found / sum(len(path) for path in paths), index


def test_nothing_is_told_before_the_tier_is_full():
    _, index = served("survival", 10_000, list(chats(1, 50)))
    assert [] == index.rehearsed(Tier.HOST)[2]


def test_a_policy_that_learns_nothing_rehearses_nothing():
    _, index = served("lru", 50, list(chats(1, 200)))
    assert (0.0, 0.0, []) == index.rehearsed(Tier.HOST)


def test_the_own_capacity_is_told_as_it_was():
    _, index = served("survival", 80, list(chats(2, 400)))
    _, found, capacities = index.rehearsed(Tier.HOST)
    assert [20, 40, 80, 160, 320] == [blocks for blocks, _ in capacities]
    assert found == dict(capacities)[80]


@pytest.mark.parametrize("seed", range(3))
def test_other_capacities_find_about_what_was_told(seed):
    paths = list(chats(seed, 3000))
    rate, index = served("survival", 300, paths)
    looked_up, found, capacities = index.rehearsed(Tier.HOST)
    for blocks, told in capacities:
        really, _ = served("survival", blocks, paths)
        assert told / looked_up - found / looked_up == pytest.approx(really - rate, abs=0.05)


def test_prompts_that_are_found_whole_here_count_where_they_would_have_to_be_stored_again():
    rng = random.Random(3)
    shared = [list(range(100 * at, 100 * at + 10)) for at in range(1, 12)]
    paths = [*shared, *(shared[min(rng.randrange(11), rng.randrange(11))] for _ in range(2000))]
    rate, index = served("survival", 100, paths)
    looked_up, found, capacities = index.rehearsed(Tier.HOST)
    for blocks, told in capacities[:2]:
        really, _ = served("survival", blocks, paths)
        assert (told - found) / looked_up == pytest.approx(really - rate, abs=0.03)


def chats_that_go_on_soon_or_never(seed: int, requests: int) -> Iterator[tuple[int, list[int]]]:
    """Their second turn comes within minutes, for four in ten of them; with the second at which they come."""
    rng = random.Random(seed)
    due: list[tuple[float, list[int]]] = []
    fresh = 0
    for now in range(requests):
        while due and due[0][0] <= now:
            yield now, [*heapq.heappop(due)[1], fresh := fresh + 1]
        first = fresh + 1
        fresh += rng.choice((3, 8, 20))
        chat = list(range(first, fresh + 1))
        yield now, chat
        if rng.random() < 0.4:
            heapq.heappush(due, (now + rng.expovariate(1 / 150), chat))


def test_blocks_older_than_any_that_was_used_again_are_not_taken_for_average_ones():
    requests = list(chats_that_go_on_soon_or_never(0, 2500))
    found: dict[str, int] = {}
    for policy in ("lru", "survival"):
        node = Node(tree(policy), host_blocks=6000, disk_blocks=0)
        found[policy] = sum(node.serve(prompt(path), now * SECOND).blocks for now, path in requests)
    assert found["survival"] > found["lru"]


@pytest.mark.parametrize("capacity", [60, 200, 800])
def test_where_recency_is_best_the_default_is_hardly_worse(capacity):
    """Each prompt is asked for often, for a while; then it is forgotten for good."""
    rng = random.Random(7)
    paths = [[at // 10 * 100 + rng.randrange(12), *range(10_000 + at // 10, 10_008 + at // 10)] for at in range(6000)]
    by_recency, _ = served("lru", capacity, paths)
    by_default, _ = served("survival", capacity, paths)
    assert by_default > by_recency - 0.02
