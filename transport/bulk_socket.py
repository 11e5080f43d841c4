"""The rows of one call as frames on its socket: the transport that is always there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.transport.wire_socket import BulkSocket, RowReceiver, send_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvstore.transport.bulk_memory import RowDigests

_SKIP_BYTES = 2**20


class SocketTransport:
    """A kvstore.transport.bulk.BulkTransport over DATA frames of one call.

    `hasher` makes digests of the rows that are sent, for clients that trust neither TCP's checksum nor what lies
    between: a pass over the rows at about 10 GB/s, just before they are sent.
    """

    def __init__(self, peer: BulkSocket, call_id: int, hasher: RowDigests | None = None) -> None:
        self._peer = peer
        self._call_id = call_id
        self._receiver = RowReceiver(peer, call_id)
        self._hasher = hasher
        self._digests: list[int] = []

    @property
    def digests(self) -> Sequence[int]:
        """Of each row that was sent, where they were asked for."""
        return tuple(self._digests)

    def send(self, pieces: Iterable[memoryview]) -> int:
        """Send the next rows straight from where they lie."""
        return send_rows(self._peer, pieces if self._hasher is None else self._digested(pieces), self._call_id)

    def _digested(self, pieces: Iterable[memoryview]) -> Iterator[memoryview]:
        assert self._hasher is not None, "asked for"
        for piece in pieces:
            self._digests += self._hasher.take(piece)
            yield piece

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
