"""The benchmark of the index runs, checks its answers, and leaves out what is not installed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.testing.patience import ANSWER_SECONDS

BENCH = Path(__file__).parents[2] / "bench"
WITHOUT_DYNAMO = "import runpy, sys; sys.modules['dynamo'] = None; runpy.run_path(sys.argv.pop(1), run_name='__main__')"

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the floor needs g++")


def test_the_bench_writes_a_row_for_each_lookup_and_names_the_peers_it_left_out(tmp_path: Path) -> None:
    file = tmp_path / "radix.json"
    sizes = ["--blocks", "1000", "--block-tokens", "256", "--rounds", "1"]
    command = [sys.executable, "-c", WITHOUT_DYNAMO, str(BENCH / "bench_radix.py"), *sizes]
    peers = ["kvstore", "floor", "dict_xxh3"]
    done = subprocess.run(
        [*command, "--peers", ",".join([*peers, "dynamo"]), "--json", str(file)],
        check=True,
        capture_output=True,
        text=True,
        timeout=ANSWER_SECONDS,
        env={**os.environ, "PYTHONPATH": str(BENCH)},
    )
    assert "dynamo: left out" in done.stderr
    assert "pip install ai-dynamo-runtime" in done.stderr
    rows = json.loads(file.read_text())["rows"]
    expected = {("match", peer, tokens) for peer in peers for tokens in (1024, 8192, 32768, 131072)}
    expected |= {("miss", peer, 8192) for peer in peers}
    assert expected == {(row["op"], row["peer"], row["tokens"]) for row in rows if "p50_us" in row}
    assert {"insert", "memory", "match_threads", "check_integrity"} <= {row["op"] for row in rows}


def test_the_bench_of_eviction_writes_what_each_policy_costs(tmp_path: Path) -> None:
    file = tmp_path / "eviction.json"
    sizes = ["--blocks", "1000", "--block-tokens", "256", "--rounds", "3", "--policies", "survival,lru"]
    subprocess.run(
        [sys.executable, str(BENCH / "bench_eviction.py"), *sizes, "--json", str(file)],
        check=True,
        capture_output=True,
        timeout=ANSWER_SECONDS,
    )
    rows = json.loads(file.read_text())["rows"]
    timed = {"touch", "stage", "take_victims", "evict"}
    expected = {(op, policy) for op in timed for policy in ("survival", "lru")}
    assert expected == {(row["op"], row["policy"]) for row in rows if "us_per_block" in row}
