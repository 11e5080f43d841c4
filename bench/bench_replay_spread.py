"""How far the hit rates of the store's eviction are chance: the same traces, begun a little later.

    python bench/bench_replay_spread.py --traces DIR [--json FILE]

An index that learns goes another way after each small change, so a single replay tells its hit rate only to a point or
so. Here each replay leaves out so many requests more at the beginning; counted are always the same: the second half.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from machine import describe

from kvstore.replay.node import Node
from kvstore.replay.optimal import FutureUses, optimal_hits
from kvstore.replay.policies import make_tree
from kvstore.replay.trace import Trace, read_trace

POLICIES = ("lru", "default")
GRID = {
    "mooncake_conversation": (1, 2, 5, 10),
    "mooncake_synthetic": (1, 5, 10, 25),
    "lmcache_agents": (1,),
}
STARTS = range(0, 500, 100)


def hit_rate(trace: Trace, capacity_blocks: int, policy: str, start: int) -> float:
    """Of the second half of the requests, where those before `start` were never served."""
    node = Node(make_tree(policy, trace.block_tokens), host_blocks=capacity_blocks, disk_blocks=0)
    first_counted = trace.request_count // 2
    found = 0
    for request in range(start, trace.request_count):
        hit = node.serve(trace.prompt(request), float(trace.seconds[request])).blocks
        found += hit if request >= first_counted else 0
    return found / int(trace.block_counts()[first_counted:].sum())


def measure(path: Path, percents: tuple[int, ...]) -> list[dict[str, object]]:
    trace = read_trace(path)
    uses = FutureUses(trace)
    first_counted = trace.request_count // 2
    blocks = int(trace.block_counts()[first_counted:].sum())
    rows: list[dict[str, object]] = []
    for percent in percents:
        capacity = int(trace.unique_blocks * percent / 100)
        optimal = int(optimal_hits(uses, capacity)[first_counted:].sum()) / blocks
        rates = {name: [hit_rate(trace, capacity, name, start) for start in STARTS] for name in POLICIES}
        closed = [(ours - lru) / (optimal - lru) for lru, ours in zip(*rates.values(), strict=True)]
        rows.append(
            {
                "trace": path.name,
                "capacity_percent": percent,
                **{name: [round(rate, 4) for rate in values] for name, values in rates.items()},
                "optimal": round(optimal, 4),
                "closed": [round(share, 3) for share in closed],
                "mean_closed": round(statistics.mean(closed), 3),
            }
        )
        print("  ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="folder with NAME.jsonl.gz")
    parser.add_argument("--json", type=Path, help="file to write the rows to")
    arguments = parser.parse_args()
    rows: list[dict[str, object]] = []
    for name, percents in GRID.items():
        path = arguments.traces / f"{name}.jsonl.gz"
        if path.is_file():
            rows += measure(path, percents)
    if arguments.json:
        result = {"command": "python bench/bench_replay_spread.py --traces DIR", "machine": describe(), "rows": rows}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
