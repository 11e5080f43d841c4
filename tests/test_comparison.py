"""What docs/comparison.md says of kvstore names tests and files that are there, and what it says of others a source."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/comparison.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE)))
PEERS = {"LMCache", "Mooncake", "Dynamo", "SGLang", "vLLM", "llm-d"}
SECTIONS = {
    section.splitlines()[0]: [line for line in section.splitlines() if line.startswith("| ")]
    for section in PAGE.split("\n## ")[1:]
    if "\n| kvstore |" in section
}


def functions_of(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_test_that_it_names_is_there():
    assert [] == [f"{path}::{name}" for path, name in NAMED if not (ROOT / path).is_file()]
    assert [] == [f"{path}::{name}" for path, name in NAMED if name and name not in functions_of(path)]


def test_every_source_that_it_names_has_an_address_and_is_used():
    addresses = dict(re.findall(r"^\[([^\]]+)\]: (https://\S+)$", PAGE, re.MULTILINE))
    used = set(re.findall(r"\[([^\]]+)\](?![(:])", PAGE))
    assert set(addresses) == used
    assert len(addresses) == len(set(addresses.values()))


@pytest.mark.parametrize("title", SECTIONS)
def test_every_comparison_has_a_row_for_each_system_with_its_source(title: str) -> None:
    rows = {row.split(" | ")[0].strip("| "): row.split(" | ")[-1] for row in SECTIONS[title][1:]}
    assert {"kvstore"} | PEERS == set(rows)
    assert [] == [name for name, source in rows.items() if not re.search(r"`tests/|\]\(|\[[^\]]+\]", source)]
    assert re.search(r"`tests/[\w/]+\.py", rows["kvstore"])
