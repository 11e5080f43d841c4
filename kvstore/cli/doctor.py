"""`kvstore doctor`: why prompts were not found, told by a sidecar or by a log."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.cli.output import ExitCode, print_json, print_table, show
from kvstore.cli.progress import ProgressBar
from kvstore.cli.sidecar import connect_sidecar
from kvstore.doctor.offline import examine_log
from kvstore.doctor.request_log import RequestLog
from kvstore.doctor.tokenizer import LogTokenizer
from kvstore.errors import InvalidArgumentError
from kvstore.types import BLOCK_TOKENS_MAX

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from typing import BinaryIO

    from kvstore.doctor import Report


def doctor(arguments: argparse.Namespace) -> int:
    """Tell what a sidecar has seen, have it count anew, or look through a log."""
    if arguments.log is not None:
        return _of_log(arguments)
    with connect_sidecar(arguments) as client:
        if arguments.reset:
            client.reset_diagnosis()
            show(arguments, {"reset": True}, "the doctor counts anew")
            return ExitCode.DONE
        report = client.diagnosis()
    _show(arguments, report, {})
    return ExitCode.DONE


def as_json(report: Report) -> dict[str, object]:
    """A report as JSON has it."""
    row = asdict(report)
    row["causes"] = {cause.value: count for cause, count in report.causes.items()}
    row["findings"] = [{**asdict(one), "cause": one.cause.value} for one in report.findings]
    return row


def _of_log(arguments: argparse.Namespace) -> int:
    """Partly done where lines are no requests, failed where all are not."""
    if arguments.reset:
        raise InvalidArgumentError("--reset is about a sidecar; leave it out, or leave out the log")
    if arguments.block_tokens is not None and not 1 <= arguments.block_tokens <= BLOCK_TOKENS_MAX:
        raise InvalidArgumentError(f"--block-tokens is {arguments.block_tokens}, expected 1..{BLOCK_TOKENS_MAX}")
    tokenizer = None if arguments.tokens or arguments.tokenizer is None else LogTokenizer(arguments.tokenizer)
    path = Path(arguments.log)
    try:
        with path.open("rb") as file, ProgressBar(path.stat().st_size) as bar:
            found = examine_log(RequestLog(tokenizer, arguments.block_tokens).read(_lines(file, bar)))
    except OSError as err:
        raise InvalidArgumentError(f"{path} cannot be read: {err.strerror}") from err
    for line in found.bad_lines:
        print(f"{path}:{line.number}: {line.reason:.300}", file=sys.stderr)
    if found.bad_count > len(found.bad_lines):
        print(f"{path}: {found.bad_count - len(found.bad_lines)} lines more are no requests", file=sys.stderr)
    _show(arguments, found.report, {"bad_lines": found.bad_count})
    if not found.bad_count:
        return ExitCode.DONE
    return ExitCode.PARTLY_DONE if found.report.requests else ExitCode.FAILED


def _lines(file: BinaryIO, bar: ProgressBar) -> Iterator[str]:
    for line in file:
        bar.advance("requests", len(line))
        yield line.decode(errors="replace")


def _show(arguments: argparse.Namespace, report: Report, more: dict[str, object]) -> None:
    if arguments.json:
        print_json({**as_json(report), **more})
        return
    causes = ", ".join(f"{count} {cause.value}" for cause, count in sorted(report.causes.items()))
    print(
        f"{report.requests} lookups in {report.seconds:.0f} s, {report.skipped} not looked at"
        + (f": {causes}" if causes else "")
    )
    if report.findings:
        print()
    rows = [
        (
            one.cause.value,
            one.tenant or "-",
            one.model or "-",
            f"token {one.parted_at}, block {one.block}",
            f"{one.share:.1%}",
            one.tokens_per_day,
            one.advice,
        )
        for one in report.findings
    ]
    if rows:
        print_table(("cause", "tenant", "model", "where", "share", "tokens a day", "advice"), rows)
