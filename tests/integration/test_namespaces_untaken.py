"""Namespaces with sparse parts that nobody has used since the start: one name, and all gone when they are deleted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import kvstore
from kvstore.layer_groups import Recurrent, SlidingWindow
from kvstore.testing.blocks import store_prompt, verified_blocks
from kvstore.types import KvLayout, Namespace

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.store import Store

MIB = 1 << 20
GROUPS = (
    SlidingWindow(layers=2, window=10, kv_heads=1, head_dim=64, dtype="int8"),
    Recurrent(layers=2, state_bytes=2048),
)
PROMPT = list(range(42))
BLOCKS = 10


def of_model(model: str, layers: int) -> Namespace:
    layout = KvLayout(layers=layers, kv_heads=1, head_dim=64, dtype="int8", block_tokens=4, groups=GROUPS)
    return Namespace(model=model, revision="r", layout=layout)


def opened(path: Path) -> Store:
    return kvstore.open(path, host_bytes=MIB, disk_bytes=64 * MIB)


@pytest.mark.parametrize("layers", [2, 0])
def test_a_namespace_deleted_before_anybody_used_it_leaves_no_part_on_disk(tmp_path: Path, layers: int) -> None:
    deleted, kept = of_model("deleted", layers), of_model("kept", layers)
    with opened(tmp_path) as store:
        for namespace in (deleted, kept):
            store_prompt(store, namespace, PROMPT)
        names = {stats.ns_id: stats.model for stats in store.namespaces()}
    with opened(tmp_path) as store:
        assert sorted(names) == [stats.ns_id for stats in store.namespaces()]
        store.delete_namespace(next(ns_id for ns_id, model in names.items() if model == "deleted"))
    with opened(tmp_path) as store:
        assert [ns_id for ns_id, model in names.items() if model == "kept"] == [
            stats.ns_id for stats in store.namespaces()
        ]
        disk = store._index.disk
        assert disk is not None
        assert len(GROUPS) + 1 == len(disk.recovered_namespaces())  # type: ignore[attr-defined]
        assert 0 == store.match(deleted, PROMPT).blocks
        assert BLOCKS == verified_blocks(store, kept, PROMPT)
