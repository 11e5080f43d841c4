"""The settings of the vLLM connector: what stands in `kv_connector_extra_config`."""

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
class VllmSettings:
    """Where the server is, whose KV this is, and what the engine gives for it.

    `revision` names the checkpoint; without it the files of the model are read once for a fingerprint. `secret_file`
    and `token_file` are paths, so that no secret stands on a command line. `lookup_seconds` is how long a request
    waits for a lookup, `promote_seconds` how long on top for what lies on disk alone, `bulk_seconds` how long a load or
    a store may take beside the time of its bytes. `buffer_bytes` of host memory hold blocks on their way in one
    worker. `weights_version` names weights that differ from the files of the checkpoint.
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
    promote_seconds: float = 0.5
    bulk_seconds: float = 2.0
    buffer_bytes: int = 256 << 20
    store_generated: bool = True

    def secret(self) -> bytes | None:
        """The content of the secret file, without a newline at its end."""
        if self.secret_file is None:
            return None
        try:
            return Path(self.secret_file).read_bytes().rstrip(b"\r\n")
        except OSError as error:
            raise ConfigError(f"secret_file {self.secret_file!r} cannot be read: {error.strerror}") from error


def parse_settings(given: Mapping[str, Any]) -> VllmSettings:
    """The settings in `kv_connector_extra_config`; raises ConfigError for one that is unknown or cannot be."""
    known = {item.name: item.default for item in fields(VllmSettings)}
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"setting {name!r} is unknown, expected one of {', '.join(known)}")
        values[name] = _checked(name, value, known[name])
    return VllmSettings(**values)


def _checked(name: str, value: object, default: object) -> object:
    if isinstance(default, bool):
        return _require(isinstance(value, bool), name, value, "true or false")
    if name == "buffer_bytes":
        return _size(name, value)
    if isinstance(default, float):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        fits = is_number and 0 < float(value) <= _SECONDS_MAX  # type: ignore[arg-type]
        return _require(fits, name, value, f"seconds, more than 0 and at most {_SECONDS_MAX:g}")
    if default is None and value is None:
        return None
    return _require(isinstance(value, str) and value != "", name, value, "a text that is not empty")


def _size(name: str, value: object) -> int:
    try:
        size = parse_size(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ConfigError(f"{name} is {value!r}: {error}") from error
    fits = isinstance(size, int) and not isinstance(size, bool) and 0 < size <= _BYTES_MAX
    _require(fits, name, value, 'bytes, such as 268435456 or "256MiB"')
    assert isinstance(size, int), "just required"
    return size


def _require(fits: bool, name: str, value: object, expected: str) -> object:
    if not fits:
        raise ConfigError(f"{name} is {value!r}, expected {expected}")
    return value
