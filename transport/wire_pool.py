"""A client's connections for bytes: opened when they are needed, kept for the next call, one call on each."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING

from kvstore.errors import KvstoreError, UnavailableError
from kvstore.transport import wire
from kvstore.transport.wire_dial import dial
from kvstore.transport.wire_socket import BulkSocket, RowReceiver, chunks, send_chunk

if TYPE_CHECKING:
    from collections.abc import Iterator

    from google.protobuf.message import Message

    from kvstore.transport.address import TcpAddress, UnixAddress
    from kvstore.v1 import cache_service_pb2 as pb

CONNECTIONS_MAX = 8


class Grip:
    """Lets another thread break a transfer off. Thread-safe; `_lock` guards both fields."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._peer: BulkSocket | None = None
        self._cancelled = False

    @property
    def cancelled(self) -> bool:
        """Whether the transfer was broken off."""
        with self._lock:
            return self._cancelled

    def cancel(self) -> None:
        """Let the transfer fail soon; idempotent."""
        with self._lock:
            self._cancelled = True
            if self._peer is not None:
                self._peer.shutdown()

    @contextmanager
    def on(self, peer: BulkSocket) -> Iterator[None]:
        """While the block runs, `peer` is what a cancel breaks."""
        with self._lock:
            if self._cancelled:
                raise ConnectionAbortedError("the transfer was cancelled")
            self._peer = peer
        try:
            yield
        finally:
            with self._lock:
                self._peer = None
            # Broken off just before it ended: the connection is of no use to the next call.
            if self._cancelled:
                raise ConnectionAbortedError("the transfer was cancelled")


class BulkPool:
    """The bulk connections of one session; a kvstore.transport.bulk.BulkCalls over sockets.

    Thread-safe; `_lock` guards `_idle`, `_busy` and `_ended`.
    At most CONNECTIONS_MAX calls run at a time; others wait for their turn as long as their time allows.
    """

    def __init__(self, address: UnixAddress | TcpAddress, session_id: bytes) -> None:
        self._address = address
        self._session_id = session_id
        self._places = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self._lock = threading.Lock()
        self._idle: list[BulkSocket] = []
        self._busy: set[BulkSocket] = set()
        self._ended = False

    def load(
        self, message: pb.LoadRequest, target: memoryview, ends_at: float, grip: Grip | None = None
    ) -> tuple[bytes, int]:
        """Do a Load: rows go straight into `target`. Returns the message that ended it, and how many bytes came."""
        with self._call(wire.Method.Load, message, ends_at, grip) as peer:
            receiver = RowReceiver(peer, 1)
            filled_bytes = 0
            while (header := receiver.next_header()).kind is wire.Kind.DATA:
                filled_bytes += receiver.fill_frame(target[filled_bytes:])
            return self._answer(receiver, header, in_step=True), filled_bytes

    def write(self, message: pb.WriteStart, source: memoryview, ends_at: float, grip: Grip | None = None) -> bytes:
        """Do a Write: the bytes leave straight from `source`. Returns the message that ended it."""
        with self._call(wire.Method.Write, message, ends_at, grip) as peer:
            with suppress(ConnectionError):  # refused meanwhile: why, is still to be read
                for views in chunks([source]):
                    if peer.has_input():
                        break
                    send_chunk(peer, views, 1)
            receiver = RowReceiver(peer, 1)
            return self._answer(receiver, receiver.next_header(), in_step=False)

    def end(self) -> None:
        """End all connections; idempotent. Calls under way fail."""
        with self._lock:
            self._ended = True
            idle, self._idle = self._idle, []
            for peer in self._busy:
                peer.shutdown()
        for peer in idle:
            peer.close()

    def forget(self) -> None:
        """In the child of a fork: let go of the parent's connections without ending them."""
        self._lock = threading.Lock()
        self._ended = True
        for peer in (*self._idle, *self._busy):
            peer.close()

    def _answer(self, receiver: RowReceiver, header: wire.Header, *, in_step: bool) -> bytes:
        """The message of an answer; `in_step` says whether another call may follow should it be an error."""
        body = receiver.body(header)
        if header.kind is wire.Kind.ERROR:
            raise _RefusedError(wire.decode_error(header.code, body, str(self._address)), reusable=in_step)
        if header.kind is not wire.Kind.RESPONSE:
            raise wire.WireFormatError(f"a frame of kind {header.kind.name} came, expected an answer")
        return body

    @contextmanager
    def _call(self, method: wire.Method, message: Message, ends_at: float, grip: Grip | None) -> Iterator[BulkSocket]:
        """A connection on which the request was sent, and a common face for all that may go wrong with it."""
        if not self._places.acquire(timeout=max(0.0, ends_at - time.monotonic())):
            raise UnavailableError(f"{CONNECTIONS_MAX} transfers to {self._address} took all of the deadline")
        try:
            if grip is not None and grip.cancelled:  # nobody waits for a connection to be dialled
                raise ConnectionAbortedError("the transfer was cancelled")
            with self._peer(ends_at) as peer, nullcontext() if grip is None else grip.on(peer):
                left_seconds = max(0.001, ends_at - time.monotonic())
                peer.begin(left_seconds, left_seconds)
                body = message.SerializeToString()
                deadline_ms = wire.deadline_ms_of(left_seconds)
                frame = wire.encode_frame(wire.Kind.REQUEST, body, call_id=1, code=method, deadline_ms=deadline_ms)
                peer.send([memoryview(frame)])
                yield peer
        except _RefusedError as refused:
            raise refused.error from None
        except TimeoutError as err:
            raise UnavailableError(f"no answer from {self._address} within the deadline") from err
        except wire.WireFormatError as err:
            raise UnavailableError(f"{self._address} sent what is no answer: {err}") from err
        except OSError as err:
            cause = err.strerror or str(err)
            raise UnavailableError(f"{self._address} broke off a transfer ({cause})") from err
        finally:
            self._places.release()

    @contextmanager
    def _peer(self, ends_at: float) -> Iterator[BulkSocket]:
        """A connection of our own for a time; it is kept if it is still in step with the server."""
        peer = self._take() or self._open(max(0.001, ends_at - time.monotonic()))
        kept = False
        try:
            yield peer
            kept = True
        except _RefusedError as refused:
            kept = refused.reusable
            raise
        finally:
            self._give_back(peer, kept=kept)

    def _take(self) -> BulkSocket | None:
        with self._lock:
            while self._idle:
                peer = self._idle.pop()
                if not peer.has_input():
                    self._busy.add(peer)
                    return peer
                peer.close()
        return None

    def _open(self, seconds: float) -> BulkSocket:
        connected, _ = dial(self._address, wire.Lane.BULK, self._session_id, seconds)
        peer = BulkSocket(connected)
        with self._lock:
            if self._ended:
                peer.close()
                raise UnavailableError(f"the session with {self._address} has ended, and what it held with it")
            self._busy.add(peer)
        return peer

    def _give_back(self, peer: BulkSocket, *, kept: bool) -> None:
        with self._lock:
            self._busy.discard(peer)
            if kept and not self._ended:
                self._idle.append(peer)
                return
        peer.close()


class _RefusedError(Exception):
    """The server answered with an error, and whether the connection can take another call."""

    def __init__(self, error: KvstoreError, *, reusable: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.reusable = reusable
