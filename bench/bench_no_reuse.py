"""What the store costs an engine whose prompts never come again, with a budget of 1/400 of the bandwidth of memory.

    python bench/bench_no_reuse.py [--steps N] [--json FILE]

The engine does nothing but copy, so whatever the store copies is taken from it: the worst case. Each step copies the
KV of one prompt of its own, looks the prompt up and stores it, in the same thread, as far as the store takes it. What
is lost is the share of the store's calls in the CPU time of the process, threads for the disk included: other processes
of the machine disturb that least. The first steps fill host memory, for which the system has to find pages; they are
not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from machine import describe

import kvstore
from kvstore.store.budget import default_bytes_per_second
from kvstore.store.settings import StoreSettings
from kvstore.types import KvLayout, Namespace

MIB = 1 << 20
LAYOUT = KvLayout(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16", block_tokens=16)  # 2 MiB a block
NAMESPACE = Namespace(model="bench", revision="1", layout=LAYOUT)
PROMPT_TOKENS = 4096  # 512 MiB
HOST_BYTES = 512 * MIB
BUDGET_BYTES_PER_SECOND = default_bytes_per_second() // 40  # the default is a tenth of the bandwidth
SETTINGS = StoreSettings(store_bytes_per_second=BUDGET_BYTES_PER_SECOND)


class CpuClock:
    """Time as the process has it: where others take the processor, the budget of the store does not grow meanwhile."""

    def monotonic(self) -> float:
        return time.process_time()

    def unix(self) -> float:
        return time.time()


@dataclass(slots=True)
class Engine:
    """Computes the KV of a prompt by copying it, and keeps CPU seconds of that and of the store's calls."""

    source: np.ndarray
    kv: np.ndarray
    copy_seconds: list[float]
    store_seconds: list[float]
    next_token: int = 0

    def step(self, store: kvstore.KvStore) -> None:
        began = time.process_time()
        self.kv[...] = self.source
        copied = time.process_time()
        self._store(store)
        self.copy_seconds.append(copied - began)
        self.store_seconds.append(time.process_time() - copied)

    def _store(self, store: kvstore.KvStore) -> None:
        tokens = np.arange(self.next_token, self.next_token + PROMPT_TOKENS, dtype=np.uint32)
        self.next_token += PROMPT_TOKENS
        match = store.match(NAMESPACE, tokens)
        with store.stage(NAMESPACE, tokens, from_block=match.blocks) as stage:
            if stage.blocks:
                stage.write_from(self.kv[: stage.blocks])

    def reuse(self, store: kvstore.KvStore) -> None:
        """Load what the first step stored, which lets as much be stored again as host memory holds."""
        with store.lease(store.match(NAMESPACE, np.arange(PROMPT_TOKENS, dtype=np.uint32))) as lease:
            lease.load_into(self.kv[: lease.blocks])


def new_engine() -> Engine:
    source = np.ones((PROMPT_TOKENS // LAYOUT.block_tokens, LAYOUT.block_bytes), dtype=np.uint8)
    return Engine(source, np.ones_like(source), [], [])


def measure(store: kvstore.KvStore, steps: int) -> dict[str, object]:
    engine = new_engine()
    engine.step(store)
    engine.reuse(store)
    stored = -1
    while stored != store.stats().stored_blocks:
        stored = store.stats().stored_blocks
        engine.step(store)
    filling_steps = len(engine.copy_seconds)
    before = store.stats()
    for _ in range(steps):
        engine.step(store)
    stats = store.stats()
    copy_seconds, store_seconds = sum(engine.copy_seconds[filling_steps:]), sum(engine.store_seconds[filling_steps:])
    return {
        "steps": steps,
        "step_tokens": PROMPT_TOKENS,
        "step_bytes": engine.kv.nbytes,
        "engine_bytes_per_second": round(steps * engine.kv.nbytes / copy_seconds),
        "budget_bytes_per_second": BUDGET_BYTES_PER_SECOND,
        "filling_steps": filling_steps,
        "lost_ratio": round(store_seconds / (store_seconds + copy_seconds), 4),
        "refused_call_us": round(1e6 * statistics.median(engine.store_seconds[filling_steps:]), 1),
        "stored_bytes_ratio": round(
            (stats.stored_blocks - before.stored_blocks) * LAYOUT.block_bytes / (steps * engine.kv.nbytes), 4
        ),
        "written_bytes": stats.written_bytes - before.written_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--json", type=Path, help="file to write the rows to")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for disk_bytes in (0, 1 << 30):
            path = Path(folder) / str(disk_bytes) if disk_bytes else None
            with kvstore.open(
                path, host_bytes=HOST_BYTES, disk_bytes=disk_bytes, settings=SETTINGS, clock=CpuClock()
            ) as store:
                rows.append({"disk_bytes": disk_bytes, **measure(store, arguments.steps)})
            print("  ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    if arguments.json:
        command = f"python bench/bench_no_reuse.py --steps {arguments.steps}"
        arguments.json.write_text(
            json.dumps({"command": command, "machine": describe(), "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
