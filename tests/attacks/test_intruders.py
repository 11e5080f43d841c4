"""Callers who do not belong: the server says so, serves everybody else, and keeps nothing of them."""

from __future__ import annotations

import logging
import os
import socket
import ssl
import struct
import threading
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

import grpc
import numpy as np
import pytest

import kvstore
from kvstore.errors import ClosedError, PermissionDeniedError, UnauthenticatedError, UnavailableError
from kvstore.testing.blocks import expected_rows, store_prompt
from kvstore.testing.conformance import BLOCKS, LAYOUT, MIB, PROMPT
from kvstore.testing.serving import ServedStore
from kvstore.tokens import as_token_array
from kvstore.transport import wire, wire_listen
from kvstore.transport.convert import namespace_to_proto, prompt_to_proto
from kvstore.transport.limits import ServiceLimits
from kvstore.types import Namespace
from kvstore.v1 import admin_service_pb2 as admin_pb
from kvstore.v1 import cache_service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore.transport.client import Client

pytest.importorskip("cryptography", reason="needs the extra certs")
from kvstore.testing.patience import ANSWER_SECONDS, wait_until
from kvstore.testing.securing import Keyring

OURS = Namespace(model="model", revision="revision", layout=LAYOUT, tenant="ours")
THEIRS = Namespace(model="model", revision="revision", layout=LAYOUT, tenant="theirs")
OTHER_PROMPT = [token + 1 for token in PROMPT]
LANES = {"wire": "", "grpc": "grpc+"}


class Fortress:
    """A server behind TLS that knows: a reader, a writer and an administrator of `ours`, and one of `theirs`."""

    def __init__(self, stack: ExitStack, keyring: Keyring, *, limits: ServiceLimits | None = None, **more: str) -> None:
        self.keyring = keyring
        self.tokens = {
            name: keyring.let_in(name, tenant, role)
            for name, tenant, role in (
                ("reader", "ours", "read"),
                ("writer", "ours", "write"),
                ("operator", "ours", "admin"),
                ("stranger", "theirs", "admin"),
                ("root", "*", "admin"),
            )
        }
        self.store = stack.enter_context(kvstore.open(None, host_bytes=4 * MIB))
        self.served = stack.enter_context(
            ServedStore(self.store, ["tls://127.0.0.1:0"], security=keyring.security(**more), limits=limits)
        )
        self.address = self.served.addresses[0]
        self.port = int(self.address.rpartition(":")[2])
        self._stack = stack

    def connect(self, name: str, lane: str = "wire") -> Client:
        """A client that shows somebody's token."""
        address = LANES[lane] + self.address
        return self._stack.enter_context(kvstore.connect(address, tls_ca=self.keyring.ca, token_file=self.tokens[name]))

    def token(self, name: str) -> str:
        with open(self.tokens[name]) as file:
            return file.read().strip()

    def dial(self) -> ssl.SSLSocket:
        """A TLS connection on which nothing was said."""
        context = ssl.create_default_context(cafile=self.keyring.ca)
        connected = socket.create_connection(("127.0.0.1", self.port), timeout=ANSWER_SECONDS)
        return self._stack.enter_context(context.wrap_socket(connected, server_hostname="localhost"))

    def wait_until_nobody_is_left(self) -> None:
        wait_until(lambda: set(self.served.server.connections.values()) == {0})


def loaded_blocks(lease: kvstore.Lease) -> int:
    """How many blocks of PROMPT a lease loads; all of them are right."""
    right = expected_rows(OURS, PROMPT)
    rows = np.zeros_like(right)
    blocks = lease.load_into(rows).blocks
    assert np.array_equal(right[:blocks], rows[:blocks])
    return blocks


@pytest.fixture(scope="module")
def keyring(tmp_path_factory: pytest.TempPathFactory) -> Keyring:
    return Keyring(tmp_path_factory.mktemp("keys"))


@pytest.fixture
def fortress(keyring: Keyring) -> Iterator[Fortress]:
    with ExitStack() as stack:
        yield Fortress(stack, keyring)


@pytest.fixture(params=LANES)
def lane(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def is_served(fortress: Fortress, lane: str = "wire") -> bool:
    return fortress.connect("writer", lane).match(OURS, PROMPT).blocks >= 0


def written(fortress: Fortress, token: str) -> str:
    path = fortress.keyring.folder / "forged.token"
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_text(token)
    return str(path)


FORGERIES = {
    "another": lambda token: "kvs_" + "A" * 43,
    "shortened": lambda token: token[:-1],
    "lengthened": lambda token: token + "A",
    "in capitals": str.upper,
    "its own hash": lambda token: __import__("hashlib").sha256(token.encode()).hexdigest(),
    "a JWT": lambda token: "eyJhbGciOiJub25lIn0.eyJzdWIiOiJyb290In0.",
    "as long as may be": lambda token: "A" * 8192,
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_token_opens_nothing(fortress: Fortress, lane: str, forgery: str):
    path = written(fortress, FORGERIES[forgery](fortress.token("root")))
    with kvstore.connect(LANES[lane] + fortress.address, tls_ca=fortress.keyring.ca, token_file=path) as intruder:
        for attempt in (intruder.stats, intruder.status, lambda: intruder.match(OURS, PROMPT), intruder.flush):
            with pytest.raises((UnauthenticatedError, UnavailableError)):
                attempt()
    assert is_served(fortress, lane)


def test_without_a_token_nothing_is_answered(fortress: Fortress, lane: str):
    told = "name the file that has yours"
    with (
        kvstore.connect(LANES[lane] + fortress.address, tls_ca=fortress.keyring.ca) as intruder,
        pytest.raises(UnauthenticatedError, match=told),
    ):
        intruder.stats()


READER_CALLS: dict[str, Callable[[Client], object]] = {
    "stage": lambda client: client.stage(OURS, PROMPT),
    "hint": lambda client: client.hint_next_use(OURS, PROMPT, seconds=1),
    "pin": lambda client: client.pin(OURS, PROMPT),
    "unpin": lambda client: client.unpin(1),
    "evict": lambda client: client.evict(OURS, PROMPT),
    "evict_writer": lambda client: client.evict_writer(7),
    "clear": lambda client: client.clear(OURS),
    "flush": lambda client: client.flush(),
    "verify": lambda client: client.verify(),
    "scrub": lambda client: client.scrub(),
    "drain": lambda client: client.drain(None),
    "undrain": lambda client: client.undrain(),
    "namespaces": lambda client: client.namespaces(),
    "reset_diagnosis": lambda client: client.reset_diagnosis(),
    "delete_namespace": lambda client: client.delete_namespace(bytes(16)),
}


@pytest.mark.parametrize("call", READER_CALLS)
def test_a_reader_changes_nothing(fortress: Fortress, lane: str, call: str):
    store_prompt(fortress.store, OURS, PROMPT)
    reader = fortress.connect("reader", lane)
    with pytest.raises(PermissionDeniedError, match="'reader' has read"):
        READER_CALLS[call](reader)
    match = reader.match(OURS, PROMPT)
    with reader.lease(match) as lease:
        assert BLOCKS == loaded_blocks(lease)


def test_a_writer_is_no_operator(fortress: Fortress, lane: str):
    writer = fortress.connect("writer", lane)
    store_prompt(writer, OURS, PROMPT)
    for call in set(READER_CALLS) - {"stage", "hint"}:
        with pytest.raises(PermissionDeniedError, match="'writer' has write"):
            READER_CALLS[call](writer)
    assert BLOCKS == writer.match(OURS, PROMPT).blocks


def test_an_operator_of_one_tenant_touches_nothing_of_another(fortress: Fortress, lane: str):
    store_prompt(fortress.connect("writer"), OURS, PROMPT)
    stranger = fortress.connect("stranger", lane)
    for attempt in (
        lambda: stranger.match(OURS, PROMPT),
        lambda: stranger.stage(OURS, PROMPT),
        lambda: stranger.clear(OURS),
        lambda: stranger.evict(OURS, PROMPT),
        lambda: stranger.pin(OURS, PROMPT),
    ):
        with pytest.raises(PermissionDeniedError, match="may use namespaces of tenant 'theirs', not of 'ours'"):
            attempt()
    assert BLOCKS == fortress.store.match(OURS, PROMPT).blocks


def test_a_tenant_hears_nothing_of_others(fortress: Fortress, lane: str):
    writer, stranger = fortress.connect("writer", lane), fortress.connect("stranger", lane)
    before = stranger.stats()
    store_prompt(writer, OURS, PROMPT)
    writer.match(OURS, PROMPT)
    assert before == stranger.stats()
    assert () == stranger.events().events
    assert (0, 0, ()) == tuple(getattr(stranger.verify(), name) for name in ("namespaces", "blocks", "problems"))
    ns_id = writer.namespace_id(OURS)
    assert {ns_id} == {event.ns_id for event in writer.events().events}
    assert (1, BLOCKS) == (writer.stats().lookups, writer.stats().stored_blocks)
    assert (0, False) == ((nothing := stranger.events()).next_after, nothing.gap)
    store_prompt(stranger, THEIRS, PROMPT)
    heard = stranger.events()
    assert {stranger.namespace_id(THEIRS)} == {event.ns_id for event in heard.events}
    assert list(range(1, heard.next_after + 1)) == [event.sequence for event in heard.events]
    everything = fortress.connect("root", lane)
    assert {ns_id, stranger.namespace_id(THEIRS)} == {event.ns_id for event in everything.events().events}
    assert 2 * BLOCKS == everything.stats().stored_blocks


def test_the_pin_of_another_tenant_is_unknown(fortress: Fortress, lane: str):
    store_prompt(fortress.store, OURS, PROMPT)
    operator, stranger = fortress.connect("operator", lane), fortress.connect("stranger", lane)
    pin = operator.pin(OURS, PROMPT)
    assert [False] * 5 == [stranger.unpin(pin_id) for pin_id in range(pin.pin_id - 1, pin.pin_id + 4)]
    assert 1 == fortress.store.stats().pins
    assert operator.unpin(pin.pin_id)


class Intruder:
    """Raw gRPC calls with somebody's token, and whatever session id one likes."""

    def __init__(self, fortress: Fortress, name: str) -> None:
        with open(fortress.keyring.ca, "rb") as file:
            credentials = grpc.ssl_channel_credentials(file.read())
        self.channel = grpc.secure_channel(f"127.0.0.1:{fortress.port}", credentials)
        self._metadata = (("authorization", f"Bearer {fortress.token(name)}"),)

    def call(self, method: str, request, response_type, metadata=None, service: str = "CacheService"):
        ask = self.channel.unary_unary(
            f"/kvstore.v1.{service}/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=response_type.FromString,
        )
        return ask(request, timeout=ANSWER_SECONDS, metadata=self._metadata if metadata is None else metadata)

    def code(self, *arguments, **named) -> grpc.StatusCode:
        try:
            self.call(*arguments, **named)
        except grpc.RpcError as err:
            return err.code()
        return grpc.StatusCode.OK


@pytest.fixture
def intruder(fortress: Fortress) -> Iterator[Intruder]:
    intruder = Intruder(fortress, "stranger")
    yield intruder
    intruder.channel.close()


def test_the_session_of_another_tenant_is_unknown_with_all_that_it_holds(fortress: Fortress, intruder: Intruder):
    store_prompt(fortress.store, OURS, PROMPT)
    writer = fortress.connect("writer", "grpc")
    with writer.lease(writer.match(OURS, PROMPT)) as lease, writer.stage(OURS, OTHER_PROMPT) as stage:
        stage.write_from(expected_rows(OURS, OTHER_PROMPT))
        (session_id,) = [session.session_id for session in fortress.served.server._state.sessions]
        for held_id in range(1, 4):
            for method, request, response_type in (
                ("Release", pb.ReleaseRequest(session_id=session_id, lease_id=held_id), pb.ReleaseResponse),
                ("Commit", pb.CommitRequest(session_id=session_id, stage_id=held_id), pb.CommitResponse),
                ("Abort", pb.AbortRequest(session_id=session_id, stage_id=held_id), pb.AbortResponse),
            ):
                assert grpc.StatusCode.UNAUTHENTICATED is intruder.code(method, request, response_type)
        opening = pb.OpenNamespaceRequest(session_id=session_id, namespace=namespace_to_proto(THEIRS))
        assert grpc.StatusCode.UNAUTHENTICATED is intruder.code("OpenNamespace", opening, pb.OpenNamespaceResponse)
        clearing = admin_pb.ClearRequest(session_id=session_id, ns_id=writer.namespace_id(OURS))
        assert grpc.StatusCode.UNAUTHENTICATED is intruder.code(
            "Clear", clearing, admin_pb.ClearResponse, service="AdminService"
        )
        assert BLOCKS == loaded_blocks(lease)
    assert BLOCKS == fortress.store.match(OURS, OTHER_PROMPT).blocks


def test_a_commit_that_is_sent_again_over_grpc_changes_nothing(fortress: Fortress):
    writer, again = fortress.connect("writer", "grpc"), Intruder(fortress, "writer")
    stage = writer.stage(OURS, PROMPT)
    stage.write_from(expected_rows(OURS, PROMPT))
    (session,) = fortress.served.server._state.sessions
    (stage_id,) = session.stages._held
    request = pb.CommitRequest(session_id=session.session_id, stage_id=stage_id)
    assert BLOCKS == again.call("Commit", request, pb.CommitResponse).blocks
    for _ in range(3):
        assert grpc.StatusCode.FAILED_PRECONDITION is again.code("Commit", request, pb.CommitResponse)
    again.channel.close()
    assert BLOCKS == fortress.store.stats().stored_blocks


class WireSession:
    """A raw session of the fast lane with somebody's token."""

    def __init__(self, fortress: Fortress, name: str) -> None:
        self._peer = fortress.dial()
        self._peer.sendall(wire.encode_client_hello(wire.Lane.CONTROL))
        self._receive(wire.SERVER_HELLO_BYTES)
        self._call_ids = iter(range(1, 100))
        token = fortress.token(name)
        self.session_id = pb.SessionResponse.FromString(self.ask("Session", pb.SessionRequest(token=token))).session_id
        request = pb.OpenNamespaceRequest(session_id=self.session_id, namespace=namespace_to_proto(OURS))
        self.ns_id = pb.OpenNamespaceResponse.FromString(self.ask("OpenNamespace", request)).ns_id

    def ask(self, method: str, message) -> bytes:
        code, call_id = wire.Method[method], next(self._call_ids)
        body = message.SerializeToString()
        self._peer.sendall(wire.encode_frame(wire.Kind.REQUEST, body, call_id=call_id, code=code))
        header = wire.decode_header(self._receive(wire.HEADER_BYTES), 0, MIB)
        answer = self._receive(header.body_bytes)
        if header.kind is wire.Kind.ERROR:
            raise wire.decode_error(header.code, answer, "there")
        return answer

    def _receive(self, size: int) -> bytes:
        raw = b""
        while len(raw) < size:
            raw += self._peer.recv(size - len(raw))
        return raw


def test_a_commit_that_is_sent_again_on_the_fast_lane_changes_nothing(fortress: Fortress):
    session = WireSession(fortress, "writer")
    prompt = prompt_to_proto(session.ns_id, None, as_token_array(PROMPT))
    session.ask("Stage", pb.StageRequest(session_id=session.session_id, prompt=prompt, stage_id=7))
    request = pb.CommitRequest(session_id=session.session_id, stage_id=7)
    assert 0 == pb.CommitResponse.FromString(session.ask("Commit", request)).blocks
    for _ in range(3):
        with pytest.raises(ClosedError):
            session.ask("Commit", request)
    with pytest.raises(UnavailableError, match="ended this session"):
        session.ask("Commit", pb.CommitRequest(session_id=bytes(16), stage_id=7))
    assert (0, 0) == (fortress.store.stats().stored_blocks, fortress.store.stats().stages)


BAD_METADATA = {
    "two of them": lambda token: [("authorization", f"Bearer {token}"), ("authorization", f"Bearer {token}")],
    "another scheme": lambda token: [("authorization", f"Basic {token}")],
    "no scheme": lambda token: [("authorization", token)],
    "an empty one": lambda token: [("authorization", "")],
    "only the scheme": lambda token: [("authorization", "Bearer ")],
    "a space more": lambda token: [("authorization", f"Bearer  {token}")],
    "another header": lambda token: [("x-authorization", f"Bearer {token}")],
}


@pytest.mark.parametrize("bad", BAD_METADATA)
def test_an_authorization_that_is_none_lets_nobody_in(fortress: Fortress, intruder: Intruder, bad: str):
    metadata = BAD_METADATA[bad](fortress.token("root"))
    assert grpc.StatusCode.UNAUTHENTICATED is intruder.code(
        "GetStats", pb.GetStatsRequest(), pb.GetStatsResponse, metadata=metadata
    )


def test_metadata_without_end_is_refused_before_it_is_looked_at(fortress: Fortress, intruder: Intruder):
    for size in (10_000, 100_000, 1_000_000):
        metadata = [("authorization", "Bearer " + "A" * size)]
        code = intruder.code("GetStats", pb.GetStatsRequest(), pb.GetStatsResponse, metadata=metadata)
        assert code in (
            grpc.StatusCode.UNAUTHENTICATED,
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            grpc.StatusCode.UNAVAILABLE,
        )
    assert is_served(fortress, "grpc")


def test_a_token_that_is_revoked_ends_its_sessions_and_opens_no_more(fortress: Fortress, lane: str):
    store_prompt(fortress.store, OURS, PROMPT)
    writer, reader = fortress.connect("writer", lane), fortress.connect("reader", lane)
    lease = writer.lease(writer.match(OURS, PROMPT))
    assert 1 == fortress.store.stats().leases
    fortress.keyring.keep_out("writer")
    fortress.served.reload()
    with pytest.raises((UnauthenticatedError, UnavailableError)):
        loaded_blocks(lease)
    with pytest.raises(UnauthenticatedError):
        writer.match(OURS, PROMPT)
    wait_until(lambda: fortress.store.stats().leases == 0)
    assert BLOCKS == reader.match(OURS, PROMPT).blocks


def test_a_new_token_in_the_same_file_needs_no_restart_of_anybody(fortress: Fortress, lane: str):
    writer = fortress.connect("writer", lane)
    assert 0 == writer.match(OURS, PROMPT).blocks
    fortress.keyring.let_in("writer", "ours", "write")
    fortress.served.reload()
    wait_until(lambda: fortress.served.server.connections["undecided"] == 0)
    with suppress(UnauthenticatedError):  # the session that ends tells so once, at most
        writer.match(OURS, PROMPT)
    assert 0 == writer.match(OURS, PROMPT).blocks


def test_plain_bytes_on_a_port_of_tls_are_ended(fortress: Fortress):
    for first_bytes in (
        wire.encode_client_hello(wire.Lane.CONTROL),
        wire.HTTP2_PREFACE,
        b"GET / HTTP/1.1\r\n\r\n",
        os.urandom(100),
        struct.pack(">BHH", 22, 0x0301, 0xFFFF),
    ):
        with socket.create_connection(("127.0.0.1", fortress.port), timeout=ANSWER_SECONDS) as plain:
            plain.sendall(first_bytes)
            with suppress(OSError):  # it may be over already
                plain.shutdown(socket.SHUT_WR)
                assert wire.MAGIC not in plain.recv(1000)
    fortress.wait_until_nobody_is_left()
    assert is_served(fortress)


def test_foreign_bytes_inside_of_tls_are_ended_too(fortress: Fortress):
    for first_bytes in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(100), b"\x93kvwire?"):
        peer = fortress.dial()
        peer.sendall(first_bytes)
        with suppress(ConnectionError):
            assert b"" == peer.recv(100)
    fortress.wait_until_nobody_is_left()
    assert is_served(fortress)


@pytest.mark.parametrize("version", ["TLSv1_1", "TLSv1_2"])
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_an_older_tls_is_not_spoken(fortress: Fortress, version: str):
    context = ssl.create_default_context(cafile=fortress.keyring.ca)
    context.minimum_version = ssl.TLSVersion.TLSv1_1
    context.maximum_version = ssl.TLSVersion[version]
    context.set_ciphers("ALL:@SECLEVEL=0")
    with (
        socket.create_connection(("127.0.0.1", fortress.port), timeout=ANSWER_SECONDS) as connected,
        pytest.raises(OSError, match=r"(?i)version|alert|reset|eof"),
    ):
        context.wrap_socket(connected, server_hostname="localhost")


def test_a_server_of_another_ca_is_not_believed(fortress: Fortress, tmp_path_factory: pytest.TempPathFactory):
    other = Keyring(tmp_path_factory.mktemp("other"))
    for lane, kind in (("wire", UnauthenticatedError), ("grpc", UnavailableError)):
        token = fortress.tokens["writer"]
        with (
            kvstore.connect(LANES[lane] + fortress.address, tls_ca=other.ca, token_file=token) as client,
            pytest.raises(kind, match=r"(?i)certificate.*(not trusted|verify.failed)"),
        ):
            client.stats()
    fortress.wait_until_nobody_is_left()
    assert is_served(fortress)


def test_a_server_of_another_name_is_not_believed(fortress: Fortress):
    address = f"tls://127.0.0.2:{fortress.port}"
    with ExitStack() as stack:
        served = stack.enter_context(
            ServedStore(fortress.store, ["tls://127.0.0.2:0"], security=fortress.keyring.security())
        )
        address = served.addresses[0]
        client = stack.enter_context(kvstore.connect(address, tls_ca=fortress.keyring.ca))
        with pytest.raises(UnauthenticatedError, match=r"not valid for '127\.0\.0\.2'"):
            client.stats()


@pytest.mark.parametrize(("cert", "key"), [("server.pem", "server.key"), (None, None)], ids=["of a server", "none"])
def test_a_client_without_a_certificate_of_its_own_is_sent_away(
    keyring: Keyring, lane: str, cert: str | None, key: str | None
):
    with ExitStack() as stack:
        fortress = Fortress(stack, keyring, tls__require_client_cert="true")
        certificate = keyring.path(cert) if cert else None
        client = stack.enter_context(
            kvstore.connect(
                LANES[lane] + fortress.address,
                tls_ca=keyring.ca,
                tls_cert=certificate,
                tls_key=keyring.path(key) if key else None,
                token_file=fortress.tokens["root"],
            )
        )
        with pytest.raises((UnauthenticatedError, UnavailableError)):
            client.stats()
        fortress.wait_until_nobody_is_left()
        assert fortress.served.server.refused_connections["tls"] >= 1


def test_a_certificate_opens_what_its_name_says_and_that_of_another_ca_nothing(
    keyring: Keyring, lane: str, tmp_path_factory: pytest.TempPathFactory
):
    keyring.let_in_certificate("engines", "DNS:engine", "ours", "write")
    other = Keyring(tmp_path_factory.mktemp("other"))
    with ExitStack() as stack:
        fortress = Fortress(stack, keyring)

        def connect(keys: Keyring, name: str) -> Client:
            return stack.enter_context(
                kvstore.connect(
                    LANES[lane] + fortress.address,
                    tls_ca=keyring.ca,
                    tls_cert=keys.path(f"client-{name}.pem"),
                    tls_key=keys.path(f"client-{name}.key"),
                )
            )

        engine = connect(keyring, "engine")
        store_prompt(engine, OURS, PROMPT)
        assert BLOCKS == engine.match(OURS, PROMPT).blocks
        with engine.lease(engine.match(OURS, PROMPT)) as lease:
            assert BLOCKS == loaded_blocks(lease)
        with pytest.raises(PermissionDeniedError):
            engine.flush()
        for intruder in (connect(keyring, "stranger"), connect(other, "engine")):
            with pytest.raises((UnauthenticatedError, UnavailableError)):
                intruder.stats()


def test_slow_handshakes_are_ended_and_delay_nobody(keyring: Keyring, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wire_listen, "FIRST_BYTES_SECONDS", 3.0)  # for who is let in, too
    with ExitStack() as stack:
        fortress = Fortress(stack, keyring, limits=ServiceLimits(connections=64))
        slow = [
            stack.enter_context(socket.create_connection(("127.0.0.1", fortress.port), timeout=ANSWER_SECONDS))
            for _ in range(50)
        ]
        for one in slow:
            one.sendall(struct.pack(">BHH", 22, 0x0301, 500) + b"\1")  # the beginning of a hello
        shaken = [fortress.dial() for _ in range(5)]
        assert is_served(fortress)
        for one in (*slow, *shaken):
            with suppress(ConnectionError):
                assert b"" == one.recv(1)
        wait_until(lambda: fortress.served.server.refused_connections.get("slow", 0) == 55)
        assert is_served(fortress)


def test_the_bytes_of_a_session_come_from_where_it_was_opened(fortress: Fortress, keyring: Keyring):
    """A session id that leaked opens no connection for bytes to who comes another way, or with another certificate."""
    session_id = WireSession(fortress, "writer").session_id
    context = ssl.create_default_context(cafile=keyring.ca)
    context.load_cert_chain(keyring.path("client-stranger.pem"), keyring.path("client-stranger.key"))
    connected = socket.create_connection(("127.0.0.1", fortress.port), timeout=ANSWER_SECONDS)
    with context.wrap_socket(connected, server_hostname="localhost") as other:
        other.sendall(wire.encode_client_hello(wire.Lane.BULK, session_id))
        assert wire.Verdict.SESSION == wire.decode_server_hello(other.recv(wire.SERVER_HELLO_BYTES)).verdict


def test_many_refused_callers_leave_nothing_behind(fortress: Fortress, lane: str):
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    assert is_served(fortress, lane)
    path = written(fortress, "kvs_" + "B" * 43)

    def refuse(times: int) -> None:
        for _ in range(times):
            with (
                kvstore.connect(LANES[lane] + fortress.address, tls_ca=fortress.keyring.ca, token_file=path) as client,
                pytest.raises(UnauthenticatedError),
            ):
                client.stats()

    refuse(3)
    before, threads = descriptors(), threading.active_count()
    refuse(30)
    wait_until(lambda: descriptors() <= before + 5)
    assert threads + 5 >= threading.active_count()
    assert len(fortress.served.server._state.sessions) <= 1


def test_no_token_is_in_the_log_or_in_what_callers_are_told(
    fortress: Fortress, lane: str, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.DEBUG)
    told = []
    for name in ("reader", "stranger"):
        client = fortress.connect(name, lane)
        for call in READER_CALLS.values():
            with suppress(kvstore.KvstoreError):
                call(client)
        with pytest.raises(kvstore.KvstoreError) as refused:
            client.clear(OURS)
        told.append(str(refused.value))
    fortress.keyring.keep_out("reader")
    fortress.served.reload()
    shown = caplog.text + "".join(told)
    secrets = [fortress.token(name) for name in fortress.tokens]
    assert [] == [secret for secret in secrets if secret in shown or secret[4:20] in shown]
