"""Arena connections that no client of ours makes: nobody gets memory that is not its own, and nothing is kept."""

from __future__ import annotations

import array
import os
import socket
import struct
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvstore
from kvstore.errors import ClosedError, InvalidArgumentError
from kvstore.store import Store, open_store
from kvstore.testing.blocks import store_prompt, verified_blocks
from kvstore.testing.conformance import BLOCKS, LAYOUT, MIB, PROMPT, SECRETS
from kvstore.testing.patience import ANSWER_SECONDS, SLACK_SECONDS, Stopwatch, wait_until
from kvstore.testing.serving import ServedStore
from kvstore.tokens import as_token_array
from kvstore.transport import arena_frames as frames
from kvstore.transport import wire
from kvstore.transport.arena_memory import close_all, receive_frame
from kvstore.transport.convert import namespace_to_proto, prompt_to_proto
from kvstore.transport.limits import ServiceLimits
from kvstore.transport.wire import Kind, Lane, Method, Verdict
from kvstore.types import Namespace
from kvstore.v1 import cache_service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from google.protobuf.message import Message

OURS = Namespace(model="model", revision="revision", layout=LAYOUT, tenant="ours", secret=SECRETS[0])
THEIRS = Namespace(model="model", revision="revision", layout=LAYOUT, tenant="theirs")
LEASE = 77


def dialled(address: str, lane: Lane, session_id: bytes = bytes(16)) -> tuple[socket.socket, Verdict]:
    connected = socket.socket(socket.AF_UNIX) if address.startswith("unix://") else socket.socket()
    connected.settimeout(ANSWER_SECONDS)
    host, _, port = address.rpartition(":")
    connected.connect(address.removeprefix("unix://") if address.startswith("unix://") else (host, int(port)))
    connected.sendall(wire.encode_client_hello(lane, session_id))
    raw = b""
    while len(raw) < wire.SERVER_HELLO_BYTES and (received := connected.recv(wire.SERVER_HELLO_BYTES - len(raw))):
        raw += received
    return connected, Verdict(wire.decode_server_hello(raw).verdict)


class Stranger:
    """A session of tenant `theirs`, by hand, with an arena connection."""

    def __init__(self, address: str) -> None:
        self.control, verdict = dialled(address, Lane.CONTROL)
        assert verdict is Verdict.OK
        self.session_id = pb.SessionResponse.FromString(self.call(Method.Session, pb.SessionRequest())).session_id
        self.arena, verdict = dialled(address, Lane.ARENA, self.session_id)
        assert verdict is Verdict.OK
        header, _, descriptors = receive_frame(self.arena, time.monotonic() + 10)
        assert (Kind.DATA, 2) == (header.kind, len(descriptors))
        self.bell = descriptors[1]
        os.close(descriptors[0])

    def call(self, method: Method, request: Message) -> bytes:
        """A call on the control connection."""
        frame = wire.encode_frame(Kind.REQUEST, request.SerializeToString(), call_id=method, code=method)
        self.control.sendall(frame)
        header, body, _ = receive_frame(self.control, time.monotonic() + 10)
        if header.kind is Kind.ERROR:
            raise wire.decode_error(header.code, body, "there")
        return body

    def lease(self, namespace: Namespace, lease_id: int = LEASE) -> int:
        """Take a lease; returns its blocks."""
        request = pb.OpenNamespaceRequest(session_id=self.session_id, namespace=namespace_to_proto(namespace))
        opened = pb.OpenNamespaceResponse.FromString(self.call(Method.OpenNamespace, request))
        prompt = prompt_to_proto(opened.ns_id, None, as_token_array(PROMPT))
        lease = pb.LeaseRequest(session_id=self.session_id, prompt=prompt, blocks=BLOCKS, lease_id=lease_id)
        return pb.LeaseResponse.FromString(self.call(Method.Lease, lease)).blocks

    def ask(self, frame: bytes) -> tuple[list[int], bytes]:
        """Send to the arena; the descriptors that come, which are the caller's, and the answer."""
        self.arena.sendall(frame)
        got: list[int] = []
        while True:
            header, body, descriptors = receive_frame(self.arena, time.monotonic() + 10)
            got += descriptors
            if header.kind is Kind.ERROR:
                raise wire.decode_error(header.code, body, "there")
            if header.kind is Kind.RESPONSE:
                return got, body

    def is_ended(self) -> bool:
        with suppress(ConnectionError):
            while self.arena.recv(4096):
                pass
        return True

    def close(self) -> None:
        self.control.close()
        self.arena.close()
        os.close(self.bell)


@pytest.fixture
def store() -> Iterator[Store]:
    with open_store(host_bytes=16 * MIB) as store:
        store_prompt(store, OURS, PROMPT)
        store_prompt(store, THEIRS, PROMPT)
        yield store


@pytest.fixture
def served(store: Store, tmp_path: Path) -> Iterator[ServedStore]:
    listen = [f"unix://{tmp_path}/s", "127.0.0.1:0"]
    with ServedStore(store, listen, secrets={"ours": SECRETS}) as served:
        yield served


@pytest.fixture
def stranger(served: ServedStore) -> Iterator[Stranger]:
    stranger = Stranger(served.addresses[0])
    yield stranger
    stranger.close()


def test_a_lease_of_another_session_is_not_placed(served: ServedStore, stranger: Stranger):
    with kvstore.connect(served.addresses[0]) as client:
        with client.lease(client.match(OURS, PROMPT)) as lease:
            lease.load_into(bytearray(LAYOUT.block_bytes))
            for lease_id in (1, 2, 0, 2**64 - 1):  # the client counts from 1 on
                with pytest.raises(ClosedError, match="not open in this session"):
                    stranger.ask(frames.encode_place(5, lease_id, None))
        assert BLOCKS == verified_blocks(client, OURS, PROMPT)


def test_a_namespace_whose_secret_is_not_proven_is_another_one(stranger: Stranger):
    plain = Namespace(model="model", revision="revision", layout=LAYOUT, tenant="ours")
    assert 0 == stranger.lease(plain)
    descriptors, body = stranger.ask(frames.encode_place(5, LEASE, None))
    assert ([], 0) == (descriptors, frames.decode_placed(body).slots.size)


def test_only_extents_of_the_leased_pool_are_given(store: Store, stranger: Stranger):
    assert BLOCKS == stranger.lease(THEIRS)
    (fd,), _ = stranger.ask(frames.encode_place(5, LEASE, None))
    theirs = store._index.space(THEIRS).host.extents()
    held = {extent.extent_id for extent in store._host._stock._holds and theirs}
    assert {extent.extent_id for extent in theirs} == held
    inode = os.fstat(fd).st_ino
    own, other = (
        {os.fstat(extent.fd).st_ino for _, extent in store._index.space(namespace).host._table.extents}
        for namespace in (THEIRS, OURS)
    )
    assert (True, False) == (inode in own, inode in other)
    os.close(fd)


def test_after_a_namespace_was_dropped_its_lease_gives_nothing_new(store: Store, stranger: Stranger):
    assert BLOCKS == stranger.lease(THEIRS)
    store.clear(THEIRS)
    stranger.call(Method.Release, pb.ReleaseRequest(session_id=stranger.session_id, lease_id=LEASE))
    with pytest.raises(ClosedError):
        stranger.ask(frames.encode_place(5, LEASE, None))
    assert 0 == stranger.lease(THEIRS, LEASE + 1)
    descriptors, body = stranger.ask(frames.encode_place(6, LEASE + 1, None))
    assert ([], 0) == (descriptors, frames.decode_placed(body).slots.size)


@pytest.mark.parametrize("part", [1, 2**32 - 2])
def test_a_part_that_cannot_be_read_in_place_is_named(stranger: Stranger, part: int):
    stranger.lease(THEIRS)
    with pytest.raises(InvalidArgumentError, match=f"part is {part}"):
        stranger.ask(frames.encode_place(5, LEASE, part))


def test_a_session_has_one_arena_and_an_unknown_one_none(served: ServedStore, stranger: Stranger):
    for session_id, expected in ((stranger.session_id, Verdict.FULL), (os.urandom(16), Verdict.SESSION)):
        refused, verdict = dialled(served.addresses[0], Lane.ARENA, session_id)
        assert expected is verdict
        refused.close()


def test_no_more_clients_than_the_limit_map_memory_and_the_others_load_all_the_same(store: Store, tmp_path: Path):
    with ServedStore(store, [f"unix://{tmp_path}/full"], limits=ServiceLimits(arena_clients=1)) as served:
        first = Stranger(served.addresses[0])
        with kvstore.connect(served.addresses[0]) as client:
            assert BLOCKS == verified_blocks(client, THEIRS, PROMPT)
            assert (0, "") == (client.arena.loaded_bytes, client.arena.off)
        first.close()


def test_there_is_no_arena_without_a_unix_socket(served: ServedStore, stranger: Stranger):
    for session_id in (stranger.session_id, os.urandom(16)):
        refused, verdict = dialled(served.addresses[1], Lane.ARENA, session_id)
        assert Verdict.NO_ARENA is verdict
        refused.close()


def test_forged_ids_of_mappings_change_nothing(store: Store, served: ServedStore, stranger: Stranger):
    stranger.lease(THEIRS)
    descriptors, _ = stranger.ask(frames.encode_place(5, LEASE, None))
    close_all(descriptors)
    with kvstore.connect(served.addresses[0]) as client:
        with client.lease(client.match(OURS, PROMPT)) as lease:
            lease.load_into(bytearray(LAYOUT.block_bytes))
        assert 2 == store.host_memory().held_extents
        stranger.ask(frames.encode_sync(6, [0, 2, 3, 2**32 - 1]))
        assert 2 == store.host_memory().held_extents
        for _ in range(2):
            stranger.ask(frames.encode_sync(6, [1]))  # its own
        assert 1 == store.host_memory().held_extents


def test_a_bell_that_its_client_has_filled_stops_nobody(store: Store, stranger: Stranger):
    stranger.lease(THEIRS)
    close_all(stranger.ask(frames.encode_place(5, LEASE, None))[0])
    os.eventfd_write(stranger.bell, 2**64 - 2)
    stranger.call(Method.Release, pb.ReleaseRequest(session_id=stranger.session_id, lease_id=LEASE))
    store.clear(THEIRS)
    space = store._index.space(THEIRS)
    watch = Stopwatch()
    assert [True] == [space.host.is_kept(extent) for extent in space.host.ranges()]
    assert watch.seconds < SLACK_SECONDS
    assert struct.pack("<I", 1) == stranger.ask(frames.encode_sync(6, []))[1]


def test_the_same_lease_is_placed_again_and_again_for_nothing(store: Store, stranger: Stranger):
    stranger.lease(THEIRS)
    for call_id in range(1, 50):
        descriptors, _ = stranger.ask(frames.encode_place(call_id, LEASE, None))
        assert (call_id == 1) == bool(descriptors)
        close_all(descriptors)
    (lease,) = store._leases
    assert 1 == len(lease._endings)
    assert 1 == store.host_memory().held_extents


def test_what_is_wanted_back_is_told_at_the_next_sync_whatever_is_asked_between(store: Store, stranger: Stranger):
    stranger.lease(THEIRS)
    close_all(stranger.ask(frames.encode_place(5, LEASE, None))[0])
    pool = store._index.space(THEIRS).host
    assert [True] == [pool.is_kept(extent) for extent in pool.ranges()]
    descriptors, body = stranger.ask(frames.encode_place(6, LEASE, None))
    assert (1, (2,)) == (len(descriptors), frames.decode_placed(body).mapping_ids)  # anew, under another name
    close_all(descriptors)
    assert struct.pack("<I", 1) == stranger.ask(frames.encode_sync(7, []))[1]
    assert b"" == stranger.ask(frames.encode_sync(8, [1]))[1]
    assert 1 == store.host_memory().held_extents
    stranger.ask(frames.encode_sync(9, [2]))
    assert 0 == store.host_memory().held_extents


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=st.binary(min_size=1, max_size=64))
def test_other_bytes_end_the_connection_and_nothing_else(store: Store, served: ServedStore, raw: bytes):
    stranger = Stranger(served.addresses[0])
    with suppress(ConnectionError):
        stranger.arena.sendall(raw + bytes([255]) * wire.HEADER_BYTES)
        stranger.arena.shutdown(socket.SHUT_WR)
    assert stranger.is_ended()
    assert BLOCKS == stranger.lease(THEIRS)
    stranger.close()
    wait_until(lambda: (0, 0) == (store.host_memory().held_extents, served.server.arena_use.clients))


def test_who_keeps_memory_when_its_session_is_over_is_counted_until_it_lets_go(
    store: Store, served: ServedStore, stranger: Stranger
):
    stranger.lease(THEIRS)
    close_all(stranger.ask(frames.encode_place(5, LEASE, None))[0])
    assert 0 == served.server.arena_use.quarantined_bytes
    stranger.control.close()
    wait_until(lambda: served.server.arena_use.quarantined_bytes > 0)
    assert (0, 1) == (store.stats().leases, store.host_memory().held_extents)
    stranger.arena.sendall(frames.encode_sync(6, [1]))
    wait_until(lambda: (0, 0) == (store.host_memory().held_extents, served.server.arena_use.quarantined_bytes))


def test_a_closed_connection_of_a_living_process_frees_nothing(store: Store, served: ServedStore, stranger: Stranger):
    stranger.lease(THEIRS)
    close_all(stranger.ask(frames.encode_place(5, LEASE, None))[0])
    stranger.control.close()
    stranger.arena.close()
    wait_until(lambda: served.server.arena_use.quarantined_bytes > 0)
    assert 1 == store.host_memory().held_extents


def test_descriptors_that_a_client_sends_are_not_kept(served: ServedStore, stranger: Stranger):
    before = len(os.listdir("/proc/self/fd"))
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [stranger.bell] * 100))]
    for _ in range(20):
        stranger.arena.sendmsg([frames.encode_sync(1, [])], rights)
        assert Kind.RESPONSE is receive_frame(stranger.arena, time.monotonic() + 10)[0].kind
    assert len(os.listdir("/proc/self/fd")) < before + 100  # of 2,000


def test_a_client_that_takes_no_answers_keeps_nobody_else_waiting(served: ServedStore, stranger: Stranger):
    stranger.lease(THEIRS)
    stranger.arena.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            stranger.arena.send(frames.encode_place(5, LEASE, None))
    with kvstore.connect(served.addresses[0]) as client:
        assert BLOCKS == verified_blocks(client, OURS, PROMPT)
    stranger.call(Method.Release, pb.ReleaseRequest(session_id=stranger.session_id, lease_id=LEASE))
