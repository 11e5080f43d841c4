"""`kvstore demo`: what the command line calls. Imports neither torch nor transformers."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.demo.errors import DemoError
from kvstore.demo.flow import DemoPlan, run_flow
from kvstore.demo.report import as_json, as_table
from kvstore.demo.weights import prepare_weights

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_PACKAGES = ("accelerate", "gguf", "torch", "transformers")
_THREADS_MAX = 8
QUESTIONS = (
    ("When does the library close on Saturdays?", "How many books may my daughter borrow?"),
    ("I lost my card. What does a new one cost?", "How far ahead can I book the piano room?"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """`cache_dir` is where the converted model is kept for the next run; `json` prints one object for machines."""

    cache_dir: Path
    json: bool = False


def run(options: DemoOptions) -> int:
    """Run the demo: 0 if every promise held, 1 if not. Raises DemoError with one line if it cannot run.

    The first run downloads 93 MB and converts them (about a minute). Processes and files of a run are gone when it
    ends, however it ends.
    """
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise DemoError(f'{", ".join(missing)} not installed; run: pip install "prefix-kvstore[demo]"')
    with _terminated_as_interrupted():
        model_dir = prepare_weights(options.cache_dir / "demo", report_progress)
        plan = DemoPlan(
            model_dir=model_dir,
            system_prompt=files("kvstore.demo").joinpath("handbook.txt").read_text(encoding="utf-8"),
            questions=QUESTIONS,
            # An equal share each: threads that wait for a core that others use make torch many times slower.
            threads=max(1, min(_THREADS_MAX, len(os.sched_getaffinity(0)) // len(QUESTIONS))),
        )
        report = run_flow(plan, report_progress)
    if options.json:
        print(json.dumps(as_json(report), indent=2))
    else:
        print(as_table(report))
    return 0 if report.holds else 1


def report_progress(sentence: str) -> None:
    """One line on stderr, so that stdout holds the result alone."""
    print(f"kvstore demo: {sentence}", file=sys.stderr, flush=True)


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM unwind the stack as Ctrl-C does, so that no process stays behind."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
