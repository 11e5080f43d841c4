"""The tests that docs/failures.md names are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
TABLE = (ROOT / "docs/failures.md").read_text()
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TABLE)


def functions_of(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_test_that_the_failure_table_names_is_there():
    assert [] == [f"{path}::{name}" for path, name in NAMED if name not in functions_of(path)]


def test_every_row_of_the_failure_table_names_a_test():
    rows = [line for line in TABLE.splitlines() if line.startswith("| ")][1:]
    assert [] == [row for row in rows if not re.search(r"`tests/[\w/]+\.py::\w+` \|$", row)]
