"""Random schedules of requests and faults in a simulated cluster: what must hold in each of them.

A failing one names its seed; `World(seed, SETTINGS)` and `unfold` play it again.
"""

from __future__ import annotations

from itertools import pairwise

import pytest

from kvstore.cluster.peer_settings import PeerSettings
from kvstore.cluster.plan import Path
from kvstore.cluster.prefill import PrefillModel
from kvstore.testing.peer_world import LAYOUT, Request, World, keys_of, value_of

SETTINGS = PeerSettings(
    path=Path(latency_seconds=0.01, bytes_per_second=1e8),
    prefill=PrefillModel(1e-3, 0.0),
    fetch_seconds_max=20.0,
)
NAMES = ("a", "b", "c", "d")
BLOCKS = 32
SYSTEM_PROMPT = list(range(16 * LAYOUT.block_tokens))
PREFILL_SECONDS = SETTINGS.prefill.seconds(0, BLOCKS * LAYOUT.block_tokens)
SCHEDULES = 6
SEEDS = range(6)


def prompt_of(tail: int) -> list[int]:
    """The system prompt, and what one of the users says."""
    begin = 1_000_000 + tail * 10_000
    return [*SYSTEM_PROMPT, *range(begin, begin + (BLOCKS - 16) * LAYOUT.block_tokens)]


def unfold(world: World) -> None:
    """Requests and faults in random order for some minutes, then peace until all is settled."""
    dice = world.random
    world.broken_ratio = 0.1
    for name in NAMES:
        world.add(name)
    for _ in range(60):
        world.run(dice.expovariate(1.0))
        node = world.nodes[dice.choice(NAMES)]
        match dice.randrange(12):
            case 0:
                node.kill()
            case 1 if not node.is_up:
                node.start()
            case 2:
                node.sees_directory = not node.sees_directory
            case 3:
                world.severed ^= {frozenset(dice.sample(NAMES, 2))}
            case 4:
                node.answers_wrongly = not node.answers_wrongly
            case 5 if world.requests:
                node.lose(dice.choice(world.requests).wanted, dice.randrange(BLOCKS))
            case _ if node.is_up:
                node.ask(prompt_of(dice.randrange(3)))
    world.run(SETTINGS.fetch_seconds_max + SETTINGS.answer_seconds_max + 2 * PREFILL_SECONDS)


def problems(world: World) -> list[str]:
    """What does not hold; each with what tells how it came to it."""
    found = []
    for request in world.requests:
        if request.computes_from is None:
            if request.node.is_up and request.began > world_start_of(request):
                found.append(f"a request at {request.began} never went on")
        elif request.computes_from - request.began > SETTINGS.fetch_seconds_max + SETTINGS.answer_seconds_max:
            found.append(f"a request waited for {request.computes_from - request.began} s")
    for node in world.nodes.values():
        wrong = [key for key, held in node.held.items() if held != value_of(key)]
        found += [f"{node.name} holds other bytes under {key.hex()}" for key in wrong]
    return found


def world_start_of(request: Request) -> float:
    """When the node of a request was started last: what it asked for before died with it."""
    return request.node.started_at


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_happens_every_request_goes_on_in_time_with_the_right_bytes(seed: int) -> None:
    for schedule in range(SCHEDULES):
        world = World(seed * 1_000_003 + schedule, SETTINGS)
        unfold(world)
        assert (world.seed, []) == (world.seed, problems(world))


@pytest.mark.parametrize("seed", SEEDS)
def test_after_the_faults_a_prompt_is_computed_once_for_all_nodes(seed: int) -> None:
    world = World(seed, SETTINGS)
    unfold(world)
    world.severed.clear()
    world.broken_ratio = 0.0
    for node in world.nodes.values():
        node.sees_directory, node.answers_wrongly = True, False
        node.start()
    world.run(2 * world.shared.lease_seconds)
    requests = [node.ask(prompt_of(9)) for node in world.nodes.values() for _ in range(3)]
    world.run(SETTINGS.fetch_seconds_max + 2 * PREFILL_SECONDS)
    computed = sorted(request.computed_tokens for request in requests)
    # The one that came first; what is less than a fetch is worth may be computed by each.
    assert (seed, [0] * (len(requests) - 1), BLOCKS * LAYOUT.block_tokens) == (seed, computed[:-1], computed[-1])


def test_prefixes_are_asked_for_once_and_then_spread() -> None:
    world = World(301, SETTINGS)
    nodes = [world.add(f"n{number}") for number in range(16)]
    nodes[0].ask(prompt_of(0))
    world.run(PREFILL_SECONDS + 5.0)
    for node in nodes[1:]:
        node.ask(prompt_of(1))
        world.run(1.0)
    world.run(3 * PREFILL_SECONDS)
    computed = sum(request.computed_tokens for request in world.requests)
    assert BLOCKS * LAYOUT.block_tokens + (BLOCKS - 16) * LAYOUT.block_tokens == computed


def test_keys_of_prompts_that_share_a_beginning_share_it_too() -> None:
    first, second = (World(0, SETTINGS).add("a").ask(prompt_of(tail)).wanted.prompt for tail in (0, 1))
    shared = [one == other for one, other in zip(keys_of(first), keys_of(second), strict=True)]
    assert [True] * 16 + [False] * 16 == shared
    assert all(one >= other for one, other in pairwise(shared))
