"""What the store costs an engine whose prompts never come again.

    python bench/bench_no_reuse.py [--rounds N] [--json FILE]

The engine does nothing but copy, so whatever the store copies is taken from it: the worst case. Each step copies the
KV of one prompt of its own; in every other round it also looks the prompt up and stores it, in the same thread, as far
as the store takes it. Throughput is by the CPU time of the process, threads for the disk included, which other
processes of the machine disturb least. The store's clock stands still in rounds without it, so that its budget is that
of an engine that always uses it. The first rounds spend what fits into host memory; they are shown apart and not
counted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from machine import describe

import kvstore
from kvstore.store.budget import default_bytes_per_second
from kvstore.types import KvLayout, Namespace

MIB = 1 << 20
LAYOUT = KvLayout(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16", block_tokens=16)  # 2 MiB a block
NAMESPACE = Namespace(model="bench", revision="1", layout=LAYOUT)
PROMPT_BLOCKS = 64  # 1,024 tokens, 128 MiB
STEPS = 4
HOST_BYTES = 512 * MIB


class RoundsClock:
    """Time of the rounds with the store alone."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._began: float | None = None

    def start(self) -> None:
        self._began = time.monotonic()

    def stop(self) -> None:
        self._seconds = self.monotonic()
        self._began = None

    def monotonic(self) -> float:
        return self._seconds + (0.0 if self._began is None else time.monotonic() - self._began)

    def unix(self) -> float:
        return time.time()


class Engine:
    """Computes the KV of a prompt by copying it."""

    def __init__(self, clock: RoundsClock) -> None:
        self._clock = clock
        self._source = np.ones((PROMPT_BLOCKS, LAYOUT.block_bytes), dtype=np.uint8)
        self._kv = np.ones_like(self._source)
        self._starts = itertools.count(0, PROMPT_BLOCKS * LAYOUT.block_tokens)

    def round(self, store: kvstore.KvStore | None) -> float:
        """CPU seconds of some steps."""
        began = time.process_time()
        if store is not None:
            self._clock.start()
        for _ in range(STEPS):
            self._kv[...] = self._source
            if store is not None:
                self._store(store)
        if store is not None:
            self._clock.stop()
        return time.process_time() - began

    def _store(self, store: kvstore.KvStore) -> None:
        first = next(self._starts)
        tokens = np.arange(first, first + PROMPT_BLOCKS * LAYOUT.block_tokens, dtype=np.uint32)
        match = store.match(NAMESPACE, tokens)
        with store.stage(NAMESPACE, tokens, from_block=match.blocks) as stage:
            if stage.blocks:
                stage.write_from(self._kv[: stage.blocks])


def measure(store: kvstore.KvStore, engine: Engine, rounds: int) -> dict[str, object]:
    engine.round(None)
    filling = []
    while "budget" not in store.stats().rejected_blocks:
        filling.append(engine.round(store))
    stored = store.stats().stored_blocks
    without, with_store = [], []
    for _ in range(rounds):
        without.append(engine.round(None))
        with_store.append(engine.round(store))
    stats = store.stats()
    # Means, since most rounds store nothing.
    plain, cached = statistics.mean(without), statistics.mean(with_store)
    return {
        "rounds": rounds,
        "steps_per_round": STEPS,
        "step_bytes": PROMPT_BLOCKS * LAYOUT.block_bytes,
        "plain_bytes_per_second": round(STEPS * PROMPT_BLOCKS * LAYOUT.block_bytes / plain),
        "budget_bytes_per_second": default_bytes_per_second(),
        "filling_seconds": round(sum(filling), 3),
        "throughput_ratio": round(plain / cached, 4),
        "stored_bytes_ratio": round((stats.stored_blocks - stored) / (rounds * STEPS * PROMPT_BLOCKS), 4),
        "rejected_blocks": stats.rejected_blocks,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path, help="file to write the rows to")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for disk_bytes in (0, 1 << 30):
            path = Path(folder) / str(disk_bytes) if disk_bytes else None
            clock = RoundsClock()
            with kvstore.open(path, host_bytes=HOST_BYTES, disk_bytes=disk_bytes, clock=clock) as store:
                rows.append({"disk_bytes": disk_bytes, **measure(store, Engine(clock), arguments.rounds)})
            print("  ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    if arguments.json:
        command = f"python bench/bench_no_reuse.py --rounds {arguments.rounds}"
        arguments.json.write_text(
            json.dumps({"command": command, "machine": describe(), "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
