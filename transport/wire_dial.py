"""Opening connections of the fast lane from the client's side."""

from __future__ import annotations

import logging
import socket
import time
from typing import TYPE_CHECKING

from kvstore.errors import NoSpaceError, UnauthenticatedError, UnavailableError
from kvstore.transport import wire
from kvstore.transport.address import UnixAddress
from kvstore.transport.credentials import Credentials, secure
from kvstore.transport.status import UnknownSessionError

if TYPE_CHECKING:
    from kvstore.transport.address import TcpAddress

logger = logging.getLogger(__name__)


class NoFastLaneError(UnavailableError):
    """Who answers at the address does not speak this fast lane; gRPC may work. Inside the transport only."""


def dial(
    address: UnixAddress | TcpAddress, lane: wire.Lane, session_id: bytes, seconds: float
) -> tuple[socket.socket, wire.ServerHello]:
    """A connection whose hellos were exchanged, within `seconds`.

    Raises NoFastLaneError where something else, or another version, answers; UnavailableError where nothing does;
    NoSpaceError at a limit of the server.
    """
    ends_at = time.monotonic() + seconds
    connected = _connect(address, seconds)
    try:
        connected.sendall(wire.encode_client_hello(lane, session_id))
        hello = _receive_hello(connected, address, ends_at)
        _require_welcome(hello, address)
    except TimeoutError as err:
        connected.close()
        raise UnavailableError(f"no answer from {address} within {seconds} s") from err
    except OSError as err:
        connected.close()
        _raise_if_refused(err, address)
        raise NoFastLaneError(f"{address} has closed the connection ({err.strerror})") from err
    except BaseException:
        connected.close()
        raise
    return connected, hello


def _connect(address: UnixAddress | TcpAddress, seconds: float) -> socket.socket:
    try:
        if isinstance(address, UnixAddress):
            connected = socket.socket(socket.AF_UNIX)
            try:
                connected.settimeout(seconds)
                connected.connect(address.path)
            except BaseException:
                connected.close()
                raise
            return connected
        ends_at = time.monotonic() + seconds
        connected = socket.create_connection((address.host, address.port), timeout=seconds)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except TimeoutError as err:
        raise UnavailableError(f"no answer from {address} within {seconds} s") from err
    except OSError as err:
        cause = err.strerror or str(err)
        raise UnavailableError(f"cannot reach {address} ({cause}); is `kvstore serve` running there?") from err
    if not address.tls:
        return connected
    connected.settimeout(max(0.001, ends_at - time.monotonic()))
    return secure(connected, address.host, address.credentials or Credentials(), str(address))


def _receive_hello(connected: socket.socket, address: UnixAddress | TcpAddress, ends_at: float) -> wire.ServerHello:
    raw = b""
    while len(raw) < wire.SERVER_HELLO_BYTES:
        connected.settimeout(max(0.001, ends_at - time.monotonic()))
        received = connected.recv(wire.SERVER_HELLO_BYTES - len(raw))
        raw += received
        if not received or raw[: len(wire.MAGIC)] != wire.MAGIC[: len(raw)]:
            raise NoFastLaneError(f"{address} does not answer as kvstore's fast lane does, but with {raw[:8]!r}")
    return wire.decode_server_hello(raw)


def _raise_if_refused(err: OSError, address: UnixAddress | TcpAddress) -> None:
    """In TLS 1.3 a server tells what it thinks of a client's certificate only after the client has begun to speak."""
    if "ALERT" in (err.strerror or "") and "CERTIFICATE" in (err.strerror or ""):
        raise UnauthenticatedError(
            f"{address} wants a certificate of a CA that it believes (tls_cert, tls_key): {err.strerror}"
        ) from err


def _require_welcome(hello: wire.ServerHello, address: UnixAddress | TcpAddress) -> None:
    if hello.verdict == wire.Verdict.OK and wire.VERSION_LOWEST <= hello.version <= wire.VERSION_HIGHEST:
        return
    if hello.verdict == wire.Verdict.FULL:
        raise NoSpaceError(f"{address} takes no more such connections from this client; wait for one to be free")
    if hello.verdict == wire.Verdict.SESSION:
        raise UnknownSessionError(f"{address} has ended the session")
    if hello.verdict == wire.Verdict.NO_ARENA:
        raise NoFastLaneError(f"{address} gives its memory to nobody over this connection")
    if hello.verdict == wire.Verdict.STOPPING:
        raise UnavailableError(f"{address} is stopping")
    raise NoFastLaneError(
        f"{address} speaks versions {hello.lowest} to {hello.highest} of the fast lane, this client "
        f"{wire.VERSION_LOWEST} to {wire.VERSION_HIGHEST}; update the older of the two"
    )
