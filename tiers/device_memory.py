"""Tensors and arrays seen as strided bytes, whatever library and device they come from. Nothing is imported for it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.errors import InvalidBufferError

if TYPE_CHECKING:
    from numpy.typing import NDArray

CPU = "cpu"


@dataclass(frozen=True, slots=True)
class Memory:
    """Strided bytes of a torch tensor or a numpy array, kept alive by `owner`. Strides are in bytes."""

    owner: object = field(repr=False)
    device: str
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int
    writable: bool


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes in at most two levels: `rows` times `row_bytes` contiguous bytes, `row_stride` apart."""

    rows: int
    row_stride: int
    row_bytes: int


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Memory of packed blocks: row i begins at address + i * stride and is contiguous."""

    memory: Memory = field(repr=False)
    address: int
    stride: int
    count: int


def memory_of(tensor: object, name: str) -> Memory:
    """How a torch tensor (CPU or CUDA) or numpy array lies in memory.

    Raises InvalidBufferError, which calls it `name`, for anything else.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return _tensor_memory(tensor, torch, name)
    if isinstance(tensor, np.ndarray):
        return _array_memory(tensor, name)
    raise InvalidBufferError(f"{name} is a {type(tensor).__name__}, expected a torch tensor or a numpy array")


def packed_rows(rows: object, block_bytes: int) -> PackedRows:
    """`rows` as packed blocks of `block_bytes`: the first dimension counts blocks, the others are contiguous.

    Raises InvalidBufferError where that cannot be.
    """
    memory = memory_of(rows, "rows")
    if len(memory.shape) < 2:
        raise InvalidBufferError(f"rows has shape {memory.shape}, expected [blocks, {block_bytes} bytes in all]")
    if memory.shape[0] == 0:  # strides of nothing mean nothing
        return PackedRows(memory, memory.address, block_bytes, 0)
    run = contiguous_run(memory, "rows")
    if run.rows != 1 or run.row_bytes != block_bytes:
        raise InvalidBufferError(
            f"a row of rows (shape {memory.shape}, strides {memory.strides} bytes) has {run.rows} x {run.row_bytes} "
            f"bytes, expected {block_bytes} contiguous bytes (one block)"
        )
    if memory.shape[0] > 1 and memory.strides[0] < block_bytes:
        raise InvalidBufferError(f"rows are {memory.strides[0]} bytes apart, so blocks of {block_bytes} bytes overlap")
    return PackedRows(memory, memory.address, memory.strides[0], memory.shape[0])


def contiguous_run(memory: Memory, name: str) -> Run:
    """What one index of the first dimension holds, in row-major order.

    Raises InvalidBufferError if that is more than one level of gaps, or empty.
    """
    dimensions = [
        (size, stride) for size, stride in zip(memory.shape[1:], memory.strides[1:], strict=True) if size != 1
    ]
    if any(size == 0 for size, _ in dimensions):
        raise InvalidBufferError(f"{name} has shape {memory.shape}: there is nothing in a block")
    row_bytes = memory.item_bytes
    while dimensions and dimensions[-1][1] == row_bytes:
        row_bytes *= dimensions.pop()[0]
    if not dimensions:
        return Run(1, row_bytes, row_bytes)
    if any(outer[1] != inner[0] * inner[1] for outer, inner in pairwise(dimensions)):
        raise InvalidBufferError(
            f"{name} (shape {memory.shape}, strides {memory.strides} bytes) has gaps at more than one level inside a "
            "block; expected equal distances between contiguous rows, so permute it into its order in memory"
        )
    rows = 1
    for size, _ in dimensions:
        rows *= size
    stride = dimensions[-1][1]
    if stride < row_bytes:
        raise InvalidBufferError(f"{name} has rows of {row_bytes} bytes, {stride} bytes apart: they overlap")
    return Run(rows, stride, row_bytes)


def _tensor_memory(tensor: Any, torch: Any, name: str) -> Memory:  # noqa: ANN401  # torch is no dependency of the core
    if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
        raise InvalidBufferError(f"{name} is a lazy or sparse tensor; expected a plain one")
    if tensor.device.type not in ("cpu", "cuda"):
        raise InvalidBufferError(f"{name} lies on {tensor.device}, expected cpu or cuda")
    item_bytes = tensor.element_size()
    return Memory(
        owner=tensor,
        device=str(tensor.device),
        address=tensor.data_ptr(),
        shape=tuple(tensor.shape),
        strides=tuple(stride * item_bytes for stride in tensor.stride()),
        item_bytes=item_bytes,
        writable=True,
    )


def _array_memory(array: NDArray[Any], name: str) -> Memory:
    if array.dtype.hasobject:
        raise InvalidBufferError(f"{name} is an array of {array.dtype}, which holds references; expected numbers")
    if any(stride < 0 for stride in array.strides):
        raise InvalidBufferError(f"{name} has strides {array.strides}, expected none below 0")
    return Memory(
        owner=array,
        device=CPU,
        address=array.ctypes.data,
        shape=array.shape,
        strides=array.strides,
        item_bytes=array.itemsize,
        writable=array.flags.writeable,
    )
