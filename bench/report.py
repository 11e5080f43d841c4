"""The benchmark table of the README, made from a result file: `python bench/report.py bench/results/store.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def table(result: dict[str, Any]) -> str:
    """Markdown: where and when it was measured, lookups by prompt length, and the rates of bytes."""
    machine = result["machine"]
    day = machine["time"][:10]
    lines = [
        f"Measured on {day} at commit {machine['commit']}: {machine['cpu']}, {machine['cores']} cores,",
        f"Python {machine['python']}, grpcio {machine['packages']['grpcio']}.",
        "",
        "| lookup of a stored prompt, p50 (p99) in us | 1k tokens | 8k | 32k | 128k |",
        "|---|---|---|---|---|",
    ]
    latencies = [row for row in result["rows"] if "p50_us" in row]
    for where in dict.fromkeys(row["where"] for row in latencies):
        cells = [f"{row['p50_us']:.0f} ({row['p99_us']:.0f})" for row in latencies if row["where"] == where]
        lines.append(f"| {where} | {' | '.join(cells)} |")
    lines += ["", "| 64 MiB in blocks of 256 KiB | GB/s | of numpy's copy |", "|---|---|---|"]
    rates = [row for row in result["rows"] if "gb_per_s" in row]
    copy = {row["where"]: row["gb_per_s"] for row in rates if row["op"] == "memcpy"}
    for row in rates:
        if row["op"] != "memcpy":
            floor = copy.get(row["where"])
            share = f"{row['gb_per_s'] / floor:.0%}" if floor else ""
            lines.append(f"| {row['op']}, {row['where']} | {row['gb_per_s']:.2f} | {share} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(table(json.loads(Path(sys.argv[1]).read_text())))
