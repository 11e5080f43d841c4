"""What quotas promise, on real memory and real files: limits hold, what is ensured stays, priorities order."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvstore
from kvstore.radix.tree import POLICIES
from kvstore.store import Quota, Store, StoreSettings, open_store
from kvstore.testing.manual_clock import ManualClock
from kvstore.types import KvLayout, Namespace, Tier

MIB = 1 << 20
LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=8192, dtype="int8", block_tokens=4)  # 64 KiB a block
BLOCK_BYTES = LAYOUT.block_bytes
EXTENT_BLOCKS = 4 * MIB // BLOCK_BYTES
HOST_BYTES = 64 * MIB
OURS = Namespace(model="m", revision="r", tenant="ours", layout=LAYOUT)
OTHERS = dataclasses.replace(OURS, tenant="others")
THIRD = dataclasses.replace(OURS, tenant="third")


def open_with(
    *quotas: Quota,
    path: Path | None = None,
    disk_bytes: int = 0,
    host_bytes: int = HOST_BYTES,
    policy: str = "survival",
) -> Store:
    known = StoreSettings(quotas=quotas, eviction_policy=policy)
    return open_store(path, host_bytes=host_bytes, disk_bytes=disk_bytes, settings=known, clock=ManualClock())


def prompt_of(name: int, blocks: int) -> np.ndarray:
    return np.arange(name * 100_000, name * 100_000 + blocks * LAYOUT.block_tokens, dtype=np.uint32)


def put(store: Store, namespace: Namespace, name: int, blocks: int) -> int:
    """Store a prompt of its own; returns how many blocks were refused."""
    rows = np.zeros((blocks, namespace.layout.block_bytes), dtype=np.uint8)
    with store.stage(namespace, prompt_of(name, blocks)) as stage:
        stage.write_from(rows)
    return blocks - stage.blocks


def blocks_of(store: Store, namespace: Namespace, tier: Tier = Tier.HOST) -> int:
    return store._index.space(namespace).tree.tier_blocks(tier)


def reserved_bytes(store: Store, namespace: Namespace, tier: Tier = Tier.HOST) -> int:
    pool = store._index.space(namespace).pool(tier)
    assert pool is not None
    return pool.reserved_bytes


@pytest.mark.parametrize("host_max", [BLOCK_BYTES, 3 * MIB, 4 * MIB, 9 * MIB + 17])
def test_a_namespace_never_has_more_host_memory_than_its_limit(host_max: int) -> None:
    with open_with(Quota(tenant="ours", host_max=host_max)) as store:
        for name in range(30):
            refused = put(store, OURS, name, 20)
            assert 20 - min(20, host_max // BLOCK_BYTES) == refused
            assert reserved_bytes(store, OURS) <= host_max
        assert host_max // BLOCK_BYTES == blocks_of(store, OURS)
        assert store.match(OURS, prompt_of(29, 20)).blocks == min(20, host_max // BLOCK_BYTES)
        assert {"quota"} >= set(store.stats().rejected_blocks)


def test_a_limit_below_one_block_refuses_all_and_says_why() -> None:
    with open_with(Quota(tenant="ours", host_max=BLOCK_BYTES - 1)) as store:
        assert 20 == put(store, OURS, 0, 20)
        assert 0 == put(store, OTHERS, 0, 20)
        assert {"quota": 20} == store.stats().rejected_blocks


def test_held_blocks_count_so_a_namespace_full_of_them_is_refused_at_once() -> None:
    with open_with(Quota(model="m", host_max=4 * MIB)) as store:
        put(store, OURS, 0, EXTENT_BLOCKS)
        with store.lease(store.match(OURS, prompt_of(0, EXTENT_BLOCKS))):
            store.pin(OURS, prompt_of(0, EXTENT_BLOCKS))
            assert 10 == put(store, OURS, 1, 10)
            assert 0 == put(store, OTHERS, 1, 10)
        assert {"quota": 10} == store.stats().rejected_blocks


def test_what_comes_up_from_disk_stays_within_the_limit(tmp_path: Path) -> None:
    with open_with(Quota(tenant="ours", host_max=2 * MIB), path=tmp_path, disk_bytes=128 * MIB) as store:
        for name in range(8):
            assert 0 == put(store, OURS, name, 20)
        rows = np.zeros((20, BLOCK_BYTES), dtype=np.uint8)
        for name in range(8):
            with store.lease(store.match(OURS, prompt_of(name, 20))) as lease:
                assert 20 == lease.load_into(rows).blocks
            assert reserved_bytes(store, OURS) <= 2 * MIB


def test_the_files_of_a_namespace_never_take_more_than_its_limit(tmp_path: Path) -> None:
    disk_max = 17 * MIB + 4097
    with open_with(
        Quota(tenant="ours", disk_max=disk_max), path=tmp_path, disk_bytes=128 * MIB, host_bytes=4 * MIB
    ) as store:
        for name in range(40):
            assert 0 == put(store, OURS, name, 20)
            files = sum(file.stat().st_blocks * 512 for file in (tmp_path / "slabs").iterdir())
            assert files <= disk_max
        store.flush()
        assert blocks_of(store, OURS, Tier.DISK) > disk_max // BLOCK_BYTES * 9 // 10
        assert store.stats().evicted_blocks["disk"] > 0


def test_a_limit_that_was_lowered_holds_from_the_first_use_after_a_restart(tmp_path: Path) -> None:
    with open_with(path=tmp_path, disk_bytes=128 * MIB) as store:
        for name in range(20):
            put(store, OURS, name, 20)
        put(store, OTHERS, 0, 20)
        store.flush()
        assert reserved_bytes(store, OURS, Tier.DISK) > 17 * MIB
    with open_with(Quota(tenant="ours", disk_max=17 * MIB), path=tmp_path, disk_bytes=128 * MIB) as store:
        found = sum(store.match(OURS, prompt_of(name, 20)).blocks for name in range(20))
        assert 100 < found < 17 * MIB // BLOCK_BYTES
        assert reserved_bytes(store, OURS, Tier.DISK) <= 17 * MIB
        assert 20 == store.match(OTHERS, prompt_of(0, 20)).blocks
        assert () == store.verify().problems


@pytest.mark.parametrize("disk_bytes", [0, 256 * MIB])
def test_what_is_ensured_survives_a_greedy_neighbour(tmp_path: Path, disk_bytes: int) -> None:
    ensured = 16 * MIB // BLOCK_BYTES
    path = tmp_path if disk_bytes else None
    quota = Quota(tenant="ours", host_min=16 * MIB)
    with open_with(quota, path=path, disk_bytes=disk_bytes, policy="lru") as store:
        for name in range(20):
            put(store, OURS, name, 20)
        for name in range(60):
            put(store, OTHERS, name, 40)
            assert blocks_of(store, OURS) >= ensured
        assert blocks_of(store, OURS) < 400
        assert blocks_of(store, OTHERS) >= HOST_BYTES // BLOCK_BYTES - 400


def test_what_is_ensured_on_disk_survives_a_greedy_neighbour(tmp_path: Path) -> None:
    quota = Quota(tenant="ours", disk_min=16 * MIB)
    with open_with(quota, path=tmp_path, disk_bytes=64 * MIB, host_bytes=4 * MIB, policy="lru") as store:
        slot_bytes = store._index.space(OURS).disk.slot_bytes  # type: ignore[union-attr]
        for name in range(20):
            put(store, OURS, name, 20)
        for name in range(40):
            assert 0 == put(store, OTHERS, name, 40)
            assert blocks_of(store, OURS, Tier.DISK) * slot_bytes >= 16 * MIB - slot_bytes
        assert blocks_of(store, OTHERS, Tier.DISK) > 400


def test_a_namespace_takes_what_it_is_owed_whatever_it_is_worth() -> None:
    owed = Quota(tenant="ours", host_min=8 * MIB, priority=0.001)
    with open_with(owed) as store:
        for name in range(30):
            put(store, OTHERS, name, 40)
        for name in range(4):
            assert 0 == put(store, OURS, name, 32)
        assert 128 == blocks_of(store, OURS)
        assert 0 == put(store, OURS, 9, 40)
        assert 128 == blocks_of(store, OURS)


@pytest.mark.parametrize("policy", POLICIES)
def test_room_is_taken_from_the_lower_priority(policy: str) -> None:
    quotas = (Quota(tenant="ours", priority=100), Quota(tenant="others", priority=0.01))
    with open_with(*quotas, policy=policy) as store:
        for name in range(8):
            assert 0 == put(store, OURS, name, EXTENT_BLOCKS)
            assert 0 == put(store, OTHERS, name, EXTENT_BLOCKS)
        for name in range(4):
            assert 0 == put(store, THIRD, name, EXTENT_BLOCKS)
        assert 8 * EXTENT_BLOCKS == blocks_of(store, OURS)
        assert 4 * EXTENT_BLOCKS == blocks_of(store, OTHERS)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("priority", [5e-324, 1.7e308])
def test_any_priority_that_a_quota_takes_leaves_room_to_be_made(policy: str, priority: float) -> None:
    with open_with(Quota(tenant="ours", priority=priority), host_bytes=16 * MIB, policy=policy) as store:
        for name in range(8):
            assert 0 == put(store, OURS, name, EXTENT_BLOCKS)
        assert 4 * EXTENT_BLOCKS == blocks_of(store, OURS)


def test_wide_blocks_give_way_to_narrow_ones_of_equal_use() -> None:
    wide = dataclasses.replace(THIRD, layout=dataclasses.replace(LAYOUT, head_dim=8 * 8192))
    with open_with() as store:
        for name in range(8):
            assert 0 == put(store, wide, name, EXTENT_BLOCKS // 8)
            assert 0 == put(store, OURS, name, EXTENT_BLOCKS)
        for name in range(8, 12):
            assert 0 == put(store, OURS, name, EXTENT_BLOCKS)
        assert 12 * EXTENT_BLOCKS == blocks_of(store, OURS)


def test_without_a_disk_what_is_worth_less_is_refused_and_counted() -> None:
    quotas = (Quota(tenant="ours", priority=100), Quota(tenant="others", priority=0.01))
    with open_with(*quotas) as store:
        for name in range(16):
            assert 0 == put(store, OURS, name, EXTENT_BLOCKS)
        assert 10 == put(store, OTHERS, 0, 10)
        assert {"not_worth": 10} == store.stats().rejected_blocks
        assert 16 * EXTENT_BLOCKS == blocks_of(store, OURS)


def test_with_a_disk_everything_is_taken(tmp_path: Path) -> None:
    quotas = (Quota(tenant="ours", priority=100), Quota(tenant="others", priority=0.01))
    with open_with(*quotas, path=tmp_path, disk_bytes=256 * MIB) as store:
        for name in range(16):
            assert 0 == put(store, OURS, name, EXTENT_BLOCKS)
        assert 0 == put(store, OTHERS, 0, 10)
        assert {} == store.stats().rejected_blocks


def test_the_first_quota_that_fits_holds() -> None:
    known = StoreSettings(
        quotas=(Quota(tenant="ours", model="x"), Quota(tenant="ours", host_max=1), Quota(priority=2.0))
    )
    assert (1, 2.0) == (known.quota(OURS).host_max, known.quota(OTHERS).priority)
    assert Quota() == StoreSettings().quota(OURS)


moves = st.lists(
    st.tuples(st.sampled_from([OURS, OTHERS, THIRD]), st.integers(0, 5), st.integers(1, 3 * EXTENT_BLOCKS)), max_size=25
)
sizes = st.integers(0, 24 * MIB)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(moves, st.lists(st.tuples(sizes, sizes), min_size=3, max_size=3), st.booleans())
def test_whatever_is_stored_no_limit_is_passed_and_nothing_ensured_is_taken(served, bounds, is_tight: bool) -> None:
    names = (OURS, OTHERS, THIRD)
    quotas = [
        Quota(tenant=space.tenant, host_min=min(pair) // 2, host_max=max(pair))
        for space, pair in zip(names, bounds, strict=True)
    ]
    with open_with(*quotas, host_bytes=(16 if is_tight else 32) * MIB) as store:
        for namespace, name, blocks in served:
            before = {other: blocks_of(store, other) for other in names}
            put(store, namespace, name, blocks)
            for other, quota in zip(names, quotas, strict=True):
                assert reserved_bytes(store, other) <= (quota.host_max or 0)
                if other is not namespace:
                    ensured = -(-quota.host_min // BLOCK_BYTES)
                    assert blocks_of(store, other) >= min(before[other], ensured)
        assert () == store.verify().problems


def test_a_store_ensures_no_more_than_it_has() -> None:
    with pytest.raises(
        kvstore.KvstoreError, match="host_min is 2097152, expected at most host_bytes, which is 1048576"
    ):
        open_with(Quota(host_min=2 * MIB), host_bytes=MIB)
    with pytest.raises(kvstore.KvstoreError, match="disk_min is 1, expected at most disk_bytes, which is 0"):
        open_with(Quota(disk_min=1))
