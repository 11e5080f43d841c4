"""What a store tells of other capacities."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

import kvstore
from kvstore.store import StoreSettings
from kvstore.types import KvLayout, Namespace

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.api import KvStore

LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=64, dtype="int8", block_tokens=128)
HOST_BLOCKS = 64
HOST_BYTES = HOST_BLOCKS * LAYOUT.block_bytes


def namespace(revision: str = "1") -> Namespace:
    return Namespace(model="what-if", revision=revision, layout=LAYOUT)


def serve(store: KvStore, ns: Namespace, first: int, blocks: int = 4) -> None:
    tokens = np.repeat(np.arange(first, first + blocks, dtype=np.uint32), LAYOUT.block_tokens)
    match = store.match(ns, tokens)
    if match.blocks < blocks:
        rows = np.zeros((blocks - match.blocks, LAYOUT.block_bytes), dtype=np.uint8)
        with store.stage(ns, tokens, from_block=match.blocks) as stage:
            stage.write_from(rows)


def test_nothing_is_told_while_there_is_room():
    with kvstore.open(host_bytes=HOST_BYTES) as store:
        serve(store, namespace(), 0)
        assert () == store.stats().what_if


def test_reference_policies_tell_nothing():
    with kvstore.open(host_bytes=HOST_BYTES, settings=StoreSettings(eviction_policy="lru")) as store:
        for first in range(0, 800, 4):
            serve(store, namespace(), first)
        assert () == store.stats().what_if


def test_twice_the_room_finds_what_goes_round_in_it():
    """120 blocks asked for in turn: more than there is room for, less than twice that."""
    with kvstore.open(host_bytes=HOST_BYTES) as store:
        for turn in range(40):
            for first in range(0, 120, 4):
                serve(store, namespace(), first)
            assert turn == 0 or store.stats().what_if
        rows = {row.scale: row for row in store.stats().what_if}
    assert [0.25, 0.5, 1.0, 2.0, 4.0] == list(rows)
    assert {"host"} == {row.tier for row in rows.values()}
    assert rows[2.0].hit_rate > 0.9
    assert rows[2.0].hit_rate == pytest.approx(rows[4.0].hit_rate, abs=0.02)
    assert rows[1.0].hit_rate < 0.7
    assert rows[1.0].capacity_bytes <= HOST_BYTES
    assert rows[2.0].capacity_bytes == 2 * rows[1.0].capacity_bytes


def test_each_full_tier_is_told_of_and_namespaces_add_up(tmp_path: Path):
    with kvstore.open(tmp_path, host_bytes=HOST_BYTES, disk_bytes=1 << 20) as store:
        for first in range(0, 1000, 4):
            serve(store, namespace(str(first % 8)), first)
        rows = store.stats().what_if
    assert {"host", "disk"} == {row.tier for row in rows}
    assert all(0 <= row.hit_rate <= 1 for row in rows)


def test_clearing_everything_leaves_a_curve_that_is_still_one():
    with kvstore.open(host_bytes=HOST_BYTES) as store:
        for first in range(0, 800, 4):
            serve(store, namespace(), first)
        store.clear(namespace())
        assert all(0 <= row.hit_rate <= 1 for row in store.stats().what_if)
