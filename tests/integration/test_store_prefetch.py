"""Prefetching in a real store: what comes up, what it may take room from, and how it ends."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvstore.store import Store, StoreSettings, open_store
from kvstore.testing.blocks import expected_rows, store_prompt, verified_blocks
from kvstore.testing.manual_clock import ManualClock
from kvstore.testing.patience import ANSWER_SECONDS
from kvstore.tiers.disk_pool import DiskPool
from kvstore.types import KvLayout, Namespace, Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MIB = 1 << 20
LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=8192, dtype="int8", block_tokens=4)  # 64 KiB a block
NAMESPACE = Namespace(model="m", revision="r", layout=LAYOUT)
HOST_BLOCKS = 8 * MIB // LAYOUT.block_bytes
PROMPT_BLOCKS = 8
PROMPTS = 2 * HOST_BLOCKS // PROMPT_BLOCKS  # twice as much as host memory holds


def prompt_of(name: int, blocks: int = PROMPT_BLOCKS) -> list[int]:
    return list(range(name * 10_000, name * 10_000 + blocks * LAYOUT.block_tokens))


@pytest.fixture
def open_full(tmp_path: Path) -> Iterator[Callable[..., Store]]:
    """Opens a store of which the first half of what was stored lies on disk alone."""
    opened: list[Store] = []

    def make(**settings: object) -> Store:
        store = open_store(
            tmp_path,
            host_bytes=8 * MIB,
            disk_bytes=128 * MIB,
            settings=StoreSettings(**{"eviction_policy": "lru", **settings}),  # type: ignore[arg-type]
            clock=ManualClock(),
        )
        opened.append(store)
        for name in range(PROMPTS):
            store_prompt(store, NAMESPACE, prompt_of(name))
        assert (PROMPT_BLOCKS, 0) == found(store, 0)
        return store

    yield make
    for store in opened:
        store.close()


def found(store: Store, name: int, *, touch: bool = False) -> tuple[int, int]:
    """Blocks of a prompt that are stored, and those of them at its head that lie in host memory."""
    match = store.match(NAMESPACE, prompt_of(name), touch=touch)
    return match.blocks, match.host_blocks


class Gate:
    """Holds reads from disk until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached = threading.Semaphore(0)
        self._open = threading.Event()
        read = DiskPool.read

        def gated(pool, *arguments, **named):  # type: ignore[no-untyped-def]
            self.reached.release()
            self._open.wait()
            return read(pool, *arguments, **named)

        monkeypatch.setattr(DiskPool, "read", gated)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.open()


def test_a_prefetched_prompt_is_loaded_from_host_memory_with_the_right_bytes(open_full: Callable[..., Store]) -> None:
    store = open_full()
    found(store, 0, touch=True)
    assert PROMPT_BLOCKS == store.prefetch(NAMESPACE, prompt_of(0), wait_seconds=None).host_blocks
    assert PROMPT_BLOCKS == verified_blocks(store, NAMESPACE, prompt_of(0))
    loaded = store.stats().loaded_tokens
    assert {"host": PROMPT_BLOCKS * LAYOUT.block_tokens} == loaded
    assert () == store.verify().problems


def test_a_prefetch_takes_no_room_from_what_is_worth_more(open_full: Callable[..., Store]) -> None:
    store = open_full()
    hot = range(PROMPTS // 2, PROMPTS)
    before = [found(store, name) for name in hot]
    # Nobody asked for it since all others were stored, so they are worth more.
    prefetch = store.prefetch(NAMESPACE, prompt_of(0), wait_seconds=None)
    assert (0, True) == (prefetch.host_blocks, prefetch.done)
    assert {"no_room": 1} == store.stats().prefetches
    assert before == [found(store, name) for name in hot]


def test_prefetches_fill_no_more_than_their_reserve_and_bring_the_head(
    open_full: Callable[..., Store], gate: Gate
) -> None:
    store = open_full(prefetch_ratio=12 / HOST_BLOCKS)
    names = (0, 1, 2)
    for name in names:
        found(store, name, touch=True)
    prefetches = [store.prefetch(NAMESPACE, prompt_of(name)) for name in names]
    assert [False, False, True] == [prefetch.done for prefetch in prefetches]
    assert {"reserve_full": 1} == store.stats().prefetches
    gate.open()
    assert [PROMPT_BLOCKS, 4, 0] == [prefetch.wait() for prefetch in prefetches]
    assert [PROMPT_BLOCKS, 4, 0] == [found(store, name)[1] for name in names]
    assert PROMPT_BLOCKS == store.prefetch(NAMESPACE, prompt_of(1), wait_seconds=None).host_blocks


def test_a_full_queue_refuses_at_once_and_counts(open_full: Callable[..., Store], gate: Gate) -> None:
    store = open_full(prefetches_max=4, prefetch_ratio=1.0)
    for name in range(40):
        found(store, name % 8, touch=True)
    prefetches = [store.prefetch(NAMESPACE, prompt_of(name)) for name in range(7)]
    assert [False] * 4 + [True] * 3 == [prefetch.done for prefetch in prefetches]
    stats = store.stats()
    assert ({"queue_full": 3}, 4) == (stats.prefetches, stats.moves)
    gate.open()
    assert [PROMPT_BLOCKS] * 4 + [0] * 3 == [prefetch.wait() for prefetch in prefetches]


def test_a_wait_ends_with_its_time_and_the_rest_comes_later(open_full: Callable[..., Store], gate: Gate) -> None:
    store = open_full()
    found(store, 0, touch=True)
    prefetch = store.prefetch(NAMESPACE, prompt_of(0), wait_seconds=0.01)
    assert (0, False) == (prefetch.host_blocks, prefetch.done)
    gate.open()
    assert PROMPT_BLOCKS == prefetch.wait()


def test_who_waits_for_the_same_shares_one_reading(open_full: Callable[..., Store], gate: Gate) -> None:
    store = open_full()
    found(store, 0, touch=True)
    first, second = (store.prefetch(NAMESPACE, prompt_of(0)) for _ in range(2))
    first.cancel()
    gate.open()
    assert PROMPT_BLOCKS == second.wait()
    stats = store.stats()
    assert ({"joined": 1, "done": 1}, PROMPT_BLOCKS) == (stats.prefetches, stats.prefetched_blocks)


def test_a_cancelled_prefetch_ends_without_having_run_or_after_its_batch(
    open_full: Callable[..., Store], gate: Gate
) -> None:
    store = open_full(prefetch_ratio=1.0)
    for name in range(4):
        found(store, name, touch=True)
    running = [store.prefetch(NAMESPACE, prompt_of(name)) for name in range(2)]
    waiting = [store.prefetch(NAMESPACE, prompt_of(name)) for name in range(2, 4)]
    for _ in running:
        assert gate.reached.acquire(timeout=ANSWER_SECONDS)
    for prefetch in waiting:
        prefetch.cancel()
        assert prefetch.done
    running[0].cancel()
    running[0].cancel()
    gate.open()
    for prefetch in running:
        prefetch.wait()
    assert 3 == store.stats().prefetches["cancelled"]
    assert [0, 0] == [found(store, name)[1] for name in range(2, 4)]
    store.clear(NAMESPACE)
    assert 0 == store.stats().tiers["host"].used_bytes


def test_a_wrong_block_ends_the_prefetch_in_front_of_it(
    open_full: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_full()
    read = DiskPool.read

    def lying(pool, slots, identities, rows, **named):  # type: ignore[no-untyped-def]
        good = read(pool, slots, identities, rows, **named)
        good[5:] = False
        return good

    monkeypatch.setattr(DiskPool, "read", lying)
    found(store, 0, touch=True)
    assert 5 == store.prefetch(NAMESPACE, prompt_of(0), wait_seconds=None).host_blocks
    monkeypatch.undo()
    assert (5, 5) == found(store, 0)
    assert 1 == store.stats().corrupt_blocks
    assert 5 == verified_blocks(store, NAMESPACE, prompt_of(0))
    assert () == store.verify().problems


def test_what_is_cleared_while_it_comes_up_leaves_nothing(open_full: Callable[..., Store], gate: Gate) -> None:
    store = open_full()
    found(store, 0, touch=True)
    prefetch = store.prefetch(NAMESPACE, prompt_of(0))
    assert gate.reached.acquire(timeout=ANSWER_SECONDS)
    store.clear(NAMESPACE)
    gate.open()
    prefetch.wait()
    used = store.stats().tiers
    assert (0, 0) == (used["host"].used_bytes, used["host"].blocks)
    assert (0, 0) == found(store, 0)


def test_a_store_that_closes_waits_for_what_runs_and_drops_what_waits(
    open_full: Callable[..., Store], gate: Gate
) -> None:
    store = open_full(prefetch_ratio=1.0)
    for name in range(4):
        found(store, name, touch=True)
    prefetches = [store.prefetch(NAMESPACE, prompt_of(name)) for name in range(4)]
    for _ in range(2):
        assert gate.reached.acquire(timeout=ANSWER_SECONDS)
    closing = threading.Thread(target=store.close)
    closing.start()
    for prefetch in prefetches[2:]:
        prefetch.wait()
    gate.open()
    closing.join(ANSWER_SECONDS)
    assert not closing.is_alive()
    assert all(prefetch.done for prefetch in prefetches)


def test_a_failed_move_is_counted_and_waits_end(
    open_full: Callable[..., Store], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_full()
    found(store, 0, touch=True)

    def failing(*_arguments, **_named):  # type: ignore[no-untyped-def]
        raise OSError("planted")

    monkeypatch.setattr(DiskPool, "read", failing)
    assert 0 == store.prefetch(NAMESPACE, prompt_of(0), wait_seconds=None).host_blocks
    monkeypatch.undo()
    assert 1 == store.stats().prefetches["failed"]
    assert PROMPT_BLOCKS == verified_blocks(store, NAMESPACE, prompt_of(0))
    store.clear(NAMESPACE)
    assert 0 == store.stats().tiers["host"].used_bytes
    assert "planted" in caplog.text


def test_a_lease_of_host_memory_ends_before_the_first_block_that_lies_on_disk_alone(
    open_full: Callable[..., Store],
) -> None:
    store = open_full()
    # One whose tail has left host memory, and whose head has not.
    name = next(name for name in range(PROMPTS) if 0 < found(store, name)[1] < PROMPT_BLOCKS or name == PROMPTS - 1)
    match = store.match(NAMESPACE, prompt_of(name), touch=False)
    with store.lease(match, tiers={Tier.HOST}) as lease:
        assert match.host_blocks == lease.blocks
        rows = np.zeros((lease.blocks, LAYOUT.block_bytes), dtype=np.uint8)
        assert lease.blocks == lease.load_into(rows).blocks
    assert np.array_equal(expected_rows(NAMESPACE, prompt_of(name))[: len(rows)], rows)
    assert "disk" not in store.stats().loaded_tokens
    with store.lease(match, tiers={Tier.HOST, Tier.DISK}) as lease:
        assert match.blocks == lease.blocks
    with store.lease(match, tiers={Tier.PEER}) as lease:
        assert 0 == lease.blocks


def test_the_head_of_a_prefix_lies_higher_than_its_tail(open_full: Callable[..., Store]) -> None:
    store = open_full()
    store_prompt(store, NAMESPACE, prompt_of(900, 20))
    for name in range(100, 104):
        store_prompt(store, NAMESPACE, prompt_of(name))
        for other in (*range(PROMPTS), 900):
            match = store.match(NAMESPACE, prompt_of(other, 20 if other == 900 else PROMPT_BLOCKS), touch=False)
            assert [run.tier for run in match.runs] == sorted(run.tier for run in match.runs)
