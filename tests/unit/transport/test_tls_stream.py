"""TLS without a thread of its own: bytes in order both ways, pauses for who does not read, an end that is told once."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.transport.admission import Origins
from kvstore.transport.credentials import Credentials
from kvstore.transport.principal import Carrier, Origin
from kvstore.transport.tls import ServerTls
from kvstore.transport.tls_stream import TlsTransport
from kvstore.transport.wire_splice import Passages

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.transport.tls_socket import TlsSocket

pytest.importorskip("cryptography", reason="needs the extra certs")
from kvstore.testing.patience import ANSWER_SECONDS, until
from kvstore.testing.securing import Keyring

MANY_BYTES = 3 * 2**20


@pytest.fixture(scope="module")
def keyring(tmp_path_factory: pytest.TempPathFactory) -> Keyring:
    return Keyring(tmp_path_factory.mktemp("keys"))


class Recorder(asyncio.BufferedProtocol):
    """What a transport tells its protocol."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.told: list[str] = []
        self.lost = asyncio.Event()
        self._buffer = bytearray(1000)

    def connection_made(self, transport: Any) -> None:
        self.told.append("made")

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._buffer)

    def buffer_updated(self, nbytes: int) -> None:
        self.received += self._buffer[:nbytes]

    def pause_writing(self) -> None:
        self.told.append("pause")

    def resume_writing(self) -> None:
        self.told.append("resume")

    def connection_lost(self, exc: Exception | None) -> None:
        self.told.append("lost")
        self.lost.set()


def shaken(keyring: Keyring, server_end: socket.socket, client_end: socket.socket) -> tuple[TlsSocket, TlsSocket]:
    """Both ends of TLS: the server's, shaken in a loop of its own, and the client's, which blocks."""
    tls = ServerTls(
        cert=keyring.folder / "server.pem", key=keyring.folder / "server.key", client_ca=None, require_client_cert=False
    )
    made: list[TlsSocket] = []
    shaking = threading.Thread(target=lambda: made.append(asyncio.run(tls.handshake(server_end))))
    shaking.start()
    client: Any = (
        Credentials(tls_ca=keyring.folder / "ca.pem").context().wrap_socket(client_end, server_hostname="localhost")
    )
    shaking.join()
    tls.close()
    client.prepare().settimeout(ANSWER_SECONDS)
    return made[0], client


def test_what_is_said_crosses_in_order_and_the_end_is_told_once(keyring: Keyring):
    server, client = shaken(keyring, *socket.socketpair())
    data = os.urandom(MANY_BYTES)

    async def run() -> Recorder:
        recorder = Recorder()
        transport = TlsTransport(server, recorder)
        sending = asyncio.create_task(asyncio.to_thread(client.sendall, data))
        await until(lambda: len(recorder.received) == MANY_BYTES)
        await sending
        client.close()
        await recorder.lost.wait()
        transport.close()
        transport.abort()
        return recorder

    recorder = asyncio.run(run())
    assert data == recorder.received
    assert ["made", "lost"] == recorder.told


def test_who_does_not_read_pauses_the_writer_and_gets_all_in_the_end(keyring: Keyring):
    server, client = shaken(keyring, *socket.socketpair())
    data = os.urandom(MANY_BYTES)

    def receive() -> bytes:
        raw = bytearray()
        while received := client.recv(65536):
            raw += received
        return bytes(raw)

    async def run() -> tuple[Recorder, bytes]:
        recorder = Recorder()
        transport = TlsTransport(server, recorder)
        transport.write(data)
        assert ["made", "pause"] == recorder.told
        receiving = asyncio.create_task(asyncio.to_thread(receive))
        await until(lambda: "resume" in recorder.told)
        transport.write(b"last")
        transport.close()
        assert transport.is_closing()
        transport.write(b"")
        await recorder.lost.wait()
        return recorder, await receiving

    recorder, received = asyncio.run(run())
    client.close()
    assert data + b"last" == received
    assert ["made", "pause", "resume", "lost"] == recorder.told


def test_nothing_is_received_while_reading_is_paused(keyring: Keyring):
    server, client = shaken(keyring, *socket.socketpair())

    async def run() -> None:
        recorder = Recorder()
        transport = TlsTransport(server, recorder)
        transport.pause_reading()
        client.sendall(b"early")
        for _ in range(100):
            await asyncio.sleep(0)
        assert b"" == recorder.received
        transport.resume_reading()
        await until(lambda: recorder.received == b"early")
        transport.abort()
        await recorder.lost.wait()

    asyncio.run(run())
    client.close()


def test_a_handshake_that_is_given_up_leaves_nothing_open(keyring: Keyring):
    tls = ServerTls(
        cert=keyring.folder / "server.pem", key=keyring.folder / "server.key", client_ca=None, require_client_cert=False
    )
    silent, ours = socket.socketpair()

    async def run() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await tls.handshake(ours)

    asyncio.run(run())
    tls.close()
    assert b"" == silent.recv(1)
    silent.close()


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", bytes(100)])
def test_a_handshake_with_who_speaks_no_tls_fails_and_leaves_nothing_open(keyring: Keyring, garbage: bytes):
    tls = ServerTls(
        cert=keyring.folder / "server.pem", key=keyring.folder / "server.key", client_ca=None, require_client_cert=False
    )
    foreign, ours = socket.socketpair()
    foreign.sendall(garbage)
    with pytest.raises(OSError, match=r"(?i)ssl|http request|version"):
        asyncio.run(tls.handshake(ours))
    tls.close()
    foreign.close()
    assert -1 == ours.fileno()


def test_what_goes_on_to_grpc_crosses_both_ways_and_its_end_too(keyring: Keyring, tmp_path: Path):
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        listening.settimeout(ANSWER_SECONDS)
        passages = Passages(os.open(path, os.O_PATH | os.O_CLOEXEC), Origins())
        server, client = shaken(keyring, *socket.socketpair())
        passages.add(server, b"first ", Origin(Carrier.TLS))
        inner, _ = listening.accept()
        inner.settimeout(ANSWER_SECONDS)
        data = os.urandom(MANY_BYTES)
        answers: dict[str, bytes] = {}

        def receive(name: str, connected: socket.socket, size: int) -> None:
            raw = bytearray()
            while len(raw) < size and (received := connected.recv(65536)):
                raw += received
            answers[name] = bytes(raw)

        threads = [
            threading.Thread(target=client.sendall, args=(data,)),
            threading.Thread(target=inner.sendall, args=(data,)),
            threading.Thread(target=receive, args=("inner", inner, MANY_BYTES + 6)),
            threading.Thread(target=receive, args=("client", client, MANY_BYTES)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {"inner": b"first " + data, "client": data} == answers
        client.close()
        assert b"" == inner.recv(1)
        inner.close()
        ends_at = time.monotonic() + ANSWER_SECONDS
        while passages.count:
            assert time.monotonic() < ends_at, "the passage stays"
        passages.stop()
