"""Payloads of whole pages in page-aligned memory are read and written where they lie, and verified all the same."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvstore.testing.faulty import FaultyIo, IoCall
from kvstore.tiers import transfer
from kvstore.tiers.buffers import PAGE_BYTES, aligned_bytes, page_aligned
from kvstore.tiers.file_io import PIECES_MAX, SystemIo

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from conftest import Blocks, Disk

    from kvstore.tiers.base import Bytes1D, Bytes2D
    from kvstore.tiers.disk_pool import DiskPool
    from kvstore.types import Slots

NUMBERS = list(range(12))
PART_SIZES = [(8192,), (4096, 8192), (4096, 100, 8192), (100, 4096), tuple([4096] * 40)]


class WatchedIo(SystemIo):
    """The system's calls, with a look at the pieces of memory of each."""

    def __init__(self) -> None:
        self.pieces_max = 0
        self.before_write: Callable[[Sequence[Bytes1D]], None] = lambda pieces: None

    def read(self, fd: int, pieces: Sequence[Bytes1D], offset: int) -> int:
        self.pieces_max = max(self.pieces_max, len(pieces))
        return super().read(fd, pieces, offset)

    def write(self, fd: int, pieces: Sequence[Bytes1D], offset: int) -> int:
        self.pieces_max = max(self.pieces_max, len(pieces))
        self.before_write(pieces)
        return super().write(fd, pieces, offset)


def aligned(content: Bytes2D) -> Bytes2D:
    memory = aligned_bytes(content.size).reshape(content.shape)
    memory[:] = content
    return memory


def write(blocks: Blocks, pool: DiskPool, rows: Bytes2D) -> Slots:
    slots = pool.allocate(len(rows))
    edges = np.cumsum(blocks.part_sizes)[:-1]
    identities = [blocks.identity(number) for number in NUMBERS]
    assert pool.write(slots, identities, [np.split(row, edges) for row in rows]).all()
    return slots


@pytest.mark.parametrize("part_sizes", PART_SIZES)
def test_blocks_come_back_byte_equal_from_and_into_aligned_memory(
    disk: Disk, blocks_of: Callable[..., Blocks], part_sizes: tuple[int, ...]
) -> None:
    blocks = blocks_of(part_sizes=part_sizes)
    io = WatchedIo()
    pool = blocks.pool(disk.open(io=io))
    expected = blocks.rows(NUMBERS)
    slots = write(blocks, pool, aligned(expected))
    assert (part_sizes[0] % PAGE_BYTES == 0) == (io.pieces_max > 1)
    assert io.pieces_max <= PIECES_MAX
    identities = [blocks.identity(number) for number in NUMBERS]
    rows = aligned(np.zeros_like(expected))
    assert pool.read(slots, identities, rows).all()
    np.testing.assert_array_equal(expected, rows)
    start = 0
    for part, size in enumerate(part_sizes):
        target = aligned(np.zeros((len(NUMBERS), size), dtype=np.uint8))
        assert pool.read(slots, identities, target, part=part).all()
        np.testing.assert_array_equal(expected[:, start : start + size], target)
        start += size
    assert [True] * len(NUMBERS) == blocks.right(pool, slots, NUMBERS)


def test_more_pieces_than_one_call_takes_are_copied(
    disk: Disk, blocks_of: Callable[..., Blocks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "PIECES_MAX", 8)
    io = WatchedIo()
    blocks = blocks_of(part_sizes=(4096, 4096))
    pool = blocks.pool(disk.open(io=io, io_threads=1))
    expected = blocks.rows(NUMBERS)
    slots = write(blocks, pool, aligned(expected))
    rows = aligned(np.zeros_like(expected))
    assert pool.read(slots, [blocks.identity(number) for number in NUMBERS], rows).all()
    np.testing.assert_array_equal(expected, rows)
    assert io.pieces_max <= 8


def test_a_source_that_changes_while_it_is_written_is_a_miss(disk: Disk, blocks_of: Callable[..., Blocks]) -> None:
    io = WatchedIo()
    blocks = blocks_of(part_sizes=(8192,))
    tier = disk.open(io=io, io_threads=1)
    pool = blocks.pool(tier)
    rows = aligned(blocks.rows(NUMBERS))

    def stomp(pieces: Sequence[Bytes1D]) -> None:
        rows[3, 100] ^= 1
        io.before_write = lambda pieces: None

    slots = pool.allocate(len(NUMBERS))
    io.before_write = stomp
    identities = [blocks.identity(number) for number in NUMBERS]
    assert pool.write(slots, identities, [(row,) for row in rows]).all()
    assert [number != 3 for number in NUMBERS] == blocks.right(pool, slots, NUMBERS)
    assert {"corrupt_payload": 1} == tier.faults


@pytest.mark.parametrize("fault", ["error", "short", "flipped", "torn"])
def test_what_is_not_whole_is_a_miss_in_place_too(disk: Disk, blocks_of: Callable[..., Blocks], fault: str) -> None:
    io = FaultyIo()
    blocks = blocks_of(part_sizes=(8192, 4096))
    pool = blocks.pool(disk.open(io=io, io_threads=1))
    slot_bytes = pool.slot_bytes
    if fault == "torn":
        io.tear(3 * slot_bytes + 5000, skip=1)  # the first write is the slab's header
    slots = write(blocks, pool, aligned(blocks.rows(NUMBERS)))
    bad = set(NUMBERS[3:])
    if fault == "error":
        io.fail(IoCall.READ, errno.EIO)
        io.fail(IoCall.READ, errno.EIO, skip=3)
        bad = {3}
    elif fault == "short":
        io.shorten(IoCall.READ, 3 * slot_bytes + 5000)
    elif fault == "flipped":
        flip(disk.slab_paths()[0], PAGE_BYTES + 3 * slot_bytes + PAGE_BYTES + 8000)
        bad = {3}
    rows = aligned(np.zeros((len(NUMBERS), 12288), dtype=np.uint8))
    good = pool.read(slots, [blocks.identity(number) for number in NUMBERS], rows)
    assert [number not in bad for number in NUMBERS] == good.tolist()
    np.testing.assert_array_equal(blocks.rows(NUMBERS)[good], rows[good])


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_memory_is_aligned_if_address_length_and_step_are_whole_pages() -> None:
    memory = aligned_bytes(8 * PAGE_BYTES)
    assert page_aligned(memory)
    assert page_aligned(memory.reshape(4, -1)[:, PAGE_BYTES:])
    assert not page_aligned(memory[1 : PAGE_BYTES + 1])
    assert not page_aligned(memory[:100])
    assert not page_aligned(memory[: 7 * (PAGE_BYTES + 512)].reshape(7, -1)[:, :PAGE_BYTES])
