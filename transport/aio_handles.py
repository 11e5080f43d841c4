"""Leases, prefetches and stages that a server holds for the tasks of an event loop."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Self

from kvstore.errors import ClosedError, UnauthenticatedError, UnavailableError
from kvstore.transport import convert
from kvstore.transport.link import R, Wait
from kvstore.transport.plans import ABORT, CANCEL_PREFETCH, COMMIT, LEASE, PREFETCH, RELEASE, STAGE, lease_request
from kvstore.transport.remote import LoadOf, StageWants, shown_blocks
from kvstore.types import LoadResult, StateSize
from kvstore.v1 import cache_service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType

    import numpy as np
    from google.protobuf.message import Message
    from numpy.typing import NDArray

    from kvstore.api import BlockBuffer
    from kvstore.transport.aio import AsyncKeeper
    from kvstore.transport.aio_link import AsyncLink
    from kvstore.transport.link import Deadlines, Rpc
    from kvstore.transport.remote import WriteOf
    from kvstore.types import CommitResult, KvLayout, PrefixMatch, Tier
    from kvstore.v1 import block_pb2


class AsyncHeld:
    """A link whose session holds something for us."""

    def __init__(self, keeper: AsyncKeeper, link: AsyncLink, deadlines: Deadlines) -> None:
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

    async def call(self, rpc: Rpc[R], request: Message, wait: Wait) -> R:
        """One call."""
        return await self._keeper.run_on(
            self.link, lambda ends_at: self.link.call(rpc, request, ends_at), self._deadlines.of(wait)
        )

    async def load(self, request: pb.LoadRequest, target: NDArray[np.uint8]) -> int:
        """Receive rows into the flat `target`."""
        seconds = self._deadlines.moving(target.size)
        return await self._keeper.run_on(self.link, lambda ends_at: self.link.load(request, target, ends_at), seconds)

    def read_in_place(self, request: pb.LoadRequest) -> AbstractAsyncContextManager[list[NDArray[np.uint8]]]:
        """Rows where they lie."""
        return self.link.read_in_place(request, time.monotonic() + self._deadlines.bulk_seconds)

    async def write(self, start: pb.WriteStart, source: NDArray[np.uint8]) -> int:
        """Send the rows of the flat `source`."""
        seconds = self._deadlines.moving(source.size)
        return await self._keeper.run_on(self.link, lambda ends_at: self.link.write(start, source, ends_at), seconds)

    def give_up(self, rpc: Rpc[R], request: Message) -> None:
        """End what the server may or may not hold, without waiting for an answer."""
        self.link.give_up(rpc, request, self._deadlines.lookup_seconds)

    async def end(self, rpc: Rpc[R], request: Message) -> None:
        """End what the server holds. If it does not answer, the session is ended instead, and everything with it."""
        if self.link.ended:
            return
        try:
            await self.call(rpc, request, Wait.LOOKUP)
        except (UnavailableError, UnauthenticatedError):
            self.link.close()
        except asyncio.CancelledError:
            self.give_up(rpc, request)
            raise


class AsyncLease:
    """A kvstore.api.Lease with awaitable methods. Raises UnavailableError once its session has ended."""

    def __init__(self, held: AsyncHeld, match: PrefixMatch, tiers: Collection[Tier] | None) -> None:
        self._held = held
        self._match = match
        self._tiers = tiers
        self._layout = match.namespace.layout
        self._lease_id = held.link.new_id()
        self._is_open = True
        self._blocks = 0
        self.size = StateSize(0, 0, 0)

    async def open(self, ns_id: bytes, ends_at: float) -> None:
        """Have it granted; whoever is cancelled meanwhile holds none."""
        request = lease_request(self._held.session_id, ns_id, self._match, self._lease_id, self._tiers)
        try:
            granted = await self._held.link.call(LEASE, request, ends_at)
        except (UnavailableError, asyncio.CancelledError):
            self._held.give_up(RELEASE, self._release_request())
            raise
        self._blocks = granted.blocks
        self.size = convert.state_from_proto(granted.state)

    @property
    def blocks(self) -> int:
        """Number of blocks protected."""
        return self._blocks

    async def load_into(self, buffer: BlockBuffer, *, from_block: int = 0, part: int | None = None) -> LoadResult:
        """Receive blocks into the rows of `buffer`, which is free again when this returns, however it does."""
        self._check_open()
        load = LoadOf(self._layout, self._blocks, buffer, from_block, part)
        if not load.count:
            return LoadResult(0, 0, 0)
        request = load.request(self._held.session_id, self._lease_id)
        return load.result(await self._held.load(request, load.target))

    @asynccontextmanager
    async def read_in_place(
        self, *, from_block: int = 0, blocks: int | None = None, part: int | None = None
    ) -> AsyncIterator[list[NDArray[np.uint8]]]:
        """Show blocks where they lie in the memory of a server on this host; see RemoteLease.read_in_place."""
        self._check_open()
        count = shown_blocks(self._layout, self._blocks, from_block, blocks, part)
        if not count:
            yield []
            return
        request = pb.LoadRequest(
            session_id=self._held.session_id, lease_id=self._lease_id, from_block=from_block, blocks=count, part=part
        )
        async with self._held.read_in_place(request) as pieces:
            yield pieces

    async def release(self) -> None:
        """End the lease; idempotent, and raises nothing if the server cannot be reached."""
        if self._is_open:
            self._is_open = False
            await self._held.end(RELEASE, self._release_request())

    def _release_request(self) -> pb.ReleaseRequest:
        return pb.ReleaseRequest(session_id=self._held.session_id, lease_id=self._lease_id)

    def _check_open(self) -> None:
        if not self._is_open:
            raise ClosedError("the lease has ended")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.release()


class AsyncPrefetch:
    """A kvstore.api.Prefetch with awaitable methods. `wait` raises UnavailableError once its session has ended."""

    def __init__(self, held: AsyncHeld, prompt: block_pb2.Prompt, step_seconds: float) -> None:
        self._held = held
        self._step_seconds = step_seconds
        self._request = pb.PrefetchRequest(session_id=held.session_id, prompt=prompt, prefetch_id=held.link.new_id())
        self._asking = asyncio.Lock()
        self._is_open = True
        self._host_blocks = 0
        self._done = False

    async def open(self, ends_at: float) -> None:
        """Have it begun; whoever is cancelled meanwhile has begun none."""
        try:
            self._take(await self._held.link.call(PREFETCH, self._request_of(0.0), ends_at))
        except (UnavailableError, asyncio.CancelledError):
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

    async def wait(self, seconds: float | None = None) -> int:
        """Wait until it has ended, in steps."""
        ends_at = None if seconds is None else time.monotonic() + seconds
        while not self._done and self._is_open:
            rest_seconds = self._step_seconds if ends_at is None else ends_at - time.monotonic()
            if rest_seconds <= 0:
                break
            await self._ask(min(rest_seconds, self._step_seconds))
        return self._host_blocks

    async def cancel(self) -> None:
        """Stop it; idempotent, and raises nothing if the server cannot be reached."""
        was_open, self._is_open = self._is_open, False
        if was_open and not self._done and not self._held.link.ended:
            self._give_up()

    async def _ask(self, wait_seconds: float) -> None:
        async with self._asking:
            if not self._done:
                self._take(await self._held.call(PREFETCH, self._request_of(wait_seconds), Wait.CONTROL))

    def _take(self, answer: pb.PrefetchResponse) -> None:
        self._host_blocks, self._done = answer.host_blocks, answer.done

    def _request_of(self, wait_seconds: float) -> pb.PrefetchRequest:
        convert.set_duration(self._request.wait, wait_seconds, "wait_seconds")
        # The connection may put less of the prompt into the message it is given.
        return pb.PrefetchRequest.FromString(self._request.SerializeToString())

    def _give_up(self) -> None:
        request = pb.CancelPrefetchRequest(session_id=self._request.session_id, prefetch_id=self._request.prefetch_id)
        self._held.give_up(CANCEL_PREFETCH, request)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.cancel()


class AsyncStage:
    """A kvstore.api.Stage with awaitable methods. Raises UnavailableError once its session has ended."""

    def __init__(self, held: AsyncHeld, layout: KvLayout, request: pb.StageRequest) -> None:
        """For what `request` asks, which names no session and no stage yet."""
        self._held = held
        self._layout = layout
        self._stage_id = held.link.new_id()
        self._is_open = True
        self._request = request
        self._wants = StageWants(layout, request, pb.StageResponse())

    async def open(self, ends_at: float) -> None:
        """Have it opened; whoever is cancelled meanwhile holds none."""
        self._request.session_id, self._request.stage_id = self._held.session_id, self._stage_id
        try:
            opened = await self._held.link.call(STAGE, self._request, ends_at)
        except (UnavailableError, asyncio.CancelledError):
            self._held.give_up(ABORT, self._abort_request())
            raise
        self._wants = StageWants(self._layout, self._request, opened)

    @property
    def from_block(self) -> int:
        """First block that wants bytes."""
        return self._wants.from_block

    @property
    def blocks(self) -> int:
        """How many blocks want bytes."""
        return self._wants.blocks

    def wanted(self, part: int) -> tuple[range, ...]:
        """The blocks of which a part is wanted; not awaited, since the server said so when the stage was opened."""
        return self._wants.of(part)

    async def write_from(self, buffer: BlockBuffer, *, from_block: int | None = None, part: int | None = None) -> int:
        """Send the rows that are wanted. A write that breaks, or is cancelled, aborts the stage."""
        self._check_open()
        writes = self._wants.writes(buffer, from_block, part)
        if not writes:
            return 0
        self._held.check()
        return sum([await self._write(write) for write in writes])

    async def _write(self, write: WriteOf) -> int:
        try:
            return await self._held.write(write.start(self._held.session_id, self._stage_id), write.source)
        except (UnavailableError, asyncio.CancelledError):
            self._give_up()
            raise

    async def commit(self) -> CommitResult:
        """Make the leading blocks whose every part was written visible, atomically."""
        self._check_open()
        self._held.check()
        self._is_open = False
        request = pb.CommitRequest(session_id=self._held.session_id, stage_id=self._stage_id)
        try:
            return convert.commit_from_proto(await self._held.call(COMMIT, request, Wait.BULK))
        except (UnavailableError, asyncio.CancelledError):
            self._held.give_up(ABORT, self._abort_request())
            raise

    async def abort(self) -> None:
        """Drop everything written; idempotent, and raises nothing if the server cannot be reached."""
        if self._is_open:
            self._is_open = False
            await self._held.end(ABORT, self._abort_request())

    def _give_up(self) -> None:
        if self._is_open:
            self._is_open = False
            self._held.give_up(ABORT, self._abort_request())

    def _abort_request(self) -> pb.AbortRequest:
        return pb.AbortRequest(session_id=self._held.session_id, stage_id=self._stage_id)

    def _check_open(self) -> None:
        if not self._is_open:
            raise ClosedError("the stage has ended")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            await self.abort()
        elif self._is_open:
            await self.commit()
