from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore.cluster.routing import EngineMatch, RoutingPolicy, choose_engine, choose_node
from kvstore.errors import InvalidArgumentError
from kvstore.nodes import Node, NodeMatch, NodeState
from kvstore.types import Tier


def located(**tokens_by_node: object) -> list[NodeMatch]:
    """Nodes with tokens in host memory, or (tokens, tier)."""
    found = []
    for slot, (name, held) in enumerate(tokens_by_node.items()):
        tokens, tier = held if isinstance(held, tuple) else (held, Tier.HOST)
        node = Node(name, slot, slot, (), 0, 0, 0)
        found.append(NodeMatch(node, tokens, {tier: tokens} if tokens else {}))
    return found


@pytest.mark.parametrize(
    ("matches", "prompt_tokens", "waiting", "expected"),
    [
        # The longest prefix wins where nobody waits.
        (located(a=512, b=2048, c=0), 4096, {}, "b"),
        # A short wait does not outweigh a long prefix, a long one does.
        (located(a=0, b=4096), 4096, {"a": 9000, "b": 9100}, "b"),
        (located(a=0, b=4096), 4096, {"a": 9000, "b": 20000}, "a"),
        # Host memory before disk, and disk before nothing.
        (located(a=(2048, Tier.DISK), b=2048), 4096, {}, "b"),
        (located(a=(2048, Tier.DISK), b=0), 4096, {}, "a"),
        # What is known only to a boundary counts a little less.
        (located(a=(2048, Tier.PEER), b=2048), 4096, {}, "b"),
        # A node with more than its share takes nothing more, whatever it holds.
        (located(a=100_000, b=0, c=0), 100_000, {"a": 4000, "b": 10, "c": 10}, "b"),
        # Alone there is no choice.
        (located(a=0), 4096, {"a": 10**9}, "a"),
        # More than the prompt is not saved.
        (located(a=9000, b=4096), 4096, {"a": 10, "b": 9}, "b"),
    ],
)
def test_a_prompt_goes_where_it_ends_soonest(matches, prompt_tokens, waiting, expected) -> None:
    chosen = choose_node(matches, prompt_tokens, waiting, affinity_key=b"prompt")
    assert expected == chosen.node.name or (expected == "b" and chosen.node.name == "c" and len(matches) == 3)


def test_nobody_is_chosen_of_nobody() -> None:
    assert choose_node([], 10, {}) is None


def test_prompts_that_nobody_holds_are_spread_and_each_goes_to_one_node() -> None:
    nodes = located(a=0, b=0, c=0, d=0)
    chosen = [choose_node(nodes, 4096, {}, affinity_key=bytes([number])).node.name for number in range(200)]
    again = [choose_node(nodes[::-1], 4096, {}, affinity_key=bytes([number])).node.name for number in range(200)]
    assert chosen == again
    assert all(chosen.count(name) > 25 for name in "abcd")
    fewer = [choose_node(nodes[:3], 4096, {}, affinity_key=bytes([number])).node.name for number in range(200)]
    assert all(new == old for new, old in zip(fewer, chosen, strict=True) if old != "d")


def test_a_prompt_that_all_ask_for_does_not_bury_its_holder() -> None:
    waiting = dict.fromkeys("abcd", 0)
    nodes = located(a=4000, b=0, c=0, d=0)
    for number in range(400):
        chosen = choose_node(nodes, 4096, waiting, affinity_key=bytes([number % 256])).node.name
        waiting[chosen] += 96 if chosen == "a" else 4096
    mean = sum(waiting.values()) / 4
    assert max(waiting.values()) <= 1.25 * mean + 4096


@pytest.mark.parametrize("ratio", [1.0, 0.0, float("nan")])
def test_a_bound_that_nobody_could_keep_is_refused(ratio: float) -> None:
    with pytest.raises(InvalidArgumentError, match="load_ratio_max"):
        RoutingPolicy(load_ratio_max=ratio)


def test_negative_counts_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="-1"):
        choose_node(located(a=0), -1, {})
    with pytest.raises(InvalidArgumentError, match="below 0"):
        choose_node(located(a=0), 1, {"a": -1})
    with pytest.raises(InvalidArgumentError, match="disk_worth"):
        RoutingPolicy(disk_worth=2.0)


def test_a_node_that_drains_is_chosen_only_where_there_is_no_other():
    full, empty = located(a=4096, b=0)
    draining = replace(full, node=replace(full.node, state=NodeState.DRAINING))
    chosen = [choose_node(matches, 4096, {}) for matches in ([draining, empty], [draining])]
    assert ["b", "a"] == [None if match is None else match.node.name for match in chosen]


@pytest.mark.parametrize(
    ("engines", "expected"),
    [
        # What lies in the engine's own memory comes before what its node would have to copy there.
        ({"a": (2048, 0), "b": (0, 2048)}, "a"),
        ({"a": (2048, 2048), "b": (0, 2048)}, "a"),
        # More on the node outweighs a little less in the engine.
        ({"a": (512, 512), "b": (0, 4096)}, "b"),
        # Of what both hold only what is behind the engine's own counts.
        ({"a": (1024, 4096), "b": (0, 4096)}, "a"),
        ({"a": (0, 0), "b": (16, 0)}, "b"),
    ],
)
def test_a_prompt_goes_to_the_engine_that_holds_it(engines, expected) -> None:
    given = []
    for name, (device, host) in engines.items():
        (node,) = located(**{name: host})
        given.append(EngineMatch(name, device, node))
    assert expected == choose_engine(given, 4096, {}).name
    assert expected == choose_engine(given[::-1], 4096, {}).name


def test_an_engine_with_more_than_its_share_takes_nothing_more() -> None:
    engines = [EngineMatch("a", 4096), EngineMatch("b"), EngineMatch("c")]
    assert "a" != choose_engine(engines, 4096, {"a": 6000}).name
    assert "a" == choose_engine(engines, 4096, {"a": 1000, "b": 900, "c": 900}).name
    assert choose_engine([], 10, {}) is None
