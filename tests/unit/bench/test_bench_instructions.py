"""`make bench-check` tells growth by its row, and says what is missing."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[3] / "bench"
KEPT = json.loads((BENCH / "results" / "instructions.json").read_text())
BEFORE = {"match": 1000, "insert": 2000, "evict": 3000}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("bench_instructions")


@pytest.mark.parametrize("now", [1000, 1050, 10])
def test_five_per_cent_more_and_any_less_pass(bench: Any, now: int) -> None:
    assert [] == bench.grown(BEFORE, BEFORE | {"match": now})


def test_a_row_that_grew_is_named_with_both_counts(bench: Any) -> None:
    assert ["insert: 2,120 instructions, 6.0% more than 2,000"] == bench.grown(BEFORE, BEFORE | {"insert": 2120})


def test_a_row_that_is_no_longer_counted_fails(bench: Any) -> None:
    assert ["evict: was counted before, and is no more"] == bench.grown(BEFORE, {"match": 1, "insert": 1})


def test_the_last_few_commits_are_kept_and_each_one_once(bench: Any) -> None:
    tools = {"compiler": "g++ 0"}
    entries: list[dict[str, object]] = [
        {"commit": str(number), "toolchain": tools, "instructions": BEFORE} for number in range(9)
    ]
    kept = bench.recorded(entries, BEFORE, tools)
    again = bench.recorded(kept, {"match": 1}, tools)
    assert bench.KEPT_MAX == len(kept) == len(again)
    assert [entry["commit"] for entry in kept] == [entry["commit"] for entry in again]
    assert {"match": 1} == again[-1]["instructions"]


def test_without_valgrind_it_says_what_to_install(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "valgrind" else name)
    assert 0 == bench.main([])
    assert f"bench-check: skipped, valgrind not found: {bench.INSTALL}\n" == capsys.readouterr().out


def test_what_is_kept_has_each_row_that_is_counted(bench: Any) -> None:
    rows = [row for _, named in bench.PROGRAMS.values() for row in named]
    assert rows == list(KEPT["entries"][-1]["instructions"])
    assert len(KEPT["entries"]) <= bench.KEPT_MAX
