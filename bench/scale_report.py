"""The tables of docs/scaling.md, made from the result file.

python bench/scale_report.py bench/results/cluster-scale.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

KINDS = {
    "announce": "a boundary that is new",
    "withdraw": "a boundary that is gone",
    "repeat": "a boundary told again",
    "marks": "the mark of a group",
    "renew": "the lease",
    "look": "which nodes live",
    "news": "who has joined",
    "deletions": "which namespaces were deleted",
    "holders": "who holds a boundary",
    "claim": "claim a boundary",
    "claimed": "what a claim has left, twice",
    "release": "end a claim",
}


def messages_table(result: dict[str, Any]) -> list[str]:
    """What one node sends and gets, by kind, and in all for each number of nodes."""
    counted = result["counted"]
    middle = next(run for run in counted if run["nodes"] == 100)["of_a_node"]
    lines = ["| what a node says or asks | a second | bytes to the directory, each | and back |", "|---|---|---|---|"]
    for kind, name in KINDS.items():
        if kind in middle:
            row = middle[kind]
            lines.append(
                f"| {name} | {row['keys_per_second']:.1f} | {row['sent_bytes_each']} | {row['got_bytes_each']} |"
            )
    return lines


def sizes_table(result: dict[str, Any]) -> list[str]:
    """The cluster at each size, as calculated from what was counted."""
    lines = [
        "| nodes | blocks | directory | of that leases, marks | a node | commands a second | to it | from it | cores |",
        "|---" * 9 + "|",
    ]
    for row in sorted(result["at_full_size"], key=lambda row: (row["nodes"], row["blocks"])):
        directory_bytes = row["entries_bytes"] + row["leases_and_marks_bytes"]
        cells = [
            f"{row['nodes']:,}",
            f"{row['blocks']:,}",
            _size(directory_bytes),
            _size(row["leases_and_marks_bytes"]),
            _size(row["node_bytes"]),
            f"{row['commands_per_second']:,}",
            f"{row['sent_bytes_per_second'] / 1e6:.2f} MB/s",
            f"{row['got_bytes_per_second'] / 1e6:.2f} MB/s",
            f"{row['server_cores_in_all']:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def cores_table(result: dict[str, Any]) -> list[str]:
    """What keeps the server's CPU busy, with a million blocks a node."""
    blocks = result["workload"]["blocks_of_a_node"]
    rows = [row for row in result["at_full_size"] if row["blocks"] == row["nodes"] * blocks]
    names = list(rows[0]["server_cores"])
    lines = [f"| nodes | {' | '.join(name.replace('_', ' ') for name in names)} | in all |"]
    lines.append("|---" * (len(names) + 2) + "|")
    for row in rows:
        cells = [f"{row['server_cores'][name]:.3f}" for name in names]
        lines.append(f"| {row['nodes']:,} | {' | '.join(cells)} | {row['server_cores_in_all']:.2f} |")
    return lines


def _size(size: float) -> str:
    return f"{size / (1 << 20):,.1f} MiB" if size < 100 << 20 else f"{size / (1 << 20):,.0f} MiB"


if __name__ == "__main__":
    shown = json.loads(Path(sys.argv[1]).read_text())
    print("\n\n".join("\n".join(make(shown)) for make in (sizes_table, messages_table, cores_table)))
