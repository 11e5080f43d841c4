"""Whatever happens to the slab files, a read gives the right bytes or a miss, never other bytes."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Blocks, Disk

    from kvstore.tiers.disk_pool import DiskPool

MIB = 1 << 20
NUMBERS = list(range(12))


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def interesting_offsets(pool: DiskPool, slot: int) -> list[tuple[int, bool]]:
    """Offsets in the slab file of a slot, and whether a flip there concerns the block (padding does not)."""
    slab = pool.slabs[0]
    offsets = []
    for part, part_offset in enumerate(slab.geometry.part_offsets):
        start = slab.slot_offset(slot) + part_offset
        payload = start + slab.geometry.header_bytes
        size = slab.geometry.part_sizes[part]
        inside = (*range(start, start + 136 + 64 + 8, 7), payload, payload + size // 2, payload + size - 1)
        offsets += [(offset, True) for offset in inside]
        offsets += [(payload - 1, False), (payload + size, False)]
    return offsets


def test_a_flipped_bit_is_a_miss_for_that_block_alone(disk: Disk, blocks: Blocks) -> None:
    tier = disk.open()
    pool = blocks.pool(tier)
    slots = blocks.store(pool, NUMBERS)
    path = pool.slabs[0].path
    for offset, concerned in interesting_offsets(pool, 5):
        flip(path, offset)
        expected = [number != 5 or not concerned for number in NUMBERS]
        assert expected == blocks.right(pool, slots, NUMBERS), offset
        flip(path, offset)
    assert [True] * 12 == blocks.right(pool, slots, NUMBERS)
    assert {"corrupt_header", "corrupt_payload"} == set(tier.faults)


def test_a_truncated_slab_misses_what_was_cut_and_keeps_the_rest(disk: Disk, blocks: Blocks) -> None:
    tier = disk.open()
    pool = blocks.pool(tier)
    slots = blocks.store(pool, NUMBERS)
    slab = pool.slabs[0]
    with slab.path.open("r+b") as file:
        file.truncate(slab.slot_offset(4) + slab.geometry.slot_bytes // 2 // 4096 * 4096)
    assert [number < 4 for number in NUMBERS] == blocks.right(pool, slots, NUMBERS)
    assert 8 == tier.faults["short_read"]


def test_a_truncated_slab_is_served_after_a_restart_too(disk: Disk, blocks: Blocks) -> None:
    tier = disk.open()
    pool = blocks.pool(tier)
    blocks.store(pool, NUMBERS)
    slab = pool.slabs[0]
    tier.close()
    with slab.path.open("r+b") as file:
        file.truncate(slab.slot_offset(4))
    assert {number: number < 4 for number in NUMBERS} == blocks.recovered(disk.open())


def test_blocks_of_a_deleted_slab_are_forgotten(disk: Disk, blocks: Blocks) -> None:
    tier = disk.open(capacity_bytes=MIB)
    pool = blocks.pool(tier)
    blocks.store(pool, NUMBERS)
    lost = pool.slabs[0]
    kept = NUMBERS[lost.header.slot_count :]
    tier.close()
    lost.path.unlink()
    assert dict.fromkeys(kept, True) == blocks.recovered(disk.open(capacity_bytes=MIB))


def test_a_slab_replaced_by_another_is_dropped(disk: Disk, blocks: Blocks) -> None:
    tier = disk.open(capacity_bytes=MIB)
    pool = blocks.pool(tier)
    blocks.store(pool, NUMBERS)
    first, second = pool.slabs[:2]
    tier.close()
    shutil.copyfile(first.path, second.path)
    tier = disk.open(capacity_bytes=MIB)
    found = blocks.recovered(tier)
    assert 1 == tier.faults["dropped_slab"]
    assert set(NUMBERS[: first.header.slot_count]) <= set(found)
    assert all(found.values())


def test_slots_exchanged_on_disk_are_misses(disk: Disk, blocks: Blocks) -> None:
    tier = disk.open()
    pool = blocks.pool(tier)
    slots = blocks.store(pool, NUMBERS)
    slab = pool.slabs[0]
    with slab.path.open("r+b") as file:
        file.seek(slab.slot_offset(1))
        content = file.read(2 * slab.geometry.slot_bytes)
        file.seek(slab.slot_offset(1))
        file.write(content[slab.geometry.slot_bytes :] + content[: slab.geometry.slot_bytes])
    assert [number not in (1, 2) for number in NUMBERS] == blocks.right(pool, slots, NUMBERS)
    assert {"other_block": 2} == tier.faults


def test_an_older_block_put_back_into_its_slot_is_a_miss(disk: Disk, blocks: Blocks) -> None:
    pool = blocks.pool(disk.open())
    slots = blocks.store(pool, [1])
    slab = pool.slabs[0]
    old = slab.path.read_bytes()
    pool.free(slots)
    slots = blocks.store(pool, [1])
    slab.path.write_bytes(old)
    assert [False] == blocks.right(pool, slots, [1])


@pytest.mark.parametrize("seed", range(5))
def test_noise_in_a_slab_never_gives_other_bytes(disk: Disk, blocks: Blocks, seed: int) -> None:
    generator = np.random.default_rng(seed)
    tier = disk.open()
    pool = blocks.pool(tier)
    slots = blocks.store(pool, NUMBERS)
    slab = pool.slabs[0]
    content = np.fromfile(slab.path, dtype=np.uint8)
    for _ in range(6):
        start = int(generator.integers(4096, slab.slot_offset(len(NUMBERS))))
        content[start : start + 300] = generator.integers(0, 256, 300, dtype=np.uint8)
    content.tofile(slab.path)
    good = blocks.right(pool, slots, NUMBERS)
    assert sum(good) >= 6
    tier.close()
    shutil.rmtree(disk.path / "index")
    found = blocks.recovered(disk.open())
    assert all(found.get(number, False) for number in NUMBERS if good[number])


def test_a_slab_without_a_header_is_dropped(disk: Disk, blocks: Blocks) -> None:
    tier = disk.open()
    blocks.store(blocks.pool(tier), NUMBERS)
    tier.close()
    (path,) = disk.slab_paths()
    with path.open("r+b") as file:
        file.write(bytes(4096))
    tier = disk.open()
    assert {} == blocks.recovered(tier)
    assert not path.exists()
    assert 0 == blocks.pool(tier).used_slots


def test_leftovers_of_an_interrupted_start_are_removed(disk: Disk) -> None:
    disk.open().close()
    leftover = disk.path / "slabs" / "slab-00000007.kvs.new"
    leftover.write_bytes(bytes(10_000))
    disk.open()
    assert not leftover.exists()
