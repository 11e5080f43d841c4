from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import lmdb
import numpy as np
import pytest

from kvstore.testing.faulty import FaultyIo
from kvstore.tiers import disk_opening, manifest

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Blocks, Disk

    from kvstore.tiers.disk import DiskTier

MIB = 1 << 20


def lose_index(disk: Disk) -> None:
    shutil.rmtree(disk.path / "index")


def keep_index(disk: Disk) -> None:
    assert (disk.path / "index").exists()


HOW = pytest.mark.parametrize("damage", [keep_index, lose_index])


def reopened(disk: Disk, tier: DiskTier, damage: Callable[[Disk], None]) -> DiskTier:
    tier.close()
    damage(disk)
    return disk.open()


@HOW
def test_every_block_is_found_again(disk: Disk, blocks: Blocks, damage: Callable[[Disk], None]) -> None:
    tier = disk.open()
    blocks.store(blocks.pool(tier), list(range(200)))
    tier = reopened(disk, tier, damage)
    assert [200] == [namespace.blocks for namespace in tier.recovered_namespaces()]
    assert dict.fromkeys(range(200), True) == blocks.recovered(tier)
    assert [] == tier.recovered_namespaces()


@HOW
def test_recovered_blocks_are_handed_over_once_and_count_as_used(
    disk: Disk, blocks: Blocks, damage: Callable[[Disk], None]
) -> None:
    tier = disk.open()
    blocks.store(blocks.pool(tier), [1, 2, 3])
    tier = reopened(disk, tier, damage)
    pool = blocks.pool(tier)
    assert 3 == pool.used_slots
    found = tier.recovered(blocks.ns_id)
    assert [] == tier.recovered(blocks.ns_id)
    pool.free(np.array([block.slot for block in found], dtype=np.uint32))
    assert 0 == pool.used_slots


@HOW
def test_freed_blocks_do_not_come_back(disk: Disk, blocks: Blocks, damage: Callable[[Disk], None]) -> None:
    tier = disk.open()
    pool = blocks.pool(tier)
    slots = blocks.store(pool, list(range(10)))
    pool.free(slots[3:7])
    tier = reopened(disk, tier, damage)
    assert dict.fromkeys([0, 1, 2, 7, 8, 9], True) == blocks.recovered(tier)


@HOW
def test_a_reused_slot_gives_its_last_block(disk: Disk, blocks: Blocks, damage: Callable[[Disk], None]) -> None:
    tier = disk.open()
    pool = blocks.pool(tier)
    pool.free(blocks.store(pool, [1, 2]))
    blocks.store(pool, [3, 4])
    tier = reopened(disk, tier, damage)
    assert {3: True, 4: True} == blocks.recovered(tier)


@HOW
def test_cleared_blocks_never_come_back_and_new_ones_do(
    disk: Disk, blocks: Blocks, damage: Callable[[Disk], None]
) -> None:
    tier = disk.open()
    pool = blocks.pool(tier)
    old = blocks.store(pool, [1, 2])
    tier.clear(blocks.ns_id)
    assert [True, True] == blocks.right(pool, old, [1, 2]), "a reader in the middle goes on"
    new = blocks.store(pool, [3])
    assert [True] == blocks.right(pool, new, [3])
    tier = reopened(disk, tier, damage)
    assert {3: True} == blocks.recovered(tier)


@HOW
def test_clearing_before_blocks_are_taken_frees_them(
    disk: Disk, blocks: Blocks, damage: Callable[[Disk], None]
) -> None:
    tier = disk.open()
    blocks.store(blocks.pool(tier), [1, 2])
    tier = reopened(disk, tier, damage)
    tier.clear(blocks.ns_id)
    assert ([], 0) == (tier.recovered(blocks.ns_id), blocks.pool(tier).used_slots)
    assert {} == blocks.recovered(reopened(disk, tier, damage))


@HOW
def test_namespaces_are_recovered_apart(
    disk: Disk, blocks_of: Callable[..., Blocks], damage: Callable[[Disk], None]
) -> None:
    first, second = blocks_of(), blocks_of(part_sizes=(7000,), block_tokens=32, ns_id=b"o" * 16)
    tier = disk.open()
    first.store(first.pool(tier), [1, 2])
    second.store(second.pool(tier), [1, 5])
    tier = reopened(disk, tier, damage)
    found = {item.ns_id: (item.part_sizes, item.block_tokens) for item in tier.recovered_namespaces()}
    assert {first.ns_id: ((5000, 333), 16), second.ns_id: ((7000,), 32)} == found
    assert {1: True, 2: True} == first.recovered(tier)
    assert {1: True, 5: True} == second.recovered(tier)


@HOW
def test_of_two_copies_the_last_is_found_and_the_other_never_again(
    disk: Disk, blocks: Blocks, damage: Callable[[Disk], None]
) -> None:
    tier = disk.open()
    pool = blocks.pool(tier)
    blocks.store(pool, [1])
    second = int(blocks.store(pool, [1])[0])
    tier = reopened(disk, tier, damage)
    (found,) = tier.recovered(blocks.ns_id)
    assert second == found.slot
    pool = blocks.pool(tier)
    assert 1 == pool.used_slots
    pool.free(np.array([found.slot], dtype=np.uint32))
    tier.close()
    lose_index(disk)
    assert {} == blocks.recovered(disk.open())


@HOW
def test_sequences_rise_over_restarts(disk: Disk, blocks: Blocks, damage: Callable[[Disk], None]) -> None:
    tier = disk.open()
    blocks.store(blocks.pool(tier), [1])
    tier = reopened(disk, tier, damage)
    blocks.store(blocks.pool(tier), [2])
    tier = reopened(disk, tier, damage)
    found = {blocks.number(block.identity): block.sequence for block in tier.recovered(blocks.ns_id)}
    assert found[1] < found[2]


def test_a_block_is_rebuilt_only_with_the_headers_of_all_parts(disk: Disk, blocks: Blocks) -> None:
    tier = disk.open()
    pool = blocks.pool(tier)
    blocks.store(pool, [1, 2])
    slab = pool.slabs[0]
    second_part = slab.slot_offset(0) + slab.geometry.part_offsets[1]
    tier.close()
    with slab.path.open("r+b") as file:
        file.seek(second_part)
        file.write(bytes(100))
    lose_index(disk)
    assert {2: True} == blocks.recovered(disk.open())


def test_parts_of_different_writes_are_no_block(disk: Disk, blocks: Blocks) -> None:
    tier = disk.open()
    pool = blocks.pool(tier)
    slots = blocks.store(pool, [1])
    slab = pool.slabs[0]
    offset, length = slab.geometry.span((1,))
    start = slab.slot_offset(0) + offset
    old_part = slab.path.read_bytes()[start : start + length]
    pool.free(slots)
    assert slots.tolist() == blocks.store(pool, [1]).tolist()
    tier.close()
    with slab.path.open("r+b") as file:
        file.seek(start)
        file.write(old_part)
    lose_index(disk)
    assert {} == blocks.recovered(disk.open())


def test_a_smaller_capacity_drops_whole_slabs_before_serving(disk: Disk, blocks: Blocks) -> None:
    tier = disk.open(capacity_bytes=4 * MIB)
    pool = blocks.pool(tier)
    blocks.store(pool, list(range(120)))
    slab_numbers = [slab.number for slab in pool.slabs]
    tier.close()
    tier = disk.open(capacity_bytes=2 * MIB)
    kept = [slab.number for slab in blocks.pool(tier).slabs]
    assert slab_numbers[: len(kept)] == kept
    assert len(kept) < len(slab_numbers)
    assert disk.real_bytes() <= 2 * MIB
    found = blocks.recovered(tier)
    assert 0 < len(found) < 120
    assert all(found.values())


def test_without_a_superblock_nothing_is_served(disk: Disk, blocks: Blocks) -> None:
    tier = disk.open()
    blocks.store(blocks.pool(tier), [1])
    tier.close()
    (disk.path / "superblock").unlink()
    assert {} == blocks.recovered(disk.open())
    assert [] == disk.slab_paths()


def zero_pages(path: os.PathLike[str], first: int) -> None:
    with open(path, "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        for offset in range(first * 4096, size, 4096):
            file.seek(offset)
            file.write(bytes(4096))


@pytest.mark.parametrize("first_page", [0, 1, 2, 3, 5])
def test_an_index_with_zeroed_pages_is_rebuilt(disk: Disk, blocks: Blocks, first_page: int) -> None:
    tier = disk.open()
    blocks.store(blocks.pool(tier), list(range(60)))
    tier.close()
    zero_pages(disk.path / "index" / "data.mdb", first_page)
    found = blocks.recovered(disk.open())
    assert dict.fromkeys(range(60), True) == found


def test_an_index_of_noise_is_rebuilt(disk: Disk, blocks: Blocks) -> None:
    tier = disk.open()
    blocks.store(blocks.pool(tier), list(range(60)))
    tier.close()
    path = disk.path / "index" / "data.mdb"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:8192] + np.random.default_rng(3).bytes(size - 8192))
    tier = disk.open()
    assert dict.fromkeys(range(60), True) == blocks.recovered(tier)
    assert 1 == tier.faults["lost_index"]


@pytest.mark.parametrize("kind", ["of another slot", "odd key", "damaged", "beyond the slab"])
def test_a_row_that_cannot_be_means_a_rebuild(disk: Disk, blocks: Blocks, kind: str) -> None:
    tier = disk.open()
    blocks.store(blocks.pool(tier), [1, 2])
    tier.close()
    with lmdb.open(str(disk.path / "index"), lock=False) as env, env.begin(write=True) as transaction:
        value = transaction.get(manifest.row_key(0, 1))
        key, row = {
            "of another slot": (manifest.row_key(0, 0), value),
            "odd key": (b"odd", value),
            "damaged": (manifest.row_key(0, 7), value[:-1] + b"\0"),
            "beyond the slab": (manifest.row_key(0, 1 << 20), value),
        }[kind]
        transaction.put(key, row)
    tier = disk.open()
    assert {1: True, 2: True} == blocks.recovered(tier)
    assert {"lost_index": 1} == tier.faults


def test_rows_of_a_slab_that_is_gone_are_ignored(disk: Disk, blocks: Blocks) -> None:
    tier = disk.open()
    blocks.store(blocks.pool(tier), [1, 2])
    tier.close()
    with lmdb.open(str(disk.path / "index"), lock=False) as env, env.begin(write=True) as transaction:
        transaction.put(manifest.row_key(9, 1), transaction.get(manifest.row_key(0, 1)))
    tier = disk.open()
    assert {1: True, 2: True} == blocks.recovered(tier)
    assert {} == tier.faults


@pytest.mark.parametrize("seed", range(6))
def test_bits_flipped_anywhere_in_the_index_cost_no_right_answer(disk: Disk, blocks: Blocks, seed: int) -> None:
    tier = disk.open()
    blocks.store(blocks.pool(tier), list(range(60)))
    tier.close()
    generator = np.random.default_rng(seed)
    path = disk.path / "index" / "data.mdb"
    content = np.frombuffer(path.read_bytes(), dtype=np.uint8).copy()
    places = generator.integers(0, len(content), 1 + 40 * seed)
    content[places] ^= (1 << generator.integers(0, 8, len(places))).astype(np.uint8)
    path.write_bytes(content.tobytes())
    found = blocks.recovered(disk.open())
    assert all(found.values())
    assert set(found) <= set(range(60))


def test_an_index_of_another_version_is_rebuilt(disk: Disk, blocks: Blocks) -> None:
    tier = disk.open()
    blocks.store(blocks.pool(tier), [1, 2])
    tier.close()
    with (disk.path / "index" / "data.mdb").open("r+b") as file:
        for page in (0, 1):  # both of LMDB's meta pages, behind the page header and the magic number
            file.seek(page * 4096 + 16 + 4)
            file.write(b"\x63")
    tier = disk.open()
    assert {1: True, 2: True} == blocks.recovered(tier)
    assert {"lost_index": 1} == tier.faults


def test_a_reader_that_hangs_or_dies_means_a_rebuild(
    disk: Disk, blocks: Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = disk.open()
    blocks.store(blocks.pool(tier), [1])
    tier.close()

    def hang(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("reader", 1)

    monkeypatch.setattr(subprocess, "run", hang)
    assert {1: True} == blocks.recovered(disk.open())


def test_after_another_boot_without_a_clean_stop_the_index_is_not_opened(
    disk: Disk, blocks: Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    io = FaultyIo()
    tier = disk.open(io=io)
    pool = blocks.pool(tier)
    blocks.store(pool, [1, 2])
    tier.flush()
    blocks.store(pool, [3, 4])
    io.cut_power()
    tier.close()
    monkeypatch.setattr(disk_opening, "boot_id", lambda: b"another boot 123")
    monkeypatch.setattr(disk_opening, "read_rows", lambda path: pytest.fail("the index was opened"))
    tier = disk.open()
    assert {1: True, 2: True} == blocks.recovered(tier)
    assert 1 == tier.faults["lost_index"]


def test_after_a_clean_stop_another_boot_trusts_the_index(
    disk: Disk, blocks: Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = disk.open()
    blocks.store(blocks.pool(tier), [1])
    tier.close()
    monkeypatch.setattr(disk_opening, "boot_id", lambda: b"another boot 123")
    tier = disk.open()
    assert {1: True} == blocks.recovered(tier)
    assert {} == tier.faults


def test_slabs_of_a_cleared_namespace_go_at_the_next_start(disk: Disk, blocks: Blocks) -> None:
    tier = disk.open()
    blocks.store(blocks.pool(tier), [1, 2, 3])
    tier.clear(blocks.ns_id)
    tier.close()
    assert disk.slab_paths()
    disk.open()
    assert [] == disk.slab_paths()
