"""`kvstore bench load`: what a running sidecar does under load."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvstore.cli.output import ExitCode, print_json, print_table
from kvstore.cli.progress import ProgressBar
from kvstore.cli.sidecar import client_files, sidecar_address
from kvstore.errors import InvalidArgumentError
from kvstore.load.plan import LoadPlan, parse_mix
from kvstore.load.run import PERCENTS, run_load, sample_page, sample_process
from kvstore.quantities import parse_duration, parse_size

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from kvstore.load.run import LoadReport, ServerSample

_PROGRESS_STEPS = 100


def load(arguments: argparse.Namespace) -> int:
    """Put a load on the sidecar and tell how it went; partly done if calls failed, failed if bytes were wrong."""
    plan = _plan(arguments)
    with ProgressBar(_PROGRESS_STEPS) as bar:
        report = run_load(plan, _sampler(arguments), _Steps(bar))
    if arguments.json:
        print_json(report.as_json())
    else:
        _print(report)
    if report.tally.errors["WrongBytesError"] or not report.tally.latencies:
        return ExitCode.FAILED
    return ExitCode.PARTLY_DONE if report.tally.errors or report.lost_processes else ExitCode.DONE


class _Steps:
    """Turns a share of the time into steps of a bar."""

    def __init__(self, bar: ProgressBar) -> None:
        self._bar = bar
        self._shown = 0

    def __call__(self, share: float) -> None:
        while self._shown < share * _PROGRESS_STEPS:
            self._bar.advance("load")
            self._shown += 1


def _plan(arguments: argparse.Namespace) -> LoadPlan:
    return LoadPlan(
        address=sidecar_address(arguments),
        files=client_files(arguments),
        clients=arguments.clients,
        processes=arguments.processes,
        seconds=_quantity("--seconds", arguments.seconds, parse_duration),
        seed=arguments.seed,
        mix=parse_mix(arguments.mix),
        prompts=arguments.prompts,
        prompt_tokens=arguments.prompt_tokens,
        block_tokens=arguments.block_tokens,
        block_bytes=int(_quantity("--block-bytes", arguments.block_bytes, parse_size)),
    )


def _sampler(arguments: argparse.Namespace) -> Callable[[], ServerSample] | None:
    if arguments.pid is not None:
        return partial(sample_process, arguments.pid)
    return None if arguments.metrics is None else partial(sample_page, arguments.metrics)


def _quantity(flag: str, text: str, parse: Callable[[str], float]) -> float:
    try:
        return parse(text)
    except ValueError as err:
        raise InvalidArgumentError(f"{flag} is {text!r}: {err}") from err


def _print(report: LoadReport) -> None:
    header = ["operation", "count", "per s", *(f"p{percent:g} ms" for percent in PERCENTS)]
    rows = []
    for operation, latencies in report.tally.latencies.items():
        times = [latencies.percentile_seconds(percent) or 0.0 for percent in PERCENTS]
        per_second = round(latencies.total / report.seconds, 1)
        rows.append([operation.value, latencies.total, per_second, *(round(1000 * time, 3) for time in times)])
    print_table(header, rows)
    told = report.as_json()
    if told["hit_ratio"] is not None:
        print(f"hit blocks: {100 * told['hit_ratio']:.1f} %")
    for name in ("loaded", "stored"):
        print(f"{name}: {told[f'{name}_bytes_per_second'] / 1e6:.1f} MB/s")
    errors = ", ".join(f"{count} {kind}" for kind, count in report.tally.errors.most_common())
    print(f"errors: {errors or 'none'}")
    if report.lost_processes:
        print(f"processes that told nothing: {report.lost_processes}")
    if report.samples:
        sizes = [sample.resident_bytes for sample in report.samples]
        first, most, last = (size / 2**20 for size in (sizes[0], max(sizes), sizes[-1]))
        print(f"server RSS: {first:.0f} MiB at the start, {most:.0f} MiB at most, {last:.0f} MiB at the end")
