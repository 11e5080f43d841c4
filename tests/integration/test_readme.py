"""What the README shows is what happens."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_python_example_runs_as_printed(tmp_path: Path) -> None:
    example = next(block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "kvstore.open" in block)
    code = example.replace("/tmp/kvstore-data", str(tmp_path))
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["match"].blocks == 4  # type: ignore[attr-defined]
    assert names["done"].blocks == 4  # type: ignore[attr-defined]


def test_the_tables_of_the_index_are_made_of_the_result_files() -> None:
    results = [ROOT / f"bench/results/radix-16-{size}.json" for size in ("100k", "1m")]
    made = subprocess.run(
        [sys.executable, ROOT / "bench/radix_report.py", *results], capture_output=True, text=True, check=True
    )
    assert made.stdout in (ROOT / "radix/README.md").read_text()


def test_the_tables_of_the_replay_are_made_of_the_result_files() -> None:
    results = [ROOT / f"bench/results/{name}.json" for name in ("replay", "replay-references", "what-if", "hints")]
    made = subprocess.run(
        [sys.executable, ROOT / "bench/replay_report.py", *results], capture_output=True, text=True, check=True
    )
    assert made.stdout in (ROOT / "kvstore/replay/README.md").read_text()


def test_the_tables_of_large_clusters_are_made_of_the_result_file() -> None:
    result = ROOT / "bench/results/cluster-scale.json"
    made = subprocess.run(
        [sys.executable, ROOT / "bench/scale_report.py", result], capture_output=True, text=True, check=True
    )
    told = (ROOT / "docs/scaling.md").read_text()
    assert [] == [table for table in made.stdout.strip().split("\n\n") if table not in told]


def test_the_benchmark_table_is_made_of_the_result_file() -> None:
    result = ROOT / "bench/results/store.json"
    made = subprocess.run(
        [sys.executable, str(ROOT / "bench/report.py"), str(result)], capture_output=True, text=True, check=True
    )
    assert made.stdout in README
    assert json.loads(result.read_text())["machine"]["commit"]
