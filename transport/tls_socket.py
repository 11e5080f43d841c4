"""A TLS connection with the face of a plain socket, so that whoever moves bytes need not know which one it has."""

from __future__ import annotations

import select
import socket
import ssl
import struct
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_TIMEVAL = struct.Struct("@ll")


class TlsSocket(ssl.SSLSocket):
    """An SSLSocket that blocks, waits and fails as a plain socket does; from `prepare` on, once the handshake is done.

    - One thread may send while another one receives: OpenSSL allows one call at a time on a connection, so each is
      made without waiting and under `_guard`, and waiting happens outside of it.
    - SO_RCVTIMEO and SO_SNDTIMEO bound a call, which then raises BlockingIOError; `settimeout` raises TimeoutError.
    - MSG_WAITALL, MSG_DONTWAIT and a MSG_PEEK that asks whether there is anything work as on a plain socket.
    - `shutdown` never leaves the socket open for bytes that are not encrypted, as that of SSLSocket may for a moment.
    - What OpenSSL refuses is a ConnectionError.
    """

    _prepared = False

    def prepare(self) -> TlsSocket:
        """Take over; the handshake must be done."""
        super().setblocking(False)
        self._guard = threading.Lock()
        self._receive_seconds: float | None = None
        self._send_seconds: float | None = None
        self._late: type[OSError] = BlockingIOError
        self._waits = False
        self._prepared = True
        return self

    def setblocking(self, flag: bool) -> None:  # a socket's own signature
        """Whether calls wait; they do so for the times that were set."""
        if self._prepared:
            self._waits = flag
        else:
            super().setblocking(flag)

    def settimeout(self, value: float | None) -> None:
        """Bound each call, which raises TimeoutError beyond."""
        if not self._prepared:
            super().settimeout(value)
            return
        self._waits = True
        self._receive_seconds = self._send_seconds = value
        self._late = TimeoutError

    def setsockopt(self, level: int, optname: int, value: Any, *length: int) -> None:  # noqa: ANN401
        """As of a socket; times are kept here, since the kernel's would not bound a call of OpenSSL."""
        if not self._prepared or level != socket.SOL_SOCKET or optname not in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            super().setsockopt(level, optname, value, *length)
            return
        whole, micros = _TIMEVAL.unpack(value)
        seconds = whole + micros / 1_000_000
        if optname == socket.SO_RCVTIMEO:
            self._receive_seconds = seconds
        else:
            self._send_seconds = seconds
        self._late = BlockingIOError

    def send(self, data: Any, flags: int = 0) -> int:  # noqa: ANN401  # bytes or a view of them
        """Send some bytes, one record at most."""
        sent_bytes: int = self._call(lambda: ssl.SSLSocket.send(self, data), flags, self._send_seconds)
        return sent_bytes

    def sendall(self, data: Any, flags: int = 0) -> None:  # noqa: ANN401
        """Send all bytes."""
        unsent = memoryview(data).cast("B")
        while unsent.nbytes:
            unsent = unsent[self.send(unsent, flags) :]

    def sendmsg(self, buffers: Iterable[Any], *_: Any) -> int:  # type: ignore[override]  # noqa: ANN401
        """Send all of the buffers in turn, as far as the time goes; returns the bytes sent.

        For connections that one thread uses at a time: it waits in OpenSSL's stead for many records at once. A record
        takes 9 us, so what Python does for each is kept to one call: `send` and `recv_into` cost 6 to 9 % more CPU.
        """
        ends_at = _after(self._send_seconds)
        sent_bytes = 0
        write = super().write
        for buffer in buffers:
            unsent = memoryview(buffer).cast("B")
            while unsent.nbytes:
                try:
                    step_bytes = write(unsent)
                except ssl.SSLWantWriteError:
                    if not self._is_ready(select.POLLOUT, ends_at):
                        return self._partly(sent_bytes)
                except ssl.SSLError as err:
                    raise _refused(err) from err
                except ValueError as err:
                    raise ConnectionError("the connection was closed") from err
                else:
                    sent_bytes += step_bytes
                    unsent = unsent[step_bytes:]
        return sent_bytes

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        """Receive some bytes; with MSG_PEEK only tell, by a byte that means nothing, that there are some."""
        if not self._prepared:
            return super().recv(buflen, flags)
        if flags & socket.MSG_PEEK:
            return self._peek(flags)
        received: bytes = self._call(lambda: ssl.SSLSocket.recv(self, buflen), flags, self._receive_seconds)
        return received

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:  # noqa: ANN401
        """Receive some bytes into a buffer, one record at most; all that fit with MSG_WAITALL."""
        view = memoryview(buffer).cast("B")
        if nbytes:
            view = view[:nbytes]
        received_bytes: int
        if flags & socket.MSG_WAITALL:
            received_bytes = self.recvmsg_into([view], 0, flags)[0]
        else:
            received_bytes = self._call(lambda: ssl.SSLSocket.recv_into(self, view), flags, self._receive_seconds)
        return received_bytes

    def recvmsg_into(self, buffers: Iterable[Any], *_: Any) -> Any:  # type: ignore[override]  # noqa: ANN401
        """Fill all of the buffers, or as many of their bytes as come in time; returns their number first.

        For connections that one thread uses at a time: it waits inside of OpenSSL's calls, without an exception for
        each record that is not there yet.
        """
        ends_at = _after(self._receive_seconds)
        super().settimeout(self._receive_seconds)
        try:
            return self._fill(buffers, ends_at), [], 0, None
        finally:
            super().setblocking(False)

    def _fill(self, buffers: Iterable[Any], ends_at: float | None) -> int:
        received_bytes = 0
        read = super().read
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            while view.nbytes:
                try:
                    step_bytes: int = read(view.nbytes, view)  # type: ignore[assignment]  # into a buffer: their number
                except TimeoutError:
                    return self._partly(received_bytes)
                except ssl.SSLError as err:
                    raise _refused(err) from err
                except ValueError as err:
                    raise ConnectionError("the connection was closed") from err
                if not step_bytes:
                    return received_bytes
                received_bytes += step_bytes
                view = view[step_bytes:]
                if view.nbytes and ends_at is not None and time.monotonic() > ends_at:
                    return received_bytes  # by little and little is late, too
        return received_bytes

    def _partly(self, done_bytes: int) -> int:
        """What is told of a call whose time is over."""
        if not done_bytes:
            raise self._late("nothing moved in time")
        return done_bytes

    def shutdown(self, how: int) -> None:
        """End both directions below TLS: from any thread, and nothing leaves in the clear behind it."""
        socket.socket.shutdown(self, how)

    def _peek(self, flags: int) -> bytes:
        """A byte if there is something to receive, none at the end."""
        with self._guard:
            if self.pending():
                return b"\0"
        return socket.socket.recv(self, 1, flags)

    def _call(self, step: Callable[[], Any], flags: int, seconds: float | None) -> Any:  # noqa: ANN401
        """Make a call of OpenSSL, waiting for the socket in between as long as it may."""
        if not self._prepared:
            return step()
        ends_at: float | None = None
        while True:
            try:
                with self._guard:
                    return step()
            except ssl.SSLWantReadError:
                wanted = select.POLLIN
            except ssl.SSLWantWriteError:
                wanted = select.POLLOUT
            except ssl.SSLError as err:
                raise _refused(err) from err
            if not self._waits or flags & socket.MSG_DONTWAIT:
                raise BlockingIOError("the TLS connection is not ready")
            ends_at = ends_at or _after(seconds)
            if not self._is_ready(wanted, ends_at):
                raise self._late("nothing moved in time")

    def _is_ready(self, wanted: int, ends_at: float | None) -> bool:
        """Wait for the socket; false if the time is over."""
        fd = self.fileno()
        if fd < 0:
            raise ConnectionError("the connection was closed")
        poll = select.poll()
        poll.register(fd, wanted)
        milliseconds = None if ends_at is None else max(0.0, (ends_at - time.monotonic()) * 1000)
        return bool(poll.poll(milliseconds))


def _after(seconds: float | None) -> float | None:
    return None if seconds is None else time.monotonic() + seconds


def _refused(err: ssl.SSLError) -> ConnectionError:
    return ConnectionError(err.errno, f"TLS: {err.reason or err}")
