"""Sparse parts in an embedded store: where they are kept, when they leave, and that losing one costs a match only."""

from __future__ import annotations

import dataclasses
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

import kvstore
from kvstore.errors import InvalidArgumentError
from kvstore.layer_groups import Recurrent, SlidingWindow
from kvstore.store import StoreSettings
from kvstore.testing.blocks import expected_part_rows, expected_rows, store_prompt, verified_blocks, write_sparse
from kvstore.types import KvLayout, Namespace, Root, Tier

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.store import Store

MIB = 1 << 20
WINDOW = SlidingWindow(layers=2, window=10, kv_heads=1, head_dim=64, dtype="int8")  # 3 blocks of 4, 1 KiB each
STATE = Recurrent(layers=2, state_bytes=2048)
LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=128, dtype="int8", block_tokens=4, groups=(WINDOW, STATE))
BASE = Namespace(model="m", revision="r", layout=LAYOUT)
WINDOW_PART, STATE_PART = 1, 2
PROMPT = list(range(100, 142))
BLOCKS = 10


@pytest.fixture
def store() -> Iterator[Store]:
    with kvstore.open(host_bytes=64 * MIB) as store:
        yield store
        assert () == store.verify().problems


def lose(store: Store, group: int, block: int, prompt: list[int] = PROMPT) -> None:
    """Take the parts of one group at one block away, as a failed disk would."""
    space = store._index.space(BASE)
    ids = space.tree.match(space.root_key(None), np.array(prompt, dtype=np.uint32))
    table = space.sparse.groups[group]
    for freed in table.forget(table.find([int(ids[block])])):
        freed.pool.free(freed.slots)


def test_a_prompt_is_found_with_the_parts_that_its_end_needs(store: Store) -> None:
    assert BLOCKS == store_prompt(store, BASE, PROMPT).blocks
    assert BLOCKS == store.match(BASE, PROMPT).blocks
    assert BLOCKS == verified_blocks(store, BASE, PROMPT)
    assert 3 + 1 == store.stats().sparse_blocks


def test_a_prompt_without_its_state_is_no_match(store: Store) -> None:
    with store.stage(BASE, PROMPT) as stage:
        stage.write_from(expected_rows(BASE, PROMPT))
        write_sparse(stage, WINDOW_PART, expected_part_rows(BASE, PROMPT, WINDOW_PART))
    assert 0 == store.match(BASE, PROMPT).blocks
    assert (BLOCKS * 4, {}) == (store.stats().shortened_tokens, store.stats().hit_tokens)


def test_parts_that_were_lost_are_written_to_the_blocks_that_are_there(store: Store) -> None:
    store_prompt(store, BASE, PROMPT)
    lose(store, 1, BLOCKS - 1)
    assert 0 == store.match(BASE, PROMPT).blocks
    again = store.stage(BASE, PROMPT)
    assert (0, (range(9, 10),), ()) == (again.blocks, again.wanted(STATE_PART), again.wanted(WINDOW_PART))
    assert 1 == write_sparse(again, STATE_PART, expected_part_rows(BASE, PROMPT, STATE_PART))
    assert 0 == store.match(BASE, PROMPT).blocks
    again.commit()
    assert BLOCKS == verified_blocks(store, BASE, PROMPT)


def test_turns_end_where_the_writer_says(store: Store) -> None:
    store_prompt(store, BASE, PROMPT, turn_ends=(9, 25))
    for shared, found in ((41, 10), (39, 6), (24, 6), (23, 2), (9, 2), (7, 0)):
        other = [*PROMPT[:shared], *range(50)]
        assert found == verified_blocks(store, BASE, other), shared


def test_where_two_prompts_part_is_a_match_for_a_third(store: Store) -> None:
    store_prompt(store, BASE, PROMPT)
    second = [*PROMPT[:22], *range(20)]
    assert 0 == store.match(BASE, second).blocks
    store_prompt(store, BASE, second)
    assert 5 == verified_blocks(store, BASE, [*PROMPT[:22], 7, 7, 7, 7])


@pytest.mark.parametrize("group", [0, 1])
def test_losing_any_one_part_shortens_the_match_and_nothing_else(store: Store, group: int) -> None:
    store_prompt(store, BASE, PROMPT, turn_ends=(20,))
    lose(store, group, BLOCKS - 1)
    assert 5 == verified_blocks(store, BASE, PROMPT)
    assert 5 == verified_blocks(store, BASE, PROMPT[:22])
    lose(store, group, 4)
    assert 0 == verified_blocks(store, BASE, PROMPT)
    assert BLOCKS == store.stats().tiers["host"].blocks


def test_sparse_parts_leave_with_their_blocks(store: Store) -> None:
    store_prompt(store, BASE, PROMPT, turn_ends=(20,))
    assert 4 + 4 == store.stats().sparse_blocks
    store.evict(BASE, PROMPT, from_block=5)
    assert 4 == store.stats().sparse_blocks
    assert 5 == verified_blocks(store, BASE, PROMPT)
    store.clear(BASE)
    assert (0, 0) == (store.stats().sparse_blocks, store.stats().tiers["host"].used_bytes)


def test_an_aborted_stage_gives_its_slots_back(store: Store) -> None:
    stage = store.stage(BASE, PROMPT)
    write_sparse(stage, STATE_PART, expected_part_rows(BASE, PROMPT, STATE_PART))
    stage.abort()
    assert 0 == store.stats().tiers["host"].used_bytes


def test_a_lease_keeps_what_it_needs_readable_when_the_blocks_are_dropped(store: Store) -> None:
    store_prompt(store, BASE, PROMPT)
    lease = store.lease(store.match(BASE, PROMPT))
    store.clear(BASE)
    rows = np.zeros((3, LAYOUT.part_bytes(WINDOW_PART)), dtype=np.uint8)
    assert 3 == lease.load_into(rows, from_block=7, part=WINDOW_PART).blocks
    assert np.array_equal(expected_part_rows(BASE, PROMPT, WINDOW_PART)[7:], rows)
    lease.release()
    assert 0 == store.stats().tiers["host"].used_bytes


def test_a_sparse_part_is_held_where_the_match_needs_it_alone(store: Store) -> None:
    store_prompt(store, BASE, PROMPT)
    with store.lease(store.match(BASE, PROMPT)) as lease:
        with pytest.raises(InvalidArgumentError, match=r"from_block is 6, expected 7\.\.10"):
            lease.load_into(bytearray(LAYOUT.part_bytes(WINDOW_PART)), from_block=6, part=WINDOW_PART)
        with pytest.raises(InvalidArgumentError, match=r"expected 9\.\.10"):
            lease.load_into(bytearray(LAYOUT.part_bytes(STATE_PART)), part=STATE_PART)


def test_a_group_commits_where_all_its_ranks_wrote(store: Store) -> None:
    layout = dataclasses.replace(
        LAYOUT, kv_heads=2, tensor_parallel=2, groups=(Recurrent(layers=2, state_bytes=2048, heads=2),)
    )
    namespace = dataclasses.replace(BASE, layout=layout)
    for written, found in (((2,), 0), ((2, 3), BLOCKS)):
        with store.stage(namespace, PROMPT) as stage:
            stage.write_from(expected_rows(namespace, PROMPT))
            for part in written:
                write_sparse(stage, part, expected_part_rows(namespace, PROMPT, part))
        assert found == verified_blocks(store, namespace, PROMPT)


def test_roots_keep_their_sparse_parts_apart(store: Store) -> None:
    store_prompt(store, BASE, PROMPT, root=Root(salt="x"))
    assert 0 == store.match(BASE, PROMPT).blocks
    assert BLOCKS == verified_blocks(store, BASE, PROMPT, root=Root(salt="x"))


def test_a_pin_holds_sparse_parts_too(store: Store) -> None:
    store_prompt(store, BASE, PROMPT)
    pin = store.pin(BASE, PROMPT)
    group = store._index.space(BASE).sparse.groups[1]
    assert (BLOCKS, []) == (pin.blocks, group.take_victims(Tier.HOST, 10))
    assert store._pins._pinned_bytes() == BLOCKS * LAYOUT.block_bytes + 3 * 1024 + 4096
    store.unpin(pin.pin_id)
    assert [0] == [block.holds for block in group.blocks()]


@pytest.mark.parametrize("turn_ends", [(-1,), (43,), (1.5,), (True,), tuple(range(5000))])
def test_turns_that_cannot_end_there_are_refused(store: Store, turn_ends: tuple) -> None:
    with pytest.raises(InvalidArgumentError, match="turn"):
        store.stage(BASE, PROMPT, turn_ends=turn_ends)
    assert 0 == store.stats().stages


def test_a_restart_finds_sparse_parts_with_their_blocks(tmp_path: Path) -> None:
    with kvstore.open(tmp_path, host_bytes=64 * MIB, disk_bytes=64 * MIB) as store:
        store_prompt(store, BASE, PROMPT, turn_ends=(20,))
    with kvstore.open(tmp_path, host_bytes=64 * MIB, disk_bytes=64 * MIB) as store:
        assert BLOCKS == verified_blocks(store, BASE, PROMPT)
        assert 5 == verified_blocks(store, BASE, PROMPT[:22])
        assert () == store.verify().problems
        store.clear(BASE)
    with kvstore.open(tmp_path, host_bytes=64 * MIB, disk_bytes=64 * MIB) as store:
        assert (0, 0) == (store.match(BASE, PROMPT).blocks, store.stats().sparse_blocks)


def test_a_restart_drops_sparse_parts_whose_blocks_are_gone(tmp_path: Path) -> None:
    with kvstore.open(tmp_path, host_bytes=64 * MIB, disk_bytes=64 * MIB) as store:
        store_prompt(store, BASE, PROMPT, turn_ends=(20,))
        store.flush()
        store.evict(BASE, PROMPT, from_block=5)
    with kvstore.open(tmp_path, host_bytes=64 * MIB, disk_bytes=64 * MIB) as store:
        assert 5 == verified_blocks(store, BASE, PROMPT)
        assert 4 == store.stats().sparse_blocks


@pytest.mark.parametrize("disk_bytes", [0, 8 * MIB])
def test_churn_keeps_each_group_in_its_share_and_every_answer_right(tmp_path: Path, disk_bytes: int) -> None:
    path = tmp_path if disk_bytes else None
    with kvstore.open(path, host_bytes=MIB, disk_bytes=disk_bytes) as store:
        prompts = [list(range(start, start + 200)) for start in range(0, 16 * 200, 200)]
        for prompt in prompts:
            store_prompt(store, BASE, prompt, turn_ends=range(20, 200, 20))
            assert 50 == store.match(BASE, prompt).blocks
        assert 50 == verified_blocks(store, BASE, prompts[-1])
        for prompt in prompts[::3]:
            verified_blocks(store, BASE, prompt)
        assert store.stats().evicted_blocks["sparse_host"] > 0
        space = store._index.space(BASE)
        for group in space.sparse.groups:
            assert group.host.reserved_bytes <= MIB // 4
        assert space.host.reserved_bytes <= MIB // 2
        for tier in store.stats().tiers.values():
            assert tier.used_bytes <= tier.capacity_bytes
        assert () == store.verify().problems
        store.clear(BASE)
        assert 0 == store.stats().tiers["host"].used_bytes


def test_parts_beyond_host_memory_are_read_from_disk_and_verified(tmp_path: Path) -> None:
    with kvstore.open(tmp_path, host_bytes=MIB, disk_bytes=64 * MIB) as store:
        prompts = [list(range(start, start + 42)) for start in range(0, 80 * 42, 42)]
        for prompt in prompts:
            store_prompt(store, BASE, prompt)
        assert store.stats().evicted_blocks["sparse_host"] > 0
        assert [BLOCKS] * len(prompts) == [verified_blocks(store, BASE, prompt) for prompt in prompts]


def test_a_part_larger_than_its_share_is_refused_and_counted() -> None:
    layout = dataclasses.replace(LAYOUT, groups=(Recurrent(layers=1, state_bytes=3 * MIB),))
    namespace = dataclasses.replace(BASE, layout=layout)
    with kvstore.open(host_bytes=4 * MIB) as store:
        assert BLOCKS == store_prompt(store, namespace, PROMPT).blocks
        assert {"sparse_full": 1} == store.stats().rejected_blocks
        assert 0 == store.match(namespace, PROMPT).blocks


def test_a_namespace_full_of_dense_blocks_gives_an_extent_to_sparse_parts_of_another() -> None:
    dense = dataclasses.replace(BASE, layout=dataclasses.replace(LAYOUT, head_dim=128 * 128, groups=()))
    with kvstore.open(host_bytes=64 * MIB, settings=StoreSettings(room_seconds_max=10.0)) as store:
        for start in range(0, 2400, 400):
            store_prompt(store, dense, list(range(start, start + 400)))
        assert 63 * MIB < store.stats().tiers["host"].used_bytes
        assert BLOCKS == store_prompt(store, BASE, PROMPT).blocks
        assert BLOCKS == verified_blocks(store, BASE, PROMPT)


def test_sparse_parts_of_a_cold_namespace_leave_host_memory_to_another(tmp_path: Path) -> None:
    wide = dataclasses.replace(LAYOUT, head_dim=128 * 32)  # 32 KiB a block
    cold = dataclasses.replace(BASE, layout=wide)
    busy = dataclasses.replace(BASE, layout=dataclasses.replace(wide, groups=()))
    lru = StoreSettings(eviction_policy="lru")
    with kvstore.open(tmp_path, host_bytes=32 * MIB, disk_bytes=256 * MIB, settings=lru) as store:
        prompts = [list(range(start, start + 200)) for start in range(0, 8 * 200, 200)]
        for prompt in prompts:
            store_prompt(store, cold, prompt, turn_ends=range(4, 200, 4))
        space = store._index.space(cold)
        assert all(group.host.reserved_bytes for group in space.sparse.groups)
        rows = np.zeros((50, wide.block_bytes), dtype=np.uint8)
        for start in range(0, 50 * 200, 200):
            with store.stage(busy, list(range(start, start + 200))) as stage:
                stage.write_from(rows)
        assert [0, 0, 0] == [pool.reserved_bytes for pool in space.pools(Tier.HOST)]
        assert 50 == verified_blocks(store, cold, prompts[0])
        assert () == store.verify().problems


def test_sparse_parts_follow_their_blocks_out_of_host_memory_unless_they_are_needed(tmp_path: Path) -> None:
    with kvstore.open(tmp_path, host_bytes=64 * MIB, disk_bytes=64 * MIB) as store:
        store_prompt(store, BASE, PROMPT)
        store.flush()
        space = store._index.space(BASE)
        group = space.sparse.groups[1]
        for needed, left in ((True, []), (False, [Tier.HOST])):
            verified_blocks(store, BASE, PROMPT)  # which brings blocks back from disk
            with store._room.lock:
                store._room._leave_host(space, space.tree.take_victims(Tier.HOST, BLOCKS))
            assert {Tier.DISK: BLOCKS} == store.match(BASE, PROMPT, touch=needed).tiers
            with store._room.lock:
                assert needed != store._room.sparse.leave_cooled(space)
            assert [{Tier.HOST, Tier.DISK} - set(left)] == [set(block.slots) for block in group.blocks()]
        assert BLOCKS == verified_blocks(store, BASE, PROMPT)


def test_threads_never_read_another_blocks_parts(tmp_path: Path) -> None:
    """Parts name themselves; six threads store, read and evict in a store that holds few of them."""
    with kvstore.open(tmp_path, host_bytes=MIB // 4, disk_bytes=4 * MIB) as store:
        problems: list[BaseException] = []

        def work(seed: int) -> None:
            random = np.random.default_rng(seed)
            try:
                for _ in range(20):
                    family, length = int(random.integers(12)), int(random.integers(20, 80))
                    prompt = [*range(family, family + 24), *range(family * 1000, family * 1000 + length)]
                    if random.random() < 0.5:
                        store_prompt(store, BASE, prompt, turn_ends=(24,))
                    elif random.random() < 0.9:
                        verified_blocks(store, BASE, prompt)
                    else:
                        store.evict(BASE, prompt, from_block=int(random.integers(3, 8)))
            except BaseException as problem:  # noqa: BLE001  # handed to the main thread
                problems.append(problem)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [] == problems
        assert () == store.verify().problems
        store.clear(BASE)
        stats = store.stats()
        assert (0, 0, 0, 0) == (stats.leases, stats.stages, stats.sparse_blocks, stats.tiers["host"].used_bytes)
        assert [0, 0] == [group.disk.used_slots for group in store._index.space(BASE).sparse.groups if group.disk]
