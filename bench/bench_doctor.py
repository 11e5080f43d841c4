"""What the doctor costs each lookup: with it and without, in turns, in one process and over a Unix socket.

python bench/bench_doctor.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from machine import describe

import kvstore
from kvstore.clock import SystemClock
from kvstore.doctor import Doctor, LookupWatch
from kvstore.testing.serving import ServedStore

if TYPE_CHECKING:
    from collections.abc import Callable

LAYOUT = kvstore.KvLayout(layers=1, kv_heads=1, head_dim=8, dtype="float32", block_tokens=16)
NAMESPACE = kvstore.Namespace(model="m", revision="r", layout=LAYOUT)
PROMPT = np.arange(8192, dtype=np.uint32)
ROUNDS, LOOKUPS = 40, 200


def mean_seconds(lookup: Callable[[], object]) -> float:
    begun = time.perf_counter()
    for _ in range(LOOKUPS):
        lookup()
    return (time.perf_counter() - begun) / LOOKUPS


def compare(store: kvstore.Store, watch: LookupWatch, lookup: Callable[[], object]) -> dict[str, float]:
    """Medians over rounds of both, in microseconds, and of the ratio in each round."""
    without, with_it = [], []
    for _ in range(ROUNDS):
        store.observe_lookups()
        without.append(mean_seconds(lookup))
        store.observe_lookups(watch)
        with_it.append(mean_seconds(lookup))
    ratios = [b / a for a, b in zip(without, with_it, strict=True)]
    return {
        "without_us": round(statistics.median(without) * 1e6, 2),
        "with_us": round(statistics.median(with_it) * 1e6, 2),
        "ratio": round(statistics.median(ratios), 4),
    }


def measure() -> dict[str, object]:
    with (
        tempfile.TemporaryDirectory() as folder,
        kvstore.open(None, host_bytes=64 << 20) as store,
        closing(Doctor(SystemClock())) as doctor,
        ServedStore(store, [f"unix://{folder}/s"]) as served,
        kvstore.connect(served.addresses[0], lookup_seconds=5) as client,
    ):
        with store.stage(NAMESPACE, PROMPT) as stage:
            stage.write_from(np.zeros((PROMPT.size // 16, LAYOUT.block_bytes), np.uint8))
            stage.commit()
        watch = LookupWatch(doctor)
        match = store.match(NAMESPACE, PROMPT, touch=False)
        found = {
            "see_us": round(statistics.median(mean_seconds(lambda: watch.see(match)) for _ in range(ROUNDS)) * 1e6, 3),
            "embedded": compare(store, watch, lambda: store.match(NAMESPACE, PROMPT)),
            "served": compare(store, watch, lambda: client.match(NAMESPACE, PROMPT)),
        }
        report = doctor.report()
        return {**found, "looked_at": report.requests, "skipped": report.skipped}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the result there too")
    arguments = parser.parse_args()
    found = {"command": "python bench/bench_doctor.py", "machine": describe(), **measure()}
    print(json.dumps(found, indent=2))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
