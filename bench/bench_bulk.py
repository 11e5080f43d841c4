"""Loads and stores of bytes through each way there is, beside their floors and Mooncake Store, in the same run.

    python bench/bench_bulk.py [--seconds 2] [--mooncake PYTHON] [--json FILE]

64 MiB in blocks of 256 KiB, 1 MiB and 4 MiB, between two processes of this machine: the fast lane over TCP; NIXL, over
what UCX finds (the kernel's copy between processes, on a machine without adapters) and over TCP; numpy's copy, and
sendall/recv_into on a bare connection. `--mooncake` names a Python that has mooncake-transfer-engine-non-cuda; its
Store then serves the same blocks over TCP from a third process, one call for all of them and a call for each. All of a
size alternate, so that what else the machine does meets all; rates are medians. What is not installed is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from bench_transport import BLOCK_BYTES, BULK_BYTES, UNBOUNDED, Bulk, Floor, Rows, process
from machine import describe
from socket_floor import receive_all

import kvstore
from kvstore.certificates import make_certificates

if TYPE_CHECKING:
    from collections.abc import Callable

UCX = {"nixl, what UCX finds": {}, "nixl, TCP": {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}}
RUNS_MIN = 7


def serve(stack: ExitStack, engine: str) -> str:
    """A sidecar; returns its address."""
    command = (sys.executable, "-P", "-m", "kvstore.cli", "serve", "--host-bytes", "512MiB", "--listen", "127.0.0.1:0")
    settings = ("--set", f"transport.bulk={engine}", "--set", "log.level=warning", "--set", "auth.local_role=admin")
    started = stack.enter_context(process(*command, *settings, *UNBOUNDED))
    assert started.stdout is not None
    address: str = json.loads(started.stdout.readline())["listen"][0]
    return address


class Mooncake:
    """A client of Mooncake Store in a Python of its own (mooncake_peer.py)."""

    def __init__(self, stack: ExitStack, python: str, block_bytes: int) -> None:
        program = str(Path(__file__).with_name("mooncake_peer.py"))
        self._process = stack.enter_context(  # it ends, with all that it has started, when its stdin does
            subprocess.Popen(
                (python, "-P", program, str(block_bytes), str(BULK_BYTES)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        self.version = self._answer()

    def __call__(self, what: str) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> str:
        """The next line that is ours: Mooncake writes its own to stdout, too."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@"):
                return line[1:].strip()
        raise RuntimeError("the peer has ended; is Mooncake installed in that Python?")


def clients(stack: ExitStack) -> dict[str, kvstore.KvStore]:
    """A client of a sidecar of its own for each way."""
    ways = {"fast lane": kvstore.connect(serve(stack, "socket"), lookup_seconds=5.0, bulk_seconds=10.0)}
    if find_spec("nixl_cu13") is not None:
        for way, variables in UCX.items():
            os.environ.update(variables)
            address = serve(stack, "nixl")
            ways[way] = kvstore.connect(address, bulk="nixl", lookup_seconds=5.0, bulk_seconds=10.0)
            for name in variables:
                del os.environ[name]
    for client in ways.values():
        stack.enter_context(client)
    return ways


def floors(stack: ExitStack, folder: str, source: np.ndarray, target: np.ndarray) -> dict[str, Callable[[], float]]:
    """What no way can beat: memory's own speed; and what those over sockets cannot."""
    floor = Floor(stack, folder)
    sender, taker = (floor.connect("tcp", kind, BULK_BYTES, 0) for kind in (b"s", b"r"))

    def copy() -> float:
        start = time.perf_counter()
        np.copyto(target, source)
        return time.perf_counter() - start

    def load() -> float:
        start = time.perf_counter()
        sender.sendall(b"x")
        receive_all(sender, target.data)
        return time.perf_counter() - start

    def store() -> float:
        start = time.perf_counter()
        taker.sendall(source.data)
        taker.recv(1)
        return time.perf_counter() - start

    return {"copy": copy, "sockets load": load, "sockets store": store}


def measure(rows: Rows, calls: dict[tuple[str, str], Callable[[], float]], seconds: float, block_bytes: int) -> None:
    """Let all take turns; a row for each."""
    times: dict[tuple[str, str], list[float]] = {named: [] for named in calls}
    for call in calls.values():
        call()
    until = time.perf_counter() + seconds * len(calls)
    while time.perf_counter() < until or min(map(len, times.values())) < RUNS_MIN:
        for named, call in calls.items():
            times[named].append(call())
    medians = {named: statistics.median(taken) for named, taken in times.items()}
    for (op, way), median in medians.items():
        ratios = {
            f"of_{peer.replace(' ', '_').replace(',', '')}": round(medians[op, peer] / median, 2)
            for peer in ("sockets", "fast lane", "mooncake batch", "mooncake one by one")
            if (op, peer) in medians and peer != way
        }
        rows.keep(
            op=op, way=way, block_bytes=block_bytes, runs=len(times[op, way]),
            gb_per_s=round(BULK_BYTES / median / 1e9, 2), **ratios,
        )  # fmt: skip


def main() -> None:
    """Measure all and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each way, operation and size")
    parser.add_argument("--mooncake", metavar="PYTHON", help="a Python that has Mooncake")
    parser.add_argument("--json", type=Path, help="file to write the rows to")
    arguments = parser.parse_args()
    rows, versions = Rows(), {}
    if find_spec("nixl_cu13") is not None:
        versions["nixl-cu13"] = metadata.version("nixl-cu13")
    source = np.random.default_rng(1).integers(0, 256, BULK_BYTES, dtype=np.uint8)
    target = np.zeros_like(source)
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=Path.cwd()) as folder, ExitStack() as stack:
        make_certificates(Path(folder, "pki"), hosts=["localhost"], clients=[], days=1)
        bare, ways = floors(stack, folder, source, target), clients(stack)
        for block_bytes in BLOCK_BYTES:
            with ExitStack() as peers:
                bulks = {way: Bulk(client, block_bytes, source, target) for way, client in ways.items()}
                calls = {("load", "copy"): bare["copy"], ("load", "sockets"): bare["sockets load"]}
                calls |= {("load", way): bulk.load for way, bulk in bulks.items()}
                calls["store", "sockets"] = bare["sockets store"]
                calls |= {("store", way): bulk.store for way, bulk in bulks.items()}
                if arguments.mooncake:
                    peer = Mooncake(peers, arguments.mooncake, block_bytes)
                    versions["mooncake-transfer-engine-non-cuda"] = peer.version
                    for op in ("load", "store"):
                        calls[op, "mooncake batch"] = lambda op=op, peer=peer: peer(f"{op} batch")
                        calls[op, "mooncake one by one"] = lambda op=op, peer=peer: peer(f"{op} one")
                measure(rows, calls, arguments.seconds, block_bytes)
                for bulk in bulks.values():
                    bulk.clear()
        used = {way: str(client.bulk) for way, client in ways.items()}
    if arguments.json:
        result = {"machine": describe(), "versions": versions, "engines": used, "rows": rows.rows}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
