"""Where slots of host memory lie, and copies between them and rows: many runs of bytes by one call without the GIL."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore.tiers._core import _copy
from kvstore.tiers.slots import HolderTable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from kvstore.tiers.base import Bytes2D, SlotRange
    from kvstore.tiers.extent import Extent
    from kvstore.tiers.slots import SlotRun
    from kvstore.types import Slots

    Addresses = NDArray[np.uint64]


class ExtentTable:
    """The extents of a pool by slot. Immutable, so that it is read without a lock while another thread grows it.

    As long as it lives, the memory of its extents does, whatever becomes of them meanwhile.
    """

    def __init__(self, part_sizes: tuple[int, ...], holders: HolderTable[Extent] | None = None) -> None:
        self.part_sizes = part_sizes
        self.holders: HolderTable[Extent] = HolderTable() if holders is None else holders
        starts = [
            [region.ctypes.data for region in extent.regions] for extent in self.holders.holders
        ]  # [extents, parts]
        self._starts = np.array(starts, dtype=np.uint64).reshape(len(starts), len(part_sizes))

    @property
    def extents(self) -> Iterator[tuple[SlotRange, Extent]]:
        """The extents, each with its slots, in ascending order."""
        return zip(self.holders.ranges, self.holders.holders, strict=True)

    def with_added(self, slot_range: SlotRange, extent: Extent) -> ExtentTable:
        """A table that also has `extent` at `slot_range`."""
        return ExtentTable(self.part_sizes, self.holders.with_added(slot_range, extent))

    def without(self, slot_range: SlotRange) -> ExtentTable:
        """A table that lacks the extent of `slot_range`."""
        return ExtentTable(self.part_sizes, self.holders.without(slot_range))

    def runs(self, slots: Slots) -> Iterator[SlotRun[Extent]]:
        """Cut `slots` into runs of neighbours within one extent, in the order given."""
        return self.holders.runs(slots)

    def addresses(self, slots: Slots, part: int) -> Addresses:
        """Where a part of each slot begins. A slot that is not of this pool is a programming error."""
        places, indices = self.holders.places(slots)
        found: Addresses = self._starts[places, part] + indices.astype(np.uint64) * np.uint64(self.part_sizes[part])
        return found


def write_rows(table: ExtentTable, slots: Slots, rows: Bytes2D, parts: Sequence[int]) -> None:
    """Copy rows, which hold `parts` one after the other, into slots. Nobody else may use these slots meanwhile."""
    inside, outside, sizes = _runs(table, slots, rows, parts)
    _copy.copy_runs(inside, outside, sizes)


def read_rows(table: ExtentTable, slots: Slots, rows: Bytes2D, parts: Sequence[int]) -> None:
    """Copy slots into rows, which take `parts` one after the other."""
    inside, outside, sizes = _runs(table, slots, rows, parts)
    _copy.copy_runs(outside, inside, sizes)


def _runs(
    table: ExtentTable, slots: Slots, rows: Bytes2D, parts: Sequence[int]
) -> tuple[Addresses, Addresses, Addresses]:
    """Where each run begins in the tier and in the rows, and its bytes. O(slots x parts), in numpy."""
    sizes = np.array([table.part_sizes[part] for part in parts], dtype=np.uint64)
    assert rows.shape == (len(slots), int(sizes.sum())), (rows.shape, len(slots), sizes)
    assert rows.dtype == np.uint8, rows.dtype
    assert rows.strides[1] == 1, rows.strides
    inside = np.stack([table.addresses(slots, part) for part in parts], axis=1).ravel()
    starts = np.arange(len(rows), dtype=np.uint64) * np.uint64(rows.strides[0]) + np.uint64(rows.ctypes.data)
    outside = (starts[:, None] + np.cumsum(sizes) - sizes).ravel()
    if len(parts) > 1:
        return inside, outside, np.tile(sizes, len(rows))
    return _merged(inside, outside, sizes[0])


def _merged(inside: Addresses, outside: Addresses, size: np.uint64) -> tuple[Addresses, Addresses, Addresses]:
    """Equal pieces that follow each other on both sides, put together."""
    follows = (np.diff(inside) == size) & (np.diff(outside) == size)
    first = np.flatnonzero(np.concatenate(([True], ~follows)))[: len(inside)]
    counts = np.diff(np.append(first, len(inside))).astype(np.uint64)
    return inside[first], outside[first], counts * size
