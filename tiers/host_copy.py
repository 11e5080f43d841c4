"""Where slots of host memory lie, and copies between them and rows: one call without the GIL for any number of runs.

An assignment by numpy takes 2-3 us for each run of neighbours, as much as copying 32 KiB does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore.tiers._core import _copy
from kvstore.tiers.slots import HolderTable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.tiers.base import Bytes2D, SlotRange
    from kvstore.tiers.extent import Extent
    from kvstore.tiers.slots import SlotRun
    from kvstore.types import Slots


class ExtentTable:
    """The extents of a pool by slot. Immutable, so that it is read without a lock while another thread grows it.

    As long as it lives, the memory of its extents does, whatever becomes of them meanwhile.
    """

    def __init__(self, part_sizes: tuple[int, ...], holders: HolderTable[Extent] | None = None) -> None:
        self._part_sizes = part_sizes
        self.holders: HolderTable[Extent] = HolderTable() if holders is None else holders
        starts = [[region.ctypes.data for region in extent.regions] for extent in self.holders.holders]
        self._native = _copy.SlotTable(
            np.array([item.first for item in self.holders.ranges], dtype=np.int64),
            np.array([item.count for item in self.holders.ranges], dtype=np.int64),
            np.array(starts, dtype=np.uint64).reshape(len(starts), len(part_sizes)),
            np.array(part_sizes, dtype=np.uint64),
        )

    @property
    def extents(self) -> Iterator[tuple[SlotRange, Extent]]:
        """The extents, each with its slots, in ascending order."""
        return zip(self.holders.ranges, self.holders.holders, strict=True)

    def with_added(self, slot_range: SlotRange, extent: Extent) -> ExtentTable:
        """A table that also has `extent` at `slot_range`."""
        return ExtentTable(self._part_sizes, self.holders.with_added(slot_range, extent))

    def without(self, slot_range: SlotRange) -> ExtentTable:
        """A table that lacks the extent of `slot_range`."""
        return ExtentTable(self._part_sizes, self.holders.without(slot_range))

    def runs(self, slots: Slots) -> Iterator[SlotRun[Extent]]:
        """Cut `slots` into runs of neighbours within one extent, in the order given."""
        return self.holders.runs(slots)

    def write(self, slots: Slots, rows: Bytes2D, part: int | None) -> None:
        """Copy rows, each with one part or with all one after the other, into slots that nobody else uses meanwhile."""
        first, end = self._parts(slots, rows, part)
        self._native.write(np.ascontiguousarray(slots), rows.ctypes.data, rows.strides[0], first, end)

    def read(self, slots: Slots, rows: Bytes2D, part: int | None) -> None:
        """Copy slots into rows, shaped as in write()."""
        first, end = self._parts(slots, rows, part)
        assert rows.flags.writeable, "rows cannot be written"
        self._native.read(np.ascontiguousarray(slots), rows.ctypes.data, rows.strides[0], first, end)

    def _parts(self, slots: Slots, rows: Bytes2D, part: int | None) -> tuple[int, int]:
        """First and end of the parts to be copied, once the rows are seen to fit them."""
        first, end = (0, len(self._part_sizes)) if part is None else (part, part + 1)
        assert rows.shape == (len(slots), sum(self._part_sizes[first:end])), (rows.shape, len(slots), first, end)
        assert rows.dtype == np.uint8, rows.dtype
        assert len(rows) == 0 or rows.strides[1] == 1, rows.strides
        return first, end
