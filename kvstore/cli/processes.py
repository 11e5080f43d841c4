"""Commands that start processes: the sidecar and the demo."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.cli.output import ExitCode
from kvstore.cli.parser import SERVE_FLAGS
from kvstore.cli.settings import assignments
from kvstore.config import load_config, quiet_grpc, user_cache_dir

if TYPE_CHECKING:
    import argparse


def serve(arguments: argparse.Namespace) -> int:
    """Run the sidecar until a signal."""
    quiet_grpc()
    from kvstore.server import run

    flags = {key: getattr(arguments, name) for name, key in SERVE_FLAGS.items() if getattr(arguments, name) is not None}
    file = Path(arguments.config) if arguments.config else None
    loaded = load_config(file=file, flags={**flags, **assignments(arguments.set)})
    run(loaded.config, ready=sys.stdout)
    return ExitCode.DONE


def demo(arguments: argparse.Namespace) -> int:
    """Run the demo."""
    from kvstore.demo.command import DemoOptions, run

    cache_dir = Path(arguments.cache_dir) if arguments.cache_dir else user_cache_dir()
    return run(DemoOptions(json=arguments.json, cache_dir=cache_dir))
