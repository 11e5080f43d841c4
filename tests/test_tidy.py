"""House rules that no linter knows. Each test lists what breaks the rule; an empty list passes."""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from kvstore import config, metrics
from kvstore.cli.parser import build_parser

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="asks git which files there are")
PRODUCT = ("kvstore/", "radix/", "tiers/", "transport/", "connectors/")
FUNCTION_LINES_MAX = 60
FILE_LINES_MAX = 600
PARAMETERS_MAX = 5
FILE_BYTES_MAX = 500_000
DRAWERS = {"utils", "util", "helpers", "helper", "misc", "manager", "managers"}
# Roots of threads, tasks and calls, where anything may arrive: caught, counted and logged. Number of places by file.
BROAD_EXCEPTS = {
    "connectors/common.py": 4,
    "connectors/huggingface.py": 1,
    "kvstore/cluster/announcer.py": 1,
    "kvstore/engine_events/subscriber.py": 1,
    "kvstore/store/movers.py": 1,
    "kvstore/thread_pool.py": 1,
    "tiers/device_copies.py": 2,
    "transport/arena_service.py": 1,
    "transport/server.py": 1,
    "transport/session.py": 1,
    "transport/wire_bulk.py": 1,
    "transport/wire_control.py": 1,
    "transport/wire_splice.py": 1,
}


@cache
def files() -> tuple[str, ...]:
    """What git tracks or would track, without links; generated code is left out."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    kept = (name for name in listed if (ROOT / name).is_file() and not (ROOT / name).is_symlink())
    return tuple(name for name in kept if not re.search(r"_pb2(_grpc)?\.pyi?$", name))


def python_files(*prefixes: str) -> list[str]:
    return [name for name in files() if name.endswith(".py") and name.startswith(prefixes or "")]


def text_files() -> list[str]:
    return [name for name in files() if b"\0" not in (ROOT / name).read_bytes()]


@cache
def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@cache
def nodes(name: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(read(name), name)))


def functions(name: str) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in nodes(name) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def test_functions_are_short():
    long = [
        f"{name}:{function.lineno} {function.name}"
        for name in python_files()
        for function in functions(name)
        if (function.end_lineno or 0) - function.lineno + 1 > FUNCTION_LINES_MAX
    ]
    assert [] == long


def test_files_are_short():
    assert [] == [name for name in python_files() if len(read(name).splitlines()) > FILE_LINES_MAX]


def test_functions_of_the_product_take_few_positional_parameters():
    many = [
        f"{name}:{function.lineno} {function.name}"
        for name in python_files(*PRODUCT)
        for function in functions(name)
        if len([arg for arg in function.args.args if arg.arg not in ("self", "cls")]) > PARAMETERS_MAX
    ]
    assert [] == many


def test_no_file_is_a_drawer():
    assert [] == [name for name in files() if Path(name).stem in DRAWERS]


def test_folders_are_imported_by_their_full_name():
    bare = {"radix", "tiers", "transport", "connectors", "protos"}
    imported = [(name, module) for name in python_files() for module in imported_modules(name)]
    assert [] == [(name, module) for name, module in imported if module.split(".")[0] in bare]


def imported_modules(name: str) -> list[str]:
    modules: list[str] = []
    for node in nodes(name):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.append(node.module)
    return modules


def test_only_the_command_line_and_the_demo_print():
    printing = [
        f"{name}:{node.lineno}"
        for name in python_files(*PRODUCT)
        if not name.startswith(("kvstore/cli/", "kvstore/demo/"))
        for node in nodes(name)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert [] == printing


def test_only_config_reads_the_environment():
    reading = [
        f"{name}:{node.lineno}"
        for name in python_files(*PRODUCT)
        if name != "kvstore/config.py"
        for node in nodes(name)
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv")
    ]
    assert [] == reading


def test_broad_excepts_are_at_listed_roots_only():
    product = [name for name in python_files(*PRODUCT) if not name.startswith("kvstore/testing/")]
    found = Counter(name for name in product for node in nodes(name) if is_swallowing(node))
    assert BROAD_EXCEPTS == dict(found)


def is_swallowing(node: ast.AST) -> bool:
    """An `except Exception` or wider that does not end by raising."""
    if not isinstance(node, ast.ExceptHandler) or isinstance(node.body[-1], ast.Raise):
        return False
    kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
    return any(kind is None or ast.unparse(kind) in ("Exception", "BaseException") for kind in kinds)


def test_work_left_to_do_has_an_issue_number():
    mark = re.compile(r"\b(TODO|FIXME|XXX)\b(?!.*#\d+)")
    assert [] == [
        f"{name}:{number}"
        for name in text_files()
        if name != "tests/test_tidy.py"
        for number, line in enumerate(read(name).splitlines(), 1)
        if mark.search(line)
    ]


def test_no_path_of_one_machine_is_left_in_the_text():
    path = re.compile(r"(?<![\w.])/(work|root)/")
    assert [] == [name for name in text_files() if name != "tests/test_tidy.py" and path.search(read(name))]


def test_no_tracked_file_is_large():
    assert [] == [name for name in files() if (ROOT / name).stat().st_size > FILE_BYTES_MAX]


def test_names_of_test_files_are_unique():
    counted = Counter(Path(name).name for name in python_files("tests/") if Path(name).name.startswith("test_"))
    assert [] == [name for name, count in counted.items() if count > 1]


def test_each_top_folder_has_a_readme():
    folders = {name.split("/")[0] for name in files() if "/" in name and not name.startswith(".")}
    assert [] == sorted(folder for folder in folders if not (ROOT / folder / "README.md").is_file())


def test_links_between_documents_resolve():
    link = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)")
    broken = [
        f"{name}: {target}"
        for name in files()
        if name.endswith(".md")
        for target in link.findall(read(name))
        if not (ROOT / name).parent.joinpath(target).exists()
    ]
    assert [] == broken


def test_every_setting_is_documented_as_it_is_declared():
    rows = [f"| `{item.key}` | {documented_default(item)} | {item.rule.sentence} |" for item in config.settings()]
    assert [] == [row for row in rows if row not in read("kvstore/README.md")]


def documented_default(item: config.Setting) -> str:
    if item.default is None:
        return item.rule.auto
    return f"`{item.default_text}`" if item.default_text else "empty"


def test_every_metric_is_documented_as_it_is_declared():
    declared = (
        *metrics.PROCESS_METRICS,
        *metrics.MEMORY_METRICS,
        *metrics.CLUSTER_METRICS,
        *metrics.PEER_METRICS,
        *metrics.ENGINE_METRICS,
        *metrics.TENANT_METRICS,
        *metrics.ROUTE_METRICS,
        *metrics.STORE_METRICS,
    )
    rows = [f"| `{metric.name}` | {', '.join(metric.labels)} | {metric.sentence} |" for metric in declared]
    rows.append(f"| `{metrics.CALL_SECONDS}` | method, status | {metrics.CALL_SECONDS_SENTENCE} |")
    rows.append(f"| `{metrics.BUILD_INFO}` | version | {metrics.BUILD_INFO_SENTENCE} |")
    assert [] == [row for row in rows if row not in read("kvstore/README.md")]


def test_no_metric_is_documented_that_is_not_declared():
    named = {
        re.sub(r"_(bucket|count|sum)$", "", name)
        for document in files()
        if document.endswith(".md")
        for name in re.findall(r"\bkvstore_[a-z_]+\b(?![/=])", read(document))
    }
    assert [] == sorted(named - set(metrics.metric_names()))


def test_every_command_and_flag_is_documented():
    text = read("kvstore/README.md")
    assert [] == [words for words in command_words(build_parser()) if f"`{words}" not in text]


def command_words(parser: argparse.ArgumentParser) -> list[str]:
    """Full names of all commands, such as `kvstore config show`, and all long flags."""
    words: list[str] = []
    for action in parser._actions:
        words += [flag for flag in action.option_strings if flag.startswith("--") and flag != "--help"]
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                words += command_words(command)
                if command.get_default("handler"):
                    words.append(command.prog)
    return words
