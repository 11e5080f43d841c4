"""Leases and stages that a server holds for us."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Self

from kvstore.buffers import readable_rows, writable_rows
from kvstore.errors import ClosedError, InvalidArgumentError, UnavailableError
from kvstore.transport import convert
from kvstore.transport.link import CACHE
from kvstore.types import LoadResult, require_own_part
from kvstore.v1 import cache_service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Collection
    from types import TracebackType

    import numpy as np
    from google.protobuf.message import Message
    from numpy.typing import NDArray

    from kvstore.api import BlockBuffer
    from kvstore.transport.link import Link
    from kvstore.types import CommitResult, KvLayout, PrefixMatch, Tier
    from kvstore.v1 import block_pb2


class RemoteLease:
    """A kvstore.api.Lease of a session. Raises UnavailableError once that session has ended."""

    def __init__(self, connection: Link, match: PrefixMatch, tiers: Collection[Tier] | None = None) -> None:
        self._connection = connection
        self._layout = match.namespace.layout
        self._lease_id = connection.new_id()
        self._open = _OpenFlag("lease")
        request = pb.LeaseRequest(
            session_id=connection.session.session_id,
            prompt=convert.prompt_to_proto(connection.ns_id(match.namespace), match.root, match.prompt[: match.tokens]),
            blocks=match.blocks,
            lease_id=self._lease_id,
            tiers=convert.tiers_to_proto(tiers or ()),
        )
        try:
            self._blocks = connection.call(CACHE, "Lease", request, pb.LeaseResponse).blocks
        except UnavailableError:
            # The server may have granted it, or be about to.
            connection.give_up(CACHE, "Release", self._release_request(), pb.ReleaseResponse)
            raise

    @property
    def blocks(self) -> int:
        """Number of blocks protected."""
        return self._blocks

    def load_into(self, buffer: BlockBuffer, *, from_block: int = 0, part: int | None = None) -> LoadResult:
        """Stream blocks into the rows of `buffer`. After UnavailableError all rows are undefined."""
        row_bytes = _row_bytes(self._layout, part)
        rows = writable_rows(buffer, row_bytes)
        if from_block < 0:
            raise InvalidArgumentError(f"from_block is {from_block}, expected at least 0")
        self._open.check()
        count = min(len(rows), max(0, self._blocks - from_block))
        if not count:
            return LoadResult(0, 0, 0)
        request = pb.LoadRequest(
            session_id=self._connection.session.session_id,
            lease_id=self._lease_id,
            from_block=from_block,
            blocks=count,
            part=part,
        )
        blocks = self._connection.load(request, rows[:count].reshape(-1))
        if self._layout.groups and blocks < count:
            blocks = 0  # a shorter prefix without its sparse parts is of no use
        return LoadResult(blocks, count, blocks * row_bytes)

    def release(self) -> None:
        """End the lease; idempotent, and raises nothing if the server cannot be reached."""
        if self._open.end():
            _end(self._connection, "Release", self._release_request(), pb.ReleaseResponse)

    def _release_request(self) -> pb.ReleaseRequest:
        return pb.ReleaseRequest(session_id=self._connection.session.session_id, lease_id=self._lease_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class RemotePrefetch:
    """A kvstore.api.Prefetch of a session. `wait` raises UnavailableError once that session has ended."""

    def __init__(self, connection: Link, prompt: block_pb2.Prompt, step_seconds: float) -> None:
        self._connection = connection
        self._step_seconds = step_seconds
        self._request = pb.PrefetchRequest(
            session_id=connection.session.session_id, prompt=prompt, prefetch_id=connection.new_id()
        )
        self._lock = threading.Lock()  # one call at a time; guards all below
        self._host_blocks = 0
        self._done = False
        self._open = _OpenFlag("prefetch")
        try:
            self._ask(0.0)
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
        if self._open.end() and not self._done and not self._connection.ended:
            self._give_up()

    def _ask(self, wait_seconds: float) -> None:
        with self._lock:
            if self._done:
                return
            convert.set_duration(self._request.wait, wait_seconds, "wait_seconds")
            # The connection may put less of the prompt into the message it is given.
            request = pb.PrefetchRequest.FromString(self._request.SerializeToString())
            answer = self._connection.call(CACHE, "Prefetch", request, pb.PrefetchResponse)
            self._host_blocks, self._done = answer.host_blocks, answer.done

    def _give_up(self) -> None:
        request = pb.CancelPrefetchRequest(session_id=self._request.session_id, prefetch_id=self._request.prefetch_id)
        self._connection.give_up(CACHE, "CancelPrefetch", request, pb.CancelPrefetchResponse)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


class RemoteStage:
    """A kvstore.api.Stage of a session. Raises UnavailableError once that session has ended."""

    def __init__(self, connection: Link, layout: KvLayout, request: pb.StageRequest) -> None:
        """Open what `request` asks for, which names no session and no stage yet."""
        self._connection = connection
        self._layout = layout
        self._requested_from = request.from_block
        self._rank = request.rank if request.HasField("rank") else None
        self._stage_id = connection.new_id()
        self._open = _OpenFlag("stage")
        request.session_id, request.stage_id = connection.session.session_id, self._stage_id
        try:
            opened = connection.call(CACHE, "Stage", request, pb.StageResponse)
        except UnavailableError:
            # The server may have opened it, or be about to.
            connection.give_up(CACHE, "Abort", self._abort_request(), pb.AbortResponse)
            raise
        self._from_block = opened.from_block
        self._blocks = opened.blocks
        self._sparse_wanted = convert.wanted_from_proto(opened, layout)

    @property
    def from_block(self) -> int:
        """First block that wants bytes."""
        return self._from_block

    @property
    def blocks(self) -> int:
        """How many blocks want bytes."""
        return self._blocks

    def wanted(self, part: int) -> tuple[range, ...]:
        """The blocks of which a part is wanted."""
        if self._layout.group_of(part) is not None:
            return self._sparse_wanted.get(part, ())
        return (range(self._from_block, self._from_block + self._blocks),) if self._blocks else ()

    def write_from(self, buffer: BlockBuffer, *, from_block: int | None = None, part: int | None = None) -> int:
        """Stream the rows that are wanted. A write that breaks aborts the stage: what arrived is not to be trusted."""
        rows = readable_rows(buffer, _row_bytes(self._layout, part))
        first = self._requested_from if from_block is None else from_block
        if first < 0:
            raise InvalidArgumentError(f"from_block is {first}, expected at least 0")
        if self._rank is not None:
            require_own_part(self._layout, self._rank, part)
        self._open.check()
        taken = 0
        for run in self.wanted(0 if part is None else part):
            begin, end = max(first, run.start), min(first + len(rows), run.stop)
            if begin < end:
                taken += self._write(rows[begin - first : end - first], begin, part)
        return taken

    def _write(self, rows: NDArray[np.uint8], begin: int, part: int | None) -> int:
        start = pb.WriteStart(
            session_id=self._connection.session.session_id,
            stage_id=self._stage_id,
            from_block=begin,
            blocks=len(rows),
            part=part,
        )
        try:
            return self._connection.write(start, rows.reshape(-1))
        except UnavailableError:
            if self._open.end():
                self._connection.give_up(CACHE, "Abort", self._abort_request(), pb.AbortResponse)
            raise

    def commit(self) -> CommitResult:
        """Make the leading blocks whose every part was written visible, atomically."""
        if not self._open.end():
            self._open.check()
        request = pb.CommitRequest(session_id=self._connection.session.session_id, stage_id=self._stage_id)
        return convert.commit_from_proto(self._connection.call(CACHE, "Commit", request, pb.CommitResponse))

    def abort(self) -> None:
        """Drop everything written; idempotent, and raises nothing if the server cannot be reached."""
        if self._open.end():
            _end(self._connection, "Abort", self._abort_request(), pb.AbortResponse)

    def _abort_request(self) -> pb.AbortRequest:
        return pb.AbortRequest(session_id=self._connection.session.session_id, stage_id=self._stage_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()
        elif self._open:
            self.commit()


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


def _end(connection: Link, method: str, request: Message, response_type: type[Message]) -> None:
    """End what the server holds. If it does not answer, the session is ended instead, and everything with it."""
    if connection.ended:
        return
    try:
        connection.call(CACHE, method, request, response_type)
    except UnavailableError:
        connection.close()
