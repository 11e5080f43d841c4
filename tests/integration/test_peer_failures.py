"""Peers that are gone, stopped, slow or wrong cost a fetch and its time: never a wrong byte, and no hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import pytest

import kvstore
from kvstore.clock import SystemClock
from kvstore.cluster.directory import NodeProfile
from kvstore.cluster.memory_directory import MemoryDirectory, SharedDirectory
from kvstore.cluster.peer_settings import PeerSettings
from kvstore.errors import DirectoryUnavailableError, NodeNameTakenError
from kvstore.store import StoreSettings
from kvstore.testing.blocks import store_prompt, verified_blocks
from kvstore.testing.patience import SLACK_SECONDS, Stopwatch
from kvstore.testing.peering import PeerNode, boundary_keys
from kvstore.testing.tcp_proxy import Fault, TcpProxy, flipped
from kvstore.types import KvLayout, Namespace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore.nodes import Node

LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=64, dtype="int8", block_tokens=16)  # 2 KiB a block
SECRET = b"what the engines of team-a know"
NAMESPACE = Namespace(model="m", revision="r", layout=LAYOUT, tenant="team-a", secret=SECRET)
SECRETS = {"team-a": (SECRET,)}
BLOCKS = 128
CHUNK_BLOCKS = 32
PROMPT = list(range(BLOCKS * LAYOUT.block_tokens))
CHUNK_BYTES = CHUNK_BLOCKS * LAYOUT.block_bytes
PATIENT = PeerSettings(chunk_bytes=CHUNK_BYTES, answer_seconds_max=60.0, fetch_seconds_max=60.0)
# Of who is told of silence, and yet gets what is not silent on a machine with much else to do.
HASTY = PeerSettings(chunk_bytes=CHUNK_BYTES, answer_seconds_max=2.0, fetch_seconds_max=6.0)
HOLDER_PROGRAM = """
import sys, kvstore
from kvstore.testing.serving import ServedStore
with kvstore.open(None, host_bytes=1 << 24) as store:
    with ServedStore(store, secrets={"team-a": (bytes.fromhex(sys.argv[1]),)}) as served:
        print(served.addresses[0], flush=True)
        sys.stdin.read()
"""


class Cluster:
    """One directory, and nodes that ask."""

    def __init__(self, stack: ExitStack) -> None:
        self.shared = SharedDirectory(SystemClock())
        self._stack = stack

    def start(self, name: str, **options: object) -> PeerNode:
        given = {"secrets": SECRETS, "peer_settings": PATIENT, **options}
        return self._stack.enter_context(PeerNode(self.shared, name, **given))  # type: ignore[arg-type]

    def proxied(self, name: str) -> tuple[PeerNode, TcpProxy]:
        """A holder that peers reach through a proxy only."""
        holder = self.start(name)
        proxy = self._stack.enter_context(TcpProxy(holder.address))
        holder.membership.leave()
        holder.node = holder.membership.join(NodeProfile(name, b"i" * 16, (proxy.address,)))
        holder.store_and_announce(NAMESPACE, PROMPT)
        return holder, proxy


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(stack)


@contextmanager
def holder_process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process of its own, and its address."""
    with subprocess.Popen(
        [sys.executable, "-P", "-c", HOLDER_PROGRAM, SECRET.hex()],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def announce_stranger(cluster: Cluster, asker: PeerNode, address: str, name: str = "holder") -> MemoryDirectory:
    """A node that is not of this process, with the prompt announced for it."""
    membership = MemoryDirectory(cluster.shared)
    membership.join(NodeProfile(name, b"i" * 16, (address,)))
    membership.announce(boundary_keys(asker, NAMESPACE, PROMPT))
    return membership


def bring(asker: PeerNode, prompt: Sequence[int] = PROMPT) -> int:
    """Ask for a prompt, and wait at most as long as the budget: blocks that came, each of which is asserted right."""
    watch = Stopwatch()
    with asker.store.prefetch(NAMESPACE, prompt, wait_seconds=60.0):
        pass
    settings = asker.peer_settings
    assert watch.seconds < settings.fetch_seconds_max + settings.answer_seconds_max + SLACK_SECONDS
    assert () == asker.store.verify().problems
    assert 0 == asker.store.stats().stages
    return verified_blocks(asker.store, NAMESPACE, prompt)


def fetches(asker: PeerNode) -> dict[str, int]:
    return asker.peers.stats().fetches


def test_of_a_transfer_that_is_cut_what_came_whole_is_kept(cluster: Cluster) -> None:
    _, proxy = cluster.proxied("holder")
    asker = cluster.start("asker")
    proxy.fault = Fault(after_bytes=2 * CHUNK_BYTES + CHUNK_BYTES // 2, cut=True)
    assert 2 * CHUNK_BLOCKS == bring(asker)
    assert {"unavailable": 1} == fetches(asker)


def test_a_byte_that_changed_on_its_way_is_found_and_its_chunk_dropped(cluster: Cluster) -> None:
    _, proxy = cluster.proxied("holder")
    asker = cluster.start("asker")
    proxy.fault = Fault(after_bytes=CHUNK_BYTES + CHUNK_BYTES // 2, change=flipped)
    assert 2 * CHUNK_BLOCKS > bring(asker)
    assert 1 == fetches(asker).get("corrupt", 0) + fetches(asker).get("unavailable", 0)


def test_what_is_no_answer_at_all_is_no_block(cluster: Cluster) -> None:
    _, proxy = cluster.proxied("holder")
    asker = cluster.start("asker", peer_settings=HASTY)
    proxy.fault = Fault(change=lambda sent: bytes(len(sent)))
    assert 0 == bring(asker)
    assert {"unavailable": 1} == fetches(asker)


@pytest.mark.parametrize("after_bytes", [0, CHUNK_BYTES + 1000])
def test_a_holder_that_falls_silent_costs_its_time_alone(cluster: Cluster, after_bytes: int) -> None:
    _, proxy = cluster.proxied("holder")
    asker = cluster.start("asker", peer_settings=HASTY)
    proxy.fault = Fault(after_bytes=after_bytes, held=True)
    assert after_bytes // CHUNK_BYTES * CHUNK_BLOCKS == bring(asker)
    assert {"unavailable": 1} == fetches(asker)


def test_a_holder_that_is_slow_gives_what_comes_in_time(cluster: Cluster) -> None:
    _, proxy = cluster.proxied("holder")
    asker = cluster.start("asker", peer_settings=HASTY)
    proxy.fault = Fault(after_bytes=CHUNK_BYTES, bytes_per_second=CHUNK_BYTES / 8)
    assert BLOCKS > bring(asker) >= CHUNK_BLOCKS


def test_after_one_holder_failed_another_is_asked_for_the_rest(cluster: Cluster) -> None:
    _, proxy = cluster.proxied("broken")
    asker = cluster.start("asker")
    proxy.fault = Fault(after_bytes=2 * CHUNK_BYTES + 1, cut=True)
    bring(asker)
    cluster.start("well").store_and_announce(NAMESPACE, PROMPT)
    assert BLOCKS == bring(asker)
    assert 1 == fetches(asker)["fetched"]


def test_a_killed_holder_leaves_a_whole_prefix(cluster: Cluster) -> None:
    asker = cluster.start("asker")
    with holder_process() as (process, address):
        with kvstore.connect(address, bulk_seconds=10.0, lookup_seconds=10.0) as client:
            store_prompt(client, NAMESPACE, PROMPT)
        proxy = TcpProxy(address)
        with proxy:
            announce_stranger(cluster, asker, proxy.address)
            proxy.fault = Fault(
                after_bytes=CHUNK_BYTES + CHUNK_BYTES // 2, change=lambda sent: (process.kill(), sent)[1]
            )
            blocks = bring(asker)
            process.wait()
    assert blocks in range(CHUNK_BLOCKS, BLOCKS + 1, CHUNK_BLOCKS)
    assert 0 == bring(asker, [*range(9000, 9000 + len(PROMPT))])


def test_a_stopped_holder_costs_one_answers_time(cluster: Cluster) -> None:
    asker = cluster.start("asker", peer_settings=HASTY)
    with holder_process() as (process, address):
        with kvstore.connect(address, bulk_seconds=10.0, lookup_seconds=10.0) as client:
            store_prompt(client, NAMESPACE, PROMPT)
        announce_stranger(cluster, asker, address)
        os.kill(process.pid, signal.SIGSTOP)
        assert 0 == bring(asker)
        os.kill(process.pid, signal.SIGCONT)
        assert {"unavailable": 1} == fetches(asker)


def test_a_stale_entry_costs_one_refused_fetch(cluster: Cluster) -> None:
    holder, asker = cluster.start("holder"), cluster.start("asker")
    holder.announce(NAMESPACE, PROMPT)
    assert 0 == bring(asker)
    assert {"stale": 1} == fetches(asker)


def test_a_holder_that_lost_the_tail_gives_the_head(cluster: Cluster) -> None:
    holder, asker = cluster.start("holder"), cluster.start("asker")
    holder.store_and_announce(NAMESPACE, PROMPT)
    holder.store.evict(NAMESPACE, PROMPT, from_block=50)
    assert 50 == bring(asker)


def test_nobody_gets_blocks_without_the_secret_of_their_namespace(cluster: Cluster) -> None:
    holder = cluster.start("holder")
    holder.store_and_announce(NAMESPACE, PROMPT)
    asker = cluster.start("asker")
    impostor = Namespace(model="m", revision="r", layout=LAYOUT, tenant="team-a", secret=b"a guess")
    asker.membership.announce([])
    holder.membership.announce(asker.store.block_keys(impostor, PROMPT)[31::32])
    asker.store.prefetch(impostor, PROMPT, wait_seconds=None)
    assert (0, {"refused": 1}) == (asker.held(impostor, PROMPT), fetches(asker))


def test_a_namespace_without_a_secret_is_not_shared_by_nodes_of_different_secrets(cluster: Cluster) -> None:
    open_to_all = Namespace(model="m", revision="r", layout=LAYOUT, tenant="team-a")
    holder, asker = cluster.start("holder"), cluster.start("asker")
    holder.store_and_announce(open_to_all, PROMPT)
    holder.membership.announce(asker.store.block_keys(open_to_all, PROMPT)[31::32])
    asker.store.prefetch(open_to_all, PROMPT, wait_seconds=None)
    assert (0, {"refused": 1}) == (asker.held(open_to_all, PROMPT), fetches(asker))


def test_a_directory_that_does_not_answer_leaves_local_service_as_it_is(cluster: Cluster) -> None:
    asker = cluster.start("asker", directory=SilentDirectory())
    store_prompt(asker.store, NAMESPACE, PROMPT[: CHUNK_BLOCKS * LAYOUT.block_tokens])
    assert CHUNK_BLOCKS == bring(asker)
    assert {"no_directory": 1} == asker.peers.stats().choices


def test_a_node_whose_name_another_has_asks_that_one_as_a_peer(cluster: Cluster) -> None:
    holder, asker = cluster.start("one"), cluster.start("asker")
    holder.store_and_announce(NAMESPACE, PROMPT)
    asker.membership.leave()
    with pytest.raises(NodeNameTakenError, match="'one' already"):
        asker.membership.join(NodeProfile("one", b"other".ljust(16), (asker.address,)))
    assert [False] == [asker.membership.is_self(node) for node in asker.membership.nodes()]
    assert BLOCKS == bring(asker)
    assert {"fetched": 1} == fetches(asker)


def test_a_lease_left_of_an_earlier_start_at_this_address_is_asked_for_nothing(cluster: Cluster) -> None:
    asker = cluster.start("asker")
    announce_stranger(cluster, asker, asker.address, "earlier")
    assert 0 == bring(asker)
    assert ({}, {"absent": 1, "claimed": 1}) == (fetches(asker), asker.peers.stats().choices)


class SilentDirectory:
    """A Directory that never answers in time."""

    def nodes(self) -> Sequence[object]:
        raise DirectoryUnavailableError("no answer")

    def is_self(self, node: Node) -> bool:
        raise AssertionError(f"nobody is known: {node}")

    def holders(self, keys: Sequence[bytes]) -> Sequence[frozenset[int]]:
        raise DirectoryUnavailableError(f"no answer about {len(keys)} keys")

    def claim(self, key: bytes, seconds: float) -> None:
        raise DirectoryUnavailableError(f"no answer about {key.hex()}, {seconds}")

    def claimed(self, key: bytes) -> float | None:
        raise DirectoryUnavailableError(f"no answer about {key.hex()}")


def test_a_node_at_anothers_address_gives_what_its_own_tree_has(cluster: Cluster) -> None:
    """Two nodes that say to be one: whichever answers matches the tokens by itself."""
    other, asker = cluster.start("other"), cluster.start("asker")
    store_prompt(other.store, NAMESPACE, PROMPT[: 20 * LAYOUT.block_tokens])
    announce_stranger(cluster, asker, other.address)
    assert 20 == bring(asker)


def test_a_full_node_takes_what_it_has_room_for(cluster: Cluster) -> None:
    cluster.start("holder").store_and_announce(NAMESPACE, PROMPT)
    asker = cluster.start("asker", host_bytes=1 << 20, settings=StoreSettings(eviction_policy="lru"))
    filling = [[name + 10_000] * LAYOUT.block_tokens for name in range(600)]
    for prompt in filling:
        store_prompt(asker.store, NAMESPACE, prompt)
    bring(asker)


def test_a_cancelled_fetch_ends_and_lets_the_next_one_begin(cluster: Cluster) -> None:
    _, proxy = cluster.proxied("holder")
    asker = cluster.start("asker")
    proxy.fault = Fault(after_bytes=CHUNK_BYTES, bytes_per_second=CHUNK_BYTES)
    prefetch = asker.store.prefetch(NAMESPACE, PROMPT)
    follower = asker.store.prefetch(NAMESPACE, PROMPT)
    prefetch.cancel()
    proxy.fault = None
    assert BLOCKS == follower.wait()


def test_a_peer_that_answers_over_grpc_alone_is_not_believed(cluster: Cluster) -> None:
    holder, asker = cluster.start("holder"), cluster.start("asker")
    holder.membership.leave()
    holder.membership.join(NodeProfile("holder", b"i" * 16, (f"grpc://{holder.address}",)))
    holder.store_and_announce(NAMESPACE, PROMPT)
    assert 0 == bring(asker)
    assert {"unavailable": 1} == fetches(asker)
