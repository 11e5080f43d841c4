"""The table of disk admission in kvstore/replay/README.md, made from the result file.

python bench/admission_report.py bench/results/disk-admission.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

RULES = ("demotion", "worth", "reuse", "write_through")


def table(result: dict[str, Any]) -> list[str]:
    """A line for each trace and pair of capacities: what each rule finds, and writes for each token found."""
    by_point: dict[tuple[str, str, str], dict[str, dict[str, Any]]] = {}
    for row in result["rows"]:
        by_point.setdefault((row["trace"].split(".")[0], row["host"], row["disk"]), {})[row["admission"]] = row
    machine = result["machine"]
    lines = [
        f"Measured on {machine['time'][:10]} at commit {machine['commit']}; percent of blocks found / KiB written to",
        f"disk for each token found. {result.get('note', '')}".rstrip(),
        "",
        f"| trace | host | disk | {' | '.join(RULES)} |",
        "|---" * (len(RULES) + 3) + "|",
    ]
    for point, rows in by_point.items():
        cells = [
            f"{100 * rows[rule]['block_hit_rate']:.1f} / {rows[rule]['written_bytes_per_hit_token'] / 1024:.0f}"
            for rule in RULES
        ]
        lines.append(f"| {' | '.join(point)} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    print("\n".join(table(json.loads(Path(sys.argv[1]).read_text()))))
