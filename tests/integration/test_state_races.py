"""Sequence states used by many threads at once: what is loaded is right, and nothing is left when all have ended."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from kvstore.store import Store, StoreSettings, open_store
from kvstore.testing.states import PIECE_BYTES, STATE_LAYOUT, blob_of
from kvstore.types import Namespace, Tier

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20
STATES = Namespace(model="m", revision="r", layout=STATE_LAYOUT)
THREADS = 4
STEPS = 150
TREES = 6


def size_of(path: list[int]) -> int:
    return PIECE_BYTES * (1 + sum(path) % 12) - sum(path) % 50


def random_path(source: random.Random) -> list[int]:
    return [source.randrange(TREES), *([1] * source.randrange(8))]


def load(store: Store, path: list[int]) -> int:
    """Load what serves a path and compare it with all that it may be; how many bytes that were."""
    with store.lease_state(store.match(STATES, path)) as lease:
        blob = np.zeros(lease.state_bytes, dtype=np.uint8)
        done = lease.load_into(blob)
        if not lease.tokens or done < lease.state_bytes:
            return 0
        whole = [path[0], *([1] * (lease.state_tokens - 1))]
        assert size_of(whole) == done
        assert (blob_of(STATES, whole, done) == blob).all()
        return done


def work(store: Store, seed: int) -> int:
    source = random.Random(seed)
    loaded = 0
    for _ in range(STEPS):
        path = random_path(source)
        match source.randrange(12):
            case 0 | 1 | 2 | 3:
                with store.stage_state(STATES, path, state_bytes=size_of(path)) as stage:
                    stage.write_from(blob_of(STATES, path, size_of(path)))
            case 4:
                stage = store.stage_state(STATES, path, state_bytes=size_of(path))
                stage.write_from(blob_of(STATES, path, size_of(path)))
                stage.abort()
            case 5:
                store.evict(STATES, path[:1])
            case 6:
                pin = store.pin(STATES, path)
                loaded += load(store, path)
                store.unpin(pin.pin_id)
            case 7:
                store.prefetch(STATES, path).cancel()
            case 8 if not source.randrange(8):
                store.clear(STATES)
            case 9 if not source.randrange(4):
                store.flush()
            case _:
                loaded += load(store, path)
    return loaded


def test_threads_load_what_was_stored_and_leave_nothing(tmp_path: Path) -> None:
    # The disk has room for more than host memory, but not for all; each piece there takes two pages.
    settings = StoreSettings(pinned_ratio_max=1.0)
    with open_store(tmp_path, host_bytes=128 << 10, disk_bytes=4 * MIB, settings=settings) as store:
        with ThreadPoolExecutor(THREADS) as pool:
            loaded = list(pool.map(work, [store] * THREADS, range(THREADS)))
        assert all(loaded)
        while store.stats().moves:
            pass
        assert () == store.verify().problems
        stats = store.stats()
        assert (0, 0, 0, 0) == (stats.leases, stats.stages, stats.pins, stats.corrupt_blocks)
        space = store._index.space(STATES)
        states = space.states.all()
        assert not any(state.holds for state in states)
        for tier in (Tier.HOST, Tier.DISK):
            slots = [slot for state in states if tier in state.slots for slot in state.slots[tier].tolist()]
            assert len(set(slots)) == len(slots) == space.pool(tier).used_slots
        store.clear(STATES)
        assert (0, 0) == (space.host.used_slots, space.disk.used_slots)
