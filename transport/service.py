"""CacheService: the calls of engines and observers, over any store. Messages in, messages out; no gRPC in here.

Frames of Load leave as encoded messages and frames of Write come as bytes: see frames.py.
"""

from __future__ import annotations

import asyncio
import hmac
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from kvstore import __version__
from kvstore.errors import (
    InvalidArgumentError,
    InvalidBufferError,
    InvalidLayoutError,
    InvalidTokensError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
)
from kvstore.hashing import secret_proof
from kvstore.transport import convert
from kvstore.transport.frames import encode_frame
from kvstore.transport.jobs import LoadJob, SizedLease, WriteJob, load_job, write_job
from kvstore.transport.principal import caller
from kvstore.transport.rows import RowAssembler
from kvstore.types import PLAIN_ROOT, PrefixMatch
from kvstore.v1 import cache_service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Collection

    from kvstore.api import KvStore, Lease, Stage
    from kvstore.events import EventPage
    from kvstore.transport.lookup_frames import Lookup
    from kvstore.transport.session import Session
    from kvstore.transport.state import ServiceState
    from kvstore.types import CommitResult, KvLayout, Namespace, Root, Tier, TokenArray
    from kvstore.v1 import block_pb2

BLOCK_BYTES_MAX = 2**40
EVENTS_MAX = 10_000
# A lookup of 64 Ki tokens takes about 100 us; handing it to a thread and back takes as much.
QUICK_BYTES_MAX = 256 * 1024
EVENTS_DEFAULT = 1000
EVENT_WAIT_SECONDS_MAX = 10.0
PREFETCH_WAIT_SECONDS_MAX = 10.0
DISMISSED = "the token or certificate of the session has expired or was revoked; ask for another one"
_WATCH_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class _Chunk:
    blocks: int
    frames: list[bytes]
    complete: bool


@runtime_checkable
class TenantLogs(Protocol):
    """A store that keeps a log of events for each tenant beside that of all: see kvstore.events."""

    def tenant_events(self, tenant: str, *, after: int, limit: int, wait_seconds: float) -> EventPage:
        """A page of a tenant's own, as `KvStore.events` is one of all."""
        ...


class CacheService:
    """Answers kvstore.v1.CacheService; each method is the call of the same name."""

    def __init__(self, state: ServiceState) -> None:
        self._state = state
        self._store = state.store
        self._limits = state.limits

    async def session(self, requests: AsyncIterator[pb.SessionRequest]) -> AsyncGenerator[pb.SessionResponse, None]:
        """Open a session that lasts until the client ends the stream, or the server stops."""
        if await anext(requests, None) is None:
            return
        session = self._state.sessions.open(caller())
        dismissed = asyncio.Event()
        session.dismiss = dismissed.set
        try:
            yield self.greeting(session)
            await _first_of(_drain(requests), self._state.stopping.wait(), dismissed.wait())
            if self._state.stopping.is_set():
                raise UnavailableError("the server is stopping")
            if dismissed.is_set():
                raise UnauthenticatedError(DISMISSED)
        finally:
            self._state.end_session(session)

    def greeting(self, session: Session) -> pb.SessionResponse:
        """What a client is told of its new session."""
        limits, engine = self._limits, self._state.bulk_engine
        return pb.SessionResponse(
            session_id=session.session_id,
            challenge=session.challenge,
            server_version=__version__,
            limits=pb.SessionLimits(
                message_bytes=limits.message_bytes,
                frame_bytes=limits.frame_bytes,
                leases=limits.leases_per_session,
                stages=limits.stages_per_session,
                namespaces=limits.namespaces_per_session,
            ),
            bulk_engines=() if engine is None else engine.offer(session.principal),
        )

    async def open_namespace(self, request: pb.OpenNamespaceRequest) -> pb.OpenNamespaceResponse:
        """Check the proof, and let the session use the namespace."""
        session = self._state.sessions.get(request.session_id)
        namespace = convert.namespace_from_proto(request.namespace, None)
        session.principal.require_tenant(namespace.tenant)
        _check_size(namespace.layout)
        if request.proof:
            secret = self._proven_secret(namespace, session.challenge, request.proof)
            namespace = convert.namespace_from_proto(request.namespace, secret)
        ns_id = await self._state.short.run(partial(self._store.namespace_id, namespace))
        session.open_namespace(ns_id, namespace)
        self._state.namespaces.add(ns_id, namespace.tenant)
        layout = namespace.layout
        part_bytes = [part.size_bytes for part in layout.parts]
        return pb.OpenNamespaceResponse(
            ns_id=ns_id, block_bytes=layout.block_bytes, part_bytes=part_bytes, block_symbols=layout.block_symbols
        )

    def _proven_secret(self, namespace: Namespace, challenge: bytes, proof: bytes) -> bytes:
        proven = None
        for secret in self._state.secrets.get(namespace.tenant, ()):
            if hmac.compare_digest(secret_proof(secret, challenge, namespace), proof):
                proven = secret
        if proven is None:
            raise PermissionDeniedError(
                f"the secret of tenant {namespace.tenant!r} was not proven: none configured here fits; "
                f"put it into a file and name that in tenants.{namespace.tenant}.secret_files"
            )
        return proven

    async def match(self, request: pb.MatchRequest) -> pb.MatchResponse:
        """Look a prompt up."""
        session = self._state.sessions.get(request.session_id)
        namespace = session.namespace(request.prompt.ns_id)
        root, ns_id = convert.root_from_proto(request.prompt.root), request.prompt.ns_id
        tokens = convert.tokens_from_proto(request.prompt.tokens)
        look_up = partial(self._matched, namespace, root, tokens, request)
        if self.is_quick(session, ns_id, tokens.nbytes):
            match = look_up()
        else:
            match = await self._state.short.run(look_up)
            session.warm_namespaces.add(ns_id)
        return pb.MatchResponse(blocks=match.blocks, runs=convert.runs_to_proto(match.runs))

    async def hint(self, request: pb.HintRequest) -> pb.HintResponse:
        """Tell when a prompt will be used again."""
        namespace = self._namespace(request)
        tokens = self._tokens(request.prompt.tokens)
        root = convert.root_from_proto(request.prompt.root)
        seconds = convert.hinted_seconds(request)
        hint = partial(self._store.hint_next_use, namespace, tokens, root=root, seconds=seconds)
        return pb.HintResponse(blocks=await self._state.short.run(hint))

    def is_quick(self, session: Session, ns_id: bytes, prompt_bytes: int) -> bool:
        """Whether a lookup may run in the event loop itself, which saves two changes of thread.

        Not so a long prompt, nor the first of a namespace in its session, for which the store may have to read what the
        disk holds of it.
        """
        return prompt_bytes <= QUICK_BYTES_MAX and ns_id in session.warm_namespaces

    def match_at_once(self, session: Session, lookup: Lookup, tokens: TokenArray) -> PrefixMatch:
        """Look the prompt of these tokens up in the event loop itself; see `is_quick`."""
        root = convert.root_from_bytes(lookup.root) if lookup.root else PLAIN_ROOT
        return self._matched(session.namespace(lookup.ns_id), root, tokens, lookup)

    def _matched(
        self, namespace: Namespace, root: Root, tokens: TokenArray, asked: pb.MatchRequest | Lookup
    ) -> PrefixMatch:
        self._require_length(tokens)
        is_peek = asked.peek
        match = self._store.match(namespace, tokens, root=root, touch=not is_peek, request_id=asked.request_id or None)
        if not is_peek:
            self._state.tenants.count_lookup(match, len(tokens))
        return match

    async def prefetch(self, request: pb.PrefetchRequest) -> pb.PrefetchResponse:
        """Bring a prompt up into host memory, or go on waiting for that."""
        session = self._state.sessions.get(request.session_id)
        wait_seconds = convert.duration_seconds(request.wait)
        if not 0 <= wait_seconds <= PREFETCH_WAIT_SECONDS_MAX:
            raise InvalidArgumentError(f"wait is {wait_seconds} s, expected 0..{PREFETCH_WAIT_SECONDS_MAX}")
        namespace = self._namespace(request)
        tokens = self._tokens(request.prompt.tokens)
        root = convert.root_from_proto(request.prompt.root)
        start = partial(self._store.prefetch, namespace, tokens, root=root)
        prefetch = await self._state.short.run(
            lambda: session.prefetches.get_or_start(request.prefetch_id, start),
            undo=lambda _: session.prefetches.cancel(request.prefetch_id),
        )
        if wait_seconds and not prefetch.done:
            await self._state.prefetch.run(partial(prefetch.wait, wait_seconds))
        done = prefetch.done  # before the count, which is then the last one
        if done:
            session.prefetches.forget(request.prefetch_id)
        return pb.PrefetchResponse(host_blocks=prefetch.host_blocks, done=done)

    async def cancel_prefetch(self, request: pb.CancelPrefetchRequest) -> pb.CancelPrefetchResponse:
        """End a prefetch."""
        prefetches = self._state.sessions.get(request.session_id).prefetches
        await self._state.endings.call(partial(prefetches.cancel, request.prefetch_id))
        return pb.CancelPrefetchResponse()

    async def lease(self, request: pb.LeaseRequest) -> pb.LeaseResponse:
        """Protect a match; a lease whose caller is gone before the answer ends at once."""
        session = self._state.sessions.get(request.session_id)
        namespace = self._namespace(request)
        match = _claimed_match(namespace, request, self._tokens(request.prompt.tokens))
        tiers = convert.tiers_from_proto(request.tiers)
        deletions = self._state.deletions
        # Asked first: what is leased then was stored behind that deletion.
        deleted = 0 if deletions is None else deletions.applied(request.prompt.ns_id)
        lease = await self._state.short.run(
            lambda: session.leases.open(
                request.lease_id,
                lambda: _leased(self._store, match, tiers),
                namespace,
                lambda held: self._state.tenants.hold_lease(
                    namespace.tenant, _leased_bytes(namespace.layout, held.blocks)
                ),
            ),
            undo=lambda _: session.leases.end(request.lease_id),
        )
        answer = pb.LeaseResponse(blocks=lease.blocks, deletions=deleted)
        if isinstance(lease, SizedLease):
            answer.state.CopyFrom(convert.state_to_proto(lease.size))
        return answer

    async def load(self, request: pb.LoadRequest) -> AsyncGenerator[pb.LoadResponse | bytes, None]:
        """Send rows while the next ones are read; stop at the first block that is not there."""
        job = load_job(self._state.sessions.get(request.session_id), request, self._limits)
        blocks = 0
        async with self._state.bulk_call(), aclosing(self._chunks(job)) as chunks:
            async for chunk in chunks:
                blocks += chunk.blocks
                for frame in chunk.frames:
                    yield frame
        yield pb.LoadResponse(summary=pb.LoadSummary(blocks=blocks, requested_blocks=request.blocks))

    async def _chunks(self, job: LoadJob) -> AsyncGenerator[_Chunk, None]:
        next_block = job.from_block
        ahead = self._read_ahead(job, next_block)
        try:
            while ahead is not None:
                chunk = await ahead
                next_block += chunk.blocks
                ahead = self._read_ahead(job, next_block) if chunk.complete else None
                yield chunk
        finally:
            if ahead is not None:
                ahead.cancel()
                await asyncio.gather(ahead, return_exceptions=True)

    def _read_ahead(self, job: LoadJob, first: int) -> asyncio.Task[_Chunk] | None:
        count = min(self._rows_at_once(job.row_bytes), job.end_block - first)
        if not count:
            return None
        read = self._state.bulk.call(partial(self._read_rows, job, first, count))
        return asyncio.get_running_loop().create_task(read)

    def _read_rows(self, job: LoadJob, first: int, count: int) -> _Chunk:
        buffer = self._state.buffers.take(count * job.row_bytes)
        rows = buffer[: count * job.row_bytes].reshape(count, job.row_bytes)
        blocks = job.lease.load_into(rows, from_block=first, part=job.part).blocks
        payload = buffer[: blocks * job.row_bytes]
        frame_bytes = self._limits.frame_bytes
        frames = [
            encode_frame(pb.LoadResponse, payload[start : start + frame_bytes])
            for start in range(0, payload.size, frame_bytes)
        ]
        self._state.buffers.give_back(buffer)
        return _Chunk(blocks, frames, complete=blocks == count)

    async def release(self, request: pb.ReleaseRequest) -> pb.ReleaseResponse:
        """End a lease."""
        leases = self._state.sessions.get(request.session_id).leases
        await self._state.endings.call(partial(leases.end, request.lease_id))
        return pb.ReleaseResponse()

    async def stage(self, request: pb.StageRequest) -> pb.StageResponse:
        """Begin to store; a stage whose caller is gone before the answer is aborted at once."""
        session = self._state.sessions.get(request.session_id)
        namespace = self._namespace(request)
        tokens = self._tokens(request.prompt.tokens)
        stage = await self._state.short.run(
            lambda: session.stages.open(
                request.stage_id,
                lambda: _staged(self._store, namespace, tokens, request),
                namespace,
                lambda _: self._state.tenants.hold_stage(namespace.tenant),
            ),
            undo=lambda _: session.stages.end(request.stage_id),
        )
        return convert.stage_to_proto(stage, namespace.layout)

    async def write(self, requests: AsyncIterator[pb.WriteRequest | memoryview]) -> pb.WriteResponse:
        """Write the rows of each frame as it comes."""
        opening = await anext(requests, None)
        if not isinstance(opening, pb.WriteRequest) or opening.WhichOneof("content") != "start":
            raise InvalidArgumentError("a Write begins with a start message")
        start = opening.start
        session = self._state.sessions.get(start.session_id)
        job = write_job(session, start, self._limits)
        async with self._state.bulk_call():
            try:
                return pb.WriteResponse(rows=await self._write_rows(job, requests))
            except BaseException:
                # Of a write that broke off nobody knows what arrived, so nothing of it may ever be committed.
                self._state.end_in_background(partial(session.stages.try_to_end, start.stage_id))
                raise

    async def _write_rows(self, job: WriteJob, requests: AsyncIterator[pb.WriteRequest | memoryview]) -> int:
        buffer = self._state.buffers.take(job.row_bytes)
        assembler = RowAssembler(buffer[: job.row_bytes], job.blocks)
        taken, next_block = 0, job.from_block
        async for frame in self._frames(requests):
            for rows in assembler.feed(frame):
                write = partial(job.stage.write_from, rows, from_block=next_block, part=job.part)
                taken += await self._state.bulk.call(write)
                next_block += len(rows)
        assembler.finish()
        self._state.buffers.give_back(buffer)
        return taken

    async def _frames(self, requests: AsyncIterator[pb.WriteRequest | memoryview]) -> AsyncIterator[bytes | memoryview]:
        async for request in requests:
            frame = request if isinstance(request, memoryview) else request.frame
            if not 1 <= len(frame) <= self._limits.frame_bytes:
                raise InvalidBufferError(f"a frame has {len(frame)} bytes, expected 1..{self._limits.frame_bytes}")
            yield frame

    async def commit(self, request: pb.CommitRequest) -> pb.CommitResponse:
        """Make a stage visible; it ends, whatever comes of it."""
        stages = self._state.sessions.get(request.session_id).stages

        def commit() -> CommitResult:
            held = stages.take(request.stage_id)
            result = held.handle.commit()
            self._state.tenants.count_commit(held.namespace.tenant, result)
            return result

        return convert.commit_to_proto(await self._state.short.run(commit))

    async def abort(self, request: pb.AbortRequest) -> pb.AbortResponse:
        """Drop a stage."""
        stages = self._state.sessions.get(request.session_id).stages
        await self._state.endings.call(partial(stages.end, request.stage_id))
        return pb.AbortResponse()

    async def get_stats(self, _request: pb.GetStatsRequest) -> pb.GetStatsResponse:
        """Occupancy and counters; a tenant's own where the caller is of one."""
        tenant = caller().tenant
        if tenant is None:
            stats = await self._state.short.run(self._store.stats)
            stats = replace(stats, uptime_seconds=self._state.clock.monotonic() - self._state.began_at)
        else:
            namespaces, pins = (len(owners.of(tenant)) for owners in (self._state.namespaces, self._state.pins))
            stats = self._state.tenants.stats(tenant, namespaces=namespaces, pins=pins)
        if self._state.cluster is not None:
            stats = replace(stats, node=self._state.cluster.node_name)
        return pb.GetStatsResponse(stats=convert.stats_to_proto(stats))

    async def read_events(self, request: pb.ReadEventsRequest) -> pb.ReadEventsResponse:
        """One page of events."""
        wait_seconds = convert.duration_seconds(request.wait)
        if not 0 <= wait_seconds <= EVENT_WAIT_SECONDS_MAX:
            raise InvalidArgumentError(f"wait is {wait_seconds} s, expected 0..{EVENT_WAIT_SECONDS_MAX}")
        limit = request.limit or EVENTS_DEFAULT
        if limit > EVENTS_MAX:
            raise InvalidArgumentError(f"limit is {limit} events, expected at most {EVENTS_MAX}")
        workers = self._state.events if wait_seconds else self._state.short
        page = await workers.run(partial(self._events, caller().tenant, request.after, limit, wait_seconds))
        return pb.ReadEventsResponse(page=page)

    async def watch_events(self, request: pb.WatchEventsRequest) -> AsyncGenerator[pb.WatchEventsResponse, None]:
        """Pages of events as they come, until the client cancels or the server stops."""
        after, principal = request.after, caller()
        with self._state.events.place():
            while not self._state.stopping.is_set():
                if not self._state.access.holds(principal):
                    raise UnauthenticatedError(DISMISSED)
                read = partial(self._events, principal.tenant, after, EVENTS_DEFAULT, _WATCH_SECONDS)
                page = await self._state.events.call(read)
                after = page.next_after
                if page.events or page.gap:
                    yield pb.WatchEventsResponse(page=page)
        raise UnavailableError("the server is stopping")

    def _events(self, tenant: str | None, after: int, limit: int, wait_seconds: float) -> block_pb2.EventPage:
        if tenant is None:
            return convert.page_to_proto(self._store.events(after=after, limit=limit, wait_seconds=wait_seconds))
        if not isinstance(self._store, TenantLogs):
            raise PermissionDeniedError("this store has one log of events, which is not told to callers of one tenant")
        page = self._store.tenant_events(tenant, after=after, limit=limit, wait_seconds=wait_seconds)
        return convert.page_to_proto(page)

    def _tokens(self, packed: bytes) -> TokenArray:
        tokens = convert.tokens_from_proto(packed)
        self._require_length(tokens)
        return tokens

    def _require_length(self, tokens: TokenArray) -> None:
        if len(tokens) > self._limits.prompt_tokens:
            raise InvalidTokensError(
                f"the prompt has {len(tokens)} tokens, expected at most {self._limits.prompt_tokens} "
                "(limits.prompt_tokens); ask about its beginning"
            )

    def _namespace(
        self, request: pb.MatchRequest | pb.HintRequest | pb.PrefetchRequest | pb.LeaseRequest | pb.StageRequest
    ) -> Namespace:
        return self._state.sessions.get(request.session_id).namespace(request.prompt.ns_id)

    def _rows_at_once(self, row_bytes: int) -> int:
        return max(1, self._limits.bulk_buffer_bytes // row_bytes)


def _check_size(layout: KvLayout) -> None:
    block_bytes = sum(part.size_bytes for part in layout.parts)
    if block_bytes > BLOCK_BYTES_MAX:
        raise InvalidLayoutError(f"a block has {block_bytes} bytes, this server takes {BLOCK_BYTES_MAX}")


def _leased_bytes(layout: KvLayout, blocks: int) -> int:
    """Bytes of a lease in full: of its dense parts, and of the sparse ones that a match of so many blocks needs."""
    sparse = range(layout.part_count, len(layout.parts))
    sparse_bytes = sum(layout.part_bytes(part) * len(layout.needed_blocks(part, blocks)) for part in sparse)
    return blocks * layout.block_bytes + sparse_bytes


def _claimed_match(namespace: Namespace, request: pb.LeaseRequest, tokens: TokenArray) -> PrefixMatch:
    prompt_blocks = len(tokens) // namespace.layout.block_symbols
    if request.blocks > prompt_blocks:
        raise InvalidArgumentError(f"a lease of {request.blocks} blocks of a prompt that has {prompt_blocks}")
    root = convert.root_from_proto(request.prompt.root)
    return PrefixMatch(namespace, root, tokens, request.blocks, runs=())


def _leased(store: KvStore, match: PrefixMatch, tiers: Collection[Tier] | None) -> Lease:
    """A lease of blocks, or of the pieces of a state."""
    if match.namespace.layout.state is not None:
        return store.lease_state(match, tiers=tiers).rows
    return store.lease(match, tiers=tiers)


def _staged(store: KvStore, namespace: Namespace, tokens: TokenArray, request: pb.StageRequest) -> Stage:
    """A stage of blocks, or of the pieces of a state."""
    root = convert.root_from_proto(request.prompt.root)
    if request.HasField("state_bytes"):
        return store.stage_state(
            namespace, tokens, state_bytes=request.state_bytes, root=root, writer=request.writer
        ).rows
    return store.stage(
        namespace,
        tokens,
        root=root,
        from_block=request.from_block,
        turn_ends=request.turn_ends,
        rank=request.rank if request.HasField("rank") else None,
        writer=request.writer,
    )


async def _drain(requests: AsyncIterator[pb.SessionRequest]) -> None:
    async for _ in requests:
        pass


async def _first_of(*works: Awaitable[object]) -> None:
    """Return when the first of `works` is done, with all others cancelled; raises what it raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
