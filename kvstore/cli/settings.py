"""`kvstore config show` and `kvstore config check`, and the settings that other commands need."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.cli.output import ExitCode, print_json, print_table
from kvstore.config import load_config
from kvstore.errors import ConfigError
from kvstore.transport.address import parse_address

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

# In an address: what stands between the name of a user and the host.
_PASSWORD = re.compile(r"(?<=://)(?P<user>[^:/]*:).+(?=@)")


def assignments(pairs: Iterable[str]) -> dict[str, str]:
    """Settings given as KEY=VALUE; the last one of a key holds."""
    values: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--set {pair!r}: expected KEY=VALUE, such as log.level=debug")
        values[key.strip()] = value.strip()
    return values


def show(arguments: argparse.Namespace) -> int:
    """Print each setting in force with its origin."""
    shown = shown_settings(Path(arguments.config) if arguments.config else None, assignments(arguments.set))
    if arguments.json:
        print_json({key: {"value": value, "origin": origin} for key, value, origin in shown})
    else:
        print_table(("setting", "value", "origin"), shown)
    return ExitCode.DONE


def shown_settings(file: Path | None, flags: dict[str, str]) -> list[tuple[str, str, str]]:
    """Each setting in force without passwords: its key, its value, its origin."""
    origins = load_config(file=file, flags=flags).origins
    return [(row.key, _PASSWORD.sub(r"\g<user>***", row.value), row.origin) for row in origins]


def check(arguments: argparse.Namespace) -> int:
    """Read a settings file alone; a fault in it is raised."""
    loaded = load_config(file=Path(arguments.file), environ={})
    for address in (loaded.config.address, *loaded.config.server.listen):
        parse_address(address)
    count = sum(row.origin != "default" for row in loaded.origins)
    if arguments.json:
        print_json({"right": True, "settings": count})
    else:
        print(f"{arguments.file}: {count} settings, all right")
    return ExitCode.DONE
