"""Bytes that no client of ours sends on the fast lane: the server lives, says why where it can, and keeps nothing."""

from __future__ import annotations

import os
import random
import socket
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvstore
from kvstore.errors import ClosedError, InvalidArgumentError, KvstoreError, NoSpaceError
from kvstore.testing.blocks import expected_rows, store_prompt, verified_blocks
from kvstore.testing.conformance import BLOCKS, LAYOUT, MIB, PROMPT
from kvstore.testing.patience import ANSWER_SECONDS, wait_until
from kvstore.testing.serving import ServedStore
from kvstore.tokens import as_token_array
from kvstore.transport import wire, wire_bulk, wire_lane, wire_listen
from kvstore.transport.convert import namespace_to_proto, prompt_to_proto
from kvstore.transport.limits import ServiceLimits
from kvstore.transport.status import UnknownSessionError
from kvstore.transport.wire import Delta, Kind, Lane, Method
from kvstore.types import Namespace
from kvstore.v1 import block_pb2
from kvstore.v1 import cache_service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from google.protobuf.message import Message

NAMESPACE = Namespace(model="model", revision="revision", layout=LAYOUT)
LIMITS = ServiceLimits(message_bytes=MIB, frame_bytes=64 * 1024, connections=64, calls_per_connection=4)
ROW = LAYOUT.block_bytes


class Peer:
    """A raw connection of the fast lane."""

    def __init__(self, address: str, hello: bytes) -> None:
        if address.startswith("unix://"):
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.settimeout(ANSWER_SECONDS)
            self.socket.connect(address.removeprefix("unix://"))
        else:
            host, _, port = address.rpartition(":")
            self.socket = socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS)
        self.socket.sendall(hello)

    def receive(self, size: int) -> bytes:
        """That many bytes, or fewer if the server ends the connection."""
        raw = b""
        with suppress(ConnectionError):
            while len(raw) < size and (received := self.socket.recv(size - len(raw))):
                raw += received
        return raw

    def answer(self) -> tuple[wire.Header, bytes]:
        header = wire.decode_header(self.receive(wire.HEADER_BYTES), 0, 2**30)
        return header, self.receive(header.body_bytes)

    def error(self) -> KvstoreError:
        header, body = self.answer()
        assert header.kind is Kind.ERROR, header
        return wire.decode_error(header.code, body, "there")

    def send(self, raw: bytes) -> None:
        with suppress(ConnectionError):
            self.socket.sendall(raw)

    def is_ended(self) -> bool:
        return self.receive(1) == b""

    def close(self) -> None:
        self.socket.close()


class Session:
    """A raw session with a lease on all that is stored and a stage for as much again."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.peers: list[Peer] = []
        self.control = self.open(Lane.CONTROL)
        self.call_ids = iter(range(1, 2**32))
        opened = pb.SessionResponse.FromString(self.ask(Method.Session, pb.SessionRequest()))
        self.session_id = opened.session_id
        request = pb.OpenNamespaceRequest(session_id=self.session_id, namespace=namespace_to_proto(NAMESPACE))
        self.ns_id = pb.OpenNamespaceResponse.FromString(self.ask(Method.OpenNamespace, request)).ns_id
        tokens = as_token_array(PROMPT)
        self.prompt = prompt_to_proto(self.ns_id, None, tokens)
        named = {"session_id": self.session_id, "prompt": self.prompt}
        self.ask(Method.Match, pb.MatchRequest(**named))
        self.ask(Method.Lease, pb.LeaseRequest(**named, blocks=BLOCKS, lease_id=1))
        self.new_prompt = prompt_to_proto(self.ns_id, None, tokens + 1000)

    def open(self, lane: Lane, session_id: bytes = bytes(16)) -> Peer:
        peer = Peer(self.address, wire.encode_client_hello(lane, session_id))
        assert wire.Verdict.OK == wire.decode_server_hello(peer.receive(wire.SERVER_HELLO_BYTES)).verdict
        self.peers.append(peer)
        return peer

    def bulk(self) -> Peer:
        return self.open(Lane.BULK, self.session_id)

    def ask(self, method: Method, message: Message) -> bytes:
        """The answer to a request; raises the error that it is instead."""
        self.control.send(request(method, message, next(self.call_ids)))
        header, body = self.control.answer()
        if header.kind is Kind.ERROR:
            raise wire.decode_error(header.code, body, "there")
        return body

    def stage(self, stage_id: int) -> None:
        named = {"session_id": self.session_id, "prompt": self.new_prompt}
        self.ask(Method.Stage, pb.StageRequest(**named, stage_id=stage_id))

    def write(self, peer: Peer, **start: Any) -> None:
        peer.send(request(Method.Write, pb.WriteStart(session_id=self.session_id, **start), 1))

    def load(self, peer: Peer, **named: Any) -> None:
        peer.send(request(Method.Load, pb.LoadRequest(session_id=self.session_id, **named), 1))

    def close(self) -> None:
        for peer in self.peers:
            peer.close()


def request(method: int, message: Message, call_id: int, *, flags: int = 0) -> bytes:
    return wire.encode_frame(
        Kind.REQUEST, message.SerializeToString(), call_id=call_id, code=method, flags=flags, deadline_ms=5000
    )


def header(body_bytes: int, kind: int, code: int = 0, flags: int = 0, call_id: int = 99) -> bytes:
    return struct.pack("<IBBHII", body_bytes, kind, code, flags, call_id, 0)


@pytest.fixture
def store() -> Iterator[kvstore.KvStore]:
    with kvstore.open(None, host_bytes=4 * MIB) as store:
        store_prompt(store, NAMESPACE, PROMPT)
        yield store
        wait_until(lambda: (store.stats().leases, store.stats().stages) == (0, 0))
        assert (BLOCKS, 0) == (store.stats().stored_blocks, store.stats().pins)
        assert () == store.verify().problems


@pytest.fixture
def served(store: kvstore.KvStore, tmp_path: Path) -> Iterator[ServedStore]:
    with ServedStore(store, ["127.0.0.1:0", f"unix://{tmp_path}/s"], limits=LIMITS) as served:
        yield served
        with kvstore.connect(served.addresses[0]) as client:
            assert ("wire", BLOCKS) == (client.status().lane, verified_blocks(client, NAMESPACE, PROMPT))
        assert 0 == served.server.failures


@pytest.fixture
def attacker(served: ServedStore) -> Iterator[Session]:
    session = Session(served.addresses[0])
    yield session
    session.close()


@pytest.mark.parametrize(
    "raw",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
        b"PRI * HTTP/1.1",
        b"P" * 40,
        wire.MAGIC[:-1] + b"\0" + bytes(24),
        bytes(32),
    ],
)
def test_what_begins_as_nothing_of_ours_is_ended(served: ServedStore, raw: bytes):
    peer = Peer(served.addresses[0], raw)
    assert peer.is_ended()
    peer.close()


@pytest.mark.parametrize(("lowest", "highest", "lane"), [(2, 9, 1), (0, 0, 1), (65535, 65535, 2), (1, 1, 0), (1, 1, 9)])
def test_another_version_is_refused_by_name(served: ServedStore, lowest: int, highest: int, lane: int):
    peer = Peer(served.addresses[0], struct.pack("<8sHHB3x16s", wire.MAGIC, lowest, highest, lane, bytes(16)))
    hello = wire.decode_server_hello(peer.receive(wire.SERVER_HELLO_BYTES))
    expected = (0, wire.VERSION_LOWEST, wire.VERSION_HIGHEST, wire.Verdict.VERSION)
    assert expected == (hello.version, hello.lowest, hello.highest, hello.verdict)
    assert peer.is_ended()
    assert 1 == served.server.refused_connections["version"]
    peer.close()


def test_a_bulk_connection_of_no_session_is_refused(served: ServedStore):
    for session_id in (bytes(16), os.urandom(16)):
        peer = Peer(served.addresses[0], wire.encode_client_hello(Lane.BULK, session_id))
        assert wire.Verdict.SESSION == wire.decode_server_hello(peer.receive(wire.SERVER_HELLO_BYTES)).verdict
        assert peer.is_ended()
        peer.close()


@pytest.mark.parametrize(
    "raw",
    [
        header(2**32 - 1, Kind.REQUEST, Method.Match),
        header(MIB + 1, Kind.REQUEST, Method.Match),
        header(0, 0),
        header(0, 6),
        header(0, 255),
        header(0, Kind.RESPONSE),
        header(0, Kind.DATA),
        header(0, Kind.REQUEST, 0),
        header(0, Kind.REQUEST, max(Method) + 1),
        header(0, Kind.REQUEST, 255),
        header(0, Kind.REQUEST, Method.Match, flags=2),
        header(0, Kind.REQUEST, Method.Match, flags=0xFFFF),
        header(0, Kind.REQUEST, Method.GetStats, call_id=0),
        header(0, Kind.REQUEST, Method.Session),
        header(0, Kind.REQUEST, Method.Load),
        header(0, Kind.REQUEST, Method.Write),
    ],
)
def test_a_frame_that_cannot_be_ends_its_connection_with_a_reason(attacker: Session, raw: bytes):
    attacker.control.send(raw)
    assert isinstance(attacker.control.error(), InvalidArgumentError)
    assert attacker.control.is_ended()


@pytest.mark.parametrize("method", [method for method in Method if method is not Method.Session])
def test_a_session_comes_first(served: ServedStore, method: Method):
    peer = Peer(served.addresses[0], wire.encode_client_hello(Lane.CONTROL) + header(0, Kind.REQUEST, method))
    peer.receive(wire.SERVER_HELLO_BYTES)
    assert "expected Session" in str(peer.error())
    assert peer.is_ended()
    peer.close()


def test_a_first_frame_of_megabytes_is_not_awaited(served: ServedStore):
    peer = Peer(
        served.addresses[0],
        wire.encode_client_hello(Lane.CONTROL) + header(MIB, Kind.REQUEST, Method.Session),
    )
    peer.receive(wire.SERVER_HELLO_BYTES)
    assert "expected at most 16384" in str(peer.error())
    peer.close()


def test_bytes_that_are_no_message_are_refused_and_the_session_goes_on(attacker: Session):
    random_bytes = random.Random(301).randbytes
    for method in Method:
        if method not in (Method.Session, *wire.BULK_METHODS):
            for raw in (b"\xff", b"\x0a\xff\xff\xff\xff\x0f", b"\x0b" * 50, random_bytes(3000)):
                call_id = next(attacker.call_ids)
                attacker.control.send(
                    wire.encode_frame(Kind.REQUEST, raw, call_id=call_id, code=method, deadline_ms=100)
                )
                answer, _ = attacker.control.answer()
                assert call_id == answer.call_id
    assert pb.GetStatsResponse.FromString(attacker.ask(Method.GetStats, pb.GetStatsRequest())).stats.leases == 1


@pytest.mark.parametrize(
    ("delta", "tail", "expected"),
    [
        (Delta(1, 2, 100, 0), b"", "resend"),
        (Delta(1, 1, 2**32 - 1, 0), b"", "tokens"),
        (Delta(0, 0, 0, 0), bytes(5), "packed u32"),
        (Delta(2**32 - 1, 2**32 - 1, 0, 2**64 - 1), bytes(8), "match"),
    ],
)
def test_a_delta_that_fits_nothing_is_asked_for_again_or_refused(
    attacker: Session, delta: Delta, tail: bytes, expected: str
):
    message = pb.MatchRequest(
        session_id=attacker.session_id, prompt=block_pb2.Prompt(ns_id=attacker.ns_id, tokens=tail)
    ).SerializeToString()
    body = wire.encode_delta(delta) + message
    attacker.control.send(
        wire.encode_frame(Kind.REQUEST, body, call_id=50, code=Method.Match, flags=wire.FLAG_DELTA, deadline_ms=5000)
    )
    answer, text = attacker.control.answer()
    if expected == "resend":
        assert Kind.RESEND is answer.kind
    elif expected == "match":
        assert (Kind.RESPONSE, 0) == (answer.kind, pb.MatchResponse.FromString(text).blocks)
    else:
        assert expected in str(wire.decode_error(answer.code, text, "there"))


def test_a_delta_where_none_can_be_is_refused(attacker: Session):
    body = wire.encode_delta(Delta(1, 0, 0, 0))
    for method in set(Method) - wire.PROMPT_METHODS - wire.BULK_METHODS - {Method.Session}:
        attacker.control.send(
            wire.encode_frame(Kind.REQUEST, body, call_id=60, code=method, flags=wire.FLAG_DELTA, deadline_ms=5000)
        )
        assert "delta" in str(attacker.control.error())
    attacker.control.send(header(3, Kind.REQUEST, Method.Match, wire.FLAG_DELTA) + b"abc")
    assert isinstance(attacker.control.error(), InvalidArgumentError)


def test_a_call_id_in_use_ends_the_connection(attacker: Session):
    message = pb.ReadEventsRequest(after=2**40)
    message.wait.seconds = 1
    attacker.control.send(request(Method.ReadEvents, message, 70) * 2)
    assert "call id 70" in str(attacker.control.error())
    assert attacker.control.is_ended()


def test_more_calls_than_a_connection_may_have_are_refused_one_by_one(attacker: Session):
    message = pb.ReadEventsRequest(after=2**40)
    message.wait.seconds = 1
    for call_id in range(70, 70 + LIMITS.calls_per_connection + 2):
        attacker.control.send(request(Method.ReadEvents, message, call_id))
    for call_id in (74, 75):
        answer, body = attacker.control.answer()
        assert call_id == answer.call_id
        assert isinstance(wire.decode_error(answer.code, body, "there"), NoSpaceError)


def test_a_deadline_ends_a_call_that_waits(attacker: Session):
    message = pb.ReadEventsRequest(after=2**40)
    message.wait.seconds = 1
    body = message.SerializeToString()
    attacker.control.send(wire.encode_frame(Kind.REQUEST, body, call_id=80, code=Method.ReadEvents, deadline_ms=100))
    assert "within the deadline" in str(attacker.control.error())


def test_what_another_session_holds_cannot_be_reached(attacker: Session, served: ServedStore):
    other = Session(served.addresses[0])
    try:
        other.stage(5)
        attacker.load(peer := attacker.bulk(), lease_id=99, blocks=1)
        assert isinstance(peer.error(), ClosedError)
        attacker.write(peer := attacker.bulk(), stage_id=5, blocks=1)
        assert isinstance(peer.error(), ClosedError)
        for method, message in (
            (Method.Commit, pb.CommitRequest(session_id=other.session_id, stage_id=5)),
            (Method.Release, pb.ReleaseRequest(session_id=other.session_id, lease_id=1)),
            (Method.Match, pb.MatchRequest(session_id=other.session_id, prompt=other.prompt)),
        ):
            with pytest.raises(UnknownSessionError):
                attacker.ask(method, message)
        peer = attacker.bulk()
        peer.send(request(Method.Load, pb.LoadRequest(session_id=other.session_id, lease_id=1, blocks=1), 1))
        assert isinstance(peer.error(), UnknownSessionError)
        assert pb.LoadResponse.FromString(_loaded(other, lease_id=1, blocks=BLOCKS)[1]).summary.blocks == BLOCKS
    finally:
        other.close()


def _loaded(session: Session, **named: Any) -> tuple[bytes, bytes]:
    """The rows of a load and the message that ended it."""
    session.load(peer := session.bulk(), **named)
    rows = b""
    while (answer := peer.answer())[0].kind is Kind.DATA:
        rows += answer[1]
    return rows, answer[1]


def test_loads_outside_of_the_lease_are_refused(attacker: Session):
    peer = attacker.bulk()
    for named in (
        {"blocks": BLOCKS + 1},
        {"from_block": BLOCKS, "blocks": 1},
        {"from_block": 2**32 - 1, "blocks": 1},
        {"from_block": 1, "blocks": 2**32 - 1},
        {"blocks": 1, "part": 1},
        {"blocks": 1, "part": 2**32 - 1},
    ):
        attacker.load(peer, lease_id=1, **named)
        assert isinstance(peer.error(), InvalidArgumentError), named
    assert expected_rows(NAMESPACE, PROMPT).tobytes() == _loaded(attacker, lease_id=1, blocks=BLOCKS)[0]


@pytest.mark.parametrize(
    "frames",
    [
        [header(ROW + 1, Kind.DATA, call_id=1) + bytes(ROW + 1)],
        [header(0, Kind.DATA, call_id=1)],
        [header(2**32 - 1, Kind.DATA, call_id=1)],
        [header(ROW, Kind.DATA, call_id=2) + bytes(ROW)],
        [header(ROW, Kind.RESPONSE, call_id=1) + bytes(ROW)],
        [header(4, Kind.DATA, call_id=1) + b"1234", header(0, Kind.REQUEST, Method.Load, call_id=1)],
    ],
    ids=["too long", "empty", "huge", "of another call", "no data", "a request in between"],
)
def test_rows_that_cannot_be_end_their_stage_and_leave_nothing(
    attacker: Session, store: kvstore.KvStore, frames: list[bytes]
):
    attacker.stage(6)
    attacker.write(peer := attacker.bulk(), stage_id=6, blocks=1)
    for frame in frames:
        peer.send(frame)
    assert isinstance(peer.error(), InvalidArgumentError)
    assert peer.is_ended()
    wait_until(lambda: store.stats().stages == 0)
    with pytest.raises(ClosedError):
        attacker.ask(Method.Commit, pb.CommitRequest(session_id=attacker.session_id, stage_id=6))
    assert 0 == store.match(NAMESPACE, [token + 1000 for token in PROMPT]).blocks


def test_a_write_cut_off_ends_its_stage(attacker: Session, store: kvstore.KvStore):
    attacker.stage(6)
    attacker.write(peer := attacker.bulk(), stage_id=6, blocks=BLOCKS)
    peer.send(header(ROW * BLOCKS, Kind.DATA, call_id=1) + bytes(ROW))
    peer.close()
    wait_until(lambda: store.stats().stages == 0)


def test_a_stage_cannot_be_committed_while_it_is_written(attacker: Session, store: kvstore.KvStore):
    attacker.stage(6)
    attacker.write(peer := attacker.bulk(), stage_id=6, blocks=BLOCKS)
    peer.send(header(ROW * BLOCKS, Kind.DATA, call_id=1) + bytes(ROW))
    lent = store._stages.copy().pop()
    wait_until(lambda: lent._lent == 1)
    with pytest.raises(InvalidArgumentError, match="being written"):
        attacker.ask(Method.Commit, pb.CommitRequest(session_id=attacker.session_id, stage_id=6))
    used = store.stats().tiers["host"].used_bytes
    assert ROW * 2 * BLOCKS == used  # its slots are not reused while bytes may still come
    peer.close()
    wait_until(lambda: store.stats().tiers["host"].used_bytes == ROW * BLOCKS)


def test_a_lease_released_in_mid_load_keeps_its_blocks_until_the_load_ends(store: kvstore.KvStore):
    lease = store.lease(store.match(NAMESPACE, PROMPT))
    with lease.lend(from_block=2, blocks=100, part=None) as pieces:
        lease.release()
        assert 0 == store.evict(NAMESPACE, PROMPT)
        rows = b"".join(piece.tobytes() for piece in pieces)
    assert expected_rows(NAMESPACE, PROMPT)[2:].tobytes() == rows
    assert () == store.verify().problems


def test_writes_of_absurd_size_take_no_memory(attacker: Session, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wire_bulk, "STALL_SECONDS", 0.2)
    attacker.stage(6)
    attacker.write(peer := attacker.bulk(), stage_id=6, blocks=2**32 - 1, from_block=2**32 - 1)
    assert peer.is_ended()
    attacker.write(peer := attacker.bulk(), stage_id=99, blocks=2**32 - 1)
    assert isinstance(peer.error(), ClosedError)


@pytest.mark.parametrize("method", [Method.Match, Method.Session, Method.Commit, 0, 255])
def test_other_requests_on_a_bulk_connection_end_it(attacker: Session, method: int):
    peer = attacker.bulk()
    peer.send(header(0, Kind.REQUEST, method, call_id=1))
    assert isinstance(peer.error(), InvalidArgumentError)
    assert peer.is_ended()


def test_a_bulk_request_of_megabytes_is_not_awaited(attacker: Session):
    peer = attacker.bulk()
    peer.send(header(MIB, Kind.REQUEST, Method.Load, call_id=1))
    assert f"expected at most {wire.BULK_REQUEST_BYTES_MAX}" in str(peer.error())
    assert peer.is_ended()


def test_bulk_connections_of_a_session_are_limited(attacker: Session):
    for _ in range(LIMITS.bulk_connections_per_session):
        attacker.bulk()
    peer = Peer(attacker.address, wire.encode_client_hello(Lane.BULK, attacker.session_id))
    assert wire.Verdict.FULL == wire.decode_server_hello(peer.receive(wire.SERVER_HELLO_BYTES)).verdict
    peer.close()


def test_stalled_transfers_leave_room_for_no_more_than_their_limit(attacker: Session, monkeypatch: pytest.MonkeyPatch):
    other = Session(attacker.address)
    monkeypatch.setattr(wire_bulk, "STALL_SECONDS", 3.0)  # long enough to be seen
    for peer in [attacker.bulk() for _ in range(LIMITS.bulk_calls)]:
        peer.send(b"\0")
    wait_until(lambda: _is_full(other))
    wait_until(lambda: not _is_full(other))
    other.close()


def _is_full(session: Session) -> bool:
    """Whether a load is refused for want of a place."""
    session.load(peer := session.bulk(), lease_id=1, blocks=1)
    answer, body = peer.answer()
    peer.close()
    return answer.kind is Kind.ERROR and isinstance(wire.decode_error(answer.code, body, ""), NoSpaceError)


def test_a_client_that_sends_a_byte_now_and_then_is_ended(served: ServedStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wire_listen, "FIRST_BYTES_SECONDS", 0.2)
    monkeypatch.setattr(wire_lane, "FRAME_SECONDS", 0.2)
    monkeypatch.setattr(wire_lane, "_SWEEP_SECONDS", 0.1)
    slow = [
        Peer(served.addresses[0], wire.MAGIC[:3]),
        Peer(served.addresses[0], b"PR"),
        Peer(served.addresses[0], wire.encode_client_hello(Lane.CONTROL)),
        Peer(served.addresses[0], wire.encode_client_hello(Lane.CONTROL) + header(4000, Kind.REQUEST, 1) + b"\0"),
    ]
    for peer in slow:
        peer.receive(wire.SERVER_HELLO_BYTES)
        assert peer.is_ended()
        peer.close()
    assert 4 == served.server.refused_connections["slow"]


def test_idle_connections_beyond_the_limit_are_closed_and_keep_nobody_out_for_long(
    served: ServedStore, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(wire_listen, "FIRST_BYTES_SECONDS", 3.0)
    idle = [Peer(served.addresses[0], b"") for _ in range(200)]
    wait_until(lambda: sum(served.server.refused_connections.values()) == 200)
    assert {"full", "slow"} == set(served.server.refused_connections)
    wait_until(lambda: served.server.connections["undecided"] == 0)
    for peer in idle:
        peer.close()


def test_a_client_that_never_reads_is_not_answered_without_a_bound(served: ServedStore):
    session = Session(served.addresses[1])
    session.control.socket.settimeout(0.5)
    one = request(Method.Match, pb.MatchRequest(session_id=session.session_id, prompt=session.prompt), 91)
    with pytest.raises(TimeoutError):
        _send_for_ever(session.control, one * 100)
    with kvstore.connect(served.addresses[1]) as client:
        assert BLOCKS == client.match(NAMESPACE, PROMPT).blocks
    session.close()


def _send_for_ever(peer: Peer, raw: bytes) -> None:
    for _ in range(2000):
        peer.socket.sendall(raw)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=200),
            st.builds(
                header,
                st.sampled_from([0, 1, 24, 100, 2**31, 2**32 - 1]),
                st.integers(0, 7),
                st.integers(0, 25),
                st.integers(0, 3),
                st.integers(0, 5),
            ),
        ),
        max_size=6,
    ),
    st.booleans(),
)
def test_no_bytes_at_all_harm_the_server(served: ServedStore, pieces: list[bytes], is_bulk: bool):
    session = Session(served.addresses[0])
    try:
        peer = session.bulk() if is_bulk else session.control
        peer.send(b"".join(pieces))
        with suppress(OSError):  # the server may have ended it already
            peer.socket.shutdown(socket.SHUT_WR)
        while peer.receive(4096):
            pass
    finally:
        session.close()
