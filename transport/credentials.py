"""What a client shows a server, and by what it knows the server."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import grpc

from kvstore.errors import ConfigError, UnauthenticatedError, UnavailableError
from kvstore.transport.address import TcpAddress
from kvstore.transport.private_files import read_private, signature
from kvstore.transport.tls_socket import TlsSocket

if TYPE_CHECKING:
    import socket

    from kvstore.transport.address import UnixAddress
    from kvstore.transport.private_files import Signature

TOKEN_BYTES_MAX = 8192
WIRE_PROTOCOL = "kvstore-wire"


class CredentialFiles(TypedDict, total=False):
    """The options of a client that name files."""

    tls_ca: str | None
    tls_cert: str | None
    tls_key: str | None
    token_file: str | None


@dataclass(frozen=True, slots=True)
class _Kept:
    context: ssl.SSLContext
    signature: Signature


@dataclass(slots=True)
class Credentials:
    """Files of a client. They are read again for a new connection, so a new certificate or token needs no restart.

    Thread-safe, and in the child of a fork too: `_kept` is set at once, and two threads may both make what it has.
    """

    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    token_file: Path | None = None
    _kept: _Kept | None = field(default=None, repr=False)

    def check(self) -> None:
        """Read all files once; raises ConfigError for one that cannot be used."""
        if self.tls_ca is not None or self.tls_cert is not None:
            self.context()
        self.token()

    def token(self) -> str:
        """The token to show; empty if there is none."""
        if self.token_file is None:
            return ""
        raw = read_private(self.token_file, "token file").strip()
        if not 1 <= len(raw) <= TOKEN_BYTES_MAX or not raw.isascii() or any(byte <= 32 for byte in raw):
            raise ConfigError(
                f"token file {self.token_file} has {len(raw)} bytes, expected one word of ASCII characters, at most "
                f"{TOKEN_BYTES_MAX} of them"
            )
        return raw.decode("ascii")

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The token as gRPC sends it, with each call."""
        token = self.token()
        return (("authorization", f"Bearer {token}"),) if token else ()

    def channel(self) -> Any:  # noqa: ANN401  # grpc has no types
        """gRPC's credentials of a TLS channel."""
        key = None if self.tls_key is None else read_private(self.tls_key, "key")
        return grpc.ssl_channel_credentials(_content(self.tls_ca), key, _content(self.tls_cert))

    def context(self) -> ssl.SSLContext:
        """What a connection of the fast lane is made with: TLS 1.3, the server's name verified."""
        files = [path for path in (self.tls_ca, self.tls_cert, self.tls_key) if path is not None]
        kept, now = self._kept, signature(files)
        if kept is None or kept.signature != now:
            kept = self._kept = _Kept(self._make_context(), now)
        return kept.context

    def _make_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.sslsocket_class = TlsSocket
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.set_alpn_protocols([WIRE_PROTOCOL])
        try:
            if self.tls_ca is not None:
                context.load_verify_locations(self.tls_ca)
            else:
                context.load_default_certs(ssl.Purpose.SERVER_AUTH)
            if self.tls_cert is not None:
                assert self.tls_key is not None, "checked when the client was made"
                read_private(self.tls_key, "key")
                context.load_cert_chain(self.tls_cert, self.tls_key)
        except OSError as err:  # ssl.SSLError is one too
            raise ConfigError(
                f"tls_ca={self.tls_ca}, tls_cert={self.tls_cert}, tls_key={self.tls_key} cannot be used: "
                f"{err.strerror or err}; expected PEM files, the key that of the certificate"
            ) from err
        return context


def secure(connected: socket.socket, host: str, credentials: Credentials, address: str) -> TlsSocket:
    """Begin TLS on a connection whose timeout is set; closes it where that fails.

    Raises UnauthenticatedError where the two do not trust each other, UnavailableError where no TLS answers.
    """
    try:
        tls = credentials.context().wrap_socket(connected, server_hostname=host)
    except ssl.SSLCertVerificationError as err:
        connected.close()
        raise UnauthenticatedError(
            f"the certificate of {address} is not trusted: {err.verify_message}; name the CA that signed it (tls_ca), "
            "and connect to a host that it names"
        ) from err
    except TimeoutError as err:
        connected.close()
        raise UnavailableError(f"no answer from {address} within the deadline") from err
    except OSError as err:
        connected.close()
        cause = getattr(err, "reason", None) or err.strerror or str(err)
        raise UnavailableError(f"{address} does not answer as a TLS server of ours does ({cause})") from err
    assert isinstance(tls, TlsSocket), tls
    seconds = tls.gettimeout()
    tls.prepare().settimeout(seconds)
    return tls


def _content(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as err:
        raise ConfigError(f"{path} cannot be read: {err.strerror}") from err


def credentials_of(
    *, tls_ca: str | None, tls_cert: str | None, tls_key: str | None, token_file: str | None
) -> Credentials | None:
    """Credentials from the options of a client; None if there are none. Raises ConfigError for what does not fit."""
    if (tls_cert is None) != (tls_key is None):
        raise ConfigError("tls_cert and tls_key belong together: give both, or neither")
    ca, cert, key, token = (None if text is None else Path(text) for text in (tls_ca, tls_cert, tls_key, token_file))
    if ca is None and cert is None and token is None:
        return None
    return Credentials(tls_ca=ca, tls_cert=cert, tls_key=key, token_file=token)


def with_credentials(address: UnixAddress | TcpAddress, credentials: Credentials | None) -> UnixAddress | TcpAddress:
    """The address, to be used with credentials, whose files are read once to see whether they can be.

    Raises ConfigError where a token would travel in the clear, or certificates would be of no use.
    """
    if credentials is None:
        return address
    is_tls = isinstance(address, TcpAddress) and address.tls
    if not is_tls and (credentials.tls_ca or credentials.tls_cert):
        raise ConfigError(f"there is no TLS at {address}; say tls://host:port, or leave the certificates out")
    if credentials.token_file and isinstance(address, TcpAddress) and not (is_tls or address.is_loopback):
        raise ConfigError(f"the token would travel to {address} for all to read; say tls://{address.host_and_port}")
    credentials.check()
    return replace(address, credentials=credentials)
