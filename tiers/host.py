"""The host tier: blocks in shared memory, cut into extents that are lent to one namespace each."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

from kvstore.errors import ClosedError, LayoutMismatchError, StorageError
from kvstore.tiers.extent_stock import ExtentStock, HostMemory
from kvstore.tiers.host_copy import ExtentTable
from kvstore.tiers.memory_limit import memory_limit
from kvstore.tiers.slots import SlotMap, as_slots

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from kvstore.tiers.base import Bytes1D, Bytes2D, SlotRange
    from kvstore.tiers.extent import Extent, ExtentHold, Geometry
    from kvstore.tiers.extent_stock import HostMemoryState
    from kvstore.tiers.memory_limit import MemoryLimit
    from kvstore.types import Slots

EXTENT_BYTES_MIN = 4 << 20
_EXTENTS_MIN = 4  # so that namespaces have room beside each other in a small memory, too
EXTENT_BYTES_MAX = 256 << 20
EXTENTS_MAX = 1024  # each takes a descriptor; where it would be more, extents are larger
POISON = 0xDB
RECALL_SECONDS = 0.02  # a process that is well has unmapped within 1-2 ms
_MIB = 1 << 20
_DEFAULT_MEMORY = HostMemory()


class HostTier:
    """Host memory of a fixed capacity, lent to pools extent by extent. Thread-safe.

    Each extent is one memfd (mode 0600) with a region for each part of a block, so that other processes can map the
    parts that they need. Slots are packed without gaps; each region begins on a page of its own. `freed_fill` is the
    byte that freed slots are filled with, for debugging: so a reader of freed memory is seen. Raises StorageError if
    `capacity_bytes` is more than the machine or its control group allows now.

    Locks: a pool's lock before the tier's lock and the stock's.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        extent_bytes: int | None = None,
        freed_fill: int | None = None,
        limit: MemoryLimit | None = None,
        memory: HostMemory = _DEFAULT_MEMORY,
    ) -> None:
        _check_capacity(capacity_bytes, limit or memory_limit())
        self._stock = ExtentStock(capacity_bytes, extent_bytes or default_extent_bytes(capacity_bytes), memory)
        self._finalizer = weakref.finalize(self, self._stock.close)  # ends its thread where nobody closes the tier
        self._freed_fill = freed_fill
        self._lock = threading.Lock()
        self._pools: dict[bytes, HostPool] = {}
        self._closed = False

    @property
    def capacity_bytes(self) -> int:
        """Bytes that extents may take in all; sinks where the system turns out to have less."""
        return self._stock.capacity_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the extents that pools hold now, and of those that went back but are still held by somebody."""
        return self._stock.claimed_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots handed out."""
        with self._lock:
            pools = tuple(self._pools.values())
        return sum(pool.used_slots * pool.block_bytes for pool in pools)

    @property
    def refused_extents(self) -> int:
        """How often the system refused the memory of an extent that the capacity would have allowed."""
        return self._stock.state().refused_extents

    def memory(self) -> HostMemoryState:
        """What memory the tier has now: pages, and how much is touched and locked."""
        return self._stock.state()

    def wait_ready(self, seconds: float) -> bool:
        """Wait until the memory that is taken in the background is there, touched and locked; false if that is late."""
        return self._stock.wait_ready(seconds)

    def pool(self, ns_id: bytes, part_sizes: tuple[int, ...], *, bytes_max: int | None = None) -> HostPool:
        """The pool of a namespace, made at the first call. Raises LayoutMismatchError if it has other part sizes.

        Its extents never take more than `bytes_max`, as the first call says.
        """
        with self._lock:
            if self._closed:
                raise ClosedError("the host tier is closed")
            pool = self._pools.get(ns_id)
            if pool is None:
                pool = self._pools[ns_id] = HostPool(part_sizes, self, self._stock, self._freed_fill, bytes_max)
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
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class ExtentPlace:
    """An extent of a pool: its id, never used again in this process, its slots, and how they lie in it."""

    extent_id: int
    slots: SlotRange
    geometry: Geometry


@dataclass(frozen=True, slots=True)
class SlotPlace:
    """Where one part of a slot lies: the bytes [offset, offset + nbytes) of an extent."""

    extent_id: int
    offset: int
    nbytes: int


class HostPool:
    """The slots of one namespace in host memory; implements kvstore.tiers.base.Pool.

    Thread-safe. Copies take no lock: slots belong to their caller, and extents with used slots never go away.

    For other processes that map extents: `extents()` and `place()` say where slots lie, `hold()` gives descriptors and
    keeps an extent from going to another namespace until it is released, `retire()` takes an extent out of use while
    it is held. What goes to another namespace is always new, zeroed memory: an old mapping shows none of it.
    """

    def __init__(
        self,
        part_sizes: tuple[int, ...],
        tier: HostTier,
        stock: ExtentStock,
        freed_fill: int | None,
        bytes_max: int | None = None,
    ) -> None:
        assert part_sizes, "a block has at least one part"
        assert min(part_sizes) > 0, part_sizes
        self._part_sizes = part_sizes
        self._block_bytes = sum(part_sizes)
        self._tier = tier  # lives as long as its pools: who drops it unclosed must not pull memory from under them
        self._stock = stock
        self._freed_fill = freed_fill
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._slots = SlotMap()
        self._table = ExtentTable(part_sizes)
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

    def is_kept(self, slot_range: SlotRange) -> bool:
        """Whether an extent cannot go to another namespace: somebody maps it, or it is gone.

        Who maps it is asked to let go, and gets RECALL_SECONDS for that, once.
        """
        with self._lock:
            if slot_range not in self._slots.ranges():
                return True
            extent = self._table.holders.holder_of(slot_range)
        return not self._stock.recall(extent, RECALL_SECONDS)

    def give_back(self, slot_range: SlotRange) -> bool:
        """Return one extent to the tier if all its slots are free and nobody holds it; else false and unchanged.

        Who maps it is asked to let go, as is_kept() does.
        """
        with self._lock:
            if slot_range not in self._slots.ranges() or not self._slots.is_free(slot_range):
                return False
            extent = self._table.holders.holder_of(slot_range)
        if not self._stock.recall(extent, RECALL_SECONDS):
            return False
        with self._lock:
            if slot_range not in self._slots.ranges() or not self._slots.is_free(slot_range):
                return False
            if not self._stock.give_back(self._table.holders.holder_of(slot_range)):
                return False
            self._remove(slot_range)
            return True

    def retire(self, slot_range: SlotRange) -> bool:
        """Take one extent out of use if all its slots are free; false and unchanged otherwise.

        Where it is held, its memory counts as reserved until the last hold is released, and goes then.
        """
        with self._lock:
            if not self._slots.is_free(slot_range):
                return False
            self._stock.retire(self._table.holders.holder_of(slot_range))
            self._remove(slot_range)
            return True

    def extents(self) -> tuple[ExtentPlace, ...]:
        """The extents the pool has now, by slot number."""
        return tuple(_place_of(slot_range, extent) for slot_range, extent in self._table.extents)

    def extents_of(self, slots: Slots) -> tuple[ExtentPlace, ...]:
        """The extents that hold `slots`, by slot number; of slots that nobody holds it says nothing of use."""
        wanted = np.unique(np.asarray(slots, dtype=np.int64))
        table = self._table
        firsts = np.array([item.first for item in table.holders.ranges], dtype=np.int64)
        numbers = np.unique(np.searchsorted(firsts, wanted, side="right") - 1)
        numbers = numbers[numbers >= 0]
        return tuple(_place_of(table.holders.ranges[number], table.holders.holders[number]) for number in numbers)

    def place(self, slot: int, part: int) -> SlotPlace:
        """Where a part of a slot lies; true as long as the slot is held."""
        run = next(self._table.runs(as_slots((slot,))))
        assert run.holder.geometry is not None, run.holder.extent_id
        size = self._part_sizes[part]
        return SlotPlace(run.holder.extent_id, run.holder.geometry.part_offsets[part] + run.index * size, size)

    def hold(self, extent_id: int, recall: Callable[[], None] | None = None) -> ExtentHold | None:
        """Keep an extent, for a process that maps it; None if the pool does not have it any more.

        `recall` is told, from any thread, when the extent is wanted back; see ExtentHold.
        """
        with self._lock:
            extent = next((extent for _, extent in self._table.extents if extent.extent_id == extent_id), None)
            return None if extent is None else self._stock.hold(extent, recall)

    def views(self, slot: int) -> tuple[Bytes1D, ...]:
        """The bytes of a slot in place, one writable array for each part; to be used only while the slot is held."""
        run = next(self._table.runs(as_slots((slot,))))
        return tuple(region[run.index] for region in run.holder.regions)

    def pieces(self, slots: Slots, *, part: int | None = None) -> list[Bytes1D]:
        """The bytes of slots in place, in the order that read() would copy them, each piece as long as it is in memory.

        Writable, and to be used only while the slots are held.
        """
        parts = range(len(self._part_sizes)) if part is None else (part,)
        pieces: list[Bytes1D] = []
        for run in self._table.runs(as_slots(slots)):
            regions = [run.holder.regions[number][run.index : run.index + run.count] for number in parts]
            if len(regions) == 1:
                pieces.append(regions[0].reshape(-1))
            else:
                pieces.extend(region[row] for row in range(run.count) for region in regions)
        return pieces

    def write(self, slots: Slots, rows: Bytes2D, *, part: int | None = None) -> None:
        """Copy rows into slots: [n, part_bytes] of one part, or [n, block_bytes] with all parts one after the other."""
        self._table.write(as_slots(slots), rows, part)

    def read(self, slots: Slots, rows: Bytes2D, *, part: int | None = None) -> None:
        """Copy slots into rows; shapes as in write()."""
        self._table.read(as_slots(slots), rows, part)

    def close(self) -> None:
        """Drop all extents; only the tier calls this."""
        with self._lock:
            self._closed = True
            for _, extent in self._table.extents:
                self._stock.retire(extent)
            self._table = ExtentTable(self._part_sizes)
            self._slots = SlotMap()

    def _remove(self, slot_range: SlotRange) -> None:
        self._slots.remove(slot_range)
        self._table = self._table.without(slot_range)

    def _reserved_bytes(self) -> int:
        return (self._slots.used_slots + self._slots.free_slots) * self._block_bytes

    def _grow(self) -> bool:
        left_bytes = None if self._bytes_max is None else self._bytes_max - self._reserved_bytes()
        extent = None if self._closed else self._stock.claim(self._part_sizes, left_bytes)
        if extent is None:
            return False
        assert extent.geometry is not None, extent.extent_id
        self._table = self._table.with_added(self._slots.add(extent.geometry.slot_count), extent)
        return True


def _place_of(slot_range: SlotRange, extent: Extent) -> ExtentPlace:
    assert extent.geometry is not None, extent.extent_id
    return ExtentPlace(extent.extent_id, slot_range, extent.geometry)


def default_extent_bytes(capacity_bytes: int) -> int:
    """A sixteenth of the capacity between 4 and 256 MiB; less where they were too few, more where too many."""
    least = min(EXTENT_BYTES_MIN, max(1, capacity_bytes // _EXTENTS_MIN))
    usual = min(max(capacity_bytes // 16, least), EXTENT_BYTES_MAX)
    if usual * EXTENTS_MAX >= capacity_bytes:
        return usual
    return -(-capacity_bytes // EXTENTS_MAX // _MIB) * _MIB


def _check_capacity(capacity_bytes: int, limit: MemoryLimit | None) -> None:
    if limit is not None and capacity_bytes > limit.available_bytes:
        raise StorageError(
            f"host capacity is {capacity_bytes} bytes, but the {limit.source} leaves {limit.available_bytes}; "
            "lower the host capacity or raise the limit"
        )
