"""One channel to a server, with the session that lives on it."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import grpc
import numpy as np

from kvstore import __version__
from kvstore.errors import KvstoreError, UnauthenticatedError, UnavailableError
from kvstore.transport import convert, frames
from kvstore.transport.address import TcpAddress
from kvstore.transport.credentials import Credentials
from kvstore.transport.link import CACHE, ArenaStatus, Matched, OpenNamespaces, R
from kvstore.transport.plans import MATCH
from kvstore.transport.rows import whole_rows_bytes
from kvstore.transport.status import ERROR_KEY, UnknownSessionError, error_of
from kvstore.v1 import cache_service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from google.protobuf.message import Message
    from numpy.typing import NDArray

    from kvstore.transport.address import UnixAddress
    from kvstore.transport.link import Lookup, Rpc
    from kvstore.types import Namespace

# How long after its deadline gRPC may take to say that a call was late.
_GRACE_SECONDS = 0.05
# How long a thread is waited for that ends at once, unless an interrupt (Ctrl-C) has left gRPC's own locks taken.
_FOLLOWER_SECONDS = 0.25
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


class _GrpcProcess:
    """The process that uses gRPC: the only one that may, of it and its children."""

    id: int | None = None


_process = _GrpcProcess()
_connections: WeakSet[Connection] = WeakSet()


class Connection:
    """A kvstore.transport.link.Link over gRPC: a channel and its session. Thread-safe.

    Once ended it stays so: make another one. A child of a fork can neither use it nor make another: gRPC has what it
    waits for in an epoll that both processes have, and events of the child's would crash the parent.
    The constructor opens the session and raises UnavailableError if that takes too long.
    """

    lane = "grpc"

    def __init__(self, address: UnixAddress | TcpAddress, ends_at: float) -> None:
        self._address = str(address)
        if _process.id not in (None, os.getpid()):
            raise UnavailableError(
                f"{self._address} cannot be asked over gRPC in the child of a fork whose parent used gRPC; use the "
                "fast lane (unix:///..., host:port), or start processes by spawn"
            )
        _process.id = os.getpid()
        self._metadata = address.credentials.metadata() if address.credentials is not None else ()
        self._channel: Any = _channel(address)
        self._left_behind = False
        self._ended = threading.Event()
        self._greeting: Future[pb.SessionResponse] = Future()
        self._ids = count(1)
        self._namespaces = OpenNamespaces()
        self._callables: dict[str, Any] = {}  # by path, only ever added to; making one takes 20 us
        self._stream: Any = None
        _connections.add(self)
        self._follower = threading.Thread(target=self._follow_session, name="kvstore-session", daemon=True)
        self._start()
        try:
            self.session = self._greeting.result(seconds_left(ends_at))
        except TimeoutError as err:
            self.close()
            raise UnavailableError(f"no answer from {self._address} within the deadline") from err
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        """Open the session's stream, and a thread that follows it."""
        open_session = self._callable(self._channel.stream_stream, CACHE, "Session", pb.SessionResponse)
        try:
            self._stream = open_session(self._session_requests(), metadata=self._metadata)
            self._follower.start()
        except RuntimeError as err:
            # gRPC waits for ever at the end of a channel whose own thread could not be started.
            _never_free(self._channel)
            self._ended.set()
            raise UnavailableError(f"cannot start a thread to ask {self._address}: {err}") from err

    @property
    def ended(self) -> bool:
        """Whether the session is over, and with it every lease and stage it held."""
        return self._ended.is_set()

    def close(self) -> None:
        """End the session and the channel; idempotent. The server releases what the session held."""
        if self._left_behind:
            return
        self._end()
        self._follower.join(_FOLLOWER_SECONDS)
        # gRPC waits in there for calls whose bytes are stuck in a full socket, until that is taken or broken.
        closing = threading.Thread(target=self._channel.close, name="kvstore-channel-end", daemon=True)
        try:
            closing.start()
        except RuntimeError:
            self._channel.close()  # no thread is to be had: this one may wait a little
        else:
            closing.join(_GRACE_SECONDS)

    def leave_to_parent(self) -> None:
        """In the child of a fork: the session and the channel stay the parent's, and nothing here may end them."""
        self._left_behind = True
        self._ended.set()
        for shared in (self._channel, self._stream):
            _never_free(shared)  # nor may the end of this process

    def call(self, rpc: Rpc[R], request: Message, ends_at: float) -> R:
        """One call."""
        self._check_open()
        with self._translated():
            make = self._callable(self._channel.unary_unary, rpc.service, rpc.method, rpc.response)
            call = make.future(request, timeout=seconds_left(ends_at), metadata=self._metadata)
            response: R = self._result(call, ends_at)
            return response

    def match(self, lookup: Lookup, ends_at: float) -> Matched:
        """A lookup."""
        request = pb.MatchRequest(
            session_id=self.session.session_id,
            prompt=convert.prompt_to_proto(self.ns_id(lookup.namespace, ends_at), lookup.root, lookup.prompt),
            peek=lookup.peek,
            request_id=lookup.request_id,
        )
        found = self.call(MATCH, request, ends_at)
        return Matched(found.blocks, convert.runs_from_proto(found.runs))

    def new_id(self) -> int:
        """An id that names one lease or stage of this session."""
        return next(self._ids)

    def give_up(self, rpc: Rpc[R], request: Message, seconds: float) -> None:
        """Send a call that ends what we may or may not hold, without waiting. If it fails, the session is ended."""
        if not self.ended:
            make = self._callable(self._channel.unary_unary, rpc.service, rpc.method, rpc.response)
            call = make.future(request, timeout=seconds, metadata=self._metadata)
            call.add_done_callback(self._end_unless_ok)

    def load(self, request: pb.LoadRequest, target: NDArray[np.uint8], ends_at: float) -> int:
        """Stream leased blocks into the flat `target`; returns how many leading blocks are right."""
        self._check_open()
        with self._translated():
            stream = self._callable(self._channel.unary_stream, CACHE, "Load", pb.LoadResponse)(
                request, timeout=seconds_left(ends_at), metadata=self._metadata
            )
            try:
                summary, filled_bytes = self._receive(stream, target)
            finally:
                stream.cancel()
        row_bytes = target.size // request.blocks
        if summary is None or filled_bytes != summary.blocks * row_bytes:
            raise UnavailableError(f"{self._address} ended a load without all of its bytes")
        return summary.blocks

    def write(self, start: pb.WriteStart, source: NDArray[np.uint8], ends_at: float) -> int:
        """Stream the flat `source` to a stage; returns how many rows were taken."""
        self._check_open()
        with self._translated():
            write = self._callable(self._channel.stream_unary, CACHE, "Write", pb.WriteResponse)
            requests = self._write_requests(start, source)
            call = write.future(requests, timeout=seconds_left(ends_at), metadata=self._metadata)
            return int(self._result(call, ends_at).rows)

    def read_in_place(
        self, _request: pb.LoadRequest, _ends_at: float
    ) -> AbstractContextManager[list[NDArray[np.uint8]]]:
        """Nothing is: gRPC passes no descriptors."""
        return nullcontext([])

    @property
    def arena(self) -> ArenaStatus:
        """Whether blocks are read where they lie: not by this lane."""
        return ArenaStatus("the lane is gRPC")

    def ns_id(self, namespace: Namespace, ends_at: float) -> bytes:
        """The id of a namespace, which is opened in this session if it is not yet."""
        return self._namespaces.ns_id(self, namespace, ends_at)

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

    def _result(self, call: Any, ends_at: float) -> Any:  # noqa: ANN401
        """The answer of a call. One whose bytes are stuck in a full socket does not end at its deadline in gRPC."""
        seconds = seconds_left(ends_at)
        try:
            return call.result(seconds + max(_GRACE_SECONDS, seconds / 2))
        except grpc.FutureTimeoutError as err:
            self._end()
            raise UnavailableError(f"no answer from {self._address} within the deadline") from err
        except grpc.FutureCancelledError as err:
            raise UnavailableError(f"the session with {self._address} was closed meanwhile") from err

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
        if self._left_behind:
            raise UnavailableError(f"the session with {self._address} is that of the parent of this fork")
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
        except RuntimeError as err:  # of threading: gRPC has one for each stream of requests
            raise UnavailableError(f"cannot start a thread to ask {self._address}: {err}") from err

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


def _leave_all_to_parent() -> None:
    for connection in _connections:
        connection.leave_to_parent()


os.register_at_fork(after_in_child=_leave_all_to_parent)


def _never_free(shared: object) -> None:
    """Keep an object of gRPC to the end of the process, so that nothing ever closes it."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(shared))


def seconds_left(ends_at: float) -> float:
    """Time until then, as a time-out that is not refused."""
    return max(0.001, ends_at - time.monotonic())


def _channel(address: UnixAddress | TcpAddress) -> Any:  # noqa: ANN401  # grpc has no types
    try:
        if isinstance(address, TcpAddress) and address.tls:
            credentials = address.credentials or Credentials()
            return grpc.secure_channel(address.target, credentials.channel(), options=_OPTIONS)
        return grpc.insecure_channel(address.target, options=_OPTIONS)
    except OSError as err:  # gRPC imports parts of itself here, which takes a descriptor
        raise UnavailableError(f"cannot ask {address} over gRPC: {err.strerror}") from err
