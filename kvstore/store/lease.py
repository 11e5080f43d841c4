"""Reading: a lease on a matched prefix, and loads from wherever its blocks lie."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.buffers import writable_rows
from kvstore.errors import InvalidArgumentError
from kvstore.radix.tree import NO_SLOT
from kvstore.store.handles import OpenLease
from kvstore.store.interrupts import uninterrupted
from kvstore.store.moving import place_on_host, read_from_disk
from kvstore.store.placement import leading
from kvstore.types import LoadResult, Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    from numpy.typing import NDArray

    from kvstore.api import BlockBuffer
    from kvstore.store.index import Index
    from kvstore.store.leased_parts import LeasedParts
    from kvstore.store.space import Space
    from kvstore.tiers.host import HostPool
    from kvstore.types import BlockIds, Slots

_DISK_BATCH_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class LeasedPlaces:
    """Slots of a pool in which blocks of a lease lie, those from `first_block` on, true until it ends.

    `index` is the number of a sparse part among those of its pool.
    """

    pool: HostPool
    slots: Slots
    first_block: int = 0
    index: int = 0


class StoreLease(OpenLease):
    """A kvstore.api.Lease on blocks of this process's store."""

    def __init__(
        self,
        index: Index,
        space: Space,
        ids: BlockIds,
        forget: Callable[[StoreLease], None],
        sparse: LeasedParts,
    ) -> None:
        super().__init__(index.clock.monotonic() + index.settings.lease_seconds_max)
        self._index = index
        self._space = space
        self._ids = ids
        self._sparse = sparse
        self._forget = forget
        # Guarded by _lock: who is told of the end; and by part, leading blocks that were counted as read in place.
        self._endings: list[Callable[[], None]] = []
        self._placed: dict[int | None, int] = {}

    @property
    def blocks(self) -> int:
        """Number of blocks protected."""
        return int(self._ids.size)

    def load_into(self, buffer: BlockBuffer, *, from_block: int = 0, part: int | None = None) -> LoadResult:
        """Copy blocks into the rows of `buffer`; see kvstore.api.Lease."""
        layout = self._space.layout
        row_bytes = layout.block_bytes if part is None else layout.part_bytes(part)
        rows = writable_rows(buffer, row_bytes)
        if from_block < 0:
            raise InvalidArgumentError(f"from_block is {from_block}, expected at least 0")
        with self._lock:
            self._check_open()
            if part is not None and layout.group_of(part) is not None:
                loaded, requested = self._sparse.load(rows, from_block, part)
            else:
                ids = self._ids[from_block : from_block + len(rows)]
                loaded, requested = self._load(ids, rows, part), int(ids.size)
        if layout.groups and loaded < requested:
            loaded = 0  # a shorter prefix without its sparse parts is of no use
        return LoadResult(loaded, requested, loaded * row_bytes)

    @contextmanager
    def lend(self, *, from_block: int, blocks: int, part: int | None) -> Iterator[list[NDArray[np.uint8]]]:
        """The bytes of leading blocks that lie in host memory, in place; whole rows, one after the other.

        Fewer than asked, or none, if the rest lies on disk. The blocks are held while they are lent, whatever becomes
        of the lease meanwhile, so a slow reader delays nobody. Raises ClosedError if the lease has ended.
        """
        if part is not None and self._space.layout.group_of(part) is not None:
            yield []  # sparse parts are read by copies
            return
        with self._lock:
            self._check_open()
            ids = self._ids[from_block : from_block + blocks]
            with self._index.lock:
                slots = self._space.tree.slots(ids, Tier.HOST)
                count = leading(slots != NO_SLOT) if ids.size else 0
                held = self._ids[: from_block + count]  # from the root on, as all holds
                self._space.tree.lease(held)
        try:
            yield self._space.host.pieces(slots[:count], part=part)
            layout = self._space.layout
            row_bytes = layout.block_bytes if part is None else layout.part_bytes(part)
            self._count_loaded(Tier.HOST, count, count * row_bytes)
        finally:
            with self._index.lock:
                freed = self._space.release(held)
            freed.settle()

    def places(self, *, part: int | None) -> LeasedPlaces:
        """Where leading blocks lie in host memory, for who reads them there; counts each as loaded once, by `part`.

        Of a sparse part: where the leading ones lie of those that the match needs. They are right as long as the lease
        has not ended; see `watch`. Raises ClosedError if it has.
        """
        if part is not None and self._space.layout.group_of(part) is not None:
            return self._sparse_places(part)
        with self._lock:
            self._check_open()
            with self._index.lock:
                slots = self._space.tree.slots(self._ids, Tier.HOST)
            slots = slots[: leading(slots != NO_SLOT)]
            new_blocks = max(0, int(slots.size) - self._placed.get(part, 0))
            self._placed[part] = int(slots.size)
        layout = self._space.layout
        row_bytes = layout.block_bytes if part is None else layout.part_bytes(part)
        self._count_loaded(Tier.HOST, new_blocks, new_blocks * row_bytes)
        return LeasedPlaces(self._space.host, slots)

    def watch(self, ended: Callable[[], None]) -> None:
        """Have `ended` called once, when the lease has ended and before any of its slots can be used again.

        It must not wait. Raises ClosedError if the lease has ended.
        """
        with self._lock:
            self._check_open()
            self._endings.append(ended)

    def _tell_end(self) -> None:
        for ended in self._endings:
            ended()

    def _let_go(self) -> None:
        with self._index.lock:
            freed = self._space.release(self._ids, self._sparse.hold)
        self._index.settle(freed)
        self._forget(self)

    def _sparse_places(self, part: int) -> LeasedPlaces:
        with self._lock:
            self._check_open()
            group = self._sparse.group(part)
            with self._index.lock:
                slots = self._sparse.slots(part)
                new_blocks = max(0, int(slots.size) - self._placed.get(part, 0))
                self._space.budget.earn(new_blocks * self._space.layout.part_bytes(part))
            self._placed[part] = int(slots.size)
            return LeasedPlaces(group.host, slots, self._sparse.first_block(part), part - group.parts.start)

    def _load(self, ids: BlockIds, rows: NDArray[np.uint8], part: int | None) -> int:
        """Load run by run, each from its tier; stops at the first block that is not right."""
        done = 0
        while done < ids.size:
            with self._index.lock:
                on_host = self._space.tree.slots(ids[done:], Tier.HOST)
            if on_host[0] != NO_SLOT:
                run = leading(on_host != NO_SLOT)
                self._space.host.read(on_host[:run], rows[done : done + run], part=part)
                tier, good = Tier.HOST, run
            else:
                run = min(leading(on_host == NO_SLOT), max(1, _DISK_BATCH_BYTES // rows.shape[1]))
                tier, good = Tier.DISK, self._load_from_disk(ids[done : done + run], rows[done : done + run], part)
            self._count_loaded(tier, good, good * rows.shape[1])
            done += good
            if good < run:
                break
        return done

    def _load_from_disk(self, ids: BlockIds, rows: NDArray[np.uint8], part: int | None) -> int:
        good = read_from_disk(self._index, self._space, ids, rows, part)
        if part is None:
            self._promote(ids[:good], rows[:good])
        return good

    @uninterrupted
    def _promote(self, ids: BlockIds, rows: NDArray[np.uint8]) -> None:
        """Keep what was read from disk in host memory too, as far as there is free room."""
        slots = self._space.host.allocate(int(ids.size))
        if slots.size:
            count = slots.size
            place_on_host(self._index, self._space, ids[:count], rows[:count], slots)

    def _count_loaded(self, tier: Tier, blocks: int, loaded_bytes: int) -> None:
        with self._index.lock:
            loaded_tokens = self._index.accounting.loaded_tokens
            loaded_tokens[tier.name.lower()] += blocks * self._space.layout.block_tokens
            self._space.budget.earn(loaded_bytes)
