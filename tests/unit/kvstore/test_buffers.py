from __future__ import annotations

import array

import numpy as np
import pytest

from kvstore.buffers import readable_rows, writable_rows
from kvstore.errors import InvalidBufferError

torch = pytest.importorskip("torch")


class OnlyDlpack:
    """An object that speaks DLPack and nothing else."""

    def __init__(self, values: np.ndarray) -> None:
        self._values = values

    def __dlpack__(self, **options: object) -> object:
        return self._values.__dlpack__(**options)

    def __dlpack_device__(self) -> object:
        return self._values.__dlpack_device__()


@pytest.mark.parametrize(
    "buffer",
    [
        bytearray(range(16)),
        memoryview(bytearray(range(16))),
        array.array("B", range(16)),
        np.arange(16, dtype=np.uint8).view(np.float32).reshape(2, 2),
        torch.arange(16, dtype=torch.uint8).view(torch.bfloat16).reshape(2, 4),
        OnlyDlpack(np.arange(16, dtype=np.uint8)),
    ],
    ids=["bytearray", "memoryview", "array", "numpy", "torch bfloat16", "dlpack"],
)
def test_any_contiguous_buffer_is_seen_as_rows_of_bytes(buffer: object) -> None:
    rows = readable_rows(buffer, 8)
    assert rows.shape == (2, 8)
    assert rows.tobytes() == bytes(range(16))


def test_writes_reach_the_callers_memory() -> None:
    tensor = torch.zeros(4, dtype=torch.float16)
    writable_rows(tensor, 4)[1] = 0xFF
    assert bytes(tensor.view(torch.uint8).tolist()) == b"\0\0\0\0\xff\xff\xff\xff"


def test_an_empty_buffer_has_no_rows() -> None:
    assert readable_rows(bytearray(), 8).shape == (0, 8)


@pytest.mark.parametrize(
    ("buffer", "problem"),
    [
        (bytearray(12), "multiple of 8"),
        (np.zeros((4, 8), dtype=np.uint8)[:, ::2], "not C-contiguous"),
        (torch.zeros(4, 8).t(), "not contiguous"),
        (torch.zeros(8, device="meta"), "expected a CPU tensor"),
        ([1, 2, 3], "cannot be read as contiguous bytes"),
        (None, "cannot be read as contiguous bytes"),
        (np.array([None] * 8), "holds references"),
        (torch.zeros(8, dtype=torch.complex64).conj(), "cannot be seen as bytes"),
    ],
)
def test_a_buffer_that_cannot_be_rows_is_refused(buffer: object, problem: str) -> None:
    with pytest.raises(InvalidBufferError, match=problem):
        readable_rows(buffer, 8)


def test_a_read_only_buffer_is_refused_for_writing() -> None:
    with pytest.raises(InvalidBufferError, match="read-only"):
        writable_rows(bytes(8), 8)
