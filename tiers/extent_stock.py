"""The memory of the host tier: what may be taken, what is lent, and what lies ready, reserved and touched.

One thread for a tier, `kvstore-host-memory`, makes extents ahead of their use and touches them piece by piece, at low
priority. It ends with the stock. A claim never waits for it: what is not ready yet is made on the spot, untouched.
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.tiers.extent import Extent, ExtentHold, geometry
from kvstore.tiers.huge_pages import PLAIN_PAGES, PageChoice, PageKind, choose_pages, huge_bytes
from kvstore.tiers.memory_limit import memory_limit
from kvstore.tiers.page_lock import KernelLocker, lock_in_pieces

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.tiers.memory_limit import MemoryLimit
    from kvstore.tiers.page_lock import PageLocker

_PIECE_BYTES = 16 << 20  # at 1.9-6.6 GB/s, what close() may have to wait for
_MARGIN_BYTES = 64 << 20  # what touching leaves to the rest of the process
_CHECKED_BYTES = 16 << 20  # smaller extents are made without a look at the limits, which takes 0.1-0.3 ms
_NICE = 10

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """How the host tier takes its memory. config.py says how users set it.

    Tiers of `reserve_from_bytes` and more are reserved and touched in the background from the start on, smaller ones
    take extents as they fill.
    """

    huge_pages: str = "auto"
    lock_memory: bool = False
    reserve_from_bytes: int = 128 << 20


@dataclass(frozen=True, slots=True)
class HostMemoryState:
    """What host memory a tier has now. `huge_bytes` is measured when all is touched, else 0."""

    pages: PageKind
    capacity_bytes: int
    extents: int
    touched_bytes: int
    huge_bytes: int
    locked_bytes: int
    held_extents: int
    refused_extents: int


class ExtentStock:
    """The tier's capacity in extents: spare ones, lent ones, and retired ones that somebody still maps. Thread-safe.

    Capacity is counted in bytes of slots; what lies spare counts in whole. `capacity_bytes` sinks, with one warning,
    where the system turns out to have less. Calls nothing of the tier or its pools.
    """

    def __init__(
        self,
        capacity_bytes: int,
        extent_bytes: int,
        memory: HostMemory,
        limit: Callable[[], MemoryLimit | None] = memory_limit,
    ) -> None:
        self._extent_bytes = extent_bytes
        self._pages = choose_pages(memory.huge_pages, capacity_bytes)
        self._limit = limit
        self._locker: PageLocker | None = KernelLocker() if memory.lock_memory else None
        self._reserves = capacity_bytes >= memory.reserve_from_bytes
        self._changed = threading.Condition()
        # All below is guarded by _changed.
        self._capacity_bytes = capacity_bytes
        self._spare: list[Extent] = []
        self._lent: dict[Extent, int] = {}  # with the bytes of their slots
        self._retired: dict[Extent, int] = {}
        self._holds: dict[Extent, set[ExtentHold]] = {}
        self._unanswered: set[ExtentHold] = set()  # asked for, and not released yet
        self._claimed_bytes = 0  # of lent and retired extents, and of those about to be lent
        self._refused_extents = 0
        self._huge_bytes = 0
        self._is_working = False
        self._in_work: Extent | None = None
        self._dropped: list[Extent] = []  # to be unmapped by the thread: it takes 45 ms for 256 MiB
        self._left_alone: set[Extent] = set()  # lent, and not to be touched for lack of memory
        self._warned = False
        self._told = False
        self._closed = False
        self._thread: threading.Thread | None = None
        if self._reserves or self._locker is not None:
            self._start()

    @property
    def capacity_bytes(self) -> int:
        """Bytes of slots that extents may have in all."""
        with self._changed:
            return self._capacity_bytes

    @property
    def claimed_bytes(self) -> int:
        """Bytes of slots that lent extents have, and retired ones that are still held."""
        with self._changed:
            return self._claimed_bytes

    def state(self) -> HostMemoryState:
        """What there is now."""
        with self._changed:
            extents = [*self._spare, *self._lent, *self._retired]
            return HostMemoryState(
                pages=self._pages.kind,
                capacity_bytes=self._capacity_bytes,
                extents=len(extents),
                touched_bytes=sum(extent.touched_bytes for extent in extents),
                huge_bytes=self._huge_bytes,
                locked_bytes=sum(extent.locked_bytes for extent in extents),
                held_extents=len(self._holds),
                refused_extents=self._refused_extents,
            )

    def wait_ready(self, seconds: float) -> bool:
        """Wait until all there is to reserve, touch and lock is; false if that takes longer."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._thread is None or (self._is_done() and not self._is_working), seconds
            )

    def claim(self, part_sizes: tuple[int, ...], bytes_max: int | None) -> Extent | None:
        """An extent of the usual size, at least one slot, cut for these parts; less if less is left or allowed.

        None where nothing is left or the system refuses. Its memory is zeroed and was never another namespace's.
        """
        with self._changed:
            count = self._slots_for(part_sizes, bytes_max)
            if count == 0 or self._closed:
                return None
            shape = geometry(part_sizes, count)
            slot_bytes = count * sum(part_sizes)
            self._claimed_bytes += slot_bytes
            extent = self._take_spare(shape.nbytes)
            self._trim()
        try:
            extent = extent or self._make_to_lend(shape.nbytes)
            extent.cut(shape)
        except (OSError, OverflowError):  # the latter for sizes beyond what a file may have
            with self._changed:
                self._claimed_bytes -= slot_bytes
                self._refused_extents += 1
            return None
        with self._changed:
            self._lent[extent] = slot_bytes
            if self._closed:
                self._end(extent)
                return None
            self._changed.notify_all()
        return extent

    def give_back(self, extent: Extent) -> bool:
        """Take an extent back from its pool; false and unchanged while it is held. Its memory is not used again."""
        with self._changed:
            if extent in self._holds:
                return False
            self._end(extent)
            return True

    def retire(self, extent: Extent) -> None:
        """Take an extent out of use; it counts as claimed until the last hold on it ends, and goes then."""
        with self._changed:
            if extent in self._holds:
                self._retired[extent] = self._lent.pop(extent)
            else:
                self._end(extent)
        self.recall(extent, 0.0)

    def hold(self, extent: Extent, recall: Callable[[], None] | None) -> ExtentHold:
        """Keep a lent extent from being lent on or closed; see ExtentHold for `recall`."""
        hold = ExtentHold(extent, self._release, recall)
        with self._changed:
            assert extent in self._lent, f"extent {extent.extent_id} is not lent"
            self._holds.setdefault(extent, set()).add(hold)
        return hold

    def recall(self, extent: Extent, seconds: float) -> bool:
        """Ask those who hold an extent for it, and wait so long for them; true if nobody holds it then.

        Nobody is waited for twice, nor anybody while somebody owes an answer: a process that gives none costs one wait,
        however many extents it maps.
        """
        with self._changed:
            holds = self._holds.get(extent, set())
            new = tuple(holds - self._unanswered)
            is_patient = not self._unanswered
        asked = {hold for hold in new if hold.ask()}
        with self._changed:
            self._unanswered |= asked & self._holds.get(extent, set())
            if asked and is_patient:
                self._changed.wait_for(lambda: extent not in self._holds, seconds)
            return extent not in self._holds

    def close(self) -> None:
        """Give everything back but what is held, and end the thread once its piece of work is done; idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        with self._changed:
            for extent in tuple(self._lent):
                if extent in self._holds:
                    self._retired[extent] = self._lent.pop(extent)
                else:
                    self._end(extent)
            for extent in self._spare:
                extent.close()
            self._spare.clear()

    def _release(self, hold: ExtentHold, extent: Extent) -> None:
        with self._changed:
            self._holds[extent].remove(hold)
            self._unanswered.discard(hold)
            if self._holds[extent]:
                return
            del self._holds[extent]
            if extent in self._retired:
                self._end(extent)
            self._changed.notify_all()

    def _slots_for(self, part_sizes: tuple[int, ...], bytes_max: int | None) -> int:
        block_bytes = sum(part_sizes)
        left_bytes = self._capacity_bytes - self._claimed_bytes
        if bytes_max is not None:
            left_bytes = min(left_bytes, bytes_max)
        count = max(0, min(max(self._extent_bytes, block_bytes), left_bytes)) // block_bytes
        # Whole pages for each part may take a little more than an extent; a slot less, and one that is ready will do.
        excess_bytes = geometry(part_sizes, count).nbytes - self._spare_bytes
        if self._reserves and count > 1 and excess_bytes > 0:
            count = max(1, count - -(-excess_bytes // block_bytes))
        return count

    @property
    def _spare_bytes(self) -> int:
        page_bytes = self._pages.page_bytes
        return max(1, self._extent_bytes // page_bytes) * page_bytes

    def _take_spare(self, nbytes: int) -> Extent | None:
        """The spare extent that is touched furthest, if there is one of enough bytes."""
        fitting = [extent for extent in self._spare if extent.nbytes >= nbytes and self._is_lendable(extent)]
        if not fitting:
            return None
        taken = max(fitting, key=lambda extent: extent.touched_bytes)
        self._spare.remove(taken)
        return taken

    def _is_lendable(self, extent: Extent) -> bool:
        """Not while it is worked on; reserved huge pages, which may be refused at a touch, only when all are there."""
        is_ready = extent.touched_bytes == extent.nbytes or extent.pages.kind is not PageKind.RESERVED
        return extent is not self._in_work and is_ready

    def _trim(self) -> None:
        """Close spare extents, the least touched first, until all fit the capacity."""
        self._spare.sort(key=lambda extent: extent.touched_bytes)
        while self._spare and self._left_over() < 0:
            self._drop(self._spare.pop(0))

    def _left_over(self) -> int:
        """Bytes of the capacity that are neither claimed nor spare."""
        return self._capacity_bytes - self._claimed_bytes - sum(extent.nbytes for extent in self._spare)

    def _end(self, extent: Extent) -> None:
        """Forget a lent or retired extent, and close it."""
        self._claimed_bytes -= self._lent.pop(extent, 0) + self._retired.pop(extent, 0)
        self._left_alone.discard(extent)
        self._drop(extent)
        self._changed.notify_all()

    def _drop(self, extent: Extent) -> None:
        """Close an extent that nobody owns any more; one that is being worked on is closed after that."""
        if extent is not self._in_work:
            extent.close()
            if self._thread is not None:
                self._dropped.append(extent)

    def _make_to_lend(self, nbytes: int) -> Extent:
        """A new extent, for a claim that finds none ready. Raises OSError."""
        self._require_room(nbytes)
        pages = self._pages
        try:
            extent = Extent(nbytes, pages)
        except OSError as error:
            if pages.kind is not PageKind.RESERVED:
                raise
            return Extent(nbytes, self._without_reserved_pages(error))
        if pages.kind is PageKind.RESERVED:
            try:
                extent.touch(extent.nbytes)
            except OSError as error:
                extent.close()
                return Extent(nbytes, self._without_reserved_pages(error))
        return extent

    def _without_reserved_pages(self, error: OSError) -> PageChoice:
        with self._changed:
            if self._pages.kind is PageKind.RESERVED:
                self._pages = PLAIN_PAGES
                logger.warning("no more reserved huge pages, going on with plain pages: cause=%s", error)
            return self._pages

    def _require_room(self, nbytes: int) -> None:
        """Raise OSError where memory would run out: a page fault beyond a control group's limit ends the process."""
        if nbytes < _CHECKED_BYTES or self._pages.kind is PageKind.RESERVED:
            return
        limit = self._limit()
        if limit is not None and limit.available_bytes < nbytes + _MARGIN_BYTES:
            raise MemoryShortError(
                f"the {limit.source} leaves {limit.available_bytes} bytes, {nbytes + _MARGIN_BYTES} are needed"
            )

    def _start(self) -> None:
        logger.info(
            "host memory is reserved and touched in the background: capacity_bytes=%d pages=%s reason=%s",
            self._capacity_bytes,
            self._pages.kind.value,
            self._pages.reason,
        )
        thread = threading.Thread(target=self._work, name="kvstore-host-memory", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system gives no more threads
            self._reserves = False
            logger.warning("host memory is taken as it fills: cause=%s", error)
        else:
            self._thread = thread

    def _work(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or not self._is_done())
                dropped, self._dropped = self._dropped, []
                if self._closed:
                    return
                extent = self._in_work = self._next()
                self._is_working = True
            dropped.clear()
            try:
                self._advance(extent)
            except OSError as error:
                self._shrink(error)
            finally:
                self._end_work(extent)

    def _next(self) -> Extent | None:
        """What is worth touching or locking next: what is in use before what lies ready."""
        return next((extent for extent in (*self._lent, *self._spare) if self._is_unfinished(extent)), None)

    def _is_unfinished(self, extent: Extent) -> bool:
        if extent in self._left_alone:
            return False
        return extent.touched_bytes < extent.nbytes or (
            self._locker is not None and extent.locked_bytes < extent.nbytes
        )

    def _is_done(self) -> bool:
        return self._next() is None and not self._lacks_spare() and not self._dropped

    def _lacks_spare(self) -> bool:
        return self._reserves and self._left_over() >= self._spare_bytes

    def _advance(self, extent: Extent | None) -> None:
        """One piece of work; raises OSError where memory runs short."""
        if extent is None:
            with self._changed:
                is_wanted = self._lacks_spare()
            if is_wanted:
                self._add_spare()
        elif extent.touched_bytes < extent.nbytes:
            self._touch_piece(extent)
        else:
            self._lock_piece(extent)

    def _add_spare(self) -> None:
        """Make one more spare extent, as far as there still is room for it."""
        self._require_room(_PIECE_BYTES)
        pages = self._pages
        try:
            extent = Extent(self._spare_bytes, pages)
        except OSError as error:
            if pages.kind is not PageKind.RESERVED:
                raise
            self._without_reserved_pages(error)
            return
        with self._changed:
            if not self._closed and self._lacks_spare():
                self._spare.append(extent)
                return
        extent.close()

    def _touch_piece(self, extent: Extent) -> None:
        """Touch what follows. Reserved huge pages are touched while they are spare, and given up where that fails."""
        self._require_room(_PIECE_BYTES)
        try:
            extent.touch(_PIECE_BYTES)
        except OSError as error:
            if extent.pages.kind is not PageKind.RESERVED:
                raise
            self._without_reserved_pages(error)
            with self._changed:
                self._spare.remove(extent)  # closed when this piece of work ends

    def _lock_piece(self, extent: Extent) -> None:
        """Lock what follows; the first refusal is the last attempt."""
        if self._locker is None:
            return
        nbytes = min(_PIECE_BYTES, extent.nbytes - extent.locked_bytes)
        locked = lock_in_pieces(self._locker, extent.address + extent.locked_bytes, nbytes)
        extent.locked_bytes += locked.nbytes
        if locked.failure is not None:
            self._locker = None
            logger.warning("host memory is locked in part only, the rest may be swapped out: cause=%s", locked.failure)

    def _end_work(self, extent: Extent | None) -> None:
        with self._changed:
            self._in_work = None
            if extent is not None and not any(extent in owned for owned in (self._lent, self._spare, self._retired)):
                extent.close()
            is_done = not self._closed and self._is_done()
            extents = [*self._lent, *self._spare]
        if is_done:
            self._tell(extents)
        with self._changed:
            self._is_working = False
            self._changed.notify_all()

    def _tell(self, extents: list[Extent]) -> None:
        """Say what there is once all is touched. Plain pages are not looked up: that walks over each of them."""
        found = 0 if self._pages.kind is PageKind.PLAIN else huge_bytes(extents)
        with self._changed:
            self._huge_bytes = found
            is_first, self._told = not self._told, True
        if is_first:
            touched = sum(extent.touched_bytes for extent in extents)
            locked = sum(extent.locked_bytes for extent in extents)
            logger.info("host memory is ready: touched=%d in_huge_pages=%d locked=%d", touched, found, locked)

    def _shrink(self, error: OSError) -> None:
        """Go on with the memory that there is. Untouched extents in use stay; no more of them is touched ahead."""
        with self._changed:
            wanted_bytes = self._capacity_bytes
            for extent in [extent for extent in self._spare if extent.touched_bytes < extent.nbytes]:
                self._spare.remove(extent)
                self._drop(extent)
            self._left_alone.update(extent for extent in self._lent if extent.touched_bytes < extent.nbytes)
            self._capacity_bytes = wanted_bytes - max(0, self._left_over())
            is_first, self._warned = not self._warned, True
        if is_first:
            logger.warning(
                "memory runs short, the host tier goes on with less: capacity_bytes=%d wanted_bytes=%d cause=%s; "
                "lower its capacity or raise the limit",
                self._capacity_bytes,
                wanted_bytes,
                error,
            )


class MemoryShortError(OSError):
    """Taking more memory would bring the process near its limit."""
