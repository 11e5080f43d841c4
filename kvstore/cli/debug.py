"""`kvstore debug dump`: one archive with what a bug report needs, without prompts, salts, secrets or payloads."""

from __future__ import annotations

import io
import json
import os
import platform
import re
import sys
import tarfile
import time
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore import __version__
from kvstore.cli.doctor import as_json
from kvstore.cli.metrics_page import read_metrics
from kvstore.cli.output import ExitCode, show
from kvstore.cli.remote import status_row
from kvstore.cli.settings import shown_settings
from kvstore.cli.sidecar import connect_sidecar
from kvstore.errors import InvalidArgumentError, KvstoreError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from kvstore.transport.client import Client

_LOG_BYTES_MAX = 1 << 20  # of the end of the log
_PACKAGES = ("numpy", "grpcio", "protobuf", "uvloop", "prometheus-client", "lmdb", "xxhash", "torch")
# What a log should not have, and a foreign line in it may: tokens of ours, of issuers (JWT), passwords in addresses,
# and what names itself a secret.
_SECRETS = re.compile(
    r"kvs_[\w-]+|eyJ[\w-]+\.[\w.-]+|(?<=://)[^\s/@]*:[^\s@]*(?=@)"
    r"|(?i:(?<=salt)|(?<=secret)|(?<=token)|(?<=password))[=:]\s*\S+"
)


def dump(arguments: argparse.Namespace) -> int:
    """Write the archive for its owner alone; partly done where some of it cannot be had, which it then says."""
    path = Path(arguments.file)
    if path.exists():
        raise InvalidArgumentError(f"{path} is there already; name a file that is not")
    with connect_sidecar(arguments) as client:
        files, failures = _gather(_parts(arguments, client))
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            _write(tarfile.open(fileobj=file, mode="w:gz"), files)  # noqa: SIM115  # closed there
        unfinished.rename(path)
    except OSError as err:
        unfinished.unlink(missing_ok=True)
        raise InvalidArgumentError(f"{path} cannot be written: {err.strerror}") from err
    missing = f", without {', '.join(sorted(failures))}" if failures else ""
    row = {"file": str(path), "files": sorted(files), "missing": failures}
    show(arguments, row, f"{path}: {len(files)} files{missing}")
    return ExitCode.PARTLY_DONE if failures else ExitCode.DONE


def masked(text: str) -> str:
    """A text without what looks like a secret."""
    return _SECRETS.sub("***", text)


def _parts(arguments: argparse.Namespace, client: Client) -> dict[str, Callable[[], object]]:
    """What goes in, by file name: texts as they are, everything else as JSON."""
    config = Path(arguments.config) if arguments.config else None
    parts: dict[str, Callable[[], object]] = {
        "about.json": _about,
        "settings.json": lambda: _settings(config),
        "status.json": lambda: status_row(arguments, client),
        "stats.json": lambda: asdict(client.stats()),
        "nodes.json": lambda: [{**asdict(node), "state": node.state.value} for node in client.nodes()[1]],
        "verify.json": lambda: asdict(client.verify()),
        "doctor.json": lambda: as_json(client.diagnosis()),
    }
    if arguments.metrics:
        parts["metrics.txt"] = lambda: read_metrics(arguments.metrics)
    if arguments.log:
        parts["log.txt"] = lambda: masked(_tail(Path(arguments.log)))
    return parts


def _gather(parts: dict[str, Callable[[], object]]) -> tuple[dict[str, bytes], dict[str, str]]:
    """The files, and why some are not what they should be: they have the reason in their place."""
    files: dict[str, bytes] = {}
    failures: dict[str, str] = {}
    for name, make in parts.items():
        try:
            content = make()
        except KvstoreError as err:
            failures[name] = content = masked(str(err))
        text = content if isinstance(content, str) else json.dumps(content, indent=1)
        files[name] = text.encode()
    return files, failures


def _about() -> dict[str, object]:
    return {
        "kvstore": __version__,
        "python": sys.version,
        "platform": platform.platform(),
        "libc": platform.libc_ver(),
        "cpus": os.cpu_count(),
        "made_unix_seconds": time.time(),
        "packages": {name: _version(name) for name in _PACKAGES},
    }


def _settings(file: Path | None) -> dict[str, object]:
    return {key: {"value": masked(value), "origin": origin} for key, value, origin in shown_settings(file, {})}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _tail(path: Path) -> str:
    """The last lines of a log, whole ones."""
    try:
        with path.open("rb") as file:
            begin = max(0, file.seek(0, os.SEEK_END) - _LOG_BYTES_MAX)
            file.seek(begin)
            end = file.read(_LOG_BYTES_MAX)
    except OSError as err:
        raise InvalidArgumentError(f"log {path} cannot be read: {err.strerror}") from err
    text = end.decode(errors="replace")
    return text.partition("\n")[2] if begin else text


def _write(archive: tarfile.TarFile, files: dict[str, bytes]) -> None:
    with archive:
        for name, content in sorted(files.items()):
            entry = tarfile.TarInfo(f"kvstore-debug/{name}")
            entry.size, entry.mode, entry.mtime = len(content), 0o600, int(time.time())
            archive.addfile(entry, io.BytesIO(content))
