"""Bytes of passed-on connections: all of them, both ways, half-closed too, and nothing left behind."""

from __future__ import annotations

import os
import socket
import threading
from typing import TYPE_CHECKING

import pytest

from kvstore.testing.patience import ANSWER_SECONDS, wait_until
from kvstore.transport import wire_splice
from kvstore.transport.admission import Origins
from kvstore.transport.principal import Carrier, Origin
from kvstore.transport.wire_splice import Passages

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ORIGIN = Origin(Carrier.TLS, certificate_names=("CN:somebody",))


class Inner:
    """Where passages lead: a listening socket without a name."""

    def __init__(self, path: Path) -> None:
        self.listening = socket.socket(socket.AF_UNIX)
        self.listening.bind(str(path))
        self.listening.listen()
        self.listening.settimeout(ANSWER_SECONDS)
        self.origins = Origins()
        self.passages = Passages(os.open(path, os.O_PATH | os.O_CLOEXEC), self.origins)
        path.unlink()

    def connect(self, received: bytes = b"") -> tuple[socket.socket, socket.socket]:
        """A client's end, and the inner end of its passage, which begins with what was received."""
        client, ours = socket.socketpair()
        self.passages.add(ours, received, ORIGIN)
        inner, self.peer = self.listening.accept()
        for end in (client, inner):
            end.settimeout(ANSWER_SECONDS)
        return client, inner


@pytest.fixture
def inner(tmp_path: Path) -> Iterator[Inner]:
    made = Inner(tmp_path / "s")
    yield made
    made.passages.stop()
    made.listening.close()


def receive(connected: socket.socket, size: int) -> bytes:
    raw = b""
    while len(raw) < size and (received := connected.recv(size - len(raw))):
        raw += received
    return raw


def test_what_was_received_already_comes_first(inner: Inner):
    client, there = inner.connect(b"PRI ")
    client.sendall(b"* HTTP/2.0")
    there.sendall(b"answer")
    assert (b"PRI * HTTP/2.0", b"answer") == (receive(there, 14), receive(client, 6))
    client.close()
    there.close()


def test_where_a_connection_comes_from_is_known_by_its_name_while_it_lasts(inner: Inner):
    client, there = inner.connect()
    peer = f"unix-abstract:{inner.peer[1:].decode()}"
    assert ORIGIN == inner.origins.of(peer)
    client.close()
    there.close()
    wait_until(lambda: inner.origins.of(peer) == Origin(Carrier.LOOPBACK))


def test_more_than_any_buffer_holds_crosses_both_ways_at_once(inner: Inner):
    data = os.urandom(5 * 2**20)
    client, there = inner.connect()
    senders = [threading.Thread(target=end.sendall, args=(data,)) for end in (client, there)]
    found: list[bytes] = []
    takers = [threading.Thread(target=lambda end=end: found.append(receive(end, len(data)))) for end in (client, there)]
    for thread in (*senders, *takers):
        thread.start()
    for thread in (*senders, *takers):
        thread.join()
    assert [data, data] == found
    client.close()
    there.close()


def test_a_side_that_has_said_all_can_still_be_answered(inner: Inner):
    client, there = inner.connect()
    client.sendall(b"question")
    client.shutdown(socket.SHUT_WR)
    assert b"question" == receive(there, 100)
    there.sendall(b"answer")
    there.close()
    assert b"answer" == receive(client, 100)
    client.close()
    wait_until(lambda: inner.passages.count == 0)


@pytest.mark.parametrize("side", [0, 1])
def test_the_end_of_one_side_is_the_end_of_the_other(inner: Inner, side: int):
    ends = inner.connect()
    ends[side].close()
    assert b"" == ends[1 - side].recv(1)
    ends[1 - side].close()
    wait_until(lambda: inner.passages.count == 0)


def test_a_client_that_is_gone_costs_nothing_while_the_other_side_stays(inner: Inner):
    client, there = inner.connect()
    client.close()
    wait_until(lambda: inner.passages.count == 0)
    there.close()


def test_an_error_on_one_connection_ends_that_one_and_is_counted(inner: Inner, monkeypatch: pytest.MonkeyPatch):
    other, other_there = inner.connect()
    client, there = inner.connect()
    move = wire_splice._Passage.move

    def fail_for_one(passage: wire_splice._Passage, fd: int, events: int) -> bool:
        if passage.sockets[1].getsockname() == inner.peer:
            raise ValueError("a mistake")
        return move(passage, fd, events)

    monkeypatch.setattr(wire_splice._Passage, "move", fail_for_one)
    client.sendall(b"lost")
    wait_until(lambda: inner.passages.failures == 1)
    other.sendall(b"kept")
    assert b"kept" == receive(other_there, 4)
    assert (1, True) == (inner.passages.count, inner.passages.alive)
    for end in (client, there, other, other_there):
        end.close()


def test_nothing_is_left_after_the_stop(tmp_path: Path):
    before = len(os.listdir("/proc/self/fd"))
    made = Inner(tmp_path / "s")
    ends = [end for _ in range(5) for end in made.connect()]
    made.passages.stop()
    made.passages.stop()
    for end in ends:
        assert b"" == end.recv(1)
        end.close()
    made.listening.close()
    assert before == len(os.listdir("/proc/self/fd"))


def test_a_passage_that_leads_nowhere_is_closed(inner: Inner):
    inner.listening.close()
    client, ours = socket.socketpair()
    inner.passages.add(ours, b"PRI ", ORIGIN)
    assert b"" == client.recv(1)
    client.close()
