from __future__ import annotations

import os
import subprocess
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvstore.errors import (
    ClosedError,
    DirectoryLockedError,
    InvalidLayoutError,
    LayoutMismatchError,
    StorageError,
    StorageFormatError,
)
from kvstore.tiers.slab import PARTS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Blocks, Disk

MIB = 1 << 20


@pytest.mark.parametrize(
    ("part_sizes", "block_tokens"), [((4096,), 16), ((1,), 1), ((5000, 333), 16), ((70_000,), 2000), ((3 * MIB, 9), 16)]
)
def test_blocks_come_back_byte_equal_whole_and_by_part(
    disk: Disk, blocks_of: Callable[..., Blocks], part_sizes: tuple[int, ...], block_tokens: int
) -> None:
    blocks = blocks_of(part_sizes, block_tokens)
    pool = blocks.pool(disk.open(capacity_bytes=32 * MIB))
    numbers = [1, 2, 3]
    slots = blocks.store(pool, numbers)
    assert [True] * 3 == blocks.right(pool, slots, numbers)
    assert [True] * 3 == blocks.right(pool, slots[::-1], numbers[::-1])
    last = len(part_sizes) - 1
    rows = np.zeros((3, part_sizes[last]), dtype=np.uint8)
    assert pool.read(slots, [blocks.identity(number) for number in numbers], rows, part=last).all()
    np.testing.assert_array_equal(blocks.rows(numbers)[:, -part_sizes[last] :], rows)


@pytest.mark.parametrize("field", ["root_key", "parent_key", "key", "tokens"])
def test_a_block_that_differs_in_one_field_is_a_miss(disk: Disk, blocks: Blocks, field: str) -> None:
    from dataclasses import replace

    pool = blocks.pool(disk.open())
    slots = blocks.store(pool, [1])
    wanted = blocks.identity(1)
    other = replace(wanted, **{field: bytes(len(getattr(wanted, field)))})
    assert not pool.read(slots, [other], np.zeros((1, 5333), dtype=np.uint8)).any()


def test_a_slot_that_was_reused_gives_only_its_new_block(disk: Disk, blocks: Blocks) -> None:
    pool = blocks.pool(disk.open())
    old = blocks.store(pool, [1, 2, 3])
    pool.free(old)
    new = blocks.store(pool, [4, 5, 6])
    assert old.tolist() == new.tolist()
    assert [False] * 3 == blocks.right(pool, old, [1, 2, 3])
    assert [True] * 3 == blocks.right(pool, new, [4, 5, 6])


def test_the_same_block_written_again_needs_its_own_write(disk: Disk, blocks: Blocks) -> None:
    tier = disk.open()
    pool = blocks.pool(tier)
    slots = blocks.store(pool, [1])
    pool.free(slots)
    assert [False] == blocks.right(pool, pool.allocate(1), [1])
    assert 0 == tier.busy_buffers


def test_one_pool_of_one_layout_for_a_namespace(disk: Disk, blocks: Blocks) -> None:
    tier = disk.open()
    assert blocks.pool(tier) is blocks.pool(tier)
    with pytest.raises(LayoutMismatchError):
        tier.pool(blocks.ns_id, (1, 2), blocks.block_tokens)
    with pytest.raises(InvalidLayoutError):
        tier.pool(b"z" * 16, (1,) * (PARTS_MAX + 1), 16)


def test_as_many_parts_as_a_slab_header_can_name(disk: Disk, blocks_of: Callable[..., Blocks]) -> None:
    blocks = blocks_of((1,) * PARTS_MAX)
    pool = blocks.pool(disk.open(capacity_bytes=32 * MIB))
    slots = blocks.store(pool, [1])
    assert [True] == blocks.right(pool, slots, [1])


def test_the_capacity_holds_on_real_bytes(disk: Disk, blocks: Blocks) -> None:
    tier = disk.open(capacity_bytes=3 * MIB)
    pool = blocks.pool(tier)
    slots = pool.allocate(1000)
    numbers = list(range(len(slots)))
    for start in range(0, len(slots), 7):
        part = numbers[start : start + 7]
        sources = [blocks.parts(number) for number in part]
        assert pool.write(slots[part], [blocks.identity(number) for number in part], sources).all()
        assert disk.real_bytes() <= 3 * MIB
    assert 100 < len(slots) < 1000
    assert 0 == len(pool.allocate(1))
    assert tier.used_bytes <= 3 * MIB
    assert all(blocks.right(pool, slots, numbers))


def test_the_index_stays_small_when_blocks_come_and_go(disk: Disk, blocks: Blocks) -> None:
    tier = disk.open(capacity_bytes=2 * MIB)
    pool = blocks.pool(tier)
    generator = np.random.default_rng(7)
    held: dict[int, int] = {}
    for number in range(400):
        slots = pool.allocate(1)
        if len(slots) == 0:
            for victim in generator.permutation(sorted(held))[:20].tolist():
                pool.free(np.array([held.pop(victim)], dtype=np.uint32))
            slots = pool.allocate(1)
        assert pool.write(slots, [blocks.identity(number)], [blocks.parts(number)]).all()
        held[number] = int(slots[0])
        assert disk.real_bytes() <= 2 * MIB
    assert all(blocks.right(pool, np.array(list(held.values()), dtype=np.uint32), list(held)))


def test_a_slab_given_back_frees_its_file_for_another_namespace(disk: Disk, blocks_of: Callable[..., Blocks]) -> None:
    tier = disk.open(capacity_bytes=2 * MIB)
    pool, other = blocks_of().pool(tier), blocks_of(ns_id=b"o" * 16, part_sizes=(9000,)).pool(tier)
    slots = pool.allocate(1000)
    assert 0 == len(other.allocate(1))
    last = pool.ranges()[-1]
    assert not pool.give_back(last)
    pool.free(slots[slots >= last.first])
    before = len(disk.slab_paths())
    assert pool.give_back(last)
    assert not pool.give_back(last)
    assert before - 1 == len(disk.slab_paths())
    assert 0 < len(other.allocate(1))


def test_a_free_floor_is_left_on_the_file_system(disk: Disk, blocks: Blocks) -> None:
    tier = disk.open(free_floor_bytes=1 << 60)
    assert 0 == len(blocks.pool(tier).allocate(1))
    assert 1 == tier.faults["free_floor"]


def test_threads_never_read_another_threads_block(disk: Disk, blocks: Blocks) -> None:
    tier = disk.open(capacity_bytes=2 * MIB)
    pool = blocks.pool(tier)
    failures: list[str] = []

    def work(first: int) -> None:
        for number in range(first, first + 60, 3):
            slots = pool.allocate(3)
            numbers = list(range(number, number + len(slots)))
            stored = pool.write(slots, [blocks.identity(n) for n in numbers], [blocks.parts(n) for n in numbers])
            if not stored.all() or not all(blocks.right(pool, slots, numbers)):
                failures.append(f"blocks {numbers} were not stored and read")
            pool.free(slots)

    threads = [threading.Thread(target=work, args=(index * 1000,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [] == failures
    assert (0, 0, {}) == (pool.used_slots, tier.busy_buffers, tier.faults)


def test_a_second_process_is_told_who_holds_the_directory(disk: Disk) -> None:
    disk.open()
    code = (
        "import sys; from kvstore.tiers.disk import DiskTier; from kvstore.errors import DirectoryLockedError\n"
        "try: DiskTier.open(sys.argv[1], capacity_bytes=1 << 20)\n"
        "except DirectoryLockedError as error: print(error)"
    )
    command = [sys.executable, "-P", "-c", code, str(disk.path)]
    child = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"process {os.getpid()}" in child.stdout


def test_the_same_process_cannot_open_it_twice_either(disk: Disk) -> None:
    tier = disk.open()
    with pytest.raises(DirectoryLockedError):
        disk.open()
    tier.close()
    disk.open()


def test_the_secret_is_made_once_and_private(disk: Disk) -> None:
    tier = disk.open()
    secret = tier.node_secret
    tier.close()
    assert (32, secret) == (len(secret), disk.open().node_secret)
    assert 0o600 == (disk.path / "secret").stat().st_mode & 0o777


def test_starts_are_counted(disk: Disk) -> None:
    counts = []
    for _ in range(3):
        tier = disk.open()
        counts.append(tier.start_count)
        tier.close()
    assert [1, 2, 3] == counts


@pytest.mark.parametrize(
    ("name", "offset", "content"),
    [
        ("superblock", 0, b"SOMEBODY"),
        ("superblock", 8, b"\x04"),
        ("superblock", 20, b"\xff"),
        ("slabs/slab-00000000.kvs", 8, b"\x03"),
        ("secret", 32, b"x"),
    ],
)
def test_a_foreign_newer_or_damaged_format_is_refused_by_name(
    disk: Disk, blocks: Blocks, name: str, offset: int, content: bytes
) -> None:
    tier = disk.open()
    blocks.store(blocks.pool(tier), [1])
    tier.close()
    with (disk.path / name).open("r+b") as file:
        file.seek(offset)
        file.write(content)
    with pytest.raises(StorageFormatError, match=name):
        disk.open()
    assert (disk.path / name).exists()


def test_a_path_that_is_no_directory_is_a_storage_error_in_one_line(disk: Disk) -> None:
    disk.path.write_bytes(b"")
    with pytest.raises(StorageError, match="cannot use the data directory") as caught:
        disk.open()
    assert "\n" not in str(caught.value)


def test_a_closed_tier_raises(disk: Disk, blocks: Blocks) -> None:
    tier = disk.open()
    pool = blocks.pool(tier)
    slots = blocks.store(pool, [1])
    tier.close()
    tier.close()
    with pytest.raises(ClosedError):
        blocks.pool(tier)
    for call in (partial(blocks.right, pool, slots, [1]), partial(tier.clear, blocks.ns_id), tier.flush):
        with pytest.raises(ClosedError):
            call()


def test_a_closed_tier_leaves_the_directory_to_others(disk: Disk, blocks: Blocks) -> None:
    tier = disk.open()
    pool = blocks.pool(tier)
    pool.free(blocks.store(pool, [1]))
    tier.close()
    before = {path: path.stat().st_mtime_ns for path in disk.path.rglob("*")}
    assert pool.give_back(pool.ranges()[0])
    assert 0 == len(pool.allocate(1))
    assert before == {path: path.stat().st_mtime_ns for path in disk.path.rglob("*")}


def test_a_file_system_without_direct_io_works_too(disk: Disk, blocks: Blocks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.tiers.slab_volume._direct_io_works", lambda io, probe: False)
    tier = disk.open()
    pool = blocks.pool(tier)
    assert not tier.direct_io
    assert [True, True] == blocks.right(pool, blocks.store(pool, [1, 2]), [1, 2])
