"""What each rule of disk admission writes and finds on public traces.

    python bench/bench_admission.py --traces DIR [--json FILE]

Each trace is replayed as `kvstore replay --disk --admission` does, with the default policy. What is not in the folder
is left out.
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

TOKEN_BYTES = 128 << 10  # of an 8B model: 32 layers, 8 KV heads of 128, bfloat16
RULES = ("demotion", "worth", "reuse", "write_through")
PAIRS = (("1%", "10%"), ("2%", "10%"), ("2%", "30%"), ("5%", "30%"), ("5%", "50%"))
# Of agents a hundredth of the blocks finds nearly everything, so less of them is asked for.
GRID = {
    "mooncake_conversation": PAIRS,
    "mooncake_synthetic": PAIRS,
    "lmcache_agents": PAIRS,
    "coding_agents_a": (("0.25%", "1%"), ("0.5%", "5%")),
}
SHOWN = ("block_hit_rate", "token_hit_rate", "host_block_hit_rate", "disk_block_hit_rate")
COUNTED = (
    "host_hit_blocks",
    "disk_hit_blocks",
    "host_hit_tokens",
    "disk_hit_tokens",
    "demoted_bytes",
    "promoted_bytes",
)


def measure(path: Path, pairs: tuple[tuple[str, str], ...], rules: list[str]) -> list[dict[str, object]]:
    trace = read_trace(path)
    block_bytes = trace.block_tokens * TOKEN_BYTES
    replay = Replay(trace, block_bytes=block_bytes, warm_ratio=0.5, clock=SystemClock())
    rows: list[dict[str, object]] = []
    for texts in pairs:
        host, disk = (
            parse_capacity(text, unique_blocks=trace.unique_blocks, block_bytes=block_bytes) for text in texts
        )
        for rule in rules:
            row = asdict(replay.run("default", host, disk, admission=rule))
            rows.append({"trace": path.name, "host": host.text, "disk": disk.text, "admission": rule})
            rows[-1] |= {key: round(row[key], 5) for key in SHOWN} | {key: row[key] for key in COUNTED}
            per_token = row["demoted_bytes_per_hit_token"]
            rows[-1]["written_bytes_per_hit_token"] = None if per_token is None else round(per_token, 1)
            rows[-1]["run_seconds"] = round(row["run_seconds"], 1)
            print("  ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="folder with NAME.jsonl.gz")
    parser.add_argument("--only", default=",".join(GRID), help="names of traces parted by commas")
    parser.add_argument("--rules", default=",".join(RULES), help="names of rules parted by commas")
    parser.add_argument("--json", type=Path, help="file to write the rows to")
    arguments = parser.parse_args()
    rows: list[dict[str, object]] = []
    for name in arguments.only.split(","):
        path = arguments.traces / f"{name}.jsonl.gz"
        if path.is_file():
            rows += measure(path, GRID[name], arguments.rules.split(","))
    if arguments.json:
        command = "python bench/bench_admission.py --traces DIR"
        result = {"command": command, "machine": describe(), "rows": rows}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
