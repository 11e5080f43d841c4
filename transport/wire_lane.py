"""The fast lane of one server: its connections, whose they are, and what ends with them."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter, defaultdict
from contextlib import suppress
from typing import TYPE_CHECKING

from kvstore.transport import wire
from kvstore.transport.arena_service import ArenaConnection, ArenaUse
from kvstore.transport.peer_process import PeerProcess
from kvstore.transport.principal import Carrier
from kvstore.transport.tls_socket import TlsSocket
from kvstore.transport.tls_stream import TlsTransport
from kvstore.transport.wire_bulk import BulkConnection
from kvstore.transport.wire_control import ControlConnection, check_health, unary_methods
from kvstore.transport.wire_prompts import PromptBudget
from kvstore.transport.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from google.protobuf.message import Message

    from kvstore.transport.admin import AdminService
    from kvstore.transport.calls import CallRoot
    from kvstore.transport.principal import Origin, Principal
    from kvstore.transport.service import CacheService
    from kvstore.transport.session import Session
    from kvstore.transport.state import ServiceState

# A frame that has begun must be whole by then, else a client that sends a byte now and then would keep its place.
FRAME_SECONDS = 10.0
_SWEEP_SECONDS = 1.0
_FLUSH_SECONDS = 1.0
_KEEPALIVE_IDLE_SECONDS = 20
_KEEPALIVE_PROBE_SECONDS = 5
_KEEPALIVE_PROBES = 2


class WireLane:
    """Every connection of the fast lane. Used from the event loop of its server only."""

    def __init__(self, state: ServiceState, root: CallRoot, cache: CacheService, admin: AdminService) -> None:
        self.state = state
        self.root = root
        self.cache = cache
        self.prompt_budget = PromptBudget(state.limits.prompt_bytes)
        # A thread for each call: they wait for their clients, and a slow one must not hold others up.
        self.bulk = Workers("wire-bulk", threads=state.limits.bulk_calls, calls=state.limits.bulk_calls)
        self.stopping = False
        self.resent_prompts = 0
        self.refused_connections: Counter[str] = Counter()
        self._methods = {**unary_methods(cache, admin), wire.Method.Check: check_health}
        self._controls: set[ControlConnection] = set()
        self._none_left = asyncio.Event()
        self._none_left.set()
        self._bulks: defaultdict[bytes, set[BulkConnection]] = defaultdict(set)
        # Those of sessions that are open; and the tasks of all, since a process may map memory for longer than that.
        self._arenas: dict[bytes, ArenaConnection] = {}
        self._mapping: dict[ArenaConnection, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.TimerHandle | None = None

    @property
    def connections(self) -> int:
        """Connections open now. May be asked from any thread, so it takes a copy that no other can change meanwhile."""
        return len(self._controls) + sum(map(len, tuple(self._bulks.values()))) + len(self._mapping)

    @property
    def arena_use(self) -> ArenaUse:
        """What processes on this host map. May be asked from any thread."""
        return sum((arena.use for arena in tuple(self._mapping)), start=ArenaUse())

    def start(self) -> None:
        """Begin to look after connections; to be called in the event loop."""
        self._sweeper = asyncio.get_running_loop().call_later(_SWEEP_SECONDS, self._sweep)

    async def stop(self) -> None:
        """End every connection, and with it every session; waits for the threads that serve them."""
        self.stopping = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        await self._end_controls()
        for connections in tuple(self._bulks.values()):
            for connection in tuple(connections):
                connection.end()
        while self._tasks:
            await asyncio.wait(self._tasks)
        await self._end_arenas()
        await asyncio.to_thread(self.bulk.close)

    def welcome(self, connected: socket.socket, raw_hello: bytes, origin: Origin) -> None:
        """Take over a connection that said hello, or refuse it by name."""
        hello = wire.decode_client_hello(raw_hello)
        verdict = self._verdict(hello, origin)
        arena: ArenaConnection | None = None
        if verdict is wire.Verdict.OK and hello.lane == wire.Lane.ARENA:
            arena = self._made_arena(connected, hello.session_id)
            verdict = wire.Verdict.NO_ARENA if arena is None else verdict
        if verdict is not wire.Verdict.OK:
            self.refuse(verdict.name.lower())
        _prepare(connected)
        try:
            connected.send(wire.encode_server_hello(verdict, hello, self.state.limits.prompt_bytes_per_session))
        except OSError:
            connected.close()
            if arena is not None:
                arena.close()
            return
        if verdict is not wire.Verdict.OK:
            connected.close()
        elif hello.lane == wire.Lane.CONTROL:
            self._spawn(self._serve_control(connected, origin))
        elif arena is not None:
            self._begin_arena(arena, hello.session_id)
        else:
            session = self.state.sessions.find(hello.session_id)
            assert session is not None, "the verdict was OK"
            connection = BulkConnection(self, connected, session)
            self._bulks[session.session_id].add(connection)
            self._spawn(self._serve_bulk(connection, session.session_id))

    def method(self, method: wire.Method) -> Callable[[Message], Awaitable[Message]]:
        """What answers a call of a control connection."""
        return self._methods[method]

    def refuse(self, reason: str) -> None:
        """Count a connection that was refused or ended for what its client sent."""
        self.refused_connections[reason] += 1

    def joined(self, control: ControlConnection) -> None:
        """A control connection was made."""
        self._controls.add(control)
        self._none_left.clear()

    def left(self, control: ControlConnection) -> None:
        """A control connection is over."""
        self._controls.discard(control)
        if not self._controls:
            self._none_left.set()

    def open_session(self, principal: Principal, origin: Origin) -> Session:
        """Raises NoSpaceError at the limit of sessions."""
        session = self.state.sessions.open(principal)
        session.origin = origin
        return session

    def end_session(self, session: Session) -> None:
        """End a session, with its bulk connections and everything it holds."""
        for connection in tuple(self._bulks.get(session.session_id, ())):
            connection.end()
        arena = self._arenas.pop(session.session_id, None)
        if arena is not None:
            arena.end()
        self.state.end_session(session)

    async def _end_controls(self) -> None:
        """Let clients have the answers that were given, for a moment."""
        for control in tuple(self._controls):
            control.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_SECONDS):
                await self._none_left.wait()
        for control in tuple(self._controls):
            control.abort()
        await self._none_left.wait()

    def _verdict(self, hello: wire.ClientHello, origin: Origin) -> wire.Verdict:
        verdict = wire.answer_hello(hello)
        if verdict is not wire.Verdict.OK:
            return verdict
        if self.stopping:
            return wire.Verdict.STOPPING
        lends = self.state.lends_memory and origin.carrier is Carrier.UNIX
        if hello.lane == wire.Lane.ARENA and not lends:
            return wire.Verdict.NO_ARENA
        if hello.lane != wire.Lane.CONTROL:
            session = self.state.sessions.find(hello.session_id)
            if session is None or session.origin != origin:
                return wire.Verdict.SESSION
        is_full = hello.session_id in self._arenas or len(self._mapping) >= self.state.limits.arena_clients
        if hello.lane == wire.Lane.ARENA and is_full:
            return wire.Verdict.FULL
        bulks = len(self._bulks.get(hello.session_id, ()))
        if hello.lane == wire.Lane.BULK and bulks >= self.state.limits.bulk_connections_per_session:
            return wire.Verdict.FULL
        return wire.Verdict.OK

    async def _serve_control(self, connected: socket.socket, origin: Origin) -> None:
        if isinstance(connected, TlsSocket):
            TlsTransport(connected, ControlConnection(self, origin))
            return
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(lambda: ControlConnection(self, origin), connected)

    async def _serve_bulk(self, connection: BulkConnection, session_id: bytes) -> None:
        try:
            await connection.serve()
        finally:
            self._bulks[session_id].discard(connection)
            if not self._bulks[session_id]:
                del self._bulks[session_id]

    def _made_arena(self, connected: socket.socket, session_id: bytes) -> ArenaConnection | None:
        """What serves an arena connection; None where the system cannot tell who has made it, or has no descriptors."""
        session = self.state.sessions.find(session_id)
        assert session is not None, "the verdict was OK"
        try:
            process = PeerProcess(connected)
        except OSError:
            return None
        try:
            return ArenaConnection(self, connected, session, process)
        except OSError:
            process.close()
            return None

    def _begin_arena(self, arena: ArenaConnection, session_id: bytes) -> None:
        self._arenas[session_id] = arena
        self._mapping[arena] = asyncio.get_running_loop().create_task(self._serve_arena(arena, session_id))

    async def _serve_arena(self, arena: ArenaConnection, session_id: bytes) -> None:
        try:
            await arena.serve()
        finally:
            del self._mapping[arena]
            if self._arenas.get(session_id) is arena:
                del self._arenas[session_id]

    async def _end_arenas(self) -> None:
        """Let clients unmap what they have, for a moment; whoever does not is left with memory that nobody uses."""
        for arena in tuple(self._mapping):
            arena.end()
        tasks = tuple(self._mapping.values())
        if tasks:
            await asyncio.wait(tasks, timeout=_FLUSH_SECONDS)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        latest = loop.time() - FRAME_SECONDS
        for control in tuple(self._controls):
            if control.frame_began is not None and control.frame_began < latest:
                self.refuse("slow")
                control.abort()
        self._sweeper = loop.call_later(_SWEEP_SECONDS, self._sweep)


def _prepare(connected: socket.socket) -> None:
    """Small answers leave at once, and a client whose machine is gone loses its session."""
    if connected.family == socket.AF_UNIX:
        return
    with suppress(OSError):
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_SECONDS)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_PROBE_SECONDS)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)
