"""Run one command and turn its outcome into an exit code: 0 done, 1 failed, 2 usage, 3 partly done."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, cast

from kvstore.cli.output import ExitCode
from kvstore.cli.parser import build_parser
from kvstore.errors import KvstoreError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `kvstore`. An error of the user's is one line on stderr, never a stack trace."""
    arguments = build_parser().parse_args(argv)
    if sys.stdout is None:
        print(f"{arguments.title}: standard output is closed; send it to a file or to /dev/null", file=sys.stderr)
        return ExitCode.FAILED
    try:
        status = _handler(arguments.handler)(arguments)
        sys.stdout.flush()
    except KvstoreError as err:
        print(f"{arguments.title}: {_one_line(err)}", file=sys.stderr)
        return ExitCode.FAILED
    except OSError as err:
        # What commands do to files and sockets raises errors of ours; what is left is the output. A reader that has
        # gone (as in `kvstore events | head`) needs no word.
        if not isinstance(err, BrokenPipeError):
            print(f"{arguments.title}: {err.strerror or err}", file=sys.stderr)
        # Let the interpreter's last flush hit nothing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.FAILED
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    return status


def _handler(name: str) -> Callable[[argparse.Namespace], int]:
    module, function = name.split(":")
    return cast("Callable[[argparse.Namespace], int]", getattr(importlib.import_module(module), function))


def _one_line(err: KvstoreError) -> str:
    return " ".join(str(err).split()) or type(err).__name__
