"""Ranks of one engine and a budget that is spent, or refilled, between two of them: they get the same answer."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

from kvstore.store import Store, StoreSettings, open_store
from kvstore.testing.blocks import expected_part_rows, store_prompt, verified_blocks
from kvstore.testing.manual_clock import ManualClock
from kvstore.types import KvLayout, Namespace

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20
LAYOUT = KvLayout(layers=1, kv_heads=4, head_dim=64, dtype="int8", block_tokens=4, tensor_parallel=4)
NAMESPACE = Namespace(model="m", revision="r", layout=LAYOUT)
OTHER = dataclasses.replace(NAMESPACE, tenant="other")
PROMPT = list(range(40))
BLOCKS = 10
RANKS = LAYOUT.writers


@pytest.fixture
def store() -> Iterator[Store]:
    settings = StoreSettings(store_bytes_per_second=1 << 40)
    with open_store(host_bytes=8 * MIB, settings=settings, clock=ManualClock()) as store:
        yield store
        assert (0, ()) == (store.stats().stages, store.verify().problems)


def spend(store: Store) -> None:
    space = store._index.space(NAMESPACE)
    with store._index.lock:
        space.budget.spend(int(space.budget.left(store._clock.monotonic()).left_bytes))


def refill(store: Store) -> None:
    store._clock.advance(1.0)  # type: ignore[attr-defined]


def stage_all(store: Store, ranks: tuple[int, ...], prompt: list[int]) -> list[int]:
    """Have ranks store a prompt one after the other; returns how many blocks were wanted of each."""
    told = []
    for rank in ranks:
        stage = store.stage(NAMESPACE, prompt, rank=rank)
        told.append(stage.blocks)
        stage.write_from(expected_part_rows(NAMESPACE, prompt, rank), part=rank)
        stage.commit()
    return told


@pytest.mark.parametrize("stored", [0, 5])
@pytest.mark.parametrize("order", [RANKS, RANKS[::-1]])
def test_who_comes_when_the_budget_is_there_again_is_told_what_the_first_was(
    store: Store, stored: int, order: tuple[int, ...]
) -> None:
    if stored:
        assert [stored] * 4 == stage_all(store, RANKS, PROMPT[: 4 * stored])
    spend(store)
    assert [0] == stage_all(store, order[:1], PROMPT)
    refill(store)
    assert [0] * 3 == stage_all(store, order[1:], PROMPT)
    assert 0 == store.stats().stages
    assert [BLOCKS - stored] * 4 == stage_all(store, order, PROMPT)
    assert BLOCKS == verified_blocks(store, NAMESPACE, PROMPT)


def test_a_rank_that_comes_again_begins_anew_for_all(store: Store) -> None:
    spend(store)
    assert [0, 0] == stage_all(store, RANKS[:2], PROMPT)
    refill(store)
    assert [BLOCKS] * 4 == stage_all(store, RANKS, PROMPT)
    assert BLOCKS == verified_blocks(store, NAMESPACE, PROMPT)


def test_who_joins_a_stage_is_not_refused_for_a_budget_that_it_spent(store: Store) -> None:
    assert [BLOCKS] == stage_all(store, RANKS[:1], PROMPT)
    spend(store)
    assert [BLOCKS] * 3 == stage_all(store, RANKS[1:], PROMPT)
    assert BLOCKS == verified_blocks(store, NAMESPACE, PROMPT)


def test_refusals_that_not_all_ranks_hear_of_are_bounded(store: Store) -> None:
    for number in range(300):
        spend(store)
        stage_all(store, RANKS[:1], [number * 100 + token for token in PROMPT])
    assert 64 == sum(len(stages) for stages in store._shared._open.values())
    assert 0 == store_prompt(store, OTHER, PROMPT).refused_blocks
