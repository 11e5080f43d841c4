"""Slots that cannot be used stay out of use, over restarts too, until a scrub finds that they work."""

from __future__ import annotations

import errno
import shutil
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvstore.testing.faulty import FaultyIo, IoCall
from kvstore.tiers import superblock
from kvstore.tiers.base import SlotRange
from kvstore.tiers.persistent import BadBlock, ScrubStep
from kvstore.tiers.superblock import load_superblock

if TYPE_CHECKING:
    from conftest import Blocks, Disk

    from kvstore.tiers.disk import DiskTier

NUMBERS = list(range(8))
LIMIT = 1 << 30
ALWAYS = 1 << 30


@pytest.fixture
def io() -> FaultyIo:
    return FaultyIo()


def quarantined(disk: Disk, blocks: Blocks, io: FaultyIo) -> DiskTier:
    """A tier with blocks 2 to 7, whose first two slots cannot be erased."""
    tier = disk.open(io=io)
    pool = blocks.pool(tier)
    slots = blocks.store(pool, NUMBERS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(pool), "_erase", lambda self, piece: np.zeros(piece.count, dtype=np.bool_))
        pool.free(slots[:2])
    assert 2 == tier.quarantined_slots
    return tier


@pytest.mark.parametrize("index", ["kept", "lost"])
def test_quarantine_lasts_and_what_could_not_be_erased_stays_away(
    disk: Disk, blocks: Blocks, io: FaultyIo, index: str
) -> None:
    quarantined(disk, blocks, io).close()
    for _ in range(2):
        if index == "lost":
            shutil.rmtree(disk.path / "index")
        tier = disk.open()
        assert dict.fromkeys(NUMBERS[2:], True) == blocks.recovered(tier)
        pool = blocks.pool(tier)
        assert (2, 6) == (pool.quarantined_slots, pool.used_slots)
        assert {0, 1}.isdisjoint(pool.allocate(1000).tolist())
        tier.close()


def test_a_scrub_frees_slots_that_work_again(disk: Disk, blocks: Blocks, io: FaultyIo) -> None:
    tier = quarantined(disk, blocks, io)
    io.fail(IoCall.WRITE, errno.EIO, times=ALWAYS)
    assert (6, 0) == (tier.scrub(0, LIMIT).blocks, tier.scrub(0, LIMIT).repaired_slots)
    assert 2 == tier.quarantined_slots
    io.heal()
    assert 2 == tier.scrub(0, LIMIT).repaired_slots
    assert (0, 6) == (tier.quarantined_slots, blocks.pool(tier).used_slots)
    assert [0, 1] == blocks.store(blocks.pool(tier), [100, 101]).tolist()
    tier.close()
    shutil.rmtree(disk.path / "index")
    tier = disk.open()
    assert dict.fromkeys([*NUMBERS[2:], 100, 101], True) == blocks.recovered(tier)
    assert 0 == tier.quarantined_slots


def test_quarantine_that_cannot_be_written_down_holds_until_the_stop(
    disk: Disk, blocks: Blocks, io: FaultyIo, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = disk.open(io=io)
    pool = blocks.pool(tier)
    slots = blocks.store(pool, NUMBERS)
    io.fail(IoCall.WRITE, errno.EIO, times=ALWAYS)
    pool.free(slots)
    io.heal()
    assert 8 == tier.quarantined_slots
    assert {*range(8)}.isdisjoint(pool.allocate(8).tolist())
    assert {"write_error": 9, "quarantined_slot": 8} == tier.faults


def test_the_list_is_bounded(disk: Disk, blocks: Blocks, io: FaultyIo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(superblock, "QUARANTINED_MAX", 1)
    quarantined(disk, blocks, io).close()
    found = load_superblock(disk.path / "superblock")
    assert found is not None
    assert {(0, 0)} == found.quarantined


def test_a_removed_slab_takes_its_entries_along(disk: Disk, blocks: Blocks, io: FaultyIo) -> None:
    quarantined(disk, blocks, io).close()
    for path in disk.slab_paths():
        path.unlink()
    assert 0 == disk.open().quarantined_slots


@pytest.mark.parametrize("fault", ["error", "short", "flipped"])
def test_what_cannot_be_read_is_named_and_nothing_else(disk: Disk, blocks: Blocks, io: FaultyIo, fault: str) -> None:
    tier = disk.open(io=io)
    pool = blocks.pool(tier)
    slots = blocks.store(pool, NUMBERS)
    bad = {int(slots[3])}
    if fault == "error":
        io.fail(IoCall.READ, errno.EIO)  # all together
        io.fail(IoCall.READ, errno.EIO, skip=3)  # and the fourth alone
    elif fault == "short":
        io.shorten(IoCall.READ, 3 * pool.slot_bytes + 100)
        bad = {int(slot) for slot in slots[3:]}
    else:
        slab = pool.slabs[0]
        with slab.path.open("r+b") as file:
            file.seek(slab.slot_offset(3) + slab.geometry.body_offsets[1])
            file.write(bytes([blocks.parts(3)[1][0] ^ 1]))
    step = tier.scrub(0, LIMIT)
    assert (8, bad) == (step.blocks, {block.slot for block in step.bad})
    assert {blocks.ns_id} == {block.ns_id for block in step.bad}
    assert 0 == tier.busy_buffers


def test_neighbours_that_are_bad_are_one_range() -> None:
    bad = tuple(BadBlock(ns_id, slot) for ns_id, slot in ((b"b", 4), (b"a", 3), (b"a", 1), (b"a", 2), (b"b", 9)))
    step = ScrubStep(9, 9, bad, 0, 0, None)
    assert [(b"a", SlotRange(1, 3)), (b"b", SlotRange(4, 1)), (b"b", SlotRange(9, 1))] == step.bad_ranges()


def test_a_bad_block_that_nobody_has_taken_yet_is_given_up(disk: Disk, blocks: Blocks) -> None:
    tier = disk.open()
    blocks.store(blocks.pool(tier), NUMBERS)
    tier.close()
    with disk.slab_paths()[0].open("r+b") as file:
        file.seek(4096 + 4096)
        file.write(bytes([blocks.row(0)[0] ^ 1]))
    tier = disk.open()
    assert 1 == len(tier.scrub(0, LIMIT).bad)
    assert dict.fromkeys(NUMBERS[1:], True) == blocks.recovered(tier)
    assert 7 == blocks.pool(tier).used_slots


def test_behind_the_last_position_there_is_nothing_to_read(disk: Disk, blocks: Blocks) -> None:
    tier = disk.open()
    blocks.store(blocks.pool(tier), NUMBERS)
    for after in (1 << 62, 2**64 - 1):
        step = tier.scrub(after, LIMIT)
        assert (0, 0, None) == (step.blocks, step.read_bytes, step.next_after)
    tier.close()
