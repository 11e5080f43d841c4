"""What the store costs, embedded and served, beside what the machine itself takes: `make bench`.

    python bench/bench_store.py [--seconds 2] [--json FILE]

Lookups of prompts whose blocks are all stored, in microseconds; loads and stores of 256 KiB blocks, in GB/s (1e9). The
floors are measured in the same run: a copy of the same blocks by numpy, and a gRPC echo of the same bytes as a lookup
sends and receives, by a server of the same kind. Every loaded block is compared with what was stored.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import numpy as np
from machine import describe

import kvstore
from kvstore.store.settings import StoreSettings
from kvstore.types import KvLayout, Namespace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LAYOUT = KvLayout(layers=16, kv_heads=8, head_dim=32, dtype="float16", block_tokens=16)  # 256 KiB a block
NAMESPACE = Namespace(model="bench", revision="1", layout=LAYOUT)
LOOKUP_LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=8, dtype="int8", block_tokens=16)
LOOKUP_NAMESPACE = Namespace(model="lookup", revision="1", layout=LOOKUP_LAYOUT)
PROMPT_TOKENS = (1024, 8192, 32768, 131072)
BLOCKS = 256
MIB = 1 << 20
UNBOUNDED = StoreSettings(store_bytes_per_second=1 << 50)  # stored again and again, and rarely loaded


class Bench:
    """Repeats each measurement for a while and keeps the rows."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.rows: list[dict[str, object]] = []

    def latency(self, op: str, where: str, tokens: int, call: Callable[[], object]) -> None:
        """Median and 99th percentile of one call, in microseconds."""
        times = self._times(call)
        self._keep(op=op, where=where, tokens=tokens, p50_us=_us(statistics.median(times)), p99_us=_us(_p99(times)))

    def rate(self, op: str, where: str, nbytes: int, call: Callable[[], object]) -> None:
        """Bytes over the median time of one call, in GB/s."""
        times = self._times(call)
        self._keep(op=op, where=where, bytes=nbytes, gb_per_s=round(nbytes / statistics.median(times) / 1e9, 3))

    def _times(self, call: Callable[[], object]) -> list[float]:
        call()
        times: list[float] = []
        until = time.perf_counter() + self._seconds
        while time.perf_counter() < until or len(times) < 5:
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return times

    def _keep(self, **row: object) -> None:
        self.rows.append(row)
        print("  ".join(f"{name}={value}" for name, value in row.items()), flush=True)


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def _p99(times: list[float]) -> float:
    return sorted(times)[int(len(times) * 0.99)]


def _store(store: kvstore.KvStore, namespace: Namespace, prompt: np.ndarray, rows: np.ndarray) -> None:
    with store.stage(namespace, prompt) as stage:
        stage.write_from(rows)


def measure_lookups(bench: Bench, where: str, store: kvstore.KvStore) -> None:
    """Lookups of whole stored prompts."""
    for tokens in PROMPT_TOKENS:
        prompt = np.arange(tokens, dtype=np.uint32) + tokens
        blocks = tokens // LOOKUP_LAYOUT.block_tokens
        _store(store, LOOKUP_NAMESPACE, prompt, np.zeros((blocks, LOOKUP_LAYOUT.block_bytes), dtype=np.uint8))
        assert store.match(LOOKUP_NAMESPACE, prompt).blocks == blocks
        bench.latency("match", where, tokens, lambda prompt=prompt: store.match(LOOKUP_NAMESPACE, prompt, touch=False))


def measure_bytes(bench: Bench, where: str, store: kvstore.KvStore) -> None:
    """Stores and loads of BLOCKS blocks to and from host memory."""
    rng = np.random.default_rng(1)
    rows = rng.integers(0, 256, (BLOCKS, LAYOUT.block_bytes), dtype=np.uint8)
    target = np.zeros_like(rows)
    prompts = iter(np.arange(BLOCKS * 16, dtype=np.uint32) + BLOCKS * 16 * index for index in range(1, 1 << 20))

    def store_one() -> None:
        prompt = next(prompts)
        _store(store, NAMESPACE, prompt, rows)
        store.evict(NAMESPACE, prompt)

    bench.rate("memcpy", where, rows.nbytes, lambda: np.copyto(target, rows))
    bench.rate("store", where, rows.nbytes, store_one)
    prompt = next(prompts)
    _store(store, NAMESPACE, prompt, rows)
    with store.lease(store.match(NAMESPACE, prompt)) as lease:
        bench.rate("load", where, rows.nbytes, lambda: lease.load_into(target))
    assert np.array_equal(target, rows)
    store.evict(NAMESPACE, prompt)


def measure_disk(bench: Bench, path: Path) -> None:
    """Flush to disk, and load from it into a store whose host memory is too small to keep anything."""
    rows = np.random.default_rng(2).integers(0, 256, (BLOCKS, LAYOUT.block_bytes), dtype=np.uint8)
    prompt = np.arange(BLOCKS * 16, dtype=np.uint32)
    target = np.zeros_like(rows)

    def store_and_flush(store: kvstore.KvStore) -> None:
        _store(store, NAMESPACE, prompt, rows)
        store.flush()
        store.clear(NAMESPACE)

    with kvstore.open(path, host_bytes=128 * MIB, disk_bytes=1024 * MIB, settings=UNBOUNDED) as store:
        bench.rate("store and flush", "disk", rows.nbytes, lambda: store_and_flush(store))
        _store(store, NAMESPACE, prompt, rows)
    with (
        kvstore.open(path, host_bytes=LAYOUT.block_bytes, disk_bytes=1024 * MIB) as store,
        store.lease(store.match(NAMESPACE, prompt)) as lease,
    ):
        bench.rate("load", "disk", rows.nbytes, lambda: lease.load_into(target))
    assert np.array_equal(target, rows)


@contextmanager
def sidecar(folder: str) -> Iterator[str]:
    """A `kvstore serve` process of its own; gives its address."""
    command = [sys.executable, "-P", "-m", "kvstore.cli", "serve", "--host-bytes", "512MiB"]
    command += ["--set", "store.store_bytes_per_second=1048576GiB", "--listen"]
    with subprocess.Popen([*command, f"grpc+unix://{folder}/socket"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["listen"][0]
        finally:
            process.terminate()


@contextmanager
def echo_channel(folder: str) -> Iterator[grpc.Channel]:
    """A channel to a bare gRPC server in a process of its own."""
    socket = f"{folder}/echo"
    command = [sys.executable, str(Path(__file__).with_name("echo_server.py")), socket]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            with grpc.insecure_channel(f"unix:{socket}") as channel:
                yield channel
        finally:
            process.kill()


def measure_echo(bench: Bench, folder: str) -> None:
    """What gRPC itself takes for the bytes of a lookup."""
    with echo_channel(folder) as channel:
        call = channel.unary_unary("/echo/Echo")
        for tokens in PROMPT_TOKENS:
            request = bytes(4 * tokens + 64)
            bench.latency("echo", "gRPC alone", tokens, lambda request=request: call(request))


def main() -> None:
    """Measure all and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each measurement")
    parser.add_argument("--json", type=Path, help="file to write the rows to")
    arguments = parser.parse_args()
    bench = Bench(arguments.seconds)
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=Path.cwd()) as folder:
        with kvstore.open(host_bytes=512 * MIB, settings=UNBOUNDED) as store:
            measure_lookups(bench, "embedded", store)
            measure_bytes(bench, "embedded", store)
        with sidecar(folder) as address, kvstore.connect(address, lookup_seconds=5.0) as client:
            measure_lookups(bench, "gRPC, Unix socket", client)
            measure_bytes(bench, "gRPC, Unix socket", client)
        measure_echo(bench, folder)
        measure_disk(bench, Path(folder) / "data")
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": describe(), "rows": bench.rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
