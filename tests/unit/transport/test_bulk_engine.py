"""Loads and stores through an engine, between a server and a client of this process: right, or over sockets."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import pytest

import kvstore
from kvstore.config import BULK_CHOICES
from kvstore.errors import BulkEngineError, ConfigError, InvalidArgumentError, PermissionDeniedError, UnavailableError
from kvstore.store.settings import StoreSettings
from kvstore.testing.blocks import expected_rows, store_prompt, verified_blocks
from kvstore.testing.conformance import BLOCKS, LAYOUT, MIB, PROMPT
from kvstore.testing.patience import ANSWER_SECONDS
from kvstore.testing.serving import ServedStore
from kvstore.testing.vm_engine import VmEngine, VmPeer, VmTransfer
from kvstore.transport import bulk_choice, bulk_client, nixl_engine
from kvstore.transport.address import parse_address
from kvstore.transport.aio import AsyncClient, AsyncKeeper
from kvstore.transport.bulk_client import BulkEngineClient
from kvstore.transport.bulk_memory import Landing
from kvstore.transport.bulk_polling import Poller
from kvstore.transport.bulk_rows import BulkEngineHost, EngineSeat, TransferEnd
from kvstore.transport.client import Client
from kvstore.transport.keeper import LinkKeeper
from kvstore.transport.link import Deadlines
from kvstore.transport.principal import Principal
from kvstore.transport.roles import Role
from kvstore.transport.wire_link import WireLink
from kvstore.transport.wire_pool import Grip
from kvstore.types import Namespace
from kvstore.v1 import cache_service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvstore.transport.bulk import Move

NAMESPACE = Namespace(model="model", revision="revision", layout=LAYOUT)
ROW_BYTES = LAYOUT.block_bytes
PROMPT_BYTES = BLOCKS * ROW_BYTES


class BadEngine(VmEngine):
    """A server's engine that does something `before` its next transfers, and `harm` to them."""

    def __init__(self) -> None:
        super().__init__()
        self.before: Callable[[Sequence[Move]], None] = lambda _: None
        self.harm: Callable[[Sequence[Move]], None] = lambda _: None

    def connect(self, metadata: bytes) -> VmPeer:
        peer = super().connect(metadata)
        return BadPeer(self, peer._pid, peer._regions)


class BadPeer(VmPeer):
    def _begin(self, call: Callable[..., int], moves: Sequence[Move]) -> VmTransfer:
        transfer = super()._begin(call, moves)
        assert isinstance(self._engine, BadEngine)
        return BadTransfer(transfer, self._engine, moves)


class BadTransfer(VmTransfer):
    def __init__(self, right: VmTransfer, engine: BadEngine, moves: Sequence[Move]) -> None:
        self._right, self._engine, self._all = right, engine, moves

    def wait(self, ends_at: float, is_unwanted: Callable[[], bool]) -> None:
        self._engine.before(self._all)
        self._right.wait(ends_at, is_unwanted)
        self._engine.harm(self._all)


@pytest.fixture
def engine() -> BadEngine:
    return BadEngine()


@pytest.fixture
def host(engine: BadEngine) -> BulkEngineHost:
    return BulkEngineHost(engine, ())


@pytest.fixture
def store() -> Iterator[kvstore.KvStore]:
    with kvstore.open(None, host_bytes=16 * MIB) as store:
        yield store


@pytest.fixture
def served(store: kvstore.KvStore, host: BulkEngineHost) -> Iterator[ServedStore]:
    with ServedStore(store, bulk_engine=host) as served:
        yield served


@contextmanager
def client_of(served: ServedStore, *, piece_rows: int = 3) -> Iterator[Client]:
    """A client whose landing holds so many rows in a piece, so that a prompt takes several calls."""
    engine = VmEngine()
    bulk = BulkEngineClient(engine, Landing(engine, piece_bytes=piece_rows * ROW_BYTES, pieces=2))
    keeper = LinkKeeper(parse_address(served.addresses[0]), None, bulk)
    with Client(keeper, Deadlines(lookup_seconds=10.0, bulk_seconds=30.0)) as client:
        yield client


def moved(client: Client) -> tuple[int, int]:
    status = client.bulk
    assert status is not None
    return status.moved_bytes, status.failures


def test_bytes_go_through_the_engine_and_are_right(served: ServedStore, host: BulkEngineHost):
    with client_of(served) as client:
        assert BLOCKS == store_prompt(client, NAMESPACE, PROMPT).blocks
        assert BLOCKS == verified_blocks(client, NAMESPACE, PROMPT)
        assert (2 * PROMPT_BYTES, 0) == moved(client)
    assert {"store": PROMPT_BYTES, "load": PROMPT_BYTES} == host.moved_bytes
    assert {} == host.failures


def test_rows_that_are_compared_with_digests_come_with_an_engine_too(served: ServedStore, store: kvstore.KvStore):
    store_prompt(store, NAMESPACE, PROMPT)
    rows = np.zeros((BLOCKS, ROW_BYTES), dtype=np.uint8)
    with client_of(served) as client, client.lease(client.match(NAMESPACE, PROMPT)) as lease:
        assert BLOCKS == lease.load_verified(rows).blocks
    assert np.array_equal(expected_rows(NAMESPACE, PROMPT), rows)


def test_a_client_without_an_engine_is_served_by_sockets(served: ServedStore, host: BulkEngineHost):
    with kvstore.connect(served.addresses[0]) as client:
        assert client.bulk is None
        store_prompt(client, NAMESPACE, PROMPT)
        assert BLOCKS == verified_blocks(client, NAMESPACE, PROMPT)
    assert {} == host.moved_bytes


def test_a_server_without_an_engine_is_asked_for_frames(store: kvstore.KvStore):
    with ServedStore(store) as served, client_of(served) as client:
        store_prompt(client, NAMESPACE, PROMPT)
        assert BLOCKS == verified_blocks(client, NAMESPACE, PROMPT)
        assert (0, 0) == moved(client)


def test_rows_that_do_not_fit_the_landing_go_over_sockets(served: ServedStore, host: BulkEngineHost):
    engine = VmEngine()
    bulk = BulkEngineClient(engine, Landing(engine, piece_bytes=ROW_BYTES // 2, pieces=1))
    keeper = LinkKeeper(parse_address(served.addresses[0]), None, bulk)
    with Client(keeper, Deadlines(lookup_seconds=10.0)) as client:
        store_prompt(client, NAMESPACE, PROMPT)
        assert BLOCKS == verified_blocks(client, NAMESPACE, PROMPT)
    assert {} == host.moved_bytes


def test_calls_that_find_no_piece_go_over_sockets(served: ServedStore):
    with client_of(served) as client:
        store_prompt(client, NAMESPACE, PROMPT)
        threads = [threading.Thread(target=verified_blocks, args=(client, NAMESPACE, PROMPT)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert 0 == moved(client)[1]


def test_a_part_of_a_prompt_that_is_stored_is_passed_over(served: ServedStore):
    with client_of(served) as client:
        half = PROMPT[: len(PROMPT) // 2]
        store_prompt(client, NAMESPACE, half)
        store_prompt(client, NAMESPACE, PROMPT)
        assert BLOCKS == verified_blocks(client, NAMESPACE, PROMPT)


def test_blocks_from_disk_go_through_the_engine_too(tmp_path, host: BulkEngineHost):
    with kvstore.open(tmp_path, host_bytes=8 * MIB, disk_bytes=64 * MIB) as store:
        store_prompt(store, NAMESPACE, PROMPT)
    with (
        kvstore.open(tmp_path, host_bytes=8 * MIB, disk_bytes=64 * MIB) as store,
        ServedStore(store, bulk_engine=host) as served,
        client_of(served) as client,
    ):
        assert BLOCKS == verified_blocks(client, NAMESPACE, PROMPT)
        assert (PROMPT_BYTES, 0) == moved(client)


def fail(_: Sequence[Move]) -> None:
    raise BulkEngineError("an adapter broke")


def flip_local(moves: Sequence[Move]) -> None:
    """What was read into this process is not what was sent."""
    import ctypes

    ctypes.memset(moves[0].local, 0xA5, 16)


def flip_remote(moves: Sequence[Move]) -> None:
    """What was written to the client, who is in this process, is not what was to be written."""
    import ctypes

    ctypes.memset(moves[-1].remote, 0xA5, 16)


@pytest.mark.parametrize("harm", [fail, flip_remote])
def test_a_load_that_the_engine_spoils_is_right_over_sockets(
    served: ServedStore, engine: BadEngine, harm: Callable[[Sequence[Move]], None]
):
    with client_of(served) as client:
        store_prompt(client, NAMESPACE, PROMPT)
        engine.harm = harm
        assert BLOCKS == verified_blocks(client, NAMESPACE, PROMPT)
        assert 1 == moved(client)[1]
        engine.harm = lambda _: None
        assert BLOCKS == verified_blocks(client, NAMESPACE, PROMPT)
        assert PROMPT_BYTES == moved(client)[0], "the engine was used again at once"


@pytest.mark.parametrize("harm", [fail, flip_local])
def test_a_store_that_the_engine_spoils_is_no_store(
    served: ServedStore, engine: BadEngine, harm: Callable[[Sequence[Move]], None], store: kvstore.KvStore
):
    engine.harm = harm
    with client_of(served) as client:
        with pytest.raises(UnavailableError, match="stage has ended"):
            store_prompt(client, NAMESPACE, PROMPT)
        assert 0 == client.match(NAMESPACE, PROMPT).blocks
        assert BLOCKS == store_prompt(client, NAMESPACE, PROMPT).blocks
        assert BLOCKS == verified_blocks(client, NAMESPACE, PROMPT)
    assert (0, 0) == (store.stats().leases, store.stats().stages)


def test_after_a_failure_the_engine_rests_and_is_used_again(
    served: ServedStore, engine: BadEngine, host: BulkEngineHost, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(bulk_client, "REST_SECONDS", 0.0)
    with client_of(served) as client:
        store_prompt(client, NAMESPACE, PROMPT)
        engine.harm = fail
        assert BLOCKS == verified_blocks(client, NAMESPACE, PROMPT)
        engine.harm = lambda _: None
        before, _ = moved(client)
        assert BLOCKS == verified_blocks(client, NAMESPACE, PROMPT)
        assert before + PROMPT_BYTES == moved(client)[0]
    assert {"load": 1} == host.failures


def test_a_peer_that_cannot_be_reached_costs_a_store_nothing(
    served: ServedStore, host: BulkEngineHost, monkeypatch: pytest.MonkeyPatch
):
    with client_of(served) as client:
        monkeypatch.setattr(VmEngine, "connect", lambda *_: fail(()))
        monkeypatch.setattr(BadEngine, "connect", lambda *_: fail(()))
        assert BLOCKS == store_prompt(client, NAMESPACE, PROMPT).blocks
        assert (0, 1) == moved(client)
    assert {"connect": 1} == host.failures


def test_a_client_that_gets_no_thread_to_poll_its_engine_uses_sockets_and_the_engine_later(
    served: ServedStore, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(bulk_client, "REST_SECONDS", 0.0)
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "bulk-engine-poll":
            raise RuntimeError("can't start new thread")
        start(thread)

    with client_of(served) as client:
        client.match(NAMESPACE, PROMPT)
        with monkeypatch.context() as scarce:
            scarce.setattr(threading.Thread, "start", refuse)
            assert BLOCKS == store_prompt(client, NAMESPACE, PROMPT).blocks
            for _ in range(4):
                assert BLOCKS == verified_blocks(client, NAMESPACE, PROMPT)
        assert (0, 5) == moved(client)
        assert BLOCKS == verified_blocks(client, NAMESPACE, PROMPT)
        assert (PROMPT_BYTES, 5) == moved(client)


def test_an_engine_that_could_not_be_polled_once_is_polled_again():
    engine = VmEngine()
    polled, broken = threading.Event(), threading.Event()

    def poll() -> None:
        polled.set()
        if not broken.is_set():
            broken.set()
            raise BulkEngineError("it is said so")

    engine.poll = poll  # type: ignore[method-assign]
    poller = Poller(engine)
    with poller.at_work():
        assert broken.wait(ANSWER_SECONDS)
        for thread in threading.enumerate():
            if thread.name == "bulk-engine-poll":
                thread.join(ANSWER_SECONDS)
    polled.clear()
    with poller.at_work():
        assert polled.wait(ANSWER_SECONDS)
    poller.close()


def test_slots_are_held_until_a_transfer_has_ended(engine: BadEngine, host: BulkEngineHost):
    begun, go_on = threading.Event(), threading.Event()

    def wait(_: Sequence[Move]) -> None:
        begun.set()
        go_on.wait(ANSWER_SECONDS)

    with (
        kvstore.open(None, host_bytes=16 * MIB, settings=StoreSettings(poison_freed=True)) as store,
        ServedStore(store, bulk_engine=host) as served,
        client_of(served, piece_rows=BLOCKS) as client,
    ):
        store_prompt(client, NAMESPACE, PROMPT)
        lease = client.lease(client.match(NAMESPACE, PROMPT))
        rows = np.zeros((BLOCKS, ROW_BYTES), dtype=np.uint8)
        engine.before = wait
        loading = threading.Thread(target=lease.load_into, args=(rows,))
        loading.start()
        assert begun.wait(ANSWER_SECONDS)
        lease.release()
        left_blocks = store.evict(NAMESPACE, PROMPT)
        go_on.set()
        loading.join()
        assert 0 == left_blocks
        assert np.array_equal(expected_rows(NAMESPACE, PROMPT), rows)
        assert (PROMPT_BYTES * 2, 0) == moved(client)
        engine.before = lambda _: None
        assert BLOCKS == store.evict(NAMESPACE, PROMPT)


def test_memory_of_a_closed_client_is_known_to_nobody(served: ServedStore, engine: BadEngine):
    with client_of(served) as client:
        store_prompt(client, NAMESPACE, PROMPT)
    served.stop()
    assert 0 == engine.regions


def test_in_the_child_of_a_fork_nothing_goes_through_the_engine(served: ServedStore, monkeypatch: pytest.MonkeyPatch):
    with client_of(served) as client:
        store_prompt(client, NAMESPACE, PROMPT)
        before = moved(client)
        pid = os.getpid()
        monkeypatch.setattr(bulk_client.os, "getpid", lambda: pid + 1)
        assert BLOCKS == verified_blocks(client, NAMESPACE, PROMPT)
        assert before == moved(client)
        monkeypatch.undo()


async def store_and_load(served: ServedStore, bulk: BulkEngineClient) -> int:
    keeper = AsyncKeeper(parse_address(served.addresses[0]), None, bulk)
    async with AsyncClient(keeper, Deadlines(lookup_seconds=10.0, bulk_seconds=30.0)) as client:
        stage = await client.stage(NAMESPACE, PROMPT)
        await stage.write_from(expected_rows(NAMESPACE, PROMPT))
        await stage.commit()
        lease = await client.lease(await client.match(NAMESPACE, PROMPT))
        rows = np.zeros((BLOCKS, ROW_BYTES), dtype=np.uint8)
        loaded = await lease.load_into(rows)
        assert np.array_equal(expected_rows(NAMESPACE, PROMPT), rows)
        assert client.bulk == bulk.status
        return loaded.blocks


def test_a_client_of_an_event_loop_uses_the_engine_too(served: ServedStore):
    bulk = BulkEngineClient(VmEngine())
    assert BLOCKS == asyncio.run(store_and_load(served, bulk))
    assert (2 * PROMPT_BYTES, 0) == (bulk.status.moved_bytes, bulk.status.failures)


def test_a_cancelled_load_stops_between_two_pieces_and_costs_none(served: ServedStore, engine: BadEngine):
    with client_of(served) as client:
        store_prompt(client, NAMESPACE, PROMPT)
        lease = client.lease(client.match(NAMESPACE, PROMPT))
        link = lease._held.link
        assert isinstance(link, WireLink)
        grip = Grip()
        engine.before = lambda _: grip.cancel()
        request = pb.LoadRequest(session_id=link.session.session_id, lease_id=lease._lease_id, blocks=BLOCKS)
        target = np.zeros(PROMPT_BYTES, dtype=np.uint8)
        with pytest.raises(UnavailableError, match="cancelled"):
            link._pool.load(request, target.data, time.monotonic() + 10.0, grip)
        engine.before = lambda _: None
        assert (PROMPT_BYTES + 3 * ROW_BYTES, 0) == moved(client)
        assert not target[3 * ROW_BYTES :].any()
        assert BLOCKS == verified_blocks(client, NAMESPACE, PROMPT)


def test_memory_named_to_a_server_without_an_engine_is_refused(store: kvstore.KvStore):
    with ServedStore(store) as served, client_of(served) as client:
        store_prompt(client, NAMESPACE, PROMPT)
        lease = client.lease(client.match(NAMESPACE, PROMPT))
        link = lease._held.link
        assert isinstance(link, WireLink)
        request = pb.LoadRequest(
            session_id=link.session.session_id, lease_id=lease._lease_id, blocks=BLOCKS, memory=MEMORY
        )
        target = np.zeros(PROMPT_BYTES, dtype=np.uint8)
        with pytest.raises(InvalidArgumentError, match="this server has none"):
            link._pool.load(request, target.data, time.monotonic() + 10.0)
        assert BLOCKS == verified_blocks(client, NAMESPACE, PROMPT)


def test_an_engine_that_is_not_installed_or_not_known_is_an_error_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(nixl_engine, "_MODULES", ("nixl_of_no_version",))
    with pytest.raises(ConfigError, match=r"pip install prefix-kvstore\[nixl\]"):
        kvstore.connect("127.0.0.1:1", bulk="nixl")
    with pytest.raises(ConfigError, match="'verbs', expected one of socket, nixl"):
        kvstore.connect("127.0.0.1:1", bulk="verbs")
    assert BULK_CHOICES == bulk_choice.CHOICES


UNTIL = TransferEnd(0.0, lambda: False)
MEMORY = pb.FarMemory(engine="vm", metadata=b"m", address=4096, nbytes=4096)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("engine", "nixl", "engine 'nixl', expected 'vm'"),
        ("metadata", b"", "0 bytes"),
        ("metadata", b"m" * 20_000, "20000 bytes"),
        ("nbytes", 4095, "4095 bytes, the rows need 4096"),
        ("address", 2**64 - 4096, "beyond address"),
    ],
)
def test_memory_that_cannot_be_is_refused_by_name(host: BulkEngineHost, field: str, value: object, said: str):
    memory = pb.FarMemory()
    memory.CopyFrom(MEMORY)
    setattr(memory, field, value)
    caller = Principal("engine", None, Role.WRITE, "local")
    with pytest.raises(InvalidArgumentError, match=said):
        EngineSeat(host).transport(caller, memory, 1024, 4, UNTIL)


def test_too_many_rows_are_refused(host: BulkEngineHost):
    caller = Principal("engine", None, Role.WRITE, "local")
    with pytest.raises(InvalidArgumentError, match="5000 rows"):
        EngineSeat(host).transport(caller, MEMORY, 1, 5000, UNTIL)


@pytest.mark.parametrize("metadata", [b"m", b"kvvm" + bytes(12), b"kvvm" + b"\xff" * 12, os.urandom(300)])
def test_metadata_that_makes_no_sense_is_no_peer(host: BulkEngineHost, metadata: bytes):
    if metadata == b"kvvm" + bytes(12):
        host.connect(metadata).disconnect()  # a process without any memory
        return
    with pytest.raises(BulkEngineError, match="metadata"):
        host.connect(metadata)
    assert {"connect": 1} == host.failures


@pytest.mark.parametrize(
    ("tenants", "tenant", "admitted"),
    [((), None, True), ((), "a", False), (("a",), "a", True), (("a",), "b", False), (("*",), "b", True)],
)
def test_an_engine_is_for_those_tenants_that_the_settings_name(
    engine: BadEngine, tenants: tuple[str, ...], tenant: str | None, admitted: bool
):
    host = BulkEngineHost(engine, tenants)
    caller = Principal("engine", tenant, Role.WRITE, "token")
    assert (("vm",) if admitted else ()) == host.offer(caller)
    if not admitted:
        with pytest.raises(PermissionDeniedError, match="use frames"):
            EngineSeat(host).transport(caller, MEMORY, 1024, 4, UNTIL)
