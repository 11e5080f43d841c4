"""Leases and stages that a server holds for us."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, Self

from kvstore.buffers import readable_rows, writable_rows
from kvstore.errors import ClosedError, InvalidArgumentError, UnauthenticatedError, UnavailableError
from kvstore.transport import convert
from kvstore.transport.link import R, Rpc, Wait
from kvstore.transport.plans import ABORT, CANCEL_PREFETCH, COMMIT, LEASE, PREFETCH, RELEASE, STAGE, lease_request
from kvstore.types import LoadResult, require_own_part
from kvstore.v1 import cache_service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from contextlib import AbstractContextManager
    from types import TracebackType

    import numpy as np
    from google.protobuf.message import Message
    from numpy.typing import NDArray

    from kvstore.api import BlockBuffer
    from kvstore.transport.keeper import LinkKeeper
    from kvstore.transport.link import Deadlines, Link
    from kvstore.types import CommitResult, KvLayout, PrefixMatch, Tier
    from kvstore.v1 import block_pb2


class Held:
    """A link whose session holds something for us: its calls have deadlines and go through the breaker."""

    def __init__(self, keeper: LinkKeeper, link: Link, deadlines: Deadlines) -> None:
        self.link = link
        self._keeper = keeper
        self._deadlines = deadlines

    @property
    def session_id(self) -> bytes:
        """Id of the session."""
        return self.link.session.session_id

    def check(self) -> None:
        """Raises UnavailableError while the server is not asked, before anything has begun."""
        self._keeper.check_server()

    def call(self, rpc: Rpc[R], request: Message, wait: Wait) -> R:
        """One call."""
        return self._keeper.run_on(
            self.link, lambda ends_at: self.link.call(rpc, request, ends_at), self._deadlines.of(wait)
        )

    def load(self, request: pb.LoadRequest, target: NDArray[np.uint8]) -> int:
        """Receive rows into the flat `target`."""
        seconds = self._deadlines.moving(target.size)
        return self._keeper.run_on(self.link, lambda ends_at: self.link.load(request, target, ends_at), seconds)

    def read_in_place(self, request: pb.LoadRequest) -> AbstractContextManager[list[NDArray[np.uint8]]]:
        """Rows where they lie."""
        return self.link.read_in_place(request, time.monotonic() + self._deadlines.bulk_seconds)

    def write(self, start: pb.WriteStart, source: NDArray[np.uint8]) -> int:
        """Send the rows of the flat `source`."""
        seconds = self._deadlines.moving(source.size)
        return self._keeper.run_on(self.link, lambda ends_at: self.link.write(start, source, ends_at), seconds)

    def give_up(self, rpc: Rpc[R], request: Message) -> None:
        """End what the server may or may not hold, without waiting for an answer."""
        self.link.give_up(rpc, request, self._deadlines.lookup_seconds)

    def end(self, rpc: Rpc[R], request: Message) -> None:
        """End what the server holds. If it does not answer, the session is ended instead, and everything with it."""
        if self.link.ended:
            return
        try:
            self.call(rpc, request, Wait.LOOKUP)
        except (UnavailableError, UnauthenticatedError):
            self.link.close()


def shown_blocks(layout: KvLayout, leased_blocks: int, from_block: int, blocks: int | None, part: int | None) -> int:
    """How many blocks a lease may show in place of those asked for. Raises InvalidArgumentError."""
    _row_bytes(layout, part)
    if from_block < 0:
        raise InvalidArgumentError(f"from_block is {from_block}, expected at least 0")
    count = max(0, leased_blocks - from_block)
    return count if blocks is None else min(count, max(0, blocks))


class RemoteLease:
    """A kvstore.api.Lease of a session. Raises UnavailableError once that session has ended."""

    def __init__(self, held: Held, match: PrefixMatch, tiers: Collection[Tier] | None, ends_at: float) -> None:
        link = held.link
        self._held = held
        self._layout = match.namespace.layout
        self._lease_id = link.new_id()
        self._open = _OpenFlag("lease")
        ns_id = link.ns_id(match.namespace, ends_at)
        request = lease_request(held.session_id, ns_id, match, self._lease_id, tiers)
        try:
            granted = link.call(LEASE, request, ends_at)
        except UnavailableError:
            # The server may have granted it, or be about to.
            held.give_up(RELEASE, self._release_request())
            raise
        self._blocks = granted.blocks
        self.deletions = granted.deletions  # the epoch of the last one that the server had applied before
        self.size = convert.state_from_proto(granted.state)

    @property
    def blocks(self) -> int:
        """Number of blocks protected."""
        return self._blocks

    def load_into(self, buffer: BlockBuffer, *, from_block: int = 0, part: int | None = None) -> LoadResult:
        """Stream blocks into the rows of `buffer`. After UnavailableError all rows are undefined."""
        self._open.check()
        load = LoadOf(self._layout, self._blocks, buffer, from_block, part)
        if not load.count:
            return LoadResult(0, 0, 0)
        return load.result(self._held.load(load.request(self._held.session_id, self._lease_id), load.target))

    def load_verified(self, buffer: BlockBuffer, *, from_block: int = 0, part: int | None = None) -> LoadResult:
        """As `load_into`, of at most 4096 rows, each compared with a digest that its server made of it.

        For who keeps the rows as blocks of its own: one that is not what was sent ends the load in front of it. Raises
        UnavailableError, too, where the server is asked over gRPC, which carries no digests.
        """
        self._open.check()
        load = LoadOf(self._layout, self._blocks, buffer, from_block, part)
        if not load.count:
            return LoadResult(0, 0, 0)
        if self._held.link.lane != "wire":
            raise UnavailableError("rows with digests come over the fast lane alone")
        request = load.request(self._held.session_id, self._lease_id)
        request.with_digests = True
        return load.result(self._held.load(request, load.target))

    @contextmanager
    def read_in_place(
        self, *, from_block: int = 0, blocks: int | None = None, part: int | None = None
    ) -> Iterator[list[NDArray[np.uint8]]]:
        """Show blocks where they lie in the memory of a server on this host, such as to copy them to a GPU.

        Gives read-only flat pieces, row after row, of as many leading blocks as lie in host memory; none where nothing
        can be mapped, and then `load_into` does. They are shared with others: use them inside of the block, and end
        copies of them before its end, at which UnavailableError is raised if the lease has ended meanwhile: then what
        was read may be something else. A piece that is kept longer keeps memory from going elsewhere.
        """
        self._open.check()
        count = shown_blocks(self._layout, self._blocks, from_block, blocks, part)
        if not count:
            yield []
            return
        request = pb.LoadRequest(
            session_id=self._held.session_id, lease_id=self._lease_id, from_block=from_block, blocks=count, part=part
        )
        with self._held.read_in_place(request) as pieces:
            yield pieces

    def release(self) -> None:
        """End the lease; idempotent, and raises nothing if the server cannot be reached."""
        if self._open.end():
            self._held.end(RELEASE, self._release_request())

    def _release_request(self) -> pb.ReleaseRequest:
        return pb.ReleaseRequest(session_id=self._held.session_id, lease_id=self._lease_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class RemotePrefetch:
    """A kvstore.api.Prefetch of a session. `wait` raises UnavailableError once that session has ended."""

    def __init__(self, held: Held, prompt: block_pb2.Prompt, step_seconds: float, ends_at: float) -> None:
        self._held = held
        self._step_seconds = step_seconds
        self._request = pb.PrefetchRequest(session_id=held.session_id, prompt=prompt, prefetch_id=held.link.new_id())
        self._lock = threading.Lock()  # one call at a time; guards all below
        self._host_blocks = 0
        self._done = False
        self._open = _OpenFlag("prefetch")
        try:
            self._take(held.link.call(PREFETCH, self._request_of(0.0), ends_at))
        except UnavailableError:
            # The server may have begun it, or be about to.
            self._give_up()
            raise

    @property
    def host_blocks(self) -> int:
        """Leading blocks of the prompt in host memory, as the server said last."""
        return self._host_blocks

    @property
    def done(self) -> bool:
        """Whether it had ended when the server was asked last."""
        return self._done

    def wait(self, seconds: float | None = None) -> int:
        """Wait until it has ended, in steps."""
        ends_at = None if seconds is None else time.monotonic() + seconds
        while not self._done and self._open:
            rest_seconds = self._step_seconds if ends_at is None else ends_at - time.monotonic()
            if rest_seconds <= 0:
                break
            self._ask(min(rest_seconds, self._step_seconds))
        return self._host_blocks

    def cancel(self) -> None:
        """Stop it; idempotent, and raises nothing if the server cannot be reached."""
        if self._open.end() and not self._done and not self._held.link.ended:
            self._give_up()

    def _ask(self, wait_seconds: float) -> None:
        with self._lock:
            if not self._done:
                self._take(self._held.call(PREFETCH, self._request_of(wait_seconds), Wait.CONTROL))

    def _take(self, answer: pb.PrefetchResponse) -> None:
        self._host_blocks, self._done = answer.host_blocks, answer.done

    def _request_of(self, wait_seconds: float) -> pb.PrefetchRequest:
        convert.set_duration(self._request.wait, wait_seconds, "wait_seconds")
        # The connection may put less of the prompt into the message it is given.
        return pb.PrefetchRequest.FromString(self._request.SerializeToString())

    def _give_up(self) -> None:
        request = pb.CancelPrefetchRequest(session_id=self._request.session_id, prefetch_id=self._request.prefetch_id)
        self._held.give_up(CANCEL_PREFETCH, request)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


class RemoteStage:
    """A kvstore.api.Stage of a session. Raises UnavailableError once that session has ended.

    A commit is never sent twice: a connection that is lost takes the session and the stage with it, and on one that
    is not, a second answer would come no sooner than the first. Who must know what became of it looks the prompt up.
    """

    def __init__(self, held: Held, layout: KvLayout, request: pb.StageRequest, ends_at: float) -> None:
        """Open what `request` asks for, which names no session and no stage yet."""
        link = held.link
        self._held = held
        self._stage_id = link.new_id()
        self._open = _OpenFlag("stage")
        request.session_id, request.stage_id = held.session_id, self._stage_id
        try:
            opened = link.call(STAGE, request, ends_at)
        except UnavailableError:
            # The server may have opened it, or be about to.
            held.give_up(ABORT, self._abort_request())
            raise
        self._wants = StageWants(layout, request, opened)

    @property
    def from_block(self) -> int:
        """First block that wants bytes."""
        return self._wants.from_block

    @property
    def blocks(self) -> int:
        """How many blocks want bytes."""
        return self._wants.blocks

    def wanted(self, part: int) -> tuple[range, ...]:
        """The blocks of which a part is wanted."""
        return self._wants.of(part)

    def write_from(self, buffer: BlockBuffer, *, from_block: int | None = None, part: int | None = None) -> int:
        """Stream the rows that are wanted. A write that breaks aborts the stage: what arrived is not to be trusted."""
        self._open.check()
        writes = self._wants.writes(buffer, from_block, part)
        if not writes:
            return 0
        self._held.check()
        return sum(self._write(write) for write in writes)

    def _write(self, write: WriteOf) -> int:
        try:
            return self._held.write(write.start(self._held.session_id, self._stage_id), write.source)
        except UnavailableError:
            if self._open.end():
                self._held.give_up(ABORT, self._abort_request())
            raise

    def commit(self) -> CommitResult:
        """Make the leading blocks whose every part was written visible, atomically."""
        self._open.check()
        self._held.check()
        if not self._open.end():
            self._open.check()
        request = pb.CommitRequest(session_id=self._held.session_id, stage_id=self._stage_id)
        try:
            return convert.commit_from_proto(self._held.call(COMMIT, request, Wait.BULK))
        except UnavailableError:
            # It may never have been sent, and what is staged keeps others from storing the same.
            self._held.give_up(ABORT, self._abort_request())
            raise

    def abort(self) -> None:
        """Drop everything written; idempotent, and raises nothing if the server cannot be reached."""
        if self._open.end():
            self._held.end(ABORT, self._abort_request())

    def _abort_request(self) -> pb.AbortRequest:
        return pb.AbortRequest(session_id=self._held.session_id, stage_id=self._stage_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()
        elif self._open:
            self.commit()


class LoadOf:
    """Which rows a load fills: `target`, flat, of `count` blocks."""

    def __init__(
        self, layout: KvLayout, held_blocks: int, buffer: BlockBuffer, from_block: int, part: int | None
    ) -> None:
        self._row_bytes = _row_bytes(layout, part)
        self._all_or_nothing = bool(layout.groups)
        rows = writable_rows(buffer, self._row_bytes)
        if from_block < 0:
            raise InvalidArgumentError(f"from_block is {from_block}, expected at least 0")
        self._from_block = from_block
        self._part = part
        self.count = min(len(rows), max(0, held_blocks - from_block))
        self.target = rows[: self.count].reshape(-1)

    def request(self, session_id: bytes, lease_id: int) -> pb.LoadRequest:
        """How to ask for them."""
        return pb.LoadRequest(
            session_id=session_id, lease_id=lease_id, from_block=self._from_block, blocks=self.count, part=self._part
        )

    def result(self, blocks: int) -> LoadResult:
        """What the answer of `blocks` right ones means: a shorter prefix without its sparse parts is of no use."""
        if self._all_or_nothing and blocks < self.count:
            blocks = 0
        return LoadResult(blocks, self.count, blocks * self._row_bytes)


class StageWants:
    """Which rows a stage that was opened wants, of each part."""

    def __init__(self, layout: KvLayout, request: pb.StageRequest, opened: pb.StageResponse) -> None:
        self.from_block = opened.from_block
        self.blocks = opened.blocks
        self._layout = layout
        self._requested_from = request.from_block
        self._rank = request.rank if request.HasField("rank") else None
        self._sparse = convert.wanted_from_proto(opened, layout)

    def of(self, part: int) -> tuple[range, ...]:
        """The blocks of which a part is wanted."""
        if self._layout.group_of(part) is not None:
            return self._sparse.get(part, ())
        return (range(self.from_block, self.from_block + self.blocks),) if self.blocks else ()

    def writes(self, buffer: BlockBuffer, from_block: int | None, part: int | None) -> list[WriteOf]:
        """Those that `buffer` has; its first row is of block `from_block`, or else of the one the stage began with."""
        rows = readable_rows(buffer, _row_bytes(self._layout, part))
        first = self._requested_from if from_block is None else from_block
        if first < 0:
            raise InvalidArgumentError(f"from_block is {first}, expected at least 0")
        if self._rank is not None:
            require_own_part(self._layout, self._rank, part)
        writes = []
        for run in self.of(0 if part is None else part):
            wanted = range(max(first, run.start), min(first + len(rows), run.stop))
            if wanted:
                writes.append(WriteOf(wanted, rows[wanted.start - first : wanted.stop - first].reshape(-1), part))
        return writes


class WriteOf(NamedTuple):
    """A run of rows for a stage: `source`, flat, of the blocks in `wanted`."""

    wanted: range
    source: NDArray[np.uint8]
    part: int | None

    def start(self, session_id: bytes, stage_id: int) -> pb.WriteStart:
        """How to announce them."""
        return pb.WriteStart(
            session_id=session_id,
            stage_id=stage_id,
            from_block=self.wanted.start,
            blocks=len(self.wanted),
            part=self.part,
        )


class _OpenFlag:
    """Whether a lease or stage is still open. Thread-safe: exactly one caller ends it."""

    def __init__(self, noun: str) -> None:
        self._noun = noun
        self._lock = threading.Lock()
        self._is_open = True

    def __bool__(self) -> bool:
        return self._is_open

    def check(self) -> None:
        if not self._is_open:
            raise ClosedError(f"the {self._noun} has ended")

    def end(self) -> bool:
        """True for the one caller that ends it."""
        with self._lock:
            was_open, self._is_open = self._is_open, False
        return was_open


def _row_bytes(layout: KvLayout, part: int | None) -> int:
    return layout.block_bytes if part is None else layout.part_bytes(part)
