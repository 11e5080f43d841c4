"""What a call and a byte cost through the sidecar, on each lane, beside bare sockets in the same run.

    python bench/bench_transport.py [--seconds 2] [--json FILE]

Lookups of 8k tokens whose blocks are all stored: one at a time, by several clients, and while bytes move. Loads and
stores of 64 MiB in blocks of 256 KiB, 1 MiB and 4 MiB. Floors (socket_floor.py): an echo of as many bytes as a lookup
sends and receives, and sendall/recv_into of the same bytes on one connection, of TLS those of Python's ssl sockets
(`--only tls` measures these alone; certificates need the package cryptography). Floor and measured calls alternate, so
that what else the machine does meets both; rates are medians. CPU seconds are those of client and sidecar together.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import numpy as np
from machine import describe
from socket_floor import HELLO, receive_all

import kvstore
from kvstore.certificates import make_certificates
from kvstore.types import KvLayout, Namespace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB = 1 << 20
TOKENS = 8192
BULK_BYTES = 64 * MIB
UNBOUNDED = ("--set", "store.store_bytes_per_second=1048576GiB")  # stored again and again, and rarely loaded
BLOCK_BYTES = (256 * 1024, MIB, 4 * MIB)
LOOKUP_LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=8, dtype="int8", block_tokens=16)
LOOKUPS = Namespace(model="lookup", revision="1", layout=LOOKUP_LAYOUT)
SMALL_LAYOUT = KvLayout(layers=1, kv_heads=8, head_dim=16, dtype="int8", block_tokens=16)  # 4 KiB
SMALL = Namespace(model="small", revision="1", layout=SMALL_LAYOUT)
# More conversations than a session remembers, so that each lookup sends its whole prompt.
FORGOTTEN = 24
# Bytes of a request and an answer on the wire: a lookup of a known prompt, of one that has grown, and of a new one.
KNOWN_BYTES, GROWN_BYTES, WHOLE_BYTES, ANSWER_BYTES = 99, 169, 4 * TOKENS + 104, 26
BURST = 50
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


class Rows:
    """What was measured, printed as it comes."""

    def __init__(self) -> None:
        self.rows: list[dict[str, object]] = []

    def keep(self, **row: object) -> None:
        self.rows.append(row)
        print("  ".join(f"{name}={value}" for name, value in row.items()), flush=True)


def alternate(seconds: float, *calls: Callable[[], object]) -> list[list[float]]:
    """The times of each call, a few dozen of one and then as many of the next, as an engine asks in bursts."""
    for call in calls:
        call()
    times: list[list[float]] = [[] for _ in calls]
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        for call, taken in zip(calls, times, strict=True):
            for _ in range(BURST):
                start = time.perf_counter()
                call()
                taken.append(time.perf_counter() - start)
    return times


def us(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def spread(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {
        "p10_us": us(ordered[len(ordered) // 10]),
        "p50_us": us(statistics.median(ordered)),
        "p99_us": us(ordered[int(len(ordered) * 0.99)]),
    }


@contextmanager
def process(*command: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
        try:
            yield started
        finally:
            started.terminate()


class Sidecar:
    """A `kvstore serve` process with an address of each kind."""

    def __init__(self, stack: ExitStack, folder: str) -> None:
        listen = f"unix://{folder}/both,127.0.0.1:0,grpc+unix://{folder}/grpc,grpc://127.0.0.1:0,tls://localhost:0"
        command = (sys.executable, "-P", "-m", "kvstore.cli", "serve", "--host-bytes", "768MiB", "--listen", listen)
        secured = ("--tls-cert", f"{folder}/pki/server.pem", "--tls-key", f"{folder}/pki/server.key")
        settings = (*UNBOUNDED, "--set", "log.level=warning", "--set", "auth.local_role=admin")
        started = stack.enter_context(process(*command, *secured, *settings))
        assert started.stdout is not None
        self.pid = started.pid
        listening = json.loads(started.stdout.readline())["listen"]
        self.unix, self.tcp, self.grpc_unix, self.grpc_tcp, self.tls = listening


def cpu_seconds(*pids: int) -> float:
    """CPU time of these processes and of this one."""
    ticks = 0
    for pid in pids:
        user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        ticks += int(user) + int(system)
    return ticks / CLOCK_TICKS + time.process_time()


class Floor:
    """Bare sockets in a process of their own."""

    def __init__(self, stack: ExitStack, folder: str) -> None:
        self.folder = folder
        self._path = f"{folder}/floor"
        started = stack.enter_context(
            process(
                sys.executable,
                str(Path(__file__).with_name("socket_floor.py")),
                self._path,
                f"{folder}/pki/server.pem",
                f"{folder}/pki/server.key",
            )
        )
        assert started.stdout is not None
        self.pid = started.pid
        self._port, self._tls_port = map(int, started.stdout.readline().split())
        self._context = ssl.create_default_context(cafile=f"{folder}/pki/ca.pem")
        self._context.minimum_version = ssl.TLSVersion.TLSv1_3
        self._stack = stack

    def connect(self, carrier: str, kind: bytes, request_bytes: int, answer_bytes: int) -> socket.socket:
        if carrier == "unix":
            connected = socket.socket(socket.AF_UNIX)
            connected.connect(self._path)
        else:
            port = self._tls_port if carrier == "tls" else self._port
            connected = socket.create_connection(("127.0.0.1", port))
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if carrier == "tls":
                connected = self._context.wrap_socket(connected, server_hostname="localhost")
        self._stack.enter_context(connected)
        connected.sendall(HELLO.pack(kind, request_bytes, answer_bytes))
        return connected

    def echo(self, carrier: str, request_bytes: int) -> Callable[[], object]:
        connected = self.connect(carrier, b"e", request_bytes, ANSWER_BYTES)
        request, answer = bytes(request_bytes), bytearray(ANSWER_BYTES)

        def call() -> None:
            connected.sendall(request)
            connected.recv_into(answer)

        return call


def store(client: kvstore.KvStore, namespace: Namespace, prompt: np.ndarray) -> None:
    blocks = len(prompt) // namespace.layout.block_tokens
    with client.stage(namespace, prompt) as stage:
        stage.write_from(np.zeros((blocks, namespace.layout.block_bytes), dtype=np.uint8))


def lookup_of(client: kvstore.KvStore, prompts: list[np.ndarray]) -> Callable[[], object]:
    turns = count()
    return lambda: client.match(LOOKUPS, prompts[next(turns) % len(prompts)], touch=False)


def measure_lookups(rows: Rows, sidecar: Sidecar, floor: Floor, seconds: float) -> None:
    """One lookup at a time, beside an echo of the same bytes."""
    prompt = np.arange(TOKENS, dtype=np.uint32)
    grown = [np.concatenate([prompt, np.arange(16 * turn, dtype=np.uint32)]) for turn in range(1, 200)]
    others = [np.arange(TOKENS, dtype=np.uint32) + TOKENS * (turn + 1) for turn in range(FORGOTTEN)]
    with kvstore.connect(sidecar.unix, lookup_seconds=5.0) as client:
        for one in (prompt, *others):
            store(client, LOOKUPS, one)
            assert client.match(LOOKUPS, one).blocks == TOKENS // 16
    for carrier, address in (("unix", sidecar.unix), ("tcp", sidecar.tcp)):
        with kvstore.connect(address, lookup_seconds=5.0) as client:
            for what, prompts, request_bytes in (
                ("known prompt", [prompt], KNOWN_BYTES),
                ("grown prompt", grown, GROWN_BYTES),
                ("new prompt", others, WHOLE_BYTES),
            ):
                lookups, echoes = alternate(seconds, lookup_of(client, prompts), floor.echo(carrier, request_bytes))
                ratio = round(statistics.median(lookups) / statistics.median(echoes), 2)
                rows.keep(op="match", lane="wire", carrier=carrier, what=what, **spread(lookups), echo_ratio=ratio)
                rows.keep(op="echo", lane="floor", carrier=carrier, what=what, **spread(echoes))
    measure_grpc_lookups(rows, sidecar, floor.folder, [prompt], seconds)


def measure_grpc_lookups(rows: Rows, sidecar: Sidecar, folder: str, prompts: list[np.ndarray], seconds: float) -> None:
    """What passing gRPC's connections on costs them, beside gRPC itself.

    `grpc_echo` is a bare server of the same kind that gets as many bytes; `grpc, health` the sidecar's, asked by a bare
    channel for what takes it nothing.
    """
    with ExitStack() as stack:
        started = stack.enter_context(
            process(sys.executable, str(Path(__file__).with_name("echo_server.py")), f"{folder}/grpc-echo")
        )
        assert started.stdout is not None
        started.stdout.readline()
        passed = stack.enter_context(kvstore.connect(f"grpc+{sidecar.unix}", lookup_seconds=5.0))
        alone = stack.enter_context(kvstore.connect(sidecar.grpc_unix, lookup_seconds=5.0))
        bare = stack.enter_context(grpc.insecure_channel(f"unix:{folder}/grpc-echo")).unary_unary("/echo/Echo")
        server = stack.enter_context(grpc.insecure_channel(sidecar.grpc_unix.replace("grpc+unix://", "unix:")))
        health = server.unary_unary("/grpc.health.v1.Health/Check")
        calls = {
            "grpc_echo": lambda: bare(bytes(WHOLE_BYTES)),
            "grpc, shared address": lookup_of(passed, prompts),
            "grpc alone": lookup_of(alone, prompts),
            "grpc, health": lambda: health(b""),
        }
        times = dict(zip(calls, alternate(2 * seconds, *calls.values()), strict=True))
    plain = statistics.median(times["grpc_echo"])
    for lane, taken in times.items():
        op = "match" if lane in ("grpc, shared address", "grpc alone") else "echo"
        ratio = round(statistics.median(taken) / plain, 2)
        rows.keep(op=op, lane=lane, carrier="unix", **spread(taken), grpc_echo_ratio=ratio)


LOOKUP_PROGRAM = """
import json, sys, threading, time
import numpy as np
sys.path.insert(0, sys.argv[1])
from bench_transport import LOOKUPS, TOKENS
import kvstore
address, threads, seconds = sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
prompt = np.arange(TOKENS, dtype=np.uint32)
counts = []
with kvstore.connect(address, lookup_seconds=5.0) as client:
    client.match(LOOKUPS, prompt)
    before = time.process_time()
    until = time.perf_counter() + seconds
    def work():
        done = 0
        while time.perf_counter() < until:
            client.match(LOOKUPS, prompt, touch=False)
            done += 1
        counts.append(done)
    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers: worker.start()
    for worker in workers: worker.join()
print(json.dumps({"lookups": sum(counts), "cpu_seconds": time.process_time() - before}))
"""


def measure_rate(rows: Rows, sidecar: Sidecar, seconds: float) -> None:
    """Lookups a second of clients in processes of their own, on all cores together with the sidecar.

    And what CPU time each takes on both sides, which other users of the machine hardly change.
    """
    for clients, threads in ((1, 1), (1, 4), (2, 1), (4, 1)):
        command = [sys.executable, "-P", "-c", LOOKUP_PROGRAM, str(Path(__file__).parent), sidecar.unix, str(threads)]
        before = cpu_seconds(sidecar.pid)
        with ExitStack() as stack:
            started = [stack.enter_context(process(*command, str(seconds))) for _ in range(clients)]
            told = [json.loads(one.stdout.read()) for one in started if one.stdout is not None]
        lookups = sum(one["lookups"] for one in told)
        rows.keep(
            op="lookups a second", lane="wire", clients=clients, threads=threads, rate=round(lookups / seconds),
            client_cpu_us=us(sum(one["cpu_seconds"] for one in told) / lookups),
            server_cpu_us=us((cpu_seconds(sidecar.pid) - before) / lookups),
        )  # fmt: skip


def measure_beside_bulk(rows: Rows, sidecar: Sidecar, seconds: float) -> None:
    """Lookups while another client loads 1 GB/s and a third stores 10,000 blocks of 4 KiB a second."""
    command = [sys.executable, str(Path(__file__)), "--traffic", sidecar.unix]
    prompt = np.arange(TOKENS, dtype=np.uint32)
    with ExitStack() as stack:
        client = stack.enter_context(kvstore.connect(sidecar.unix, lookup_seconds=5.0))
        started = [stack.enter_context(process(*command, kind)) for kind in ("load", "store")]
        outputs = [one.stdout for one in started if one.stdout is not None]
        for output in outputs:
            output.readline()
        (times,) = alternate(seconds * 2, lookup_of(client, [prompt]))
        for one in started:
            one.terminate()
        done = [json.loads(output.read().splitlines()[-1]) for output in outputs]
    load, stored = done
    rows.keep(
        op="match beside bulk", lane="wire", carrier="unix", **spread(times),
        load_gb_per_s=round(load["rate"] / 1e9, 2), stored_blocks_per_s=round(stored["rate"]),
    )  # fmt: skip


def traffic(address: str, kind: str) -> None:
    """Load 1 GB/s, or store 10,000 blocks a second, until SIGTERM; then tell the rate that came of it."""
    import signal

    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    with kvstore.connect(address, lookup_seconds=5.0) as client:
        step = _loading(client) if kind == "load" else _storing(client)
        amount = step()
        print("ready", flush=True)
        wanted = 1e9 if kind == "load" else 10_000
        start, done = time.perf_counter(), 0
        while not stopped.is_set():
            done += step()
            ahead_seconds = done / wanted - (time.perf_counter() - start)
            if ahead_seconds > 0:
                stopped.wait(ahead_seconds)
        print(json.dumps({"rate": done / (time.perf_counter() - start), "step": amount}), flush=True)


def _loading(client: kvstore.KvStore) -> Callable[[], int]:
    namespace = block_namespace(MIB)
    prompt = np.arange(16 * 16, dtype=np.uint32)
    store(client, namespace, prompt)
    target = np.zeros(16 * MIB, dtype=np.uint8)
    lease = client.lease(client.match(namespace, prompt))
    return lambda: lease.load_into(target).bytes


def _storing(client: kvstore.KvStore) -> Callable[[], int]:
    numbers = count()
    rows = np.zeros((100, SMALL_LAYOUT.block_bytes), dtype=np.uint8)

    def step() -> int:
        prompt = np.arange(1600, dtype=np.uint32) + 1600 * next(numbers)
        with client.stage(SMALL, prompt) as stage:
            return stage.write_from(rows)

    return step


def block_namespace(block_bytes: int) -> Namespace:
    layout = KvLayout(layers=1, kv_heads=1, head_dim=block_bytes // 32, dtype="int8", block_tokens=16)
    assert layout.block_bytes == block_bytes
    return Namespace(model=f"blocks of {block_bytes}", revision="1", layout=layout)


class Bulk:
    """Loads and stores of BULK_BYTES in blocks of one size, through one client."""

    def __init__(self, client: kvstore.KvStore, block_bytes: int, source: np.ndarray, target: np.ndarray) -> None:
        self._client = client
        self._namespace = block_namespace(block_bytes)
        self._rows = source.reshape(-1, block_bytes)
        self._target = target
        self._prompts = (np.arange(len(self._rows) * 16, dtype=np.uint32) + 2**20 * turn for turn in count())
        self._lease: kvstore.Lease | None = None

    def store(self) -> float:
        """Seconds that the bytes took; the stage is opened before and dropped behind."""
        stage = self._client.stage(self._namespace, next(self._prompts))
        start = time.perf_counter()
        stage.write_from(self._rows)
        seconds = time.perf_counter() - start
        stage.abort()
        return seconds

    def load(self) -> float:
        """Seconds that the bytes took; all of them are compared once."""
        if self._lease is None:
            prompt = next(self._prompts)
            with self._client.stage(self._namespace, prompt) as stage:
                stage.write_from(self._rows)
            self._lease = self._client.lease(self._client.match(self._namespace, prompt))
            assert self._lease.load_into(self._target).blocks == len(self._rows)
            assert np.array_equal(self._rows.reshape(-1), self._target)
        start = time.perf_counter()
        self._lease.load_into(self._target)
        return time.perf_counter() - start

    def clear(self) -> None:
        if self._lease is not None:
            self._lease.release()
        self._client.clear(self._namespace)


def measure_bulk(rows: Rows, sidecar: Sidecar, floor: Floor, seconds: float, only: str | None) -> None:
    """Bytes on one connection, on each lane, beside plain sendall and recv_into."""
    source = np.random.default_rng(1).integers(0, 256, BULK_BYTES, dtype=np.uint8)
    target = np.zeros_like(source)
    for carrier, wire_address, grpc_address in (
        ("tcp", sidecar.tcp, sidecar.grpc_tcp),
        ("unix", sidecar.unix, sidecar.grpc_unix),
        ("tls", sidecar.tls, f"grpc+{sidecar.tls}"),
    ):
        if only not in (None, carrier):
            continue
        ca = f"{floor.folder}/pki/ca.pem" if carrier == "tls" else None
        sender = floor.connect(carrier, b"s", BULK_BYTES, 0)
        taker = floor.connect(carrier, b"r", BULK_BYTES, 0)

        def floor_load(sender: socket.socket = sender) -> float:
            start = time.perf_counter()
            sender.sendall(b"x")
            receive_all(sender, target.data)
            return time.perf_counter() - start

        def floor_store(taker: socket.socket = taker) -> float:
            start = time.perf_counter()
            taker.sendall(source.data)
            taker.recv(1)
            return time.perf_counter() - start

        for block_bytes in BLOCK_BYTES:
            with (
                kvstore.connect(wire_address, tls_ca=ca, lookup_seconds=5.0) as wire,
                kvstore.connect(grpc_address, tls_ca=ca, lookup_seconds=5.0) as grpc,
            ):
                lanes = {"wire": Bulk(wire, block_bytes, source, target)}
                lanes["grpc"] = Bulk(grpc, block_bytes, source, target)
                for op, plain in (("load", floor_load), ("store", floor_store)):
                    calls = {"floor": plain, **{lane: getattr(bulk, op) for lane, bulk in lanes.items()}}
                    pids = (sidecar.pid, floor.pid)
                    keep_bulk(rows, pids, calls, seconds, op=op, carrier=carrier, block_bytes=block_bytes)
                for bulk in lanes.values():
                    bulk.clear()


def keep_bulk(
    rows: Rows, pids: tuple[int, ...], calls: dict[str, Callable[[], float]], seconds: float, **named: object
) -> None:
    times: dict[str, list[float]] = {lane: [] for lane in calls}
    used_seconds = dict.fromkeys(calls, 0.0)
    for call in calls.values():
        call()
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(times["floor"]) < 5:
        for lane, call in calls.items():
            before = cpu_seconds(*pids)
            times[lane].append(call())
            used_seconds[lane] += cpu_seconds(*pids) - before
    plain = statistics.median(times["floor"])
    for lane, taken in times.items():
        median = statistics.median(taken)
        row = {"lane": lane, **named, "gb_per_s": round(BULK_BYTES / median / 1e9, 2)}
        if lane != "floor":
            row["of_floor"] = round(plain / median, 2)
        row["cpu_s_per_gb"] = round(used_seconds[lane] / (len(taken) * BULK_BYTES / 1e9), 2)
        rows.keep(**row)


def main() -> None:
    """Measure all and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each measurement")
    parser.add_argument("--json", type=Path, help="file to write the rows to")
    parser.add_argument("--only", choices=("tls", "tcp", "unix"), help="bytes over this alone, and no lookups")
    parser.add_argument("--traffic", nargs=2, metavar=("ADDRESS", "KIND"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.traffic:
        traffic(*arguments.traffic)
        return
    rows = Rows()
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=Path.cwd()) as folder, ExitStack() as stack:
        make_certificates(Path(folder, "pki"), hosts=["localhost"], clients=[], days=1)
        sidecar, floor = Sidecar(stack, folder), Floor(stack, folder)
        if arguments.only is None:
            measure_lookups(rows, sidecar, floor, arguments.seconds)
            measure_rate(rows, sidecar, arguments.seconds)
        measure_bulk(rows, sidecar, floor, arguments.seconds, arguments.only)
        if arguments.only is None:
            measure_beside_bulk(rows, sidecar, arguments.seconds)
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": describe(), "rows": rows.rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
