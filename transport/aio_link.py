"""A session for an event loop: the fast lane in the loop itself with bytes in threads, or gRPC in threads."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Protocol, TypeVar

from kvstore.errors import UnavailableError
from kvstore.thread_pool import ThreadPool
from kvstore.transport import wire
from kvstore.transport.address import UnixAddress
from kvstore.transport.aio_exchange import AsyncExchange
from kvstore.transport.arena import Arena
from kvstore.transport.connection import Connection
from kvstore.transport.link import OPEN_NAMESPACE, Matched, OpenNamespaces, R, open_request
from kvstore.transport.plans import SESSION
from kvstore.transport.status import UnknownSessionError
from kvstore.transport.tls_socket import TlsSocket
from kvstore.transport.tls_stream import TlsTransport
from kvstore.transport.wire_dial import NoFastLaneError, dial
from kvstore.transport.wire_link import (
    GrownRequest,
    MessageWriter,
    body_of,
    encode_request,
    lookup_request,
    matched,
    new_prompt_heads,
    parsed,
    prompt_message,
    rest_of,
    session_request,
)
from kvstore.transport.wire_pool import CONNECTIONS_MAX, BulkPool, Grip
from kvstore.transport.wire_prompts import SentPrompts
from kvstore.v1 import cache_service_pb2 as pb

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    import numpy as np
    from google.protobuf.message import Message
    from numpy.typing import NDArray

    from kvstore.transport.address import TcpAddress
    from kvstore.transport.bulk import BulkCalls
    from kvstore.transport.bulk_client import BulkEngineClient
    from kvstore.transport.link import ArenaStatus, Link, Lookup, Rpc
    from kvstore.transport.wire_exchange import Answer
    from kvstore.types import Namespace

T = TypeVar("T")
# To make or parse a message of that size may take a millisecond, so a thread does it.
_LARGE_BYTES = 64 * 1024
_SHORT_THREADS = 8
# How long after its deadline a call in a thread may take to say that it was late.
_GRACE_SECONDS = 0.1


class LoopThreads:
    """The threads of one client: some for what is short, some for bytes, so that neither waits for the other."""

    def __init__(self) -> None:
        self._short = ThreadPool(_SHORT_THREADS, "aio")
        self._bulk = ThreadPool(CONNECTIONS_MAX, "aio-bulk")

    async def short(self, function: Callable[[], T]) -> T:
        """Run what takes milliseconds."""
        return await asyncio.get_running_loop().run_in_executor(self._short, function)

    async def until(self, function: Callable[[], T], ends_at: float) -> T:
        """Run a call that ends by itself at `ends_at`; one that finds no thread until then is not made."""
        try:
            async with asyncio.timeout(_left(ends_at) + _GRACE_SECONDS):
                return await self.short(function)
        except TimeoutError as err:
            raise UnavailableError("too many calls before it took all of the deadline") from err

    async def made(self, make: Callable[[], T], discard: Callable[[T], None]) -> T:
        """Run what makes something; if nobody awaits it any more when it is there, it is discarded."""
        making = asyncio.get_running_loop().run_in_executor(self._short, make)
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(partial(_discard_made, discard))
            raise

    async def bulk(self, function: Callable[[], T], cancel: Callable[[], None], ends_at: float) -> T:
        """Run a transfer. One that is cancelled is broken off by `cancel`, and has really ended when this returns."""
        job = self._bulk.submit(function)
        transfer = asyncio.wrap_future(job)
        try:
            async with asyncio.timeout(_left(ends_at) + _GRACE_SECONDS):
                try:
                    return await asyncio.shield(transfer)
                except asyncio.CancelledError:
                    if not job.cancel():
                        cancel()
                    await _ended(transfer)
                    raise
        except TimeoutError as err:
            raise UnavailableError("too many transfers before it took all of the deadline") from err

    def close(self) -> None:
        """Take no more; what is running ends by itself."""
        self._short.shutdown(wait=False, cancel_futures=True)
        self._bulk.shutdown(wait=False, cancel_futures=True)


async def _ended(transfer: asyncio.Future[T]) -> None:
    """Wait for a transfer to end, however often the wait is cancelled: until then its buffer is in use."""
    while not transfer.done():
        try:
            await asyncio.wait([transfer])
        except asyncio.CancelledError:
            continue
    if not transfer.cancelled():
        transfer.exception()  # looked at, so that the loop does not call it lost


def _discard_made(discard: Callable[[T], None], making: asyncio.Future[T]) -> None:
    if not making.cancelled() and making.exception() is None:
        discard(making.result())


def _left(ends_at: float) -> float:
    return max(0.001, ends_at - time.monotonic())


class AsyncLink(Protocol):
    """As kvstore.transport.link.Link, for the tasks of one event loop."""

    @property
    def lane(self) -> str:
        """Name of the lane."""
        ...

    @property
    def session(self) -> pb.SessionResponse:
        """What the server said of the session."""
        ...

    @property
    def ended(self) -> bool:
        """Whether the session is over."""
        ...

    def close(self) -> None:
        """End the session; idempotent."""
        ...

    async def call(self, rpc: Rpc[R], request: Message, ends_at: float) -> R:
        """One call."""
        ...

    async def match(self, lookup: Lookup, ends_at: float) -> Matched:
        """A lookup."""
        ...

    async def load(self, request: pb.LoadRequest, target: NDArray[np.uint8], ends_at: float) -> int:
        """Receive leased blocks. Whatever ends it, `target` is free again when this returns."""
        ...

    async def write(self, start: pb.WriteStart, source: NDArray[np.uint8], ends_at: float) -> int:
        """Send rows. Whatever ends it, `source` is free again when this returns."""
        ...

    def read_in_place(
        self, request: pb.LoadRequest, ends_at: float
    ) -> AbstractAsyncContextManager[list[NDArray[np.uint8]]]:
        """The bytes of leading blocks where they lie, while the block runs; none where that cannot be."""
        ...

    async def ns_id(self, namespace: Namespace, ends_at: float) -> bytes:
        """The id of a namespace."""
        ...

    @property
    def arena(self) -> ArenaStatus:
        """Whether blocks are read where they lie."""
        ...

    def new_id(self) -> int:
        """An id that names one lease or stage of this session."""
        ...

    def give_up(self, rpc: Rpc[R], request: Message, seconds: float) -> None:
        """Send a call that ends what we may or may not hold, without waiting."""
        ...


class WireAsyncLink:
    """The fast lane. Made by `open_async_link`."""

    lane = "wire"

    def __init__(
        self,
        exchange: AsyncExchange,
        address: UnixAddress | TcpAddress,
        threads: LoopThreads,
        bulk: BulkEngineClient | None = None,
    ) -> None:
        self._bulk = bulk
        self.session = pb.SessionResponse()
        self._exchange = exchange
        self._address = address
        self._peer = str(address)
        self._threads = threads
        self._ids = count(1)
        self._namespaces = OpenNamespaces()
        self._prompt_head = new_prompt_heads()
        self._prompts = SentPrompts(0)
        self._pool: BulkCalls = BulkPool(address, b"")
        self._arena = Arena(address, b"")

    async def open(self, prompt_bytes: int, ends_at: float) -> None:
        """Open the session; the first call."""
        self._prompts = SentPrompts(prompt_bytes)
        request = await self._threads.short(partial(session_request, self._address))
        self.session = await self.call(SESSION, request, ends_at)
        self._pool = BulkPool(self._address, self.session.session_id)
        if self._bulk is not None:
            self._pool = self._bulk.over(self._pool, self.session)
        self._arena = Arena(self._address, self.session.session_id)

    @property
    def ended(self) -> bool:
        """Whether the session is over."""
        return self._exchange.ended

    def close(self) -> None:
        """End the session; idempotent. Calls under way fail."""
        self._exchange.end()
        self._pool.end()
        self._arena.end()

    @property
    def arena(self) -> ArenaStatus:
        """Whether blocks are read where they lie."""
        return self._arena.status

    async def call(self, rpc: Rpc[R], request: Message, ends_at: float) -> R:
        """One call."""
        method = wire.Method[rpc.method]
        if isinstance(request, pb.ReleaseRequest):
            self._arena.end_lease(request.lease_id)
        if method in wire.PROMPT_METHODS:
            whole, message = prompt_message(request)
            answer = await self._ask_by_growth(method, message, whole, ends_at)
        else:
            is_large = request.ByteSize() > _LARGE_BYTES
            body = await self._threads.short(request.SerializeToString) if is_large else request.SerializeToString()
            answer = await self._exchange.ask(lambda call_id: encode_request(method, body, call_id, ends_at), ends_at)
        body = self._body(method, answer)
        parse = partial(parsed, rpc.response, body, self._peer)
        return await self._threads.short(parse) if len(body) > _LARGE_BYTES else parse()

    async def match(self, lookup: Lookup, ends_at: float) -> Matched:
        """A lookup, without an object of protobuf on the way."""
        head = self._prompt_head(await self.ns_id(lookup.namespace, ends_at), lookup.root)
        request = lookup_request(self._prompts, self.session.session_id, head, lookup, ends_at)
        return matched(self._body(wire.Method.Match, await self._ask(request, ends_at)))

    async def load(self, request: pb.LoadRequest, target: NDArray[np.uint8], ends_at: float) -> int:
        """As WireLink.load, in a thread."""
        grip = Grip()
        return await self._transfer(partial(self._load, request, target, ends_at, grip), grip, ends_at)

    def _load(self, request: pb.LoadRequest, target: NDArray[np.uint8], ends_at: float, grip: Grip) -> int:
        copied = self._arena.load(request, target, ends_at)
        if copied == request.blocks:
            return copied
        row_bytes = target.size // request.blocks
        request, target = rest_of(request, target, copied)
        answer, filled_bytes = self._pool.load(request, target.data, ends_at, grip)
        blocks = parsed(pb.LoadResponse, answer, self._peer).summary.blocks
        if filled_bytes != blocks * row_bytes:
            raise UnavailableError(f"{self._peer} ended a load without all of its bytes")
        return copied + blocks

    @asynccontextmanager
    async def read_in_place(self, request: pb.LoadRequest, ends_at: float) -> AsyncIterator[list[NDArray[np.uint8]]]:
        """As WireLink.read_in_place; the server is asked in a thread."""
        shown = await self._threads.bulk(partial(self._arena.show, request, ends_at), _nothing, ends_at)
        yield shown.pieces
        shown.check()

    async def write(self, start: pb.WriteStart, source: NDArray[np.uint8], ends_at: float) -> int:
        """Send the flat `source`, in a thread."""
        grip = Grip()
        answer = await self._transfer(partial(self._pool.write, start, source.data, ends_at, grip), grip, ends_at)
        return parsed(pb.WriteResponse, answer, self._peer).rows

    async def ns_id(self, namespace: Namespace, ends_at: float) -> bytes:
        """The id of a namespace, which is opened in this session if it is not yet."""
        ns_id = self._namespaces.known(namespace)
        if ns_id is None:
            answer = await self.call(OPEN_NAMESPACE, open_request(self.session, namespace), ends_at)
            ns_id = self._namespaces.add(namespace, answer)
        return ns_id

    def new_id(self) -> int:
        """An id that names one lease or stage of this session."""
        return next(self._ids)

    def give_up(self, rpc: Rpc[R], request: Message, seconds: float) -> None:
        """Send a call that ends what we may or may not hold, without waiting."""
        if not self.ended:
            body = request.SerializeToString()
            ends_at = time.monotonic() + seconds
            self._exchange.tell(lambda call_id: encode_request(wire.Method[rpc.method], body, call_id, ends_at))

    async def _ask_by_growth(
        self, method: wire.Method, message: Callable[[bytes], bytes], whole: bytes, ends_at: float
    ) -> Answer:
        request = GrownRequest(self._prompts, MessageWriter(method, message), whole, ends_at)
        return await self._ask(request, ends_at)

    async def _ask(self, request: GrownRequest, ends_at: float) -> Answer:
        answer = await self._exchange.ask(request.first, ends_at)
        if request.is_wanted_again(answer):
            answer = await self._exchange.ask(request.again, ends_at)
        return answer

    def _body(self, method: wire.Method, answer: Answer) -> bytes:
        try:
            return body_of(method, answer, self._peer)
        except UnknownSessionError:
            self.close()
            raise

    async def _transfer(self, transfer: Callable[[], T], grip: Grip, ends_at: float) -> T:
        try:
            return await self._threads.bulk(transfer, grip.cancel, ends_at)
        except UnknownSessionError:
            self.close()
            raise


class ThreadedLink:
    """A link for threads, gRPC's: its calls wait in some."""

    def __init__(self, connection: Link, threads: LoopThreads) -> None:
        self.lane = connection.lane
        self.session = connection.session
        self._connection = connection
        self._threads = threads

    @property
    def ended(self) -> bool:
        """Whether the session is over."""
        return self._connection.ended

    @property
    def arena(self) -> ArenaStatus:
        """Whether blocks are read where they lie."""
        return self._connection.arena

    def close(self) -> None:
        """End the session; idempotent."""
        self._connection.close()

    async def call(self, rpc: Rpc[R], request: Message, ends_at: float) -> R:
        """One call."""
        return await self._threads.until(partial(self._connection.call, rpc, request, ends_at), ends_at)

    async def match(self, lookup: Lookup, ends_at: float) -> Matched:
        """A lookup."""
        return await self._threads.until(partial(self._connection.match, lookup, ends_at), ends_at)

    async def load(self, request: pb.LoadRequest, target: NDArray[np.uint8], ends_at: float) -> int:
        """Receive leased blocks. A load that is cancelled is waited for, at most until its deadline."""
        return await self._threads.bulk(partial(self._connection.load, request, target, ends_at), _nothing, ends_at)

    def read_in_place(
        self, _request: pb.LoadRequest, _ends_at: float
    ) -> AbstractAsyncContextManager[list[NDArray[np.uint8]]]:
        """Nothing is: gRPC passes no descriptors."""
        return nullcontext([])

    async def write(self, start: pb.WriteStart, source: NDArray[np.uint8], ends_at: float) -> int:
        """Send rows. A write that is cancelled is waited for, at most until its deadline."""
        return await self._threads.bulk(partial(self._connection.write, start, source, ends_at), _nothing, ends_at)

    async def ns_id(self, namespace: Namespace, ends_at: float) -> bytes:
        """The id of a namespace, which is opened in this session if it is not yet."""
        return await self._threads.until(partial(self._connection.ns_id, namespace, ends_at), ends_at)

    def new_id(self) -> int:
        """An id that names one lease or stage of this session."""
        return self._connection.new_id()

    def give_up(self, rpc: Rpc[R], request: Message, seconds: float) -> None:
        """Send a call that ends what we may or may not hold, without waiting."""
        self._connection.give_up(rpc, request, seconds)


async def open_async_link(
    address: UnixAddress | TcpAddress, threads: LoopThreads, ends_at: float, bulk: BulkEngineClient | None = None
) -> AsyncLink:
    """A session over the fast lane where it is there, else over gRPC. Dials in a thread."""
    if not address.grpc_only:
        try:
            return await _open_wire(address, threads, ends_at, bulk)
        except NoFastLaneError:
            pass
    return ThreadedLink(await threads.made(partial(_open_grpc, address, ends_at), lambda link: link.close()), threads)


def _open_grpc(address: UnixAddress | TcpAddress, ends_at: float) -> Link:
    return Connection(address, ends_at)


async def _open_wire(
    address: UnixAddress | TcpAddress, threads: LoopThreads, ends_at: float, bulk: BulkEngineClient | None
) -> WireAsyncLink:
    dialling = partial(dial, address, wire.Lane.CONTROL, bytes(16), _left(ends_at))
    connected, hello = await threads.made(dialling, lambda made: made[0].close())
    link = WireAsyncLink(await _adopt(connected, address), address, threads, bulk)
    try:
        await link.open(hello.prompt_bytes, ends_at)
    except BaseException:
        link.close()
        raise
    return link


async def _adopt(connected: socket.socket, address: UnixAddress | TcpAddress) -> AsyncExchange:
    """Let the loop have a socket whose hellos were exchanged."""
    connected.setblocking(False)
    loop = asyncio.get_running_loop()
    exchange = AsyncExchange(str(address))
    try:
        if isinstance(connected, TlsSocket):
            TlsTransport(connected, exchange)
        elif isinstance(address, UnixAddress):
            await loop.create_unix_connection(lambda: exchange, sock=connected)
        else:
            await loop.create_connection(lambda: exchange, sock=connected)
    except BaseException:
        connected.close()
        raise
    return exchange


def _nothing() -> None:
    """How a call that ends soon by itself is broken off: it is not."""
