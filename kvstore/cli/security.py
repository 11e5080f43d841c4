"""`kvstore certs` and `kvstore token new`: what a sidecar needs that others than its own user are to reach."""

from __future__ import annotations

import json
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.certificates import make_certificates
from kvstore.cli.output import ExitCode, print_json
from kvstore.errors import ConfigError
from kvstore.transport.access import hash_of, load_rules, new_token

if TYPE_CHECKING:
    import argparse

_DAY_SECONDS = 86_400
_DAYS_MAX = 36_500
_PRIVATE_MODE = 0o600


def certs(arguments: argparse.Namespace) -> int:
    """Make what is missing of a CA and its certificates."""
    hosts, clients = (
        [name.strip() for name in text.split(",") if name.strip()] for text in (arguments.host, arguments.client)
    )
    files = make_certificates(Path(arguments.folder), hosts=hosts, clients=clients, days=arguments.days)
    if arguments.json:
        print_json({"files": [{"path": str(file.path), "made": file.made} for file in files]})
    else:
        for file in files:
            print(f"{file.path}  {'made' if file.made else 'was there'}")
    return ExitCode.DONE


def new_token_command(arguments: argparse.Namespace) -> int:
    """Make a token and its entry."""
    token = new_token()
    entry = _entry(arguments, hash_of(token))
    if arguments.out is not None:
        _write_new(Path(arguments.out), token + "\n")
    if arguments.access_file is not None:
        try:
            _append(Path(arguments.access_file), entry)
        except ConfigError:
            if arguments.out is not None:
                Path(arguments.out).unlink()  # a token that nothing lets in
            raise
    shown = {} if arguments.out is not None else {"token": token}
    if arguments.json:
        print_json({"name": arguments.name, "hash": hash_of(token), **shown})
        return ExitCode.DONE
    if arguments.out is None:
        print(token)
    if arguments.access_file is None:
        print(f"\n{entry}", end="")
    return ExitCode.DONE


def _entry(arguments: argparse.Namespace, token_hash: str) -> str:
    lines = ["[[token]]"]
    values = {"name": arguments.name, "hash": token_hash, "tenant": arguments.tenant, "role": arguments.role}
    for name, value in values.items():
        if not value.isprintable() or not value:
            raise ConfigError(f"--{name} is {value!r}, expected printable characters")
        lines.append(f"{name} = {json.dumps(value, ensure_ascii=False)}")  # the same text in TOML
    if arguments.days is not None:
        if not 1 <= arguments.days <= _DAYS_MAX:
            raise ConfigError(f"--days is {arguments.days}, expected 1..{_DAYS_MAX}")
        end = datetime.fromtimestamp(time.time() + arguments.days * _DAY_SECONDS, UTC)
        lines.append(f"expires = {end:%Y-%m-%dT%H:%M:%SZ}")
    return "\n".join(lines) + "\n"


def _append(path: Path, entry: str) -> None:
    """Add an entry to an access file, which is replaced as a whole: who reads it sees the old one or the new one."""
    try:
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        mode = path.stat().st_mode & 0o777 if path.exists() else _PRIVATE_MODE
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        _write_new(unfinished, f"{before.rstrip()}\n\n{entry}" if before.strip() else entry)
        try:
            unfinished.chmod(mode)
            load_rules(unfinished)
            unfinished.rename(path)
        except BaseException:
            unfinished.unlink()
            raise
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"access file {path} cannot be changed: {err}") from err


def _write_new(path: Path, text: str) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _PRIVATE_MODE)
    except OSError as err:
        raise ConfigError(f"{path} cannot be made: {err.strerror}") from err
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
