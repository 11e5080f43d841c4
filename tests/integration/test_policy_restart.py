"""What the eviction policy of a store knew is known after a restart, and nothing that is wrong with it does harm."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING

import numpy as np
import pytest

import kvstore
from kvstore.radix.tree import POLICIES
from kvstore.store import Store, open_store
from kvstore.store.settings import StoreSettings
from kvstore.testing.blocks import store_prompt, verified_blocks
from kvstore.tokens import as_token_array
from kvstore.types import KvLayout, Namespace, Tier

if TYPE_CHECKING:
    from pathlib import Path

LAYOUT = KvLayout(layers=2, kv_heads=2, head_dim=32, dtype="float16", block_tokens=4)
NAMESPACE = Namespace(model="model", revision="revision", layout=LAYOUT)
PROMPTS = [[*range(8), *range(start, start + 32)] for start in range(100, 1000, 100)]
OFTEN = PROMPTS[2]
ALL = 1 << 20


class Clock:
    """Two clocks that move when a test says so."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def monotonic(self) -> float:
        return self.seconds

    def unix(self) -> float:
        return 1.7e9 + self.seconds


def opened(path: Path, clock: Clock, policy: str = "survival") -> Store:
    settings = StoreSettings(eviction_policy=policy)
    return open_store(path, host_bytes=4 << 20, disk_bytes=32 << 20, settings=settings, clock=clock)


def fill(store: Store, clock: Clock) -> None:
    """Nine prompts, one of which is asked for again and again."""
    for prompt in PROMPTS:
        clock.seconds += 30
        store_prompt(store, NAMESPACE, prompt)
        store.match(NAMESPACE, OFTEN)


def values(store: Store) -> list[float]:
    """What the last block of each prompt is worth now."""
    space = store._index.space(NAMESPACE)
    root_key = space.root_key(None)
    with store._index.lock:
        now = store._index.next_tick()
        lasts = [int(space.tree.match(root_key, as_token_array(prompt))[-1]) for prompt in PROMPTS]
        return [space.tree.value_of(block, now) for block in lasts]


def ranks(found: list[float]) -> list[int]:
    return np.argsort(np.array(found), kind="stable").tolist()


def files(path: Path) -> list[Path]:
    return sorted((path / "policy").iterdir())


def refused(store: Store) -> int:
    return store.stats().disk_faults.get("refused_snapshot", 0)


@pytest.mark.parametrize("policy", POLICIES)
def test_blocks_are_worth_after_a_restart_what_they_were_before(tmp_path: Path, policy: str) -> None:
    clock = Clock()
    with opened(tmp_path, clock, policy) as store:
        fill(store, clock)
        store.flush()
        before = values(store)
    with opened(tmp_path, clock, policy) as store:
        assert ranks(before) == ranks(values(store))
        assert 0 == refused(store)
        assert (1, ()) == (store.verify().namespaces, store.verify().problems)


def test_ages_include_the_time_that_the_store_was_closed(tmp_path: Path) -> None:
    clock = Clock()
    with opened(tmp_path, clock, "lru") as store:
        fill(store, clock)
        before = values(store)
        first_tick = store._index.next_tick()
    clock.seconds += 3600
    with opened(tmp_path, clock, "lru") as store:
        after = values(store)
        age_before, age_after = first_tick - before[2], store._index.next_tick() - after[2]
        assert abs(age_after - age_before - 3600 * 1e6) < 1e6


def test_it_is_kept_over_a_restart_in_which_nobody_asked(tmp_path: Path) -> None:
    clock = Clock()
    with opened(tmp_path, clock) as store:
        fill(store, clock)
    content = files(tmp_path)[0].read_bytes()
    with opened(tmp_path, clock) as store:
        store.flush()
    assert [content] == [path.read_bytes() for path in files(tmp_path)]


@pytest.mark.parametrize("place", [0.0, 0.05, 0.3, 0.6, 0.9, 0.9999])
def test_a_damaged_snapshot_is_refused_and_every_block_is_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, place: float
) -> None:
    clock = Clock()
    with opened(tmp_path, clock) as store:
        fill(store, clock)
    (path,) = files(tmp_path)
    damaged = bytearray(path.read_bytes())
    damaged[int(place * len(damaged))] ^= 1
    path.write_bytes(damaged)
    with caplog.at_level(logging.WARNING), opened(tmp_path, clock) as store:
        assert [10] * len(PROMPTS) == [verified_blocks(store, NAMESPACE, prompt) for prompt in PROMPTS]
        assert 1 == refused(store)
        assert (1, ()) == (store.verify().namespaces, store.verify().problems)
    told = [record.getMessage() for record in caplog.records]
    assert [True] == ["policy snapshot refused, starting cold" in line and path.stem in line for line in told]


def test_that_of_another_policy_is_refused_once_and_replaced(tmp_path: Path) -> None:
    clock = Clock()
    with opened(tmp_path, clock, "survival") as store:
        fill(store, clock)
    with opened(tmp_path, clock, "lru") as store:
        store.match(NAMESPACE, OFTEN)
        assert 1 == refused(store)
    with opened(tmp_path, clock, "lru") as store:
        assert 10 == store.match(NAMESPACE, OFTEN).blocks
        assert 0 == refused(store)


def test_that_of_another_namespace_is_refused(tmp_path: Path) -> None:
    clock = Clock()
    other = dataclasses.replace(NAMESPACE, revision="other")
    with opened(tmp_path, clock) as store:
        fill(store, clock)
        store_prompt(store, other, OFTEN)
    one, two = files(tmp_path)
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)
    with opened(tmp_path, clock) as store:
        assert (10, 10) == (store.match(NAMESPACE, OFTEN).blocks, store.match(other, OFTEN).blocks)
        assert 2 == refused(store)


def test_clearing_a_namespace_removes_it(tmp_path: Path) -> None:
    clock = Clock()
    with opened(tmp_path, clock) as store:
        fill(store, clock)
        store.flush()
        assert 1 == len(files(tmp_path))
        store.clear(NAMESPACE)
        assert [] == files(tmp_path)
    assert [] == files(tmp_path)


def test_its_bytes_count_as_used(tmp_path: Path) -> None:
    clock = Clock()
    with opened(tmp_path, clock) as store:
        fill(store, clock)
        store._room.flush()
        before = store.stats().tiers["disk"].used_bytes
        store.flush()
        (path,) = files(tmp_path)
        assert -(-path.stat().st_size // 4096) * 4096 == store.stats().tiers["disk"].used_bytes - before


def test_a_store_without_a_disk_saves_nothing() -> None:
    with kvstore.open(host_bytes=4 << 20) as store:
        store_prompt(store, NAMESPACE, OFTEN)
        store.flush()
        assert {Tier.HOST: 10} == store.match(NAMESPACE, OFTEN).tiers
