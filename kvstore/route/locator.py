"""What the sidecar knows of a prompt: where it lies, for each server behind the proxy."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from kvstore.cluster.routing import EngineMatch
from kvstore.errors import KvstoreError
from kvstore.types import Root

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvstore.nodes import NodeMatch
    from kvstore.route.upstreams import Upstream
    from kvstore.transport.aio import AsyncClient
    from kvstore.types import Namespace

LOCATE_SECONDS = 0.25


class Locator:
    """Asks one sidecar. Whatever goes wrong is an answer of nothing, within LOCATE_SECONDS."""

    def __init__(self, client: AsyncClient, namespace: Namespace, adapters: Mapping[str, str]) -> None:
        self._client = client
        self._namespace = namespace
        self._adapters = adapters
        self.failures = 0

    async def locate(
        self, tokens: list[int], body: dict[str, Any], upstreams: Sequence[Upstream]
    ) -> dict[str, EngineMatch]:
        """What each server has of a prompt: its engine in its own memory, its node in its tiers."""
        salt = body.get("cache_salt")
        model = body.get("model")
        adapter = self._adapters.get(model) if isinstance(model, str) else None
        try:
            root = Root(adapter=adapter, salt=salt if isinstance(salt, str) and salt else None)
            async with asyncio.timeout(LOCATE_SECONDS):
                found = await self._client.locate(self._namespace, tokens, root=root)
        except (KvstoreError, TimeoutError):
            self.failures += 1
            return {}
        return matches_of(found, upstreams)

    async def close(self) -> None:
        """Close the connection."""
        await self._client.close()


def matches_of(found: Sequence[NodeMatch], upstreams: Sequence[Upstream]) -> dict[str, EngineMatch]:
    """An answer of `Locate` by server. Of a server whose node is not named, a node that is alone is the one."""
    nodes = {match.node.name: match for match in found}
    device: dict[str, int] = {}
    for match in found:
        for name, tokens in match.device_tokens.items():
            device[name] = max(tokens, device.get(name, 0))
    alone = found[0] if len(found) == 1 else None
    return {
        upstream.name: EngineMatch(
            upstream.name, device.get(upstream.name, 0), nodes.get(upstream.node) if upstream.node else alone
        )
        for upstream in upstreams
    }
