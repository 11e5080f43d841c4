"""What the examples tell a user to type exists, and each of them answers the same four questions."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest

from kvstore import metrics
from kvstore.cli.parser import build_parser
from kvstore.connectors.vllm.settings import VllmSettings

ROOT = Path(__file__).resolve().parents[1]
READMES = sorted(ROOT.glob("examples/*/README.md"))
pytestmark = pytest.mark.skipif(not READMES, reason="the examples are not part of an installation")
by_engine = pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)


def fenced(text, *languages):
    """The lines of code blocks, those that were broken put together again."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [block for language, block in blocks if language in languages]


def commands(text):
    """Each command of the shell blocks as its words."""
    found = []
    for block in fenced(text, "", "sh"):
        try:
            lines = shlex.split(block.replace("\\\n", " ").replace("\n", " ; ") if "'{" not in block else block)
        except ValueError:
            continue  # no shell: a log line, a table
        command: list[str] = []
        for word in [*lines, ";"]:
            if word != ";":
                command.append(word)
            elif command:
                found.append(command)
                command = []
    return found


def options_of(path):
    """The options that a program of ours takes, by its source."""
    return set(re.findall(r'add_argument\(\s*"(--[\w-]+)"', path.read_text(encoding="utf-8")))


@by_engine
def test_an_example_says_how_to_begin_what_to_set_what_happens_and_how_to_see_it(readme):
    text = readme.read_text(encoding="utf-8")
    started = [command for command in commands(text) if command[:2] == ["kvstore", "serve"]]
    assert 1 == len(started)
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert {"When kvstore is down", "How to see that it works"} <= set(headings)
    assert re.search(r"^## For production|^What a production user sets", text, re.MULTILINE)


@by_engine
def test_commands_of_kvstore_are_understood(readme):
    parser = build_parser()
    text = readme.read_text(encoding="utf-8")
    inline = [shlex.split(code) for code in re.findall(r"`(kvstore [a-z][^`]*)`", text)]
    typed = [command for command in commands(text) if command[0] == "kvstore"]
    typed += [command for command in inline if all(word not in ("serves", "connector:") for word in command[:2])]
    asked = [command for command in typed if command[1] in subcommands(parser)]
    assert asked
    for command in asked:
        parser.parse_args([word.replace("HOST:PORT", "127.0.0.1:9464") for word in command[1:]])


def subcommands(parser):
    return {name for action in parser._actions if action.choices for name in action.choices}


@by_engine
def test_programs_and_modules_of_ours_are_there_and_take_these_options(readme):
    for words in commands(readme.read_text(encoding="utf-8")):
        if words[0] != "python" or (words[1] == "-m" and not words[2].startswith("kvstore")):
            continue  # the engine's own
        if words[1] == "-m":
            spec = importlib.util.find_spec(words[2])
            assert spec is not None, words
            source, own = Path(spec.origin), "--kvstore"
        else:
            source, own = ROOT / words[1], "--"
        asked = {word for word in words if word.startswith(own)}
        assert asked <= options_of(source), words


@by_engine
def test_metrics_and_counts_that_are_named_exist(readme):
    text = readme.read_text(encoding="utf-8")
    declared = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "connectors").rglob("*.py"))
    known = Path(metrics.__file__).read_text(encoding="utf-8")
    for name in re.findall(r"\b(?<!prefix_)kvstore_[a-z_]+_total\b", text):
        assert name in known or name.removesuffix("_total") in known
    for name in re.findall(r"vllm:prefix_kvstore_([a-z_]+)_total", text):
        assert name in declared


@by_engine
def test_python_that_is_shown_names_what_exists(readme):
    for block in fenced(readme.read_text(encoding="utf-8"), "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("kvstore"):
                source = Path(importlib.util.find_spec(node.module).origin).read_text(encoding="utf-8")
                for alias in node.names:
                    assert re.search(rf"\b(def|class) {alias.name}\b|import .*\b{alias.name}\b", source), alias.name


def test_settings_that_the_vllm_example_passes_exist():
    text = (ROOT / "examples/vllm/README.md").read_text(encoding="utf-8")
    transfer = next(word for words in commands(text) for word in words if word.startswith("{"))
    known = {field.name for field in dataclasses.fields(VllmSettings)}
    assert set(json.loads(transfer)["kv_connector_extra_config"]) <= known
