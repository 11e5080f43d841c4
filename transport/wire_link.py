"""A client's session over the fast lane: a connection for control, some for bytes."""

from __future__ import annotations

import os
import time
import weakref
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

from google.protobuf.message import DecodeError

from kvstore import __version__
from kvstore.errors import UnavailableError
from kvstore.tokens import packed_tokens
from kvstore.transport import convert, wire
from kvstore.transport.arena import Arena
from kvstore.transport.bulk_memory import right_rows
from kvstore.transport.link import Matched, OpenNamespaces, R
from kvstore.transport.lookup_frames import LookupWriter
from kvstore.transport.plans import SESSION
from kvstore.transport.status import UnknownSessionError
from kvstore.transport.wire_dial import dial
from kvstore.transport.wire_exchange import Answer, Exchange
from kvstore.transport.wire_pool import BulkPool
from kvstore.transport.wire_prompts import Growth, SentPrompts
from kvstore.types import require_root
from kvstore.v1 import block_pb2
from kvstore.v1 import cache_service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import numpy as np
    from google.protobuf.message import Message
    from numpy.typing import NDArray

    from kvstore.transport.address import TcpAddress, UnixAddress
    from kvstore.transport.bulk import BulkCalls
    from kvstore.transport.bulk_client import BulkEngineClient
    from kvstore.transport.link import ArenaStatus, Lookup, Rpc
    from kvstore.types import Namespace, Root

P = TypeVar("P", bound="Message")
_ANSWERS_REMEMBERED = 1024
_ROOTS_REMEMBERED = 256
_links: weakref.WeakSet[WireLink] = weakref.WeakSet()


class WireLink:
    """A kvstore.transport.link.Link over the fast lane.

    Prompts that grow are sent by what is new; if the server does not know the rest it says so and gets the whole.
    """

    lane = "wire"

    def __init__(self, address: UnixAddress | TcpAddress, ends_at: float, bulk: BulkEngineClient | None = None) -> None:
        self._address = str(address)
        self._ids = count(1)
        self._namespaces = OpenNamespaces()
        connected, hello = dial(address, wire.Lane.CONTROL, bytes(16), max(0.001, ends_at - time.monotonic()))
        self._exchange = Exchange(connected, self._address)
        self._prompts = SentPrompts(hello.prompt_bytes)  # used by who is sending
        try:
            self.session = self.call(SESSION, session_request(address), ends_at)
        except BaseException:
            self._exchange.end()
            raise
        self._session_id = self.session.session_id
        self._prompt_head = new_prompt_heads()
        self._pool: BulkCalls = BulkPool(address, self._session_id)
        if bulk is not None:
            self._pool = bulk.over(self._pool, self.session)
        self._arena = Arena(address, self._session_id)
        _links.add(self)

    @property
    def ended(self) -> bool:
        """Whether the session is over, and with it every lease and stage it held."""
        return self._exchange.ended

    def close(self) -> None:
        """End the session; idempotent. Calls under way in other threads fail."""
        self._exchange.end()
        self._pool.end()
        self._arena.end()

    def call(self, rpc: Rpc[R], request: Message, ends_at: float) -> R:
        """One call."""
        method = wire.Method[rpc.method]
        if isinstance(request, pb.ReleaseRequest):
            self._arena.end_lease(request.lease_id)
        if method in wire.PROMPT_METHODS:
            whole, message = prompt_message(request)
            answer = self._ask_by_growth(method, message, whole, ends_at)
        else:
            body = request.SerializeToString()
            answer = self._exchange.ask(lambda call_id: encode_request(method, body, call_id, ends_at), ends_at)
        return parsed(rpc.response, self._body(method, answer), self._address)

    def match(self, lookup: Lookup, ends_at: float) -> Matched:
        """A lookup, without an object of protobuf on the way."""
        head = self._prompt_head(self.ns_id(lookup.namespace, ends_at), lookup.root)
        request = lookup_request(self._prompts, self._session_id, head, lookup, ends_at)
        return matched(self._body(wire.Method.Match, self._ask(request, ends_at)))

    def new_id(self) -> int:
        """An id that names one lease or stage of this session."""
        return next(self._ids)

    def give_up(self, rpc: Rpc[R], request: Message, seconds: float) -> None:
        """Send a call that ends what we may or may not hold, without waiting. If that fails, the session is ended.

        Ending what is not there is no error of the server's, so its answer tells nothing.
        """
        if self.ended:
            return
        body = request.SerializeToString()
        ends_at = time.monotonic() + seconds
        try:
            self._exchange.tell(
                lambda call_id: encode_request(wire.Method[rpc.method], body, call_id, ends_at), ends_at
            )
        except UnavailableError:
            self.close()

    def load(self, request: pb.LoadRequest, target: NDArray[np.uint8], ends_at: float) -> int:
        """Copy leased blocks into the flat `target` from where they lie, or have them sent straight there.

        Returns how many leading blocks are right.
        """
        copied = self._arena.load(request, target, ends_at)
        if copied == request.blocks:
            return copied
        row_bytes = target.size // request.blocks
        request, target = rest_of(request, target, copied)
        try:
            answer, filled_bytes = self._pool.load(request, target.data, ends_at)
        except UnavailableError:
            self._notice_end()
            raise
        summary = parsed(pb.LoadResponse, answer, self._address).summary
        if filled_bytes != summary.blocks * row_bytes:
            raise UnavailableError(f"{self._address} ended a load without all of its bytes")
        return copied + (right_rows(summary, target, row_bytes) if request.with_digests else summary.blocks)

    def read_in_place(self, request: pb.LoadRequest, ends_at: float) -> AbstractContextManager[list[NDArray[np.uint8]]]:
        """The bytes of leading blocks where they lie, while the block runs; none where that cannot be."""
        return self._arena.read_in_place(request, ends_at)

    @property
    def arena(self) -> ArenaStatus:
        """Whether blocks are read where they lie."""
        return self._arena.status

    def write(self, start: pb.WriteStart, source: NDArray[np.uint8], ends_at: float) -> int:
        """Send the flat `source` to a stage; returns how many rows were taken."""
        try:
            answer = self._pool.write(start, source.data, ends_at)
        except UnavailableError:
            self._notice_end()
            raise
        return parsed(pb.WriteResponse, answer, self._address).rows

    def ns_id(self, namespace: Namespace, ends_at: float) -> bytes:
        """The id of a namespace, which is opened in this session if it is not yet."""
        return self._namespaces.ns_id(self, namespace, ends_at)

    def forget(self) -> None:
        """In the child of a fork: the session stays the parent's, and is over here."""
        self._exchange.forget()
        self._pool.forget()
        self._arena.forget()

    def _body(self, method: wire.Method, answer: Answer) -> bytes:
        try:
            return body_of(method, answer, self._address)
        except UnknownSessionError:
            self.close()
            raise

    def _ask_by_growth(
        self, method: wire.Method, message: Callable[[bytes], bytes], whole: bytes, ends_at: float
    ) -> Answer:
        return self._ask(GrownRequest(self._prompts, MessageWriter(method, message), whole, ends_at), ends_at)

    def _ask(self, request: GrownRequest, ends_at: float) -> Answer:
        answer = self._exchange.ask(request.first, ends_at)
        if request.is_wanted_again(answer):
            answer = self._exchange.ask(request.again, ends_at)
        return answer

    def _notice_end(self) -> None:
        """A transfer that broke off may be the first sign that the session is over."""
        self._exchange.check()
        if self._exchange.ended:
            self._pool.end()


def rest_of(
    request: pb.LoadRequest, target: NDArray[np.uint8], copied: int
) -> tuple[pb.LoadRequest, NDArray[np.uint8]]:
    """What is left of a load of which `copied` leading blocks are there."""
    if not copied:
        return request, target
    rest = pb.LoadRequest()
    rest.CopyFrom(request)
    rest.from_block += copied
    rest.blocks -= copied
    return rest, target[copied * (target.size // request.blocks) :]


def session_request(address: UnixAddress | TcpAddress) -> pb.SessionRequest:
    """The first request of a connection, with the token of who calls. Reads its file; raises ConfigError."""
    token = address.credentials.token() if address.credentials is not None else ""
    return pb.SessionRequest(client_version=__version__, token=token)


class FrameWriter(Protocol):
    """Makes the frames of one request about a prompt."""

    def whole(self, call_id: int, deadline_ms: int, tokens: bytes) -> bytes:
        """The frame with all tokens."""
        ...

    def grown(self, call_id: int, deadline_ms: int, delta: wire.Delta, tail: bytes) -> bytes:
        """The frame with those that `delta` does not stand for."""
        ...


class MessageWriter:
    """A FrameWriter of any method. `message` gives the request with the tokens it is given."""

    def __init__(self, method: wire.Method, message: Callable[[bytes], bytes]) -> None:
        self._method = method
        self._message = message

    def whole(self, call_id: int, deadline_ms: int, tokens: bytes) -> bytes:
        """The frame with all tokens."""
        body = self._message(tokens)
        return wire.encode_frame(wire.Kind.REQUEST, body, call_id=call_id, code=self._method, deadline_ms=deadline_ms)

    def grown(self, call_id: int, deadline_ms: int, delta: wire.Delta, tail: bytes) -> bytes:
        """The frame with those that `delta` does not stand for."""
        return wire.encode_frame(
            wire.Kind.REQUEST,
            wire.encode_delta(delta) + self._message(tail),
            call_id=call_id,
            code=self._method,
            flags=wire.FLAG_DELTA,
            deadline_ms=deadline_ms,
        )


class GrownRequest:
    """A request about a prompt: by what is new in it, and if the server does not know the rest, by all of it.

    `first` and `again` are called in the order of sending.
    """

    __slots__ = ("_ends_at", "_growth", "_prompts", "_whole", "_writer")

    def __init__(self, prompts: SentPrompts, writer: FrameWriter, whole: bytes, ends_at: float) -> None:
        self._prompts = prompts
        self._writer = writer
        self._whole = whole
        self._ends_at = ends_at
        self._growth: Growth | None = None

    def first(self, call_id: int) -> bytes:
        """The frame to begin with."""
        self._growth = growth = self._prompts.growth(self._whole)
        if growth is None:
            return self._writer.whole(call_id, self._deadline_ms(), self._whole)
        return self._writer.grown(call_id, self._deadline_ms(), growth.delta, growth.tail)

    def is_wanted_again(self, answer: Answer) -> bool:
        """Whether the server asks for the whole."""
        return answer[0] is wire.Kind.RESEND and self._growth is not None

    def again(self, call_id: int) -> bytes:
        """The frame that has all of it."""
        assert self._growth is not None, "a prompt sent whole is known"
        growth = self._prompts.whole_again(self._growth, self._whole)
        return self._writer.grown(call_id, self._deadline_ms(), growth.delta, self._whole)

    def _deadline_ms(self) -> int:
        return wire.deadline_ms_of(self._ends_at - time.monotonic())


def lookup_request(
    prompts: SentPrompts, session_id: bytes, prompt_head: bytes, lookup: Lookup, ends_at: float
) -> GrownRequest:
    """What asks `lookup` in a session, without an object of protobuf."""
    writer = LookupWriter(session_id, prompt_head, peek=lookup.peek, request_id=lookup.request_id)
    return GrownRequest(prompts, writer, packed_tokens(lookup.prompt), ends_at)


def prompt_message(request: Message) -> tuple[bytes, Callable[[bytes], bytes]]:
    """The tokens of a request of PROMPT_METHODS, and a function that gives it with other ones."""
    prompt_request = cast("pb.LeaseRequest", request)

    def message(tokens: bytes) -> bytes:
        prompt_request.prompt.tokens = tokens
        return prompt_request.SerializeToString()

    return prompt_request.prompt.tokens, message


def new_prompt_heads() -> Callable[[bytes, Root | None], bytes]:
    """A function that gives the bytes of a Prompt without tokens, and remembers those it gave last."""

    @lru_cache(maxsize=_ROOTS_REMEMBERED)
    def head(ns_id: bytes, root: Root | None) -> bytes:
        require_root(root)
        return block_pb2.Prompt(
            ns_id=ns_id, root=convert.root_to_proto(root) if root is not None else None
        ).SerializeToString()

    return head


def body_of(method: wire.Method, answer: Answer, peer: str) -> bytes:
    """The message of an answer; raises the error that it is instead."""
    kind, code, body = answer
    if kind is wire.Kind.RESPONSE:
        return body
    if kind is not wire.Kind.ERROR:
        raise UnavailableError(f"{peer} answered {method.name} with a frame of kind {kind.name}")
    raise wire.decode_error(code, body, peer)


def parsed(response_type: type[P], body: bytes, peer: str) -> P:
    """The message that was sent. Raises UnavailableError if it is none."""
    try:
        return response_type.FromString(body)
    except DecodeError as err:
        raise UnavailableError(f"{peer} sent no {response_type.__name__}: {err}") from err


def encode_request(method: wire.Method, body: bytes, call_id: int, ends_at: float) -> bytes:
    """The frame of a request whose caller waits until `ends_at`."""
    deadline_ms = wire.deadline_ms_of(ends_at - time.monotonic())
    return wire.encode_frame(wire.Kind.REQUEST, body, call_id=call_id, code=method, deadline_ms=deadline_ms)


@lru_cache(maxsize=_ANSWERS_REMEMBERED)
def matched(body: bytes) -> Matched:
    """What an answer to a lookup says; the same bytes say the same, and many lookups are answered alike."""
    try:
        found = pb.MatchResponse.FromString(body)
    except DecodeError as err:
        raise UnavailableError(f"a lookup was answered with what is no MatchResponse: {err}") from err
    return Matched(found.blocks, convert.runs_from_proto(found.runs))


def _forget_all() -> None:
    for link in list(_links):
        link.forget()


os.register_at_fork(after_in_child=_forget_all)
