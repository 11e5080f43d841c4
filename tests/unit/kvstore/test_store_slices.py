"""The store holds the index lock for a slice of work at a time, and its callers see whole calls all the same."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import kvstore
from kvstore.events import Event, EventKind
from kvstore.radix.tree import EDGE_BLOCKS, SLICE_BLOCKS, RadixTree
from kvstore.testing.blocks import store_prompt, verified_blocks
from kvstore.testing.conformance import BASE, BLOCKS, PROMPT
from kvstore.tokens import as_token_array
from kvstore.types import KvLayout, Namespace

if TYPE_CHECKING:
    from types import TracebackType

    from kvstore.store import Store
    from kvstore.store.space import Space

SMALL = Namespace(
    model="small", revision="r", layout=KvLayout(layers=1, kv_heads=1, head_dim=16, dtype="int8", block_tokens=1)
)
MANY_BLOCKS = 20_000
STEPS_MAX = 3 * (SLICE_BLOCKS + EDGE_BLOCKS)


@pytest.fixture
def sliced(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr("kvstore.store.space.RadixTree", functools.partial(RadixTree, slice_blocks=1, edge_blocks=2))
    with kvstore.open(host_bytes=64 << 20) as store:
        store_prompt(store, BASE, PROMPT)
        yield store


def space_of(store: Store, namespace: Namespace = BASE) -> Space:
    return store._index.space(namespace)


def new_events(store: Store, after: int) -> list[Event]:
    return list(store.events(after=after).events)


def last_sequence(store: Store) -> int:
    return store.events().events[-1].sequence


def test_an_evicted_subtree_is_gone_when_the_call_returns_and_each_key_is_announced_once(sliced: Store) -> None:
    before = last_sequence(sliced)
    assert BLOCKS - 1 == sliced.evict(BASE, PROMPT, from_block=1)
    events = new_events(sliced, before)
    keys = [key for event in events for key in event.keys]
    assert {EventKind.REMOVED} == {event.kind for event in events}
    assert len(events) > 1
    assert BLOCKS - 1 == len(keys) == len(set(keys))
    assert (1, 1) == (sliced.stats().tiers["host"].blocks, verified_blocks(sliced, BASE, PROMPT))
    assert BASE.layout.block_bytes == sliced.stats().tiers["host"].used_bytes
    assert BLOCKS - 1 == sliced.stats().evicted_blocks["request"]


def test_a_clear_is_one_event_and_leaves_leased_bytes_readable(sliced: Store) -> None:
    before = last_sequence(sliced)
    with sliced.lease(sliced.match(BASE, PROMPT)) as lease:
        assert BLOCKS == sliced.clear(BASE)
        assert 0 == sliced.match(BASE, PROMPT).blocks
        rows = np.zeros((BLOCKS, BASE.layout.block_bytes), dtype=np.uint8)
        assert BLOCKS == lease.load_into(rows).blocks
    assert [EventKind.CLEARED] == [event.kind for event in new_events(sliced, before)]
    assert (0, 0) == (sliced.stats().tiers["host"].blocks, sliced.stats().tiers["host"].used_bytes)


def test_what_was_dropped_is_announced_before_the_same_is_stored_again(sliced: Store) -> None:
    space = space_of(sliced)
    before = last_sequence(sliced)
    with sliced._index.lock:
        freed = space.drop(space.tree.match(space.root_key(None), as_token_array(PROMPT))[:1])
        assert space.tree.condemned
    freed.settle()
    store_prompt(sliced, BASE, PROMPT)
    kinds = [event.kind for event in new_events(sliced, before)]
    assert sorted(kinds, key=[EventKind.REMOVED, EventKind.STORED].index) == kinds
    assert BLOCKS == verified_blocks(sliced, BASE, PROMPT)


def test_a_stage_whose_blocks_were_cleared_stores_nothing(sliced: Store) -> None:
    sliced.clear(BASE)
    stage = sliced.stage(BASE, PROMPT)
    stage.write_from(np.zeros((BLOCKS, BASE.layout.block_bytes), dtype=np.uint8))
    sliced.clear(BASE)
    assert 0 == stage.commit().blocks
    assert (0, 0) == (sliced.stats().tiers["host"].blocks, sliced.stats().tiers["host"].used_bytes)


def test_what_is_condemned_makes_room_before_anything_else_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.store.space.RadixTree", functools.partial(RadixTree, slice_blocks=1, edge_blocks=2))
    with kvstore.open(host_bytes=2 * BLOCKS * BASE.layout.block_bytes) as store:
        other = [token + 1000 for token in PROMPT]
        store_prompt(store, BASE, other)
        store_prompt(store, BASE, PROMPT)
        space = space_of(store)
        with store._index.lock:
            freed = space.drop(space.tree.match(space.root_key(None), as_token_array(PROMPT))[:1])
        freed.settle()
        store_prompt(store, BASE, [token + 2000 for token in PROMPT])
        assert BLOCKS == verified_blocks(store, BASE, other)


class MeasuredLock:
    """A lock that remembers the most steps which a tree took while it was held."""

    def __init__(self, tree: RadixTree) -> None:
        self.steps_max = 0
        self._tree = tree
        self._lock = threading.Lock()
        self._steps_before = 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._steps_before = self._tree.steps

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.steps_max = max(self.steps_max, self._tree.steps - self._steps_before)
        self._lock.release()


def store_zeros(store: Store, tokens: np.ndarray) -> MeasuredLock:
    """Store a prompt; the lock that measures what comes then."""
    with store.stage(SMALL, tokens) as stage:
        stage.write_from(np.zeros((tokens.size, SMALL.layout.block_bytes), dtype=np.uint8))
    return MeasuredLock(space_of(store, SMALL).tree)


@pytest.mark.parametrize(
    "removals",
    [
        lambda store, prompt, branch: store.clear(SMALL),
        lambda store, prompt, branch: store.evict(SMALL, branch, from_block=7) + store.evict(SMALL, prompt),
    ],
)
def test_the_index_lock_is_held_for_a_slice_at_a_time(
    removals: Callable[[Store, np.ndarray, np.ndarray], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = np.arange(MANY_BLOCKS, dtype=np.uint32)
    branch = np.concatenate([prompt[:7], prompt[: MANY_BLOCKS // 2]])
    with kvstore.open(host_bytes=64 << 20) as store:
        store_zeros(store, prompt)
        lock = store_zeros(store, branch)
        monkeypatch.setattr(store._index, "lock", lock)
        assert MANY_BLOCKS + MANY_BLOCKS // 2 == removals(store, prompt, branch)
        assert 0 == store.stats().tiers["host"].blocks
        assert 0 < lock.steps_max <= STEPS_MAX


def test_a_flush_holds_the_index_lock_for_a_slice_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = np.arange(SLICE_BLOCKS + EDGE_BLOCKS, dtype=np.uint32)
    with kvstore.open(tmp_path, host_bytes=64 << 20, disk_bytes=128 << 20) as store:
        lock = store_zeros(store, prompt)
        monkeypatch.setattr(store._index, "lock", lock)
        store.flush()
        assert prompt.size == store.stats().tiers["disk"].blocks
        assert 0 < lock.steps_max <= STEPS_MAX
