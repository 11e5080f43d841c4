"""How near the what-if curve of a running index comes to what other capacities really find.

    python bench/bench_what_if.py --traces DIR [--seeds 3] [--json FILE]

Each trace is replayed at a capacity by an index that estimates what a quarter, a half, two and four times of it would
find, and then at each of those capacities. What is estimated and found is counted on the second half of the requests.
The seed decides which prefixes are sampled; estimates of several seeds tell how far chance carries.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from functools import cache
from pathlib import Path

from machine import describe

from kvstore.radix.tree import RadixTree
from kvstore.replay.node import Node
from kvstore.replay.trace import Trace, read_trace
from kvstore.types import Tier

POLICY = "survival"
GRID = {
    "mooncake_conversation": (1, 2, 5, 10),
    "mooncake_synthetic": (5, 10),
    "lmcache_agents": (5, 10),
    "coding_agents_a": (0.5,),
}


class Run:
    """One pass over a trace: the hit rate on its second half, and the estimates for other capacities there."""

    def __init__(self, trace: Trace, capacity_blocks: int, seed: int) -> None:
        tree = RadixTree(trace.block_tokens, ns_key=bytes(16), hash_seed=seed, policy=POLICY)
        node = Node(tree, host_blocks=capacity_blocks, disk_blocks=0)
        counts = trace.block_counts()
        first_counted = trace.request_count // 2
        found = 0
        before: tuple[float, float, list[tuple[int, float]]] = (0.0, 0.0, [])
        start = time.perf_counter()
        for request in range(trace.request_count):
            if request == first_counted:
                before = tree.rehearsed(Tier.HOST)
            hit = node.serve(trace.prompt(request), float(trace.seconds[request])).blocks
            found += hit if request >= first_counted else 0
        self.seconds = time.perf_counter() - start
        self.hit_rate = found / int(counts[first_counted:].sum())
        self.policy_bytes = tree.policy_bytes
        after = tree.rehearsed(Tier.HOST)
        if before[0] > after[0] or not before[2]:  # the counts began anew, or the tier was not full by then
            before = (0.0, 0.0, [(blocks, 0.0) for blocks, _ in after[2]])
        looked_up = after[0] - before[0]
        self.estimates = {
            blocks: (hits - earlier) / looked_up
            for (blocks, hits), (_, earlier) in zip(after[2], before[2], strict=True)
        }


def measure(path: Path, percent: float, seeds: int) -> list[dict[str, object]]:
    trace = read_trace(path)
    capacity = int(trace.unique_blocks * percent / 100)

    @cache
    def really(blocks: int) -> float:
        return Run(trace, min(blocks, trace.unique_blocks), 0).hit_rate

    rows: list[dict[str, object]] = []
    runs = [Run(trace, capacity, seed) for seed in range(seeds)]
    for place in range(len(runs[0].estimates)):
        blocks = list(runs[0].estimates)[place]
        errors = [list(run.estimates.values())[place] - really(blocks) for run in runs]
        rows.append(
            {
                "trace": path.name,
                "capacity_percent": percent,
                "blocks": blocks,
                "scale": round(blocks / capacity, 2),
                "found": round(really(blocks), 4),
                "error_points": [round(100 * error, 2) for error in errors],
                "median_error_points": round(100 * statistics.median(errors), 2),
                "policy_bytes": runs[0].policy_bytes,
            }
        )
        print("  ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="folder with NAME.jsonl.gz")
    parser.add_argument("--seeds", type=int, default=3, help="how many samples (default 3)")
    parser.add_argument("--json", type=Path, help="file to write the rows to")
    arguments = parser.parse_args()
    rows: list[dict[str, object]] = []
    for name, percents in GRID.items():
        path = arguments.traces / f"{name}.jsonl.gz"
        for percent in percents if path.is_file() else ():
            rows += measure(path, percent, arguments.seeds)
    if arguments.json:
        command = f"python bench/bench_what_if.py --traces DIR --seeds {arguments.seeds}"
        arguments.json.write_text(
            json.dumps({"command": command, "machine": describe(), "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
