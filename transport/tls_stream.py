"""TLS connections without a thread of their own: control connections in the event loop, those that go on to gRPC."""

from __future__ import annotations

import asyncio
import select
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.transport.tls_socket import TlsSocket

_READS_AT_ONCE = 16
_PAUSE_BYTES = 64 * 1024
PASSAGE_BYTES = 64 * 1024
_READ = select.EPOLLIN | select.EPOLLRDHUP


class TlsTransport(asyncio.Transport):
    """What asyncio's own transport is to a BufferedProtocol, over a TlsSocket whose handshake is done.

    Beyond _PAUSE_BYTES that the other side does not take, the protocol is asked to write no more.
    """

    def __init__(self, connected: TlsSocket, protocol: asyncio.BufferedProtocol) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._socket = connected
        self._protocol = protocol
        self._unsent = bytearray()
        self._closing = False
        self._lost = False
        self._reading = False
        self._write_paused = False
        connected.setblocking(False)
        protocol.connection_made(self)
        self.resume_reading()

    def is_closing(self) -> bool:
        """Whether the connection is over, or ends once all is sent."""
        return self._closing

    def pause_reading(self) -> None:
        """Receive nothing for now."""
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._socket.fileno())

    def resume_reading(self) -> None:
        """Receive again; what OpenSSL has decrypted already wakes nobody, so it is looked for at once."""
        if not self._reading and not self._closing:
            self._reading = True
            self._loop.add_reader(self._socket.fileno(), self._on_readable)
            self._loop.call_soon(self._on_readable)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send now what goes, and the rest as soon as it does."""
        if self._lost:
            return
        was_empty = not self._unsent
        self._unsent += data
        if was_empty:
            self._send_some()
            if self._unsent and not self._lost:
                self._loop.add_writer(self._socket.fileno(), self._on_writable)
        if len(self._unsent) > _PAUSE_BYTES and not self._write_paused:
            self._write_paused = True
            self._protocol.pause_writing()

    def close(self) -> None:
        """End the connection once all is sent; idempotent."""
        if self._closing:
            return
        self.pause_reading()
        self._closing = True
        if not self._unsent:
            self._lose(None)

    def abort(self) -> None:
        """End the connection at once; idempotent."""
        self._lose(None)

    def _on_readable(self) -> None:
        for _ in range(_READS_AT_ONCE):
            if not self._reading or self._lost:
                return
            try:
                received_bytes = self._socket.recv_into(self._protocol.get_buffer(-1))
            except BlockingIOError:
                return
            except OSError as err:
                self._lose(err)
                return
            if not received_bytes:
                self._lose(None)
                return
            self._protocol.buffer_updated(received_bytes)
        self._loop.call_soon(self._on_readable)

    def _on_writable(self) -> None:
        self._send_some()
        if self._lost or self._unsent:
            return
        self._loop.remove_writer(self._socket.fileno())
        if self._closing:
            self._lose(None)
        elif self._write_paused:
            self._write_paused = False
            self._protocol.resume_writing()

    def _send_some(self) -> None:
        try:
            while self._unsent:
                with memoryview(self._unsent) as view:
                    sent_bytes = self._socket.send(view)
                del self._unsent[:sent_bytes]
        except BlockingIOError:
            return
        except OSError as err:
            self._lose(err)

    def _lose(self, error: Exception | None) -> None:
        """The connection is over; the protocol is told soon, as asyncio does, and not from within a call of its own."""
        if self._lost:
            return
        self.pause_reading()
        self._closing = self._lost = True
        self._loop.remove_writer(self._socket.fileno())
        self._unsent.clear()
        self._loop.call_soon(self._end, error)

    def _end(self, error: Exception | None) -> None:
        try:
            self._protocol.connection_lost(error)
        finally:
            self._socket.close()


class TlsPassage:
    """A client's TLS connection and the plain one to gRPC. Used by one thread alone, which lends `scratch` to all."""

    def __init__(self, client: TlsSocket, inner: socket.socket, scratch: memoryview) -> None:
        client.setblocking(False)
        self.sockets: tuple[TlsSocket, socket.socket] = (client, inner)
        self._flows = (_Flow(client, inner, scratch), _Flow(inner, client, scratch))

    def move(self, fd: int, events: int) -> bool:  # noqa: ARG002  # the same for each
        """Move what there is, both ways; false once the connection is over."""
        try:
            for flow in self._flows:
                flow.move()
        except OSError:
            return False
        gone = events & (select.EPOLLHUP | select.EPOLLERR)
        return not gone and not all(flow.ended for flow in self._flows)

    def interests(self) -> tuple[int, int]:
        """What to wait for on each socket: input where there is room for it, output where something is held."""
        inward, outward = self._flows
        return _interest(inward, outward), _interest(outward, inward)

    def close(self) -> None:
        """End both connections."""
        for connected in self.sockets:
            connected.close()


class _Flow:
    """One direction. What the other side does not take yet is `held`, in memory of its own; nothing is otherwise."""

    def __init__(self, source: socket.socket, target: socket.socket, scratch: memoryview) -> None:
        self._source = source
        self._target = target
        self._scratch = scratch
        self.held = memoryview(b"")
        self.ended = False

    def move(self) -> None:
        """Move until one side would have to wait; raises OSError where a side is gone."""
        self.held = self._send(self.held)
        while not self.ended and not self.held.nbytes:
            try:
                received_bytes = self._source.recv_into(self._scratch)
            except BlockingIOError:
                return
            if not received_bytes:
                self.ended = True
                self._target.shutdown(socket.SHUT_WR)
                return
            unsent = self._send(self._scratch[:received_bytes])
            if unsent.nbytes:
                self.held = memoryview(bytes(unsent))

    def _send(self, unsent: memoryview) -> memoryview:
        """What is left once the other side takes no more."""
        while unsent.nbytes:
            try:
                unsent = unsent[self._target.send(unsent) :]
            except BlockingIOError:
                break
        return unsent


def _interest(reading: _Flow, writing: _Flow) -> int:
    wanted = 0 if reading.held.nbytes or reading.ended else _READ
    return wanted | (select.EPOLLOUT if writing.held.nbytes else 0)
