"""One channel to a server, with the session that lives on it."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import numpy as np

from kvstore import __version__
from kvstore.errors import KvstoreError, UnauthenticatedError, UnavailableError
from kvstore.transport import convert, frames
from kvstore.transport.address import TcpAddress
from kvstore.transport.credentials import Credentials
from kvstore.transport.link import CACHE, Matched, OpenNamespaces
from kvstore.transport.rows import whole_rows_bytes
from kvstore.transport.status import ERROR_KEY, UnknownSessionError, error_of
from kvstore.v1 import cache_service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator

    from google.protobuf.message import Message
    from numpy.typing import NDArray

    from kvstore.transport.address import UnixAddress
    from kvstore.transport.link import Deadlines, Lookup
    from kvstore.types import Namespace

R = TypeVar("R", bound="Message")
_RECEIVE_BYTES_MAX = 128 * 2**20
_OPTIONS = (
    ("grpc.max_receive_message_length", _RECEIVE_BYTES_MAX),
    ("grpc.max_send_message_length", -1),  # the server has a limit and names it
    ("grpc.use_local_subchannel_pool", 1),  # a fresh connection must not inherit the back-off of a dead one
    ("grpc.enable_http_proxy", 0),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),  # an idle session is watched too
)


class Connection:
    """A kvstore.transport.link.Link over gRPC: a channel and its session. Thread-safe.

    Once ended it stays so: make another one.
    The constructor opens the session and raises UnavailableError if that takes longer than a control call may.
    """

    lane = "grpc"

    def __init__(self, address: UnixAddress | TcpAddress, deadlines: Deadlines) -> None:
        self.deadlines = deadlines
        self._address = str(address)
        self._metadata = address.credentials.metadata() if address.credentials is not None else ()
        self._channel: Any = _channel(address)
        self._ended = threading.Event()
        self._greeting: Future[pb.SessionResponse] = Future()
        self._ids = count(1)
        self._namespaces = OpenNamespaces()
        self._callables: dict[str, Any] = {}  # by path, only ever added to; making one takes 20 us
        self._stream = self._callable(self._channel.stream_stream, CACHE, "Session", pb.SessionResponse)(
            self._session_requests(), metadata=self._metadata
        )
        self._follower = threading.Thread(target=self._follow_session, name="kvstore-session", daemon=True)
        self._follower.start()
        try:
            self.session = self._greeting.result(deadlines.control_seconds)
        except TimeoutError as err:
            self.close()
            raise UnavailableError(f"no answer from {self._address} within {deadlines.control_seconds} s") from err
        except BaseException:
            self.close()
            raise

    @property
    def ended(self) -> bool:
        """Whether the session is over, and with it every lease and stage it held."""
        return self._ended.is_set()

    def close(self) -> None:
        """End the session and the channel; idempotent. The server releases what the session held."""
        self._end()
        self._follower.join()
        self._channel.close()

    def call(self, service: str, method: str, request: Message, response_type: type[R]) -> R:
        """One call within the deadline of control calls."""
        return self._call(service, method, request, response_type, self.deadlines.control_seconds)

    def match(self, lookup: Lookup) -> Matched:
        """A lookup, within the deadline of control calls."""
        request = pb.MatchRequest(
            session_id=self.session.session_id,
            prompt=convert.prompt_to_proto(self.ns_id(lookup.namespace), lookup.root, lookup.prompt),
            peek=lookup.peek,
            request_id=lookup.request_id,
        )
        found = self.call(CACHE, "Match", request, pb.MatchResponse)
        return Matched(found.blocks, convert.runs_from_proto(found.runs))

    def long_call(self, service: str, method: str, request: Message, response_type: type[R]) -> R:
        """One call within the deadline of bulk calls."""
        return self._call(service, method, request, response_type, self.deadlines.bulk_seconds)

    def new_id(self) -> int:
        """An id that names one lease or stage of this session."""
        return next(self._ids)

    def give_up(self, service: str, method: str, request: Message, response_type: type[Message]) -> None:
        """Send a call that ends what we may or may not hold, without waiting. If it fails, the session is ended."""
        if not self.ended:
            call = self._callable(self._channel.unary_unary, service, method, response_type).future(
                request, timeout=self.deadlines.control_seconds, metadata=self._metadata
            )
            call.add_done_callback(self._end_unless_ok)

    def load(self, request: pb.LoadRequest, target: NDArray[np.uint8]) -> int:
        """Stream leased blocks into the flat `target`; returns how many leading blocks are right."""
        self._check_open()
        with self._translated():
            stream = self._callable(self._channel.unary_stream, CACHE, "Load", pb.LoadResponse)(
                request, timeout=self.deadlines.bulk_seconds, metadata=self._metadata
            )
            try:
                summary, filled_bytes = self._receive(stream, target)
            finally:
                stream.cancel()
        row_bytes = target.size // request.blocks
        if summary is None or filled_bytes != summary.blocks * row_bytes:
            raise UnavailableError(f"{self._address} ended a load without all of its bytes")
        return summary.blocks

    def write(self, start: pb.WriteStart, source: NDArray[np.uint8]) -> int:
        """Stream the flat `source` to a stage; returns how many rows were taken."""
        self._check_open()
        with self._translated():
            write = self._callable(self._channel.stream_unary, CACHE, "Write", pb.WriteResponse)
            requests = self._write_requests(start, source)
            response = write(requests, timeout=self.deadlines.bulk_seconds, metadata=self._metadata)
            return int(response.rows)

    def ns_id(self, namespace: Namespace) -> bytes:
        """The id of a namespace, which is opened in this session if it is not yet."""
        return self._namespaces.ns_id(self, namespace)

    def _session_requests(self) -> Iterator[pb.SessionRequest]:
        yield pb.SessionRequest(client_version=__version__)
        self._ended.wait()  # the session lives as long as this stream of requests

    def _follow_session(self) -> None:
        failure: KvstoreError = UnavailableError(f"{self._address} has ended the session")
        try:
            for response in self._stream:
                if not self._greeting.done():
                    self._greeting.set_result(response)
        except grpc.RpcError as err:
            failure = self._error_of(err)
        self._ended.set()
        if not self._greeting.done():
            self._greeting.set_exception(failure)

    def _call(self, service: str, method: str, request: Message, response_type: type[R], seconds: float) -> R:
        self._check_open()
        with self._translated():
            response: R = self._callable(self._channel.unary_unary, service, method, response_type)(
                request, timeout=seconds, metadata=self._metadata
            )
            return response

    def _callable(self, make: Any, service: str, method: str, response_type: type[Message]) -> Any:  # noqa: ANN401
        path = f"/{service}/{method}"
        made = self._callables.get(path)
        if made is None:
            decode = partial(frames.decode, response_type)
            made = make(path, request_serializer=frames.encode, response_deserializer=decode)
            self._callables[path] = made
        return made

    def _receive(self, stream: Any, target: NDArray[np.uint8]) -> tuple[pb.LoadSummary | None, int]:  # noqa: ANN401
        filled_bytes = 0
        summary = None
        for response in stream:
            if isinstance(response, pb.LoadResponse) and response.HasField("summary"):
                summary = response.summary
                continue
            frame = np.frombuffer(response if isinstance(response, memoryview) else response.frame, dtype=np.uint8)
            if frame.size > target.size - filled_bytes:
                raise UnavailableError(f"{self._address} sent more bytes than were asked for")
            target[filled_bytes : filled_bytes + frame.size] = frame
            filled_bytes += frame.size
        return summary, filled_bytes

    def _write_requests(self, start: pb.WriteStart, source: NDArray[np.uint8]) -> Iterator[pb.WriteRequest | bytes]:
        yield pb.WriteRequest(start=start)
        frame_bytes = whole_rows_bytes(self.session.limits.frame_bytes, source.size // start.blocks)
        for begin in range(0, source.size, frame_bytes):
            yield frames.encode_frame(pb.WriteRequest, source[begin : begin + frame_bytes])

    def _check_open(self) -> None:
        if self.ended:
            raise UnavailableError(f"the session with {self._address} has ended, and what it held with it")

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as err:
            raise self._error_of(err) from err
        except ValueError as err:
            # How gRPC says that another thread has closed the channel; requests were built before.
            self._check_open()
            raise UnavailableError(f"the call to {self._address} failed: {err}") from err

    def _error_of(self, err: Any) -> KvstoreError:  # noqa: ANN401  # an RpcError that is a Call too
        metadata = tuple(err.trailing_metadata() or ())
        error = error_of(err.code(), err.details() or "", metadata, self._address)
        lost = err.code() is grpc.StatusCode.UNAVAILABLE and ERROR_KEY not in dict(metadata)
        if lost or isinstance(error, (UnknownSessionError, UnauthenticatedError)):
            self._end()
        return error

    def _end_unless_ok(self, call: Any) -> None:  # noqa: ANN401
        if call.code() is not grpc.StatusCode.OK:
            self._end()

    def _end(self) -> None:
        self._ended.set()
        self._stream.cancel()


def _channel(address: UnixAddress | TcpAddress) -> Any:  # noqa: ANN401  # grpc has no types
    if isinstance(address, TcpAddress) and address.tls:
        credentials = address.credentials or Credentials()
        return grpc.secure_channel(address.target, credentials.channel(), options=_OPTIONS)
    return grpc.insecure_channel(address.target, options=_OPTIONS)
