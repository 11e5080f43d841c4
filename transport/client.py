"""Client: a kvstore.api.KvStore served by a sidecar, over the fast lane where it is there, else over gRPC."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, TypeVar

from grpc_health.v1 import health_pb2

from kvstore.errors import (
    ClosedError,
    ConfigError,
    InvalidArgumentError,
    UnauthenticatedError,
    UnavailableError,
)
from kvstore.tokens import as_token_array
from kvstore.transport import convert
from kvstore.transport.address import parse_address
from kvstore.transport.connection import Connection
from kvstore.transport.credentials import credentials_of, with_credentials
from kvstore.transport.link import CACHE, Deadlines, Lookup
from kvstore.transport.remote import RemoteLease, RemoteStage
from kvstore.transport.wire_dial import NoFastLaneError
from kvstore.transport.wire_link import WireLink
from kvstore.types import PLAIN_ROOT, PrefixMatch, Verification, require_seconds
from kvstore.v1 import admin_service_pb2 as admin_pb
from kvstore.v1 import cache_service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from kvstore.events import EventPage
    from kvstore.tokens import Tokens
    from kvstore.transport.address import TcpAddress, UnixAddress
    from kvstore.transport.link import Link
    from kvstore.types import Namespace, Pin, Root, StoreStats

T = TypeVar("T")
logger = logging.getLogger(__name__)
ADMIN = "kvstore.v1.AdminService"
_HEALTH = "grpc.health.v1.Health"
_EVENTS_MAX = 10_000
_EVENT_WAIT_SECONDS_MAX = 10.0
_UINT32_MAX = 2**32 - 1
_UINT64_MAX = 2**64 - 1


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """What a server says of itself."""

    serving: bool
    version: str
    lane: str


_clients: weakref.WeakSet[Client] = weakref.WeakSet()


class Client:
    """A store behind a server; see kvstore.api.KvStore for the methods. Thread-safe.

    Connects at the first call, and again after the server was restarted or, on the fast lane, in the child of a fork:
    lookups and stores then go on, while leases and stages of the old session raise UnavailableError. No call outlasts
    its deadline by more than the time of connecting again. `_lock` guards the connection; it is held while connecting,
    and nothing else is.
    """

    def __init__(self, address: UnixAddress | TcpAddress, deadlines: Deadlines) -> None:
        self._address = address
        self._deadlines = deadlines
        self._lock = threading.Lock()
        self._connection: Link | None = None
        self._closed = False
        _clients.add(self)

    def namespace_id(self, namespace: Namespace) -> bytes:
        """The public name of a namespace on this server."""
        return self._call(lambda connection: connection.ns_id(namespace))

    def match(
        self,
        namespace: Namespace,
        tokens: Tokens,
        *,
        root: Root | None = None,
        touch: bool = True,
        request_id: str | None = None,
    ) -> PrefixMatch:
        """The longest stored prefix of `tokens`."""
        prompt = as_token_array(tokens)
        lookup = Lookup(namespace, root, prompt, not touch, _unicode(request_id or "", "request_id"))
        found = self._call(lambda link: link.match(lookup))
        return PrefixMatch(namespace, PLAIN_ROOT if root is None else root, prompt, found.blocks, found.runs)

    def lease(self, match: PrefixMatch) -> RemoteLease:
        """Protect a match."""
        return self._call(lambda connection: RemoteLease(connection, match))

    def stage(
        self, namespace: Namespace, tokens: Tokens, *, root: Root | None = None, from_block: int = 0
    ) -> RemoteStage:
        """Begin to store."""
        prompt = as_token_array(tokens)
        _check_range(from_block, _UINT32_MAX, "from_block")

        def attempt(connection: Link) -> RemoteStage:
            packed = convert.prompt_to_proto(connection.ns_id(namespace), root, prompt)
            return RemoteStage(connection, namespace.layout, packed, from_block)

        return self._call(attempt)

    def pin(
        self, namespace: Namespace, tokens: Tokens, *, root: Root | None = None, ttl_seconds: float | None = None
    ) -> Pin:
        """Protect a stored prefix from eviction. Not tried again when the connection breaks: it may be set twice."""
        request = admin_pb.PinRequest()
        if ttl_seconds is not None:
            convert.set_duration(request.ttl, ttl_seconds, "ttl_seconds")
        prompt = as_token_array(tokens)
        connection = self._connect()
        request.session_id = connection.session.session_id
        request.prompt.CopyFrom(convert.prompt_to_proto(connection.ns_id(namespace), root, prompt))
        return convert.pin_from_proto(connection.call(ADMIN, "Pin", request, admin_pb.PinResponse))

    def unpin(self, pin_id: int) -> bool:
        """End a pin."""
        _check_range(pin_id, _UINT64_MAX, "pin_id")
        request = admin_pb.UnpinRequest(pin_id=pin_id)
        return self._call(lambda connection: connection.call(ADMIN, "Unpin", request, admin_pb.UnpinResponse)).found

    def hint_next_use(
        self, namespace: Namespace, tokens: Tokens, *, root: Root | None = None, seconds: float | None
    ) -> int:
        """Tell when a prompt will be used again; None says never."""
        prompt = as_token_array(tokens)
        request = pb.HintRequest(end=pb.SessionEnd())
        if seconds is not None:
            convert.set_duration(request.next, require_seconds(seconds, "seconds"), "seconds")

        def attempt(connection: Link) -> int:
            request.session_id = connection.session.session_id
            request.prompt.CopyFrom(convert.prompt_to_proto(connection.ns_id(namespace), root, prompt))
            return connection.call(CACHE, "Hint", request, pb.HintResponse).blocks

        return self._call(attempt)

    def end_session(self, namespace: Namespace, tokens: Tokens, *, root: Root | None = None) -> int:
        """Say that a conversation is over."""
        return self.hint_next_use(namespace, tokens, root=root, seconds=None)

    def evict(self, namespace: Namespace, tokens: Tokens, *, root: Root | None = None, from_block: int = 0) -> int:
        """Drop a prefix from `from_block` on."""
        prompt = as_token_array(tokens)
        _check_range(from_block, _UINT32_MAX, "from_block")

        def attempt(connection: Link) -> int:
            request = admin_pb.EvictRequest(
                session_id=connection.session.session_id,
                prompt=convert.prompt_to_proto(connection.ns_id(namespace), root, prompt),
                from_block=from_block,
            )
            return connection.long_call(ADMIN, "Evict", request, admin_pb.EvictResponse).blocks

        return self._call(attempt)

    def clear(self, namespace: Namespace) -> int:
        """Drop all blocks of a namespace."""

        def attempt(connection: Link) -> int:
            request = admin_pb.ClearRequest(session_id=connection.session.session_id, ns_id=connection.ns_id(namespace))
            return connection.long_call(ADMIN, "Clear", request, admin_pb.ClearResponse).blocks

        return self._call(attempt)

    def stats(self) -> StoreStats:
        """Occupancy and counters of the server's store."""
        request = pb.GetStatsRequest()
        answer = self._call(lambda connection: connection.call(CACHE, "GetStats", request, pb.GetStatsResponse))
        return convert.stats_from_proto(answer.stats)

    def events(self, *, after: int = 0, limit: int = 1000, wait_seconds: float = 0.0) -> EventPage:
        """A page of the server's event log; waits in steps, so that no single call is long."""
        _check_range(after, _UINT64_MAX, "after")
        if limit < 1 or not 0 <= wait_seconds < float("inf"):
            raise InvalidArgumentError(f"limit={limit}, wait_seconds={wait_seconds}: expected at least 1 and 0")
        ends_at = time.monotonic() + wait_seconds
        while True:
            rest_seconds = max(0.0, ends_at - time.monotonic())
            page = self._read_events(after, limit, min(rest_seconds, self._event_step_seconds()))
            if page.events or page.gap or time.monotonic() >= ends_at:
                return page

    def flush(self) -> None:
        """Return when everything committed and admitted to disk is there."""
        request = admin_pb.FlushRequest()
        self._call(lambda connection: connection.long_call(ADMIN, "Flush", request, admin_pb.FlushResponse))

    def verify(self) -> Verification:
        """Check the server's index."""
        request = admin_pb.VerifyRequest()
        found = self._call(lambda connection: connection.long_call(ADMIN, "Verify", request, admin_pb.VerifyResponse))
        return Verification(found.namespaces, found.blocks, tuple(found.problems))

    def status(self) -> ServerStatus:
        """Whether the server takes calls, and its version."""

        def attempt(connection: Link) -> ServerStatus:
            request = health_pb2.HealthCheckRequest()
            health = connection.call(_HEALTH, "Check", request, health_pb2.HealthCheckResponse)
            serving = health.status == health_pb2.HealthCheckResponse.SERVING
            return ServerStatus(serving, connection.session.server_version, connection.lane)

        return self._call(attempt)

    def close(self) -> None:
        """End the session, with all leases and stages; idempotent. The server's store stays as it is."""
        with self._lock:
            self._closed = True  # before the connection goes, so that nobody who finds none makes another
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, attempt: Callable[[Link], T]) -> T:
        """Run `attempt`; once more on a fresh connection if the one it had turns out soon to be dead."""
        soon = time.monotonic() + self._deadlines.control_seconds / 2
        connection = self._connect()
        try:
            return attempt(connection)
        except (UnavailableError, UnauthenticatedError):
            if not connection.ended or time.monotonic() > soon:
                raise
        return attempt(self._connect())

    def _connect(self) -> Link:
        link = self._connection
        if link is not None and not link.ended:
            return link
        if not self._lock.acquire(timeout=self._deadlines.control_seconds):
            raise UnavailableError(f"no answer from {self._address} within {self._deadlines.control_seconds} s")
        try:
            if self._closed:
                raise ClosedError("the client is closed")
            if self._connection is None or self._connection.ended:
                if self._connection is not None:
                    self._connection.close()
                    self._connection = None
                self._connection = self._open()
            return self._connection
        finally:
            self._lock.release()

    def _open(self) -> Link:
        if not self._address.grpc_only:
            try:
                return WireLink(self._address, self._deadlines)
            except NoFastLaneError as err:
                logger.info("no fast lane, using gRPC: cause=%s", err)
        return Connection(self._address, self._deadlines)

    def _forget_parent(self) -> None:
        """In the child of a fork: what another thread of the parent held is held for ever."""
        self._lock = threading.Lock()

    def _read_events(self, after: int, limit: int, wait_seconds: float) -> EventPage:
        request = pb.ReadEventsRequest(after=after, limit=min(limit, _EVENTS_MAX))
        convert.set_duration(request.wait, wait_seconds, "wait_seconds")
        answer = self._call(lambda connection: connection.call(CACHE, "ReadEvents", request, pb.ReadEventsResponse))
        return convert.page_from_proto(answer.page)

    def _event_step_seconds(self) -> float:
        return min(_EVENT_WAIT_SECONDS_MAX, self._deadlines.control_seconds / 2)


def connect(
    address: str,
    *,
    control_seconds: float = 5.0,
    bulk_seconds: float = 60.0,
    tls_ca: str | None = None,
    tls_cert: str | None = None,
    tls_key: str | None = None,
    token_file: str | None = None,
) -> Client:
    """A client of the server at `address`: unix:///path, tls://host:port, host:port, or with gRPC alone grpc+unix:///path,
    grpc+tls://host:port, grpc://host:port.

    With TLS the server's certificate must be of the CA in the PEM file `tls_ca`, or of one that the system trusts, and
    name the host; `tls_cert` and `tls_key` are the client's own. `token_file` has the token that says who calls. All
    are read again for each new connection.

    Connects at the first call only, which raises UnavailableError if the server cannot be reached. `control_seconds`
    bounds a lookup and the like, `bulk_seconds` one load or write, flush, evict, clear or verify. Raises ConfigError
    for an address or a time that cannot be.
    """
    for name, seconds in (("control_seconds", control_seconds), ("bulk_seconds", bulk_seconds)):
        if not 0 < seconds < 1e6:
            raise ConfigError(f"{name} is {seconds!r}, expected more than 0 and less than 1e6")
    credentials = credentials_of(tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, token_file=token_file)
    return Client(with_credentials(parse_address(address), credentials), Deadlines(control_seconds, bulk_seconds))


def _check_range(value: int, highest: int, name: str) -> None:
    if not 0 <= value <= highest:
        raise InvalidArgumentError(f"{name} is {value}, expected 0..{highest}")


def _unicode(text: str, name: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as err:
        raise InvalidArgumentError(f"{name} is not Unicode text") from err
    return text


def _forget_parents() -> None:
    for client in list(_clients):
        client._forget_parent()  # noqa: SLF001  # of this module


os.register_at_fork(after_in_child=_forget_parents)
