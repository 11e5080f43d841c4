"""What all tests share."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from kvstore.transport import client
from kvstore.transport.link import Deadlines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

REPOSITORY = Path(__file__).resolve().parents[1]
SUPPORT = REPOSITORY / "docs" / "support.json"
SUPPORT_COLUMNS = {"layout", "feature", "model", "dtype"}
_recorded: set[str] = set()
PATIENT = Deadlines(lookup_seconds=60.0, control_seconds=60.0, bulk_seconds=60.0, long_seconds=120.0)

# How long an example takes, or to draw one, says how busy the machine is; a test as a whole has its timeout.
TIMED = [hypothesis.HealthCheck.too_slow]
hypothesis.settings.register_profile("kvstore", deadline=None, suppress_health_check=TIMED)
hypothesis.settings.load_profile("kvstore")


def pytest_configure() -> None:
    """Have SIGINT end what tests start, too, where a shell that runs them in the background has it ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real engines take minutes to start: what they show comes behind everything else."""
    items.sort(key=lambda item: item.get_closest_marker("engine") is not None)


@pytest.fixture(autouse=True)
def patient_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a store answers does not depend on how busy the machine is; tests of deadlines name their own."""
    monkeypatch.setattr(client, "DEFAULT_DEADLINES", PATIENT)


@pytest.fixture
def start_process() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Runs a program's text with an argument, to be talked to over pipes; what still runs at the end is killed."""
    with ExitStack() as stack:

        def start(program: str, argument: str) -> subprocess.Popen[str]:
            command = [sys.executable, "-P", "-c", program, argument]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.callback(process.communicate)
            stack.callback(process.kill)
            return process

        yield start


@pytest.fixture
def record_support() -> Callable[..., None]:
    """Says that an engine was shown to do something: one row of docs/support.json, which has to be there.

    With KVSTORE_RECORD_SUPPORT in the environment the row and the versions are written instead. The first row of an
    engine in a run takes the place of all that was recorded of it before, so what no test shows any more is gone.
    """

    def record(engine: str, versions: str, **row: str) -> None:
        assert set(row) == SUPPORT_COLUMNS, f"{sorted(row)} are not the columns {sorted(SUPPORT_COLUMNS)}"
        known: dict[str, Any] = json.loads(SUPPORT.read_text(encoding="utf-8")) if SUPPORT.exists() else {}
        rows = known.get(engine, {}).get("rows", [])
        if "KVSTORE_RECORD_SUPPORT" not in os.environ:
            assert row in rows, f"{row} is not in docs/support.json: see docs/README.md"
            return
        if engine not in _recorded:
            _recorded.add(engine)
            rows = []
        kept = [*rows, row] if row not in rows else rows
        known[engine] = {"versions": versions, "rows": sorted(kept, key=lambda item: sorted(item.items()))}
        SUPPORT.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")

    return record


@pytest.fixture(scope="session")
def keep_result() -> Callable[[str, list[dict[str, object]]], None]:
    """Writes rows as the benches write theirs, to the folder that KVSTORE_RESULTS names; without it, nothing."""
    folder = os.environ.get("KVSTORE_RESULTS")
    if not folder:
        return lambda _name, _rows: None
    machine = runpy.run_path(str(REPOSITORY / "bench" / "machine.py"))["describe"]()

    def keep(name: str, rows: list[dict[str, object]]) -> None:
        (Path(folder) / name).write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")

    return keep
