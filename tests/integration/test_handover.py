"""A node that leaves: what is worth most on it is on the nodes that stay afterwards, with the right bytes."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from kvstore.clock import SystemClock
from kvstore.cluster.handover import HandOver, HandOverSettings
from kvstore.cluster.memory_directory import MemoryDirectory, SharedDirectory
from kvstore.errors import DirectoryUnavailableError
from kvstore.nodes import NodeReport, NodeState
from kvstore.testing.blocks import verified_blocks
from kvstore.testing.peering import PeerNode
from kvstore.types import KvLayout, Namespace, Root

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvstore.nodes import Node

LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=64, dtype="int8", block_tokens=16)
SECRET = b"what the engines of team-a know"
NAMESPACE = Namespace(model="m", revision="r", layout=LAYOUT, tenant="team-a", secret=SECRET)
BLOCKS = 64
PROMPTS = [[head] * 16 + list(range((BLOCKS - 1) * 16)) for head in range(6)]
PROMPT_BYTES = BLOCKS * LAYOUT.block_bytes


class UnreachableDirectory(MemoryDirectory):
    """A directory that does not answer."""

    def __init__(self) -> None:
        super().__init__(SharedDirectory(SystemClock()))

    def nodes(self) -> Sequence[Node]:
        raise DirectoryUnavailableError("nobody is there")


@pytest.fixture
def start_node() -> Iterator[Callable[..., PeerNode]]:
    """Starts a node of one cluster."""
    shared = SharedDirectory(SystemClock())
    with ExitStack() as stack:
        yield lambda name, **options: stack.enter_context(
            PeerNode(shared, name, secrets={"team-a": (SECRET,)}, **options)
        )


def hand_over(node: PeerNode, seconds: float = 30.0, limit_bytes: int = 1 << 30) -> HandOver:
    settings = HandOverSettings(seconds, limit_bytes, node.peer_settings.announce_tokens)
    return HandOver(node.store, node.membership, node.peers, settings, SystemClock())


def test_the_nodes_that_stay_have_everything_with_the_right_bytes(start_node: Callable[..., PeerNode]) -> None:
    leaving, *staying = [start_node(name) for name in ("a", "b", "c")]
    for prompt in PROMPTS:
        leaving.store_and_announce(NAMESPACE, prompt)
    leaving.store_and_announce(NAMESPACE, PROMPTS[0], Root(salt="s"))

    done = hand_over(leaving).run()

    assert (7, 7, 0) == (done.prefixes, done.taken, done.failures)
    for prompt in PROMPTS:
        assert BLOCKS == max(verified_blocks(node.store, NAMESPACE, prompt) for node in staying)
    assert BLOCKS == max(node.held(NAMESPACE, PROMPTS[0], Root(salt="s")) for node in staying)
    assert all(node.peers.stats().bytes >= 3 * PROMPT_BYTES for node in staying)  # they took turns


def test_no_more_bytes_travel_than_the_settings_allow(start_node: Callable[..., PeerNode]) -> None:
    leaving, staying = start_node("a"), start_node("b")
    for prompt in PROMPTS:
        leaving.store_and_announce(NAMESPACE, prompt)
    hand_over(leaving, limit_bytes=2 * PROMPT_BYTES + 5).run()
    assert 0 < staying.peers.stats().bytes <= 2 * PROMPT_BYTES


def test_what_another_node_has_does_not_travel(start_node: Callable[..., PeerNode]) -> None:
    leaving, staying = start_node("a"), start_node("b")
    for node in leaving, staying:
        node.store_and_announce(NAMESPACE, PROMPTS[0])
    assert 0 == hand_over(leaving).run().prefixes
    assert 0 == staying.peers.stats().bytes


def test_what_a_node_that_does_not_answer_is_asked_to_take_others_take(start_node: Callable[..., PeerNode]) -> None:
    leaving, _, staying = start_node("a"), start_node("b", announced_address="127.0.0.1:1"), start_node("c")
    for prompt in PROMPTS:
        leaving.store_and_announce(NAMESPACE, prompt)
    done = hand_over(leaving).run()
    assert [BLOCKS] * len(PROMPTS) == [staying.held(NAMESPACE, prompt) for prompt in PROMPTS]
    assert (len(PROMPTS), 3) == (done.taken, done.failures)


def test_a_directory_that_is_down_holds_up_nobody(start_node: Callable[..., PeerNode]) -> None:
    leaving = start_node("a")
    leaving.store_and_announce(NAMESPACE, PROMPTS[0])
    settings = HandOverSettings(30.0, 1 << 30, leaving.peer_settings.announce_tokens)
    done = HandOver(leaving.store, UnreachableDirectory(), leaving.peers, settings, SystemClock()).run()
    assert (0, 1) == (done.prefixes, done.failures)


def test_who_is_alone_leaves_at_once(start_node: Callable[..., PeerNode]) -> None:
    leaving = start_node("a")
    leaving.store_and_announce(NAMESPACE, PROMPTS[0])
    handing = hand_over(leaving)
    assert not handing.progress.is_done
    assert 0 == handing.run().prefixes
    assert handing.progress.is_done


def test_nodes_that_drain_are_asked_for_nothing_and_chosen_ones_alone_where_some_are_named(
    start_node: Callable[..., PeerNode],
) -> None:
    leaving, draining, chosen, other = [start_node(name) for name in ("a", "b", "c", "d")]
    draining.membership.renew(NodeReport(state=NodeState.DRAINING))
    for prompt in PROMPTS[:4]:
        leaving.store_and_announce(NAMESPACE, prompt)
    settings = HandOverSettings(30.0, 1 << 30, leaving.peer_settings.announce_tokens, frozenset({"b", "c"}))
    done = HandOver(leaving.store, leaving.membership, leaving.peers, settings, SystemClock()).run()
    assert (4, 4 * PROMPT_BYTES) == (done.taken, done.taken_bytes)
    held = [[node.held(NAMESPACE, prompt) for prompt in PROMPTS[:4]] for node in (draining, chosen, other)]
    assert [[0] * 4, [BLOCKS] * 4, [0] * 4] == held


def test_the_least_busy_takes_more(start_node: Callable[..., PeerNode]) -> None:
    leaving, busy, idle = [start_node(name) for name in ("a", "b", "c")]
    busy.membership.renew(NodeReport(queue=100))
    for prompt in PROMPTS:
        leaving.store_and_announce(NAMESPACE, prompt)
    taken = hand_over(leaving).run().taken
    assert taken > 1
    assert taken == [idle.held(NAMESPACE, prompt) for prompt in PROMPTS].count(BLOCKS)
    assert [0] * len(PROMPTS) == [busy.held(NAMESPACE, prompt) for prompt in PROMPTS]


def test_one_that_is_stopped_begins_nothing_more(start_node: Callable[..., PeerNode]) -> None:
    leaving, staying = start_node("a"), start_node("b")
    leaving.store_and_announce(NAMESPACE, PROMPTS[0])
    handing = hand_over(leaving)
    handing.stop()
    assert 0 == handing.run().taken
    assert 0 == staying.peers.stats().bytes
