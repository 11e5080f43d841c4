"""Where sparse parts, prefetches, admission to disk, scrubbing, budgets and held memory meet in one store."""

from __future__ import annotations

import dataclasses
import shutil
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvstore.layer_groups import Recurrent, SlidingWindow
from kvstore.store import Store, StoreSettings, open_store
from kvstore.testing.blocks import expected_rows, store_prompt, verified_blocks
from kvstore.testing.manual_clock import ManualClock
from kvstore.types import KvLayout, Namespace, Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MIB = 1 << 20
GROUPS = (
    SlidingWindow(layers=2, window=10, kv_heads=1, head_dim=64, dtype="int8"),  # 3 blocks of 4, 1 KiB each
    Recurrent(layers=2, state_bytes=2048),
)
LAYOUT = KvLayout(layers=2, kv_heads=1, head_dim=64, dtype="int8", block_tokens=4, groups=GROUPS)
NAMESPACE = Namespace(model="m", revision="r", layout=LAYOUT)
PROMPT = list(range(42))
BLOCKS = 10
SIZES = {"host_bytes": 4 * MIB, "disk_bytes": 64 * MIB}
HOST_ALONE = {Tier.HOST}


@pytest.fixture
def reopen(tmp_path: Path) -> Iterator[Callable[..., Store]]:
    """Opens the store of a folder anew: closed before, or without a flush as after a kill."""
    opened: list[Store] = []

    def open_again(**settings: object) -> Store:
        for store in opened:
            store.close()
        opened[:] = [open_store(tmp_path, **SIZES, settings=StoreSettings(**settings), clock=ManualClock())]  # type: ignore[arg-type]
        return opened[0]

    yield open_again
    for store in opened:
        assert () == store.verify().problems
        store.clear(NAMESPACE)
        assert 0 == store.stats().tiers["host"].used_bytes
        store.close()


def groups_of(store: Store):  # type: ignore[no-untyped-def]
    return store._index.space(NAMESPACE).sparse.groups


def leased_blocks(store: Store, tokens: list[int]) -> int:
    """What a connector may be promised of a prompt."""
    with store.lease(store.match(NAMESPACE, tokens, touch=False), tiers=HOST_ALONE) as lease:
        return lease.blocks


def load_dense(store: Store, tokens: list[int]) -> None:
    """Have the dense blocks of a prompt come up, which a load of its sparse parts is not needed for."""
    with store.lease(store.match(NAMESPACE, tokens, touch=False)) as lease:
        lease.load_into(np.zeros((lease.blocks, LAYOUT.block_bytes), dtype=np.uint8))


def test_no_match_or_lease_promises_host_memory_whose_sparse_parts_lie_on_disk(reopen: Callable[..., Store]) -> None:
    store_prompt(reopen(), NAMESPACE, PROMPT, turn_ends=(20,))
    store = reopen()
    load_dense(store, PROMPT)
    match = store.match(NAMESPACE, PROMPT)
    assert (BLOCKS, 0, {Tier.DISK: BLOCKS}) == (match.blocks, match.host_blocks, match.tiers)
    assert 0 == leased_blocks(store, PROMPT)
    assert BLOCKS == verified_blocks(store, NAMESPACE, PROMPT)
    assert BLOCKS == store.match(NAMESPACE, PROMPT).host_blocks == leased_blocks(store, PROMPT)


@pytest.mark.parametrize("is_dense_up", [False, True])
def test_a_prefetch_brings_all_up_that_a_match_needs(reopen: Callable[..., Store], is_dense_up: bool) -> None:
    store_prompt(reopen(), NAMESPACE, PROMPT, turn_ends=(20,))
    store = reopen()
    if is_dense_up:
        load_dense(store, PROMPT)
    with store.prefetch(NAMESPACE, PROMPT, wait_seconds=None) as prefetch:
        assert (BLOCKS, {"done": 1}) == (prefetch.host_blocks, store.stats().prefetches)
    assert BLOCKS == store.match(NAMESPACE, PROMPT).host_blocks == leased_blocks(store, PROMPT)
    assert (0, 0) == (sum(block.holds for group in groups_of(store) for block in group.blocks()), store.stats().leases)
    with store.prefetch(NAMESPACE, PROMPT) as prefetch:
        assert (BLOCKS, {"done": 1, "present": 1}) == (prefetch.host_blocks, store.stats().prefetches)


def test_a_prefetch_says_no_more_than_can_be_matched(reopen: Callable[..., Store]) -> None:
    store = reopen()
    stage = store.stage(NAMESPACE, PROMPT)
    stage.write_from(expected_rows(NAMESPACE, PROMPT))
    stage.commit()
    assert 0 == store.match(NAMESPACE, PROMPT).blocks
    with store.prefetch(NAMESPACE, PROMPT, wait_seconds=None) as prefetch:
        assert 0 == prefetch.host_blocks


@pytest.mark.parametrize("group", [0, 1])
def test_a_scrub_drops_sparse_parts_that_rotted(reopen: Callable[..., Store], tmp_path: Path, group: int) -> None:
    store_prompt(reopen(), NAMESPACE, PROMPT, turn_ends=(20,))
    store = reopen()
    assert BLOCKS == store.match(NAMESPACE, PROMPT).blocks
    (slab,) = groups_of(store)[group].disk.slabs
    count = len(groups_of(store)[group])
    last = int(np.flatnonzero(slab.sequences)[-1])
    with slab.path.open("r+b") as file:
        file.seek(slab.slot_offset(last) + slab.geometry.body_offsets[0])
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    assert 1 == store.scrub().dropped_blocks
    assert (1, count - 1) == (store.stats().corrupt_blocks, len(groups_of(store)[group]))
    assert BLOCKS > store.match(NAMESPACE, PROMPT).blocks
    assert (0, 1) == (store.scrub().dropped_blocks, store.stats().corrupt_blocks)
    store_prompt(store, NAMESPACE, PROMPT, turn_ends=(20,))
    assert BLOCKS == verified_blocks(store, NAMESPACE, PROMPT)


def test_a_scrub_leaves_sparse_parts_in_host_memory_and_those_that_are_held(reopen: Callable[..., Store]) -> None:
    store = reopen()
    store_prompt(store, NAMESPACE, PROMPT)
    store.flush()
    for group in groups_of(store):
        for slab in group.disk.slabs:
            with slab.path.open("r+b") as file:
                for index in np.flatnonzero(slab.sequences).tolist():
                    file.seek(slab.slot_offset(index) + slab.geometry.body_offsets[0])
                    file.write(bytes(100))
    bad = sum(len(group) for group in groups_of(store))
    with store.lease(store.match(NAMESPACE, PROMPT)):
        assert bad == store.scrub().dropped_blocks
        assert BLOCKS == store.match(NAMESPACE, PROMPT).blocks
    assert bad == store.scrub().dropped_blocks
    assert (0, 0) == (store.scrub().dropped_blocks, sum(group.disk.used_slots for group in groups_of(store)))
    assert BLOCKS == verified_blocks(store, NAMESPACE, PROMPT)


def test_what_is_written_through_can_be_matched_after_a_kill(reopen: Callable[..., Store], tmp_path: Path) -> None:
    store = reopen(disk_admission="write_through")
    store_prompt(store, NAMESPACE, PROMPT, turn_ends=(20,))
    while store.stats().moves:
        pass
    sparse_bytes = sum(len(group) * group.host.slot_bytes for group in groups_of(store))
    assert BLOCKS * LAYOUT.block_bytes + sparse_bytes == store.stats().written_bytes
    killed = tmp_path / "killed"
    shutil.copytree(tmp_path, killed, ignore=lambda *_: ["killed"])
    with open_store(killed, **SIZES) as other:  # type: ignore[arg-type]
        assert BLOCKS == verified_blocks(other, NAMESPACE, PROMPT)


def test_no_sparse_part_is_flushed_whose_block_is_not_admitted(reopen: Callable[..., Store]) -> None:
    store = reopen(disk_admission="reuse")
    store_prompt(store, NAMESPACE, PROMPT)
    other = [token + 1000 for token in PROMPT]
    store_prompt(store, NAMESPACE, other)
    for _ in range(2):
        store.match(NAMESPACE, PROMPT)
    store.flush()
    match = store.match(NAMESPACE, other, touch=False)
    assert BLOCKS == match.blocks
    space = store._index.space(NAMESPACE)
    assert space.disk is not None
    assert BLOCKS == space.disk.used_slots
    assert [3, 1] == [group.disk.used_slots for group in groups_of(store)]
    store = reopen(disk_admission="reuse")
    assert (BLOCKS, 0) == (store.match(NAMESPACE, PROMPT).blocks, store.match(NAMESPACE, other).blocks)


def test_a_group_below_its_share_takes_from_the_space_that_gives_first_whatever_the_dense_blocks_have() -> None:
    """The dense blocks of the namespace that asks are at their limit, and worth more than those of the other."""
    layout = KvLayout(
        layers=1,
        kv_heads=1,
        head_dim=8192,
        dtype="int8",
        block_tokens=4,
        groups=(Recurrent(layers=1, state_bytes=MIB),),
    )
    ours = Namespace(model="m", revision="r", tenant="ours", layout=layout)
    others = Namespace(model="m", revision="r", tenant="others", layout=dataclasses.replace(layout, groups=()))
    settings = StoreSettings(eviction_policy="lru", sparse_ratio_max=0.75)
    with open_store(host_bytes=32 * MIB, settings=settings, clock=ManualClock()) as store:
        for start in range(0, 4000, 10):
            store_prompt(store, others, list(range(start, start + 4)))
        prompts = [list(range(start, start + 64)) for start in range(0, 8000, 1000)]
        for prompt in prompts:
            stage = store.stage(ours, prompt)
            stage.write_from(expected_rows(ours, prompt))
            stage.commit()
        space = store._index.space(ours)
        assert (True, 128) == (space.host.at_limit, space.tree.tier_blocks(Tier.HOST))
        store_prompt(store, ours, prompts[0])
        assert 128 == space.tree.tier_blocks(Tier.HOST)
        assert 16 == verified_blocks(store, ours, prompts[0])


def test_the_reserve_of_prefetches_sinks_with_host_memory(reopen: Callable[..., Store]) -> None:
    store_prompt(reopen(), NAMESPACE, PROMPT)
    store = reopen()
    with store._host._stock._changed:
        store._host._stock._capacity_bytes = LAYOUT.block_bytes  # the system has no more
    with store.prefetch(NAMESPACE, PROMPT, wait_seconds=None) as prefetch:
        assert (0, {"reserve_full": 1}) == (prefetch.host_blocks, store.stats().prefetches)


def test_sparse_parts_are_paid_from_the_budget_and_earn_for_it(reopen: Callable[..., Store]) -> None:
    store = reopen()
    budget = store._index.space(NAMESPACE).budget
    before = budget.left(0.0).left_bytes
    store_prompt(store, NAMESPACE, PROMPT)
    sparse_bytes = sum(len(group) * group.host.slot_bytes for group in groups_of(store))
    spent = BLOCKS * LAYOUT.block_bytes + sparse_bytes
    assert spent == before - budget.left(0.0).left_bytes
    budget.spend(100 * spent)
    low = budget.left(0.0).left_bytes
    assert BLOCKS == verified_blocks(store, NAMESPACE, PROMPT)
    assert 20 * spent == budget.left(0.0).left_bytes - low


def test_a_prompt_with_sparse_parts_is_refused_before_the_index_has_seen_it_where_the_budget_is_spent(
    reopen: Callable[..., Store],
) -> None:
    store = reopen()
    budget = store._index.space(NAMESPACE).budget
    budget.spend(int(budget.left(0.0).left_bytes))
    stage = store.stage(NAMESPACE, PROMPT)
    assert (0, 0, [()] * 3) == (store.stats().stages, stage.blocks, [stage.wanted(part) for part in range(3)])
    assert 0 == stage.write_from(np.zeros((BLOCKS, LAYOUT.part_bytes(2)), dtype=np.uint8), part=2)
    assert BLOCKS == stage.commit().refused_blocks
