"""Limits of a tenant hold over all of its clients, on both lanes; nothing of it is lost, and others go on."""

from __future__ import annotations

import os
import socket
import tempfile
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

import kvstore
from kvstore.errors import InvalidTokensError, NoSpaceError, PermissionDeniedError
from kvstore.testing.blocks import expected_rows, store_prompt
from kvstore.testing.conformance import BLOCKS, LAYOUT, MIB, PROMPT
from kvstore.testing.patience import ANSWER_SECONDS
from kvstore.testing.serving import ServedStore, grpc_address
from kvstore.transport import wire
from kvstore.transport.access import Access, hash_of
from kvstore.transport.limits import ServiceLimits
from kvstore.transport.listen import ListenRules
from kvstore.transport.roles import Role
from kvstore.transport.security import Security, local_security
from kvstore.types import Namespace
from kvstore.v1 import admin_service_pb2 as admin_pb
from kvstore.v1 import cache_service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.transport.client import Client

NAMESPACES = {
    name: Namespace(model="model", revision="revision", layout=LAYOUT, tenant=name) for name in ("ours", "theirs")
}
OURS, THEIRS = NAMESPACES["ours"], NAMESPACES["theirs"]


class Office:
    """A server on loopback where each tenant has a token."""

    def __init__(self, stack: ExitStack, folder: Path, lane: str, limits: ServiceLimits) -> None:
        self._stack = stack
        self._folder = folder
        self.access_file = folder / "access.toml"
        self.access_file.touch(mode=0o600)
        entries = [
            f'[[token]]\nname = "{name}"\ntenant = "{name}"\nrole = "admin"\nhash = "{hash_of(f"kvs_{name}")}"\n'
            for name in NAMESPACES
        ]
        self.access_file.write_text("".join(entries))
        clock = local_security().clock
        security = Security(Access(self.access_file, None, Role.READ, clock), ListenRules(closed=True), None, clock)
        self.store = stack.enter_context(kvstore.open(None, host_bytes=16 * MIB))
        self.served = stack.enter_context(ServedStore(self.store, limits=limits, security=security))
        address = self.served.addresses[0]
        self.address = grpc_address(address) if lane == "grpc" else address

    def connect(self, name: str) -> Client:
        token = self._folder / f"{name}.token"
        token.touch(mode=0o600)
        token.write_text(f"kvs_{name}")
        return self._stack.enter_context(kvstore.connect(self.address, token_file=str(token)))


@pytest.fixture(params=["wire", "grpc"])
def lane(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_leases_of_all_clients_of_a_tenant_count_together(stack: ExitStack, tmp_path: Path, lane: str):
    office = Office(stack, tmp_path, lane, ServiceLimits(leases_per_tenant=2))
    first, second, other = office.connect("ours"), office.connect("ours"), office.connect("theirs")
    store_prompt(first, OURS, PROMPT)
    store_prompt(other, THEIRS, PROMPT)
    match = first.match(OURS, PROMPT)
    with first.lease(match), second.lease(match):
        for client in (first, second):
            with pytest.raises(NoSpaceError, match="tenant 'ours' holds 2 leases"):
                client.lease(match)
        assert 2 == office.store.stats().leases
        with other.lease(other.match(THEIRS, PROMPT)) as lease:
            assert BLOCKS == lease.blocks
    with first.lease(match):
        assert 1 == first.stats().leases


def test_bytes_of_leases_count_each_in_full(stack: ExitStack, tmp_path: Path, lane: str):
    most = (2 * BLOCKS + 1) * LAYOUT.block_bytes
    office = Office(stack, tmp_path, lane, ServiceLimits(leased_bytes_per_tenant=most))
    client = office.connect("ours")
    store_prompt(client, OURS, PROMPT)
    match = client.match(OURS, PROMPT)
    with client.lease(match), client.lease(match):
        with pytest.raises(NoSpaceError, match=f"it may have {most}"):
            client.lease(match)
        assert 1 == client.lease(client.match(OURS, PROMPT[: LAYOUT.block_tokens])).blocks


def test_stages_of_a_tenant_are_given_back_by_every_end(stack: ExitStack, tmp_path: Path, lane: str):
    office = Office(stack, tmp_path, lane, ServiceLimits(stages_per_tenant=1))
    client, other = office.connect("ours"), office.connect("theirs")
    stage = client.stage(OURS, PROMPT)
    with pytest.raises(NoSpaceError, match="tenant 'ours' has begun 1 stores"):
        client.stage(OURS, PROMPT[: LAYOUT.block_tokens])
    assert 1 == office.store.stats().stages
    store_prompt(other, THEIRS, PROMPT)
    stage.write_from(expected_rows(OURS, PROMPT))
    assert BLOCKS == stage.commit().blocks
    client.stage(OURS, [token + 1 for token in PROMPT]).abort()
    client.stage(OURS, [token + 2 for token in PROMPT])
    client.close()
    again = office.connect("ours")
    while again.stats().stages:
        assert again.status().serving
    again.stage(OURS, [token + 3 for token in PROMPT]).abort()


def test_a_rate_says_when_to_come_again(stack: ExitStack, tmp_path: Path, lane: str):
    office = Office(stack, tmp_path, lane, ServiceLimits(calls_per_second_per_tenant=5))
    client, other = office.connect("ours"), office.connect("theirs")

    def ask_for_ever() -> None:
        while True:
            client.match(OURS, PROMPT)

    with pytest.raises(NoSpaceError, match="more than 5 calls a second") as refused:
        ask_for_ever()
    assert refused.value.retry_after_seconds is not None
    assert 0 < refused.value.retry_after_seconds <= 0.2
    assert 0 == other.match(THEIRS, PROMPT).blocks
    assert 1 <= office.served.server.refused_by_tenant_limits["rate"]


def test_a_prompt_beyond_the_limit_is_refused_by_each_call_that_sends_all_of_it(
    stack: ExitStack, tmp_path: Path, lane: str
):
    office = Office(stack, tmp_path, lane, ServiceLimits(prompt_tokens=len(PROMPT)))
    client = office.connect("ours")
    store_prompt(client, OURS, PROMPT)
    longer = [*PROMPT, 1]
    for attempt in (
        lambda: client.match(OURS, longer),
        lambda: client.stage(OURS, longer),
        lambda: client.hint_next_use(OURS, longer, seconds=1),
    ):
        with pytest.raises(InvalidTokensError, match=f"has {len(longer)} tokens, expected at most {len(PROMPT)}"):
            attempt()
    assert BLOCKS == client.match(OURS, PROMPT).blocks


def ask_as_another_user(path: str, uid: int) -> int:
    """In a child that has become another user: whether a raw session may flush. Tells the gRPC status by its end."""
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(ANSWER_SECONDS)
        peer.connect(path)
        peer.sendall(wire.encode_client_hello(wire.Lane.CONTROL))
        peer.recv(wire.SERVER_HELLO_BYTES, socket.MSG_WAITALL)
        codes = []
        for call_id, (method, message) in enumerate(
            ((wire.Method.Session, pb.SessionRequest()), (wire.Method.Flush, admin_pb.FlushRequest())), 1
        ):
            body = message.SerializeToString()
            peer.sendall(wire.encode_frame(wire.Kind.REQUEST, body, call_id=call_id, code=method))
            header = wire.decode_header(peer.recv(wire.HEADER_BYTES, socket.MSG_WAITALL), 0, 2**20)
            peer.recv(header.body_bytes, socket.MSG_WAITALL)
            codes.append(header.code)
        return codes[-1]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(("uid", "status"), [(0, 0), (65534, 7)], ids=["its own", "another"])
def test_another_user_of_a_socket_is_no_administrator(stack: ExitStack, uid: int, status: int):
    folder = stack.enter_context(tempfile.TemporaryDirectory())  # pytest's own are for their owner alone
    os.chmod(folder, 0o755)
    path = f"{folder}/s"
    clock = local_security().clock
    rules = ListenRules(unix_mode=0o660, unix_group=uid)
    security = Security(Access(None, None, Role.WRITE, clock), rules, None, clock)
    store = stack.enter_context(kvstore.open(None, host_bytes=4 * MIB))
    stack.enter_context(ServedStore(store, [f"unix://{path}"], security=security))
    child = os.fork()
    if not child:
        code = 99
        try:
            code = ask_as_another_user(path, uid)
        finally:
            os._exit(code)
    assert status == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_who_comes_over_loopback_without_names_writes_and_operates_nothing(stack: ExitStack, lane: str):
    store = stack.enter_context(kvstore.open(None, host_bytes=4 * MIB))
    served = stack.enter_context(ServedStore(store, security=local_security()))
    address = served.addresses[0]
    client = stack.enter_context(kvstore.connect(grpc_address(address) if lane == "grpc" else address))
    store_prompt(client, OURS, PROMPT)
    assert BLOCKS == client.match(OURS, PROMPT).blocks
    assert BLOCKS == client.stats().stored_blocks
    with pytest.raises(PermissionDeniedError, match="or the Unix socket as the user of the server"):
        client.clear(OURS)


def test_the_servers_user_operates_over_its_socket(stack: ExitStack, tmp_path: Path, lane: str):
    store = stack.enter_context(kvstore.open(None, host_bytes=4 * MIB))
    listen = [f"unix://{tmp_path}/both", f"grpc+unix://{tmp_path}/grpc"]
    served = stack.enter_context(ServedStore(store, listen, security=local_security(Role.READ)))
    shared = grpc_address(served.addresses[0]) if lane == "grpc" else served.addresses[0]
    for address in (shared, served.addresses[1]):
        stack.enter_context(kvstore.connect(address)).flush()
