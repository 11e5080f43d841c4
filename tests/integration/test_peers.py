"""Blocks of peers: what one node stored, others serve from their own memory, with the right bytes."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np
import pytest

import kvstore
from kvstore.clock import SystemClock
from kvstore.cluster.memory_directory import SharedDirectory
from kvstore.cluster.peer_settings import PeerSettings
from kvstore.cluster.plan import Path
from kvstore.cluster.prefill import PrefillModel
from kvstore.layer_groups import SlidingWindow
from kvstore.store import StoreSettings
from kvstore.testing.blocks import store_prompt, verified_blocks
from kvstore.testing.peering import PeerNode
from kvstore.types import KvLayout, Namespace, Root, Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=64, dtype="int8", block_tokens=16)  # 2 KiB a block
SECRET = b"what the engines of team-a know"
NAMESPACE = Namespace(model="m", revision="r", layout=LAYOUT, tenant="team-a", secret=SECRET)
SECRETS = {"team-a": (SECRET,)}
BLOCKS = 128
PROMPT = list(range(BLOCKS * LAYOUT.block_tokens))
SMALL_CHUNKS = PeerSettings(chunk_bytes=32 * LAYOUT.block_bytes)


@pytest.fixture
def start_node() -> Iterator[Callable[..., PeerNode]]:
    """Starts a node of one cluster, which knows the secret of team-a."""
    shared = SharedDirectory(SystemClock())
    with ExitStack() as stack:

        def start(name: str, **options: object) -> PeerNode:
            given = {"secrets": SECRETS, "peer_settings": SMALL_CHUNKS, **options}
            return stack.enter_context(PeerNode(shared, name, **given))  # type: ignore[arg-type]

        yield start


def test_what_one_node_stored_another_serves_with_the_right_bytes(start_node: Callable[..., PeerNode]) -> None:
    holder, asker = start_node("holder"), start_node("asker")
    holder.store_and_announce(NAMESPACE, PROMPT)

    assert BLOCKS == asker.store.prefetch(NAMESPACE, PROMPT, wait_seconds=None).host_blocks

    assert BLOCKS == verified_blocks(asker.store, NAMESPACE, PROMPT)
    stats = asker.peers.stats()
    assert ({"fetched": 1}, len(PROMPT)) == (stats.fetches, stats.tokens)
    assert BLOCKS * LAYOUT.block_bytes == stats.bytes
    assert () == asker.store.verify().problems


def test_a_client_of_a_sidecar_gets_what_its_peers_have(start_node: Callable[..., PeerNode]) -> None:
    holder, asker = start_node("holder"), start_node("asker")
    holder.store_and_announce(NAMESPACE, PROMPT)
    with kvstore.connect(asker.address) as client:
        assert BLOCKS == client.prefetch(NAMESPACE, PROMPT, wait_seconds=10.0).host_blocks
        assert BLOCKS == verified_blocks(client, NAMESPACE, PROMPT)


def test_only_what_is_missing_travels(start_node: Callable[..., PeerNode]) -> None:
    holder, asker = start_node("holder"), start_node("asker")
    holder.store_and_announce(NAMESPACE, PROMPT)
    store_prompt(asker.store, NAMESPACE, PROMPT[: 40 * LAYOUT.block_tokens])

    assert BLOCKS == asker.store.prefetch(NAMESPACE, PROMPT, wait_seconds=None).host_blocks

    assert (BLOCKS - 40) * LAYOUT.block_bytes == asker.peers.stats().bytes
    assert BLOCKS == verified_blocks(asker.store, NAMESPACE, PROMPT)


def test_what_lies_between_two_boundaries_comes_too(start_node: Callable[..., PeerNode]) -> None:
    holder, asker = start_node("holder"), start_node("asker")
    stored_blocks = 32 + 5
    holder.store_and_announce(NAMESPACE, PROMPT[: stored_blocks * LAYOUT.block_tokens])
    assert stored_blocks == asker.store.prefetch(NAMESPACE, PROMPT, wait_seconds=None).host_blocks


def test_roots_are_kept_apart(start_node: Callable[..., PeerNode]) -> None:
    holder, asker = start_node("holder"), start_node("asker")
    salted = Root(salt="of another request")
    holder.store_and_announce(NAMESPACE, PROMPT, salted)
    assert 0 == asker.store.prefetch(NAMESPACE, PROMPT, wait_seconds=None).host_blocks
    assert BLOCKS == asker.store.prefetch(NAMESPACE, PROMPT, root=salted, wait_seconds=None).host_blocks
    assert BLOCKS == verified_blocks(asker.store, NAMESPACE, PROMPT, root=salted)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(
            KvLayout(layers=2, kv_heads=2, head_dim=32, dtype="int8", block_tokens=16, tensor_parallel=2), id="ranks"
        ),
        pytest.param(
            KvLayout(
                layers=1, kv_heads=1, head_dim=64, dtype="int8", block_tokens=16,
                groups=(SlidingWindow(layers=2, window=64, kv_heads=1, head_dim=64, dtype="int8"),),
            ),
            id="windows",
        ),
        pytest.param(
            KvLayout(
                layers=0, kv_heads=1, head_dim=64, dtype="int8", block_tokens=16,
                groups=(SlidingWindow(layers=2, window=64, kv_heads=1, head_dim=64, dtype="int8"),),
            ),
            id="windows alone",
        ),
    ],
)  # fmt: skip
def test_every_part_comes(start_node: Callable[..., PeerNode], layout: KvLayout) -> None:
    namespace = Namespace(model="m", revision="r", layout=layout, tenant="team-a", secret=SECRET)
    holder, asker = start_node("holder"), start_node("asker")
    holder.store_and_announce(namespace, PROMPT)
    assert BLOCKS == asker.store.prefetch(namespace, PROMPT, wait_seconds=None).host_blocks
    assert BLOCKS == verified_blocks(asker.store, namespace, PROMPT)


def test_blocks_that_are_known_by_digests_alone_come_too(start_node: Callable[..., PeerNode]) -> None:
    layout = KvLayout(layers=1, kv_heads=1, head_dim=64, dtype="int8", block_tokens=16, symbols="digests")
    namespace = Namespace(model="m", revision="r", layout=layout, tenant="team-a", secret=SECRET)
    digests = [index.to_bytes(32) for index in range(BLOCKS)]
    holder, asker = start_node("holder"), start_node("asker")
    with holder.store.stage(namespace, digests) as stage:
        stage.write_from(np.arange(BLOCKS, dtype=np.uint8).repeat(layout.block_bytes))
    holder.membership.announce(holder.store.block_keys(namespace, digests)[31::32])

    assert BLOCKS == asker.store.prefetch(namespace, digests, wait_seconds=None).host_blocks

    rows = np.zeros((BLOCKS, layout.block_bytes), dtype=np.uint8)
    with asker.store.lease(asker.store.match(namespace, digests)) as lease:
        assert BLOCKS == lease.load_into(rows).blocks
    assert list(range(BLOCKS)) == rows.max(axis=1).tolist() == rows.min(axis=1).tolist()


def test_slots_in_many_places_are_filled_with_the_right_bytes(start_node: Callable[..., PeerNode]) -> None:
    holder, asker = start_node("holder"), start_node("asker", host_bytes=2 << 20)
    # Every other block that is stored leaves again, so that free slots lie apart.
    for name in range(900):
        store_prompt(asker.store, NAMESPACE, [name + 10_000] * LAYOUT.block_tokens)
    for name in range(0, 900, 2):
        asker.store.evict(NAMESPACE, [name + 10_000] * LAYOUT.block_tokens)
    holder.store_and_announce(NAMESPACE, PROMPT)
    asker.store.prefetch(NAMESPACE, PROMPT, wait_seconds=None)
    assert BLOCKS == verified_blocks(asker.store, NAMESPACE, PROMPT)


def test_one_prefix_comes_once_however_many_ask(start_node: Callable[..., PeerNode]) -> None:
    holder, asker = start_node("holder"), start_node("asker")
    holder.store_and_announce(NAMESPACE, PROMPT)
    prompts = [[*PROMPT, *range(name, name + LAYOUT.block_tokens)] for name in range(16)]
    begun = threading.Barrier(len(prompts))

    def ask(prompt: list[int]) -> None:
        begun.wait()
        assert BLOCKS == asker.store.prefetch(NAMESPACE, prompt, wait_seconds=None).host_blocks

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = asker.peers.stats()
    assert ({"fetched": 1}, BLOCKS * LAYOUT.block_bytes, 0) == (stats.fetches, stats.bytes, stats.depth)


def test_a_fetch_that_would_take_longer_than_prefill_is_left_alone(start_node: Callable[..., PeerNode]) -> None:
    slow = PeerSettings(path=Path(latency_seconds=10.0, bytes_per_second=1e9), prefill=PrefillModel(1e-5, 0.0))
    holder, asker = start_node("holder"), start_node("asker", peer_settings=slow)
    holder.store_and_announce(NAMESPACE, PROMPT)
    assert 0 == asker.store.prefetch(NAMESPACE, PROMPT, wait_seconds=None).host_blocks
    assert ({}, {"recompute": 1}) == (asker.peers.stats().fetches, asker.peers.stats().choices)


def test_engines_reports_of_prefill_decide_what_is_fetched(start_node: Callable[..., PeerNode]) -> None:
    slow = PeerSettings(path=Path(latency_seconds=1.0, bytes_per_second=1e9))
    holder, asker = start_node("holder"), start_node("asker", peer_settings=slow)
    holder.store_and_announce(NAMESPACE, PROMPT)
    assert 0 == asker.store.prefetch(NAMESPACE, PROMPT, wait_seconds=None).host_blocks
    for tokens in range(100, 1000, 100):
        asker.peers.report_prefill(NAMESPACE, cached_tokens=0, new_tokens=tokens, seconds=tokens / 100)
    assert BLOCKS == asker.store.prefetch(NAMESPACE, PROMPT, wait_seconds=None).host_blocks


def test_a_match_tells_of_peers_as_a_tier(start_node: Callable[..., PeerNode]) -> None:
    holder, asker = start_node("holder"), start_node("asker")
    holder.store_and_announce(NAMESPACE, PROMPT)
    store_prompt(asker.store, NAMESPACE, PROMPT[: 40 * LAYOUT.block_tokens])
    match = asker.peers.match(NAMESPACE, PROMPT)
    assert (BLOCKS, {Tier.HOST: 40, Tier.PEER: BLOCKS - 40}) == (match.blocks, match.tiers)
    with asker.store.lease(match) as lease:
        assert 40 == lease.blocks


def test_what_is_fetched_is_announced_as_what_is_stored(start_node: Callable[..., PeerNode]) -> None:
    holder, asker = start_node("holder"), start_node("asker")
    holder.store_and_announce(NAMESPACE, PROMPT)
    asker.store.prefetch(NAMESPACE, PROMPT, wait_seconds=None)
    stored = [key for event in asker.store.events().events for key in event.keys]
    assert asker.store.block_keys(NAMESPACE, PROMPT) == stored


def test_a_fetch_takes_no_more_than_the_budget_of_its_namespace_allows(start_node: Callable[..., PeerNode]) -> None:
    holder = start_node("holder")
    asker = start_node("asker", host_bytes=1 << 20, settings=StoreSettings(eviction_policy="lru"))
    holder.store_and_announce(NAMESPACE, PROMPT)
    asker.store.prefetch(NAMESPACE, PROMPT, wait_seconds=None)
    assert asker.held(NAMESPACE, PROMPT) == verified_blocks(asker.store, NAMESPACE, PROMPT)
    assert () == asker.store.verify().problems
