"""Requests and answers on one control connection, from any number of threads, without a thread of its own."""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from kvstore.errors import UnavailableError
from kvstore.transport import wire
from kvstore.transport.lookup_frames import read_response, send_now
from kvstore.transport.tls_socket import TlsSocket

if TYPE_CHECKING:
    from collections.abc import Callable

_BUFFER_BYTES = 64 * 1024
_BODY_BYTES_MAX = 128 * 2**20
_CALL_ID_MAX = 2**32 - 1
_TIMEVAL = struct.Struct("@ll")
# One system call waits no longer than this, so that a call with less time left than that ends in time too.
_STEP_SECONDS = 0.05
# Of a request: sent with the interpreter lock kept, which beside a busy thread takes milliseconds to come back.
_AT_ONCE_BYTES = 64 * 1024

Answer = tuple[wire.Kind, int, bytes]  # kind, code and body of a frame


class _Waiter:
    """A call whose answer is awaited. `leads` while its thread reads for all.

    A thread that waits for another one to read does so for `signal`, which is released when there is an answer or its
    thread is to look again. One that reads by itself needs none.
    """

    __slots__ = ("answer", "call_id", "leads", "signal")

    def __init__(self) -> None:
        self.call_id = 0
        self.answer: Answer | None = None
        self.leads = False
        self.signal: threading.Lock | None = None

    def prepared(self) -> threading.Lock:
        """What the thread is to wait for; called with the lock of the exchange held."""
        if self.signal is None:
            self.signal = threading.Lock()
            self.signal.acquire()
        return self.signal

    def wake(self) -> None:
        """Let the thread look again; called with the lock of the exchange held."""
        if self.signal is not None and self.signal.locked():
            self.signal.release()


class Exchange:
    """The client's end of a control connection. Thread-safe.

    Callers read the answers themselves: one of those who wait reads for all, and when it has its own another one goes
    on. So a lone caller changes no thread. `_send_lock` orders what is sent. `_lock` guards `_waiting`, `_reading`,
    `_users` and `ended`; nothing is waited for under it. The buffer belongs to the one who reads. No call outlasts
    its time: what waits in a system call does so for a short step, and at last for what is left.
    """

    def __init__(self, connected: socket.socket, peer: str) -> None:
        self.ended = False
        self._socket = connected
        # Where bytes may be sent as they are; None where they are encrypted first.
        self._descriptor = None if isinstance(connected, TlsSocket) else connected.fileno()
        self._peer = peer
        self._send_lock = threading.Lock()
        self._lock = threading.Lock()
        self._waiting: dict[int, _Waiter] = {}
        self._last_id = 0
        self._reading = False
        self._users = 0
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._begin = 0
        self._end = 0
        connected.setblocking(True)
        times = _TIMEVAL.pack(0, int(_STEP_SECONDS * 1_000_000))
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, times)

    def ask(self, frame: Callable[[int], bytes], ends_at: float) -> Answer:
        """Send the frame that `frame` makes for a call id, and return what is answered.

        Frames are made in the order they are sent. Raises UnavailableError if nothing is answered in time, and if the
        connection ends, which the first that notices makes known to all.
        """
        waiter = _Waiter()
        call_id = self._enter(waiter)
        try:
            self._send(frame, call_id, ends_at)
            self._await(waiter, ends_at)
        finally:
            self._leave(call_id, waiter)
        assert waiter.answer is not None, "awaited and not answered"
        return waiter.answer

    def tell(self, frame: Callable[[int], bytes], seconds: float) -> None:
        """Send a frame whose answer nobody waits for. Raises UnavailableError if that cannot be done in time."""
        waiter = _Waiter()
        call_id = self._enter(waiter)
        try:
            self._send(frame, call_id, time.monotonic() + seconds)
        finally:
            self._leave(call_id, waiter)

    def check(self) -> None:
        """Notice whether the other side has ended the connection."""
        with suppress(UnavailableError):
            waiter = _Waiter()
            call_id = self._enter(waiter)
            try:
                if not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                    self.end()
            except BlockingIOError:
                return
            except OSError:
                self.end()
            finally:
                self._leave(call_id, waiter)

    def end(self) -> None:
        """End the connection; idempotent. Calls under way raise UnavailableError."""
        with self._lock:
            self.ended = True
            for waiter in self._waiting.values():
                waiter.wake()
            if not self._users:
                self._socket.close()
            else:
                with suppress(OSError):  # the other side may have been faster
                    self._socket.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        """In the child of a fork: let go of the parent's connection without ending it; no other thread is there."""
        self._lock = threading.Lock()
        self._send_lock = threading.Lock()
        self.ended = True
        self._socket.close()

    def _enter(self, waiter: _Waiter) -> int:
        """Begin a call: gives its id, and keeps the descriptor from becoming another file's until the call leaves."""
        with self._lock:
            self._check_open()
            self._users += 1
            self._last_id = self._last_id % _CALL_ID_MAX + 1
            while self._last_id in self._waiting:
                self._last_id = self._last_id % _CALL_ID_MAX + 1
            self._waiting[self._last_id] = waiter
            waiter.call_id = self._last_id
            return self._last_id

    def _leave(self, call_id: int, waiter: _Waiter) -> None:
        """End a call; who leaves lets another one read, should it have been its turn."""
        with self._lock:
            self._waiting.pop(call_id, None)
            self._users -= 1
            if waiter.leads:
                self._reading = False
            if self.ended and not self._users:
                self._socket.close()
            self._pass_on()

    def _check_open(self) -> None:
        if self.ended:
            raise UnavailableError(f"the session with {self._peer} has ended, and what it held with it")

    def _pass_on(self) -> None:
        if self._waiting and not self._reading:
            for waiter in self._waiting.values():
                if waiter.answer is None:
                    waiter.wake()
                    return

    def _send(self, frame: Callable[[int], bytes], call_id: int, ends_at: float) -> None:
        lock = self._send_lock
        if not lock.acquire(blocking=False) and not lock.acquire(timeout=max(0.0, ends_at - time.monotonic())):
            raise self._late()
        try:
            self._send_all(frame(call_id), ends_at)
        finally:
            lock.release()

    def _send_all(self, frame: bytes, ends_at: float) -> None:
        """Send a frame; if that breaks off nothing can follow it, and the connection ends."""
        descriptor, sent_bytes = self._descriptor, 0
        try:
            if descriptor is not None and len(frame) <= _AT_ONCE_BYTES:
                sent_bytes = send_now(descriptor, frame)
            while sent_bytes < len(frame):
                sent_bytes += self._send_some(memoryview(frame)[sent_bytes:], ends_at)
        except TimeoutError as err:
            self.end()
            raise self._late() from err
        except OSError as err:
            self.end()
            raise UnavailableError(f"{self._peer} has ended the session ({err.strerror})") from err
        except KeyboardInterrupt:
            self.end()
            raise

    def _send_some(self, unsent: bytes | memoryview, ends_at: float) -> int:
        """Send as much as there is room for, or wait for some. Raises TimeoutError if the time is over."""
        try:
            return self._socket.send(unsent, socket.MSG_DONTWAIT)
        except BlockingIOError:
            left_seconds = ends_at - time.monotonic()
            if left_seconds <= 0:
                raise TimeoutError from None
            self._ready(select.POLLOUT, left_seconds)
            return 0

    def _ready(self, event: int, seconds: float) -> bool:
        poller = select.poll()
        poller.register(self._socket, event)
        return bool(poller.poll(max(1, int(seconds * 1000))))

    def _await(self, waiter: _Waiter, ends_at: float) -> None:
        while True:
            with self._lock:
                if waiter.answer is not None:
                    return
                self._check_open()
                signal = waiter.prepared() if self._reading else None
                if signal is None:
                    waiter.leads = self._reading = True
            if signal is None:
                self._read_for_all(waiter, ends_at)
                return
            if not signal.acquire(timeout=max(0.0, ends_at - time.monotonic())):
                raise self._late()

    def _read_for_all(self, waiter: _Waiter, ends_at: float) -> None:
        try:
            while waiter.answer is None:
                left_seconds = ends_at - time.monotonic()
                if left_seconds <= 0:
                    raise self._late()
                if left_seconds >= _STEP_SECONDS:
                    self._read_some(waiter, 0)
                elif not self._read_some(waiter, socket.MSG_DONTWAIT):
                    self._ready(select.POLLIN, left_seconds)
        except wire.WireFormatError as err:
            self.end()
            raise UnavailableError(f"{self._peer} sent what is no answer: {err}") from err
        except OSError as err:
            self.end()
            raise UnavailableError(f"{self._peer} has ended the session ({err.strerror or err})") from err
        except KeyboardInterrupt:
            self.end()  # how much was read is not known
            raise

    def _read_some(self, waiter: _Waiter, flags: int) -> bool:
        """Read once and hand out what is whole; false if nothing comes before the time of the system call is over."""
        try:
            received_bytes = self._socket.recv_into(self._view[self._end :], 0, flags)
        except BlockingIOError:
            return False
        if not received_bytes:
            raise ConnectionError("connection closed")
        self._end += received_bytes
        body = read_response(self._buffer, self._begin, self._end, waiter.call_id)
        if body is not None:
            waiter.answer = (wire.Kind.RESPONSE, 0, body)  # nobody else sets it, or has to know
            self._end = self._begin
        while self._end - self._begin >= wire.HEADER_BYTES:
            header = wire.decode_header(self._buffer, self._begin, _BODY_BYTES_MAX)
            body_begin = self._begin + wire.HEADER_BYTES
            body_end = body_begin + header.body_bytes
            if body_end > self._end:
                self._make_room(wire.HEADER_BYTES + header.body_bytes)
                return True
            self._hand_out(header, bytes(self._view[body_begin:body_end]))
            self._begin = body_end
        if self._begin == self._end:
            self._begin = self._end = 0
            if len(self._buffer) > _BUFFER_BYTES:
                self._buffer = bytearray(_BUFFER_BYTES)
                self._view = memoryview(self._buffer)
        elif self._end == len(self._buffer):
            self._make_room(wire.HEADER_BYTES)
        return True

    def _make_room(self, frame_bytes: int) -> None:
        if self._begin + frame_bytes > len(self._buffer):
            begun = self._buffer[self._begin : self._end]
            self._buffer = bytearray(max(frame_bytes, _BUFFER_BYTES))
            self._buffer[: len(begun)] = begun
            self._view = memoryview(self._buffer)
            self._begin, self._end = 0, len(begun)

    def _hand_out(self, header: wire.Header, body: bytes) -> None:
        """Give an answer to who waits for it; one that nobody waits for any more is dropped."""
        if header.call_id == 0 and header.kind is wire.Kind.ERROR:
            raise ConnectionError(str(wire.decode_error(header.code, body, self._peer)))
        with self._lock:
            waiter = self._waiting.get(header.call_id)
            if waiter is not None:
                waiter.answer = (header.kind, header.code, body)
                waiter.wake()

    def _late(self) -> UnavailableError:
        return UnavailableError(f"no answer from {self._peer} within the deadline")
