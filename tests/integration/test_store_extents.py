"""Host memory that goes from one namespace to another: what stays keeps its bytes, and no more leaves than must."""

from __future__ import annotations

import dataclasses
import random
import threading
from pathlib import Path

import numpy as np
import pytest

from kvstore.store import Store, StoreSettings, open_store
from kvstore.testing.blocks import expected_rows, store_prompt, verified_blocks
from kvstore.testing.manual_clock import ManualClock
from kvstore.testing.patience import ANSWER_SECONDS
from kvstore.tiers.extent_stock import ExtentStock
from kvstore.types import KvLayout, Namespace, Tier

MIB = 1 << 20
LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=8192, dtype="int8", block_tokens=4)  # 64 KiB a block
OURS = Namespace(model="m", revision="r", tenant="ours", layout=LAYOUT)
OTHERS = dataclasses.replace(OURS, tenant="others")
EXTENT_BLOCKS = 4 * MIB // LAYOUT.block_bytes
HOST_BLOCKS = 4 * EXTENT_BLOCKS
PROMPT_BLOCKS = 8
PROMPTS = HOST_BLOCKS // PROMPT_BLOCKS


def prompt_of(name: int, blocks: int = PROMPT_BLOCKS) -> list[int]:
    return list(range(name * 10_000, name * 10_000 + blocks * LAYOUT.block_tokens))


@pytest.fixture(params=[0, 128 * MIB], ids=["no disk", "disk"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    path = tmp_path if request.param else None
    return open_store(
        path,
        host_bytes=16 * MIB,
        disk_bytes=request.param,
        settings=StoreSettings(eviction_policy="lru"),
        clock=ManualClock(),
    )


def fill_and_mix(store: Store) -> list[int]:
    """Fill host memory; returns the prompts in the order of their last use, which is not that of their places."""
    for name in range(PROMPTS):
        store_prompt(store, OURS, prompt_of(name))
    names = list(range(PROMPTS))
    random.Random(1).shuffle(names)
    for name in names:
        store.match(OURS, prompt_of(name))
    return names


def on_host(store: Store, namespace: Namespace, prompt: list[int]) -> int:
    return store.match(namespace, prompt, touch=False).tiers.get(Tier.HOST, 0)


def test_as_much_leaves_as_an_extent_has_and_the_rest_moves_with_its_bytes(store: Store) -> None:
    with store:
        names = fill_and_mix(store)
        assert 8 == store_prompt(store, OTHERS, prompt_of(0)).blocks
        left = EXTENT_BLOCKS // PROMPT_BLOCKS
        kept = [on_host(store, OURS, prompt_of(name)) for name in names]
        assert [0] * left + [PROMPT_BLOCKS] * (PROMPTS - left) == kept
        assert [PROMPT_BLOCKS] * (PROMPTS - left) == [verified_blocks(store, OURS, prompt_of(n)) for n in names[left:]]
        assert PROMPT_BLOCKS == verified_blocks(store, OTHERS, prompt_of(0))
        assert () == store.verify().problems
        assert EXTENT_BLOCKS == store.stats().evicted_blocks["host"]


def test_what_is_held_stays_where_it_is(store: Store) -> None:
    with store:
        names = fill_and_mix(store)
        rows = np.zeros((PROMPT_BLOCKS, LAYOUT.block_bytes), dtype=np.uint8)
        with store.lease(store.match(OURS, prompt_of(names[0]), touch=False)) as lease:
            assert 8 == store_prompt(store, OTHERS, prompt_of(0)).blocks
            assert PROMPT_BLOCKS == lease.load_into(rows).blocks
        assert np.array_equal(expected_rows(OURS, prompt_of(names[0])), rows)
        assert PROMPT_BLOCKS == on_host(store, OURS, prompt_of(names[0]))
        assert () == store.verify().problems


def test_where_each_extent_has_a_held_block_nothing_leaves_and_the_store_is_refused() -> None:
    settings = StoreSettings(eviction_policy="lru")
    with open_store(host_bytes=16 * MIB, settings=settings, clock=ManualClock()) as store:
        for name in range(PROMPTS):
            store_prompt(store, OURS, prompt_of(name))
        leases = [store.lease(store.match(OURS, prompt_of(name))) for name in range(0, PROMPTS, 4)]
        result = store_prompt(store, OTHERS, prompt_of(0))
        assert (0, PROMPT_BLOCKS) == (result.blocks, result.refused_blocks)
        assert {"host_full": PROMPT_BLOCKS} == store.stats().rejected_blocks
        assert [PROMPT_BLOCKS] * PROMPTS == [on_host(store, OURS, prompt_of(name)) for name in range(PROMPTS)]
        for lease in leases:
            lease.release()


def test_a_block_that_is_leased_or_dropped_while_it_is_copied_stays_right(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store:
        names = fill_and_mix(store)
        hot, gone = names[-1], names[-2]
        held = []
        evicting = threading.Thread(target=store.evict, args=(OURS, prompt_of(gone)))  # which waits for what moves
        copy = type(store._index.space(OURS).host).allocate_outside

        def meddling(pool, extent, count):  # type: ignore[no-untyped-def]
            if not held:
                held.append(store.lease(store.match(OURS, prompt_of(hot), touch=False)))
                evicting.start()
            return copy(pool, extent, count)

        monkeypatch.setattr(type(store._index.space(OURS).host), "allocate_outside", meddling)
        for name in range(4):
            store_prompt(store, OTHERS, prompt_of(name))
        assert held
        evicting.join(ANSWER_SECONDS)
        rows = np.zeros((PROMPT_BLOCKS, LAYOUT.block_bytes), dtype=np.uint8)
        assert PROMPT_BLOCKS == held[0].load_into(rows).blocks
        assert np.array_equal(expected_rows(OURS, prompt_of(hot)), rows)
        held[0].release()
        assert [0, PROMPT_BLOCKS] == [verified_blocks(store, OURS, prompt_of(name)) for name in (gone, hot)]
        assert () == store.verify().problems
        used = store.stats().tiers["host"]
        assert used.used_bytes == used.blocks * LAYOUT.block_bytes
        store.clear(OURS)
        store.clear(OTHERS)
        assert 0 == store.stats().tiers["host"].used_bytes


def test_threads_of_two_namespaces_that_take_from_each_other_read_what_they_stored(store: Store) -> None:
    problems: list[BaseException] = []

    def work(namespace: Namespace, seed: int) -> None:
        source = random.Random(seed)
        try:
            for _ in range(25):
                prompt = prompt_of(source.randrange(8), source.randint(1, 40))
                if source.random() < 0.6:
                    store_prompt(store, namespace, prompt)
                else:
                    verified_blocks(store, namespace, prompt)
        except BaseException as problem:  # noqa: BLE001  # handed to the main thread
            problems.append(problem)

    with store:
        wide = dataclasses.replace(OTHERS, layout=dataclasses.replace(LAYOUT, head_dim=3 * 8192))
        threads = [threading.Thread(target=work, args=(ns, seed)) for ns in (OURS, OTHERS, wide) for seed in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [] == problems
        assert () == store.verify().problems
        for namespace in (OURS, OTHERS, wide):
            store.clear(namespace)
        assert 0 == store.stats().tiers["host"].used_bytes


def test_where_the_system_refuses_memory_no_more_leaves_than_a_few_tries_take(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(host_bytes=64 * MIB, settings=StoreSettings(eviction_policy="lru"), clock=ManualClock()) as store:
        for name in range(4 * PROMPTS):
            store_prompt(store, OURS, prompt_of(name))
        monkeypatch.setattr(ExtentStock, "claim", lambda *_: None)
        assert 0 == store_prompt(store, OTHERS, prompt_of(0)).blocks
        left = sum(on_host(store, OURS, prompt_of(name)) for name in range(4 * PROMPTS))
        assert 4 * HOST_BLOCKS - 4 * EXTENT_BLOCKS == left
