"""Prefetching: what a prompt has on disk moves up into host memory while its request waits in the engine's queue.

A connector can be promised only what lies in host memory. A prefetch takes no room from what is worth more, fills no
more of host memory at a time than its reserve, brings the head of a prefix first, and ends early when nobody wants it
any more. It is refused at once where too many are under way.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np

from kvstore.radix.tree import NO_SLOT
from kvstore.store.moving import place_on_host, read_from_disk
from kvstore.store.placement import leading, prefetch_blocks, prefetch_price, promote
from kvstore.types import Tier

if TYPE_CHECKING:
    from types import TracebackType

    from numpy.typing import NDArray

    from kvstore.store.index import Index
    from kvstore.store.movers import Movers
    from kvstore.store.room import RoomMaker
    from kvstore.store.space import Found, Space
    from kvstore.store.sparse import SparseHold
    from kvstore.types import BlockIds

_BATCH_BYTES = 16 << 20  # between two looks whether it is still wanted; in that time, at 2 GB/s, 8 ms pass
_BUFFERS_MAX = 2


class Awaited(Protocol):
    """What a caller of a prefetch waits for."""

    host_blocks: int
    ended: threading.Event

    def leave(self) -> None:
        """One who was interested is not any more."""
        ...


class StorePrefetch:
    """A kvstore.api.Prefetch in this process's store: one caller's interest in a job, which others may share."""

    def __init__(self, job: Awaited) -> None:
        self._job = job
        self._lock = threading.Lock()
        self._wanted = True

    @property
    def host_blocks(self) -> int:
        """Leading blocks of the prompt that were in host memory when that was last looked at."""
        return self._job.host_blocks

    @property
    def done(self) -> bool:
        """Whether it has ended, however."""
        return self._job.ended.is_set()

    def wait(self, seconds: float | None = None) -> int:
        """Wait until it has ended, at most so long; returns `host_blocks`."""
        self._job.ended.wait(seconds)
        return self.host_blocks

    def cancel(self) -> None:
        """Stop it, unless others want the same; idempotent."""
        with self._lock:
            wanted, self._wanted = self._wanted, False
        if wanted:
            self._job.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


@dataclass(frozen=True, slots=True)
class HeldMatch:
    """A match that is held, how much of its head lies in host memory, and what is missing there of all of it."""

    ids: BlockIds
    sparse: SparseHold
    host_blocks: int
    missing_blocks: int
    missing_sparse_bytes: int


class PrefetchJob:
    """A prompt's matched blocks on their way up; one for each prompt, whoever waits for it.

    It holds its blocks (`ids` and `sparse`, held by its maker) until it has ended. `interested` is guarded by the
    owner's lock.
    """

    def __init__(self, owner: Prefetcher, space: Space, held: HeldMatch) -> None:
        self.space = space
        self.ids = held.ids
        self.sparse = held.sparse
        self.host_blocks = held.host_blocks
        self.limit = held.missing_blocks  # dense blocks that it may bring
        self.sparse_bytes = held.missing_sparse_bytes
        self.interested = 1
        self.cancelled = False
        self.ended = threading.Event()
        self._owner = owner

    @property
    def key(self) -> tuple[bytes, int]:
        """Of one prompt: the last block is held, so its id names nothing else meanwhile."""
        return self.space.ns_id, int(self.ids[-1])

    @property
    def reserved_bytes(self) -> int:
        """What it takes of the reserve."""
        return self.limit * self.space.layout.block_bytes + self.sparse_bytes

    def run(self) -> None:
        """Bring the blocks up; on a mover's thread."""
        self._owner.run(self)

    def drop(self) -> None:
        """End without having run."""
        self._owner.finish(self, "cancelled")

    def leave(self) -> None:
        """One who was interested is not any more."""
        self._owner.leave(self)


class Prefetcher:
    """Owner of the prefetches of one store. `_lock` guards jobs and buffers; only the movers' is taken inside it."""

    def __init__(self, index: Index, room: RoomMaker, movers: Movers) -> None:
        self._index = index
        self._room = room
        self._movers = movers
        self._lock = threading.Lock()
        self._jobs: dict[tuple[bytes, int], PrefetchJob] = {}
        self._buffers: list[NDArray[np.uint8]] = []

    def start(self, space: Space, found: Found) -> StorePrefetch:
        """Begin to bring up what was found, or join those who wait for the same; returns at once."""
        with self._index.lock:
            job = PrefetchJob(self, space, _hold(space, space.sparse.usable(space.confirm(found))))
        if not job.reserved_bytes:
            self._end(job, "present")
            return StorePrefetch(job)
        with self._lock:
            other = self._jobs.get(job.key)
            if other is not None:
                other.interested += 1
                other.cancelled = False
            refusal = "joined" if other is not None else self._enter(job)
        if refusal is not None:
            self._end(job, refusal)
        return StorePrefetch(job if other is None else other)

    def leave(self, job: PrefetchJob) -> None:
        """Take one interest back; without any the job ends, at once if it has not begun."""
        with self._lock:
            job.interested -= 1
            job.cancelled = job.interested == 0
            is_withdrawn = job.cancelled and self._movers.withdraw(job)
            if is_withdrawn:
                del self._jobs[job.key]  # under the same hold of the lock: nobody joins what never runs
        if is_withdrawn:
            self._end(job, "cancelled")

    def cancel_all(self) -> None:
        """Let all end soon: the store closes."""
        with self._lock:
            for job in self._jobs.values():
                job.cancelled = True

    def run(self, job: PrefetchJob) -> None:
        """Bring blocks up, batch by batch."""
        outcome = "failed"
        try:
            buffer = self._take_buffer(job.space.layout.block_bytes)
            outcome = self._bring_all(job, buffer)
            self._give_back(buffer)
        finally:
            self.finish(job, outcome)

    def finish(self, job: PrefetchJob, outcome: str) -> None:
        """End a job that was entered."""
        with self._lock:
            del self._jobs[job.key]
        self._end(job, outcome)

    def _enter(self, job: PrefetchJob) -> str | None:
        """Queue a job, shortened to what is left of the reserve; why not, if not. `_lock` is held."""
        # Of the capacity as it is now: it sinks where the system turns out to have less.
        reserve_bytes = int(self._index.host.capacity_bytes * self._index.settings.prefetch_ratio)
        left_bytes = reserve_bytes - sum(other.reserved_bytes for other in self._jobs.values())
        wanted_blocks = job.limit
        job.limit = prefetch_blocks(job.limit, job.space.layout.block_bytes, left_bytes - job.sparse_bytes)
        if job.sparse_bytes > left_bytes or (wanted_blocks and not job.limit):
            return "reserve_full"
        self._jobs[job.key] = job
        if not self._movers.offer(job):
            del self._jobs[job.key]
            return "queue_full"
        return None

    def _end(self, job: PrefetchJob, outcome: str) -> None:
        with self._index.lock:
            job.host_blocks = job.space.host_blocks(job.ids)
            freed = job.space.release(job.ids, job.sparse)
            self._index.accounting.prefetches[outcome] += 1
        self._index.settle(freed)
        job.ended.set()

    def _bring_all(self, job: PrefetchJob, buffer: NDArray[np.uint8]) -> str:
        left = job.limit
        while not job.cancelled:
            with self._index.lock:
                on_host = job.space.tree.slots(job.ids, Tier.HOST) != NO_SLOT
                job.host_blocks = job.space.host_blocks(job.ids)
            batch = promote(on_host, min(left, buffer.size // job.space.layout.block_bytes))
            if not batch.size:
                return "done" if self._bring_sparse(job) else "no_room"
            count = self._bring(job.space, job.ids[batch], buffer)
            left -= count
            if count < batch.size:
                self._bring_sparse(job)
                return "no_room"
        return "cancelled"

    def _bring_sparse(self, job: PrefetchJob) -> bool:
        """Bring up the sparse parts that the deepest match of what is there needs; false if not all came."""
        space = job.space
        if not space.sparse.groups:
            return True
        with self._index.lock:
            dense = job.ids[: leading(space.tree.slots(job.ids, Tier.HOST) != NO_SLOT)]
            ids = space.sparse.usable(dense)
            hold = space.sparse.hold(ids)
            values = space.tree.values(ids, self._index.latest_tick)
        try:
            price = space.worth(prefetch_price(values)) if ids.size else 0.0
            groups = zip(space.sparse.groups, hold.blocks, strict=True)
            return all(self._room.sparse.bring_up(space, group, blocks, price) for group, blocks in groups)
        finally:
            with self._index.lock:
                freed = space.release(ids[:0], hold)
            self._index.settle(freed)

    def _bring(self, space: Space, ids: BlockIds, buffer: NDArray[np.uint8]) -> int:
        """Bring up some blocks that lie on disk alone; how many, from the first one on, are in host memory now."""
        with self._index.lock:
            price = space.worth(prefetch_price(space.tree.values(ids, self._index.latest_tick)))
        slots = self._room.host_slots(space, int(ids.size), price)
        good = 0
        try:
            block_bytes = space.layout.block_bytes
            rows = buffer[: slots.size * block_bytes].reshape(slots.size, block_bytes)
            if slots.size:
                good = read_from_disk(self._index, space, ids[: slots.size], rows)
        finally:
            space.host.free(slots[good:])
        if not good:
            return 0
        placed = place_on_host(self._index, space, ids[:good], rows[:good], slots[:good])
        with self._index.lock:
            self._index.accounting.prefetched_blocks += placed
        return good

    def _take_buffer(self, block_bytes: int) -> NDArray[np.uint8]:
        """Memory for one batch, at least one block; reused, since fresh pages cost more than the copy."""
        if block_bytes <= _BATCH_BYTES:
            with self._lock:
                if self._buffers:
                    return self._buffers.pop()
        return np.empty(max(_BATCH_BYTES, block_bytes), dtype=np.uint8)

    def _give_back(self, buffer: NDArray[np.uint8]) -> None:
        with self._lock:
            if buffer.size == _BATCH_BYTES and len(self._buffers) < _BUFFERS_MAX:
                self._buffers.append(buffer)


def _hold(space: Space, ids: BlockIds) -> HeldMatch:
    """Hold what is there of a prompt; the index lock must be held."""
    space.tree.lease(ids)
    sparse = space.sparse.hold(ids)
    missing_bytes = sum(
        group.host.slot_bytes
        for group, blocks in zip(space.sparse.groups, sparse.blocks, strict=False)
        for block in blocks
        if Tier.HOST not in block.slots
    )
    missing_blocks = int((space.tree.slots(ids, Tier.HOST) == NO_SLOT).sum())
    return HeldMatch(ids, sparse, space.host_blocks(ids), missing_blocks, missing_bytes)


class WriteThrough:
    """A prompt that was just stored, to be written to disk."""

    def __init__(self, room: RoomMaker, space: Space, found: Found) -> None:
        self._room = room
        self._space = space
        self._found = found

    @property
    def blocks(self) -> int:
        """How many blocks of it there were."""
        return int(self._found.ids.size)

    def run(self) -> None:
        """Write what is there of it still."""
        self._room.write_through(self._space, self._found)

    def drop(self) -> None:
        """The store closes, and flushes."""
