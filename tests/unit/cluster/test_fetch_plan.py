"""Fetch or recompute, from whom, and how long to wait: each decision by a table."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.cluster.plan import (
    FETCH_TOKENS_MIN,
    Candidate,
    Choice,
    Need,
    Path,
    claim_seconds,
    fetch_seconds,
    make_plan,
    patience_seconds,
)
from kvstore.cluster.prefill import PrefillModel
from kvstore.nodes import Node

KIB = 1 << 10
GPU = PrefillModel(5e-5, 1.3e-9)  # 8 billion parameters
BIG = PrefillModel(5e-4, 4e-9)  # 70 billion, on as many GPUs
NETWORK = Path(latency_seconds=0.001, bytes_per_second=2e9)
LATE = replace(NETWORK, latency_seconds=0.3)
SLOW = Path(latency_seconds=0.05, bytes_per_second=1e8)
GQA_8B = 128 * KIB  # of keys and values for each token
GQA_70B = 320 * KIB
NODE = Node("n", 0, 1, ("127.0.0.1:1",), 0, 0, 0)


def candidate(slot: int = 0, *, tokens: int = 8192, queue: int = 0, path: Path = NETWORK) -> Candidate:
    return Candidate(replace(NODE, name=f"n{slot}", slot=slot), tokens, queue, path)


def need(present: int = 0, prompt: int = 8192, bytes_per_token: float = GQA_8B) -> Need:
    return Need(present, prompt, bytes_per_token)


def plan_of(wanted: Need, *candidates: Candidate, prefill: PrefillModel = GPU, gpu_weight: float = 1.0):
    return make_plan(wanted, candidates, prefill, gpu_weight, random.Random(301))


@pytest.mark.parametrize(
    ("expected", "wanted", "offered", "prefill"),
    [
        pytest.param(Choice.FETCH, need(), candidate(), GPU, id="a fetch wins over a quick network"),
        pytest.param(Choice.RECOMPUTE, need(), candidate(path=SLOW), GPU, id="a fetch loses over a slow one"),
        pytest.param(Choice.RECOMPUTE, need(), candidate(queue=3), GPU, id="a fetch loses where others queue"),
        pytest.param(Choice.FETCH, need(bytes_per_token=GQA_70B), candidate(), BIG, id="a larger model is worth more"),
        pytest.param(Choice.FETCH, need(), candidate(path=LATE), GPU, id="long enough"),
        pytest.param(
            Choice.RECOMPUTE, need(7680), candidate(path=LATE), GPU, id="too little left"
        ),
        pytest.param(Choice.SHORT, need(8192 - FETCH_TOKENS_MIN + 1), candidate(), BIG, id="never below 256 tokens"),
        pytest.param(Choice.FETCH, need(8192 - FETCH_TOKENS_MIN), candidate(), BIG, id="256 tokens are enough"),
        pytest.param(Choice.ABSENT, need(4096), candidate(tokens=4096), GPU, id="a peer that has no more than is here"),
        pytest.param(Choice.ABSENT, need(4096), candidate(tokens=4096 + 255), GPU, id="a peer that has little more"),
        pytest.param(Choice.FETCH, need(prompt=4096), candidate(tokens=8192), GPU, id="a peer that has more"),
    ],
)  # fmt: skip
def test_what_is_cheaper_is_done(expected: Choice, wanted: Need, offered: Candidate, prefill: PrefillModel) -> None:
    assert expected is plan_of(wanted, offered, prefill=prefill).choice


def test_without_peers_there_is_nothing_to_fetch():
    assert Choice.ABSENT is plan_of(need()).choice


def test_a_gpu_that_is_worth_nothing_computes_what_takes_no_longer_than_a_fetch():
    seconds = fetch_seconds(candidate(), 8192, GQA_8B)
    as_quick = PrefillModel(seconds / 8192, 0.0)
    assert Choice.RECOMPUTE is plan_of(need(), candidate(), prefill=as_quick, gpu_weight=0.0).choice
    assert Choice.FETCH is plan_of(need(), candidate(), prefill=as_quick, gpu_weight=0.1).choice


@pytest.mark.parametrize(
    ("expected", "candidates"),
    [
        pytest.param("n1", [candidate(0, tokens=4096), candidate(1)], id="who has most"),
        pytest.param("n1", [candidate(0, queue=1), candidate(1)], id="of those, who is least asked"),
        pytest.param("n1", [candidate(0, path=replace(NETWORK, bytes_per_second=1e9)), candidate(1)], id="or quicker"),
        pytest.param("n0", [candidate(0, queue=1), candidate(1, path=SLOW)], id="a queue may be the quicker way"),
    ],
)
def test_the_peer_whose_bytes_come_first_is_asked(expected: str, candidates: list[Candidate]) -> None:
    chosen = plan_of(need(bytes_per_token=8 * KIB), *candidates).candidate
    assert expected == (None if chosen is None else chosen.node.name)


def test_among_equals_chance_spreads_the_load():
    dice = random.Random(301)
    equals = [candidate(slot) for slot in range(4)]
    chosen = {make_plan(need(), equals, GPU, 1.0, dice).candidate for _ in range(100)}
    assert set(equals) == chosen


@pytest.mark.parametrize(
    ("expected", "wanted"),
    [
        (2 * GPU.seconds(0, 512) + 2.5, need(prompt=512)),
        (2 * GPU.seconds(1024, 31744) + 2.5, need(1024, 32768)),
        (60.0, need(prompt=4 << 20)),
    ],
)
def test_a_claim_lasts_twice_the_prefill_and_until_others_see_it(expected: float, wanted: Need) -> None:
    assert expected == claim_seconds(wanted, GPU, 2.5, 60.0)


@given(st.integers(0, 10**6), st.integers(1, 10**6), st.floats(0, 1e3), st.floats(0, 4), st.integers())
def test_nobody_waits_longer_than_the_claim_or_than_computing_costs(
    present: int, more: int, left: float, gpu_weight: float, seed: int
) -> None:
    wanted = need(present, present + more)
    cost = GPU.seconds(present, more) * (1 + gpu_weight)
    patience = patience_seconds(wanted, GPU, left, gpu_weight, random.Random(seed))
    assert min(left, 0.8 * cost) <= patience <= min(left, cost)
