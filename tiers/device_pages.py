"""Where the bytes of each block lie in an engine's paged KV memory: read off its own tensors.

    pages = PagedKv.planes_first(kv_caches)    # a tensor [2, blocks, ...] for each layer
    pages.require_layout(namespace.layout)

A packed block is layer-major: for each layer its pieces in the order given (keys, values, then what `scales` names),
each in row-major order of its tensor. So the same bytes come out of every memory layout whose inner order is the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvstore.errors import InvalidBufferError, LayoutMismatchError
from kvstore.tiers._core import _copy
from kvstore.tiers.device_memory import contiguous_run, memory_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, Self

    from numpy.typing import NDArray

    from kvstore.tiers.device_memory import Memory, Run
    from kvstore.types import KvLayout

    Table = NDArray[np.void]

# The bytes of `Piece` in csrc/copy_piece.cuh.
PIECE_DTYPE = np.dtype(
    [
        ("address", "<u8"),
        ("block_stride", "<i8"),
        ("row_stride", "<i8"),
        ("packed_offset", "<u8"),
        ("rows", "<u4"),
        ("row_bytes", "<u4"),
        ("first_tile", "<u4"),
        ("reserved", "<u4"),
    ]
)
TILES_MAX = 2**31 - 1
_ROW_BYTES_MAX = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor's share of every block: block b has `rows` rows of `row_bytes` from address + b * block_stride on."""

    memory: Memory = field(repr=False)
    address: int
    block_stride: int
    rows: int
    row_stride: int
    row_bytes: int

    @property
    def bytes(self) -> int:
        """Bytes of one block."""
        return self.rows * self.row_bytes

    @property
    def tiles(self) -> int:
        """Units of work of one block; see csrc/copy_piece.cuh."""
        return self.rows * -(-self.row_bytes // _copy.TILE_BYTES)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PagedKv:
    """An engine's paged KV memory: for each layer the pieces that a block has there. Keeps the tensors alive.

    Made by the class methods, once for the life of the engine's memory: they check everything that a copy relies on.
    """

    layers: tuple[tuple[Piece, ...], ...] = field(repr=False)
    blocks: int
    device: str
    block_bytes: int
    table: Table = field(repr=False)

    @classmethod
    def of_pieces(cls, layers: Sequence[Sequence[Any]]) -> Self:
        """For each layer its tensors in the order of their bytes in a block, each [blocks, ...].

        Raises InvalidBufferError if the tensors do not lie on one device, differ in their number of blocks, overlap
        themselves, or have gaps at more than one level inside a block.
        """
        pieces = tuple(
            tuple(_piece(tensor, f"layer {number}, piece {index}") for index, tensor in enumerate(tensors))
            for number, tensors in enumerate(layers)
        )
        if not pieces or not all(pieces):
            raise InvalidBufferError(
                "there is a layer without tensors, or no layer at all; expected one tensor at least"
            )
        device, blocks = _only_place(pieces)
        table = _table(pieces)
        block_bytes = sum(piece.bytes for layer in pieces for piece in layer)
        return cls(pieces, blocks, device, block_bytes, table)

    @classmethod
    def planes_first(cls, layers: Sequence[Any], scales: Sequence[Sequence[Any]] = ()) -> Self:
        """One tensor [2, blocks, ...] a layer, keys before values; `scales` may name tensors [blocks, ...] a layer."""
        _require_planes(layers, 0)
        return cls._with_scales([(layer[0], layer[1]) for layer in layers], scales)

    @classmethod
    def blocks_first(cls, layers: Sequence[Any], scales: Sequence[Sequence[Any]] = ()) -> Self:
        """One tensor [blocks, 2, ...] a layer, keys before values; `scales` as in planes_first()."""
        _require_planes(layers, 1)
        return cls._with_scales([(layer[:, 0], layer[:, 1]) for layer in layers], scales)

    @classmethod
    def latent(cls, layers: Sequence[Any], scales: Sequence[Sequence[Any]] = ()) -> Self:
        """One tensor [blocks, ...] a layer: multi-head latent attention; `scales` as in planes_first()."""
        return cls._with_scales([(layer,) for layer in layers], scales)

    @classmethod
    def _with_scales(cls, data: Sequence[tuple[Any, ...]], scales: Sequence[Sequence[Any]]) -> Self:
        if not scales:
            return cls.of_pieces(data)
        if len(scales) != len(data):
            raise InvalidBufferError(f"scales are given for {len(scales)} layers, expected {len(data)}")
        return cls.of_pieces([(*tensors, *more) for tensors, more in zip(data, scales, strict=True)])

    @property
    def run_bytes_min(self) -> int:
        """Bytes of the shortest run that is contiguous on both sides."""
        return min(piece.row_bytes for layer in self.layers for piece in layer)

    def layer_rows(self, layers: range) -> slice:
        """The rows of `table` that hold the pieces of some neighbouring layers."""
        first = sum(len(layer) for layer in self.layers[: layers.start])
        return slice(first, first + sum(len(layer) for layer in self.layers[layers.start : layers.stop]))

    def layer_bytes(self, layers: range) -> int:
        """Bytes of a block in some neighbouring layers."""
        return sum(piece.bytes for layer in self.layers[layers.start : layers.stop] for piece in layer)

    def require_layout(self, layout: KvLayout, part: int = 0) -> None:
        """Raise LayoutMismatchError unless a packed block has exactly the bytes of that part of `layout`.

        Scales that travel with a block count: a layout of dtype "uint8" whose head_dim includes their bytes has them.
        """
        if self.block_bytes != layout.part_bytes(part):
            raise LayoutMismatchError(
                f"a block of the engine's memory has {self.block_bytes} bytes in {len(self.layers)} layers, but part "
                f"{part} of the layout has {layout.part_bytes(part)}; describe the layout as the engine keeps it"
            )


def _piece(tensor: object, name: str) -> Piece:
    memory = memory_of(tensor, name)
    if len(memory.shape) < 2 or memory.shape[0] == 0:
        raise InvalidBufferError(f"{name} has shape {memory.shape}, expected [blocks, ...] with one block at least")
    run = contiguous_run(memory, name)
    _require_apart(memory, run, name)
    if run.row_bytes > _ROW_BYTES_MAX or run.rows > TILES_MAX:
        raise InvalidBufferError(f"{name} has {run.rows} x {run.row_bytes} bytes a block, which is more than can be")
    return Piece(memory, memory.address, memory.strides[0], run.rows, run.row_stride, run.row_bytes)


def _require_apart(memory: Memory, run: Run, name: str) -> None:
    """No two blocks share a byte: each distance is at least the extent of all that lies closer together."""
    extent = run.row_bytes
    for stride, count in sorted([(memory.strides[0], memory.shape[0]), (run.row_stride, run.rows)]):
        if count > 1 and stride < extent:
            raise InvalidBufferError(f"{name} (shape {memory.shape}, strides {memory.strides} bytes) overlaps itself")
        extent += stride * (count - 1)


def _require_planes(layers: Sequence[Any], axis: int) -> None:
    expected = "[2, blocks, ...]" if axis == 0 else "[blocks, 2, ...]"
    for number, layer in enumerate(layers):
        shape = memory_of(layer, f"layer {number}").shape
        if len(shape) < 3 or shape[axis] != 2:
            raise InvalidBufferError(f"layer {number} has shape {shape}, expected {expected}")


def _only_place(layers: tuple[tuple[Piece, ...], ...]) -> tuple[str, int]:
    first = layers[0][0].memory
    for number, layer in enumerate(layers):
        for index, piece in enumerate(layer):
            here = (piece.memory.device, piece.memory.shape[0])
            if here != (first.device, first.shape[0]):
                raise InvalidBufferError(
                    f"layer {number}, piece {index} has {here[1]} blocks on {here[0]}, but the first has "
                    f"{first.shape[0]} on {first.device}; expected the same of all"
                )
    return first.device, first.shape[0]


def _table(layers: tuple[tuple[Piece, ...], ...]) -> Table:
    """The pieces as the copies read them, with a last row that tells where they end."""
    rows: list[tuple[int, ...]] = []
    offset = tiles = 0
    for piece in (piece for layer in layers for piece in layer):
        place = (piece.address, piece.block_stride, piece.row_stride, offset)
        rows.append((*place, piece.rows, piece.row_bytes, tiles, 0))
        offset += piece.bytes
        tiles += piece.tiles
        if tiles > TILES_MAX:
            raise InvalidBufferError(f"a block has more than {TILES_MAX} contiguous runs, which is more than can be")
    table = np.array([*rows, (0, 0, 0, offset, 0, 0, tiles, 0)], dtype=PIECE_DTYPE)
    table.setflags(write=False)
    return table
