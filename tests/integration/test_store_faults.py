"""A store on a disk that fails, and holders that never let go: nothing wrong is read, nothing leaks, nothing raises."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import numpy as np
import pytest

import kvstore
from kvstore.clock import SystemClock
from kvstore.errors import ClosedError, ConfigError, NoSpaceError, StorageError
from kvstore.radix.tree import RadixTree
from kvstore.store import Store, StoreSettings, open_store
from kvstore.store.space import Space
from kvstore.testing.blocks import expected_rows, store_prompt, verified_blocks
from kvstore.testing.faulty import FaultyIo, IoCall
from kvstore.testing.manual_clock import ManualClock
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk_pool import DiskPool
from kvstore.tiers.host import HostTier
from kvstore.types import KvLayout, Namespace

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LAYOUT = KvLayout(layers=2, kv_heads=2, head_dim=32, dtype="float16", block_tokens=4)
NAMESPACE = Namespace(model="model", revision="revision", layout=LAYOUT)
HOST_BYTES = 256 << 10  # 128 blocks
PROMPTS = [list(range(start, start + 160)) for start in range(0, 20 * 160, 160)]  # 40 blocks each
ALWAYS = 1 << 30


def faulty_store(path: Path, io: FaultyIo) -> Store:
    disk = DiskTier.open(path, capacity_bytes=64 << 20, io=io)
    return Store(HostTier(HOST_BYTES), disk, StoreSettings(), SystemClock())


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_takes_nothing_stops_no_store(tmp_path: Path, error: int) -> None:
    io = FaultyIo()
    with faulty_store(tmp_path, io) as store:
        io.fail(IoCall.WRITE, error, times=ALWAYS)
        for prompt in PROMPTS:
            assert store_prompt(store, NAMESPACE, prompt).blocks == 40
            assert verified_blocks(store, NAMESPACE, prompt) == 40
        stats = store.stats()
        assert sum(stats.rejected_blocks.values()) > 0
        assert stats.tiers["disk"].blocks == 0
        assert sum(stats.disk_faults.values()) > 0
        io.heal()
        store.flush()
        assert store.stats().tiers["disk"].blocks == store.stats().tiers["host"].blocks


def test_some_failed_writes_cost_some_blocks_and_no_more(tmp_path: Path) -> None:
    io = FaultyIo()
    with faulty_store(tmp_path, io) as store:
        for index, prompt in enumerate(PROMPTS):
            io.fail(IoCall.WRITE, errno.EIO, skip=index % 5, times=2)
            io.shorten(IoCall.WRITE, 1000, skip=index % 3, times=2)
            store_prompt(store, NAMESPACE, prompt)
        found = [verified_blocks(store, NAMESPACE, prompt) for prompt in PROMPTS]
        assert 0 < sum(found) <= 40 * len(PROMPTS)
        assert found[-1] == 40


@pytest.mark.parametrize("damage", ["error", "short read"])
def test_what_cannot_be_read_is_a_miss_and_can_be_stored_anew(tmp_path: Path, damage: str) -> None:
    io = FaultyIo()
    with faulty_store(tmp_path, io) as store:
        for prompt in PROMPTS:
            store_prompt(store, NAMESPACE, prompt)
        match = store.match(NAMESPACE, PROMPTS[0])
        assert match.blocks == 40
        if damage == "error":
            io.fail(IoCall.READ, errno.EIO, times=ALWAYS)
        else:
            io.shorten(IoCall.READ, 100, times=ALWAYS)
        assert verified_blocks(store, NAMESPACE, PROMPTS[0]) < 40
        io.heal()
        assert store.match(NAMESPACE, PROMPTS[0]).blocks < 40
        assert store_prompt(store, NAMESPACE, PROMPTS[0]).refused_blocks == 0
        assert verified_blocks(store, NAMESPACE, PROMPTS[0]) == 40
        assert store.stats().leases == 0


def test_a_clear_that_cannot_be_made_durable_changes_nothing(tmp_path: Path) -> None:
    io = FaultyIo()
    with faulty_store(tmp_path, io) as store:
        for prompt in PROMPTS[:6]:
            store_prompt(store, NAMESPACE, prompt)
        io.fail(IoCall.SYNC, errno.EIO, times=ALWAYS)
        with pytest.raises(StorageError, match="cannot clear namespace"):
            store.clear(NAMESPACE)
        io.heal()
        assert [verified_blocks(store, NAMESPACE, prompt) for prompt in PROMPTS[:6]] == [40] * 6
        assert store.clear(NAMESPACE) == 240
        assert store.stats().tiers["host"].used_bytes == 0
        assert store.stats().tiers["disk"].blocks == 0


def test_after_a_power_cut_every_block_is_right_or_absent(tmp_path: Path) -> None:
    io = FaultyIo()
    store = faulty_store(tmp_path, io)
    for prompt in PROMPTS[:10]:
        store_prompt(store, NAMESPACE, prompt)
    store.flush()
    for prompt in PROMPTS[10:]:
        store_prompt(store, NAMESPACE, prompt)
    io.cut_power()
    store._flush = lambda: None  # type: ignore[method-assign]  # nor does anybody make room for what is in memory
    store.close()
    with kvstore.open(tmp_path, host_bytes=HOST_BYTES, disk_bytes=64 << 20) as store:
        found = [verified_blocks(store, NAMESPACE, prompt) for prompt in PROMPTS]
    assert found[:10] == [40] * 10


@pytest.mark.parametrize("holder", ["lease", "stage", "pin"])
def test_a_forgotten_holder_ends_when_its_time_is_over(holder: str) -> None:
    clock = ManualClock()
    settings = StoreSettings(lease_seconds_max=60, stage_seconds_max=60)
    with open_store(host_bytes=HOST_BYTES, settings=settings, clock=clock) as store:
        prompt = PROMPTS[0]
        lease = stage = None
        if holder == "stage":
            stage = store.stage(NAMESPACE, prompt)
            stage.write_from(expected_rows(NAMESPACE, prompt))
        else:
            store_prompt(store, NAMESPACE, prompt)
            if holder == "lease":
                lease = store.lease(store.match(NAMESPACE, prompt))
            else:
                assert store.pin(NAMESPACE, prompt, ttl_seconds=60).expires_unix_seconds == clock.unix() + 60
            assert store.evict(NAMESPACE, prompt) == 0
        clock.advance(59)
        stats = store.stats()
        assert stats.leases + stats.stages + stats.pins == 1
        clock.advance(1)
        stats = store.stats()
        assert stats.leases + stats.stages + stats.pins == 0
        store.evict(NAMESPACE, prompt)
        assert store.stats().tiers["host"].used_bytes == 0
        if lease is not None:
            with pytest.raises(ClosedError):
                lease.load_into(np.zeros((1, LAYOUT.block_bytes), dtype=np.uint8))
        if stage is not None:
            with pytest.raises(ClosedError):
                stage.commit()


def test_a_full_store_of_held_blocks_refuses_at_once() -> None:
    with open_store(host_bytes=HOST_BYTES) as store:
        prompt = list(range(4 * 128))
        assert store_prompt(store, NAMESPACE, prompt).blocks == 128
        with store.lease(store.match(NAMESPACE, prompt)):
            result = store_prompt(store, NAMESPACE, PROMPTS[1])
            assert (result.blocks, result.refused_blocks) == (0, 40)
            assert store.match(NAMESPACE, PROMPTS[1]).blocks == 0
        assert store_prompt(store, NAMESPACE, PROMPTS[1]).blocks == 40


def test_a_partly_full_store_takes_the_head_of_a_prompt() -> None:
    with open_store(host_bytes=HOST_BYTES) as store:
        held = list(range(4 * 100))
        store_prompt(store, NAMESPACE, held)
        with store.lease(store.match(NAMESPACE, held)):
            result = store_prompt(store, NAMESPACE, [t + 10_000 for t in PROMPTS[0]])
            assert (result.blocks, result.refused_blocks) == (28, 12)
            assert verified_blocks(store, NAMESPACE, [t + 10_000 for t in PROMPTS[0]]) == 28


def test_pinned_extents_do_not_keep_room_from_other_namespaces() -> None:
    extents = 16
    blocks = (4 << 20) // LAYOUT.block_bytes  # the smallest extent
    prompts = [[*range(start, start + 4 * blocks)] for start in range(0, extents * 100_000, 100_000)]
    rows = np.zeros((blocks, LAYOUT.block_bytes), dtype=np.uint8)
    with open_store(host_bytes=extents * (4 << 20)) as store:
        for prompt in prompts:
            with store.stage(NAMESPACE, prompt) as stage:
                stage.write_from(rows)
        for prompt in prompts[: extents // 2]:
            assert store.pin(NAMESPACE, prompt).blocks == blocks
        other = Namespace(model="other", revision="r", layout=LAYOUT)
        assert store_prompt(store, other, PROMPTS[0]).blocks == 40


@pytest.mark.parametrize("interrupted", [DiskPool.write, RadixTree.take_victims], ids=lambda call: call.__name__)
def test_an_interrupt_while_room_is_made_loses_no_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted: Callable[..., object]
) -> None:
    with faulty_store(tmp_path, FaultyIo()) as store:
        for prompt in PROMPTS[:3]:
            store_prompt(store, NAMESPACE, prompt)
        owner = DiskPool if interrupted is DiskPool.write else RadixTree
        with monkeypatch.context() as patch:
            patch.setattr(owner, interrupted.__name__, Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                store.stage(NAMESPACE, PROMPTS[3])
        assert store_prompt(store, NAMESPACE, PROMPTS[3]).blocks == 40
        store.clear(NAMESPACE)
        assert (0, 0) == (store.stats().tiers["host"].used_bytes, store.stats().stages)


def test_an_interrupt_in_a_commit_aborts_the_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(host_bytes=HOST_BYTES) as store:
        with monkeypatch.context() as patch:
            patch.setattr(Space, "prompt_keys", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                store_prompt(store, NAMESPACE, PROMPTS[0])
        assert (0, 0) == (store.stats().tiers["host"].used_bytes, store.stats().stages)
        assert store_prompt(store, NAMESPACE, PROMPTS[0]).blocks == 40


@pytest.mark.parametrize(
    ("limit", "problem"),
    [("leases_max", "leases are open"), ("stages_max", "stages are open"), ("pins_max", "there are 1 pins")],
)
def test_limits_refuse_by_name_and_change_nothing(limit: str, problem: str) -> None:
    with open_store(host_bytes=HOST_BYTES, settings=StoreSettings(**{limit: 1})) as store:
        store_prompt(store, NAMESPACE, PROMPTS[0])
        match = store.match(NAMESPACE, PROMPTS[0])
        calls = {
            "leases_max": lambda: store.lease(match),
            "stages_max": lambda: store.stage(NAMESPACE, PROMPTS[1]),
            "pins_max": lambda: store.pin(NAMESPACE, PROMPTS[0]),
        }
        held = calls[limit]()
        with pytest.raises(NoSpaceError, match=problem):
            calls[limit]()
        del held
        stats = store.stats()
        assert stats.leases + stats.stages + stats.pins == 1


def test_a_namespace_too_many_is_refused() -> None:
    other = Namespace(model="other", revision="r", layout=LAYOUT)
    with open_store(host_bytes=HOST_BYTES, settings=StoreSettings(namespaces_max=1)) as store:
        store_prompt(store, NAMESPACE, PROMPTS[0])
        with pytest.raises(NoSpaceError, match="namespaces_max"):
            store.match(other, PROMPTS[0])


def test_namespaces_without_blocks_make_room_for_others(tmp_path: Path) -> None:
    settings = StoreSettings(namespaces_max=2)
    with open_store(tmp_path, host_bytes=HOST_BYTES, disk_bytes=16 << 20, settings=settings) as store:
        store_prompt(store, NAMESPACE, PROMPTS[0])
        for name in range(20):
            other = Namespace(model=f"other {name}", revision="r", layout=LAYOUT)
            assert store.match(other, PROMPTS[1]).blocks == 0
            store_prompt(store, other, PROMPTS[1])
            store.flush()
            assert verified_blocks(store, other, PROMPTS[1]) == 40
            store.clear(other)
        assert verified_blocks(store, NAMESPACE, PROMPTS[0]) == 40
        assert store.stats().namespaces == 2


def test_a_lease_outlives_its_namespace() -> None:
    settings = StoreSettings(namespaces_max=1)
    with open_store(host_bytes=HOST_BYTES, settings=settings) as store:
        store_prompt(store, NAMESPACE, PROMPTS[0])
        lease = store.lease(store.match(NAMESPACE, PROMPTS[0]))
        store.clear(NAMESPACE)
        store.match(Namespace(model="other", revision="r", layout=LAYOUT), PROMPTS[0])
        store_prompt(store, NAMESPACE, PROMPTS[1])
        rows = np.zeros((40, LAYOUT.block_bytes), dtype=np.uint8)
        assert lease.load_into(rows).blocks == 40
        assert np.array_equal(rows, expected_rows(NAMESPACE, PROMPTS[0]))
        lease.release()
        store.clear(NAMESPACE)
        assert store.stats().tiers["host"].used_bytes == 0


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        ({"host_bytes": 0}, "host_bytes is 0"),
        ({"host_bytes": True}, "host_bytes is True"),
        ({"host_bytes": 1.5}, "host_bytes is 1.5"),
        ({"host_bytes": 1 << 20, "disk_bytes": -1}, "disk_bytes is -1"),
        ({"host_bytes": 1 << 20, "disk_bytes": 1 << 30}, "there is no path for it"),
    ],
)
def test_sizes_that_cannot_be_are_refused(sizes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        open_store(**sizes)


def test_a_path_alone_brings_a_disk_tier(tmp_path: Path) -> None:
    with open_store(tmp_path, host_bytes=HOST_BYTES) as store:
        assert store.stats().tiers["disk"].capacity_bytes == 10 << 30
