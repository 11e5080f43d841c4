"""AsyncClient: the methods of kvstore.api.KvStore as awaitables, for programs that live in an event loop."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Self, TypeVar

from grpc_health.v1 import health_pb2

from kvstore.api import SCRUB_BYTES
from kvstore.errors import ClosedError, InvalidArgumentError, KvstoreError, UnauthenticatedError, UnavailableError
from kvstore.tokens import as_prompt
from kvstore.transport import client as threaded
from kvstore.transport import convert, plans
from kvstore.transport.address import parse_address, with_arena
from kvstore.transport.aio_handles import AsyncHeld, AsyncLease, AsyncPrefetch, AsyncStage
from kvstore.transport.aio_link import LoopThreads, open_async_link
from kvstore.transport.aio_states import AsyncStateLease, AsyncStateStage
from kvstore.transport.breaker import GuardedServer
from kvstore.transport.bulk_choice import engine_client
from kvstore.transport.client import ServerStatus, event_step_seconds, prefetch_step_seconds
from kvstore.transport.credentials import credentials_of, with_credentials
from kvstore.transport.keeper import PROBE_SECONDS, open_link
from kvstore.transport.link import ArenaStatus, Lookup, Wait, flat_deadlines
from kvstore.types import PLAIN_ROOT, PrefixMatch, require_blocks, require_seconds, require_state, require_tiers
from kvstore.writers import chosen_writer, require_writer_id

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Sequence
    from types import TracebackType

    from google.protobuf.message import Message

    from kvstore.doctor import Report
    from kvstore.events import EventPage
    from kvstore.nodes import Deletion, DrainOrder, DrainProgress, Node, NodeMatch
    from kvstore.stats import NamespaceStats, StoreStats
    from kvstore.tokens import Tokens
    from kvstore.transport.address import TcpAddress, UnixAddress
    from kvstore.transport.aio_link import AsyncLink
    from kvstore.transport.breaker import BreakerStatus
    from kvstore.transport.bulk_client import BulkEngineClient, BulkStatus
    from kvstore.transport.link import Deadlines
    from kvstore.transport.plans import Plan
    from kvstore.types import Namespace, Pin, Root, ScrubPage, Tier, TokenArray, Verification
    from kvstore.v1 import cache_service_pb2 as pb
    from kvstore.writers import WriterPage, WriterRun

R = TypeVar("R", bound="Message")
T = TypeVar("T")
# Token ids of longer prompts are read in a thread: a list costs 40 ns a token, a buffer 2.
_LIST_TOKENS_MAX = 2048
_BUFFER_TOKENS_MAX = 32 * 1024


class AsyncKeeper:
    """The link of one AsyncClient, opened by whoever calls first, behind a circuit breaker.

    Belongs to the event loop that uses it first. The breaker's probe dials by itself in its own thread; the loop
    connects again at the next call.
    """

    def __init__(
        self,
        address: UnixAddress | TcpAddress,
        on_breaker_change: Callable[[BreakerStatus], None] | None,
        bulk: BulkEngineClient | None = None,
    ) -> None:
        self.threads = LoopThreads()
        self._bulk = bulk
        self._address = address
        self._guard = GuardedServer(str(address), partial(_probe, address), on_breaker_change)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._link: AsyncLink | None = None
        self._opening: asyncio.Task[AsyncLink] | None = None
        self._closed = False

    @property
    def breaker(self) -> BreakerStatus:
        """State of the breaker."""
        return self._guard.breaker.status

    @property
    def bulk(self) -> BulkStatus | None:
        """What its engine for bytes has done; None if it has none."""
        return None if self._bulk is None else self._bulk.status

    @property
    def arena(self) -> ArenaStatus:
        """Whether the link reads blocks where they lie."""
        return ArenaStatus() if self._link is None else self._link.arena

    async def run(
        self,
        attempt: Callable[[AsyncLink, float], Awaitable[T]],
        seconds: float,
        again: Callable[[AsyncLink, float], Awaitable[T]] | None = None,
    ) -> T:
        """As LinkKeeper.run."""
        ends_at = time.monotonic() + seconds
        self.check_server()
        try:
            answer = await self._attempt(attempt, again, ends_at)
        except UnavailableError as error:
            self._guard.record_failure(error)
            raise
        self._guard.breaker.record_success()
        return answer

    async def run_on(self, link: AsyncLink, attempt: Callable[[float], Awaitable[T]], seconds: float) -> T:
        """As LinkKeeper.run_on."""
        ends_at = time.monotonic() + seconds
        self._guard.breaker.check()
        try:
            answer = await attempt(ends_at)
        except UnavailableError as error:
            if not link.ended:
                self._guard.record_failure(error)
            raise
        self._guard.breaker.record_success()
        return answer

    def check_server(self) -> None:
        """Raises UnavailableError while the breaker is open, ClosedError after close."""
        if self._closed:
            raise ClosedError("the client is closed")
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise InvalidArgumentError("an AsyncClient belongs to the event loop that used it first; make another one")
        self._guard.breaker.check()

    async def close(self) -> None:
        """End the link and the probes; idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._opening is not None:
            self._opening.cancel()
            with suppress(asyncio.CancelledError, KvstoreError):
                await self._opening
        if self._link is not None:
            self._link.close()
        await asyncio.to_thread(self._guard.close)
        self.threads.close()
        if self._bulk is not None:
            await asyncio.to_thread(self._bulk.close)

    async def _attempt(
        self,
        attempt: Callable[[AsyncLink, float], Awaitable[T]],
        again: Callable[[AsyncLink, float], Awaitable[T]] | None,
        ends_at: float,
    ) -> T:
        link = await self._connect(ends_at)
        try:
            return await attempt(link, ends_at)
        except (UnavailableError, UnauthenticatedError):  # the token file may have another one by now
            if again is None or not link.ended or time.monotonic() >= ends_at:
                raise
        return await again(await self._connect(ends_at), ends_at)

    async def _connect(self, ends_at: float) -> AsyncLink:
        link = self._link
        if link is not None and not link.ended:
            return link
        if self._opening is None:
            if link is not None:
                link.close()
                self._link = None
            self._opening = asyncio.get_running_loop().create_task(self._open(ends_at))
        # One connects for all, and goes on should the one who began be cancelled.
        opening = asyncio.shield(self._opening)
        try:
            async with asyncio.timeout(max(0.0, ends_at - time.monotonic())):
                return await opening
        except TimeoutError as err:
            raise UnavailableError(f"no answer from {self._address} within the deadline") from err

    async def _open(self, ends_at: float) -> AsyncLink:
        try:
            self._link = await open_async_link(self._address, self.threads, ends_at, self._bulk)
            return self._link
        finally:
            self._opening = None


class AsyncClient:
    """A store behind a server, for the tasks of one event loop; see kvstore.api.KvStore for the methods.

    Calls of many tasks are under way on one connection at a time. Bytes move in threads, straight from and to the
    caller's buffers. An await that is cancelled leaves nothing behind: a lease or stage that was being opened is
    given up, and the buffer of a transfer is free again when the cancelled await returns. Deadlines, reconnecting and
    the breaker are those of the client for threads. Not to be used in the child of a fork.
    """

    def __init__(self, keeper: AsyncKeeper, deadlines: Deadlines, writer: int | None = None) -> None:
        self._keeper = keeper
        self._deadlines = deadlines
        self.writer = chosen_writer(writer)

    @property
    def breaker(self) -> BreakerStatus:
        """Whether the server is asked at all, and why not."""
        return self._keeper.breaker

    @property
    def bulk(self) -> BulkStatus | None:
        """What the engine for bytes has done; None where it was not asked for."""
        return self._keeper.bulk

    @property
    def arena(self) -> ArenaStatus:
        """Whether blocks are read where they lie in the memory of a server on the same host, and why not."""
        return self._keeper.arena

    def within(self, seconds: float) -> AsyncClient:
        """This client with another deadline for all its calls; it shares the connection."""
        return AsyncClient(self._keeper, flat_deadlines(seconds), self.writer)

    async def namespace_id(self, namespace: Namespace) -> bytes:
        """The public name of a namespace on this server."""

        async def attempt(link: AsyncLink, ends_at: float) -> bytes:
            return await link.ns_id(namespace, ends_at)

        return await self._keeper.run(attempt, self._deadlines.lookup_seconds, attempt)

    async def match(
        self,
        namespace: Namespace,
        tokens: Tokens,
        *,
        root: Root | None = None,
        touch: bool = True,
        request_id: str | None = None,
    ) -> PrefixMatch:
        """The longest stored prefix of `tokens`."""
        prompt = await self._prompt(namespace, tokens)
        lookup = Lookup(namespace, root, prompt, not touch, plans.unicode_text(request_id or "", "request_id"))
        found = await self._keeper.run(
            lambda link, ends_at: link.match(lookup, ends_at),
            self._deadlines.lookup_seconds,
            lambda link, ends_at: link.match(lookup.repeated(), ends_at),
        )
        return PrefixMatch(namespace, PLAIN_ROOT if root is None else root, prompt, found.blocks, found.runs)

    async def prefetch(
        self, namespace: Namespace, tokens: Tokens, *, root: Root | None = None, wait_seconds: float | None = 0.0
    ) -> AsyncPrefetch:
        """Bring a stored prefix up into host memory: `async with await client.prefetch(...) as prefetch`."""
        if wait_seconds is not None:
            wait_seconds = require_seconds(wait_seconds, "wait_seconds")
        prompt = await self._prompt(namespace, tokens)
        step_seconds = prefetch_step_seconds(self._deadlines)

        async def attempt(link: AsyncLink, ends_at: float) -> AsyncPrefetch:
            packed = convert.prompt_to_proto(await link.ns_id(namespace, ends_at), root, prompt)
            prefetch = AsyncPrefetch(AsyncHeld(self._keeper, link, self._deadlines), packed, step_seconds)
            await prefetch.open(ends_at)
            return prefetch

        prefetch = await self._keeper.run(attempt, self._deadlines.lookup_seconds, attempt)
        try:
            await prefetch.wait(wait_seconds)
        except BaseException:
            await prefetch.cancel()
            raise
        return prefetch

    async def lease(self, match: PrefixMatch, *, tiers: Collection[Tier] | None = None) -> AsyncLease:
        """Protect a match: `async with await client.lease(match) as lease`."""
        require_blocks(match.namespace.layout)
        return await self._lease(match, require_tiers(tiers))

    async def stage(
        self,
        namespace: Namespace,
        tokens: Tokens,
        *,
        root: Root | None = None,
        from_block: int = 0,
        turn_ends: Sequence[int] = (),
        rank: int | None = None,
        writer: int | None = None,
    ) -> AsyncStage:
        """Begin to store: `async with await client.stage(...) as stage`."""
        prompt = await self._prompt(namespace, tokens)
        request = plans.stage_request(namespace, prompt, from_block, turn_ends, rank)
        request.writer = self._author(writer)
        return await self._stage(namespace, prompt, root, request)

    async def lease_state(self, match: PrefixMatch, *, tiers: Collection[Tier] | None = None) -> AsyncStateLease:
        """Protect the state behind a match: `async with await client.lease_state(match) as lease`."""
        form = require_state(match.namespace.layout)
        return AsyncStateLease(await self._lease(match, require_tiers(tiers)), form.piece_bytes)

    async def stage_state(
        self,
        namespace: Namespace,
        tokens: Tokens,
        *,
        state_bytes: int,
        root: Root | None = None,
        writer: int | None = None,
    ) -> AsyncStateStage:
        """Begin to store a state: `async with await client.stage_state(...) as stage`."""
        prompt = await self._prompt(namespace, tokens)
        request = plans.stage_state_request(namespace, prompt, state_bytes)
        request.writer = self._author(writer)
        stage = await self._stage(namespace, prompt, root, request)
        return AsyncStateStage(stage, state_bytes, namespace.layout.block_bytes)

    async def pin(
        self, namespace: Namespace, tokens: Tokens, *, root: Root | None = None, ttl_seconds: float | None = None
    ) -> Pin:
        """Protect a stored prefix from eviction."""
        prompt = await self._prompt(namespace, tokens)
        return await self._run(plans.pin(namespace, prompt, root, ttl_seconds), prompt.size)

    async def unpin(self, pin_id: int) -> bool:
        """End a pin."""
        return await self._run(plans.unpin(pin_id))

    async def hint_next_use(
        self, namespace: Namespace, tokens: Tokens, *, root: Root | None = None, seconds: float | None
    ) -> int:
        """Tell when a prompt will be used again; None says never."""
        prompt = await self._prompt(namespace, tokens)
        return await self._run(plans.hint(namespace, prompt, root, seconds), prompt.size)

    async def end_session(self, namespace: Namespace, tokens: Tokens, *, root: Root | None = None) -> int:
        """Say that a conversation is over."""
        return await self.hint_next_use(namespace, tokens, root=root, seconds=None)

    async def evict(
        self, namespace: Namespace, tokens: Tokens, *, root: Root | None = None, from_block: int = 0
    ) -> int:
        """Drop a prefix from `from_block` on."""
        prompt = await self._prompt(namespace, tokens)
        return await self._run(plans.evict(namespace, prompt, root, from_block), prompt.size)

    async def evict_writer(self, writer: int) -> WriterPage:
        """Drop some of what a writer wrote; again until none of it is left."""
        return await self._run(plans.evict_writer(writer))

    async def writers_of(
        self, namespace: Namespace, tokens: Tokens, *, root: Root | None = None
    ) -> tuple[WriterRun, ...]:
        """Who wrote a stored prefix."""
        prompt = await self._prompt(namespace, tokens)
        return await self._run(plans.find_writers(namespace, prompt, root), prompt.size)

    async def clear(self, namespace: Namespace) -> int:
        """Drop all blocks of a namespace."""
        return await self._run(plans.clear(namespace))

    async def stats(self) -> StoreStats:
        """Occupancy and counters of the server's store."""
        return await self._run(plans.stats())

    async def events(self, *, after: int = 0, limit: int = 1000, wait_seconds: float = 0.0) -> EventPage:
        """A page of the server's event log; waits in steps, so that no single call is long."""
        plans.check_events(after, limit, wait_seconds)
        step_seconds = event_step_seconds(self._deadlines)
        ends_at = time.monotonic() + wait_seconds
        while True:
            rest_seconds = max(0.0, ends_at - time.monotonic())
            page = await self._run(plans.read_events(after, limit, min(rest_seconds, step_seconds)))
            if page.events or page.gap or time.monotonic() >= ends_at:
                return page

    async def flush(self) -> None:
        """Return when everything committed and admitted to disk is there."""
        await self._run(plans.flush())

    async def verify(self) -> Verification:
        """Check the server's index."""
        return await self._run(plans.verify())

    async def scrub(self, *, after: int = 0, limit_bytes: int = SCRUB_BYTES) -> ScrubPage:
        """Have the server read some of what lies on its disk: at most 64 MiB at a time, whatever the limit."""
        return await self._run(plans.scrub(after, limit_bytes))

    async def nodes(self) -> tuple[str, tuple[Node, ...]]:
        """What the server's node is called, the living nodes of its cluster, and those in the state GONE."""
        return await self._run(plans.list_nodes())

    async def drain(self, order: DrainOrder | None, *, wait_seconds: float = 0.0) -> DrainProgress:
        """Have the server's node drain, or with None only ask how far it is; waits for the end, a step at most."""
        return await self._run(plans.drain(order, min(wait_seconds, prefetch_step_seconds(self._deadlines))))

    async def undrain(self) -> bool:
        """Have it take part again; false where it did not drain."""
        return await self._run(plans.undrain())

    async def namespaces(self) -> tuple[NamespaceStats, ...]:
        """The namespaces of the server's node, by id."""
        return await self._run(plans.list_namespaces())

    async def diagnosis(self) -> Report:
        """Why prompts were not found, and what would change that; to a tenant of its own."""
        return await self._run(plans.get_diagnosis())

    async def reset_diagnosis(self) -> None:
        """Have that count anew."""
        await self._run(plans.reset_diagnosis())

    async def delete_namespace(self, ns_id: bytes) -> Deletion:
        """Drop all of a namespace for good, on all nodes. Not tried again when the connection breaks."""
        return await self._run(plans.delete_namespace(ns_id))

    async def locate(self, namespace: Namespace, tokens: Tokens, *, root: Root | None = None) -> tuple[NodeMatch, ...]:
        """How much of a prompt each living node holds, the most first; see kvstore.cluster.routing."""
        return await self._run(plans.locate(namespace, tokens, root))

    async def status(self) -> ServerStatus:
        """Whether the server takes calls, and its version."""
        plan = plans.check()

        async def attempt(link: AsyncLink, ends_at: float) -> ServerStatus:
            serving = plan.read(await link.call(plan.rpc, plan.request(b"", b""), ends_at))
            return ServerStatus(serving, link.session.server_version, link.lane)

        return await self._keeper.run(attempt, self._deadlines.of(Wait.CONTROL), attempt)

    async def close(self) -> None:
        """End the session, with all leases and stages; idempotent."""
        await self._keeper.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _lease(self, match: PrefixMatch, tiers: Collection[Tier] | None) -> AsyncLease:
        async def attempt(link: AsyncLink, ends_at: float) -> AsyncLease:
            ns_id = await link.ns_id(match.namespace, ends_at)
            lease = AsyncLease(AsyncHeld(self._keeper, link, self._deadlines), match, tiers)
            await lease.open(ns_id, ends_at)
            return lease

        return await self._keeper.run(attempt, self._deadlines.lookup_seconds, attempt)

    def _author(self, writer: int | None) -> int:
        return self.writer if writer is None else require_writer_id(writer)

    async def _stage(
        self, namespace: Namespace, prompt: TokenArray, root: Root | None, request: pb.StageRequest
    ) -> AsyncStage:
        async def attempt(link: AsyncLink, ends_at: float) -> AsyncStage:
            request.prompt.CopyFrom(convert.prompt_to_proto(await link.ns_id(namespace, ends_at), root, prompt))
            stage = AsyncStage(AsyncHeld(self._keeper, link, self._deadlines), namespace.layout, request)
            await stage.open(ends_at)
            return stage

        return await self._keeper.run(attempt, self._deadlines.bulk_seconds, attempt)

    async def _run(self, plan: Plan[R, T], prompt_tokens: int = 0) -> T:
        async def attempt(link: AsyncLink, ends_at: float) -> R:
            ns_id = b"" if plan.namespace is None else await link.ns_id(plan.namespace, ends_at)
            make = partial(plan.request, link.session.session_id, ns_id)
            is_long = prompt_tokens > _BUFFER_TOKENS_MAX
            request = await self._keeper.threads.short(make) if is_long else make()
            return await link.call(plan.rpc, request, ends_at)

        again = attempt if plan.repeatable else None
        answer = await self._keeper.run(attempt, self._deadlines.of(plan.wait), again)
        return await self._keeper.threads.short(partial(plan.read, answer)) if plan.is_large else plan.read(answer)

    async def _prompt(self, namespace: Namespace, tokens: Tokens) -> TokenArray:
        limit = _LIST_TOKENS_MAX if isinstance(tokens, (list, tuple)) else _BUFFER_TOKENS_MAX
        if getattr(tokens, "__len__", None) is not None and len(tokens) > limit:
            self._keeper.check_server()
            return await self._keeper.threads.short(partial(as_prompt, namespace, tokens))
        return as_prompt(namespace, tokens)


def connect_async(
    address: str,
    *,
    lookup_seconds: float | None = None,
    control_seconds: float | None = None,
    bulk_seconds: float | None = None,
    long_seconds: float | None = None,
    on_breaker_change: Callable[[BreakerStatus], None] | None = None,
    tls_ca: str | None = None,
    tls_cert: str | None = None,
    tls_key: str | None = None,
    token_file: str | None = None,
    bulk: str = "socket",
    arena: str = "map",
    writer: int | None = None,
) -> AsyncClient:
    """An AsyncClient of the server at `address`; as kvstore.connect, and like it connects at the first call only."""
    deadlines = threaded.chosen_deadlines(
        lookup_seconds=lookup_seconds,
        control_seconds=control_seconds,
        bulk_seconds=bulk_seconds,
        long_seconds=long_seconds,
    )
    credentials = credentials_of(tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, token_file=token_file)
    target = with_credentials(with_arena(parse_address(address), arena), credentials)
    return AsyncClient(AsyncKeeper(target, on_breaker_change, engine_client(bulk)), deadlines, writer)


def _probe(address: UnixAddress | TcpAddress) -> bool:
    """Whether the server answers a new connection; raises UnavailableError if not."""
    ends_at = time.monotonic() + PROBE_SECONDS
    try:
        link = open_link(address, ends_at)
    except UnauthenticatedError:
        return True  # it is well, and the next call is told that it lets us in no more
    try:
        if not plans.is_serving(link.call(plans.CHECK, health_pb2.HealthCheckRequest(), ends_at)):
            raise UnavailableError(f"{address} takes no calls now")
    finally:
        link.close()
    return True
