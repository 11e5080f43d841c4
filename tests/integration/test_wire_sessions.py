"""The fast lane against real processes: what a session holds ends with it, and nothing waits for ever."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kvstore
from kvstore.errors import ClosedError, InvalidArgumentError, NoSpaceError, UnavailableError
from kvstore.testing.blocks import expected_rows, store_prompt, verified_blocks
from kvstore.testing.conformance import BLOCKS, LAYOUT, MIB, PROMPT
from kvstore.testing.patience import ANSWER_SECONDS, SLACK_SECONDS, Stopwatch, wait_until
from kvstore.testing.serving import ServedStore
from kvstore.transport import wire
from kvstore.transport.address import parse_address
from kvstore.transport.limits import ServiceLimits
from kvstore.transport.link import Lookup, flat_deadlines
from kvstore.transport.lookup_frames import LookupWriter
from kvstore.transport.wire_link import WireLink
from kvstore.types import KvLayout, Namespace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NAMESPACE = Namespace(model="model", revision="revision", layout=LAYOUT)
DEADLINE_SECONDS = 0.3
LOOKUPS_AHEAD = 500

CLIENT_PROGRAM = """
import sys, kvstore
from kvstore.testing.blocks import expected_rows, store_prompt
from kvstore.testing.conformance import LAYOUT, PROMPT
namespace = kvstore.Namespace(model="model", revision="revision", layout=LAYOUT)
client = kvstore.connect(sys.argv[1])
assert client.status().lane == "wire"
store_prompt(client, namespace, PROMPT)
lease = client.lease(client.match(namespace, PROMPT))
stage = client.stage(namespace, [7, *PROMPT])
stage.write_from(expected_rows(namespace, [7, *PROMPT]))
print(lease.blocks, stage.blocks, flush=True)
sys.stdin.read()
"""

SERVER_PROGRAM = """
import sys, kvstore
from kvstore.testing.serving import ServedStore
with kvstore.open(None, host_bytes=1 << 23) as store, ServedStore(store, [sys.argv[1]]) as served:
    print(served.addresses[0], flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def store() -> Iterator[kvstore.KvStore]:
    with kvstore.open(None, host_bytes=64 * MIB) as store:
        yield store


@pytest.fixture(params=["127.0.0.1:0", "unix://{}/s"], ids=["TCP", "Unix socket"])
def served(request: pytest.FixtureRequest, store: kvstore.KvStore, tmp_path: Path) -> Iterator[ServedStore]:
    with ServedStore(store, [request.param.format(tmp_path)]) as served:
        yield served


def held(store: kvstore.KvStore) -> tuple[int, int]:
    stats = store.stats()
    return stats.leases, stats.stages


@pytest.mark.kill
def test_a_killed_client_loses_its_leases_and_stages_at_once(
    store: kvstore.KvStore, served: ServedStore, start_process: Callable[..., subprocess.Popen[str]]
):
    process = start_process(CLIENT_PROGRAM, served.addresses[0])
    assert process.stdout is not None
    assert f"{BLOCKS} {BLOCKS}\n" == process.stdout.readline()
    assert (1, 1) == held(store)
    process.kill()
    watch = Stopwatch()
    wait_until(lambda: held(store) == (0, 0))
    assert watch.seconds < SLACK_SECONDS
    with kvstore.connect(served.addresses[0]) as client:
        assert store_prompt(client, NAMESPACE, [7, *PROMPT]).blocks == BLOCKS


def test_a_closed_client_holds_nothing(store: kvstore.KvStore, served: ServedStore):
    with kvstore.connect(served.addresses[0]) as client:
        store_prompt(client, NAMESPACE, PROMPT)
        lease = client.lease(client.match(NAMESPACE, PROMPT))
        client.stage(NAMESPACE, [7, *PROMPT])
        assert (1, 1) == held(store)
    wait_until(lambda: held(store) == (0, 0))
    with pytest.raises(UnavailableError, match="session"):
        lease.load_into(bytearray(LAYOUT.block_bytes))


def test_a_client_goes_on_after_the_server_was_restarted_but_its_leases_do_not(store: kvstore.KvStore, tmp_path: Path):
    address = f"unix://{tmp_path}/s"
    with kvstore.connect(address) as client:
        with ServedStore(store, [address]):
            store_prompt(client, NAMESPACE, PROMPT)
            lease = client.lease(client.match(NAMESPACE, PROMPT))
            stage = client.stage(NAMESPACE, [7, *PROMPT])
        with pytest.raises(UnavailableError, match="kvstore serve"):
            client.match(NAMESPACE, PROMPT)
        with ServedStore(store, [address]):
            assert BLOCKS == verified_blocks(client, NAMESPACE, PROMPT)
            with pytest.raises(UnavailableError):
                lease.load_into(bytearray(LAYOUT.block_bytes))
            with pytest.raises(UnavailableError):
                stage.write_from(expected_rows(NAMESPACE, [7, *PROMPT]))
            lease.release()
            stage.abort()
            assert ("wire", 0, 0) == (client.status().lane, client.stats().leases, client.stats().stages)


def test_lookups_that_are_sent_ahead_leave_the_loop_to_others_every_now_and_then(
    store: kvstore.KvStore, served: ServedStore, monkeypatch: pytest.MonkeyPatch
):
    """Of 64 KiB of short lookups that were received at once, the others would wait for the last one."""
    answered_at: list[int] = []
    steps = [0]
    match = store.match

    def answer(*arguments: Any, **named: Any) -> Any:
        answered_at.append(steps[0])
        return match(*arguments, **named)

    def step() -> None:
        steps[0] += 1
        if len(answered_at) < 1 + LOOKUPS_AHEAD:
            served._loop.call_soon(step)

    monkeypatch.setattr(store, "match", answer)
    ends_at = time.monotonic() + 10.0
    link = WireLink(parse_address(served.addresses[0]), ends_at)
    link.match(Lookup(NAMESPACE, None, np.arange(4, dtype=np.uint32), False, ""), ends_at)
    writer = LookupWriter(
        link.session.session_id, link._prompt_head(link.ns_id(NAMESPACE, ends_at), None), peek=False, request_id=""
    )
    served._loop.call_soon_threadsafe(step)
    ahead = b"".join(writer.whole(1000 + number, 0, bytes(16)) for number in range(LOOKUPS_AHEAD))
    link._exchange._socket.sendall(ahead)
    wait_until(lambda: len(answered_at) == 1 + LOOKUPS_AHEAD)
    assert 32 >= max(Counter(answered_at[1:]).values())
    link.close()


@pytest.mark.kill
@pytest.mark.parametrize("address", ["127.0.0.1:0", "unix://{}/s"])
def test_a_stopped_server_costs_no_call_more_than_twice_its_deadline(
    start_process: Callable[..., subprocess.Popen[str]], tmp_path: Path, address: str
):
    process = start_process(SERVER_PROGRAM, address.format(tmp_path))
    assert process.stdout is not None
    bound = process.stdout.readline().strip()
    with kvstore.connect(bound) as client, kvstore.connect(bound) as fresh:
        store_prompt(client, NAMESPACE, PROMPT)
        match = client.match(NAMESPACE, PROMPT)
        lease = client.lease(match)
        stage = client.stage(NAMESPACE, [7, *PROMPT])
        for impatient in (client, fresh, lease._held, stage._held):
            impatient._deadlines = flat_deadlines(DEADLINE_SECONDS)
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        calls: list[Callable[[], object]] = [
            lambda: client.match(NAMESPACE, PROMPT),
            lambda: client.match(NAMESPACE, np.arange(2**20)),
            lambda: client.lease(match),
            lambda: client.stage(NAMESPACE, [8, *PROMPT]),
            lambda: lease.load_into(bytearray(LAYOUT.block_bytes)),
            lambda: stage.write_from(expected_rows(NAMESPACE, [7, *PROMPT])),
            client.stats,
            client.flush,
            client.events,
            lambda: client.pin(NAMESPACE, PROMPT),
            lambda: fresh.match(NAMESPACE, PROMPT),
        ]
        for call in calls:
            watch = Stopwatch()
            with pytest.raises(UnavailableError):
                call()
            assert watch.seconds < 2 * DEADLINE_SECONDS + SLACK_SECONDS
        watch = Stopwatch()
        lease.release()
        assert watch.seconds < 2 * DEADLINE_SECONDS + SLACK_SECONDS
        process.send_signal(signal.SIGCONT)


@pytest.mark.kill
@pytest.mark.parametrize("moment", ["load", "write"])
def test_a_server_killed_in_mid_transfer_is_an_error_and_not_a_result(
    start_process: Callable[..., subprocess.Popen[str]], tmp_path: Path, moment: str
):
    process = start_process(SERVER_PROGRAM, f"unix://{tmp_path}/s")
    assert process.stdout is not None
    with kvstore.connect(process.stdout.readline().strip()) as client:
        prompt = list(range(4 * 2**10))
        rows = np.empty((2**10, LAYOUT.block_bytes), dtype=np.uint8)
        assert 2**10 == store_prompt(client, NAMESPACE, prompt).blocks
        lease = client.lease(client.match(NAMESPACE, prompt))
        stage = client.stage(NAMESPACE, [7, *prompt])
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        timer = threading.Timer(0.2, process.kill)
        timer.start()
        transfer = lease.load_into if moment == "load" else stage.write_from
        with pytest.raises(UnavailableError):
            transfer(rows)
        timer.join()
        with pytest.raises(UnavailableError):
            client.match(NAMESPACE, prompt)


@pytest.mark.kill
def test_a_child_of_a_fork_reopens_and_its_parent_keeps_what_it_holds(store: kvstore.KvStore, served: ServedStore):
    with kvstore.connect(served.addresses[0]) as client:
        store_prompt(client, NAMESPACE, PROMPT)
        lease = client.lease(client.match(NAMESPACE, PROMPT))
        lease.load_into(bytearray(LAYOUT.block_bytes))
        child = os.fork()
        if child == 0:
            os._exit(_use_in_child(client, lease))
        assert 0 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        wait_until(lambda: held(store) == (1, 0))
        assert 1 == lease.load_into(bytearray(LAYOUT.block_bytes)).blocks
        assert BLOCKS == verified_blocks(client, NAMESPACE, PROMPT)


def _use_in_child(client: kvstore.KvStore, lease: kvstore.Lease) -> int:
    """What a child of a fork does with a client and a lease of its parent; returns which step failed."""
    try:
        lease.load_into(bytearray(LAYOUT.block_bytes))
    except UnavailableError:
        lease.release()
    else:
        return 1
    own = client.lease(client.match(NAMESPACE, PROMPT))
    return 0 if own.load_into(bytearray(LAYOUT.block_bytes)).blocks == 1 else 2


def test_many_threads_share_one_connection(served: ServedStore, store: kvstore.KvStore):
    problems: list[BaseException] = []

    def work(client: kvstore.KvStore, seed: int) -> None:
        prompt = list(range(seed * 1000, seed * 1000 + 40))
        try:
            for length in range(4, 41, 4):
                store_prompt(client, NAMESPACE, prompt[:length])
                assert length // 4 == client.match(NAMESPACE, prompt).blocks
            assert BLOCKS == verified_blocks(client, NAMESPACE, prompt)
        except BaseException as problem:  # noqa: BLE001  # handed to the main thread
            problems.append(problem)

    with kvstore.connect(served.addresses[0]) as client:
        threads = [threading.Thread(target=work, args=(client, seed)) for seed in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [] == problems
        assert (0, 0) == held(store)
    wait_until(lambda: served.server.connections["wire"] == 0)


def test_a_prompt_the_server_has_forgotten_is_sent_again_by_itself(store: kvstore.KvStore):
    with (
        ServedStore(store, limits=ServiceLimits(prompt_bytes=1)) as served,
        kvstore.connect(served.addresses[0]) as client,
    ):
        prompt = list(range(1000))
        store_prompt(client, NAMESPACE, prompt)
        for length in (400, 800, 1000):
            assert length // 4 == client.match(NAMESPACE, prompt[:length]).blocks
        assert 250 == verified_blocks(client, NAMESPACE, prompt)
        assert served.server.resent_prompts > 0


def test_a_growing_prompt_is_looked_up_right_without_being_sent_again(served: ServedStore):
    with kvstore.connect(served.addresses[0]) as client:
        prompt = list(range(4000))
        for length in range(400, 4001, 400):
            store_prompt(client, NAMESPACE, prompt[:length])
            found = client.match(NAMESPACE, [*prompt[:length], 9, 9, 9, 9])
            assert length // 4 == found.blocks
        assert 1000 == verified_blocks(client, NAMESPACE, prompt)
        assert 0 == served.server.resent_prompts


def test_a_server_without_the_fast_lane_is_used_over_grpc(store: kvstore.KvStore, tmp_path: Path):
    for listen in ("grpc://127.0.0.1:0", f"grpc+unix://{tmp_path}/s"):
        with ServedStore(store, [listen]) as served:
            address = served.addresses[0].removeprefix("grpc+").removeprefix("grpc://")
            with kvstore.connect(address) as client:
                assert "grpc" == client.status().lane
                assert client.match(NAMESPACE, PROMPT).blocks == 0


class OtherVersion(threading.Thread):
    """A server that answers the first hello as one of version 7 to 9 does."""

    def __init__(self) -> None:
        super().__init__()
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.hello = b""
        self.start()

    def run(self) -> None:
        connected, _ = self.listening.accept()
        with connected:
            self.hello = connected.recv(wire.CLIENT_HELLO_BYTES)
            connected.sendall(struct.pack("<8sHHHHQ", wire.MAGIC, 0, 7, 9, wire.Verdict.VERSION, 0))
        self.listening.close()


def test_a_server_of_another_version_is_refused_by_name_and_grpc_tried(caplog: pytest.LogCaptureFixture):
    server = OtherVersion()
    host, port = server.listening.getsockname()
    with (
        caplog.at_level("INFO", "kvstore.transport"),
        kvstore.connect(f"{host}:{port}") as client,
        pytest.raises(UnavailableError),
    ):
        client.stats()
    server.join()
    assert wire.encode_client_hello(wire.Lane.CONTROL) == server.hello
    assert "speaks versions 7 to 9 of the fast lane, this client 1 to 1" in caplog.text


def test_rows_larger_and_smaller_than_a_chunk_cross_unchanged(served: ServedStore, store: kvstore.KvStore):
    large = Namespace(
        model="large", revision="r", layout=KvLayout(layers=8, kv_heads=16, head_dim=128, dtype="float32")
    )
    parts = Namespace(
        model="parts",
        revision="r",
        layout=KvLayout(
            layers=3, kv_heads=2, head_dim=4, dtype="int8", block_tokens=4, tensor_parallel=2, pipeline_parallel=3
        ),
    )
    with kvstore.connect(served.addresses[0]) as client:
        for namespace, tokens in ((large, 48), (parts, 4000), (NAMESPACE, 8000)):
            prompt = list(range(tokens))
            blocks = tokens // namespace.layout.block_tokens
            assert blocks == store_prompt(client, namespace, prompt).blocks
            assert blocks == verified_blocks(client, namespace, prompt)
            assert blocks == verified_blocks(store, namespace, prompt)


def test_blocks_on_disk_are_sent_too(tmp_path: Path):
    prompt = list(range(4000))
    with kvstore.open(tmp_path / "data", host_bytes=64 * MIB, disk_bytes=64 * MIB) as store:
        store_prompt(store, NAMESPACE, prompt)
    with (
        kvstore.open(tmp_path / "data", host_bytes=20 * LAYOUT.block_bytes, disk_bytes=64 * MIB) as store,
        ServedStore(store) as served,
        kvstore.connect(served.addresses[0]) as client,
    ):
        assert 1000 == verified_blocks(client, NAMESPACE, prompt)
        assert 1000 == verified_blocks(client, NAMESPACE, prompt)
        loaded = client.stats().loaded_tokens
        assert loaded["host"] > 0
        assert 8000 == loaded["host"] + loaded["disk"]


def test_a_store_that_cannot_lend_its_rows_is_served_too(store: kvstore.KvStore):
    with ServedStore(_Copying(store)) as served, kvstore.connect(served.addresses[0]) as client:
        assert BLOCKS == store_prompt(client, NAMESPACE, PROMPT).blocks
        assert BLOCKS == verified_blocks(client, NAMESPACE, PROMPT)


class _Copying:
    """A store that has the methods of kvstore.api and no other."""

    _HIDDEN = ("lend",)

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        if name in self._HIDDEN:
            raise AttributeError(name)
        return getattr(self._inner, name)

    def lease(self, match: kvstore.PrefixMatch, **named: Any) -> Any:
        return _Copying(self._inner.lease(match, **named))

    def stage(self, *arguments: Any, **named: Any) -> Any:
        return _Copying(self._inner.stage(*arguments, **named))


def test_rows_the_stage_does_not_want_are_skipped(served: ServedStore):
    with kvstore.connect(served.addresses[0]) as client:
        store_prompt(client, NAMESPACE, PROMPT[:16])
        with client.stage(NAMESPACE, PROMPT) as stage:
            assert (4, BLOCKS - 4) == (stage.from_block, stage.blocks)
            assert BLOCKS - 4 == stage.write_from(expected_rows(NAMESPACE, PROMPT))
        assert BLOCKS == verified_blocks(client, NAMESPACE, PROMPT)


def test_full_is_said_at_once_and_the_connection_goes_on(store: kvstore.KvStore):
    limits = ServiceLimits(sessions=1, leases_per_session=1)
    with ServedStore(store, limits=limits) as served, kvstore.connect(served.addresses[0]) as client:
        store_prompt(client, NAMESPACE, PROMPT)
        match = client.match(NAMESPACE, PROMPT)
        with client.lease(match) as lease:
            with pytest.raises(NoSpaceError, match="1 leases"):
                client.lease(match)
            with kvstore.connect(served.addresses[0]) as another, pytest.raises(NoSpaceError, match="1 sessions"):
                another.stats()
            assert 1 == lease.load_into(bytearray(LAYOUT.block_bytes)).blocks
        assert client.status().serving


def test_errors_of_a_transfer_leave_the_session_usable(served: ServedStore):
    with kvstore.connect(served.addresses[0]) as client:
        store_prompt(client, NAMESPACE, PROMPT)
        lease = client.lease(client.match(NAMESPACE, PROMPT))
        stage = client.stage(NAMESPACE, [7, *PROMPT])
        lease._lease_id, stage._stage_id = 98, 99
        for _ in range(3):
            with pytest.raises(ClosedError, match="lease 98"):
                lease.load_into(bytearray(LAYOUT.block_bytes))
            with pytest.raises(ClosedError, match="stage 99"):
                stage.write_from(expected_rows(NAMESPACE, [7, *PROMPT]))
        with pytest.raises(InvalidArgumentError, match="part"):
            client.lease(client.match(NAMESPACE, PROMPT)).load_into(bytearray(64), part=7)
        assert BLOCKS == verified_blocks(client, NAMESPACE, PROMPT)


class _Holding:
    """A store whose `stats` waits until it is let go."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.entered = threading.Event()
        self.go = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def stats(self) -> kvstore.StoreStats:
        self.entered.set()
        self.go.wait()
        stats: kvstore.StoreStats = self._inner.stats()
        return stats


def test_a_stopping_server_lets_open_calls_end_and_takes_no_new_ones(store: kvstore.KvStore):
    holding = _Holding(store)
    served = ServedStore(holding)
    answers: list[object] = []
    with kvstore.connect(served.addresses[0]) as patient, kvstore.connect(served.addresses[0]) as other:
        assert other.status().serving
        call = threading.Thread(target=lambda: answers.append(patient.stats()))
        call.start()
        assert holding.entered.wait(ANSWER_SECONDS)
        stop = threading.Thread(target=served.stop, args=(60,))
        stop.start()
        while not _is_refused(other.status):
            pass  # the moment at which the server begins to refuse is its own
        holding.go.set()
        call.join()
        stop.join()
        assert 1 == len(answers)


def _is_refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except UnavailableError:
        return True
    return False


def test_no_thread_and_no_descriptor_outlives_its_client_or_server(store: kvstore.KvStore, tmp_path: Path):
    store_prompt(store, NAMESPACE, PROMPT)  # the memory of a namespace stays
    threads, descriptors = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with ServedStore(store, [f"unix://{tmp_path}/s", "127.0.0.1:0"]) as served:
            for address in served.addresses:
                with kvstore.connect(address) as client:
                    store_prompt(client, NAMESPACE, PROMPT)
                    assert BLOCKS == verified_blocks(client, NAMESPACE, PROMPT)
            kept = kvstore.connect(served.addresses[0])
            kept.stats()
        kept.close()
    for thread in set(threading.enumerate()) - threads:
        thread.join(ANSWER_SECONDS)
    assert set(threading.enumerate()) <= threads
    assert descriptors == len(os.listdir("/proc/self/fd"))
    assert [] == os.listdir(tmp_path)
