"""Hit rates of the store's eviction on public traces, beside the offline optimum.

    python bench/bench_replay.py --traces DIR [--policies lru] [--json FILE]

Each trace is replayed as `kvstore replay` does. What is not in the folder is left out.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from machine import describe

from kvstore.clock import SystemClock
from kvstore.replay.capacity import parse_capacity
from kvstore.replay.run import Replay
from kvstore.replay.trace import read_trace

BLOCK_BYTES = 64 << 20
# LMCache agents: 1, 2 and 4 times the largest request, too.
GRID = {
    "mooncake_conversation": "1%,2%,5%,10%,25%",
    "mooncake_synthetic": "1%,5%,10%,25%",
    "lmcache_agents": "1%,10%,25%,2267,4534,9068",
    "coding_agents_a": "0.25%,0.5%,1%,2%,5%",
}
SHOWN = ("block_hit_rate", "token_hit_rate", "optimal", "infinite")


def measure(path: Path, capacities: str, policies: list[str]) -> list[dict[str, object]]:
    trace = read_trace(path)
    replay = Replay(trace, block_bytes=BLOCK_BYTES, warm_ratio=0.5, clock=SystemClock())
    rows: list[dict[str, object]] = []
    for text in capacities.split(","):
        capacity = parse_capacity(text, unique_blocks=trace.unique_blocks, block_bytes=BLOCK_BYTES)
        for name in policies:
            row = asdict(replay.run(name, capacity))
            kept = {key: round(row[key], 5) for key in SHOWN}
            rows.append({"trace": path.name, "policy": name, "capacity": text, "blocks": capacity.blocks, **kept})
            rows[-1]["run_seconds"] = round(row["run_seconds"], 1)
            print("  ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="folder with NAME.jsonl.gz")
    parser.add_argument("--policies", default="lru", help="names parted by commas")
    parser.add_argument("--json", type=Path, help="file to write the rows to")
    arguments = parser.parse_args()
    rows: list[dict[str, object]] = []
    for name, capacities in GRID.items():
        path = arguments.traces / f"{name}.jsonl.gz"
        if path.is_file():
            rows += measure(path, capacities, arguments.policies.split(","))
    if arguments.json:
        command = f"python bench/bench_replay.py --traces DIR --policies {arguments.policies}"
        result = {"command": command, "machine": describe(), "rows": rows}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
