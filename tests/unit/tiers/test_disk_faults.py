"""Full, failing and powerless disks: a miss or a refused store and a counter, never an exception or a leak."""

from __future__ import annotations

import contextlib
import errno
import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvstore.errors import StorageError
from kvstore.testing.faulty import FaultyIo, IoCall
from kvstore.tiers import disk_opening
from kvstore.tiers.file_io import FileSystemSpace, SystemIo
from kvstore.tiers.manifest import Manifest

if TYPE_CHECKING:
    from conftest import Blocks, Disk

MIB = 1 << 20
NUMBERS = list(range(8))
ALWAYS = 1 << 30


@pytest.fixture
def io() -> FaultyIo:
    return FaultyIo()


def write_all(blocks: Blocks, pool: object, slots: object) -> list[bool]:
    identities, sources = [blocks.identity(n) for n in NUMBERS], [blocks.parts(n) for n in NUMBERS]
    return pool.write(slots, identities, sources).tolist()  # type: ignore[attr-defined, no-any-return]


def test_no_space_for_a_slab_gives_no_slots_and_leaves_no_file(disk: Disk, blocks: Blocks, io: FaultyIo) -> None:
    tier = disk.open(io=io)
    used_bytes = tier.used_bytes
    io.fail(IoCall.ALLOCATE, errno.ENOSPC)
    pool = blocks.pool(tier)
    assert 0 == len(pool.allocate(3))
    assert ({"no_space": 1}, used_bytes, []) == (tier.faults, tier.used_bytes, disk.slab_paths())
    assert 3 == len(pool.allocate(3))


@pytest.mark.parametrize("call", [IoCall.OPEN, IoCall.WRITE, IoCall.SYNC, IoCall.REPLACE, IoCall.SPACE])
def test_a_slab_that_cannot_be_made_gives_no_slots(disk: Disk, blocks: Blocks, io: FaultyIo, call: IoCall) -> None:
    tier = disk.open(io=io)
    pool = blocks.pool(tier)
    io.fail(call, errno.EIO)
    assert 0 == len(pool.allocate(1))
    assert 1 == len(tier.faults)
    assert 1 == len(pool.allocate(1))


@pytest.mark.parametrize(
    ("error_number", "fault", "quarantined"), [(errno.ENOSPC, "no_space", 0), (errno.EIO, "write_error", 8)]
)
def test_a_failed_write_stores_nothing_and_the_slots_can_be_freed(
    disk: Disk, blocks: Blocks, io: FaultyIo, error_number: int, fault: str, quarantined: int
) -> None:
    tier = disk.open(io=io)
    pool = blocks.pool(tier)
    slots = pool.allocate(8)
    io.fail(IoCall.WRITE, error_number, times=ALWAYS)
    assert [False] * 8 == write_all(blocks, pool, slots)
    io.heal()
    assert [False] * 8 == blocks.right(pool, slots, NUMBERS)
    assert tier.faults[fault] >= 1
    pool.free(slots)
    assert (quarantined, 0) == (pool.quarantined_slots, pool.used_slots)
    assert 0 == tier.busy_buffers


def test_a_slot_in_quarantine_is_not_used_again(disk: Disk, blocks: Blocks, io: FaultyIo) -> None:
    tier = disk.open(io=io)
    pool = blocks.pool(tier)
    slots = blocks.store(pool, NUMBERS)
    io.fail(IoCall.READ, errno.EIO, times=ALWAYS)
    assert [False] * 2 == blocks.right(pool, slots[:2], NUMBERS[:2])
    io.heal()
    pool.free(slots)
    assert slots[2:].tolist() == pool.allocate(6).tolist()
    assert {"read_error": 2, "quarantined_slot": 2} == tier.faults


def test_one_bad_sector_costs_one_block(disk: Disk, blocks: Blocks, io: FaultyIo) -> None:
    tier = disk.open(io=io, io_threads=1)
    pool = blocks.pool(tier)
    slots = blocks.store(pool, NUMBERS)
    io.fail(IoCall.READ, errno.EIO)
    io.fail(IoCall.READ, errno.EIO, skip=3)
    good = blocks.right(pool, slots, NUMBERS)
    assert 7 == sum(good)
    assert {"read_error": 1} == tier.faults


@pytest.mark.parametrize("kept_bytes", [0, 100, 4096, 20_000])
def test_a_short_read_is_a_miss_and_shows_no_older_bytes(
    disk: Disk, blocks: Blocks, io: FaultyIo, kept_bytes: int
) -> None:
    tier = disk.open(io=io, io_threads=1)
    pool = blocks.pool(tier)
    slots = blocks.store(pool, NUMBERS)
    assert all(blocks.right(pool, slots, NUMBERS))
    io.shorten(IoCall.READ, kept_bytes, times=ALWAYS)
    whole_count = kept_bytes // pool.slabs[0].geometry.slot_bytes
    assert [number < whole_count for number in NUMBERS] == blocks.right(pool, slots, NUMBERS)
    assert tier.faults["short_read"] >= 1


@pytest.mark.parametrize("kept_bytes", [0, 4096, 20_000])
def test_a_short_write_is_a_refused_store(disk: Disk, blocks: Blocks, io: FaultyIo, kept_bytes: int) -> None:
    tier = disk.open(io=io)
    pool = blocks.pool(tier)
    slots = pool.allocate(8)
    io.shorten(IoCall.WRITE, kept_bytes, times=ALWAYS)
    assert [False] * 8 == write_all(blocks, pool, slots)
    io.heal()
    assert [False] * 8 == blocks.right(pool, slots, NUMBERS)
    assert tier.faults["short_write"] >= 1


@pytest.mark.parametrize("kept_bytes", [0, 4096, 8192, 20_480, 30_000])
def test_a_torn_write_is_found_out_when_read(disk: Disk, blocks: Blocks, io: FaultyIo, kept_bytes: int) -> None:
    tier = disk.open(io=io, io_threads=1)
    pool = blocks.pool(tier)
    pool.free(blocks.store(pool, [number + 100 for number in NUMBERS]))
    slots = pool.allocate(8)
    io.tear(kept_bytes)
    assert [True] * 8 == write_all(blocks, pool, slots)
    whole_count = kept_bytes // pool.slabs[0].geometry.slot_bytes
    assert [number < whole_count for number in NUMBERS] == blocks.right(pool, slots, NUMBERS)
    tier.close()
    shutil.rmtree(disk.path / "index")
    found = blocks.recovered(disk.open())
    assert set(NUMBERS[:whole_count]) == {number for number, good in found.items() if good}


def test_a_slot_that_cannot_be_erased_goes_into_quarantine(disk: Disk, blocks: Blocks, io: FaultyIo) -> None:
    tier = disk.open(io=io)
    pool = blocks.pool(tier)
    slots = blocks.store(pool, NUMBERS)
    io.fail(IoCall.WRITE, errno.EIO)
    pool.free(slots[:1])
    assert (1, 7) == (pool.quarantined_slots, pool.used_slots)


def test_a_slab_that_cannot_be_deleted_stays_charged(disk: Disk, blocks: Blocks, io: FaultyIo) -> None:
    tier = disk.open(io=io)
    pool = blocks.pool(tier)
    pool.free(pool.allocate(1))
    used_bytes = tier.used_bytes
    io.fail(IoCall.UNLINK, errno.EIO)
    assert pool.give_back(pool.ranges()[0])
    assert used_bytes == tier.used_bytes


def test_a_full_index_is_a_refused_store(disk: Disk, blocks: Blocks, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = disk.open()
    pool = blocks.pool(tier)
    slots = pool.allocate(8)
    monkeypatch.setattr(Manifest, "put", lambda self, rows: False)
    assert [False] * 8 == write_all(blocks, pool, slots)
    assert [False] * 8 == blocks.right(pool, slots, NUMBERS)
    assert {"index_full": 8, "other_block": 8} == tier.faults


def test_an_index_without_room_says_so_and_goes_on(disk: Disk) -> None:
    disk.path.mkdir()
    index = Manifest(disk.path / "index", 64 << 10)
    assert not index.put([(b"%8d" % number, bytes(300)) for number in range(1000)])
    assert index.put([(b"12345678", bytes(300))])
    index.close()


def test_flush_reports_what_the_disk_did_not_take(disk: Disk, blocks: Blocks, io: FaultyIo) -> None:
    tier = disk.open(io=io)
    blocks.store(blocks.pool(tier), NUMBERS)
    io.fail(IoCall.SYNC, errno.EIO)
    with pytest.raises(StorageError, match="cannot flush"):
        tier.flush()
    tier.flush()
    assert {"sync_error": 1} == tier.faults


def test_clear_raises_if_it_cannot_be_made_durable_and_then_nothing_is_cleared(
    disk: Disk, blocks: Blocks, io: FaultyIo
) -> None:
    tier = disk.open(io=io)
    pool = blocks.pool(tier)
    slots = blocks.store(pool, NUMBERS)
    for call in (IoCall.OPEN, IoCall.WRITE, IoCall.SYNC, IoCall.REPLACE):
        io.fail(call, errno.ENOSPC)
        with pytest.raises(StorageError, match="cannot clear"):
            tier.clear(blocks.ns_id)
    assert [True] * 8 == blocks.right(pool, slots, NUMBERS)


def test_no_space_at_the_start_is_a_storage_error_that_leaves_the_directory_unlocked(disk: Disk, io: FaultyIo) -> None:
    for call in (IoCall.OPEN, IoCall.WRITE, IoCall.SYNC, IoCall.REPLACE, IoCall.SPACE):
        io.fail(call, errno.ENOSPC)
        with pytest.raises(StorageError, match="No space left") as caught:
            disk.open(io=io)
        assert "\n" not in str(caught.value)
        io.heal()
    disk.open(io=io)


def test_what_was_flushed_survives_a_power_cut(disk: Disk, blocks: Blocks, io: FaultyIo) -> None:
    tier = disk.open(io=io)
    pool = blocks.pool(tier)
    blocks.store(pool, [1, 2])
    tier.flush()
    slots = blocks.store(pool, [3, 4])
    io.cut_power()
    assert [False, False] == blocks.right(pool, slots, [3, 4])
    tier.close()
    assert dict.fromkeys([1, 2], True) == {
        number: good for number, good in blocks.recovered(disk.open()).items() if good
    }


@pytest.mark.parametrize("seed", range(8))
def test_after_a_power_cut_that_kept_some_pages_each_block_is_right_or_a_miss(
    disk: Disk, blocks: Blocks, io: FaultyIo, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    tier = disk.open(io=io)
    pool = blocks.pool(tier)
    first, second = list(range(20)), list(range(20, 40))
    slots = blocks.store(pool, [*first, *second])
    tier.flush()
    pool.free(slots[20:])
    third = list(range(100, 130))
    blocks.store(pool, third)
    io.cut_power(random.Random(seed))
    tier.close()
    monkeypatch.setattr(disk_opening, "boot_id", lambda: b"another boot 123")
    found = blocks.recovered(disk.open())
    assert set(first) <= {number for number, good in found.items() if good}
    assert set(found) <= {*first, *second, *third}


@pytest.mark.parametrize("call", list(IoCall))
def test_a_start_that_fails_leaves_no_descriptor_and_no_lock(
    disk: Disk, blocks: Blocks, io: FaultyIo, call: IoCall
) -> None:
    tier = disk.open()
    blocks.store(blocks.pool(tier), NUMBERS)
    tier.close()
    (disk.path / "slabs" / "slab-00000099.kvs.new").write_bytes(b"")
    before = set(Path("/proc/self/fd").iterdir())
    for skip in range(12):
        io.fail(call, errno.EIO, skip=skip)
        with contextlib.suppress(StorageError):
            disk.open(io=io).close()
        io.heal()
        assert len(before) == len(set(Path("/proc/self/fd").iterdir()))
    assert len(blocks.recovered(disk.open())) in (0, len(NUMBERS))


def test_a_clear_survives_a_power_cut(disk: Disk, blocks: Blocks, io: FaultyIo) -> None:
    tier = disk.open(io=io)
    blocks.store(blocks.pool(tier), [1, 2])
    tier.flush()
    tier.clear(blocks.ns_id)
    io.cut_power()
    tier.close()
    shutil.rmtree(disk.path / "index")
    assert {} == blocks.recovered(disk.open())


def test_random_faults_leak_no_buffer_and_give_no_wrong_byte(disk: Disk, blocks: Blocks, io: FaultyIo) -> None:
    tier = disk.open(io=io, capacity_bytes=64 * MIB)
    pool = blocks.pool(tier)
    generator = np.random.default_rng(11)
    for turn in range(60):
        io.heal()
        call = (IoCall.READ, IoCall.WRITE)[int(generator.integers(2))]
        skip = int(generator.integers(3))
        if generator.integers(2):
            io.fail(call, errno.EIO, skip=skip)
        else:
            io.shorten(call, int(generator.integers(60_000)), skip=skip)
        numbers = [turn * 10 + index for index in range(8)]
        slots = pool.allocate(8)
        stored = pool.write(slots, [blocks.identity(n) for n in numbers], [blocks.parts(n) for n in numbers])
        good = np.array(blocks.right(pool, slots, numbers))
        assert not np.any(good & ~stored)
        pool.free(slots)
    assert 0 == tier.busy_buffers
    assert 0 == pool.used_slots


def test_slabs_that_come_and_go_and_fail_leave_no_descriptor(disk: Disk, blocks: Blocks, io: FaultyIo) -> None:
    tier = disk.open(io=io)
    pool = blocks.pool(tier)
    before = len(set(Path("/proc/self/fd").iterdir()))
    for turn in range(30):
        io.fail(list(IoCall)[turn % len(IoCall)], errno.EIO, skip=turn % 3)
        pool.free(pool.allocate(120))
        io.heal()
        for slot_range in pool.ranges():
            pool.give_back(slot_range)
    tier.scrub(0, 1 << 30)
    for slot_range in pool.ranges():
        pool.give_back(slot_range)
    assert (before, 0) == (len(set(Path("/proc/self/fd").iterdir())), pool.used_slots)


def test_one_bad_write_costs_one_block(disk: Disk, blocks: Blocks, io: FaultyIo) -> None:
    tier = disk.open(io=io, io_threads=1)
    pool = blocks.pool(tier)
    slots = pool.allocate(8)
    io.fail(IoCall.WRITE, errno.EIO)
    io.fail(IoCall.WRITE, errno.EIO, skip=2)
    stored = write_all(blocks, pool, slots)
    assert [number != 2 for number in NUMBERS] == stored
    assert stored == blocks.right(pool, slots, NUMBERS)
    assert 1 == tier.faults["write_error"]


class SmallFileSystem(SystemIo):
    """A file system of which only `free_bytes` were left before ours."""

    def __init__(self, free_bytes: int, total_bytes: int = 100 * MIB) -> None:
        self.free_bytes = free_bytes
        self.total_bytes = total_bytes

    def space(self, path: Path) -> FileSystemSpace:
        taken_bytes = sum(file.stat().st_size for file in path.iterdir())
        return FileSystemSpace(self.free_bytes - taken_bytes, self.total_bytes)


def test_a_small_file_system_is_filled_down_to_its_floor(disk: Disk, blocks: Blocks) -> None:
    tier = disk.open(capacity_bytes=1024 * MIB, free_floor_bytes=3 * MIB, io=SmallFileSystem(5 * MIB))
    pool = blocks.pool(tier)
    assert 90 < len(pool.allocate(200)) <= 102
    assert MIB < tier.used_bytes <= 2 * MIB
    assert tier.faults["free_floor"] >= 1


@pytest.mark.parametrize(
    ("total_bytes", "floor_bytes"),
    [(100 * MIB, 10 * MIB), (20 << 30, 1 << 30), (1 << 40, (1 << 40) // 50)],
)
def test_the_usual_floor_follows_the_size_of_the_file_system(
    disk: Disk, blocks: Blocks, total_bytes: int, floor_bytes: int
) -> None:
    io = SmallFileSystem(floor_bytes, total_bytes)
    pool = blocks.pool(disk.open(free_floor_bytes=None, io=io))
    assert 0 == len(pool.allocate(1))
    io.free_bytes += MIB
    assert 1 == len(pool.allocate(1))
