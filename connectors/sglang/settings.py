"""The settings of the SGLang connector: the table `kvstore` in SGLang's extra configuration of its storage backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvstore.connectors.engine_settings import EngineSettings, settings_from
from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangSettings(EngineSettings):
    """Where the server is, whose KV this is, and what the engine gives for it.

    `lookup_seconds` is the most that SGLang waits for an answer about the pages of a request, `bulk_seconds` for each
    batch of pages that it reads or writes, however many calls they take. `buffer_bytes` of host memory hold pages on
    their way, once for reading and once for writing.
    """

    buffer_bytes: int = 64 << 20


def parse_settings(extra_config: Mapping[str, Any]) -> SglangSettings:
    """The settings in the table `kvstore`; raises ConfigError for one that is unknown or cannot be."""
    given = extra_config.get("kvstore", {})
    if not isinstance(given, dict):
        raise ConfigError(f"kvstore is {given!r:.80}, expected a table of settings")
    return settings_from(SglangSettings, given)
