"""What hints about ended conversations are worth: hit rates of a replay in which some ends are told, sooner or later.

    python bench/bench_hints.py --traces DIR [--json FILE]

A conversation is over when no later request of the trace contains the last block of this one. For every other one of
these `end_session` is told so many seconds after its last request; what has left the index by then can be told nothing.
Small differences in what was learnt early move single figures by a point, so each is the median over seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import deque
from pathlib import Path

import numpy as np
from machine import describe

from kvstore.radix.tree import RadixTree
from kvstore.replay.node import Node
from kvstore.replay.trace import Trace, read_trace

TRACE = "mooncake_conversation"
PERCENTS = (1, 2, 5, 10)
TOLD_AFTER_SECONDS = (None, 600.0, 60.0, 0.0)  # None: nothing is told
SEEDS = 5
ROOT = bytes(16)


def told_ends(trace: Trace) -> list[int]:
    """Every other request that nobody extends."""
    last_use = np.zeros(trace.unique_blocks, dtype=np.int64)
    for request in range(trace.request_count):
        last_use[trace.path(request)] = request
    paths = (trace.path(request) for request in range(trace.request_count))
    ends = [request for request, path in enumerate(paths) if path.size and last_use[path[-1]] == request]
    return ends[::2]


def hit_rate(trace: Trace, capacity_blocks: int, ends: list[int], late_seconds: float, seed: int) -> float:
    """The share of blocks found on the second half of the requests."""
    tree = RadixTree(trace.block_tokens, ns_key=bytes(16), hash_seed=seed, policy="survival")
    node = Node(tree, host_blocks=capacity_blocks, disk_blocks=0)
    waiting = deque(ends)
    counts = trace.block_counts()
    first_counted = trace.request_count // 2
    found = 0
    for request in range(trace.request_count):
        now = float(trace.seconds[request])
        while waiting and waiting[0] < request and trace.seconds[waiting[0]] + late_seconds <= now:
            _tell_end(tree, trace, waiting.popleft(), now)
        hit = node.serve(trace.prompt(request), now).blocks
        found += hit if request >= first_counted else 0
    return found / int(counts[first_counted:].sum())


def _tell_end(tree: RadixTree, trace: Trace, request: int, now: float) -> None:
    ids = tree.match(ROOT, trace.prompt(request))
    if ids.size and ids.size == trace.path(request).size * trace.split:
        tree.hint_next_use(int(ids[-1]), int(now * 1_000_000), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help=f"folder with {TRACE}.jsonl.gz")
    parser.add_argument("--json", type=Path, help="file to write the rows to")
    arguments = parser.parse_args()
    trace = read_trace(arguments.traces / f"{TRACE}.jsonl.gz")
    ends = told_ends(trace)
    rows: list[dict[str, object]] = []
    for percent in PERCENTS:
        capacity = int(trace.unique_blocks * percent / 100)
        for late in TOLD_AFTER_SECONDS:
            told = [] if late is None else ends
            rates = [round(hit_rate(trace, capacity, told, late or 0.0, seed), 5) for seed in range(SEEDS)]
            row = {"trace": TRACE, "capacity_percent": percent, "told_after_seconds": late, "told": len(told)}
            rows.append({**row, "block_hit_rate": statistics.median(rates), "block_hit_rates": rates})
            print("  ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    if arguments.json:
        result = {"command": "python bench/bench_hints.py --traces DIR", "machine": describe(), "rows": rows}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
