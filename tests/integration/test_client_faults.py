"""No call of a client hangs: each one, on each lane, against a server that stopped, died, is absent or unreachable."""

from __future__ import annotations

import itertools
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kvstore
from kvstore.api import KvStore, Lease, Stage, StateLease, StateStage
from kvstore.errors import UnavailableError
from kvstore.testing.blocks import expected_rows, store_prompt, verified_blocks
from kvstore.testing.conformance import BLOCKS, LAYOUT, MIB, PROMPT
from kvstore.testing.patience import ANSWER_SECONDS, SLACK_SECONDS, Stopwatch, wait_until
from kvstore.testing.serving import ServedStore, grpc_address
from kvstore.testing.states import STATE_BYTES, STATE_LAYOUT, store_state
from kvstore.transport.breaker import BreakerState
from kvstore.transport.client import Client
from kvstore.transport.link import flat_deadlines
from kvstore.transport.remote import RemoteLease, RemoteStage
from kvstore.transport.wire_link import WireLink
from kvstore.types import Namespace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvstore.state_blobs import BlobLease, BlobStage

NAMESPACE = Namespace(model="model", revision="revision", layout=LAYOUT)
STATES = Namespace(model="model", revision="revision", layout=STATE_LAYOUT)
FIRST_TOKENS = itertools.count(1000)
DEADLINE_SECONDS = 0.1

SERVER_PROGRAM = """
import sys, kvstore
from kvstore.testing.serving import ServedStore
with kvstore.open(None, host_bytes=1 << 23) as store, ServedStore(store, [sys.argv[1]]) as served:
    print(served.addresses[0], flush=True)
    sys.stdin.read()
"""


@dataclass
class Held:
    """A client with all that a call needs; made while the server is well, used when it is not."""

    client: Client
    match: kvstore.PrefixMatch
    lease: RemoteLease
    stage: RemoteStage
    staged: list[int]
    state_match: kvstore.PrefixMatch
    state_lease: BlobLease
    state_stage: BlobStage


CALLS: dict[str, Callable[[Held], object]] = {
    "KvStore.namespace_id": lambda held: held.client.namespace_id(
        Namespace(model="another", revision="revision", layout=LAYOUT)
    ),
    "KvStore.match": lambda held: held.client.match(NAMESPACE, PROMPT),
    "KvStore.prefetch": lambda held: held.client.prefetch(NAMESPACE, PROMPT),
    "KvStore.lease": lambda held: held.client.lease(held.match),
    "KvStore.stage": lambda held: held.client.stage(NAMESPACE, [8, *PROMPT]),
    "KvStore.lease_state": lambda held: held.client.lease_state(held.state_match),
    "KvStore.stage_state": lambda held: held.client.stage_state(STATES, [8, *PROMPT], state_bytes=1),
    "KvStore.pin": lambda held: held.client.pin(NAMESPACE, PROMPT),
    "KvStore.unpin": lambda held: held.client.unpin(1),
    "KvStore.hint_next_use": lambda held: held.client.hint_next_use(NAMESPACE, PROMPT, seconds=1),
    "KvStore.end_session": lambda held: held.client.end_session(NAMESPACE, PROMPT),
    "KvStore.evict": lambda held: held.client.evict(NAMESPACE, PROMPT),
    "KvStore.evict_writer": lambda held: held.client.evict_writer(7),
    "KvStore.writers_of": lambda held: held.client.writers_of(NAMESPACE, PROMPT),
    "KvStore.clear": lambda held: held.client.clear(NAMESPACE),
    "KvStore.stats": lambda held: held.client.stats(),
    "KvStore.verify": lambda held: held.client.verify(),
    "KvStore.scrub": lambda held: held.client.scrub(),
    "KvStore.events": lambda held: held.client.events(),
    "KvStore.flush": lambda held: held.client.flush(),
    "KvStore.close": lambda held: held.client.close(),
    "KvStore.__exit__": lambda held: held.client.__exit__(None, None, None),
    "Client.status": lambda held: held.client.status(),
    "Client.nodes": lambda held: held.client.nodes(),
    "Client.drain": lambda held: held.client.drain(None),
    "Client.undrain": lambda held: held.client.undrain(),
    "Client.diagnosis": lambda held: held.client.diagnosis(),
    "Client.reset_diagnosis": lambda held: held.client.reset_diagnosis(),
    "Client.namespaces": lambda held: held.client.namespaces(),
    "Client.delete_namespace": lambda held: held.client.delete_namespace(bytes(16)),
    "Client.locate": lambda held: held.client.locate(NAMESPACE, PROMPT),
    "Client.within": lambda held: held.client.within(DEADLINE_SECONDS).match(NAMESPACE, np.arange(2**20)),
    "Lease.load_into": lambda held: held.lease.load_into(bytearray(BLOCKS * LAYOUT.block_bytes)),
    "Lease.load_verified": lambda held: held.lease.load_verified(np.empty((BLOCKS, LAYOUT.block_bytes), np.uint8)),
    "Lease.read_in_place": lambda held: held.lease.read_in_place().__enter__(),
    "Lease.release": lambda held: held.lease.release(),
    "Lease.__exit__": lambda held: held.lease.__exit__(None, None, None),
    "Stage.wanted": lambda held: held.stage.wanted(0),
    "Stage.write_from": lambda held: held.stage.write_from(expected_rows(NAMESPACE, held.staged)),
    "Stage.commit": lambda held: held.stage.commit(),
    "Stage.abort": lambda held: held.stage.abort(),
    "Stage.__exit__": lambda held: held.stage.__exit__(None, None, None),
    "StateLease.load_into": lambda held: held.state_lease.load_into(bytearray(STATE_BYTES)),
    "StateLease.release": lambda held: held.state_lease.release(),
    "StateLease.__exit__": lambda held: held.state_lease.__exit__(None, None, None),
    "StateStage.write_from": lambda held: held.state_stage.write_from(bytes(STATE_BYTES)),
    "StateStage.commit": lambda held: held.state_stage.commit(),
    "StateStage.abort": lambda held: held.state_stage.abort(),
    "StateStage.__exit__": lambda held: held.state_stage.__exit__(None, None, None),
}
# Those that end something raise nothing, since it has ended either way, and what is wanted was told with the stage.
QUIET = {"KvStore.close", "KvStore.__exit__", "Lease.release", "Lease.__exit__", "Stage.wanted", "Stage.abort"} | {
    "StateLease.release",
    "StateLease.__exit__",
    "StateStage.abort",
    "Lease.read_in_place",  # which shows nothing then
}


def methods_of(kind: type, name: str) -> set[str]:
    listed = {method for method, value in vars(kind).items() if callable(value) and not method.startswith("_")}
    return {f"{name}.{method}" for method in {*listed, "__exit__"}}


def test_every_method_of_a_client_is_among_the_calls_that_must_not_hang():
    api = methods_of(KvStore, "KvStore") | methods_of(Lease, "Lease") | methods_of(Stage, "Stage")
    api |= methods_of(StateLease, "StateLease") | methods_of(StateStage, "StateStage")
    assert api <= set(CALLS)
    own = {name.removeprefix("Client.") for name in methods_of(Client, "Client")}
    assert own == {name.split(".")[1] for name in CALLS if name.split(".")[0] in ("KvStore", "Client")}
    assert methods_of(RemoteLease, "Lease") | methods_of(RemoteStage, "Stage") <= set(CALLS)


class Process:
    """A server that can be stopped and killed."""

    def __init__(self, address: str) -> None:
        command = [sys.executable, "-P", "-c", SERVER_PROGRAM, address]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


class Swallower(threading.Thread):
    """A server behind a proxy that passes everything on until it is frozen: then it takes bytes and answers none."""

    def __init__(self, folder: Path, store: KvStore) -> None:
        super().__init__(name="swallower")
        self._served = ServedStore(store, [f"unix://{folder}/behind"])
        self._behind = f"{folder}/behind"
        self.address = f"unix://{folder}/front"
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(f"{folder}/front")
        self._listening.listen()
        self._wake, self._woken = socket.socketpair()
        self._frozen = False
        self._ends: dict[socket.socket, socket.socket] = {}
        self.start()

    def freeze(self) -> None:
        self._frozen = True

    def thaw(self) -> None:
        self._frozen = False

    def close(self) -> None:
        self._wake.close()
        self.join()
        self._served.stop()

    def run(self) -> None:
        while True:
            ready = select.select([self._listening, self._woken, *self._ends], [], [])[0]
            if self._woken in ready:
                break
            for one in ready:
                if one is self._listening:
                    self._accept()
                elif one in self._ends:
                    self._pass_on(one)
        for one in [self._listening, self._woken, *self._ends]:
            one.close()

    def _accept(self) -> None:
        front, back = self._listening.accept()[0], socket.socket(socket.AF_UNIX)
        back.connect(self._behind)
        self._ends |= {front: back, back: front}

    def _pass_on(self, one: socket.socket) -> None:
        other = self._ends[one]
        raw = b""
        with suppress(OSError):
            raw = one.recv(1 << 16)
        if not raw:
            for end in (one, other):
                del self._ends[end]
                end.close()
        elif not self._frozen:
            with suppress(OSError):
                other.sendall(raw)


@pytest.fixture(scope="module")
def stopping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    process = Process(f"unix://{tmp_path_factory.mktemp('stopping')}/s")
    yield process
    process.close()


@pytest.fixture(scope="module")
def swallowing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swallower]:
    with kvstore.open(None, host_bytes=8 * MIB) as store:
        swallower = Swallower(tmp_path_factory.mktemp("swallowing"), store)
        yield swallower
        swallower.close()


def on_lane(lane: str, address: str) -> str:
    return grpc_address(address) if lane == "grpc" else address


def prepare(address: str) -> Held:
    """A client that has something open on a server, and from then on little patience."""
    client = kvstore.connect(address)
    store_prompt(client, NAMESPACE, PROMPT)
    match = client.match(NAMESPACE, PROMPT)
    staged = [next(FIRST_TOKENS), *PROMPT]  # its own, since only one stores a prompt at a time
    lease, stage = client.lease(match), client.stage(NAMESPACE, staged)
    lease.load_into(bytearray(LAYOUT.block_bytes))
    store_state(client, STATES, PROMPT)
    state_match = client.match(STATES, PROMPT)
    state_lease, state_stage = (
        client.lease_state(state_match),
        client.stage_state(STATES, staged, state_bytes=STATE_BYTES),
    )
    if isinstance(lease._held.link, WireLink):
        # Whose places are known is read without the server, so let them be asked for again.
        lease._held.link._arena.end_lease(lease._lease_id)
    client._deadlines = flat_deadlines(DEADLINE_SECONDS)
    for held in (lease, stage, state_lease.rows, state_stage.rows):
        assert isinstance(held, RemoteLease | RemoteStage)
        held._held._deadlines = client._deadlines
    return Held(client, match, lease, stage, staged, state_match, state_lease, state_stage)


def outcome_of(name: str, held: Held) -> tuple[str, float]:
    """How a call ended, and after how many seconds."""
    watch = Stopwatch()
    try:
        CALLS[name](held)
        outcome = "quiet"
    except UnavailableError:
        outcome = "unavailable"
    except kvstore.ClosedError:
        outcome = "closed"
    return outcome, watch.seconds


def expected_outcome(name: str) -> str:
    return "quiet" if name in QUIET else "unavailable"


@pytest.mark.kill
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("lane", ["wire", "grpc"])
@pytest.mark.parametrize("fault", ["stopping", "swallowing"])
def test_a_silent_server_costs_a_call_at_most_twice_its_deadline(
    request: pytest.FixtureRequest, fault: str, lane: str, name: str
):
    server = request.getfixturevalue(fault)
    held = prepare(on_lane(lane, server.address))
    server.freeze()
    try:
        outcome, seconds = outcome_of(name, held)
        held.client.close()
    finally:
        server.thaw()
    assert expected_outcome(name) == outcome
    assert seconds < 2 * DEADLINE_SECONDS + SLACK_SECONDS


def run_all(helds: dict[str, Held], when_begun: Callable[[], None]) -> dict[str, tuple[str, float]]:
    """Make every call, each on its own client and in its own thread; `when_begun` is called when all are under way."""
    outcomes: dict[str, tuple[str, float]] = {}
    begun = threading.Barrier(len(helds) + 1)

    def run(name: str) -> None:
        begun.wait()
        outcomes[name] = outcome_of(name, helds[name])

    threads = [threading.Thread(target=run, args=(name,)) for name in helds]
    for thread in threads:
        thread.start()
    begun.wait()
    when_begun()
    for thread in threads:
        thread.join()
    return outcomes


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.kill
@pytest.mark.parametrize("lane", ["wire", "grpc"])
def test_a_server_killed_at_every_call_absent_and_restarted_leaves_clients_that_go_on(tmp_path: Path, lane: str):
    address = f"unix://{tmp_path}/s"
    with ExitStack() as stack:
        server = Process(address)
        stack.callback(server.close)
        helds = {name: prepare(on_lane(lane, address)) for name in CALLS}
        for held in helds.values():
            stack.callback(held.client.close)
            held.client._deadlines = flat_deadlines(5.0)
        files = open_files()
        server.freeze()
        outcomes = run_all(helds, server.process.kill)
        assert {name: expected_outcome(name) for name in CALLS} == {name: out for name, (out, _) in outcomes.items()}
        assert max(seconds for _, seconds in outcomes.values()) < 20.0
        lasting = {name: held for name, held in helds.items() if name not in ("KvStore.close", "KvStore.__exit__")}
        absent = {name: outcome for name, (outcome, _) in run_all(lasting, lambda: None).items()}
        # What was to be stored is lost, and the stage knows.
        over = {"Stage.write_from": "closed", "Stage.commit": "closed", "Stage.__exit__": "quiet"}
        over |= {f"State{name}": outcome for name, outcome in over.items()}
        assert {name: over.get(name, expected_outcome(name)) for name in lasting} == absent
        again = Process(address)
        stack.callback(again.close)
        for held in lasting.values():
            assert BLOCKS == store_prompt_again(held.client)
            with pytest.raises((UnavailableError, kvstore.ClosedError)):
                held.lease.load_into(bytearray(LAYOUT.block_bytes))
            with pytest.raises((UnavailableError, kvstore.ClosedError)):
                held.stage.write_from(expected_rows(NAMESPACE, held.staged))
        stats = next(iter(lasting.values())).client.stats()
        assert (0, 0, BLOCKS) == (stats.leases, stats.stages, stats.tiers["host"].blocks)
        assert open_files() <= files + 2  # one connection for each client, as before; and the new server's two pipes


def store_prompt_again(client: Client) -> int:
    """Store and read a prompt as soon as the breaker lets it through."""

    def is_stored() -> bool:
        try:
            store_prompt(client, NAMESPACE, PROMPT)
        except UnavailableError:
            return False
        return True

    wait_until(is_stored)
    return verified_blocks(client, NAMESPACE, PROMPT)


@pytest.mark.parametrize("lane", ["wire", "grpc"])
def test_an_absent_server_is_not_asked_any_more_after_three_failures(tmp_path: Path, lane: str):
    with kvstore.connect(on_lane(lane, f"unix://{tmp_path}/s"), lookup_seconds=1.0) as client:
        for _ in range(3):
            assert BreakerState.CLOSED is client.breaker.state
            with pytest.raises(UnavailableError, match="kvstore serve"):
                client.match(NAMESPACE, PROMPT)
        assert client.breaker.state in (BreakerState.OPEN, BreakerState.HALF_OPEN)
        with pytest.raises(UnavailableError, match="not asking"):
            client.match(NAMESPACE, PROMPT)
        assert (1, 3) == (client.breaker.openings, client.breaker.failures)


@pytest.mark.kill
def test_calls_of_an_open_breaker_touch_no_socket(stopping: Process, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvstore.transport.breaker.BACKOFF_SECONDS_MIN", 3600.0)
    held = prepare(stopping.address)
    for _ in range(3):
        held.client._keeper._guard.record_failure(UnavailableError("by hand"))
    with monkeypatch.context() as patched:
        for method in ("send", "sendmsg", "recv_into", "connect"):
            patched.setattr(socket.socket, method, refuse, raising=False)
        for name in CALLS:
            if name not in QUIET:
                assert "unavailable" == outcome_of(name, held)[0], name
    held.client.close()


def refuse(*_: Any) -> None:
    raise AssertionError("a socket was used")


def test_a_server_that_comes_back_is_found_by_the_probe_and_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    seen: list[BreakerState] = []
    address = f"unix://{tmp_path}/s"
    closed = threading.Event()

    def changed(status: Any) -> None:
        seen.append(status.state)
        if status.state is BreakerState.CLOSED:
            closed.set()

    with (
        caplog.at_level("INFO", "kvstore.transport"),
        kvstore.connect(address, on_breaker_change=changed) as client,
        kvstore.open(None, host_bytes=MIB) as store,
    ):
        for _ in range(10):
            with pytest.raises(UnavailableError):
                client.match(NAMESPACE, PROMPT)
        with ServedStore(store, [address]):
            assert closed.wait(ANSWER_SECONDS)
            assert 0 == client.match(NAMESPACE, PROMPT).blocks
    assert [BreakerState.OPEN, BreakerState.CLOSED] == seen
    assert ["server not asked for a while", "server asked again"] == [
        record.message.split(":")[0] for record in caplog.records if record.name.endswith("breaker")
    ]


def test_no_probe_outlives_its_client(tmp_path: Path):
    def probing() -> int:
        return sum(thread.name == "kvstore-probe" for thread in threading.enumerate())

    before = probing()
    with kvstore.connect(f"unix://{tmp_path}/s") as client:
        for _ in range(3):
            with pytest.raises(UnavailableError):
                client.stats()
        assert before + 1 == probing()
    assert before == probing()
    with pytest.raises(kvstore.ClosedError):
        client.stats()


@pytest.mark.kill
def test_a_child_of_a_fork_asks_for_itself_while_its_parent_does_not(tmp_path: Path):
    address = f"unix://{tmp_path}/s"
    with kvstore.open(None, host_bytes=MIB) as store, kvstore.connect(address) as client:
        for _ in range(3):
            with pytest.raises(UnavailableError):
                client.stats()
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.read(reading, 1)
            state = client.breaker.state
            os._exit(0 if state is BreakerState.CLOSED and client.match(NAMESPACE, PROMPT).blocks == 0 else 1)
        with ServedStore(store, [address]):
            os.write(writing, b"x")
            assert 0 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.close(reading)
        os.close(writing)


def test_a_repeated_lookup_is_counted_once_with_an_id_and_never_twice_without(tmp_path: Path):
    with (
        kvstore.open(None, host_bytes=MIB) as store,
        ServedStore(store, [f"unix://{tmp_path}/s"]) as served,
        kvstore.connect(served.addresses[0]) as client,
    ):
        for request_id in ("request", None):
            client.match(NAMESPACE, PROMPT)
            before = store.stats().lookups
            lose_answers(client)
            assert 0 == client.match(NAMESPACE, PROMPT, request_id=request_id).blocks
            assert before + 1 == store.stats().lookups


def lose_answers(client: Client) -> None:
    """Let the connection be lost when the next call has been carried out, before its answer is read."""
    exchange = client._keeper._link._exchange
    read = exchange._read_for_all

    def lose(*arguments: Any) -> None:
        exchange._socket.recv(1, socket.MSG_PEEK | socket.MSG_WAITALL)
        exchange.end()
        read(*arguments)

    exchange._read_for_all = lose
