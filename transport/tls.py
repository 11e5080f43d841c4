"""The server's side of TLS: certificates that can be renewed, handshakes that wait for nobody, who the other side is.

TLS 1.3 only (RFC 8446). ALPN (RFC 7301) offers `h2`, which gRPC insists on, and a name for the fast lane; which lane a
connection is of is told by its first decrypted bytes, as it is without TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import TYPE_CHECKING, Any

from kvstore.errors import ConfigError
from kvstore.thread_pool import ThreadPool
from kvstore.transport.credentials import WIRE_PROTOCOL
from kvstore.transport.private_files import read_private
from kvstore.transport.tls_socket import TlsSocket

if TYPE_CHECKING:
    import socket
    from pathlib import Path

# A handshake is some 300 us of arithmetic, which the event loop has no time for.
_HANDSHAKE_THREADS = 2


class ServerTls:
    """The certificate that new connections get. Used from its server's event loop; threads shake hands and reload."""

    def __init__(self, *, cert: Path, key: Path, client_ca: Path | None, require_client_cert: bool) -> None:
        self.files = tuple(path for path in (cert, key, client_ca) if path is not None)
        self._cert = cert
        self._key = key
        self._client_ca = client_ca
        self._verify = ssl.CERT_REQUIRED if require_client_cert else ssl.CERT_OPTIONAL
        self._context = self._load()
        self._threads = ThreadPool(_HANDSHAKE_THREADS, "handshake")

    def reload(self) -> None:
        """Use what the files hold now for new connections; raises ConfigError, and keeps what it has, else."""
        self._context = self._load()

    async def handshake(self, connected: socket.socket) -> TlsSocket:
        """Begin TLS on a connection that was accepted; raises OSError if the other side does not do its part.

        Takes a thread only while there is something to calculate. The caller limits the time.
        """
        loop = asyncio.get_running_loop()
        connected.setblocking(False)
        with contextlib.closing(connected):  # which is nobody's any more once TLS has taken it over
            tls = self._context.wrap_socket(connected, server_side=True, do_handshake_on_connect=False)
        assert isinstance(tls, TlsSocket), tls
        try:
            while True:
                try:
                    await _finished(loop.run_in_executor(self._threads, tls.do_handshake))
                    return tls.prepare()
                except ssl.SSLWantReadError:
                    await _ready(tls, loop.add_reader, loop.remove_reader)
                except ssl.SSLWantWriteError:
                    await _ready(tls, loop.add_writer, loop.remove_writer)
        except BaseException:
            tls.close()
            raise

    def close(self) -> None:
        """End the threads; idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.sslsocket_class = TlsSocket
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.set_alpn_protocols([WIRE_PROTOCOL, "h2"])
        context.num_tickets = 0  # connections last; and nothing is to come behind a handshake that nobody asked for
        read_private(self._key, "tls.key")
        try:
            context.load_cert_chain(self._cert, self._key)
        except OSError as err:  # ssl.SSLError is one too
            raise ConfigError(
                f"tls.cert {self._cert} and tls.key {self._key} cannot be used: {err.strerror or err}; expected PEM "
                "files, the key that of the certificate, without a password"
            ) from err
        if self._client_ca is not None:
            try:
                context.load_verify_locations(self._client_ca)
            except OSError as err:
                raise ConfigError(
                    f"tls.client_ca {self._client_ca} cannot be used: {err.strerror or err}; expected a PEM file"
                ) from err
            context.verify_mode = self._verify
        return context


def certificate_names(connected: TlsSocket) -> tuple[str, ...]:
    """What the verified certificate of a client calls it, each with CN:, DNS:, URI: or IP: before it."""
    certificate: Any = connected.getpeercert() or {}
    names = [f"{_KINDS.get(kind, kind)}:{value}" for kind, value in certificate.get("subjectAltName", ())]
    for part in certificate.get("subject", ()):
        names += [f"CN:{value}" for kind, value in part if kind == "commonName"]
    return tuple(names)


_KINDS = {"IP Address": "IP"}


async def _finished(step: asyncio.Future[None]) -> None:
    """Wait for a step in a thread, and when cancelled for its end too: it must not outlive its descriptor."""
    try:
        await asyncio.shield(step)
    except asyncio.CancelledError:
        await asyncio.wait((step,))
        raise


async def _ready(tls: TlsSocket, add: object, remove: object) -> None:
    assert callable(add), add
    assert callable(remove), remove
    future = asyncio.get_running_loop().create_future()
    add(tls.fileno(), _resolve, future)
    try:
        await future
    finally:
        remove(tls.fileno())


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
