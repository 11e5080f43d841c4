"""The tables of radix/README.md, made from result files: `python bench/radix_report.py bench/results/radix-*.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

COLUMNS = (("match", 1024), ("match", 8192), ("match", 32768), ("match", 131072), ("miss", 8192))
LABELS = {"kvstore_lru": "kvstore, recency alone"}
HEADER = "| p50 (p99) in us | 1k | 8k | 32k | 128k | 8k, a miss | new blocks/s | bytes a block |"


def table(result: dict[str, Any]) -> str:
    """Markdown: where and when it was measured, a line for each peer, and how lookups run side by side."""
    machine, workload, rows = result["machine"], result["workload"], result["rows"]
    lines = [
        f"{workload['blocks']:,} blocks of {workload['block_tokens']}, measured on {machine['time'][:10]} at commit",
        f"{machine['commit']} on {machine['cpu']}, {machine['cores']} cores, Python {machine['python']}:",
        "",
        HEADER,
        "|---" * 8 + "|",
    ]
    for peer in dict.fromkeys(row["peer"] for row in rows):
        mine = [row for row in rows if row["peer"] == peer]
        timed = {(row["op"], row["tokens"]): row for row in mine if "p50_us" in row}
        cells = [f"{_short(timed[key]['p50_us'])} ({_short(timed[key]['p99_us'])})" for key in COLUMNS]
        rate = next(row["blocks_per_s"] for row in mine if row["op"] == "insert")
        size = next(row["bytes_per_block"] for row in mine if row["op"] == "memory")
        lines.append(f"| {LABELS.get(peer, peer)} | {' | '.join(cells)} | {rate / 1e6:.1f} M | {size:.0f} |")
    scaling = {row["op"]: row["scaling"] for row in rows if "scaling" in row}
    check = next(row["seconds"] for row in rows if row["op"] == "check_integrity")
    lines += [
        "",
        f"Two threads of 128k lookups do {scaling['match_threads']:.2f} times the work of one (two processes that",
        f"share nothing: {scaling['match_processes']:.2f}). `check_integrity` takes {check * 1000:.0f} ms.",
    ]
    return "\n".join(lines) + "\n"


def _short(microseconds: float) -> str:
    return f"{microseconds:.1f}" if microseconds < 100 else f"{microseconds:,.0f}"


if __name__ == "__main__":
    sys.stdout.write("\n".join(table(json.loads(Path(name).read_text())) for name in sys.argv[1:]))
