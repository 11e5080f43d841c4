"""Host memory under a store: full and asked by many threads, poisoned when freed, and as the store says it is."""

from __future__ import annotations

import threading
import time

import numpy as np

from kvstore.store import StoreSettings, open_store
from kvstore.testing.blocks import store_prompt
from kvstore.testing.manual_clock import ManualClock
from kvstore.tiers.host import POISON
from kvstore.types import KvLayout, Namespace

LAYOUT = KvLayout(layers=2, kv_heads=2, head_dim=32, dtype="float16", block_tokens=4)
NAMESPACE = Namespace(model="model", revision="revision", layout=LAYOUT)
OTHER = Namespace(model="other", revision="revision", layout=LAYOUT)
BLOCKS = 40
PROMPT = list(range(BLOCKS * LAYOUT.block_tokens))


def test_a_full_store_refuses_many_threads_within_its_time_without_spinning() -> None:
    """The store's clock stands still: whoever waited for it to pass would never come back."""
    settings = StoreSettings(room_seconds_max=0.2)
    with open_store(host_bytes=BLOCKS * LAYOUT.block_bytes, settings=settings, clock=ManualClock()) as store:
        store_prompt(store, NAMESPACE, PROMPT)
        refused: list[int] = []

        def ask(thread: int) -> None:
            for turn in range(5):
                prompt = [10_000 + 1000 * thread + 100 * turn + token for token in range(100)]
                with store.stage((NAMESPACE, OTHER)[turn % 2], prompt) as stage:
                    refused.append(stage.blocks)

        threads = [threading.Thread(target=ask, args=(thread,)) for thread in range(8)]
        cpu_seconds = time.process_time()
        with store.lease(store.match(NAMESPACE, PROMPT)) as lease:
            assert BLOCKS == lease.blocks
            for one in threads:
                one.start()
            for one in threads:
                one.join()
        assert [0] * 40 == refused
        assert 20 > time.process_time() - cpu_seconds  # it takes some tenths of a second
        assert 40 * 25 == sum(store.stats().rejected_blocks.values())


def test_a_reader_that_kept_memory_after_its_lease_sees_the_poison() -> None:
    with open_store(host_bytes=1 << 20, settings=StoreSettings(poison_freed=True)) as store:
        store_prompt(store, NAMESPACE, PROMPT)
        lease = store.lease(store.match(NAMESPACE, PROMPT))
        with lease.lend(from_block=0, blocks=BLOCKS, part=None) as pieces:
            kept = list(pieces)
            assert any((piece != POISON).any() for piece in kept)
        lease.release()
        assert BLOCKS == store.evict(NAMESPACE, PROMPT)
        assert all((piece == POISON).all() for piece in kept)


def test_new_blocks_are_right_in_memory_that_was_poisoned() -> None:
    with open_store(host_bytes=BLOCKS * LAYOUT.block_bytes, settings=StoreSettings(poison_freed=True)) as store:
        for start in range(0, 1000, 100):
            prompt = [start + token for token in PROMPT]
            rows = np.full((BLOCKS, LAYOUT.block_bytes), start % 251, dtype=np.uint8)
            with store.stage(NAMESPACE, prompt) as stage:
                stage.write_from(rows)
            found = np.zeros_like(rows)
            with store.lease(store.match(NAMESPACE, prompt)) as lease:
                assert BLOCKS == lease.load_into(found).blocks
            np.testing.assert_array_equal(rows, found)


def test_a_store_says_what_memory_it_has() -> None:
    settings = StoreSettings(huge_pages="never", reserve_from_bytes=1)
    with open_store(host_bytes=8 << 20, settings=settings) as store:
        assert store._host.wait_ready(60)
        state = store.host_memory()
        assert (8 << 20, 8 << 20, 4, 0) == (
            state.capacity_bytes,
            state.touched_bytes,
            state.extents,
            state.refused_extents,
        )
