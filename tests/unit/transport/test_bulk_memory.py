"""Memory that engines move: registered once, forgotten with its mapping, lent to one call at a time."""

from __future__ import annotations

import gc
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import BulkEngineError, ClosedError, UnavailableError
from kvstore.testing.vm_engine import VmEngine
from kvstore.tiers.checksum import digest
from kvstore.tiers.extent import Extent, geometry
from kvstore.tiers.huge_pages import PageChoice, PageKind
from kvstore.transport.bulk import Move
from kvstore.transport.bulk_memory import Landing, RegisteredMemory, RowDigests, address_of, whole_memory

PIECE_BYTES = 4096


@pytest.fixture
def engine() -> VmEngine:
    return VmEngine()


def test_a_mapping_is_registered_once_and_whole(engine: VmEngine):
    memory = RegisteredMemory(engine)
    rows = np.zeros((8, 100), dtype=np.uint8)

    first = memory.moves([rows[2].data, rows[5:7].reshape(-1).data], remote=1000)
    memory.moves([rows[0].data], remote=0)

    begin = rows.ctypes.data
    assert [Move(begin + 200, 1000, 100), Move(begin + 500, 1100, 200)] == first
    assert engine.is_known(begin, 800)
    assert 1 == engine.regions


def test_a_mapping_that_is_gone_is_forgotten_before_anything_else_is_moved(engine: VmEngine):
    memory = RegisteredMemory(engine)
    rows, others = np.zeros(100, dtype=np.uint8), np.zeros(100, dtype=np.uint8)
    memory.moves([rows.data], remote=0)
    gone = rows.ctypes.data
    del rows
    gc.collect()
    assert 0 == memory.count

    memory.moves([others.data], remote=0)

    assert gone == others.ctypes.data or not engine.is_known(gone, 100)
    assert (1, 1) == (memory.count, engine.regions)


def test_all_memory_can_be_taken_back(engine: VmEngine):
    memory = RegisteredMemory(engine)
    kept = [np.zeros(100, dtype=np.uint8) for _ in range(3)]
    memory.moves([array.data for array in kept], remote=0)
    assert 3 == engine.regions
    memory.clear()
    assert (0, 0) == (memory.count, engine.regions)


def test_the_memory_of_an_extent_ends_where_the_extent_does():
    extent = Extent(16 * PIECE_BYTES, PageChoice(PageKind.PLAIN, ""))
    extent.cut(geometry((PIECE_BYTES,), 3))

    memory = whole_memory(extent.regions[0][1].data)

    assert (extent.address, extent.nbytes) == (memory.ctypes.data, memory.nbytes)
    assert address_of(extent.regions[0][1].data) == extent.address + PIECE_BYTES
    extent.close()


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 300), st.integers(1, 12), st.lists(st.integers(1, 700), max_size=12))
def test_digests_are_those_of_whole_rows_however_they_are_cut(row_bytes: int, rows: int, sizes: list[int]):
    data = np.random.default_rng(rows).integers(0, 256, row_bytes * rows, dtype=np.uint8).tobytes()
    cuts = [0, *itertools.takewhile(lambda end: end < len(data), itertools.accumulate(sizes)), len(data)]
    digests = RowDigests(row_bytes)

    found = [value for begin, end in itertools.pairwise(cuts) for value in digests.take(memoryview(data)[begin:end])]

    assert [digest(data[row * row_bytes : (row + 1) * row_bytes]) for row in range(rows)] == found


@pytest.fixture
def landing(engine: VmEngine) -> Landing:
    return Landing(engine, piece_bytes=PIECE_BYTES, pieces=2)


def test_no_two_calls_have_the_same_piece(landing: Landing):
    with landing.piece() as first, landing.piece() as second, landing.piece() as third:
        assert first is not None
        assert second is not None
        assert third is None
        assert PIECE_BYTES <= abs(first.ctypes.data - second.ctypes.data)
    assert 2 == landing.free_pieces


@pytest.mark.parametrize(
    ("error", "left"),
    [
        (ClosedError("refused before anything moved"), 2),
        (BulkEngineError("broke off"), 1),
        (UnavailableError("no answer"), 1),
        (KeyboardInterrupt(), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_piece_is_never_used_again_if_somebody_may_still_write_to_it(
    landing: Landing, error: BaseException, left: int
):
    with pytest.raises(type(error)), landing.piece():
        raise error
    assert left == landing.free_pieces


def test_a_closed_landing_is_known_to_no_engine(engine: VmEngine, landing: Landing):
    assert 1 == engine.regions
    landing.close()
    landing.close()
    assert 0 == engine.regions
