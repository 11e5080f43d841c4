"""How results are told: aligned columns for people, JSON for machines, an exit code for the shell."""

from __future__ import annotations

import enum
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence


class ExitCode(enum.IntEnum):
    """What a command tells the shell. argparse itself exits with 2 for a wrong command line."""

    DONE = 0
    FAILED = 1
    PARTLY_DONE = 3
    INTERRUPTED = 130


def print_json(value: object) -> None:
    """One JSON value on one line."""
    print(json.dumps(value, default=_as_json))


def show(arguments: argparse.Namespace, row: object, text: str) -> None:
    """One result, as the command was asked to tell it."""
    if arguments.json:
        print_json(row)
    else:
        print(text)


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Left-aligned columns, two blanks apart; numbers are right-aligned."""
    texts = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in texts) for column in range(len(header))]
    numeric = [
        bool(rows) and all(isinstance(row[column], (int, float)) for row in rows) for column in range(len(header))
    ]
    for row in texts:
        cells = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ]
        print("  ".join(cells).rstrip())


def _as_json(value: object) -> str:
    assert isinstance(value, bytes), value
    return value.hex()
