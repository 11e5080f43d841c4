"""What a load costs on one host: from where the blocks lie, over the socket, and as a plain copy of the same blocks.

    python bench/bench_arena.py [--seconds 2] [--json FILE]

64 MiB in blocks of 32 KiB to 4 MiB, that a sidecar holds in host memory and this process loads: in place, through a
lease that is held, and through a new one each time with its lookup; over the Unix socket; and, as the floor, numpy's
copy of as many bytes between two arrays of this process. All four take turns, so that what else the machine does meets
each; rates are medians, and the best of all turns, where others keep the cores busy; ratios are those of these. CPU
seconds are those of client and sidecar together.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

import numpy as np
from bench_transport import MIB, UNBOUNDED, block_namespace, cpu_seconds, process, store
from machine import describe

import kvstore
from kvstore.transport.arena import Arena

if TYPE_CHECKING:
    from collections.abc import Callable

LOAD_BYTES = 64 * MIB
BLOCK_BYTES = (32 * 1024, 256 * 1024, MIB, 4 * MIB)


class Turns:
    """Calls that take turns, the time of each and the CPU time of all that take part."""

    def __init__(self, pid: int, calls: dict[str, Callable[[], object]]) -> None:
        self._pid = pid
        self._calls = calls
        self.seconds: dict[str, list[float]] = {name: [] for name in calls}
        self.cpu: dict[str, float] = dict.fromkeys(calls, 0.0)

    def run(self, seconds: float) -> None:
        """Go on for so long, after one turn that is not counted."""
        for call in self._calls.values():
            call()
        until = time.perf_counter() + seconds
        order = list(self._calls.items())
        shuffled = random.Random(1)
        while time.perf_counter() < until:
            shuffled.shuffle(order)  # who comes behind one that waits is not interrupted as soon as the others
            for name, call in order:
                cpu, start = cpu_seconds(self._pid), time.perf_counter()
                call()
                self.seconds[name].append(time.perf_counter() - start)
                self.cpu[name] += cpu_seconds(self._pid) - cpu

    def rows(self, block_bytes: int) -> list[dict[str, object]]:
        """What came of it."""
        floor = statistics.median(self.seconds["memcpy"])
        best = min(self.seconds["memcpy"])
        return [
            {
                "op": name,
                "block_bytes": block_bytes,
                "gb_per_s": round(LOAD_BYTES / statistics.median(times) / 1e9, 2),
                "memcpy_ratio": round(floor / statistics.median(times), 2),
                "best_gb_per_s": round(LOAD_BYTES / min(times) / 1e9, 2),
                "best_memcpy_ratio": round(best / min(times), 2),
                "cpu_s_per_gb": round(self.cpu[name] / (len(times) * LOAD_BYTES / 1e9), 2),
                "turns": len(times),
            }
            for name, times in self.seconds.items()
        ]


def measure(near: kvstore.Client, far: kvstore.Client, pid: int, block_bytes: int, seconds: float) -> Turns:
    """Loads of blocks of one size."""
    namespace = block_namespace(block_bytes)
    prompt = np.arange(LOAD_BYTES // block_bytes * 16, dtype=np.uint32)
    store(near, namespace, prompt)
    source, target = np.ones(LOAD_BYTES, dtype=np.uint8), np.zeros(LOAD_BYTES, dtype=np.uint8)
    held, sent = (client.lease(client.match(namespace, prompt)) for client in (near, far))

    def load(lease: kvstore.Lease) -> None:
        assert lease.load_into(target).bytes == LOAD_BYTES

    def load_sent() -> None:
        with patch.object(Arena, "load", new=lambda *_: 0):  # as if nothing could be mapped
            load(sent)

    def load_anew() -> None:
        with near.lease(near.match(namespace, prompt)) as lease:
            load(lease)

    calls: dict[str, Callable[[], object]] = {
        "memcpy": lambda: np.copyto(target, source),
        "in place": lambda: load(held),
        "in place, with lookup and lease": load_anew,
        "Unix socket": load_sent,
    }
    turns = Turns(pid, calls)
    turns.run(seconds)
    assert not near.arena.off
    assert not near.arena.fallbacks
    held.release()
    sent.release()
    near.clear(namespace)
    return turns


def main() -> None:
    """Measure, print, and write FILE."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, object]] = []
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=Path.cwd()))
        command = (sys.executable, "-P", "-m", "kvstore.cli", "serve", "--host-bytes", "256MiB")
        settings = (*UNBOUNDED, "--set", "log.level=warning", "--set", "auth.local_role=admin")
        sidecar = stack.enter_context(process(*command, "--listen", f"unix://{folder}/s", *settings))
        assert sidecar.stdout is not None
        address = json.loads(sidecar.stdout.readline())["listen"][0]
        near, far = (
            stack.enter_context(kvstore.connect(address, lookup_seconds=5.0, bulk_seconds=30.0)) for _ in range(2)
        )
        for block_bytes in BLOCK_BYTES:
            for row in measure(near, far, sidecar.pid, block_bytes, arguments.seconds).rows(block_bytes):
                rows.append(row)
                print("  ".join(f"{name}={value}" for name, value in row.items()), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"machine": describe(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
