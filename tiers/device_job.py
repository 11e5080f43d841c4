"""What one copy is to do, checked: which blocks of which engine memory, from or to which rows."""

from __future__ import annotations

import enum
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvstore.errors import InvalidArgumentError, InvalidBufferError
from kvstore.tiers.device_memory import packed_rows
from kvstore.tiers.device_pages import TILES_MAX

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvstore.tiers.device_memory import PackedRows
    from kvstore.tiers.device_pages import PagedKv

    Ids = NDArray[np.int64]


class Direction(enum.Enum):
    """Which way the bytes go, in the words of the store: engine to rows, or rows to engine."""

    STORE = "store"
    LOAD = "load"


@dataclass(frozen=True, slots=True)
class CopyJob:
    """Copy block block_ids[i] of `pages`, in some of its layers, from or to row row_ids[i].

    Pieces have their place in the whole block, whatever the layers.
    """

    direction: Direction
    pages: PagedKv
    rows: PackedRows
    block_ids: Ids
    row_ids: Ids
    layers: range

    @property
    def table_rows(self) -> slice:
        """The rows of the pages' table that this copy reads."""
        return self.pages.layer_rows(self.layers)

    @property
    def bytes(self) -> int:
        """Bytes copied."""
        return len(self.block_ids) * self.pages.layer_bytes(self.layers)

    @property
    def tiles(self) -> int:
        """Units of work; see csrc/copy_piece.cuh."""
        table, rows = self.pages.table, self.table_rows
        return len(self.block_ids) * int(table[rows.stop]["first_tile"] - table[rows.start]["first_tile"])

    def of_layer(self, layer: int) -> CopyJob:
        """The same in one layer alone."""
        return CopyJob(self.direction, self.pages, self.rows, self.block_ids, self.row_ids, range(layer, layer + 1))


def check_job(
    direction: Direction,
    pages: PagedKv,
    rows: object,
    block_ids: object,
    *,
    row_ids: object = None,
    layers: range | None = None,
) -> CopyJob:
    """A job whose every address is inside the memory it names, and none of whose targets is named twice.

    Raises InvalidBufferError or InvalidArgumentError. O(blocks log blocks).
    """
    packed = packed_rows(rows, pages.block_bytes)
    if direction is Direction.STORE and not packed.memory.writable:
        raise InvalidBufferError("rows are read-only, expected memory that can be written")
    blocks = _ids(block_ids, pages.blocks, "block_ids")
    places = np.arange(packed.count, dtype=np.int64) if row_ids is None else _ids(row_ids, packed.count, "row_ids")
    if len(blocks) != len(places):
        raise InvalidArgumentError(f"{len(blocks)} blocks are named for {len(places)} rows, expected as many")
    targets, name = (places, "row_ids") if direction is Direction.STORE else (blocks, "block_ids")
    if len(np.unique(targets)) != len(targets):
        raise InvalidArgumentError(f"{name} names a target twice; expected each once")
    job = CopyJob(direction, pages, packed, blocks, places, _layers(layers, len(pages.layers)))
    if job.tiles > TILES_MAX:
        raise InvalidArgumentError(f"the copy has {job.tiles} units of work, expected at most {TILES_MAX}; split it")
    return job


def _layers(layers: range | None, count: int) -> range:
    if layers is None:
        return range(count)
    if layers.step != 1 or not 0 <= layers.start < layers.stop <= count:
        raise InvalidArgumentError(f"layers is {layers}, expected neighbouring layers inside range(0, {count})")
    return layers


def _ids(ids: object, limit: int, name: str) -> Ids:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(ids, torch.Tensor) and ids.device.type != "cpu":
        raise InvalidArgumentError(f"{name} lie on {ids.device}, expected the CPU: reading them here would stall it")
    try:
        given = np.asarray(ids)
    except (TypeError, ValueError) as err:
        raise InvalidArgumentError(f"{name} cannot be read as numbers: {err}") from err
    if given.ndim != 1 or (given.dtype.kind not in "iu" and given.size):
        raise InvalidArgumentError(f"{name} has shape {given.shape} of {given.dtype}, expected a flat list of integers")
    if given.size and not 0 <= int(given.min()) <= int(given.max()) < limit:
        wrong = given[(given < 0) | (given >= limit)][0]
        raise InvalidArgumentError(f"{name} names {wrong}, expected 0..{limit - 1}")
    # A copy of its own: the caller may go on with the list while the copy is under way.
    return np.array(given, dtype=np.int64)
