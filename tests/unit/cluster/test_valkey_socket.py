"""Calls of a server that sends a byte now and then: they are over in time all the same."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING

import pytest

from kvstore.clock import SystemClock
from kvstore.cluster.valkey_address import parse_valkey_address
from kvstore.cluster.valkey_link import LinkOptions, ValkeyLink
from kvstore.cluster.valkey_socket import CallLimit, LimitedSocket
from kvstore.errors import DirectoryUnavailableError
from kvstore.testing.manual_clock import ManualClock

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("redis")
TIMEOUT_SECONDS = 0.5


@contextmanager
def dripping_server() -> Iterator[int]:
    """Answers whatever it is asked with a text of a length that never ends to come, a byte at a time."""
    listener = socket.create_server(("127.0.0.1", 0))
    ended = threading.Event()

    def drip(connected: socket.socket) -> None:
        with connected, suppress(OSError):
            connected.sendall(b"$1000000\r\n")
            while not ended.wait(TIMEOUT_SECONDS / 10):
                connected.sendall(b"x")

    def accept() -> None:
        with suppress(OSError):
            while True:
                threads.append(threading.Thread(target=drip, args=(listener.accept()[0],)))
                threads[-1].start()

    threads = [threading.Thread(target=accept)]
    threads[0].start()
    try:
        yield int(listener.getsockname()[1])
    finally:
        ended.set()
        listener.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
        listener.close()


@pytest.mark.parametrize("kind", ["valkey", "valkey+sentinel", "valkey+cluster"])
def test_a_server_that_drips_holds_a_call_no_longer_than_one_that_is_silent(kind: str) -> None:
    with dripping_server() as port:
        address = parse_valkey_address(f"{kind}://127.0.0.1:{port}{'/service' if 'sentinel' in kind else ''}")
        link = ValkeyLink(address, LinkOptions(timeout_seconds=TIMEOUT_SECONDS, retry_seconds=0.0), SystemClock())
        with closing(link):
            for _ in range(2):
                began = time.monotonic()
                with pytest.raises(DirectoryUnavailableError):
                    link.run(("GET", "k"))
                assert time.monotonic() - began < 3 * TIMEOUT_SECONDS + 1.0, "with what a busy machine adds"


def test_a_step_has_what_is_left_of_the_call_and_none_outside_of_one() -> None:
    clock = ManualClock()
    limit = CallLimit(clock)
    assert 5.0 == limit.left(5.0)
    with limit.within(3.0):
        assert (3.0, 1.0, 3.0, 0) == (limit.left(5.0), limit.left(1.0), limit.left(None), limit.left(0))
        clock.advance(2.0)
        assert 1.0 == limit.left(5.0)
        clock.advance(1.0)
        with pytest.raises(TimeoutError, match="longer than it may"):
            limit.left(5.0)
    assert 5.0 == limit.left(5.0)


def test_a_limited_socket_keeps_its_own_timeout() -> None:
    limit = CallLimit(ManualClock())
    ours, theirs = socket.socketpair()
    with ours, theirs:
        limited = LimitedSocket(ours, limit)
        limited.settimeout(0)
        with limit.within(10.0), pytest.raises(BlockingIOError):
            limited.recv(1)
        limited.settimeout(5.0)
        theirs.sendall(b"ab")
        with limit.within(10.0):
            assert b"ab" == limited.recv(2)
            limited.sendall(b"c")
        assert (b"c", ours.fileno()) == (theirs.recv(1), limited.fileno())
