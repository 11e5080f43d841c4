"""Sequence states on a disk that fails, over restarts and after kill -9: each is whole and right, or absent."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import kvstore
from kvstore.clock import SystemClock
from kvstore.store import Store, StoreSettings
from kvstore.testing.faulty import FaultyIo, IoCall
from kvstore.testing.states import PIECE_BYTES, STATE_BYTES, STATE_LAYOUT, blob_of, loaded_state, store_state
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.host import HostTier
from kvstore.types import Namespace, Tier

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20
NAMESPACE = Namespace(model="m", revision="r", layout=STATE_LAYOUT)
PATHS = [list(range(start, start + 42)) for start in range(0, 40 * 42, 42)]
ALWAYS = 1 << 30
# Each state is stored for a path of its own, of ever more tokens: the path takes two pieces from 1,025 tokens on.
WRITER = """
import sys, kvstore
sys.path.insert(0, sys.argv[2])
from test_state_faults import NAMESPACE, path_at, size_at, store_state
with kvstore.open(sys.argv[1], host_bytes=1 << 20, disk_bytes=32 << 20) as store:
    for index in range(1 << 30):
        store_state(store, NAMESPACE, path_at(index), size_at(index))
        if index % 10 == 9:
            store.flush()
            print(index + 1, flush=True)
"""


def path_at(index: int) -> list[int]:
    return [index % 3, *range(1000 * index, 1000 * index + 1 + 97 * (index % 15))]


def size_at(index: int) -> int:
    return 1 + 7777 * (index % 11)


def open_with(path: Path, io: FaultyIo, host_bytes: int = MIB // 4) -> Store:
    disk = DiskTier.open(path, capacity_bytes=64 * MIB, io=io)
    return Store(HostTier(host_bytes), disk, StoreSettings(), SystemClock())


@pytest.fixture
def io() -> FaultyIo:
    return FaultyIo()


@pytest.fixture
def store(tmp_path: Path, io: FaultyIo) -> Iterator[Store]:
    with open_with(tmp_path, io) as store:
        yield store
        io.heal()
        assert () == store.verify().problems
        store.clear(NAMESPACE)
        assert (0, 0) == (store.stats().tiers["host"].used_bytes, store.stats().states)


def is_found(store: Store, path: list[int], size: int = STATE_BYTES) -> bool:
    """Whether the state of a path is found, whole; what is found is right."""
    tokens, state_tokens, blob = loaded_state(store, NAMESPACE, path)
    if (tokens, state_tokens) != (len(path), len(path)) or blob.size < size:
        return False
    assert (blob_of(NAMESPACE, path, size) == blob).all()
    return True


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_takes_nothing_stops_no_store(store: Store, io: FaultyIo, error: int) -> None:
    io.fail(IoCall.WRITE, error, times=ALWAYS)
    for path in PATHS:
        assert store_state(store, NAMESPACE, path)
        assert is_found(store, path)
    assert sum(store.stats().rejected_blocks.values()) > 0
    disk = store._index.space(NAMESPACE).disk
    assert disk is not None
    assert disk.used_slots == disk.quarantined_slots


@pytest.mark.parametrize("damage", ["error", "short read"])
def test_what_cannot_be_read_is_a_miss_and_can_be_stored_anew(store: Store, io: FaultyIo, damage: str) -> None:
    for path in PATHS:
        store_state(store, NAMESPACE, path)
    assert {Tier.DISK: 42} == store.match(NAMESPACE, PATHS[0], touch=False).tiers
    if damage == "error":
        io.fail(IoCall.READ, errno.EIO, times=ALWAYS)
    else:
        io.shorten(IoCall.READ, 100, times=ALWAYS)
    assert not is_found(store, PATHS[0])
    io.heal()
    assert 0 == store.match(NAMESPACE, PATHS[0]).tokens
    assert 1 == store.stats().corrupt_blocks
    assert store_state(store, NAMESPACE, PATHS[0])
    assert is_found(store, PATHS[0])
    assert is_found(store, PATHS[1])


@pytest.mark.parametrize("how", ["read", "scrub"])
def test_a_flipped_bit_costs_one_state(tmp_path: Path, how: str) -> None:
    with kvstore.open(tmp_path, host_bytes=MIB, disk_bytes=16 * MIB) as store:
        for path in PATHS[:5]:
            store_state(store, NAMESPACE, path)
    needle = blob_of(NAMESPACE, PATHS[2], STATE_BYTES)[2 * PIECE_BYTES : 2 * PIECE_BYTES + 64].tobytes()
    slab = next(slab for slab in tmp_path.rglob("*") if slab.is_file() and needle in slab.read_bytes())
    with slab.open("r+b") as file:
        at = slab.read_bytes().index(needle)
        file.seek(at)
        file.write(bytes([needle[0] ^ 1]))
    with kvstore.open(tmp_path, host_bytes=MIB, disk_bytes=16 * MIB) as store:
        assert 42 == store.match(NAMESPACE, PATHS[2]).tokens
        if how == "scrub":
            assert 1 == store.scrub(limit_bytes=16 * MIB).dropped_blocks
        else:
            assert not is_found(store, PATHS[2])
        assert [path for path in PATHS[:5] if path != PATHS[2]] == [path for path in PATHS[:5] if is_found(store, path)]
        assert 4 == store.stats().states


@pytest.mark.parametrize("rebuild", [False, True])
def test_states_that_were_cleared_evicted_or_served_by_longer_ones_stay_away(tmp_path: Path, rebuild: bool) -> None:
    other = Namespace(model="other", revision="r", layout=STATE_LAYOUT)
    with kvstore.open(tmp_path, host_bytes=MIB, disk_bytes=16 * MIB) as store:
        for path in PATHS[:4]:
            store_state(store, NAMESPACE, path)
            store_state(store, other, path)
        store.flush()
        assert 1 == store.evict(NAMESPACE, PATHS[0])
        assert store_state(store, NAMESPACE, [*PATHS[1], 7], 5)
        store.clear(other)
    if rebuild:
        for file in (tmp_path / "index").glob("*"):
            file.unlink()
    with kvstore.open(tmp_path, host_bytes=MIB, disk_bytes=16 * MIB) as store:
        assert 0 == store.match(other, PATHS[1]).tokens
        assert 0 == store.match(NAMESPACE, PATHS[0]).tokens
        assert (42, 43) == loaded_state(store, NAMESPACE, PATHS[1])[:2]
        assert is_found(store, PATHS[2])
        assert 3 == store.stats().states


def test_a_smaller_cap_drops_states_as_wholes(tmp_path: Path) -> None:
    with kvstore.open(tmp_path, host_bytes=4 * MIB, disk_bytes=32 * MIB) as store:
        for path in PATHS:
            store_state(store, NAMESPACE, path, 300_000)
    with kvstore.open(tmp_path, host_bytes=MIB, disk_bytes=8 * MIB) as store:
        found = [path for path in PATHS if is_found(store, path, 300_000)]
        assert 0 < len(found) < len(PATHS)
        assert store.stats().tiers["disk"].used_bytes <= 8 * MIB
        assert () == store.verify().problems


def test_the_paths_of_states_keep_to_the_bytes_of_their_index(tmp_path: Path) -> None:
    settings = StoreSettings(state_index_bytes=64 << 10)
    disk = DiskTier.open(tmp_path, capacity_bytes=32 * MIB)
    with Store(HostTier(4 * MIB), disk, settings, SystemClock()) as store:
        for index in range(40):
            assert store_state(store, NAMESPACE, [index, *range(2000)], 1)
        assert store.stats().index_bytes - store._index.space(NAMESPACE).tree.memory_bytes <= 64 << 10
        assert is_found(store, [39, *range(2000)], 1)
        assert not is_found(store, [0, *range(2000)], 1)
        with store.stage_state(NAMESPACE, range(20_000), state_bytes=1) as stage:
            assert not stage.wanted
        assert 1 == store.stats().rejected_blocks["index_full"]


@pytest.mark.kill
@pytest.mark.parametrize("lines", [1, 3, 6])
def test_after_kill_every_state_is_right_or_absent_and_what_was_flushed_is_there(tmp_path: Path, lines: int) -> None:
    command = [sys.executable, "-P", "-c", WRITER, str(tmp_path), str(Path(__file__).parent)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    flushed = 0
    for _ in range(lines):
        flushed = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    process.communicate()
    with kvstore.open(tmp_path, host_bytes=MIB, disk_bytes=32 * MIB) as store:
        for index in count():
            is_whole = is_found(store, path_at(index), size_at(index))
            assert is_whole or index >= flushed
            if index > flushed + 50:
                break
        assert () == store.verify().problems
        assert 0 == store.stats().corrupt_blocks
