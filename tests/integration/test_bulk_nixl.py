"""Loads and stores through NIXL between real processes, over what UCX has without adapters: shared memory and TCP.

No process of these is the one that runs the tests: a crash of an engine is then a failed test.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import kvstore
from kvstore.testing.patience import ANSWER_SECONDS, wait_until
from kvstore.transport.client import DEFAULT_DEADLINES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [
    pytest.mark.kill,
    pytest.mark.skipif(
        find_spec("nixl_cu13") is None and find_spec("nixl_cu12") is None,
        reason="NIXL is not installed: `make nixl` installs it (210 MB) and runs these tests",
    ),
]
PROGRAMS = Path(__file__).parent
BLOCKS = 64
PROMPT_BYTES = BLOCKS * 2**20
SLACK_SECONDS = 2.0  # the process has to get to the next load, and to say so
# What UCX may use: what it finds, which is the kernel's copy between processes; or TCP over the loopback.
TRANSPORTS = {"shared memory": {}, "TCP": {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}}


class Server:
    """A sidecar with NIXL."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self.process = process
        ready = json.loads(process.stdout.readline())
        self.address, self._metrics = ready["listen"][0], ready["metrics"]

    def metric(self, name: str) -> dict[str, float]:
        """Values of a metric, by label."""
        with urllib.request.urlopen(f"http://{self._metrics}/metrics", timeout=ANSWER_SECONDS) as page:
            found = re.findall(rf'^{name}{{\w+="(\w+)"}} (\S+)$', page.read().decode(), re.MULTILINE)
        return {label: float(value) for label, value in found}


@pytest.fixture(params=TRANSPORTS)
def environment(request: pytest.FixtureRequest) -> dict[str, str]:
    return {**os.environ, **TRANSPORTS[request.param]}


@pytest.fixture
def start(environment: dict[str, str]) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []

    def start(*command: str) -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, "-P", *command], stdout=subprocess.PIPE, text=True, env=environment)
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def server(start: Callable[..., subprocess.Popen[str]]) -> Server:
    settings = ("--set", "transport.bulk=nixl", "--set", "log.level=error", "--set", "auth.local_role=admin")
    addresses = ("--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0")
    return Server(start("-m", "kvstore.cli", "serve", "--host-bytes", "160MiB", *addresses, *settings))


@pytest.fixture
def client(
    start: Callable[..., subprocess.Popen[str]], server: Server
) -> Callable[[float, str], subprocess.Popen[str]]:
    def client(bulk_seconds: float, what: str) -> subprocess.Popen[str]:
        program = str(PROGRAMS / "bulk_client_process.py")
        return start(program, server.address, "nixl", str(bulk_seconds), what)

    return client


def line(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    return process.stdout.readline().split()


@contextmanager
def stopped(process: subprocess.Popen[str]) -> Iterator[None]:
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    try:
        yield
    finally:
        os.kill(process.pid, signal.SIGCONT)


def test_bytes_go_through_nixl_and_all_processes_end_well(
    server: Server, client: Callable[[float, str], subprocess.Popen[str]]
):
    for turn in (2, 1):  # the second one finds the prompt stored
        process = client(20.0, "once")
        assert [str(BLOCKS), str(turn * PROMPT_BYTES), "0"] == line(process)
        assert ["closed"] == line(process)
        assert 0 == process.wait(ANSWER_SECONDS)
    moved = {"load": 2.0 * PROMPT_BYTES, "store": 1.0 * PROMPT_BYTES}
    assert moved == server.metric("kvstore_bulk_engine_bytes_total")
    assert {} == server.metric("kvstore_bulk_engine_failures_total")
    server.process.terminate()
    assert 0 == server.process.wait(ANSWER_SECONDS)


def test_a_client_killed_in_the_middle_of_a_load_leaves_nothing_held(
    server: Server, client: Callable[[float, str], subprocess.Popen[str]]
):
    process = client(20.0, "go on")
    assert str(BLOCKS) == line(process)[0]
    line(process)  # it goes from load to load without a pause
    process.kill()
    with kvstore.connect(server.address) as watcher:
        wait_until(lambda: watcher.stats().leases == 0)
    again = client(20.0, "once")
    assert [str(BLOCKS), str(PROMPT_BYTES), "0"] == line(again)
    assert 0 == again.wait(ANSWER_SECONDS)


def test_a_stopped_client_holds_no_other_one_up_and_gets_right_bytes_later(
    server: Server, client: Callable[[float, str], subprocess.Popen[str]]
):
    process = client(2.0, "go on")
    assert str(BLOCKS) == line(process)[0]
    line(process)
    with stopped(process):
        other = client(20.0, "once")
        assert str(BLOCKS) == line(other)[0]
        assert 0 == other.wait(ANSWER_SECONDS)
    said = [line(process) for _ in range(3)]
    assert [[str(BLOCKS)]] * 3 == said or ["unavailable"] in said  # late, but never wrong: that would be no answer


def test_a_client_of_a_killed_server_ends_in_time_and_well(
    server: Server, client: Callable[[float, str], subprocess.Popen[str]]
):
    process = client(1.0, "go on")
    assert str(BLOCKS) == line(process)[0]
    line(process)
    server.process.kill()
    while (said := line(process)) == [str(BLOCKS)]:
        pass
    assert ["unavailable"] == said
    assert ["closed"] == line(process)
    assert 0 == process.wait(ANSWER_SECONDS)


def test_a_load_from_a_stopped_server_ends_in_time(
    server: Server, client: Callable[[float, str], subprocess.Popen[str]]
):
    bulk_seconds = 1.0
    process = client(bulk_seconds, "go on")
    assert str(BLOCKS) == line(process)[0]
    line(process)
    with stopped(server.process):
        since = time.monotonic()
        while (said := line(process)) == [str(BLOCKS)]:
            pass
        seconds = time.monotonic() - since
    assert ["unavailable"] == said
    assert seconds < 2 * (bulk_seconds + PROMPT_BYTES / DEFAULT_DEADLINES.floor_bytes_per_second) + SLACK_SECONDS


def test_nothing_is_written_from_memory_whose_transfer_was_broken_off(start: Callable[..., subprocess.Popen[str]]):
    process = start(str(PROGRAMS / "bulk_late_write_process.py"))
    outcome = line(process)
    zeros, ones, twos = map(int, line(process))
    assert 0 == twos
    assert outcome in (["ended"], ["broken", "off"])
    assert (outcome == ["ended"]) == (zeros == 0)
    assert zeros + ones == 256 * 2**20
    assert 0 == process.wait(ANSWER_SECONDS)


MISUSE_PROGRAM = """
import sys
import numpy as np
from kvstore.errors import BulkEngineError
from kvstore.transport.bulk import Move
from kvstore.transport.nixl_engine import NixlEngine
here, there = NixlEngine(), NixlEngine()
known, unknown = np.zeros(2**20, dtype=np.uint8), np.zeros(2**20, dtype=np.uint8)
here.register(known.ctypes.data, known.nbytes)
target = np.zeros(2**20, dtype=np.uint8)
there.register(target.ctypes.data, target.nbytes)
metadata = there.metadata()
def attempts():
    yield lambda: here.connect(b"")
    yield lambda: here.connect(b"x" * 100)
    yield lambda: here.connect(metadata[:100])
    yield lambda: here.connect(b"x" * 20_000)
    peer = here.connect(metadata)
    yield lambda: peer.write([Move(unknown.ctypes.data, target.ctypes.data, 4096)])
    yield lambda: peer.write([Move(known.ctypes.data, unknown.ctypes.data, 4096)])
    yield lambda: peer.read([Move(known.ctypes.data, target.ctypes.data + 2**20 - 1, 4096)])
    peer.disconnect()
    yield lambda: peer.write([Move(known.ctypes.data, target.ctypes.data, 4096)])
    here.close()
    here.close()
    yield lambda: here.connect(metadata)
    yield here.metadata
for attempt in attempts():
    try:
        attempt()
        sys.stdout.write("taken\\n")
    except BulkEngineError as error:
        sys.stdout.write("refused\\n")
there.close()
"""


def test_what_makes_no_sense_is_refused_by_a_typed_error(start: Callable[..., subprocess.Popen[str]]):
    process = start("-c", MISUSE_PROGRAM)
    assert process.stdout is not None
    assert ["refused"] * 10 == process.stdout.read().split()
    assert 0 == process.wait(ANSWER_SECONDS)
