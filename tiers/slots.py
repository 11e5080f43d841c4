"""Which slots of a pool are free, and what holds each one. Shared by the host and the disk tier."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from kvstore.tiers.base import SlotRange

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    from numpy.typing import NDArray

    from kvstore.types import Slots

    IndexArray = NDArray[np.intp]

_SCAN_SLOTS = 4096

Holder = TypeVar("Holder")


def as_slots(slots: object) -> Slots:
    """`slots` as a uint32 array, without a copy where it is one."""
    return np.asarray(slots, dtype=np.uint32)


class SlotMap:
    """Free and used slots of one pool, in ranges that come and go as wholes. Not thread-safe: the pool locks it.

    Range numbers are reused from the lowest gap on, so that slot numbers stay small however often ranges change.
    """

    def __init__(self) -> None:
        self._ranges: list[_Range] = []
        self._free_count = 0
        self._slot_count = 0

    @property
    def free_slots(self) -> int:
        """Slots that take() can hand out."""
        return self._free_count

    @property
    def used_slots(self) -> int:
        """Slots handed out and not given back."""
        return self._slot_count - self._free_count

    def ranges(self) -> tuple[SlotRange, ...]:
        """The ranges in ascending order."""
        return tuple(SlotRange(item.first, item.count) for item in self._ranges)

    def add(self, count: int) -> SlotRange:
        """A new range of `count` free slots, at the lowest numbers that are not in use."""
        first, position = 0, 0
        for item in self._ranges:
            if item.first - first >= count:
                break
            first = item.first + item.count
            position += 1
        self._ranges.insert(position, _Range(first, count))
        self._free_count += count
        self._slot_count += count
        return SlotRange(first, count)

    def remove(self, slot_range: SlotRange) -> bool:
        """Drop a range if it is there and all its slots are free; false and unchanged otherwise."""
        item = self._free_range(slot_range)
        if item is None:
            return False
        self._ranges.remove(item)
        self._free_count -= item.count
        self._slot_count -= item.count
        return True

    def is_free(self, slot_range: SlotRange) -> bool:
        """Whether a range is there and all its slots are free."""
        return self._free_range(slot_range) is not None

    def used_in(self, slot_range: SlotRange) -> int:
        """Used slots of one range; 0 if it is not there."""
        item = next((item for item in self._ranges if item.first == slot_range.first), None)
        return 0 if item is None else item.count - item.free_count

    def take(self, count: int, *, outside: SlotRange | None = None, within: Container[int] | None = None) -> Slots:
        """Up to `count` slots, the lowest free ones, in ascending order. O(count) unless the ranges are fragmented.

        None of them lies in the range `outside`, and all lie in ranges that begin at one of `within`, if given.
        """
        taken: list[IndexArray] = []
        missing = min(count, self._free_count)
        for item in self._ranges:
            if missing == 0:
                break
            if outside is not None and item.first == outside.first:
                continue
            if within is not None and item.first not in within:
                continue
            for found in item.take(missing):
                taken.append(found + item.first)
                missing -= len(found)
                self._free_count -= len(found)
        return as_slots(np.concatenate(taken)) if taken else as_slots(())

    def free_within(self, firsts: Container[int]) -> int:
        """Free slots of the ranges that begin at one of `firsts`."""
        return sum(item.free_count for item in self._ranges if item.first in firsts)

    def take_these(self, slots: Slots) -> None:
        """Mark free slots as used."""
        for item, indices in self._spans(slots):
            item.occupy(indices)
        self._free_count -= len(slots)

    def release(self, slots: Slots) -> None:
        """Make used slots free again. A slot that is free already, or foreign, is a programming error."""
        for item, indices in self._spans(slots):
            item.vacate(indices)
        self._free_count += len(slots)

    def _free_range(self, slot_range: SlotRange) -> _Range | None:
        whole = (slot_range.first, slot_range.count, slot_range.count)
        return next((item for item in self._ranges if (item.first, item.count, item.free_count) == whole), None)

    def _spans(self, slots: Slots) -> Iterator[tuple[_Range, IndexArray]]:
        """Ranges, each with the indices that `slots` has in it."""
        ordered = np.sort(slots)
        assert not np.any(ordered[1:] == ordered[:-1]), "a slot is named twice"
        start = 0
        while start < len(ordered):
            item = self._range_of(int(ordered[start]))
            stop = int(np.searchsorted(ordered, item.first + item.count))
            yield item, ordered[start:stop].astype(np.intp) - item.first
            start = stop

    def _range_of(self, slot: int) -> _Range:
        position = bisect_right(self._ranges, slot, key=lambda item: item.first) - 1
        assert position >= 0, f"slot {slot} is not of this pool"
        item = self._ranges[position]
        assert slot < item.first + item.count, f"slot {slot} is not of this pool"
        return item


class _Range:
    """Free marks of one range; no slot below `lowest` is free."""

    def __init__(self, first: int, count: int) -> None:
        self.first = first
        self.count = count
        self.free_count = count
        self._free = np.ones(count, dtype=np.bool_)
        self._lowest = 0

    def take(self, limit: int) -> Iterator[IndexArray]:
        """Free slots from the lowest on, at most `limit`, marked as used while they are handed out."""
        while limit and self.free_count:
            window = self._free[self._lowest : self._lowest + max(_SCAN_SLOTS, limit)]
            found = np.flatnonzero(window)[:limit] + self._lowest
            if len(found) == 0:
                self._lowest += len(window)
                continue
            self._free[found] = False
            self.free_count -= len(found)
            self._lowest = int(found[-1]) + 1
            limit -= len(found)
            yield found

    def occupy(self, indices: IndexArray) -> None:
        assert self._free[indices].all(), "slot in use already"
        self._free[indices] = False
        self.free_count -= len(indices)

    def vacate(self, indices: IndexArray) -> None:
        assert not self._free[indices].any(), "slot freed twice"
        self._free[indices] = True
        self.free_count += len(indices)
        self._lowest = min(self._lowest, int(indices[0]))


@dataclass(frozen=True, slots=True)
class SlotRun(Generic[Holder]):
    """Neighbouring slots of one holder: its slots [index, index + count) are the caller's [start, start + count)."""

    holder: Holder
    index: int
    start: int
    count: int

    @property
    def indices(self) -> slice:
        """The slots, in numbers of the holder."""
        return slice(self.index, self.index + self.count)

    @property
    def places(self) -> slice:
        """The slots, in positions of the caller's arrays."""
        return slice(self.start, self.start + self.count)

    def cut(self, limit: int) -> Iterator[SlotRun[Holder]]:
        """The same slots in runs of at most `limit`."""
        for done in range(0, self.count, limit):
            yield SlotRun(self.holder, self.index + done, self.start + done, min(limit, self.count - done))


@dataclass(frozen=True, slots=True)
class HolderTable(Generic[Holder]):
    """Which extent or slab holds a slot. Immutable, so that it is read without a lock while another thread grows it."""

    ranges: tuple[SlotRange, ...] = ()
    holders: tuple[Holder, ...] = ()
    _firsts: IndexArray = field(default_factory=lambda: np.zeros(0, dtype=np.intp))

    def with_added(self, slot_range: SlotRange, holder: Holder) -> HolderTable[Holder]:
        """A table that also has `holder` at `slot_range`."""
        pairs = sorted(
            [*zip(self.ranges, self.holders, strict=True), (slot_range, holder)], key=lambda pair: pair[0].first
        )
        return _table(pairs)

    def without(self, slot_range: SlotRange) -> HolderTable[Holder]:
        """A table that lacks the holder of `slot_range`."""
        return _table([pair for pair in zip(self.ranges, self.holders, strict=True) if pair[0] != slot_range])

    def holder_of(self, slot_range: SlotRange) -> Holder:
        """The holder of a range."""
        return self.holders[self.ranges.index(slot_range)]

    def runs(self, slots: Slots) -> Iterator[SlotRun[Holder]]:
        """Cut `slots` into runs of neighbours within one holder, in the order given."""
        if len(slots) == 0:
            return
        numbers = slots.astype(np.intp)
        places = np.searchsorted(self._firsts, numbers, side="right") - 1
        breaks = np.flatnonzero((np.diff(numbers) != 1) | (np.diff(places) != 0)) + 1
        for start, stop in pairwise((0, *breaks.tolist(), len(numbers))):
            place = int(places[start])
            assert place >= 0, f"slot {numbers[start]} is not of this pool"
            index = int(numbers[start]) - self.ranges[place].first
            assert index + stop - start <= self.ranges[place].count, f"slot {numbers[stop - 1]} is not of this pool"
            yield SlotRun(self.holders[place], index, start, stop - start)


def _table(pairs: list[tuple[SlotRange, Holder]]) -> HolderTable[Holder]:
    return HolderTable(
        tuple(pair[0] for pair in pairs),
        tuple(pair[1] for pair in pairs),
        np.array([pair[0].first for pair in pairs], dtype=np.intp),
    )
