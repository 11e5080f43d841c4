"""Settings of the engines whose KV events this node follows; a part of kvstore.config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.errors import ConfigError
from kvstore.setting_values import Kind, setting

if TYPE_CHECKING:
    from collections.abc import Mapping

_SCHEMES = ("tcp://", "ipc://")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEventConfig:
    """One publisher: an engine, or one data-parallel rank of it."""

    endpoint: str = setting(
        "",
        Kind.TEXT,
        "Where the engine publishes: tcp://host:port or ipc://path; tcp://*:port waits for engines that connect.",
    )
    replay_endpoint: str = setting(
        "", Kind.TEXT, "Where it repeats batches that were missed; empty: each gap forgets what it holds."
    )
    engine: str = setting("", Kind.TEXT, "What `Locate` calls the engine; empty: the name of this table.")
    tenant: str = setting("default", Kind.TEXT, "Whose namespaces are told of it.")
    model: str = setting("", Kind.TEXT, "Model of these namespaces; required.")
    revision: str = setting("", Kind.TEXT, "Revision of these namespaces; empty: any.")
    adapters: tuple[str, ...] = setting(
        (), Kind.LIST, "NAME=DIGEST for each LoRA adapter: as the engine calls it, and as roots name it."
    )
    blocks_max: int = setting(
        2**18,
        Kind.COUNT,
        "Blocks of the engine that are remembered, of at most 400 B each; more are left out.",
        minimum=1,
        maximum=2**26,
    )


def check_engine_events(engines: Mapping[str, EngineEventConfig]) -> None:
    """Raise ConfigError for a publisher that cannot be followed."""
    names: set[str] = set()
    for table, engine in engines.items():
        key = f"engine_events.{table}"
        if not engine.endpoint.startswith(_SCHEMES):
            raise ConfigError(f"{key}.endpoint is {engine.endpoint!r:.80}, expected such as tcp://127.0.0.1:5557")
        if engine.replay_endpoint and not engine.replay_endpoint.startswith(_SCHEMES):
            raise ConfigError(
                f"{key}.replay_endpoint is {engine.replay_endpoint!r:.80}, expected such as tcp://127.0.0.1:5558"
            )
        if not engine.model:
            raise ConfigError(f"{key}.model is empty, expected the model of the namespaces that the engine serves")
        for pair in engine.adapters:
            if not all(pair.partition("=")):
                raise ConfigError(f"{key}.adapters has {pair!r:.80}, expected NAME=DIGEST")
        name = engine.engine or table
        if name in names:
            raise ConfigError(f"{key}.engine is {name!r:.80}, which another table has; give each a name of its own")
        names.add(name)
