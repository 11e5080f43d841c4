"""Extents that other processes map and slabs with slots in quarantine: nothing leaves them for a namespace in need."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvstore.store import Store, StoreSettings, open_store
from kvstore.store.settings import Quota
from kvstore.testing.blocks import store_prompt, verified_blocks
from kvstore.testing.manual_clock import ManualClock
from kvstore.types import KvLayout, Namespace, Tier

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20
LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=8192, dtype="int8", block_tokens=4)  # 64 KiB a block
OURS = Namespace(model="m", revision="r", tenant="ours", layout=LAYOUT)
OTHERS = dataclasses.replace(OURS, tenant="others")
EXTENT_BLOCKS = 4 * MIB // LAYOUT.block_bytes
HOST_BLOCKS = 4 * EXTENT_BLOCKS
PROMPT_BLOCKS = 8


def prompt_of(name: int) -> list[int]:
    return list(range(name * 10_000, name * 10_000 + PROMPT_BLOCKS * LAYOUT.block_tokens))


def stored_blocks(store: Store, prompts: int) -> int:
    return sum(store.match(OURS, prompt_of(name), touch=False).blocks for name in range(prompts))


@pytest.mark.parametrize("held_count", [1, 3, 4])
def test_no_block_leaves_an_extent_that_somebody_holds_for_a_namespace_that_cannot_have_it(held_count: int) -> None:
    prompts = HOST_BLOCKS // PROMPT_BLOCKS
    with open_store(host_bytes=16 * MIB, settings=StoreSettings(eviction_policy="lru"), clock=ManualClock()) as store:
        for name in range(prompts):
            store_prompt(store, OURS, prompt_of(name))
        pool = store._index.space(OURS).host
        holds = [pool.hold(place.extent_id) for place in pool.extents()[:held_count]]
        assert HOST_BLOCKS == stored_blocks(store, prompts)
        gone = EXTENT_BLOCKS if held_count < 4 else 0
        assert (PROMPT_BLOCKS if gone else 0) == store_prompt(store, OTHERS, prompt_of(0)).blocks
        assert HOST_BLOCKS - gone == stored_blocks(store, prompts)
        for hold in holds:
            assert hold is not None
            hold.release()
        if not gone:
            assert PROMPT_BLOCKS == store_prompt(store, OTHERS, prompt_of(0)).blocks


@pytest.mark.parametrize("disk_min", [0, MIB])
def test_no_block_leaves_a_slab_with_a_slot_in_quarantine_for_a_namespace_that_cannot_have_it(
    tmp_path: Path, disk_min: int
) -> None:
    settings = StoreSettings(eviction_policy="lru", quotas=(Quota(tenant="ours", disk_min=disk_min),))
    prompts = 3 * HOST_BLOCKS // PROMPT_BLOCKS
    with open_store(
        tmp_path, host_bytes=16 * MIB, disk_bytes=32 * MIB, settings=settings, clock=ManualClock()
    ) as store:
        for name in range(prompts):
            store_prompt(store, OURS, prompt_of(name))
        store.flush()
        disk = store._index.space(OURS).disk
        assert disk is not None
        slots = [slab.first for slab in disk.ranges()]  # one in each slab goes bad
        space = store._index.space(OURS)
        with store._index.lock:
            ids = np.concatenate([space.tree.take_range(Tier.DISK, slot, 1, 0)[0] for slot in slots])
            freed = space.evict(ids, Tier.DISK)
        disk._quarantine(freed.disk)  # type: ignore[attr-defined]
        freed.settle_host()
        before = store.stats().tiers["disk"].blocks
        store_prompt(store, OTHERS, prompt_of(0))
        with store._room.lock:
            assert 0 == store._room.disk_slots(store._index.space(OTHERS), 1).size
        assert before == store.stats().tiers["disk"].blocks
        assert PROMPT_BLOCKS == verified_blocks(store, OTHERS, prompt_of(0))
