"""A prefix that nobody has is computed by one engine, and the others wait for it, but never for long."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from kvstore.clock import SystemClock
from kvstore.cluster.memory_directory import SharedDirectory
from kvstore.cluster.peer_settings import PeerSettings
from kvstore.cluster.prefill import PrefillModel
from kvstore.testing.blocks import expected_rows, store_prompt
from kvstore.testing.peering import PeerNode, boundary_keys
from kvstore.types import KvLayout, Namespace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=64, dtype="int8", block_tokens=16)
SECRET = b"what the engines of team-a know"
NAMESPACE = Namespace(model="m", revision="r", layout=LAYOUT, tenant="team-a", secret=SECRET)
BLOCKS = 64
PROMPT = list(range(BLOCKS * LAYOUT.block_tokens))
PREFILL_SECONDS = 20.0  # so long that a test which waits for it fails
PATIENT = PeerSettings(prefill=PrefillModel(PREFILL_SECONDS / len(PROMPT), 0.0), fetch_seconds_max=60.0)
HASTY = PeerSettings(prefill=PrefillModel(0.2 / len(PROMPT), 0.0))


@pytest.fixture
def start_node() -> Iterator[Callable[..., PeerNode]]:
    shared = SharedDirectory(SystemClock())
    with ExitStack() as stack:

        def start(name: str, settings: PeerSettings = PATIENT) -> PeerNode:
            return stack.enter_context(PeerNode(shared, name, secrets={"team-a": (SECRET,)}, peer_settings=settings))

        yield start


class Waiting:
    """A prefetch in a thread of its own, of a prompt that another computes."""

    def __init__(self, node: PeerNode, prompt: list[int] = PROMPT) -> None:
        self._node = node
        self._prompt = prompt
        self._looks = node.peers.stats().choices.get("absent", 0)
        self._thread = threading.Thread(target=self._run)
        self.host_blocks = 0
        self._thread.start()
        while node.peers.stats().choices.get("absent", 0) == self._looks:
            self._thread.join(0.001)

    def _run(self) -> None:
        self.host_blocks = self._node.store.prefetch(NAMESPACE, self._prompt, wait_seconds=None).host_blocks

    def result(self) -> int:
        self._thread.join(PREFILL_SECONDS / 2)
        assert not self._thread.is_alive()
        return self.host_blocks


def choices(node: PeerNode) -> dict[str, int]:
    return node.peers.stats().choices


def miss(node: PeerNode) -> None:
    """An engine asks, and is told to compute it."""
    assert 0 == node.store.prefetch(NAMESPACE, PROMPT, wait_seconds=None).host_blocks


def test_what_nobody_has_is_claimed_by_the_first_who_asks(start_node: Callable[..., PeerNode]) -> None:
    first = start_node("first")
    miss(first)
    assert ({"absent": 1, "claimed": 1}, 1) == (choices(first), first.peers.stats().claims)
    assert first.membership.claimed(boundary_keys(first, NAMESPACE, PROMPT)[0]) > PREFILL_SECONDS


def test_others_wait_for_what_is_being_computed_and_then_fetch_it(start_node: Callable[..., PeerNode]) -> None:
    first, second = start_node("first"), start_node("second")
    miss(first)
    waiting = Waiting(second)
    first.store_and_announce(NAMESPACE, PROMPT)
    assert BLOCKS == waiting.result()
    assert {"fetched": 1} == second.peers.stats().fetches


def test_engines_of_one_node_wait_for_each_other(start_node: Callable[..., PeerNode]) -> None:
    node = start_node("node")
    miss(node)
    waiting = Waiting(node)
    store_prompt(node.store, NAMESPACE, PROMPT)
    assert BLOCKS == waiting.result()
    assert {} == node.peers.stats().fetches


def test_a_store_that_is_given_up_lets_the_next_compute(start_node: Callable[..., PeerNode]) -> None:
    first, second = start_node("first"), start_node("second")
    miss(first)
    waiting = Waiting(second)
    stage = first.store.stage(NAMESPACE, PROMPT)
    stage.write_from(expected_rows(NAMESPACE, PROMPT)[:4])
    stage.abort()
    assert 0 == waiting.result()
    assert (0, 1) == (first.peers.stats().claims, second.peers.stats().claims)


def test_when_the_owner_of_a_claim_dies_another_goes_on(start_node: Callable[..., PeerNode]) -> None:
    first, second = start_node("first"), start_node("second")
    miss(first)
    waiting = Waiting(second)
    first.membership.leave()
    assert 0 == waiting.result()
    assert 1 == choices(second)["claimed"]


def test_a_node_that_stops_lets_its_claims_go(start_node: Callable[..., PeerNode]) -> None:
    first, second = start_node("first"), start_node("second")
    miss(first)
    waiting = Waiting(second)
    first.close()
    assert 0 == waiting.result()


def test_nobody_waits_longer_than_to_compute_it_himself(start_node: Callable[..., PeerNode]) -> None:
    first, second = start_node("first"), start_node("second", HASTY)
    miss(first)
    miss(second)
    assert {"absent": 1, "waited_in_vain": 1} == choices(second)


def test_who_does_not_wait_any_more_ends_the_wait(start_node: Callable[..., PeerNode]) -> None:
    first, second = start_node("first"), start_node("second")
    miss(first)
    with second.store.prefetch(NAMESPACE, PROMPT, wait_seconds=0.01) as prefetch:
        assert not prefetch.done
    assert 0 == prefetch.wait(PREFILL_SECONDS / 2)
    assert prefetch.done


def test_prompts_that_differ_at_once_are_claimed_side_by_side(start_node: Callable[..., PeerNode]) -> None:
    node = start_node("node")
    miss(node)
    other = [token + 1 for token in PROMPT]
    assert 0 == node.store.prefetch(NAMESPACE, other, wait_seconds=None).host_blocks
    assert 2 == choices(node)["claimed"]


def test_what_is_too_short_asks_nobody(start_node: Callable[..., PeerNode]) -> None:
    node = start_node("node")
    assert 0 == node.store.prefetch(NAMESPACE, PROMPT[:255], wait_seconds=None).host_blocks
    assert {} == choices(node)


def test_a_node_that_stops_waits_for_nobody(start_node: Callable[..., PeerNode]) -> None:
    first, second = start_node("first"), start_node("second")
    miss(first)
    waiting = Waiting(second)
    second.close()
    assert 0 == waiting.result()
