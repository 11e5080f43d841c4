"""A TLS connection behaves as a plain socket does: the same tests run on both."""

from __future__ import annotations

import os
import socket
import ssl
import struct
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from kvstore.transport.credentials import Credentials
from kvstore.transport.tls import ServerTls
from kvstore.transport.tls_socket import TlsSocket
from kvstore.transport.wire_socket import BulkSocket

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytest.importorskip("cryptography", reason="needs the extra certs")
from kvstore.testing.securing import Keyring

MANY_BYTES = 5 * 2**20
SHORT_SECONDS = 0.05


@pytest.fixture(scope="module")
def keyring(tmp_path_factory: pytest.TempPathFactory) -> Keyring:
    return Keyring(tmp_path_factory.mktemp("keys"))


def secured(keyring: Keyring, ends: tuple[socket.socket, socket.socket]) -> tuple[TlsSocket, TlsSocket]:
    """TLS between two ends, whose handshakes run in a thread each."""
    server_tls = ServerTls(
        cert=keyring.folder / "server.pem",
        key=keyring.folder / "server.key",
        client_ca=None,
        require_client_cert=False,
    )
    client = (
        Credentials(tls_ca=keyring.folder / "ca.pem")
        .context()
        .wrap_socket(ends[0], server_hostname="localhost", do_handshake_on_connect=False)
    )
    server = server_tls._context.wrap_socket(ends[1], server_side=True, do_handshake_on_connect=False)
    server_tls.close()
    shaking = threading.Thread(target=server.do_handshake)
    shaking.start()
    client.do_handshake()
    shaking.join()
    assert isinstance(client, TlsSocket)
    assert isinstance(server, TlsSocket)
    pair = client.prepare(), server.prepare()
    for end in pair:
        end.setblocking(True)
    return pair


@pytest.fixture(params=["plain", "TLS"])
def pair(request: pytest.FixtureRequest, keyring: Keyring) -> Iterator[tuple[socket.socket, socket.socket]]:
    with ExitStack() as stack:
        ends = socket.socketpair()
        if request.param == "TLS":
            ends = secured(keyring, ends)
        for end in ends:
            stack.enter_context(end)
        yield ends


def arm(end: socket.socket, option: int, seconds: float = SHORT_SECONDS) -> None:
    end.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", int(seconds), int(seconds % 1 * 1_000_000)))


def test_bytes_cross_both_ways_at_once_between_four_threads(pair: tuple[socket.socket, socket.socket]):
    data = os.urandom(MANY_BYTES)
    received: dict[int, bytes] = {}

    def receive(number: int) -> None:
        raw = bytearray()
        while len(raw) < MANY_BYTES and (some := pair[number].recv(65536)):
            raw += some
        received[number] = bytes(raw)

    threads = [threading.Thread(target=pair[number].sendall, args=(data,)) for number in (0, 1)]
    threads += [threading.Thread(target=receive, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {0: data, 1: data} == received


def test_gathered_bytes_are_scattered_as_they_were_sent(pair: tuple[socket.socket, socket.socket]):
    pieces = [os.urandom(size) for size in (1, 16384, 16385, 100_000, 7, 300_000)]
    total_bytes = sum(map(len, pieces))
    targets = [memoryview(bytearray(size)) for size in (5, 200_000, total_bytes - 200_005)]
    peers = [BulkSocket(end) for end in pair]
    for peer in peers:
        peer.begin(10.0, 10.0)
    sending = threading.Thread(target=peers[0].send, args=([memoryview(piece) for piece in pieces],))
    sending.start()
    peers[1].receive(targets)
    sending.join()
    assert b"".join(pieces) == b"".join(targets)


@pytest.mark.parametrize("call", ["recv", "recv_into", "recvmsg_into"])
def test_a_call_that_takes_too_long_is_told_as_the_kernel_does(pair: tuple[socket.socket, socket.socket], call: str):
    arm(pair[0], socket.SO_RCVTIMEO)
    arguments = {"recv": (10,), "recv_into": (bytearray(10),), "recvmsg_into": ([bytearray(10)],)}[call]
    with pytest.raises(BlockingIOError):
        getattr(pair[0], call)(*arguments)
    pair[1].sendall(b"late")
    arm(pair[0], socket.SO_RCVTIMEO, 10.0)
    assert b"late" == pair[0].recv(10)


def test_a_timeout_of_python_is_told_as_python_does(pair: tuple[socket.socket, socket.socket]):
    pair[0].settimeout(SHORT_SECONDS)
    with pytest.raises(TimeoutError):
        pair[0].recv(1)


def test_who_sends_to_somebody_that_takes_nothing_is_told(pair: tuple[socket.socket, socket.socket]):
    arm(pair[0], socket.SO_SNDTIMEO)

    def send_for_ever() -> None:
        nonlocal sent_bytes
        while True:
            sent_bytes += pair[0].sendmsg([memoryview(bytes(65536))])

    sent_bytes = 0
    with pytest.raises(BlockingIOError):
        send_for_ever()
    assert 0 < sent_bytes < 2**24


def test_what_came_in_time_of_a_wait_for_all_is_told(pair: tuple[socket.socket, socket.socket]):
    pair[1].sendall(b"some")
    arm(pair[0], socket.SO_RCVTIMEO)
    target = bytearray(10)
    assert 4 == pair[0].recvmsg_into([target], 0, socket.MSG_WAITALL)[0]
    assert b"some" == target[:4]


def test_a_look_takes_nothing(pair: tuple[socket.socket, socket.socket]):
    look = socket.MSG_PEEK | socket.MSG_DONTWAIT
    with pytest.raises(BlockingIOError):
        pair[0].recv(1, look)
    pair[1].sendall(b"ab")
    assert b"a" == pair[0].recv(1)
    assert 1 == len(pair[0].recv(1, look))  # of TLS it is in OpenSSL's hands already
    assert b"b" == pair[0].recv(1)
    pair[1].shutdown(socket.SHUT_RDWR)
    assert b"" == pair[0].recv(1, look)


def test_a_call_that_must_not_wait_does_not(pair: tuple[socket.socket, socket.socket]):
    with pytest.raises(BlockingIOError):
        pair[0].recv(1, socket.MSG_DONTWAIT)
    assert 1 == pair[0].send(b"a", socket.MSG_DONTWAIT)
    pair[0].setblocking(False)
    with pytest.raises(BlockingIOError):
        pair[0].recv(1)


def test_a_shutdown_wakes_who_waits_and_nothing_can_follow(pair: tuple[socket.socket, socket.socket]):
    received: list[bytes] = []
    waiting = threading.Thread(target=lambda: received.append(pair[0].recv(1)))
    waiting.start()
    pair[0].shutdown(socket.SHUT_RDWR)
    waiting.join()
    assert [b""] == received
    with pytest.raises(OSError):  # noqa: PT011  # a broken pipe of either kind
        pair[0].send(b"in the clear?")


def test_the_end_of_the_other_side_is_the_end_of_bytes(pair: tuple[socket.socket, socket.socket]):
    pair[1].sendall(b"last")
    pair[1].close()
    target = bytearray(10)
    assert 4 == pair[0].recvmsg_into([target], 0, socket.MSG_WAITALL)[0]
    assert 0 == pair[0].recv_into(target)


def test_nothing_that_is_sent_can_be_read_on_the_way(keyring: Keyring):
    with ExitStack() as stack:
        ends = [stack.enter_context(end) for pair in (socket.socketpair(), socket.socketpair()) for end in pair]
        seen = bytearray()

        def relay(source: socket.socket, target: socket.socket) -> None:
            while raw := source.recv(65536):
                seen.extend(raw)
                target.sendall(raw)

        relays = [threading.Thread(target=relay, args=way) for way in ((ends[1], ends[2]), (ends[2], ends[1]))]
        for thread in relays:
            thread.start()
        client, server = secured(keyring, (ends[0], ends[3]))
        client.sendall(b"a secret word" * 10)
        assert b"a secret word" == server.recv(13)
        client.shutdown(socket.SHUT_RDWR)
        server.shutdown(socket.SHUT_RDWR)
        for thread in relays:
            thread.join()
        client.close()
        server.close()
        assert b"secret" not in seen


def test_bytes_that_somebody_changed_on_the_way_end_the_connection(keyring: Keyring):
    client, server = secured(keyring, socket.socketpair())
    with client, server:
        socket.socket.send(client, struct.pack(">BHH", 23, 0x0303, 40) + bytes(40))
        with pytest.raises(ConnectionError, match="TLS: "):
            server.recv(10)


def test_keys_that_others_can_read_are_refused(keyring: Keyring, tmp_path: Path):
    from kvstore.errors import ConfigError

    key = tmp_path / "key"
    key.touch(mode=0o644)
    key.write_bytes((keyring.folder / "server.key").read_bytes())
    key.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        ServerTls(cert=keyring.folder / "server.pem", key=key, client_ca=None, require_client_cert=False)
    with pytest.raises(ConfigError, match="chmod 600"):
        Credentials(tls_cert=keyring.folder / "client-engine.pem", tls_key=key).context()


def test_only_the_newest_tls_is_spoken(keyring: Keyring):
    tls = ServerTls(
        cert=keyring.folder / "server.pem", key=keyring.folder / "server.key", client_ca=None, require_client_cert=False
    )
    tls.close()
    versions = {context.minimum_version for context in (tls._context, Credentials().context())}
    assert {ssl.TLSVersion.TLSv1_3} == versions
