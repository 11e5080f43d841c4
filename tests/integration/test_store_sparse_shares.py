"""Sparse parts of several namespaces: together they keep to their share of a tier where dense blocks need the rest."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

from kvstore.layer_groups import Recurrent
from kvstore.store import StoreSettings, open_store
from kvstore.testing.blocks import store_prompt, verified_blocks
from kvstore.types import KvLayout, Namespace, Tier

if TYPE_CHECKING:
    from pathlib import Path

    import kvstore

MIB = 1 << 20
LAYOUT = KvLayout(
    layers=1,
    kv_heads=1,
    head_dim=256,
    dtype="int8",
    block_tokens=4,
    groups=(Recurrent(layers=1, state_bytes=128 << 10),),
)
HYBRIDS = [Namespace(model=f"hybrid {number}", revision="r", layout=LAYOUT) for number in range(4)]
DENSE = Namespace(model="d", revision="r", layout=KvLayout(layers=1, kv_heads=4, head_dim=2048, dtype="float16"))
PROMPT = list(range(64))


def sparse_bytes(store: kvstore.KvStore) -> list[int]:
    return [group.host.reserved_bytes for space in store._index.spaces() for group in space.sparse.groups]


def fill(store: kvstore.KvStore, namespace: Namespace) -> None:
    for turn in range(60):
        store_prompt(store, namespace, [turn, *range(15)])


@pytest.fixture
def store(tmp_path: Path) -> kvstore.KvStore:
    settings = StoreSettings(eviction_policy="lru")
    with open_store(tmp_path, host_bytes=32 * MIB, disk_bytes=256 * MIB, settings=settings) as store:
        yield store
        assert () == store.verify().problems


def leave_dense_on_disk_alone(store: kvstore.KvStore, namespace: Namespace) -> None:
    """Have its dense blocks leave host memory while its sparse parts are in use, so that these do not follow."""
    space = store._index.space(namespace)
    with store._room.lock:
        while store._room._evict(space, Tier.HOST, 100, float("inf")):
            pass
    for turn in range(60):
        store.match(namespace, [turn, *range(15)])


def test_dense_blocks_find_room_where_sparse_parts_of_several_namespaces_had_filled_it(store: kvstore.KvStore) -> None:
    for namespace in HYBRIDS:
        fill(store, namespace)
        leave_dense_on_disk_alone(store, namespace)
    assert sum(sparse_bytes(store)) >= 24 * MIB
    for turn in range(20):
        assert 4 == store_prompt(store, DENSE, [turn, *PROMPT]).blocks
    assert 4 == verified_blocks(store, DENSE, [19, *PROMPT])
    assert sum(sparse_bytes(store)) >= 12 * MIB  # no more left than had to


def test_sparse_parts_of_several_namespaces_take_no_more_from_dense_blocks_than_their_share(
    store: kvstore.KvStore,
) -> None:
    for turn in range(100):
        store_prompt(store, DENSE, [turn, *PROMPT])
    for namespace in HYBRIDS[:2]:
        fill(store, namespace)
    assert sum(sparse_bytes(store)) <= 20 * MIB  # half of host memory, and the extent that is taken last
    assert all(sparse_bytes(store)[-1:])
    assert store._index.space(DENSE).host.reserved_bytes >= 4 * MIB


def test_a_namespace_that_comes_late_gets_room_for_its_sparse_parts(store: kvstore.KvStore) -> None:
    for namespace in HYBRIDS[:3]:
        fill(store, namespace)
        leave_dense_on_disk_alone(store, namespace)
    fill(store, HYBRIDS[3])
    assert 4 == verified_blocks(store, HYBRIDS[3], [59, *range(15)])
    assert 0 < sparse_bytes(store)[3]


def test_what_somebody_holds_is_not_given_back(store: kvstore.KvStore) -> None:
    leases = []
    for namespace in HYBRIDS[:2]:
        fill(store, namespace)
        leases += [store.lease(store.match(namespace, [turn, *range(15)])) for turn in range(60)]
    before = sparse_bytes(store)
    for turn in range(100):
        store_prompt(store, DENSE, [turn, *PROMPT])
    assert before == sparse_bytes(store)[:2]
    for namespace in HYBRIDS[:2]:
        assert 4 == verified_blocks(store, namespace, [0, *range(15)])
    for lease in leases:
        lease.release()


def test_the_blocks_of_a_layout_without_full_attention_are_bounded() -> None:
    pure = Namespace(model="p", revision="r", layout=dataclasses.replace(LAYOUT, layers=0))
    with open_store(None, host_bytes=16 * MIB) as store:
        for turn in range(50):
            store_prompt(store, pure, [turn, *range(400)])
        space = store._index.space(pure)
        marks_bytes = 16 * MIB // 128
        assert marks_bytes // 2 < space.tree.block_count * pure.layout.block_bytes <= marks_bytes
        assert 100 == verified_blocks(store, pure, [49, *range(400)])
        assert store.stats().evicted_blocks["host"] > 0
        assert () == store.verify().problems
