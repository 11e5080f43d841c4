"""docs/support.md is what docs/make_support.py makes of what the tests recorded."""

from __future__ import annotations

import importlib.util
import json
import tomllib
from pathlib import Path

import pytest

from kvstore.connectors.check import CHECKERS

DOCS = Path(__file__).resolve().parents[3] / "docs"
pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="the docs are not part of an installation")


def recorded():
    return json.loads((DOCS / "support.json").read_text(encoding="utf-8"))


def described():
    return tomllib.loads((DOCS / "support.toml").read_text(encoding="utf-8"))


def test_the_table_is_that_of_the_recorded_rows():
    spec = importlib.util.spec_from_file_location("make_support", DOCS / "make_support.py")
    make_support = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_support)
    assert (DOCS / "support.md").read_text(encoding="utf-8") == make_support.render(recorded(), described())


def test_every_engine_of_the_table_can_be_checked_and_has_an_example():
    assert set(described()) == set(recorded())
    assert set(described()) <= set(CHECKERS)
    for known in described().values():
        assert (DOCS.parent / "examples" / known["folder"] / "README.md").is_file()
