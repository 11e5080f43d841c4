"""Commands that start processes: the sidecar and the demo."""

from __future__ import annotations

import signal
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.cli.output import ExitCode
from kvstore.cli.parser import SERVE_FLAGS
from kvstore.cli.settings import assignments
from kvstore.config import load_config, quiet_grpc, user_cache_dir

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator


def serve(arguments: argparse.Namespace) -> int:
    """Run the sidecar until a signal."""
    quiet_grpc()
    with _ended_by_interrupts():
        from kvstore.server import run

        given = {name: getattr(arguments, name) for name in SERVE_FLAGS}
        flags = {SERVE_FLAGS[name]: value for name, value in given.items() if value is not None}
        file = Path(arguments.config) if arguments.config else None
        loaded = load_config(file=file, flags={**flags, **assignments(arguments.set)})
        run(loaded.config, ready=sys.stdout)
    return ExitCode.DONE


@contextmanager
def _ended_by_interrupts() -> Iterator[None]:
    """Have SIGINT end the process as SIGTERM does, until the server takes both.

    KeyboardInterrupt in its place may be raised where Python has nobody to tell, in a finalizer or in what a native
    module calls while it is imported. There it is lost, and the process would go on to serve.
    """
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def demo(arguments: argparse.Namespace) -> int:
    """Run the demo."""
    from kvstore.demo.command import DemoOptions, run

    cache_dir = Path(arguments.cache_dir) if arguments.cache_dir else user_cache_dir()
    return run(DemoOptions(json=arguments.json, cache_dir=cache_dir))
