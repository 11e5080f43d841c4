"""What all engines that this node follows hold of a prompt."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore.engine_events.follower import EngineFollower, OutcomeCounts
from kvstore.engine_events.residency import EngineResidency, prompt_keys
from kvstore.hashing import KEY_BYTES
from kvstore.stats import EngineStats
from kvstore.tokens import as_prompt
from kvstore.types import PLAIN_ROOT, Symbols

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvstore.engine_event_config import EngineEventConfig
    from kvstore.tokens import Tokens
    from kvstore.types import Namespace, Root


@dataclass(slots=True)
class FollowedEngine:
    """One engine: its settings, what it holds, and how that was learnt. `is_connected` is its subscriber's to set."""

    name: str
    config: EngineEventConfig
    residency: EngineResidency
    counts: OutcomeCounts
    follower: EngineFollower = field(repr=False)
    is_connected: bool = False

    def serves(self, namespace: Namespace) -> bool:
        """Whether its blocks are of this namespace."""
        config = self.config
        return (config.tenant, config.model) == (namespace.tenant, namespace.model) and (
            config.revision in ("", namespace.revision)
        )


class DeviceOverlay:
    """The prefixes in the memory of engines, beside the index: they need not be in any tier. Any thread asks."""

    def __init__(self, engines: Mapping[str, EngineEventConfig]) -> None:
        self._secret = secrets.token_bytes(KEY_BYTES)
        self.engines = tuple(self._followed(table, config) for table, config in engines.items())

    def device_tokens(self, namespace: Namespace, tokens: Tokens, root: Root | None) -> dict[str, int]:
        """How many leading tokens of a prompt each engine of the namespace holds; those that hold none are not named.

        O(tokens) for the keys, once for each block size that engines have. Opaque namespaces have no token ids to
        compare, and `root.weights_epoch` is not looked at: an engine's memory has one epoch.
        """
        engines = [engine for engine in self.engines if engine.serves(namespace) and engine.residency.blocks]
        if not engines or namespace.layout.symbols == Symbols.DIGESTS:
            return {}
        prompt = as_prompt(namespace, tokens)
        keys: dict[int, list[bytes]] = {}
        found: dict[str, int] = {}
        for engine in engines:
            block_tokens = engine.residency.block_tokens
            if block_tokens and block_tokens not in keys:
                keys[block_tokens] = prompt_keys(self._secret, prompt, root or PLAIN_ROOT, block_tokens)
            blocks = engine.residency.leading_blocks(keys.get(block_tokens, []))
            if blocks:
                found[engine.name] = blocks * block_tokens
        return found

    def stats(self) -> tuple[EngineStats, ...]:
        """What was learnt so far, by engine."""
        return tuple(
            EngineStats(engine.name, engine.is_connected, engine.residency.blocks, engine.counts.snapshot())
            for engine in self.engines
        )

    def _followed(self, table: str, config: EngineEventConfig) -> FollowedEngine:
        adapters = dict(pair.split("=", 1) for pair in config.adapters)
        residency = EngineResidency(self._secret, adapters, config.blocks_max)
        counts = OutcomeCounts()
        follower = EngineFollower(residency, counts, replay_from=0 if config.replay_endpoint else None)
        return FollowedEngine(config.engine or table, config, residency, counts, follower)
