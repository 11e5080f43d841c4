"""Listening for both lanes: the first bytes of a connection, decrypted where there is TLS, tell which one it wants."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.transport import wire
from kvstore.transport.principal import Carrier, Origin
from kvstore.transport.tls import certificate_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.transport.listen import Door
    from kvstore.transport.tls import ServerTls
    from kvstore.transport.wire_lane import WireLane
    from kvstore.transport.wire_splice import Passages

logger = logging.getLogger(__name__)
# The first bytes come at once, since clients send them without being asked.
FIRST_BYTES_SECONDS = 5.0
_HTTP2_TELLS_BYTES = 4
_ACCEPTS_AT_ONCE = 64
_PAUSE_SECONDS = 0.1
_PEERCRED = struct.Struct("3i")  # pid, uid, gid
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(frozen=True, slots=True)
class Lanes:
    """Where connections go, and by what TLS begins."""

    wire: WireLane
    grpc: Passages
    tls: ServerTls | None


class Listener:
    """Accepts connections and hands each to its lane. Used from the event loop of its server only."""

    def __init__(self, doors: Sequence[Door], lanes: Lanes, connections_max: int) -> None:
        self._doors = list(doors)
        self._lane = lanes.wire
        self._grpc = lanes.grpc
        self._tls = lanes.tls
        self._connections_max = connections_max
        self._undecided: set[_Undecided] = set()
        self._handshakes: set[asyncio.Task[None]] = set()

    @property
    def undecided(self) -> int:
        """Connections that have not said yet what they are."""
        return len(self._undecided) + len(self._handshakes)

    def start(self) -> None:
        """Begin to accept; to be called in the event loop."""
        loop = asyncio.get_running_loop()
        for door in self._doors:
            loop.add_reader(door.socket.fileno(), self._accept, door)

    async def stop(self) -> None:
        """Accept no more, and drop who has not said what it is; idempotent. The sockets stay their owner's."""
        loop = asyncio.get_running_loop()
        for door in self._doors:
            loop.remove_reader(door.socket.fileno())
        self._doors.clear()
        for undecided in tuple(self._undecided):
            undecided.drop()
        for handshake in tuple(self._handshakes):
            handshake.cancel()
        if self._handshakes:
            await asyncio.wait(self._handshakes)

    def decided(self, undecided: _Undecided) -> None:
        """A connection is no longer undecided."""
        self._undecided.discard(undecided)

    def hand_over(self, connected: socket.socket, received: bytes, origin: Origin) -> None:
        """Give a connection that has told what it is to its lane."""
        if received.startswith(wire.MAGIC):
            self._lane.welcome(connected, received, origin)
        else:
            self._grpc.add(connected, received, origin)

    def refuse_foreign(self) -> None:
        """Count a connection that is of no lane."""
        self._lane.refuse("foreign")

    def refuse_slow(self) -> None:
        """Count a connection that did not say in time what it is."""
        self._lane.refuse("slow")

    def _accept(self, door: Door) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                connected, _ = door.socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as err:
                if err.errno in _OUT_OF_DESCRIPTORS:
                    self._pause(door, err)
                return
            if self._lane.connections + self._grpc.count + self.undecided >= self._connections_max:
                self._lane.refuse("full")
                connected.close()
                continue
            self._begin(connected, door)

    def _begin(self, connected: socket.socket, door: Door) -> None:
        if door.tls:
            handshake = asyncio.get_running_loop().create_task(self._shake_hands(connected, door))
            self._handshakes.add(handshake)
            handshake.add_done_callback(self._handshakes.discard)
        else:
            self._undecided.add(_Undecided(connected, self, door, _origin_of(connected)))

    async def _shake_hands(self, connected: socket.socket, door: Door) -> None:
        """TLS first, within the time that a plain connection has for its first bytes."""
        assert self._tls is not None, "an address of TLS was bound without a certificate"
        try:
            async with asyncio.timeout(FIRST_BYTES_SECONDS):
                tls = await self._tls.handshake(connected)
        except TimeoutError:
            self.refuse_slow()
        except OSError as err:
            # Whoever speaks no TLS, or shows no certificate or a wrong one. Once a line would be enough to flood a log.
            logger.debug("TLS was not agreed on: cause=%s", getattr(err, "reason", None) or err.strerror)
            self._lane.refuse("tls")
        else:
            undecided = _Undecided(tls, self, door, Origin(Carrier.TLS, certificate_names=certificate_names(tls)))
            self._undecided.add(undecided)
            undecided.look()

    def _pause(self, door: Door, err: OSError) -> None:
        """Without descriptors the connection stays in the queue and would wake the loop for ever."""
        logger.warning("cannot accept connections for now, raise the limit of open files: cause=%s", err.strerror)
        self._lane.refuse("full")
        loop = asyncio.get_running_loop()
        loop.remove_reader(door.socket.fileno())
        loop.call_later(_PAUSE_SECONDS, self._resume, door)

    def _resume(self, door: Door) -> None:
        if door in self._doors:
            asyncio.get_running_loop().add_reader(door.socket.fileno(), self._accept, door)


class _Undecided:
    """A connection whose first bytes are awaited."""

    def __init__(self, connected: socket.socket, listener: Listener, door: Door, origin: Origin) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._listener = listener
        self._door = door
        self._origin = origin
        self._received = b""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(FIRST_BYTES_SECONDS, self._give_up)
        loop.add_reader(connected.fileno(), self.look)

    def drop(self) -> None:
        """Close the connection."""
        self._let_go()
        self._socket.close()

    def _give_up(self) -> None:
        self._listener.refuse_slow()
        self.drop()

    def look(self) -> None:
        """Receive what there is and decide, if that is enough."""
        while not self._decide():
            try:
                received = self._socket.recv(wire.CLIENT_HELLO_BYTES - len(self._received))
            except BlockingIOError:
                return
            except OSError:
                received = b""
            self._received += received
            if not received:
                self.drop()
                return

    def _decide(self) -> bool:
        """Hand the connection over, or end it; false if more bytes are needed for either."""
        if not _may_become_one_of_ours(self._received) or (
            self._door.grpc_only and self._received[:1] == wire.MAGIC[:1]
        ):
            self._listener.refuse_foreign()
            self.drop()
        elif _is_decided(self._received):
            self._let_go()
            self._listener.hand_over(self._socket, self._received, self._origin)
        else:
            return False
        return True

    def _let_go(self) -> None:
        self._timer.cancel()
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._listener.decided(self)


def _origin_of(connected: socket.socket) -> Origin:
    if connected.family != socket.AF_UNIX:
        return Origin(Carrier.LOOPBACK)
    _, uid, _ = _PEERCRED.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size))
    return Origin(Carrier.UNIX, same_user=uid == os.geteuid())


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
