"""What a real store takes into host memory, and writes to disk, under each rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvstore.errors import ConfigError
from kvstore.store import Store, StoreSettings, open_store
from kvstore.testing.blocks import store_prompt, verified_blocks
from kvstore.testing.manual_clock import ManualClock
from kvstore.types import KvLayout, Namespace, Tier

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20
LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=8192, dtype="int8", block_tokens=4)  # 64 KiB a block
NAMESPACE = Namespace(model="m", revision="r", layout=LAYOUT)
OTHER = Namespace(model="other", revision="r", layout=LAYOUT)
HOST_BLOCKS = 8 * MIB // LAYOUT.block_bytes
PROMPT_BLOCKS = 8
FULL = HOST_BLOCKS // PROMPT_BLOCKS  # prompts


def prompt_of(name: int, blocks: int = PROMPT_BLOCKS) -> list[int]:
    return list(range(name * 10_000, name * 10_000 + blocks * LAYOUT.block_tokens))


def new_store(path: Path | None, clock: ManualClock | None = None, disk_mib: int = 128, **settings: object) -> Store:
    return open_store(
        path,
        host_bytes=8 * MIB,
        disk_bytes=disk_mib * MIB if path is not None else 0,
        settings=StoreSettings(**settings),  # type: ignore[arg-type]
        clock=clock or ManualClock(),
    )


def held(store: Store, tier: Tier, names: range) -> list[int]:
    return [store.match(NAMESPACE, prompt_of(name), touch=False).tiers.get(tier, 0) for name in names]


def store_all(store: Store, clock: ManualClock, names: range) -> None:
    for name in names:
        clock.advance(1)
        store.match(NAMESPACE, prompt_of(name))
        store_prompt(store, NAMESPACE, prompt_of(name))


# -- disk ---------------------------------------------------------------------------------------------------------


def test_write_back_writes_what_leaves_and_flush_the_rest(tmp_path: Path) -> None:
    clock = ManualClock()
    with new_store(tmp_path, clock, disk_admission="demotion") as store:
        store_all(store, clock, range(2 * FULL))
        assert FULL * PROMPT_BLOCKS == store.stats().tiers["disk"].blocks
        store.flush()
        assert 2 * FULL * PROMPT_BLOCKS == store.stats().tiers["disk"].blocks
        assert 2 * FULL * PROMPT_BLOCKS * LAYOUT.block_bytes == store.stats().written_bytes
    with new_store(tmp_path) as store:
        assert [PROMPT_BLOCKS] * 2 * FULL == [verified_blocks(store, NAMESPACE, prompt_of(n)) for n in range(2 * FULL)]


def test_reuse_writes_what_two_requests_used_with_all_above_it(tmp_path: Path) -> None:
    clock = ManualClock()
    with new_store(tmp_path, clock, disk_admission="reuse") as store:
        store_all(store, clock, range(FULL))
        clock.advance(1)
        store.match(NAMESPACE, prompt_of(3))
        store.match(NAMESPACE, prompt_of(4, 5))  # the head of it alone
        store_all(store, clock, range(100, 100 + 2 * FULL))
        store.flush()
        assert 0 < store.stats().rejected_blocks["not_admitted"]
        assert () == store.verify().problems
    with new_store(tmp_path) as store:
        reused = {3: PROMPT_BLOCKS, 4: 5}
        assert [reused.get(name, 0) for name in range(FULL)] == held(store, Tier.DISK, range(FULL))


def test_worth_writes_all_while_there_is_room_and_less_when_the_disk_is_full(tmp_path: Path) -> None:
    clock = ManualClock()
    with new_store(tmp_path, clock, disk_mib=16, disk_admission="worth") as store:
        store_all(store, clock, range(2 * FULL))
        assert "not_admitted" not in store.stats().rejected_blocks
        for name in range(100, 100 + 12 * FULL):
            store_all(store, clock, range(name, name + 1))
            store.match(NAMESPACE, prompt_of(2 * FULL - 1))  # so the policy learns that some is used
        stats = store.stats()
        lost = stats.rejected_blocks.get("not_admitted", 0)
        written = stats.written_bytes // LAYOUT.block_bytes
        assert 0 < lost
        assert written < 14 * FULL * PROMPT_BLOCKS
        assert PROMPT_BLOCKS == verified_blocks(store, NAMESPACE, prompt_of(2 * FULL - 1))
        assert () == store.verify().problems


def test_write_through_writes_what_is_stored_without_pressure(tmp_path: Path) -> None:
    clock = ManualClock()
    with new_store(tmp_path, clock, disk_admission="write_through") as store:
        store_all(store, clock, range(4))
        store.prefetch(NAMESPACE, prompt_of(0), wait_seconds=None)
        while store.stats().moves:
            pass
        assert [PROMPT_BLOCKS] * 4 == held(store, Tier.HOST, range(4))
        assert 4 * PROMPT_BLOCKS == store.stats().tiers["disk"].blocks
        store_all(store, clock, range(4))
        while store.stats().moves:
            pass
        assert 4 * PROMPT_BLOCKS * LAYOUT.block_bytes == store.stats().written_bytes


def test_a_full_queue_leaves_write_through_to_the_demotion(tmp_path: Path) -> None:
    clock = ManualClock()
    with new_store(tmp_path, clock, disk_admission="write_through", prefetches_max=1) as store:
        with store._room.lock:  # writes wait for it
            store_all(store, clock, range(8))
            assert 1 == store.stats().moves
            refused = store.stats().rejected_blocks["write_queue"]
            assert 7 * PROMPT_BLOCKS == refused
        store.flush()
        assert 8 * PROMPT_BLOCKS == store.stats().tiers["disk"].blocks


@pytest.mark.parametrize("rule", ["demotion", "reuse", "worth", "write_through"])
def test_no_rule_leaves_a_hole_nor_loses_a_slot(tmp_path: Path, rule: str) -> None:
    clock = ManualClock()
    with new_store(tmp_path, clock, disk_mib=12, disk_admission=rule) as store:
        for step in range(6 * FULL):
            clock.advance(1)
            tokens = [*prompt_of(step % 7, 1 + step % 5), *prompt_of(1000 + step * step % 97, 1 + step % 11)]
            store.match(NAMESPACE, tokens)
            store_prompt(store, NAMESPACE, tokens)
            if step % 9 == 0:
                store.prefetch(NAMESPACE, prompt_of(step % 7, 4))
        store.flush()
        for step in range(0, 6 * FULL, 5):
            verified_blocks(store, NAMESPACE, [*prompt_of(step % 7, 1 + step % 5), *prompt_of(1000 + step * step % 97)])
        assert () == store.verify().problems
        store.clear(NAMESPACE)
        assert (0, 0) == (store.stats().tiers["host"].used_bytes, store.stats().tiers["disk"].blocks)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            {"disk_admission": "never"},
            "disk_admission is 'never', expected one of demotion, reuse, worth, write_through",
        ),
        (
            {"disk_admission": "reuse", "eviction_policy": "lru"},
            "needs an eviction_policy that counts uses .survival, survival_flops, lfu",
        ),
        ({"prefetch_ratio": 1.5}, "prefetch_ratio is 1.5, expected 0..1"),
        ({"store_bytes_per_second": 0}, "store_bytes_per_second is 0, expected at least 1"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        StoreSettings(**settings)  # type: ignore[arg-type]


# -- host memory --------------------------------------------------------------------------------------------------

RATE = LAYOUT.block_bytes  # a block a second
BURST = 256 * MIB // LAYOUT.block_bytes


def store_zeros(store: Store, tokens: list[int], namespace: Namespace = NAMESPACE) -> int:
    """Store bytes that mean nothing; returns how many blocks were taken."""
    with store.stage(namespace, tokens) as stage:
        stage.write_from(np.zeros((len(tokens) // 4, LAYOUT.block_bytes), dtype=np.uint8))
        return stage.blocks


def spend_burst(store: Store) -> None:
    """Store what nobody uses again, until the budget is down to what is kept for others."""
    for name in range(10_000, 10_000 + BURST):
        if store_zeros(store, prompt_of(name, 64)) < 64:
            return
    raise AssertionError("the budget never ended")


def budgeted(clock: ManualClock) -> Store:
    return new_store(None, clock, store_bytes_per_second=RATE, eviction_policy="lru")


def test_what_is_never_used_again_is_stored_no_faster_than_its_budget() -> None:
    clock = ManualClock()
    with budgeted(clock) as store:
        spend_burst(store)
        stored = store.stats().stored_blocks
        assert stored == 3 * BURST // 4
        clock.advance(10)
        for name in range(20):
            store_zeros(store, prompt_of(name))
        assert stored + 8 == store.stats().stored_blocks
        assert [8, 0, 0] == [store.match(NAMESPACE, prompt_of(name), touch=False).blocks for name in range(3)]
        assert 0 < store.stats().rejected_blocks["budget"]
        assert {"budget"} == set(store.stats().rejected_blocks)


def test_what_continues_a_stored_prefix_may_spend_what_others_may_not() -> None:
    clock = ManualClock()
    with budgeted(clock) as store:
        spend_burst(store)
        assert 0 == store_zeros(store, prompt_of(2))
        longer = next(
            p
            for p in ([*prompt_of(name), *prompt_of(3)] for name in range(10_000, 20_000))
            if store.match(NAMESPACE, p).blocks >= PROMPT_BLOCKS
        )
        assert PROMPT_BLOCKS == store_zeros(store, longer)


def test_what_is_loaded_lets_more_be_stored() -> None:
    clock = ManualClock()
    with budgeted(clock) as store:
        spend_burst(store)
        assert 0 == store_zeros(store, prompt_of(1))
        kept = next(name for name in range(10_000, 20_000) if store.match(NAMESPACE, prompt_of(name, 64)).blocks == 64)
        with store.lease(store.match(NAMESPACE, prompt_of(kept, 64))) as lease:
            lease.load_into(np.zeros((64, LAYOUT.block_bytes), dtype=np.uint8))
        assert PROMPT_BLOCKS == store_zeros(store, prompt_of(1))


def test_each_namespace_has_a_budget_of_its_own() -> None:
    clock = ManualClock()
    with budgeted(clock) as store:
        spend_burst(store)
        assert PROMPT_BLOCKS == store_zeros(store, prompt_of(1), OTHER)


def test_what_finds_no_room_is_not_spent() -> None:
    clock = ManualClock()
    with budgeted(clock) as store:
        store_zeros(store, prompt_of(1, HOST_BLOCKS))
        with store.lease(store.match(NAMESPACE, prompt_of(1, HOST_BLOCKS))):
            for name in range(2, 200):
                assert 0 == store_zeros(store, prompt_of(name, 64))
        assert {"host_full"} == set(store.stats().rejected_blocks)


def test_an_engine_without_reuse_copies_little_for_the_store() -> None:
    """An engine that copies a prompt's KV at 5 GB/s and stores what is taken of it: 0.25 % more bytes are copied."""
    clock = ManualClock()
    bandwidth = 5 << 30
    with new_store(None, clock, store_bytes_per_second=bandwidth // 400, eviction_policy="lru") as store:
        spend_burst(store)
        before = store.stats().stored_blocks
        for name in range(5000):
            clock.advance(64 * LAYOUT.block_bytes / bandwidth)
            with store.stage(NAMESPACE, prompt_of(20_000 + name, 64)) as stage:
                if stage.blocks:
                    stage.write_from(np.zeros((stage.blocks, LAYOUT.block_bytes), dtype=np.uint8))
        copied_ratio = (store.stats().stored_blocks - before) / (5000 * 64)
        assert 0.002 < copied_ratio <= 0.0025
