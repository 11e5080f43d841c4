"""The tables of kvstore/replay/README.md, made from result files.

python bench/replay_report.py bench/results/{replay,replay-references,what-if,hints}.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

POLICIES = ("lru", "default", "fifo", "lfu", "sieve", "s3fifo")
# Below this distance between LRU and the optimum, in hit rate, the share of it that was closed says nothing.
GAP_MIN = 0.02


def hit_rates(result: dict[str, Any], references: dict[str, Any]) -> list[str]:
    """A line for each trace and capacity: percent of blocks found, and the share of the way from LRU to MIN."""
    by_point: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in (*result["rows"], *references["rows"]):
        by_point.setdefault((row["trace"].split(".")[0], row["capacity"]), {})[row["policy"]] = row
    machine = result["machine"]
    lines = [
        f"Measured on {machine['time'][:10]} at commit {machine['commit']} (the last four policies at",
        f"{references['machine']['commit']}); percent of blocks found:",
        "",
        f"| trace | capacity | {' | '.join(POLICIES)} | MIN | infinite | closed |",
        "|---" * (len(POLICIES) + 5) + "|",
    ]
    for (trace, capacity), rows in by_point.items():
        rates = [f"{100 * rows[name]['block_hit_rate']:.1f}" if name in rows else "" for name in POLICIES]
        lru, optimal = rows["lru"]["block_hit_rate"], rows["lru"]["optimal"]
        gap = optimal - lru
        closed = f"{100 * (rows['default']['block_hit_rate'] - lru) / gap:.0f} %" if gap >= GAP_MIN else ""
        limits = f"{100 * optimal:.1f} | {100 * rows['lru']['infinite']:.1f}"
        lines.append(f"| {trace} | {capacity} | {' | '.join(rates)} | {limits} | {closed} |")
    return lines


def what_if(result: dict[str, Any]) -> list[str]:
    """A line for each trace and capacity: how far the estimates for other capacities are off, in points."""
    by_point: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for row in result["rows"]:
        by_point.setdefault((row["trace"].split(".")[0], row["capacity_percent"]), []).append(row)
    scales = ("0.25", "0.5", "1", "2", "4")
    lines = [
        f"Measured on {result['machine']['time'][:10]} at commit {result['machine']['commit']}; points by which the",
        "estimate for that many times the capacity is off, lowest to highest of the samples:",
        "",
        f"| trace | capacity | {' | '.join(f'{scale} x' for scale in scales)} |",
        "|---" * (len(scales) + 2) + "|",
    ]
    for (trace, percent), rows in by_point.items():
        cells = [f"{min(row['error_points']):+.1f} .. {max(row['error_points']):+.1f}" for row in rows]
        lines.append(f"| {trace} | {percent:g}% | {' | '.join(cells)} |")
    return lines


def hints(result: dict[str, Any], replayed: dict[str, Any]) -> list[str]:
    """A line for each capacity: what is found where ends of conversations are told, sooner or later."""
    limits = {
        (row["trace"].split(".")[0], row["capacity"]): (row["block_hit_rate"], row["optimal"])
        for row in replayed["rows"]
        if row["policy"] == "lru"
    }
    by_capacity: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for row in result["rows"]:
        by_capacity.setdefault((row["trace"], row["capacity_percent"]), []).append(row)
    delays = [row["told_after_seconds"] for row in next(iter(by_capacity.values()))]
    heads = ["nothing told" if delay is None else f"told after {delay:g} s" for delay in delays]
    lines = [
        f"Measured on {result['machine']['time'][:10]} at commit {result['machine']['commit']}; percent of blocks",
        "found where `end_session` tells every other end of a conversation, and the share of the way from LRU to MIN:",
        "",
        f"| trace | capacity | {' | '.join(heads)} |",
        "|---" * (len(heads) + 2) + "|",
    ]
    for (trace, percent), rows in by_capacity.items():
        lru, optimal = limits[trace, f"{percent:g}%"]
        cells = [
            f"{100 * row['block_hit_rate']:.1f} ({100 * (row['block_hit_rate'] - lru) / (optimal - lru):.0f} %)"
            for row in rows
        ]
        lines.append(f"| {trace} | {percent:g}% | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    replayed, referred, rehearsed, hinted = (json.loads(Path(name).read_text()) for name in sys.argv[1:5])
    parts = [hit_rates(replayed, referred), what_if(rehearsed), hints(hinted, replayed)]
    sys.stdout.write("\n\n".join("\n".join(lines) for lines in parts) + "\n")
