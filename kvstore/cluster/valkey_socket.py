"""Sockets whose reads and writes together end in time, however slowly the other side sends.

A timeout of a socket counts from its last byte, so a server that sends one now and then could hold a call for ever.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    from kvstore.clock import Clock


class CallLimit(threading.local):
    """When the call ends that this thread makes just now."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ends_at: float | None = None

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """What is read and written in this block, on this thread, is over after so long: TimeoutError."""
        self._ends_at = self._clock.monotonic() + seconds
        try:
            yield
        finally:
            self._ends_at = None

    def left(self, timeout: float | None) -> float | None:
        """What a step may take that by itself has `timeout`; raises TimeoutError where the time is over."""
        if self._ends_at is None or timeout == 0:
            return timeout
        left = self._ends_at - self._clock.monotonic()
        if left <= 0:
            raise TimeoutError("the call took longer than it may")
        return left if timeout is None else min(left, timeout)


class LimitedSocket:
    """A connected socket under a CallLimit; everything else is that of the socket."""

    def __init__(self, connected: socket.socket, limit: CallLimit) -> None:
        self._connected = connected
        self._limit = limit
        self._timeout = connected.gettimeout()

    def recv(self, size: int) -> bytes:
        """See socket.socket."""
        self._connected.settimeout(self._limit.left(self._timeout))
        return self._connected.recv(size)

    def sendall(self, sent: bytes) -> None:
        """See socket.socket."""
        self._connected.settimeout(self._limit.left(self._timeout))
        self._connected.sendall(sent)

    def settimeout(self, seconds: float | None) -> None:
        """See socket.socket; that of one read or write."""
        self._timeout = seconds
        self._connected.settimeout(seconds)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # whatever a socket has
        return getattr(self._connected, name)
