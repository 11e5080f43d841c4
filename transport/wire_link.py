"""A client's session over the fast lane: a connection for control, some for bytes."""

from __future__ import annotations

import os
import weakref
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, TypeVar, cast

from google.protobuf.message import DecodeError

from kvstore import __version__
from kvstore.errors import UnavailableError
from kvstore.transport import convert, wire
from kvstore.transport.frames import encode_match
from kvstore.transport.link import Matched, OpenNamespaces
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

    import numpy as np
    from google.protobuf.message import Message
    from numpy.typing import NDArray

    from kvstore.transport.address import TcpAddress, UnixAddress
    from kvstore.transport.link import Deadlines, Lookup
    from kvstore.types import Namespace, Root

R = TypeVar("R", bound="Message")
_ANSWERS_REMEMBERED = 1024
_ROOTS_REMEMBERED = 256
_links: weakref.WeakSet[WireLink] = weakref.WeakSet()


class WireLink:
    """A kvstore.transport.link.Link over the fast lane.

    Prompts that grow are sent by what is new; if the server does not know the rest it says so and gets the whole.
    """

    lane = "wire"

    def __init__(self, address: UnixAddress | TcpAddress, deadlines: Deadlines) -> None:
        self.deadlines = deadlines
        self._address = str(address)
        self._ids = count(1)
        self._namespaces = OpenNamespaces()
        connected, hello = dial(address, wire.Lane.CONTROL, bytes(16), deadlines.control_seconds)
        self._exchange = Exchange(connected, self._address, deadlines.control_seconds)
        self._prompts = SentPrompts(hello.prompt_bytes)  # used by who is sending
        try:
            token = address.credentials.token() if address.credentials is not None else ""
            request = pb.SessionRequest(client_version=__version__, token=token)
            self.session = self._call(wire.Method.Session, request, pb.SessionResponse, deadlines.control_seconds)
        except BaseException:
            self._exchange.end()
            raise
        self._session_id = self.session.session_id
        self._prompt_head = lru_cache(maxsize=_ROOTS_REMEMBERED)(self._head_of_prompt)
        self._pool = BulkPool(address, self._session_id)
        _links.add(self)

    @property
    def ended(self) -> bool:
        """Whether the session is over, and with it every lease and stage it held."""
        return self._exchange.ended

    def close(self) -> None:
        """End the session; idempotent. Calls under way in other threads fail."""
        self._exchange.end()
        self._pool.end()

    def call(self, service: str, method: str, request: Message, response_type: type[R]) -> R:  # noqa: ARG002
        """One call within the deadline of control calls."""
        return self._call(wire.Method[method], request, response_type, self.deadlines.control_seconds)

    def match(self, lookup: Lookup) -> Matched:
        """A lookup, within the deadline of control calls; without an object of protobuf on the way."""
        head = self._prompt_head(self.ns_id(lookup.namespace), lookup.root)
        request_id = lookup.request_id.encode()
        whole = lookup.prompt.astype("<u4", copy=False).tobytes()

        def message(tokens: bytes) -> bytes:
            return encode_match(self._session_id, head, tokens, peek=lookup.peek, request_id=request_id)

        seconds = self.deadlines.control_seconds
        return _matched(self._body(wire.Method.Match, self._ask_by_growth(wire.Method.Match, message, whole, seconds)))

    def long_call(self, service: str, method: str, request: Message, response_type: type[R]) -> R:  # noqa: ARG002
        """One call within the deadline of bulk calls."""
        return self._call(wire.Method[method], request, response_type, self.deadlines.bulk_seconds)

    def new_id(self) -> int:
        """An id that names one lease or stage of this session."""
        return next(self._ids)

    def give_up(self, service: str, method: str, request: Message, response_type: type[Message]) -> None:  # noqa: ARG002
        """Send a call that ends what we may or may not hold, without waiting. If that fails, the session is ended.

        Ending what is not there is no error of the server's, so its answer tells nothing.
        """
        body = request.SerializeToString()
        seconds = self.deadlines.control_seconds
        try:
            self._exchange.tell(lambda call_id: _request(wire.Method[method], body, call_id, seconds), seconds)
        except UnavailableError:
            self.close()

    def load(self, request: pb.LoadRequest, target: NDArray[np.uint8]) -> int:
        """Receive leased blocks straight into the flat `target`; returns how many leading blocks are right."""
        row_bytes = target.size // request.blocks
        try:
            answer, filled_bytes = self._pool.load(request, target.data, self.deadlines.bulk_seconds)
        except UnavailableError:
            self._notice_end()
            raise
        summary = self._parsed(pb.LoadResponse, answer).summary
        if filled_bytes != summary.blocks * row_bytes:
            raise UnavailableError(f"{self._address} ended a load without all of its bytes")
        return summary.blocks

    def write(self, start: pb.WriteStart, source: NDArray[np.uint8]) -> int:
        """Send the flat `source` to a stage; returns how many rows were taken."""
        try:
            answer = self._pool.write(start, source.data, self.deadlines.bulk_seconds)
        except UnavailableError:
            self._notice_end()
            raise
        return self._parsed(pb.WriteResponse, answer).rows

    def ns_id(self, namespace: Namespace) -> bytes:
        """The id of a namespace, which is opened in this session if it is not yet."""
        return self._namespaces.ns_id(self, namespace)

    def forget(self) -> None:
        """In the child of a fork: the session stays the parent's, and is over here."""
        self._exchange.forget()
        self._pool.forget()

    def _call(self, method: wire.Method, request: Message, response_type: type[R], seconds: float) -> R:
        if method in wire.PROMPT_METHODS:
            prompt_request = cast("pb.LeaseRequest", request)
            whole = prompt_request.prompt.tokens

            def message(tokens: bytes) -> bytes:
                prompt_request.prompt.tokens = tokens
                return prompt_request.SerializeToString()

            answer = self._ask_by_growth(method, message, whole, seconds)
        else:
            body = request.SerializeToString()
            answer = self._exchange.ask(lambda call_id: _request(method, body, call_id, seconds), seconds)
        return self._parsed(response_type, self._body(method, answer))

    def _body(self, method: wire.Method, answer: Answer) -> bytes:
        """The message of an answer; raises the error that it is instead."""
        header, body = answer
        if header.kind is wire.Kind.RESPONSE:
            return body
        if header.kind is not wire.Kind.ERROR:
            raise UnavailableError(f"{self._address} answered {method.name} with a frame of kind {header.kind.name}")
        error = wire.decode_error(header.code, body, self._address)
        if isinstance(error, UnknownSessionError):
            self.close()
        raise error

    def _ask_by_growth(
        self, method: wire.Method, message: Callable[[bytes], bytes], whole: bytes, seconds: float
    ) -> Answer:
        """Ask about a prompt: by what is new in it, and if the server does not know the rest, by all of it.

        `message` gives the request with the tokens it is given.
        """
        growth: Growth | None = None

        def first(call_id: int) -> bytes:
            nonlocal growth
            growth = self._prompts.growth(whole)
            if growth is None:
                return _request(method, message(whole), call_id, seconds)
            return _grown_request(method, growth, message(growth.tail), call_id, seconds)

        def again(call_id: int) -> bytes:
            assert growth is not None, "a prompt sent whole is known"
            return _grown_request(method, self._prompts.whole_again(growth, whole), message(whole), call_id, seconds)

        answer = self._exchange.ask(first, seconds)
        if answer[0].kind is wire.Kind.RESEND and growth is not None:
            answer = self._exchange.ask(again, seconds)
        return answer

    def _head_of_prompt(self, ns_id: bytes, root: Root | None) -> bytes:
        require_root(root)
        return block_pb2.Prompt(
            ns_id=ns_id, root=convert.root_to_proto(root) if root is not None else None
        ).SerializeToString()

    def _parsed(self, response_type: type[R], body: bytes) -> R:
        try:
            return response_type.FromString(body)
        except DecodeError as err:
            raise UnavailableError(f"{self._address} sent no {response_type.__name__}: {err}") from err

    def _notice_end(self) -> None:
        """A transfer that broke off may be the first sign that the session is over."""
        self._exchange.check()
        if self._exchange.ended:
            self._pool.end()


def _request(method: wire.Method, body: bytes, call_id: int, seconds: float) -> bytes:
    deadline_ms = wire.deadline_ms_of(seconds)
    return wire.encode_frame(wire.Kind.REQUEST, body, call_id=call_id, code=method, deadline_ms=deadline_ms)


def _grown_request(method: wire.Method, growth: Growth, message: bytes, call_id: int, seconds: float) -> bytes:
    return wire.encode_frame(
        wire.Kind.REQUEST,
        wire.encode_delta(growth.delta) + message,
        call_id=call_id,
        code=method,
        flags=wire.FLAG_DELTA,
        deadline_ms=wire.deadline_ms_of(seconds),
    )


@lru_cache(maxsize=_ANSWERS_REMEMBERED)
def _matched(body: bytes) -> Matched:
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
