"""A full disk whose slots differ in size: what comes drives out what was there, whatever sizes are free."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvstore.layer_groups import SequenceState
from kvstore.store import CodecRule, Store, StoreSettings, open_store
from kvstore.testing.states import store_state
from kvstore.types import KvLayout, Namespace, Tier

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MIB = 1 << 20
PIECE_BYTES = 64 << 10
LAYOUT = KvLayout(layers=4, kv_heads=4, head_dim=64, dtype="float16", block_tokens=16)
BLOCKS = Namespace(model="b", revision="r", layout=LAYOUT)
STATES = Namespace(
    model="s",
    revision="r",
    layout=KvLayout(
        layers=1,
        kv_heads=1,
        head_dim=1,
        dtype="float16",
        block_tokens=1,
        state=SequenceState(form="test", piece_bytes=PIECE_BYTES),
    ),
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    settings = StoreSettings(codecs=(CodecRule(compression="blosc2"),), disk_admission="write_through")
    with open_store(tmp_path, host_bytes=2 * MIB, disk_bytes=8 * MIB, free_floor_bytes=0, settings=settings) as opened:
        yield opened


def test_the_latest_states_are_on_a_full_disk_though_only_slots_for_their_paths_are_free(store: Store) -> None:
    paths = [[number, 1, 2, 3] for number in range(50)]
    for path in paths:
        assert store_state(store, STATES, path, 5 * PIECE_BYTES - 100)
        store.flush()
    table = store._index.space(STATES).states
    assert table is not None
    assert ({}, ()) == (store.stats().rejected_blocks, store.verify().problems)
    assert 15 < sum(Tier.DISK in state.slots for state in table.all())
    assert all(Tier.DISK in state.slots for state in table.all() if state.path[3] > 40)


def test_blocks_that_compress_badly_find_room_on_a_disk_full_of_small_ones(store: Store) -> None:
    space = store._index.space(BLOCKS)
    for number in range(300):
        _store(store, number, 0)
        store.flush()
    for number in range(400, 560):
        _store(store, number, number % 2)
        store.flush()
    stats = store.stats()
    assert 150 < stats.tiers["disk"].blocks
    assert 0 == stats.rejected_blocks.get("disk_error", 0)
    assert stats.rejected_blocks.get("no_slot_of_size", 0) < 10
    assert () == store.verify().problems
    assert space.tree.tier_blocks(Tier.DISK) == space.disk.used_slots  # type: ignore[union-attr]


def test_many_namespaces_of_several_sizes_of_slots_stay_beside_each_other_on_a_small_disk(tmp_path: Path) -> None:
    settings = StoreSettings(codecs=(CodecRule(compression="blosc2"),), disk_admission="write_through")
    namespaces = [replace(BLOCKS, tenant=f"tenant-{number}") for number in range(24)]
    with open_store(tmp_path, host_bytes=8 * MIB, disk_bytes=32 * MIB, free_floor_bytes=0, settings=settings) as store:
        for namespace in namespaces:
            for number in range(6):
                _store(store, number, number % 3 / 2, namespace)
            store.flush()
        stats = store.stats()
        assert ({}, 0) == (stats.rejected_blocks, stats.evicted_blocks.get("disk", 0))
        assert 24 * 6 == stats.tiers["disk"].blocks
    with open_store(tmp_path, host_bytes=8 * MIB, disk_bytes=32 * MIB, free_floor_bytes=0, settings=settings) as store:
        assert {6} == {sum(_match(store, number, namespace) for number in range(6)) for namespace in namespaces}


def _match(store: Store, number: int, namespace: Namespace) -> int:
    return store.match(namespace, range(100 * number, 100 * number + 16)).blocks


def _store(store: Store, number: int, entropy: float, namespace: Namespace = BLOCKS) -> None:
    rng = np.random.default_rng(number)
    with store.stage(namespace, range(100 * number, 100 * number + 16)) as stage:
        stage.write_from(rng.integers(0, 1 + int(255 * entropy), (1, LAYOUT.block_bytes), dtype=np.uint8))
