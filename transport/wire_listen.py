"""Listening for both lanes: the first bytes of a connection tell which one it wants."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from typing import TYPE_CHECKING

from kvstore.transport import wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.transport.wire_lane import WireLane
    from kvstore.transport.wire_splice import Passages

logger = logging.getLogger(__name__)
# The first bytes come at once, since clients send them without being asked.
FIRST_BYTES_SECONDS = 5.0
_HTTP2_TELLS_BYTES = 4
_ACCEPTS_AT_ONCE = 64
_PAUSE_SECONDS = 0.1
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Listener:
    """Accepts connections and hands each to its lane. Used from the event loop of its server only."""

    def __init__(self, sockets: Sequence[socket.socket], lane: WireLane, grpc: Passages, connections_max: int) -> None:
        self._sockets = list(sockets)
        self._lane = lane
        self._grpc = grpc
        self._connections_max = connections_max
        self._undecided: set[_Undecided] = set()

    @property
    def undecided(self) -> int:
        """Connections that have not said yet what they are."""
        return len(self._undecided)

    def start(self) -> None:
        """Begin to accept; to be called in the event loop."""
        loop = asyncio.get_running_loop()
        for listening in self._sockets:
            loop.add_reader(listening.fileno(), self._accept, listening)

    def stop(self) -> None:
        """Accept no more, and drop who has not said what it is; idempotent. The sockets stay their owner's."""
        loop = asyncio.get_running_loop()
        for listening in self._sockets:
            loop.remove_reader(listening.fileno())
        self._sockets.clear()
        for undecided in tuple(self._undecided):
            undecided.drop()

    def decided(self, undecided: _Undecided) -> None:
        """A connection is no longer undecided."""
        self._undecided.discard(undecided)

    def hand_over(self, connected: socket.socket, received: bytes) -> None:
        """Give a connection that has told what it is to its lane."""
        if received.startswith(wire.MAGIC):
            self._lane.welcome(connected, received)
        else:
            self._grpc.add(connected, received)

    def refuse_foreign(self) -> None:
        """Count a connection that is of no lane."""
        self._lane.refuse("foreign")

    def refuse_slow(self) -> None:
        """Count a connection that did not say in time what it is."""
        self._lane.refuse("slow")

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                connected, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as err:
                if err.errno in _OUT_OF_DESCRIPTORS:
                    self._pause(listening, err)
                return
            if self._lane.connections + self._grpc.count + self.undecided >= self._connections_max:
                self._lane.refuse("full")
                connected.close()
                continue
            self._undecided.add(_Undecided(connected, self))

    def _pause(self, listening: socket.socket, err: OSError) -> None:
        """Without descriptors the connection stays in the queue and would wake the loop for ever."""
        logger.warning("cannot accept connections for now, raise the limit of open files: cause=%s", err.strerror)
        self._lane.refuse("full")
        loop = asyncio.get_running_loop()
        loop.remove_reader(listening.fileno())
        loop.call_later(_PAUSE_SECONDS, self._resume, listening)

    def _resume(self, listening: socket.socket) -> None:
        if listening in self._sockets:
            asyncio.get_running_loop().add_reader(listening.fileno(), self._accept, listening)


class _Undecided:
    """A connection whose first bytes are awaited."""

    def __init__(self, connected: socket.socket, listener: Listener) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._listener = listener
        self._received = b""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(FIRST_BYTES_SECONDS, self._give_up)
        loop.add_reader(connected.fileno(), self._on_readable)

    def drop(self) -> None:
        """Close the connection."""
        self._let_go()
        self._socket.close()

    def _give_up(self) -> None:
        self._listener.refuse_slow()
        self.drop()

    def _on_readable(self) -> None:
        try:
            received = self._socket.recv(wire.CLIENT_HELLO_BYTES - len(self._received))
        except BlockingIOError:
            return
        except OSError:
            received = b""
        self._received += received
        if not received:
            self.drop()
        elif _is_decided(self._received):
            self._let_go()
            self._listener.hand_over(self._socket, self._received)
        elif not _may_become_one_of_ours(self._received):
            self._listener.refuse_foreign()
            self.drop()

    def _let_go(self) -> None:
        self._timer.cancel()
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._listener.decided(self)


def _is_decided(received: bytes) -> bool:
    if received.startswith(wire.MAGIC):
        return len(received) == wire.CLIENT_HELLO_BYTES
    return len(received) >= _HTTP2_TELLS_BYTES and wire.HTTP2_PREFACE.startswith(received[: len(wire.HTTP2_PREFACE)])


def _may_become_one_of_ours(received: bytes) -> bool:
    for first_bytes in (wire.MAGIC, wire.HTTP2_PREFACE):
        shared = min(len(received), len(first_bytes))
        if received[:shared] == first_bytes[:shared]:
            return True
    return False
