"""What a session holds ends with it, however it ends; clients come back after a restart; nothing waits for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kvstore
from kvstore.errors import ClosedError, NoSpaceError, UnavailableError
from kvstore.testing.blocks import expected_rows, store_prompt, verified_blocks
from kvstore.testing.conformance import BLOCKS, LAYOUT, MIB, PROMPT
from kvstore.testing.patience import ANSWER_SECONDS, SLACK_SECONDS, Stopwatch
from kvstore.testing.serving import ServedStore, grpc_address
from kvstore.transport.limits import ServiceLimits
from kvstore.transport.link import flat_deadlines
from kvstore.types import Namespace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NAMESPACE = Namespace(model="model", revision="revision", layout=LAYOUT)

CLIENT_PROGRAM = """
import sys, kvstore
from kvstore.testing.blocks import expected_rows, store_prompt
from kvstore.testing.conformance import LAYOUT, PROMPT
namespace = kvstore.Namespace(model="model", revision="revision", layout=LAYOUT)
client = kvstore.connect(sys.argv[1])
store_prompt(client, namespace, PROMPT)
lease = client.lease(client.match(namespace, PROMPT))
stage = client.stage(namespace, [7, *PROMPT])
stage.write_from(expected_rows(namespace, [7, *PROMPT]))
print(lease.blocks, stage.blocks, flush=True)
sys.stdin.read()
"""

SERVER_PROGRAM = """
import sys, kvstore
from kvstore.testing.serving import ServedStore, grpc_address
with kvstore.open(None, host_bytes=1 << 22) as store, ServedStore(store, [sys.argv[1]]) as served:
    print(served.addresses[0], flush=True)
    sys.stdin.read()
"""


class WatchedStore:
    """A store that tells when leases and stages end, and may hold a call until it is let go."""

    def __init__(self, store: kvstore.KvStore) -> None:
        self._store = store
        self.released = threading.Event()
        self.aborted = threading.Event()
        self.entered = threading.Event()
        self.go = threading.Event()
        self.holding = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def lease(self, match: kvstore.PrefixMatch, **named: Any) -> kvstore.Lease:
        if self.holding:
            self.entered.set()
            self.go.wait()
        lease = self._store.lease(match, **named)
        return _told(lease, "release", self.released)

    def stage(self, *arguments: Any, **named: Any) -> kvstore.Stage:
        return _told(self._store.stage(*arguments, **named), "abort", self.aborted)

    def stats(self) -> kvstore.StoreStats:
        if self.holding:
            self.entered.set()
            self.go.wait()
        return self._store.stats()


class _Told:
    def __init__(self, inner: Any, name: str, event: threading.Event) -> None:
        self._inner, self._name, self._event = inner, name, event

    def __getattr__(self, name: str) -> Any:
        if name == self._name:
            return self._end
        return getattr(self._inner, name)

    def _end(self) -> None:
        getattr(self._inner, self._name)()
        self._event.set()


def _told(inner: Any, name: str, event: threading.Event) -> Any:
    return _Told(inner, name, event)


@pytest.fixture
def store() -> Iterator[WatchedStore]:
    with kvstore.open(None, host_bytes=64 * MIB) as store:
        yield WatchedStore(store)


@pytest.mark.kill
@pytest.mark.parametrize("address", ["127.0.0.1:0", "unix://{}/s"])
def test_a_killed_client_loses_its_leases_and_stages_at_once(
    store: WatchedStore, start_process: Callable[..., subprocess.Popen[str]], tmp_path: Path, address: str
):
    with ServedStore(store, [address.format(tmp_path)]) as served:
        process = start_process(CLIENT_PROGRAM, grpc_address(served.addresses[0]))
        assert process.stdout is not None
        assert process.stdout.readline().split() == [str(BLOCKS), str(BLOCKS)]
        stats = store.stats()
        assert (stats.leases, stats.stages) == (1, 1)
        process.send_signal(signal.SIGKILL)
        assert store.released.wait(ANSWER_SECONDS)
        assert store.aborted.wait(ANSWER_SECONDS)
    stats = store.stats()
    assert (stats.leases, stats.stages) == (0, 0)
    assert store.match(NAMESPACE, [7, *PROMPT]).blocks == 0


def test_closing_a_client_ends_what_it_held(store: WatchedStore):
    with ServedStore(store) as served:
        client = kvstore.connect(grpc_address(served.addresses[0]))
        store_prompt(client, NAMESPACE, PROMPT)
        lease = client.lease(client.match(NAMESPACE, PROMPT))
        stage = client.stage(NAMESPACE, [7, *PROMPT])
        client.close()
        client.close()
        assert store.released.wait(ANSWER_SECONDS)
        assert store.aborted.wait(ANSWER_SECONDS)
        with pytest.raises(UnavailableError):
            lease.load_into(bytearray(LAYOUT.block_bytes))
        with pytest.raises(UnavailableError):
            stage.commit()
        lease.release()
        stage.abort()
        with pytest.raises(ClosedError):
            client.stats()


def test_a_lease_granted_after_its_caller_gave_up_ends_at_once(store: WatchedStore):
    with (
        ServedStore(store) as served,
        kvstore.connect(grpc_address(served.addresses[0])) as client,
    ):
        store_prompt(client, NAMESPACE, PROMPT)
        match = client.match(NAMESPACE, PROMPT)
        store.holding = True
        while not store.entered.is_set():  # a server that comes to a call after its time grants nothing
            with pytest.raises(UnavailableError):
                client.within(1.0).lease(match)
        store.go.set()
        assert store.released.wait(ANSWER_SECONDS)
        store.holding = False
        assert client.stats().leases == 0


def test_a_write_that_breaks_off_can_never_be_committed(store: WatchedStore):
    with ServedStore(store) as served, kvstore.connect(grpc_address(served.addresses[0])) as client:
        stage = client.stage(NAMESPACE, PROMPT)
        rows = expected_rows(NAMESPACE, PROMPT)
        connection = stage._held.link
        frames = connection._write_requests

        def broken(*arguments: Any) -> Iterator[Any]:
            yield next(frames(*arguments))
            raise ConnectionAbortedError

        connection._write_requests = broken
        with pytest.raises(UnavailableError):
            stage.write_from(rows)
        assert store.aborted.wait(ANSWER_SECONDS)
        with pytest.raises(ClosedError):
            stage.commit()
        connection._write_requests = frames
        assert store_prompt(client, NAMESPACE, PROMPT).blocks == BLOCKS


def test_a_stalled_write_keeps_its_place_for_a_limited_time_only(store: WatchedStore):
    limits = ServiceLimits(bulk_calls=1, bulk_seconds_max=1.0)
    with ServedStore(store, limits=limits) as served, kvstore.connect(grpc_address(served.addresses[0])) as client:
        store_prompt(client, NAMESPACE, PROMPT)
        lease = client.lease(client.match(NAMESPACE, PROMPT))
        stage = client.stage(NAMESPACE, [7, *PROMPT])
        stalled, go = threading.Event(), threading.Event()
        problems: list[BaseException] = []
        connection = stage._held.link
        frames = connection._write_requests

        def stall(*arguments: Any) -> Iterator[Any]:
            pieces = frames(*arguments)
            yield next(pieces)
            stalled.set()
            go.wait()
            yield from pieces

        def write() -> None:
            try:
                stage.write_from(expected_rows(NAMESPACE, [7, *PROMPT]))
            except UnavailableError as problem:
                problems.append(problem)

        connection._write_requests = stall
        writer = threading.Thread(target=write)
        writer.start()
        assert stalled.wait(ANSWER_SECONDS)
        row = bytearray(LAYOUT.block_bytes)
        while _load_is_taken(lease, row) and not problems:
            pass  # until the server has read the start of the write
        writer.join()
        go.set()
        assert [str(problem) for problem in problems] == ["the transfer took longer than 1.0 s"]
        assert lease.load_into(row).blocks == 1
        assert store.aborted.wait(ANSWER_SECONDS)


def test_a_lease_can_be_released_however_busy_the_server_is(store: WatchedStore):
    limits = ServiceLimits(short_calls=1)
    with ServedStore(store, limits=limits) as served, kvstore.connect(grpc_address(served.addresses[0])) as client:
        store_prompt(client, NAMESPACE, PROMPT)
        lease = client.lease(client.match(NAMESPACE, PROMPT))
        store.holding = True
        busy = threading.Thread(target=client.stats)
        busy.start()
        assert store.entered.wait(ANSWER_SECONDS)
        with pytest.raises(NoSpaceError, match="1 short calls"):
            client.hint_next_use(NAMESPACE, PROMPT, seconds=1)
        lease.release()
        assert store.released.is_set()
        store.go.set()
        busy.join()


def test_a_client_goes_on_after_the_server_was_restarted_but_its_leases_do_not(store: WatchedStore, tmp_path: Path):
    address = f"unix://{tmp_path}/s"
    with kvstore.connect(grpc_address(address)) as client:
        with ServedStore(store, [address]):
            store_prompt(client, NAMESPACE, PROMPT)
            lease = client.lease(client.match(NAMESPACE, PROMPT))
            stage = client.stage(NAMESPACE, [7, *PROMPT])
        with pytest.raises(UnavailableError):
            client.match(NAMESPACE, PROMPT)
        with ServedStore(store, [address]):
            assert verified_blocks(client, NAMESPACE, PROMPT) == BLOCKS
            with pytest.raises(UnavailableError, match="session"):
                lease.load_into(bytearray(LAYOUT.block_bytes))
            with pytest.raises(UnavailableError, match="session"):
                stage.write_from(expected_rows(NAMESPACE, [7, *PROMPT]))
            lease.release()
            stage.abort()
            stats = client.stats()
            assert (stats.leases, stats.stages) == (0, 0)


@pytest.mark.kill
def test_a_stopped_server_costs_no_more_than_the_deadlines(
    start_process: Callable[..., subprocess.Popen[str]], tmp_path: Path
):
    process = start_process(SERVER_PROGRAM, f"unix://{tmp_path}/s")
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    with kvstore.connect(grpc_address(address)) as client, kvstore.connect(grpc_address(address)) as fresh:
        store_prompt(client, NAMESPACE, PROMPT)
        match = client.match(NAMESPACE, PROMPT)
        lease = client.lease(match)
        for impatient in (client, fresh, lease._held):
            impatient._deadlines = flat_deadlines(1.0)
        _stop(process)
        calls: list[Callable[[], object]] = [
            lambda: client.match(NAMESPACE, PROMPT),
            lambda: client.stage(NAMESPACE, [7, *PROMPT]),
            lambda: lease.load_into(bytearray(LAYOUT.block_bytes)),
            lambda: fresh.match(NAMESPACE, PROMPT),
        ]
        for call in calls:
            watch = Stopwatch()
            with pytest.raises(UnavailableError, match=r"within|deadline"):
                call()
            assert watch.seconds < 2 * 1.0 + SLACK_SECONDS
        process.send_signal(signal.SIGCONT)


@pytest.mark.kill
def test_a_server_killed_in_mid_load_is_an_error_and_not_a_result(
    start_process: Callable[..., subprocess.Popen[str]], tmp_path: Path
):
    process = start_process(SERVER_PROGRAM, f"unix://{tmp_path}/s")
    assert process.stdout is not None
    with kvstore.connect(grpc_address(process.stdout.readline().strip())) as client:
        prompt = list(range(4 * 2**10))
        assert store_prompt(client, NAMESPACE, prompt).blocks == 2**10
        with client.lease(client.match(NAMESPACE, prompt)) as lease:
            _stop(process)
            timer = threading.Timer(0.2, process.kill)
            timer.start()
            with pytest.raises(UnavailableError):
                lease.load_into(np.empty((2**10, LAYOUT.block_bytes), dtype=np.uint8))
            timer.join()
        with pytest.raises(UnavailableError):
            client.match(NAMESPACE, prompt)


def test_a_stopping_server_lets_open_calls_end_and_takes_no_new_ones(store: WatchedStore):
    served = ServedStore(store)
    answers: list[object] = []
    patient = kvstore.connect(grpc_address(served.addresses[0]), control_seconds=60)
    with patient, kvstore.connect(grpc_address(served.addresses[0]), control_seconds=60) as other:
        other.stats()
        store.holding = True
        call = threading.Thread(target=lambda: answers.append(patient.stats()))
        call.start()
        assert store.entered.wait(ANSWER_SECONDS)
        stop = threading.Thread(target=served.stop, args=(60,))
        stop.start()
        while not _is_refused(other.status):
            pass  # the moment at which the server begins to refuse is its own
        store.go.set()
        call.join()
        stop.join()
        assert len(answers) == 1


def _load_is_taken(lease: kvstore.Lease, row: bytearray) -> bool:
    try:
        lease.load_into(row)
    except NoSpaceError:
        return False
    return True


def _stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)


def _is_refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except UnavailableError:
        return True
    return False


def test_the_grace_of_a_stopping_server_is_not_spent_on_idle_sessions(store: WatchedStore):
    served = ServedStore(store)
    with kvstore.connect(grpc_address(served.addresses[0])) as client:
        store_prompt(client, NAMESPACE, PROMPT)
        client.lease(client.match(NAMESPACE, PROMPT))
        watch = Stopwatch()
        served.stop(60)
        assert watch.seconds < 30
        assert store.released.is_set()


def test_no_thread_outlives_its_client_or_server(store: WatchedStore):
    before = set(threading.enumerate())
    with ServedStore(store) as served, kvstore.connect(grpc_address(served.addresses[0])) as client:
        store_prompt(client, NAMESPACE, PROMPT)
    with kvstore.connect(grpc_address(served.addresses[0])) as absent, pytest.raises(UnavailableError):
        absent.stats()
    for thread in set(threading.enumerate()) - before:
        thread.join(ANSWER_SECONDS)
    assert set(threading.enumerate()) <= before


def test_many_threads_share_one_client(store: WatchedStore):
    problems: list[BaseException] = []

    def work(client: kvstore.KvStore, seed: int) -> None:
        prompt = list(range(seed * 1000, seed * 1000 + 40))
        try:
            for _ in range(5):
                store_prompt(client, NAMESPACE, prompt)
                assert verified_blocks(client, NAMESPACE, prompt) == BLOCKS
        except BaseException as problem:  # noqa: BLE001  # handed to the main thread
            problems.append(problem)

    with ServedStore(store) as served, kvstore.connect(grpc_address(served.addresses[0])) as client:
        threads = [threading.Thread(target=work, args=(client, seed)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert problems == []
        assert client.stats().leases == 0


def test_environment_proxies_are_not_asked(store: WatchedStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(os.environ, "http_proxy", "http://192.0.2.1:1")
    with ServedStore(store) as served, kvstore.connect(grpc_address(served.addresses[0])) as client:
        assert client.status().serving
