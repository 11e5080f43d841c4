"""The result of the demo, for people and for machines."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.demo.flow import DemoReport, DemoRow

_QUESTION_CHARACTERS = 48
_HEADS = ("engine", "question", "prompt", "reused", "TTFT cold", "with kvstore", "ratio", "from", "identical")
_TEXT_COLUMNS = ("engine", "question", "from", "identical")


def as_table(report: DemoReport) -> str:
    """Aligned plain text: a row for each question, the hit after the restart, and what did not hold."""
    lines = _aligned([_HEADS, *(_cells(row) for row in report.rows)])
    lines += ["", "The last question again, after kill -9 of the sidecar and a restart on the same data folder:"]
    lines += _aligned([_HEADS, _cells(report.restart)])
    broken = [f"{row.engine}: {sentence}" for row in [*report.rows, report.restart] for sentence in row.broken]
    if broken:
        lines += ["", "What should hold and does not:", *broken]
    else:
        lines += ["", "The tokens are identical, the sidecar counted what the engines did, no block was stored twice."]
    machine = report.machine
    lines.append(
        f"{machine['processor']}, threads of an engine: {machine['engine_threads']}, torch {machine['torch']}, "
        f"transformers {machine['transformers']}; {report.seconds:.0f} s in all."
    )
    return "\n".join(lines)


def as_json(report: DemoReport) -> dict[str, Any]:
    """One object; `holds` is true only if every row is identical and every count is right."""
    rows = [*report.rows, report.restart]
    return {
        "identical": all(row.identical for row in rows),
        "holds": report.holds,
        "rows": [_fields(row) for row in report.rows],
        "restart": _fields(report.restart),
        "seconds": round(report.seconds, 1),
        "machine": report.machine,
    }


def _cells(row: DemoRow) -> tuple[str, ...]:
    question = row.question
    if len(question) > _QUESTION_CHARACTERS:
        question = question[: _QUESTION_CHARACTERS - 3] + "..."
    return (
        row.engine,
        question,
        str(row.prompt_tokens),
        str(row.reused_tokens),
        f"{row.ttft_cold_seconds * 1000:.0f} ms",
        f"{row.ttft_kvstore_seconds * 1000:.0f} ms",
        f"{row.ratio:.1f}x",
        "+".join(row.tiers) or "-",
        "yes" if row.identical else "NO",
    )


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if head in _TEXT_COLUMNS else cell.rjust(width)
            for head, cell, width in zip(_HEADS, row, widths, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _fields(row: DemoRow) -> dict[str, Any]:
    return asdict(row) | {"ratio": round(row.ratio, 2)}
