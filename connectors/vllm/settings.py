"""The settings of the vLLM connector: what stands in `kv_connector_extra_config`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvstore.connectors.engine_settings import EngineSettings, settings_from

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings(EngineSettings):
    """Where the server is, whose KV this is, and what the engine gives for it.

    `lookup_seconds` is how long a request waits for a lookup, `promote_seconds` how long on top for what lies on disk
    alone, `bulk_seconds` how long a load or a store may take beside the time of its bytes. `buffer_bytes` of host
    memory hold blocks on their way in one worker. With `by_layer` loads and stores go layer by layer inside a step,
    where the engine can have it so: its CUDA graphs are piecewise then.
    """

    promote_seconds: float = 0.5
    buffer_bytes: int = 256 << 20
    store_generated: bool = True
    by_layer: bool = False


def parse_settings(given: Mapping[str, Any]) -> VllmSettings:
    """The settings in `kv_connector_extra_config`; raises ConfigError for one that is unknown or cannot be."""
    return settings_from(VllmSettings, given)
