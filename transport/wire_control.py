"""Control connections of the fast lane, on the server: requests in, answers out, all in the event loop.

A connection is a session: it ends with it. Requests are pipelined and answered in whatever order they are done.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

import grpc
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2

from kvstore.errors import (
    InvalidArgumentError,
    KvstoreError,
    NoSpaceError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
)
from kvstore.transport import wire
from kvstore.transport.calls import INTERNAL_DETAILS
from kvstore.transport.frames import encode_matched
from kvstore.transport.lookup_frames import read_lookup, send_now
from kvstore.transport.principal import enter
from kvstore.transport.roles import OPEN_CALLS, role_for
from kvstore.transport.service import DISMISSED
from kvstore.transport.status import UnknownSessionError, status_of
from kvstore.transport.tenants import under_way
from kvstore.transport.wire_prompts import TOKEN_BYTES, KnownPrompt, PromptMemory

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractContextManager

    from kvstore.transport.lookup_frames import Lookup
    from kvstore.transport.principal import Origin
    from kvstore.transport.session import Session
    from kvstore.transport.wire_lane import WireLane
    from kvstore.v1 import cache_service_pb2 as pb

_BUFFER_BYTES = 64 * 1024
# Of a connection on which nothing longer has come yet.
_IDLE_BUFFER_BYTES = 2 * 1024
_FIRST_BODY_BYTES_MAX = 16 * 1024  # a session with its token
_AT_ONCE_BYTES = 4096  # of an answer: 2 us of a system call
# Taken in one step of the loop, at 20-100 us for a lookup; what else was received then waits for the other connections.
_AT_ONCE_FRAMES = 32
_OK = grpc.StatusCode.OK.name
_UNCOUNTED = nullcontext()


class ControlConnection(asyncio.BufferedProtocol):
    """One client's control connection. Lives in the event loop of its server.

    `_buffer[_begin:_end]` is what was received and not yet used; it grows to hold one whole frame, which
    `message_bytes` bounds, and shrinks again behind it.
    """

    def __init__(self, lane: WireLane, origin: Origin) -> None:
        self._lane = lane
        self._origin = origin
        self._body_bytes_max = lane.state.limits.message_bytes
        self._transport: asyncio.Transport | None = None
        self._descriptor: int | None = None  # of its socket, while that is open; None where bytes are encrypted
        self._session: Session | None = None
        self._looks_up = False  # whether its caller may
        self._prompts = PromptMemory(lane.state.limits.prompt_bytes_per_session, lane.prompt_budget)
        self._buffer = bytearray(_IDLE_BUFFER_BYTES)
        self._begin = 0
        self._end = 0
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._goes_on = False  # whether the next step of the loop takes more of the buffer
        # When the frame that is being received began, by the loop's clock; None between frames.
        self.frame_began: float | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The hellos were exchanged; the session opens with the first request."""
        self._transport = cast("asyncio.Transport", transport)
        plain = transport.get_extra_info("socket")
        self._descriptor = None if plain is None else plain.fileno()
        self.frame_began = asyncio.get_running_loop().time()
        self._lane.joined(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  # asyncio's signature
        """End the session and every call of it."""
        self._lane.left(self)
        for call in tuple(self._calls.values()):
            call.cancel()
        self._prompts.clear()
        if self._session is not None:
            self._lane.end_session(self._session)
            self._session = None

    def pause_writing(self) -> None:
        """The client does not read its answers: take no more requests until it does."""
        self._open_transport().pause_reading()

    def resume_writing(self) -> None:
        """The client reads again."""
        if not self._open_transport().is_closing():
            self._open_transport().resume_reading()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002  # asyncio's signature
        """Where the next bytes go."""
        return memoryview(self._buffer)[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        """Take the frames that are whole, some at a time."""
        self._end += nbytes
        self._take()

    def _take(self) -> None:
        try:
            if not self._took_lone_lookup():
                self._take_frames()
        except KvstoreError as error:
            self._lane.refuse("malformed")
            self._send(wire.encode_error(error, 0))
            self.close()

    def eof_received(self) -> bool:
        """A client that closes its side is gone."""
        return False

    def close(self) -> None:
        """Send what was answered and end the connection."""
        transport = self._open_transport()
        if not transport.is_closing():
            transport.close()

    def abort(self) -> None:
        """End the connection at once."""
        self._open_transport().abort()

    def _took_lone_lookup(self) -> bool:
        """Whether all that was received was one lookup, now answered: so it is where a client waits for each answer."""
        if self._begin or len(self._buffer) > _BUFFER_BYTES or self._open_transport().is_closing():
            return False
        lookup = read_lookup(self._buffer, 0, self._end, self._body_bytes_max)
        if lookup is None or lookup.frame_bytes != self._end or not self._answer_lookup(lookup):
            return False
        self._end = 0
        self.frame_began = None
        return True

    def _take_frames(self) -> None:
        taken = 0
        transport = self._open_transport()
        while self._is_begun and taken < _AT_ONCE_FRAMES and not transport.is_closing():
            lookup = read_lookup(self._buffer, self._begin, self._end, self._body_bytes_max)
            if lookup is not None and self._answer_lookup(lookup):
                self._begin += lookup.frame_bytes
                taken += 1
                continue
            limit = _FIRST_BODY_BYTES_MAX if self._session is None else self._body_bytes_max
            header = wire.decode_header(self._buffer, self._begin, limit)
            body_begin = self._begin + wire.HEADER_BYTES
            body_end = body_begin + header.body_bytes
            if body_end > self._end:
                self._make_room(wire.HEADER_BYTES + header.body_bytes)
                break
            self._take_request(header, memoryview(self._buffer)[body_begin:body_end])
            self._begin = body_end
            taken += 1
        self._note_progress(taken=taken > 0)
        if self._begin == self._end:
            self._begin = self._end = 0
            if len(self._buffer) > _BUFFER_BYTES:
                self._buffer = bytearray(_BUFFER_BYTES)
        elif taken == _AT_ONCE_FRAMES and self._is_begun:
            self._go_on_later()
        elif self._end == len(self._buffer):
            self._make_room(wire.HEADER_BYTES)

    @property
    def _is_begun(self) -> bool:
        """Whether the header of another frame is there."""
        return self._end - self._begin >= wire.HEADER_BYTES

    def _go_on_later(self) -> None:
        """Take more in the next step of the loop; until then there is as much room as what was taken has left."""
        begun = self._buffer[self._begin : self._end]
        self._buffer[: len(begun)] = begun
        self._begin, self._end = 0, len(begun)
        if not self._goes_on:
            self._goes_on = True
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self._goes_on = False
        self._take()

    def _note_progress(self, *, taken: bool) -> None:
        """Keep since when the frame under way is awaited; that of the session is since the connection was made."""
        if self._session is None:
            return
        if self._begin == self._end:
            self.frame_began = None
        elif taken or self.frame_began is None:
            self.frame_began = asyncio.get_running_loop().time()

    def _make_room(self, frame_bytes: int) -> None:
        """Move the frame that has begun to the front of a buffer that can hold all of it."""
        if self._begin + frame_bytes <= len(self._buffer):
            return
        begun = self._buffer[self._begin : self._end]
        self._buffer = bytearray(max(frame_bytes, _BUFFER_BYTES))
        self._buffer[: len(begun)] = begun
        self._begin, self._end = 0, len(begun)

    def _take_request(self, header: wire.Header, body: memoryview) -> None:
        method = wire.method_of(header)
        if self._session is None:
            self._open_session(header, method, body)
            return
        if method is wire.Method.Session or method in wire.BULK_METHODS:
            raise wire.WireFormatError(f"{method.name} came in the middle of a control connection")
        if not header.call_id or header.call_id in self._calls:
            raise wire.WireFormatError(f"call id {header.call_id} is 0 or in use, expected a new one")
        try:
            self._take_call(header, method, body)
        except KvstoreError as error:
            self._send(wire.encode_error(error, header.call_id))

    def _open_session(self, header: wire.Header, method: wire.Method, body: memoryview) -> None:
        if method is not wire.Method.Session:
            raise wire.WireFormatError(f"a control connection begins with {method.name}, expected Session")
        request = cast("pb.SessionRequest", _parse(wire.Method.Session, body))
        try:
            principal = self._lane.state.access.admit(self._origin, request.token)
            principal.require(method.name)
            self._session = self._lane.open_session(principal, self._origin)
            self._looks_up = principal.role >= role_for(wire.Method.Match.name)
        except (NoSpaceError, PermissionDeniedError, UnauthenticatedError) as error:
            if isinstance(error, UnauthenticatedError):
                self._lane.refuse("unauthenticated")
            self._send(wire.encode_error(error, header.call_id))
            self.close()
            return
        self._session.dismiss = self._dismiss
        greeting = self._lane.cache.greeting(self._session)
        self._send(wire.encode_frame(wire.Kind.RESPONSE, greeting.SerializeToString(), call_id=header.call_id))

    def _dismiss(self) -> None:
        """Who has opened the session is no longer let in."""
        self._send(wire.encode_error(UnauthenticatedError(DISMISSED), 0))
        self.close()

    def _take_call(self, header: wire.Header, method: wire.Method, body: memoryview) -> None:
        limit = self._lane.state.limits.calls_per_connection
        if len(self._calls) >= limit:
            raise NoSpaceError(f"{limit} calls of this connection are under way; await some first")
        if self._lane.stopping:
            raise UnavailableError("the server is stopping")
        self._require_role(method)
        tokens: bytes | None = None
        request: Any  # of the type that goes with the method
        if header.flags & wire.FLAG_DELTA:
            if method not in wire.PROMPT_METHODS:
                raise wire.WireFormatError(f"{method.name} came with a delta, which it cannot have")
            request = _parse(method, body[wire.DELTA_BYTES :])
            known = self._prompts.complete(wire.decode_delta(body), request.prompt.tokens)
            if known is None:
                self._lane.resent_prompts += 1
                self._send(wire.encode_frame(wire.Kind.RESEND, b"", call_id=header.call_id))
                return
            tokens = known.packed
        else:
            request = _parse(method, body)
        self._check_session(request)
        if tokens is not None:
            request.prompt.tokens = tokens
        call = asyncio.get_running_loop().create_task(self._answer(header, method, request))
        self._calls[header.call_id] = call

    def _require_role(self, method: wire.Method) -> None:
        """Raises PermissionDeniedError unless the caller may make this call."""
        assert self._session is not None, "no session was opened"
        if method.name not in OPEN_CALLS:
            self._session.principal.require(method.name)

    def _check_session(self, request: Message) -> None:
        """A session is used on its own connection alone: even who knows the id of another cannot act in it."""
        assert self._session is not None, "no session was opened"
        if not hmac.compare_digest(getattr(request, "session_id", self._session.session_id), self._session.session_id):
            raise UnknownSessionError("open a session first")

    def _counted(self) -> AbstractContextManager[None]:
        """The time of a call, on the account of the caller's tenant."""
        assert self._session is not None, "no session was opened"
        tenant = self._session.principal.tenant
        return _UNCOUNTED if tenant is None else under_way(self._lane.state.tenants, tenant)

    def _answer_lookup(self, lookup: Lookup) -> bool:
        """Answer a lookup in this step of the loop; false, and nothing done, where that could take too long.

        False too where it is to be refused, or the server does not know the prompt: all of that is said elsewhere.
        """
        session = self._session
        if session is None or not self._may_answer(lookup, session):
            return False
        prompt = self._prompts.complete(lookup.delta, lookup.tokens) if lookup.is_grown else KnownPrompt(lookup.tokens)
        if prompt is None:
            return False
        start = time.monotonic()
        status = _OK
        try:
            with self._counted():
                match = self._lane.cache.match_at_once(session, lookup, prompt.tokens)
            frame = wire.encode_frame(wire.Kind.RESPONSE, encode_matched(match), call_id=lookup.call_id)
        except KvstoreError as error:
            status = status_of(error)[0].name
            frame = wire.encode_error(error, lookup.call_id)
        self._send(frame)
        self._lane.root.observe("Match", start, status)
        return True

    def _may_answer(self, lookup: Lookup, session: Session) -> bool:
        prompt_bytes = len(lookup.tokens) + lookup.prefix_tokens * TOKEN_BYTES
        return (
            self._looks_up
            and not self._lane.stopping
            and lookup.call_id != 0
            and lookup.call_id not in self._calls
            and len(self._calls) < self._lane.state.limits.calls_per_connection
            and hmac.compare_digest(lookup.session_id, session.session_id)
            and self._lane.cache.is_quick(session, lookup.ns_id, prompt_bytes)
        )

    async def _answer(self, header: wire.Header, method: wire.Method, request: Message) -> None:
        root = self._lane.root
        start = root.begin(method.name)
        status = grpc.StatusCode.OK
        seconds = header.deadline_ms / 1000 if header.deadline_ms else None
        assert self._session is not None, "no session was opened"
        enter(self._session.principal)
        try:
            with self._counted():
                async with asyncio.timeout(seconds):
                    answer = await self._lane.method(method)(request)
            frame = wire.encode_frame(wire.Kind.RESPONSE, answer.SerializeToString(), call_id=header.call_id)
        except asyncio.CancelledError:
            status = grpc.StatusCode.CANCELLED
            raise
        except TimeoutError:
            status = grpc.StatusCode.DEADLINE_EXCEEDED
            frame = wire.encode_failure(status, "the deadline of the call is over", header.call_id)
        except KvstoreError as error:
            status = status_of(error)[0]
            frame = wire.encode_error(error, header.call_id)
        except Exception as error:  # noqa: BLE001  # see below
            # The root of the call: it is counted and logged there, and the connection serves its other calls.
            root.count_failure(method.name, error)
            status = grpc.StatusCode.INTERNAL
            frame = wire.encode_failure(status, INTERNAL_DETAILS, header.call_id)
        finally:
            self._calls.pop(header.call_id, None)
            root.end(method.name, start, status.name)
        self._send(frame)

    def _send(self, frame: bytes) -> None:
        """Send at once what the socket takes. What a loop is given waits for its next step, and the GIL once more."""
        transport = self._open_transport()
        if transport.is_closing():
            return
        if self._descriptor is not None and len(frame) <= _AT_ONCE_BYTES and not transport.get_write_buffer_size():
            frame = frame[send_now(self._descriptor, frame) :]
        if frame:
            transport.write(frame)

    def _open_transport(self) -> asyncio.Transport:
        assert self._transport is not None, "no connection was made"
        return self._transport


def _parse(method: wire.Method, body: memoryview) -> Message:
    try:
        request: Message = wire.REQUEST_TYPES[method].FromString(bytes(body))
    except DecodeError as err:
        raise InvalidArgumentError(f"the request is no {method.name} message: {err}") from err
    return request


def unary_methods(cache: object, admin: object) -> dict[wire.Method, Callable[[Message], Awaitable[Message]]]:
    """The method of the services that answers each call of a control connection."""
    methods: dict[wire.Method, Callable[[Message], Awaitable[Message]]] = {}
    for method in wire.REQUEST_TYPES:
        if method not in wire.BULK_METHODS and method not in (wire.Method.Session, wire.Method.Check):
            service = admin if method in wire.ADMIN_METHODS else cache
            methods[method] = getattr(service, re.sub(r"(?<!^)(?=[A-Z])", "_", method.name).lower())
    return methods


async def check_health(_request: Message) -> Message:
    """Health: who gets an answer on this lane is served."""
    answer: Message = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
    return answer
