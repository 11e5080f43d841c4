"""Connections that turn out to be gRPC's, passed on to gRPC's own listener.

gRPC for Python listens by itself and takes no connection from elsewhere, so one thread moves the bytes of those that
came to an address of both lanes between their client and a private socket of gRPC, by splice(2): no byte is copied to
this program. See https://man7.org/linux/man-pages/man2/splice.2.html. Those of TLS are decrypted on their way.

The socket that a connection is passed on by has a name of its own (in the abstract namespace of unix(7)), which gRPC
tells with each call as its peer. So a call is known to come from that connection.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import select
import socket
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore.transport.tls_socket import TlsSocket
from kvstore.transport.tls_stream import PASSAGE_BYTES, TlsPassage

if TYPE_CHECKING:
    from kvstore.transport.admission import Origins
    from kvstore.transport.principal import Origin

logger = logging.getLogger(__name__)

_PIPE_BYTES = 256 * 1024
_EVENTS_MAX = 64
_READ = select.EPOLLIN | select.EPOLLRDHUP
_FLAGS = os.SPLICE_F_MOVE | os.SPLICE_F_NONBLOCK


def _pipe() -> tuple[int, int]:
    pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    with contextlib.suppress(OSError):  # a user's share of large pipes may be used up; the default size works too
        fcntl.fcntl(pipe[1], fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return pipe


@dataclass(eq=False)
class _Flow:
    """One direction: bytes go from `source` through a pipe to `target`."""

    source: socket.socket
    target: socket.socket
    pipe: tuple[int, int] = field(default_factory=_pipe)
    held_bytes: int = 0  # in the pipe
    ended: bool = False

    def move(self) -> None:
        """Move what is there without waiting; epoll tells if there is more. Raises OSError where a side is gone."""
        if not self.ended and (self.held_bytes or self._fill()):
            self._drain()

    def close(self) -> None:
        for end in self.pipe:
            os.close(end)

    def _fill(self) -> bool:
        try:
            self.held_bytes = os.splice(self.source.fileno(), self.pipe[1], _PIPE_BYTES, flags=_FLAGS)
        except BlockingIOError:
            return False
        if not self.held_bytes:
            self.ended = True
            with contextlib.suppress(OSError):
                self.target.shutdown(socket.SHUT_WR)
        return not self.ended

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self.held_bytes -= os.splice(self.pipe[0], self.target.fileno(), self.held_bytes, flags=_FLAGS)


class _Passage:
    """One client's connection and the one to gRPC. Used by the thread alone."""

    def __init__(self, client: socket.socket, inner: socket.socket) -> None:
        self.sockets = (client, inner)
        self.flows = (_Flow(client, inner), _Flow(inner, client))

    def move(self, fd: int, events: int) -> bool:
        """Do what a socket is ready for; false once the connection is over."""
        reading, writing = self.flows if fd == self.sockets[0].fileno() else reversed(self.flows)
        try:
            if events & ~select.EPOLLOUT:
                reading.move()
            if events & select.EPOLLOUT:
                writing.move()
        except OSError:
            return False
        gone = reading.ended and events & (select.EPOLLHUP | select.EPOLLERR)  # told again and again from now on
        return not gone and not (reading.ended and writing.ended)

    def interests(self) -> tuple[int, int]:
        """What to wait for on each socket: input where there is room for it, output where something is held."""
        inward, outward = self.flows
        return _interest(inward, outward), _interest(outward, inward)

    def close(self) -> None:
        for connected in self.sockets:
            connected.close()
        for flow in self.flows:
            flow.close()


class Passages:
    """All connections that are passed on, served by one thread. `add` may be called from any thread.

    `_lock` guards `_new`, `_names` and `_stopping`; everything else belongs to the thread.
    """

    thread_name = "kvstore-splice"

    def __init__(self, inner: int, origins: Origins) -> None:
        """`inner` is a descriptor of the socket file that gRPC listens on; it belongs to this object from now on."""
        self._inner = inner
        self._origins = origins
        self._lock = threading.Lock()
        self._new: list[_Passage | TlsPassage] = []
        self._names: dict[_Passage | TlsPassage, str] = {}
        self._stopping = False
        self.failures = 0  # connections that failed with an error that is none of the sockets'
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._by_fd: dict[int, tuple[_Passage | TlsPassage, int]] = {}
        self._scratch = memoryview(bytearray(PASSAGE_BYTES))
        self._thread = threading.Thread(target=self._run, name=self.thread_name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether connections are passed on; they are from the first moment until stop()."""
        return self._thread.is_alive() or self._stopping

    @property
    def count(self) -> int:
        """Connections that are passed on now."""
        return len(self._by_fd) // 2

    def add(self, client: socket.socket, received: bytes, origin: Origin) -> None:
        """Pass a connection on, beginning with what was received of it; it belongs to this object from now on."""
        name = f"kvstore-{secrets.token_hex(16)}"
        inner = socket.socket(socket.AF_UNIX)
        inner.setblocking(False)
        self._origins.add(name, origin)
        try:
            inner.bind(f"\0{name}")
            inner.connect(f"/proc/self/fd/{self._inner}")
            inner.sendall(received)
            client.setblocking(False)
            passage = self._passage(client, inner)
        except OSError:
            self._origins.remove(name)
            inner.close()
            client.close()
            return
        with self._lock:
            self._names[passage] = name
            self._new.append(passage)
        os.eventfd_write(self._wake, 1)

    def _passage(self, client: socket.socket, inner: socket.socket) -> _Passage | TlsPassage:
        if isinstance(client, TlsSocket):
            return TlsPassage(client, inner, self._scratch)
        return _Passage(client, inner)

    def stop(self) -> None:
        """End all connections and the thread; idempotent."""
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        for passage in {passage for passage, _ in self._by_fd.values()} | set(self._new):
            self._close(passage)
        self._by_fd.clear()
        self._epoll.close()
        os.close(self._wake)
        os.close(self._inner)

    def _run(self) -> None:
        while True:
            ready = self._epoll.poll(maxevents=_EVENTS_MAX)
            if any(fd == self._wake for fd, _ in ready) and not self._take_new():
                return
            for fd, events in ready:
                if fd in self._by_fd:
                    self._step_safely(self._by_fd[fd][0], fd, events)

    def _take_new(self) -> bool:
        os.eventfd_read(self._wake)
        with self._lock:
            new, self._new = self._new, []
            if self._stopping:
                self._new = new
                return False
        for passage in new:
            for connected in passage.sockets:
                self._epoll.register(connected.fileno(), _READ)
                self._by_fd[connected.fileno()] = (passage, _READ)
            if isinstance(passage, TlsPassage):  # what was decrypted already wakes nobody
                self._step_safely(passage, passage.sockets[0].fileno(), 0)
        return True

    def _step_safely(self, passage: _Passage | TlsPassage, fd: int, events: int) -> None:
        """The root of what happens on one connection: whatever goes wrong there ends that one and no other."""
        try:
            self._step(passage, fd, events)
        except Exception:
            logger.exception("a connection to gRPC failed and was ended")
            self.failures += 1
            self._forget(passage)

    def _forget(self, passage: _Passage | TlsPassage) -> None:
        for connected in passage.sockets:
            self._epoll.unregister(connected.fileno())
            del self._by_fd[connected.fileno()]
        self._close(passage)

    def _close(self, passage: _Passage | TlsPassage) -> None:
        passage.close()
        with self._lock:
            name = self._names.pop(passage)
        self._origins.remove(name)

    def _step(self, passage: _Passage | TlsPassage, fd: int, events: int) -> None:
        if not passage.move(fd, events):
            self._forget(passage)
            return
        for connected, wanted in zip(passage.sockets, passage.interests(), strict=True):
            if self._by_fd[connected.fileno()][1] != wanted:
                self._epoll.modify(connected.fileno(), wanted)
                self._by_fd[connected.fileno()] = (passage, wanted)


def _interest(reading: _Flow, writing: _Flow) -> int:
    wanted = 0 if reading.held_bytes or reading.ended else _READ
    return wanted | (select.EPOLLOUT if writing.held_bytes else 0)
