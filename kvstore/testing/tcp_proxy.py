"""A TCP proxy that does to what a server sends whatever networks and broken servers do."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

_READ_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Fault:
    """What becomes of the bytes of one connection from byte `after_bytes` on.

    `change` makes other bytes of them; then the connection is `cut`, or `held`: nothing comes any more. With
    `bytes_per_second` they come so slowly.
    """

    after_bytes: int = 0
    change: Callable[[bytes], bytes] | None = None
    cut: bool = False
    held: bool = False
    bytes_per_second: float | None = None


def flipped(sent: bytes) -> bytes:
    """Bytes of which the last one is wrong."""
    return sent[:-1] + bytes((sent[-1] ^ 1,))


class TcpProxy:
    """Passes connections on to a server. A `fault` is that of all bytes that the server sends from then on."""

    def __init__(self, target: str, listen: str = "127.0.0.1:0") -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self.fault: Fault | None = None
        own_host, _, own_port = listen.rpartition(":")
        self._listener = socket.create_server((own_host, int(own_port)))
        self.address = f"{own_host}:{self._listener.getsockname()[1]}"
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept, name="tcp-proxy")]
        self._threads[0].start()

    def close(self) -> None:
        """End all connections and threads; idempotent."""
        self._ended.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut_all()
        for thread in self._threads:
            thread.join()
        for each in self._sockets:
            each.close()

    def cut_all(self) -> None:
        """End the connections that there are."""
        with self._lock:
            for each in self._sockets:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                client = self._listener.accept()[0]
            except OSError:
                return
            try:
                server = socket.create_connection(self._target)
            except OSError:
                client.close()
                continue
            with self._lock:
                self._sockets |= {client, server}
            for pass_on in (self._pass_requests, self._pass_answers):
                thread = threading.Thread(target=self._passing, args=(pass_on, client, server), name="tcp-proxy")
                self._threads.append(thread)
                thread.start()

    def _passing(
        self, pass_on: Callable[[socket.socket, socket.socket], None], client: socket.socket, server: socket.socket
    ) -> None:
        with suppress(OSError):
            pass_on(client, server)
        for each in (client, server):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _pass_requests(self, client: socket.socket, server: socket.socket) -> None:
        while received := client.recv(_READ_BYTES):
            server.sendall(received)

    def _pass_answers(self, client: socket.socket, server: socket.socket) -> None:
        passed_bytes = 0
        while received := server.recv(_READ_BYTES):
            fault = self.fault
            if fault is None or passed_bytes + len(received) <= fault.after_bytes:
                client.sendall(received)
            elif not self._pass_wrong(client, received, max(0, fault.after_bytes - passed_bytes), fault):
                return
            passed_bytes += len(received)

    def _pass_wrong(self, client: socket.socket, received: bytes, good: int, fault: Fault) -> bool:
        client.sendall(received[:good])
        rest = received[good:]
        if fault.change is not None:
            rest = fault.change(rest)
        if fault.held:
            self._ended.wait()
            return False
        if fault.cut:
            return False
        if fault.bytes_per_second is not None:
            self._ended.wait(len(rest) / fault.bytes_per_second)
        client.sendall(rest)
        return True
