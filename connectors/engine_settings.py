"""The settings that engines with a configuration of their own give a connector: where the server is, whose KV it is.

Knows no engine. One that has more settings derives a class with them; what a setting takes is told by its default.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import kvstore
from kvstore.errors import ConfigError
from kvstore.quantities import format_size, parse_size
from kvstore.writers import configured_writer, writer_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvstore.transport.client import Client

logger = logging.getLogger(__name__)
_SECONDS_MAX = 3600.0
_BYTES_MAX = 1 << 44

Settings = TypeVar("Settings", bound="EngineSettings")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What every such engine says.

    `revision` names the checkpoint; without it the files of the model are read once for a fingerprint. `secret_file`
    and `token_file` are paths, so that no secret stands on a command line. `weights_version` names weights that differ
    from the files of the checkpoint. `writer`, up to 16 hex digits, is kept with all that is stored, so that
    `kvstore evict --writer` finds it. `lookup_seconds` and `bulk_seconds` bound what an engine waits for.
    """

    address: str = "unix:///run/kvstore.sock"
    tenant: str = "default"
    model: str | None = None
    revision: str | None = None
    weights_version: str | None = None
    writer: str | None = None
    secret_file: str | None = None
    token_file: str | None = None
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    lookup_seconds: float = 0.1
    bulk_seconds: float = 2.0

    def secret(self) -> bytes | None:
        """The content of the secret file, without a newline at its end."""
        if self.secret_file is None:
            return None
        try:
            return Path(self.secret_file).read_bytes().rstrip(b"\r\n")
        except OSError as error:
            raise ConfigError(f"secret_file {self.secret_file!r} cannot be read: {error.strerror}") from error


def connect(settings: EngineSettings) -> Client:
    """A client of the server in the settings."""
    client = kvstore.connect(
        settings.address,
        lookup_seconds=settings.lookup_seconds,
        bulk_seconds=settings.bulk_seconds,
        tls_ca=settings.tls_ca,
        tls_cert=settings.tls_cert,
        tls_key=settings.tls_key,
        token_file=settings.token_file,
        writer=configured_writer(settings.writer),
    )
    logger.info("kvstore connector: what this process stores is of writer %s", writer_text(client.writer))
    return client


def settings_from(kind: type[Settings], given: Mapping[str, Any]) -> Settings:
    """Settings of an engine; raises ConfigError for one that is unknown or cannot be."""
    known = {item.name: item.default for item in fields(kind)}
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"setting {name!r} is unknown, expected one of {', '.join(known)}")
        values[name] = _checked(name, value, known[name])
    return kind(**values)


def _checked(name: str, value: object, default: object) -> object:
    if isinstance(default, bool):
        return _require(isinstance(value, bool), name, value, "true or false")
    if isinstance(default, int):
        return _size(name, value, default)
    if isinstance(default, float):
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= _SECONDS_MAX:
            return float(value)
        raise ConfigError(f"{name} is {value!r}, expected seconds, more than 0 and at most {_SECONDS_MAX:g}")
    if default is None and value is None:
        return None
    return _require(isinstance(value, str) and value != "", name, value, "a text that is not empty")


def _size(name: str, value: object, default: int) -> object:
    try:
        size = parse_size(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ConfigError(f"{name} is {value!r}: {error}") from error
    fits = isinstance(size, int) and not isinstance(size, bool) and 0 < size <= _BYTES_MAX
    _require(fits, name, value, f'bytes, such as {default} or "{format_size(default)}"')
    return size


def _require(fits: bool, name: str, value: object, expected: str) -> object:
    if not fits:
        raise ConfigError(f"{name} is {value!r}, expected {expected}")
    return value
