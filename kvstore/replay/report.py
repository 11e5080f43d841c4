"""Outcomes of a replay as a table, as JSON values, as a Parquet file and as a plot."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeAlias

from kvstore.errors import InvalidArgumentError, StorageError
from kvstore.quantities import format_size
from kvstore.replay.errors import MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from kvstore.replay.run import ReplayRow
    from kvstore.replay.trace import Trace

OPTIMAL_SENTENCE = (
    "MIN for prefix-closed sets with bypass, which knows the future: exact over the whole trace, and within a little"
    " of the best on the counted part; with as much room as host and disk together"
)
_PLOT_SUFFIXES = (".png", ".svg")
_Cells: TypeAlias = list[tuple[object, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All runs of one command with what they have in common. `block_bytes_source` says where the size comes from."""

    trace: Trace
    block_bytes: int
    block_bytes_source: str
    warm_ratio: float
    rows: Sequence[ReplayRow]


def heading(report: Report) -> str:
    """One line on the trace and its blocks."""
    trace = report.trace
    return (
        f"{trace.name} ({trace.format}): {trace.request_count} requests, {trace.unique_blocks} unique blocks of"
        f" {trace.block_tokens} tokens and {format_size(report.block_bytes)} ({report.block_bytes_source});"
        f" counted after the first {report.warm_ratio:.0%} of the requests"
    )


def footnotes(report: Report) -> list[str]:
    """What a reader of the table must know."""
    return [f"optimal: {OPTIMAL_SENTENCE}", *(f"note: {note}" for note in report.trace.notes)]


def table(report: Report) -> tuple[tuple[str, ...], _Cells]:
    """Header and cells; rates in percent. Columns of the disk tier only where there is one."""
    with_disk = any(row.disk_blocks for row in report.rows)
    header = ("policy", "capacity", "blocks", "block hit %", "token hit %", "flop hit %", "optimal %", "infinite %")
    disk_header = ("admission", "host hit %", "disk hit %", "demoted GiB", "promoted GiB", "demoted KiB / hit token")
    cells: _Cells = []
    for row in report.rows:
        rates = (row.block_hit_rate, row.token_hit_rate, row.flop_hit_rate, row.optimal, row.infinite)
        shown = (row.policy, row.capacity, row.capacity_blocks, *map(_percent, rates))
        of_tiers = map(_percent, (row.host_block_hit_rate, row.disk_block_hit_rate))
        per_token = row.demoted_bytes_per_hit_token
        written = "-" if per_token is None else round(per_token / 1024, 1)
        moved = (_gib(row.demoted_bytes), _gib(row.promoted_bytes), written)
        cells.append((*shown, row.admission, *of_tiers, *moved) if with_disk else shown)
    return (*header, *disk_header) if with_disk else header, cells


def as_json(report: Report) -> dict[str, object]:
    """Everything, ready for JSON."""
    trace = report.trace
    return {
        "trace": trace.name,
        "format": trace.format,
        "requests": trace.request_count,
        "unique_blocks": trace.unique_blocks,
        "block_tokens": trace.block_tokens,
        "block_bytes": report.block_bytes,
        "block_bytes_source": report.block_bytes_source,
        "warm": report.warm_ratio,
        "optimal": OPTIMAL_SENTENCE,
        "notes": list(trace.notes),
        "rows": [asdict(row) for row in report.rows],
    }


def check_outputs(*, parquet: Path | None, plot: Path | None) -> None:
    """Raise before the work is done for what could not be written after it."""
    if plot is not None and plot.suffix.lower() not in _PLOT_SUFFIXES:
        raise InvalidArgumentError(f"--plot {plot}: expected a name that ends in {' or '.join(_PLOT_SUFFIXES)}")
    for path, module, extra in ((parquet, "pyarrow", "replay"), (plot, "matplotlib", "plot")):
        if path is None:
            continue
        if find_spec(module) is None:
            raise MissingExtraError(f"{path} needs {module}: pip install 'prefix-kvstore[{extra}]'")
        if not path.absolute().parent.is_dir():
            raise InvalidArgumentError(f"{path}: there is no folder {path.parent}")


def write_parquet(report: Report, path: Path) -> None:
    """One row for each run; the columns are the fields of ReplayRow, and the trace's name."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"trace": report.trace.name, **asdict(row)} for row in report.rows]
    try:
        pq.write_table(pa.Table.from_pylist(rows), path)
    except OSError as err:
        raise StorageError(f"{path} cannot be written: {err}") from err


def write_plot(report: Report, path: Path) -> None:
    """Block hit rate over the capacity of the host tier: a line for each policy, the optimum and the infinite cache."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    _draw(axes, report)
    try:
        figure.savefig(path, dpi=150)
    except OSError as err:
        raise StorageError(f"{path} cannot be written: {err}") from err


def _draw(axes: Axes, report: Report) -> None:
    rows = sorted(report.rows, key=lambda row: row.capacity_blocks)
    for name in dict.fromkeys(row.policy for row in report.rows):
        mine = [row for row in rows if row.policy == name]
        axes.plot(
            [row.capacity_blocks for row in mine], [100 * row.block_hit_rate for row in mine], marker="o", label=name
        )
    blocks = [row.capacity_blocks for row in rows]
    axes.plot(blocks, [100 * row.optimal for row in rows], "k--", label="optimal")
    axes.plot(blocks, [100 * row.infinite for row in rows], "k:", label="infinite")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"host tier, blocks of {report.trace.block_tokens} tokens")
    axes.set_ylabel("block hit rate, %")
    axes.set_title(report.trace.name)
    axes.legend()


def _gib(size_bytes: int) -> float:
    return round(size_bytes / 2**30, 1)


def _percent(rate: float) -> float:
    return round(100 * rate, 1)
