from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidBufferError
from kvstore.transport.rows import RowAssembler


@given(
    row_bytes=st.integers(1, 9),
    rows=st.integers(0, 12),
    rows_at_once=st.integers(1, 5),
    cuts=st.lists(st.integers(0, 108), max_size=8),
)
def test_frames_cut_anywhere_give_the_same_rows(row_bytes: int, rows: int, rows_at_once: int, cuts: list[int]):
    data = bytes(index % 251 for index in range(row_bytes * rows))
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    assembler = RowAssembler(np.empty(row_bytes * rows_at_once, dtype=np.uint8), row_bytes, rows)
    got = [piece.copy() for begin, end in pairwise(edges) for piece in assembler.feed(data[begin:end])]
    assembler.finish()
    assert data == b"".join(piece.tobytes() for piece in got)
    assert all(piece.shape[1] == row_bytes and 1 <= len(piece) <= rows_at_once for piece in got)


def test_bytes_behind_the_last_row_are_refused():
    assembler = RowAssembler(np.empty(8, dtype=np.uint8), 4, 1)
    with pytest.raises(InvalidBufferError, match="1 bytes more"):
        list(assembler.feed(b"12345"))


def test_missing_bytes_are_refused():
    assembler = RowAssembler(np.empty(8, dtype=np.uint8), 4, 3)
    assert len(list(assembler.feed(b"123456789"))) == 1
    with pytest.raises(InvalidBufferError, match="3 bytes before"):
        assembler.finish()
