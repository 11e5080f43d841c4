"""The replay finds exactly what a naive simulation of leaf-LRU finds, and what the store itself finds."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvstore
from kvstore.radix.tree import POLICIES
from kvstore.replay.node import Found, Node
from kvstore.replay.policies import make_tree
from kvstore.store import StoreSettings
from kvstore.types import KvLayout, Namespace, Tier

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvstore.api import KvStore

BLOCK_TOKENS = 2
LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=4, dtype="int8", block_tokens=BLOCK_TOKENS)
NAMESPACE = Namespace(model="replay", revision="1", layout=LAYOUT)
DISK_BYTES = 1 << 20
LRU = StoreSettings(eviction_policy="lru")  # the times of the store are not those of the replay
Blocks: TypeAlias = tuple[int, ...]

prompts = st.lists(st.lists(st.integers(1, 3), max_size=6).map(tuple), min_size=1, max_size=40)


class NaiveLru:
    """Keeps prefixes and when each was last used; the coldest one that nothing continues goes first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._last_use: dict[Blocks, int] = {}

    def serve(self, prompt: Blocks, tick: int) -> int:
        path = [prompt[: end + 1] for end in range(len(prompt))]
        found = [block for block in path if block in self._last_use]
        self._last_use.update(dict.fromkeys(found, tick))
        missing = path[len(found) :]
        while len(self._last_use) + len(missing) > self._capacity and (leaves := self._leaves(path)):
            del self._last_use[min(leaves, key=self._last_use.__getitem__)]
        room = self._capacity - len(self._last_use)
        self._last_use.update(dict.fromkeys(missing[:room], tick))
        return len(found)

    def _leaves(self, path: Sequence[Blocks]) -> list[Blocks]:
        parents = {block[:-1] for block in self._last_use}
        return [block for block in self._last_use if block not in parents and block not in path]


def tokens(prompt: Blocks) -> np.ndarray:
    return np.repeat(np.array(prompt, dtype=np.uint32), BLOCK_TOKENS)


def new_node(host_blocks: int, disk_blocks: int = 0, policy: str = "lru") -> Node:
    return Node(make_tree(policy, BLOCK_TOKENS), host_blocks=host_blocks, disk_blocks=disk_blocks)


@settings(max_examples=300)
@given(prompts, st.integers(1, 12))
def test_hits_are_those_of_a_naive_leaf_lru(served, capacity):
    node, naive = new_node(capacity), NaiveLru(capacity)

    for tick, prompt in enumerate(served, 1):
        assert Found(naive.serve(prompt, tick), 0) == node.serve(tokens(prompt), 0)


@settings(max_examples=300)
@given(prompts, st.integers(1, 8), st.integers(0, 8), st.sampled_from(POLICIES))
def test_no_slot_is_lost_and_the_tree_stays_whole(served, host_blocks, disk_blocks, policy):
    node = new_node(host_blocks, disk_blocks, policy)

    for second, prompt in enumerate(served):
        node.serve(tokens(prompt), second)
        assert host_blocks == node._host._count + node._tree.tier_blocks(Tier.HOST)
        assert disk_blocks == node._disk._count + node._tree.tier_blocks(Tier.DISK)
    assert [] == node._tree.check_integrity()


def random_prompts(seed: int, count: int) -> list[Blocks]:
    source = random.Random(seed)
    return [tuple(source.randint(1, 4) for _ in range(source.randint(0, 5))) for _ in range(count)]


def serve(store: KvStore, prompt: Blocks) -> Found:
    """What a connector does: look up, load, store the rest."""
    match = store.match(NAMESPACE, tokens(prompt))
    rows = np.zeros((max(1, len(prompt)), LAYOUT.block_bytes), dtype=np.uint8)
    with store.lease(match) as lease:
        lease.load_into(rows[: match.blocks])
    with store.stage(NAMESPACE, tokens(prompt)) as stage:
        stage.write_from(rows)
    return Found(match.tiers.get(Tier.HOST, 0), match.tiers.get(Tier.DISK, 0))


def disk_blocks_after(store: KvStore, prompt: Blocks) -> int:
    serve(store, prompt)
    return store.stats().tiers["disk"].blocks


@pytest.mark.parametrize("seed", range(10))
def test_hits_are_those_of_the_store(seed):
    capacity = 3 + 5 * seed
    node = new_node(capacity)
    with kvstore.open(host_bytes=capacity * LAYOUT.block_bytes, settings=LRU) as store:
        for prompt in random_prompts(seed, 200):
            assert serve(store, prompt) == node.serve(tokens(prompt), 0)


@pytest.mark.parametrize("seed", range(6))
def test_hits_by_tier_are_those_of_the_store(seed, tmp_path: Path):
    host_blocks = 3 + 2 * seed
    host_bytes = host_blocks * LAYOUT.block_bytes
    prompts = random_prompts(seed, 150)
    # How many blocks a small disk takes depends on the steps in which its slabs grow.
    with kvstore.open(tmp_path / "probe", host_bytes=host_bytes, disk_bytes=DISK_BYTES, settings=LRU) as store:
        disk_blocks = max(disk_blocks_after(store, prompt) for prompt in prompts)
    node = new_node(host_blocks, disk_blocks)
    with kvstore.open(tmp_path / "data", host_bytes=host_bytes, disk_bytes=DISK_BYTES, settings=LRU) as store:
        for prompt in prompts:
            assert serve(store, prompt) == node.serve(tokens(prompt), 0)
    assert node.demoted_blocks > disk_blocks
