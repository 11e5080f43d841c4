"""The rows of one call as frames on its socket: the transport that is always there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.transport.wire_socket import BulkSocket, RowReceiver, send_rows

if TYPE_CHECKING:
    from collections.abc import Iterable

_SKIP_BYTES = 2**20


class SocketTransport:
    """A kvstore.transport.bulk.BulkTransport over DATA frames of one call."""

    def __init__(self, peer: BulkSocket, call_id: int) -> None:
        self._peer = peer
        self._call_id = call_id
        self._receiver = RowReceiver(peer, call_id)

    @property
    def digests(self) -> tuple[int, ...]:
        """None: TCP, TLS and the kernel check what they carry."""
        return ()

    def send(self, pieces: Iterable[memoryview]) -> int:
        """Send the next rows straight from where they lie."""
        return send_rows(self._peer, pieces, self._call_id)

    def fill(self, pieces: Iterable[memoryview]) -> None:
        """Receive the next rows straight to where they belong."""
        self._receiver.fill(pieces)

    def skip(self, size_bytes: int) -> None:
        """Take rows that nobody wants off the wire."""
        if size_bytes:
            scratch = memoryview(bytearray(min(size_bytes, _SKIP_BYTES)))
            for done_bytes in range(0, size_bytes, _SKIP_BYTES):
                self._receiver.fill([scratch[: size_bytes - done_bytes]])

    def finish(self) -> None:
        """Raises WireFormatError if the last frame holds more than was announced."""
        self._receiver.finish()
