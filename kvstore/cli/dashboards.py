"""`kvstore dashboards export`: files for Grafana and Prometheus."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.cli.output import ExitCode, print_json
from kvstore.dashboards import export

if TYPE_CHECKING:
    import argparse


def export_command(arguments: argparse.Namespace) -> int:
    """Write the files and name each."""
    written = export(Path(arguments.folder))
    if arguments.json:
        print_json({"files": [str(path) for path in written]})
    else:
        print(*written, sep="\n")
    return ExitCode.DONE
