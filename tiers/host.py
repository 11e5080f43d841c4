"""The host tier: blocks in shared memory, cut into extents that are lent to one namespace each."""

from __future__ import annotations

import mmap
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvstore.errors import ClosedError, LayoutMismatchError, StorageError
from kvstore.tiers.memory_limit import memory_limit
from kvstore.tiers.slots import HolderTable, SlotMap, as_slots

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.tiers.base import Bytes1D, Bytes2D, SlotRange
    from kvstore.tiers.memory_limit import MemoryLimit
    from kvstore.types import Slots

EXTENT_BYTES_MIN = 4 << 20
EXTENT_BYTES_MAX = 256 << 20


class HostTier:
    """Host memory of a fixed capacity, lent to pools extent by extent. Thread-safe.

    Each extent has one memfd (mode 0600) for each part of a block, so that memory can later be lent to other
    processes part by part. Slots are packed without gaps; the kernel rounds each memfd up to whole pages.
    `freed_fill` is for tests: freed slots are filled with that byte, so that a reader of freed memory is seen.
    Raises StorageError if `capacity_bytes` is more than the machine or its control group allows now.

    Locks: a pool's lock before the tier's lock.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        extent_bytes: int | None = None,
        freed_fill: int | None = None,
        limit: MemoryLimit | None = None,
    ) -> None:
        _check_capacity(capacity_bytes, limit or memory_limit())
        default_bytes = min(max(capacity_bytes // 16, EXTENT_BYTES_MIN), EXTENT_BYTES_MAX)
        self._budget = _ExtentBudget(capacity_bytes, extent_bytes or default_bytes)
        self._freed_fill = freed_fill
        self._lock = threading.Lock()
        self._pools: dict[bytes, HostPool] = {}
        self._closed = False

    @property
    def capacity_bytes(self) -> int:
        """Bytes that extents may take in all."""
        return self._budget.capacity_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the extents that pools hold now."""
        return self._budget.reserved_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots handed out."""
        with self._lock:
            pools = tuple(self._pools.values())
        return sum(pool.used_slots * pool.block_bytes for pool in pools)

    @property
    def refused_extents(self) -> int:
        """How often the system refused the memory of an extent that the capacity would have allowed."""
        return self._budget.refused_extents

    def pool(self, ns_id: bytes, part_sizes: tuple[int, ...], *, bytes_max: int | None = None) -> HostPool:
        """The pool of a namespace, made at the first call. Raises LayoutMismatchError if it has other part sizes.

        Its extents never take more than `bytes_max`, as the first call says.
        """
        with self._lock:
            if self._closed:
                raise ClosedError("the host tier is closed")
            pool = self._pools.get(ns_id)
            if pool is None:
                pool = self._pools[ns_id] = HostPool(part_sizes, self._budget, self._freed_fill, bytes_max)
        if pool.part_sizes != part_sizes:
            raise LayoutMismatchError(
                f"namespace {ns_id.hex()} has parts of {pool.part_sizes} bytes in host memory, not {part_sizes}"
            )
        return pool

    def forget(self, ns_id: bytes) -> None:
        """Let go of a namespace's pool, with its extents; one whose slots are in use stays."""
        with self._lock:
            pool = self._pools.get(ns_id)
            if pool is None or pool.used_slots:
                return
            del self._pools[ns_id]
        pool.close()

    def close(self) -> None:
        """Give all memory back; idempotent. Memory that a view still shows goes when the view does."""
        with self._lock:
            self._closed = True
            pools = tuple(self._pools.values())
            self._pools.clear()
        for pool in pools:
            pool.close()


class HostPool:
    """The slots of one namespace in host memory; implements kvstore.tiers.base.Pool.

    Thread-safe. Copies take no lock: slots belong to their caller, and extents with used slots never go away.
    """

    def __init__(
        self,
        part_sizes: tuple[int, ...],
        budget: _ExtentBudget,
        freed_fill: int | None,
        bytes_max: int | None = None,
    ) -> None:
        assert part_sizes, "a block has at least one part"
        assert min(part_sizes) > 0, part_sizes
        self._part_sizes = part_sizes
        self._block_bytes = sum(part_sizes)
        self._budget = budget
        self._freed_fill = freed_fill
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._slots = SlotMap()
        self._table: HolderTable[_Extent] = HolderTable()
        self._closed = False

    @property
    def part_sizes(self) -> tuple[int, ...]:
        """Exact bytes of each part of a block."""
        return self._part_sizes

    @property
    def block_bytes(self) -> int:
        """Exact bytes of a whole block."""
        return self._block_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of memory that a block takes up."""
        return self._block_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the extents that the pool holds now."""
        with self._lock:
            return self._reserved_bytes()

    @property
    def at_limit(self) -> bool:
        """Whether its own limit, not the tier's capacity, keeps the pool from another extent."""
        with self._lock:
            return self._bytes_max is not None and self._bytes_max - self._reserved_bytes() < self._block_bytes

    @property
    def free_slots(self) -> int:
        """Slots that allocate() can hand out without another extent."""
        with self._lock:
            return self._slots.free_slots

    @property
    def used_slots(self) -> int:
        """Slots handed out and not freed."""
        with self._lock:
            return self._slots.used_slots

    def allocate(self, count: int) -> Slots:
        """Up to `count` slots, the lowest free ones, ascending; fewer or none when the tier is full. Never waits."""
        with self._lock:
            while self._slots.free_slots < count and self._grow():
                pass
            return self._slots.take(count)

    def allocate_outside(self, extent: SlotRange, count: int) -> Slots:
        """Up to `count` free slots of the other extents, as they are."""
        with self._lock:
            return self._slots.take(count, outside=extent)

    def used_in(self, extent: SlotRange) -> int:
        """Used slots of one extent."""
        with self._lock:
            return self._slots.used_in(extent)

    def free(self, slots: Slots) -> None:
        """Give slots back; their bytes are undefined from now on. Freeing a slot twice is a programming error."""
        slots = as_slots(slots)
        if self._freed_fill is not None:
            for run in self._table.runs(slots):
                for region in run.holder.regions:
                    region[run.index : run.index + run.count] = self._freed_fill
        with self._lock:
            self._slots.release(slots)

    def ranges(self) -> tuple[SlotRange, ...]:
        """The extents the pool holds now."""
        with self._lock:
            return self._slots.ranges()

    def give_back(self, slot_range: SlotRange) -> bool:
        """Return one extent to the tier if all its slots are free; false and unchanged otherwise."""
        with self._lock:
            if not self._slots.remove(slot_range):
                return False
            self._table = self._table.without(slot_range)
            self._budget.refund(slot_range.count * self._block_bytes)
            return True

    def views(self, slot: int) -> tuple[Bytes1D, ...]:
        """The bytes of a slot in place, one writable array for each part; to be used only while the slot is held."""
        run = next(self._table.runs(as_slots((slot,))))
        return tuple(region[run.index] for region in run.holder.regions)

    def write(self, slots: Slots, rows: Bytes2D, *, part: int | None = None) -> None:
        """Copy rows into slots: [n, part_bytes] of one part, or [n, block_bytes] with all parts one after the other."""
        for inside, outside in self._copies(slots, rows, part):
            inside[...] = outside

    def read(self, slots: Slots, rows: Bytes2D, *, part: int | None = None) -> None:
        """Copy slots into rows; shapes as in write()."""
        for inside, outside in self._copies(slots, rows, part):
            outside[...] = inside

    def close(self) -> None:
        """Drop all extents; only the tier calls this."""
        with self._lock:
            self._closed = True
            for slot_range in self._table.ranges:
                self._budget.refund(slot_range.count * self._block_bytes)
            self._table = HolderTable()
            self._slots = SlotMap()

    def _copies(self, slots: Slots, rows: Bytes2D, part: int | None) -> Iterator[tuple[Bytes2D, Bytes2D]]:
        """Pairs (bytes in the tier, bytes in rows), one for each run of neighbouring slots and part."""
        parts = tuple(range(len(self._part_sizes))) if part is None else (part,)
        width = sum(self._part_sizes[number] for number in parts)
        assert rows.shape == (len(slots), width), (rows.shape, len(slots), width)
        for run in self._table.runs(as_slots(slots)):
            offset = 0
            for number in parts:
                size = self._part_sizes[number]
                inside = run.holder.regions[number][run.index : run.index + run.count]
                yield inside, rows[run.start : run.start + run.count, offset : offset + size]
                offset += size

    def _reserved_bytes(self) -> int:
        return (self._slots.used_slots + self._slots.free_slots) * self._block_bytes

    def _grow(self) -> bool:
        left_bytes = None if self._bytes_max is None else self._bytes_max - self._reserved_bytes()
        count = 0 if self._closed else self._budget.claim(self._block_bytes, left_bytes)
        if count == 0:
            return False
        try:
            extent = _new_extent(self._part_sizes, count)
        except (OSError, ValueError, OverflowError):  # mmap raises the latter two for sizes beyond the address space
            self._budget.refuse(count * self._block_bytes)
            return False
        self._table = self._table.with_added(self._slots.add(count), extent)
        return True


class _ExtentBudget:
    """The tier's capacity, from which pools claim extents. Thread-safe."""

    def __init__(self, capacity_bytes: int, extent_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.reserved_bytes = 0
        self.refused_extents = 0
        self._extent_bytes = extent_bytes
        self._lock = threading.Lock()

    def claim(self, block_bytes: int, bytes_max: int | None) -> int:
        """Reserve an extent and return its slots: the usual size, at least one slot, at most what is left."""
        with self._lock:
            left_bytes = self.capacity_bytes - self.reserved_bytes
            if bytes_max is not None:
                left_bytes = min(left_bytes, bytes_max)
            count = min(max(self._extent_bytes, block_bytes), left_bytes) // block_bytes
            self.reserved_bytes += count * block_bytes
            return count

    def refund(self, extent_bytes: int) -> None:
        with self._lock:
            self.reserved_bytes -= extent_bytes

    def refuse(self, extent_bytes: int) -> None:
        """Take back a claim whose memory the system refused."""
        with self._lock:
            self.reserved_bytes -= extent_bytes
            self.refused_extents += 1


@dataclass(frozen=True, slots=True, eq=False)
class _Extent:
    """Zeroed shared memory: for each part a region of shape (slots, part_bytes). Unmapped with its last view."""

    regions: tuple[Bytes2D, ...]


def _new_extent(part_sizes: tuple[int, ...], count: int) -> _Extent:
    return _Extent(tuple(_new_region(count, part_bytes) for part_bytes in part_sizes))


def _new_region(count: int, part_bytes: int) -> Bytes2D:
    fd = os.memfd_create("kvstore-host", os.MFD_CLOEXEC)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, count * part_bytes)
        mapping = mmap.mmap(fd, count * part_bytes)  # keeps a descriptor of its own
    finally:
        os.close(fd)
    return np.frombuffer(mapping, dtype=np.uint8).reshape(count, part_bytes)


def _check_capacity(capacity_bytes: int, limit: MemoryLimit | None) -> None:
    if limit is not None and capacity_bytes > limit.available_bytes:
        raise StorageError(
            f"host capacity is {capacity_bytes} bytes, but the {limit.source} leaves {limit.available_bytes}; "
            "lower the host capacity or raise the limit"
        )
