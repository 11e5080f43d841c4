"""Copies under way: handles that keep what they touch until the copy has really ended, and the lanes they queue in.

A *hold* is anything with `release()`: a lease, or slots that go back to their pool. Whoever submits a copy gives its
holds away. They are released once, on the thread that learns of it, when the copy has ended or will never begin.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvstore.errors import ClosedError, NoSpaceError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)


class Releasable(Protocol):
    """A hold on something that a copy touches."""

    def release(self) -> None:
        """Let go."""
        ...


class Event(Protocol):
    """A point in the work of a stream; torch.cuda.Event is one."""

    def query(self) -> bool:
        """Whether all work in front of it is done."""
        ...

    def synchronize(self) -> None:
        """Block until all work in front of it is done."""
        ...


class Stream(Protocol):
    """Work that is done in order, later than it is given; torch.cuda.Stream is one."""

    def record_event(self) -> Event:
        """An event behind all work given so far."""
        ...

    def wait_event(self, event: Event) -> None:
        """Let all work given from now on begin after `event`."""
        ...


class Work(Protocol):
    """A copy as its launcher made it."""

    @property
    def is_launched(self) -> bool:
        """Whether the copy is on its way already, so that it cannot be withdrawn."""
        ...

    @property
    def end(self) -> Event | None:
        """An event of the device behind the copy, where there is one. Raises UnavailableError if the launch failed."""
        ...

    def wait_ready(self) -> None:
        """Block until all that the copy comes after is done."""
        ...

    def run(self) -> None:
        """Make the copy, or wait for it; returns when it touches nothing any more.

        Raises CopyNotBegunError if it never will, anything else if that is not known.
        """
        ...


class CopyNotBegunError(UnavailableError):
    """A device refused a copy before anything of it was begun."""


class CopyOutcome(enum.Enum):
    """How a copy ended. CANCELLED and FAILED ones were never begun; a LOST one may still touch memory."""

    PENDING = "pending"
    COPIED = "copied"
    CANCELLED = "cancelled"
    FAILED = "failed"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class LaneStats:
    """What a lane has done: copies by outcome, and those refused since too many were under way."""

    submitted: int
    copied: int
    cancelled: int
    failed: int
    lost: int
    refused: int
    failed_releases: int


class CopyHandle:
    """One copy. Thread-safe; it may be dropped at any time, the copy goes on.

    `_work` keeps what the copy touches, and is let go when it has ended, or will never begin. `_lock` guards the step
    from a copy that can be cancelled to one that has begun.
    """

    def __init__(self, work: Work, holds: _SharedHolds, copied_bytes: int) -> None:
        self.bytes = copied_bytes
        self._work: Work | None = work
        self._holds = holds
        self._lock = threading.Lock()
        self._begun = work.is_launched
        self._outcome = CopyOutcome.PENDING
        self._ended = threading.Event()

    @property
    def outcome(self) -> CopyOutcome:
        """How the copy ended, or that it has not."""
        return self._outcome

    def wait(self, timeout_seconds: float | None = None) -> CopyOutcome:
        """Block until the copy has ended, or for the time given; the bytes may be used if the answer is COPIED."""
        self._ended.wait(timeout_seconds)
        return self._outcome

    def record(self, stream: Stream) -> None:
        """Let everything that `stream` is given from now on begin after the copy, without blocking here.

        A stream that is the calling thread itself (see BlockCopier.current_stream) is held up right now. Raises
        UnavailableError if the copy is known to have failed. A GPU's stream goes on after one that fails later, so
        what it computed counts only once `outcome` is COPIED.
        """
        work = self._work
        if work is None:
            _require_not_failed(self._outcome)
        else:
            stream.wait_event(work.end or _EndOf(self))

    def cancel(self) -> bool:
        """Withdraw a copy that has not begun: true, and it will touch nothing. Else false, and it runs to its end."""
        with self._lock:
            if self._begun or self._outcome is not CopyOutcome.PENDING:
                return False
            self._outcome = CopyOutcome.CANCELLED
        self._let_go()
        return True

    def carry_out(self) -> None:
        """Make the copy unless it is cancelled; only its lane calls this. Raises what the work raises."""
        work = self._work
        if work is None:
            return
        work.wait_ready()
        with self._lock:
            if self._outcome is not CopyOutcome.PENDING:
                return
            self._begun = True
        try:
            work.run()
        except CopyNotBegunError as error:
            logger.warning("copy refused by the device: bytes=%d error=%s", self.bytes, error)
            self._outcome = CopyOutcome.FAILED
        else:
            self._outcome = CopyOutcome.COPIED
        self._let_go()

    def lose(self) -> bool:
        """Give the copy up, unless it has ended; only its lane calls this, and announce() afterwards.

        Its holds are never released, since it may still touch what they hold.
        """
        with self._lock:
            if self._outcome is not CopyOutcome.PENDING:
                return False
            self._outcome = CopyOutcome.LOST
        return True

    def announce(self) -> None:
        """Wake those who wait."""
        self._ended.set()

    def _let_go(self) -> None:
        self._work = None
        self._holds.end_one()
        self.announce()


class _EndOf:
    """The end of a copy as an event, for streams that are no device's."""

    def __init__(self, handle: CopyHandle) -> None:
        self._handle = handle

    def query(self) -> bool:
        return self._handle.outcome is not CopyOutcome.PENDING

    def synchronize(self) -> None:
        _require_not_failed(self._handle.wait())


def _require_not_failed(outcome: CopyOutcome) -> None:
    if outcome in (CopyOutcome.FAILED, CopyOutcome.LOST):
        raise UnavailableError(f"the copy is {outcome.value} and its bytes are undefined; compute them anew")


class _SharedHolds:
    """Holds of one submission; released when the last of its copies has ended. Thread-safe."""

    def __init__(self, holds: Sequence[Releasable], copies: int, on_failure: Callable[[Exception], None]) -> None:
        self._holds = tuple(holds)
        self._copies = copies
        self._on_failure = on_failure
        self._lock = threading.Lock()

    def end_one(self) -> None:
        with self._lock:
            self._copies -= 1
            holds, self._holds = (self._holds, ()) if self._copies == 0 else ((), self._holds)
        for hold in holds:
            try:
                hold.release()
            except Exception as error:  # noqa: BLE001  # a foreign release: the others must still be let go
                self._on_failure(error)


class CopyLane:
    """Copies of one direction, in order, on one thread that makes them or waits for their end.

    At most `copies_max` are under way; one more is refused at once. After a copy is lost every other is refused: the
    device is not to be trusted any more. `_submit_lock`, which makes launches and queue agree in order, comes before
    `_changed`, which guards the fields; no copy is made and no hold released under either.
    """

    def __init__(self, name: str, copies_max: int) -> None:
        self._name = name
        self._copies_max = copies_max
        self._submit_lock = threading.Lock()
        self._changed = threading.Condition()
        self._queue: deque[CopyHandle] = deque()
        self._lost: list[CopyHandle] = []
        self._under_way = 0
        self._closed = False
        self._submitted = self._refused = self._failed_releases = 0
        self._ended: Counter[CopyOutcome] = Counter()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(
        self, launches: Sequence[Callable[[], Work]], sizes: Sequence[int], holds: Sequence[Releasable]
    ) -> tuple[CopyHandle, ...]:
        """Launch copies in order and queue them; all or none are taken. `sizes` are their bytes.

        Raises NoSpaceError if there is no place for them, UnavailableError after a copy was lost, ClosedError, or what
        the first launch raises; then nothing was launched, and the holds stay the caller's. Later ones do not raise.
        """
        with self._submit_lock:
            self._reserve(len(launches))
            shared = _SharedHolds(holds, len(launches), self._count_failed_release)
            handles: list[CopyHandle] = []
            try:
                for launch, copied_bytes in zip(launches, sizes, strict=True):
                    handles.append(CopyHandle(launch(), shared, copied_bytes))
            finally:
                with self._changed:
                    self._queue.extend(handles)
                    self._under_way -= len(launches) - len(handles)
                    self._submitted += len(handles)
                    self._changed.notify_all()
        return tuple(handles)

    def stats(self) -> LaneStats:
        """What was done so far."""
        with self._changed:
            return LaneStats(
                submitted=self._submitted,
                copied=self._ended[CopyOutcome.COPIED],
                cancelled=self._ended[CopyOutcome.CANCELLED],
                failed=self._ended[CopyOutcome.FAILED],
                lost=self._ended[CopyOutcome.LOST],
                refused=self._refused,
                failed_releases=self._failed_releases,
            )

    def close(self, timeout_seconds: float) -> bool:
        """Take no more copies and wait for those under way; false if some have not ended in time. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._under_way == 0, timeout_seconds)

    def _reserve(self, copies: int) -> None:
        with self._changed:
            if self._closed:
                raise ClosedError("the copier is closed")
            if not self._thread.is_alive():
                raise ClosedError("the copier was opened before this process was forked; open one of its own")
            if self._lost:
                raise UnavailableError(f"{self._name}: an earlier copy was lost; end this process to free its memory")
            if self._under_way + copies > self._copies_max:
                self._refused += copies
                raise NoSpaceError(
                    f"{self._name}: {self._under_way} copies are under way and {copies} more would exceed "
                    f"copies_max ({self._copies_max}); wait for some, or raise the limit"
                )
            self._under_way += copies

    def _run(self) -> None:
        while (handle := self._next()) is not None:
            try:
                handle.carry_out()
            except Exception:  # thread root: whatever a device says, the handle must end
                logger.exception("copy lost, its memory stays held: lane=%s bytes=%d", self._name, handle.bytes)
                self._lose(handle)
            self._account(handle)
            del handle  # an idle thread keeps no tensor alive

    def _next(self) -> CopyHandle | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or (self._closed and not self._under_way))
            return self._queue.popleft() if self._queue else None

    def _lose(self, handle: CopyHandle) -> None:
        if handle.lose():
            with self._changed:
                self._lost.append(handle)
            handle.announce()

    def _account(self, handle: CopyHandle) -> None:
        with self._changed:
            self._under_way -= 1
            self._ended[handle.outcome] += 1
            self._changed.notify_all()

    def _count_failed_release(self, error: Exception) -> None:
        logger.error("a hold could not be released after its copy: lane=%s", self._name, exc_info=error)
        with self._changed:
            self._failed_releases += 1
