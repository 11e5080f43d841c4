"""`kvstore replay`: what a trace of requests would have found in caches of several sizes."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.cli.output import ExitCode, print_json, print_table
from kvstore.cli.progress import ProgressBar
from kvstore.clock import SystemClock
from kvstore.errors import InvalidArgumentError
from kvstore.quantities import format_size, parse_size
from kvstore.replay import report as reports
from kvstore.replay.capacity import parse_capacity
from kvstore.replay.pace import Pacer
from kvstore.replay.policies import admission_named, check_policy
from kvstore.replay.run import Replay
from kvstore.replay.trace import Expansion, read_trace
from kvstore.types import BLOCK_TOKENS_MAX, KvLayout

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from kvstore.replay.capacity import Capacity
    from kvstore.replay.run import ReplayRow
    from kvstore.replay.trace import Trace

_EXPAND = re.compile(r"(\d+):(\d+)", re.ASCII)


def replay(arguments: argparse.Namespace) -> int:
    """Read the trace, run every policy at every capacity, and tell the outcomes."""
    parquet, plot = _path(arguments.parquet), _path(arguments.plot)
    reports.check_outputs(parquet=parquet, plot=plot)
    names = _listed("--policies", arguments.policies)
    for name in names:
        check_policy(name)
    for name in _listed("--admission", arguments.admission):
        admission_named(name)
    trace = read_trace(
        Path(arguments.trace),
        block_tokens=_block_tokens(arguments.block_tokens),
        expand=_expansion(arguments.expand),
        skip_bad_lines=arguments.skip_bad_lines,
    )
    block_bytes, source = _block_bytes(arguments.block_bytes, trace)
    report = reports.Report(
        trace=trace,
        block_bytes=block_bytes,
        block_bytes_source=source,
        warm_ratio=arguments.warm,
        rows=_run_all(arguments, trace, names, block_bytes),
    )
    if parquet is not None:
        reports.write_parquet(report, parquet)
    if plot is not None:
        reports.write_plot(report, plot)
    _show(report, arguments)
    return ExitCode.DONE


def _run_all(arguments: argparse.Namespace, trace: Trace, names: list[str], block_bytes: int) -> list[ReplayRow]:
    def capacity(text: str) -> Capacity:
        return parse_capacity(text, unique_blocks=trace.unique_blocks, block_bytes=block_bytes)

    sizes = [capacity(text) for text in _listed("--capacity", arguments.capacity)]
    disk = None if arguments.disk is None else capacity(arguments.disk)
    replayed = Replay(trace, block_bytes=block_bytes, warm_ratio=arguments.warm, clock=SystemClock())
    admissions = _listed("--admission", arguments.admission) if disk is not None else ["default"]
    runs = [(name, size, admission) for size in sizes for name in names for admission in admissions]
    with ProgressBar(len(runs) * trace.request_count) as bar:
        return [
            replayed.run(
                name,
                size,
                disk,
                admission=admission,
                before_request=_watcher(bar, f"{name} at {size.text}", _pacer(arguments.speed), trace),
            )
            for name, size, admission in runs
        ]


def _watcher(bar: ProgressBar, label: str, pacer: Pacer | None, trace: Trace) -> Callable[[int], None]:
    def before_request(request: int) -> None:
        bar.advance(label)
        if pacer is not None:
            pacer.wait_for(float(trace.seconds[request]))

    return before_request


def _show(report: reports.Report, arguments: argparse.Namespace) -> None:
    if arguments.json:
        print_json(reports.as_json(report))
        return
    print(reports.heading(report))
    print()
    print_table(*reports.table(report))
    print()
    for line in reports.footnotes(report):
        print(line)


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def _listed(flag: str, text: str) -> list[str]:
    """The values between commas, each once."""
    values = [value.strip() for value in text.split(",")]
    if not all(values):
        raise InvalidArgumentError(f"{flag} {text!r}: expected values parted by commas")
    return list(dict.fromkeys(values))


def _block_tokens(block_tokens: int | None) -> int | None:
    if block_tokens is not None and not 1 <= block_tokens <= BLOCK_TOKENS_MAX:
        raise InvalidArgumentError(f"--block-tokens is {block_tokens}, expected 1..{BLOCK_TOKENS_MAX}")
    return block_tokens


def _expansion(text: str | None) -> Expansion | None:
    if text is None:
        return None
    found = _EXPAND.fullmatch(text)
    if found is None or int(found[2]) < 1 or int(found[1]) < 1 or int(found[1]) % int(found[2]):
        raise InvalidArgumentError(f"--expand {text!r}: expected two sizes in tokens such as 512:16, one a multiple")
    return Expansion(int(found[1]), int(found[2]))


def _block_bytes(text: str | None, trace: Trace) -> tuple[int, str]:
    """Size of a replayed block, and where it comes from."""
    if text is None:
        layout = KvLayout(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16", block_tokens=trace.block_tokens)
        return layout.block_bytes, "as of an 8B model: 32 layers, 8 KV heads of 128, bfloat16"
    try:
        block_bytes = parse_size(text)
    except ValueError as err:
        raise InvalidArgumentError(f"--block-bytes {text!r}: {err}") from err
    if block_bytes < 1:
        raise InvalidArgumentError(f"--block-bytes is {format_size(block_bytes)}, expected at least 1")
    return block_bytes, "as given"


def _pacer(speed: float | None) -> Pacer | None:
    if speed is None:
        return None
    if not speed > 0:
        raise InvalidArgumentError(f"--speed is {speed}, expected more than 0")
    return Pacer(speed, clock=SystemClock(), sleep=time.sleep)
