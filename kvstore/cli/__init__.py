"""The command `kvstore`: argument parsing and printing, nothing else. Commands import what they need."""

from __future__ import annotations

from kvstore.cli.command import main

__all__ = ["main"]
