from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidBufferError
from kvstore.transport.rows import RowAssembler, whole_rows_bytes


def one_row(row_bytes: int) -> np.ndarray:
    return np.empty(row_bytes, dtype=np.uint8)


@given(
    row_bytes=st.integers(1, 9),
    rows=st.integers(0, 12),
    cuts=st.lists(st.integers(0, 108), max_size=8),
)
def test_frames_cut_anywhere_give_the_same_rows(row_bytes: int, rows: int, cuts: list[int]):
    data = bytes(index % 251 for index in range(row_bytes * rows))
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    assembler = RowAssembler(one_row(row_bytes), rows)
    got = [piece.copy() for begin, end in pairwise(edges) for piece in assembler.feed(data[begin:end])]
    assembler.finish()
    assert data == b"".join(piece.tobytes() for piece in got)
    assert all(piece.shape[1] == row_bytes and len(piece) for piece in got)


def test_whole_rows_are_handed_out_in_place():
    frame = np.frombuffer(b"0aaaabbbb1", dtype=np.uint8)
    assembler = RowAssembler(one_row(4), 4)
    list(assembler.feed(b"000"))
    cut, whole = assembler.feed(frame.data)
    assert not np.shares_memory(cut, frame)
    assert np.shares_memory(whole, frame)
    assert whole.tobytes() == b"aaaabbbb"


@pytest.mark.parametrize(("first", "second", "extra"), [(b"", b"12345", 1), (b"123", b"456", 2), (b"1234", b"5", 1)])
def test_bytes_behind_the_last_row_are_refused(first: bytes, second: bytes, extra: int):
    assembler = RowAssembler(one_row(4), 1)
    list(assembler.feed(first))
    with pytest.raises(InvalidBufferError, match=f"{extra} bytes more"):
        list(assembler.feed(second))


def test_missing_bytes_are_refused():
    assembler = RowAssembler(one_row(4), 3)
    assert len(list(assembler.feed(b"123456789"))) == 1
    with pytest.raises(InvalidBufferError, match="3 bytes before"):
        assembler.finish()


@pytest.mark.parametrize(("limit", "row", "expected"), [(10, 3, 9), (9, 3, 9), (3, 3, 3), (2, 3, 2)])
def test_frames_hold_whole_rows_where_those_fit(limit: int, row: int, expected: int):
    assert expected == whole_rows_bytes(limit, row)
