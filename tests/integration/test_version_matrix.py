"""Client and server of neighbouring versions work together, or refuse each other by name, in both directions."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import grpc
import pytest

import kvstore
from kvstore.testing.blocks import store_prompt, verified_blocks
from kvstore.testing.conformance import BLOCKS, LAYOUT, MIB, PROMPT
from kvstore.testing.patience import ANSWER_SECONDS
from kvstore.testing.serving import ServedStore
from kvstore.transport import wire
from kvstore.transport.wire import Kind, Lane, Method, Verdict
from kvstore.types import Namespace
from kvstore.v1 import cache_service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NAMESPACE = Namespace(model="model", revision="revision", layout=LAYOUT)
SERVER_PROGRAM = """
import sys, kvstore
from kvstore.testing.serving import ServedStore
with kvstore.open(None, host_bytes=1 << 23) as store, ServedStore(store, [sys.argv[1]]) as served:
    print(served.addresses[0], flush=True)
    sys.stdin.read()
"""
UNKNOWN_FIELD = b"\xfa\x3f\x03new"  # number 1023, bytes


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of this version, in a process of its own, so that a test may change the version of its client."""
    folder = tmp_path_factory.mktemp("served")
    command = [sys.executable, "-P", "-c", SERVER_PROGRAM, f"unix://{folder}/s"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process.stdout.readline().strip()
    process.kill()
    process.communicate()


@pytest.mark.parametrize(
    ("lowest", "highest", "lane"), [(1, 1, "wire"), (1, 2, "wire"), (0, 1, "wire"), (2, 2, "grpc"), (2, 3, "grpc")]
)
def test_a_client_of_another_version_works_by_the_fast_lane_or_by_grpc(
    address: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    lowest: int,
    highest: int,
    lane: str,
):
    monkeypatch.setattr(wire, "VERSION_LOWEST", lowest)
    monkeypatch.setattr(wire, "VERSION_HIGHEST", highest)
    with caplog.at_level("INFO", "kvstore.transport"), kvstore.connect(address) as client:
        assert lane == client.status().lane
        store_prompt(client, NAMESPACE, PROMPT)
        assert BLOCKS == verified_blocks(client, NAMESPACE, PROMPT)
    refusal = f"speaks versions 1 to 1 of the fast lane, this client {lowest} to {highest}"
    assert (lane == "grpc") == (refusal in caplog.text)


def test_a_client_of_a_server_without_arenas_has_bytes_sent(
    store_address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    answer = wire.answer_hello

    def answer_as_before(hello: wire.ClientHello) -> Verdict:
        return Verdict.VERSION if hello.lane == Lane.ARENA else answer(hello)

    monkeypatch.setattr(wire, "answer_hello", answer_as_before)
    with caplog.at_level("INFO", "kvstore.transport"), kvstore.connect(store_address) as client:
        store_prompt(client, NAMESPACE, PROMPT)
        for _ in range(2):
            assert BLOCKS == verified_blocks(client, NAMESPACE, PROMPT)
        assert ("wire", 0, 2) == (client.status().lane, client.arena.loaded_bytes, client.arena.fallbacks)
    assert 1 == caplog.text.count("blocks are not read in place")


@pytest.fixture
def store_address(tmp_path: Path) -> Iterator[str]:
    """A server in this process, whose version a test may change."""
    with kvstore.open(None, host_bytes=8 * MIB) as store, ServedStore(store, [f"unix://{tmp_path}/s"]) as served:
        yield served.addresses[0]


class OtherServer(threading.Thread):
    """A server of versions `lowest` to `highest` that takes one connection, and answers its first call with stats."""

    def __init__(self, folder: Path, lowest: int, highest: int) -> None:
        super().__init__()
        self.address = f"unix://{folder}/other"
        self._answer = (lowest, highest)
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(f"{folder}/other")
        self._listening.listen()
        self.methods: list[Method] = []
        self.start()

    def run(self) -> None:
        lowest, highest = self._answer
        with self._listening, self._listening.accept()[0] as connected:
            hello = wire.decode_client_hello(connected.recv(wire.CLIENT_HELLO_BYTES, socket.MSG_WAITALL))
            version = min(highest, hello.highest) if lowest <= hello.highest else 0
            verdict = Verdict.OK if version else Verdict.VERSION
            connected.sendall(struct.pack("<8sHHHHQ", wire.MAGIC, version, lowest, highest, verdict, 0))
            while version and (raw := connected.recv(wire.HEADER_BYTES, socket.MSG_WAITALL)):
                header = wire.decode_header(raw, 0, 2**20)
                connected.recv(header.body_bytes, socket.MSG_WAITALL)
                self.methods.append(wire.method_of(header))
                greeting = pb.SessionResponse(session_id=bytes(16), challenge=bytes(32), server_version="of tomorrow")
                body = greeting.SerializeToString() if self.methods[-1] is Method.Session else b""
                connected.sendall(wire.encode_frame(Kind.RESPONSE, body + UNKNOWN_FIELD, call_id=header.call_id))


@pytest.mark.parametrize(("lowest", "highest"), [(1, 1), (1, 2), (0, 7)])
def test_a_server_of_another_version_that_speaks_ours_is_used_and_its_new_fields_ignored(
    tmp_path: Path, lowest: int, highest: int
):
    server = OtherServer(tmp_path, lowest, highest)
    with kvstore.connect(server.address) as client:
        assert "of tomorrow" == client.status().version
        assert 0 == client.unpin(1)
    server.join()
    assert [Method.Session, Method.Check, Method.Unpin] == server.methods


@pytest.mark.parametrize(("lowest", "highest"), [(2, 2), (2, 3), (7, 9)])
def test_a_server_that_speaks_newer_versions_only_is_refused_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, lowest: int, highest: int
):
    server = OtherServer(tmp_path, lowest, highest)
    with (
        caplog.at_level("INFO", "kvstore.transport"),
        kvstore.connect(server.address) as client,
        pytest.raises(kvstore.UnavailableError),
    ):
        client.stats()
    server.join()
    assert (
        f"speaks versions {lowest} to {highest} of the fast lane, this client 1 to 1; update the older" in caplog.text
    )


@pytest.mark.parametrize("lane", [Lane.CONTROL, Lane.BULK])
def test_a_client_that_speaks_newer_versions_only_is_told_ours(address: str, lane: Lane):
    with socket.socket(socket.AF_UNIX) as connected:
        connected.connect(address.removeprefix("unix://"))
        connected.sendall(struct.pack("<8sHHB3x16s", wire.MAGIC, 2, 9, lane, bytes(16)))
        answer = wire.decode_server_hello(connected.recv(wire.SERVER_HELLO_BYTES, socket.MSG_WAITALL))
        assert (0, 1, 1, Verdict.VERSION) == (answer.version, answer.lowest, answer.highest, answer.verdict)
        assert b"" == connected.recv(1)


def test_fields_of_tomorrow_are_ignored_on_both_lanes(tmp_path: Path):
    with kvstore.open(None, host_bytes=MIB) as store, ServedStore(store, [f"unix://{tmp_path}/s"]):
        target = f"unix:{tmp_path}/s"
        with grpc.insecure_channel(target) as channel:
            stats: Any = channel.unary_unary("/kvstore.v1.CacheService/GetStats")
            assert pb.GetStatsResponse.FromString(stats(UNKNOWN_FIELD, timeout=ANSWER_SECONDS)).HasField("stats")
        with socket.socket(socket.AF_UNIX) as connected:
            connected.connect(f"{tmp_path}/s")
            connected.sendall(wire.encode_client_hello(Lane.CONTROL))
            connected.recv(wire.SERVER_HELLO_BYTES, socket.MSG_WAITALL)
            for call_id, method in ((1, Method.Session), (2, Method.GetStats)):
                frame = wire.encode_frame(Kind.REQUEST, UNKNOWN_FIELD, call_id=call_id, code=method, deadline_ms=9999)
                connected.sendall(frame)
                header = wire.decode_header(connected.recv(wire.HEADER_BYTES, socket.MSG_WAITALL), 0, 2**20)
                connected.recv(header.body_bytes, socket.MSG_WAITALL)
                assert (Kind.RESPONSE, call_id) == (header.kind, header.call_id)
