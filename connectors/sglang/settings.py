"""The settings of the SGLang connector: the table `kvstore` in SGLang's extra configuration of its storage backend."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.errors import ConfigError
from kvstore.quantities import parse_size

if TYPE_CHECKING:
    from collections.abc import Mapping

_SECONDS_MAX = 3600.0
_BYTES_MAX = 1 << 44


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangSettings:
    """Where the server is, whose KV this is, and what the engine gives for it.

    `revision` names the checkpoint; without it the files of the model are read once for a fingerprint. `secret_file`
    and `token_file` are paths, so that no secret stands on a command line. `lookup_seconds` is the most that SGLang
    waits for an answer about the pages of a request, `bulk_seconds` for each batch of pages that it reads or writes,
    however many calls they take. `buffer_bytes` of host memory hold pages on their way, once for reading and once for
    writing. `weights_version` names weights that differ from the files of the checkpoint.
    `writer`, up to 16 hex digits, is kept with all that is stored, so that `kvstore evict --writer` finds it.
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
    buffer_bytes: int = 64 << 20

    def secret(self) -> bytes | None:
        """The content of the secret file, without a newline at its end."""
        if self.secret_file is None:
            return None
        try:
            return Path(self.secret_file).read_bytes().rstrip(b"\r\n")
        except OSError as error:
            raise ConfigError(f"secret_file {self.secret_file!r} cannot be read: {error.strerror}") from error


def parse_settings(extra_config: Mapping[str, Any]) -> SglangSettings:
    """The settings in the table `kvstore`; raises ConfigError for one that is unknown or cannot be."""
    given = extra_config.get("kvstore", {})
    if not isinstance(given, dict):
        raise ConfigError(f"kvstore is {given!r:.80}, expected a table of settings")
    known = {item.name: item.default for item in fields(SglangSettings)}
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"setting {name!r} is unknown, expected one of {', '.join(known)}")
        values[name] = _checked(name, value, known[name])
    return SglangSettings(**values)


def _checked(name: str, value: object, default: object) -> object:
    if name == "buffer_bytes":
        return _size(name, value)
    if isinstance(default, float):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number and 0 < float(value) <= _SECONDS_MAX:  # type: ignore[arg-type]
            return float(value)  # type: ignore[arg-type]
        raise ConfigError(f"{name} is {value!r}, expected seconds, more than 0 and at most {_SECONDS_MAX:g}")
    if (isinstance(value, str) and value) or (value is None and default is None):
        return value
    raise ConfigError(f"{name} is {value!r}, expected a text that is not empty")


def _size(name: str, value: object) -> int:
    try:
        size = parse_size(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ConfigError(f"{name} is {value!r}: {error}") from error
    if isinstance(size, int) and not isinstance(size, bool) and 0 < size <= _BYTES_MAX:
        return size
    raise ConfigError(f'{name} is {value!r}, expected bytes, such as 67108864 or "64MiB"')
