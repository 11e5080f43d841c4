"""The bytes of the fast lane: hellos, frame headers, errors and deltas. README.md has them byte by byte.

Everything in here is a pure function of bytes; who sends what, and when, is in wire_control.py, wire_bulk.py and
wire_link.py. On the wire: numbers are little-endian and never renumbered.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import grpc
from grpc_health.v1 import health_pb2

from kvstore.errors import InvalidArgumentError, KvstoreError
from kvstore.transport.status import ERROR_KEY, RETRY_KEY, error_of, status_of
from kvstore.v1 import admin_service_pb2 as admin_pb
from kvstore.v1 import cache_service_pb2 as pb

if TYPE_CHECKING:
    from google.protobuf.message import Message

# The first byte begins no text, so that it is told from HTTP/2's "PRI " and any other protocol of letters.
MAGIC = b"\x93kvwire\n"
VERSION_LOWEST = 1
VERSION_HIGHEST = 1
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

CLIENT_HELLO_BYTES = 32
SERVER_HELLO_BYTES = 24
HEADER_BYTES = 16
DELTA_BYTES = 24
BULK_REQUEST_BYTES_MAX = 64 * 1024  # with the digests of 4,096 rows, and what an engine says of itself
_CLIENT_HELLO = struct.Struct("<8sHHB3x16s")
_SERVER_HELLO = struct.Struct("<8sHHHHQ")
_HEADER = struct.Struct("<IBBHII")
_DELTA = struct.Struct("<IIIIQ")
_ERROR = struct.Struct("<IB")
_DEADLINE_MS_MAX = 2**32 - 1


class WireFormatError(InvalidArgumentError):
    """The other side sent bytes that this lane does not have; the connection is of no use any more."""


class Lane(enum.IntEnum):
    """What a connection is for. On the wire: never renumber."""

    CONTROL = 1
    BULK = 2
    ARENA = 3


class Verdict(enum.IntEnum):
    """A server's answer to a hello. On the wire: never renumber."""

    OK = 0
    VERSION = 1
    FULL = 2
    SESSION = 3
    STOPPING = 4
    NO_ARENA = 5


class Kind(enum.IntEnum):
    """What a frame is. On the wire: never renumber."""

    REQUEST = 1
    RESPONSE = 2
    ERROR = 3
    RESEND = 4
    DATA = 5


class Method(enum.IntEnum):
    """The calls of kvstore.v1 on this lane; names are those of the API. On the wire: never renumber."""

    Session = 1
    OpenNamespace = 2
    Match = 3
    Lease = 4
    Release = 5
    Load = 6
    Stage = 7
    Write = 8
    Commit = 9
    Abort = 10
    GetStats = 11
    ReadEvents = 12
    Pin = 13
    Unpin = 14
    Evict = 15
    Clear = 16
    Flush = 17
    Verify = 18
    Check = 19
    Hint = 20
    Scrub = 21
    Prefetch = 22
    CancelPrefetch = 23
    ListNodes = 24
    Locate = 25
    EvictWriter = 26
    FindWriters = 27
    Drain = 28
    Undrain = 29
    ListNamespaces = 30
    DeleteNamespace = 31
    GetDiagnosis = 32
    ResetDiagnosis = 33


REQUEST_TYPES: dict[Method, type[Message]] = {
    Method.Session: pb.SessionRequest,
    Method.OpenNamespace: pb.OpenNamespaceRequest,
    Method.Match: pb.MatchRequest,
    Method.Lease: pb.LeaseRequest,
    Method.Release: pb.ReleaseRequest,
    Method.Load: pb.LoadRequest,
    Method.Stage: pb.StageRequest,
    Method.Write: pb.WriteStart,
    Method.Commit: pb.CommitRequest,
    Method.Abort: pb.AbortRequest,
    Method.GetStats: pb.GetStatsRequest,
    Method.ReadEvents: pb.ReadEventsRequest,
    Method.Pin: admin_pb.PinRequest,
    Method.Unpin: admin_pb.UnpinRequest,
    Method.Evict: admin_pb.EvictRequest,
    Method.Clear: admin_pb.ClearRequest,
    Method.Flush: admin_pb.FlushRequest,
    Method.Verify: admin_pb.VerifyRequest,
    Method.Check: health_pb2.HealthCheckRequest,
    Method.Hint: pb.HintRequest,
    Method.Scrub: admin_pb.ScrubRequest,
    Method.Prefetch: pb.PrefetchRequest,
    Method.CancelPrefetch: pb.CancelPrefetchRequest,
    Method.ListNodes: admin_pb.ListNodesRequest,
    Method.Locate: admin_pb.LocateRequest,
    Method.EvictWriter: admin_pb.EvictWriterRequest,
    Method.FindWriters: admin_pb.FindWritersRequest,
    Method.Drain: admin_pb.DrainRequest,
    Method.Undrain: admin_pb.UndrainRequest,
    Method.ListNamespaces: admin_pb.ListNamespacesRequest,
    Method.DeleteNamespace: admin_pb.DeleteNamespaceRequest,
    Method.GetDiagnosis: admin_pb.GetDiagnosisRequest,
    Method.ResetDiagnosis: admin_pb.ResetDiagnosisRequest,
}
ADMIN_METHODS = frozenset(
    (
        Method.Pin,
        Method.Unpin,
        Method.Evict,
        Method.Clear,
        Method.Flush,
        Method.Verify,
        Method.Scrub,
        Method.ListNodes,
        Method.Locate,
        Method.EvictWriter,
        Method.FindWriters,
        Method.Drain,
        Method.Undrain,
        Method.ListNamespaces,
        Method.DeleteNamespace,
        Method.GetDiagnosis,
        Method.ResetDiagnosis,
    )
)
BULK_METHODS = frozenset((Method.Load, Method.Write))
# Those whose prompt may be sent by its growth.
PROMPT_METHODS = frozenset((Method.Match, Method.Lease, Method.Stage, Method.Prefetch))
# A request of one of these that begins with a delta says so in its flags.
FLAG_DELTA = 1


@dataclass(frozen=True, slots=True)
class ClientHello:
    """The first bytes of a connection: the versions the client speaks, and whose it is, unless it is for control."""

    lowest: int
    highest: int
    lane: int
    session_id: bytes


@dataclass(frozen=True, slots=True)
class ServerHello:
    """The answer: the version chosen (0 if refused), the versions the server speaks, what it remembers of prompts."""

    version: int
    lowest: int
    highest: int
    verdict: int
    prompt_bytes: int


class Header(NamedTuple):
    """What precedes every body. `code` is a Method in a request, a gRPC status in an error, else 0."""

    body_bytes: int
    kind: Kind
    code: int
    flags: int
    call_id: int
    deadline_ms: int


class Delta(NamedTuple):
    """A prompt sent by its growth: the first `prefix_tokens` are those the server remembers under `base_id`.

    The whole is to be remembered under `prompt_id`, which may be the same.
    """

    prompt_id: int
    base_id: int
    prefix_tokens: int
    digest: int


def encode_client_hello(lane: Lane, session_id: bytes = bytes(16)) -> bytes:
    """The 32 bytes that open a connection."""
    return _CLIENT_HELLO.pack(MAGIC, VERSION_LOWEST, VERSION_HIGHEST, lane, session_id)


def decode_client_hello(raw: bytes) -> ClientHello:
    """Raises WireFormatError unless `raw` is a hello of this protocol, of whatever version."""
    if len(raw) != CLIENT_HELLO_BYTES or raw[: len(MAGIC)] != MAGIC:
        raise WireFormatError(f"a connection begins with {raw[:8]!r}, expected the hello of kvstore's fast lane")
    _, lowest, highest, lane, session_id = _CLIENT_HELLO.unpack(raw)
    return ClientHello(lowest, highest, lane, session_id)


def answer_hello(hello: ClientHello) -> Verdict:
    """Whether the versions of a client and of this server meet, and the lane is one of ours."""
    meets = hello.lowest <= VERSION_HIGHEST and hello.highest >= VERSION_LOWEST
    return Verdict.OK if meets and hello.lane in tuple(Lane) else Verdict.VERSION


def encode_server_hello(verdict: Verdict, hello: ClientHello | None, prompt_bytes: int) -> bytes:
    """The 24 bytes that answer a hello."""
    version = min(hello.highest, VERSION_HIGHEST) if hello is not None and verdict is Verdict.OK else 0
    return _SERVER_HELLO.pack(MAGIC, version, VERSION_LOWEST, VERSION_HIGHEST, verdict, prompt_bytes)


def decode_server_hello(raw: bytes) -> ServerHello:
    """Raises WireFormatError unless `raw` is the answer of a server of this protocol, of whatever version."""
    if len(raw) != SERVER_HELLO_BYTES or raw[: len(MAGIC)] != MAGIC:
        raise WireFormatError(f"a server answers with {raw[:8]!r}, expected the hello of kvstore's fast lane")
    return ServerHello(*_SERVER_HELLO.unpack(raw)[1:])


def encode_frame(
    kind: Kind, body: bytes, *, call_id: int, code: int = 0, flags: int = 0, deadline_ms: int = 0
) -> bytes:
    """A whole frame; one copy of the body."""
    return _HEADER.pack(len(body), kind, code, flags, call_id, deadline_ms) + body


def encode_header(
    kind: Kind, body_bytes: int, *, call_id: int, code: int = 0, flags: int = 0, deadline_ms: int = 0
) -> bytes:
    """The header of a frame whose body follows by itself."""
    return _HEADER.pack(body_bytes, kind, code, flags, call_id, deadline_ms)


def decode_header(raw: bytes | bytearray | memoryview, offset: int, body_bytes_max: int) -> Header:
    """The header at `offset`. Raises WireFormatError for what no peer of this version sends."""
    body_bytes, kind, code, flags, call_id, deadline_ms = _HEADER.unpack_from(raw, offset)
    if not 1 <= kind <= _KIND_MAX:
        raise WireFormatError(f"a frame has kind {kind}, expected 1..{_KIND_MAX}")
    if body_bytes > body_bytes_max:
        raise WireFormatError(f"a frame has {body_bytes} bytes, expected at most {body_bytes_max}")
    if flags & ~FLAG_DELTA:
        raise WireFormatError(f"a frame has flags {flags:#x}, expected none but {FLAG_DELTA}")
    return Header(body_bytes, _KINDS[kind - 1], code, flags, call_id, deadline_ms)


def method_of(header: Header) -> Method:
    """The method of a request. Raises WireFormatError if the frame is none, or names a method that is not there."""
    if header.kind is not Kind.REQUEST:
        raise WireFormatError(f"a client sent a frame of kind {header.kind.name}, expected a request")
    if not 1 <= header.code <= len(_METHODS):
        raise WireFormatError(f"a request has method {header.code}, expected 1..{len(_METHODS)}")
    return _METHODS[header.code - 1]


def deadline_ms_of(seconds: float) -> int:
    """How a header says how long the caller waits; 0 would mean for ever."""
    return max(1, min(int(seconds * 1000), _DEADLINE_MS_MAX))


def encode_delta(delta: Delta) -> bytes:
    """The 24 bytes in front of a message whose prompt is sent by its growth."""
    return _DELTA.pack(delta.prompt_id, delta.base_id, delta.prefix_tokens, 0, delta.digest)


def decode_delta(body: bytes | memoryview) -> Delta:
    """Raises WireFormatError if the body is too short to begin with one."""
    if len(body) < DELTA_BYTES:
        raise WireFormatError(f"a request with a delta has {len(body)} bytes, expected at least {DELTA_BYTES}")
    prompt_id, base_id, prefix_tokens, _, digest = _DELTA.unpack_from(body)
    return Delta(prompt_id, base_id, prefix_tokens, digest)


def encode_error(error: KvstoreError, call_id: int) -> bytes:
    """The frame that stands for an error, as status.py has it for gRPC."""
    code, details, metadata = status_of(error)
    named = dict(metadata)
    name = named.get(ERROR_KEY, "").encode()
    body = _ERROR.pack(int(named.get(RETRY_KEY, 0)), len(name)) + name + details.encode()
    return encode_frame(Kind.ERROR, body, call_id=call_id, code=code.value[0])


def encode_failure(code: grpc.StatusCode, details: str, call_id: int) -> bytes:
    """The frame of an error that is none of kvstore's own."""
    return encode_frame(Kind.ERROR, _ERROR.pack(0, 0) + details.encode(), call_id=call_id, code=code.value[0])


def decode_error(code: int, body: bytes, address: str) -> KvstoreError:
    """The error that an ERROR frame stands for. Raises WireFormatError for one that cannot be."""
    status = _STATUSES.get(code)
    if status is None or status is grpc.StatusCode.OK or len(body) < _ERROR.size:
        raise WireFormatError(f"an error has code {code} and {len(body)} bytes, expected a gRPC status and a text")
    retry_ms, name_bytes = _ERROR.unpack_from(body)
    name = body[_ERROR.size : _ERROR.size + name_bytes].decode(errors="replace")
    details = body[_ERROR.size + name_bytes :].decode(errors="replace")
    return error_of(status, details, ((ERROR_KEY, name), (RETRY_KEY, str(retry_ms))), address)


_KINDS = tuple(Kind)
_KIND_MAX = len(_KINDS)
_METHODS = tuple(Method)
_STATUSES = {status.value[0]: status for status in grpc.StatusCode}
