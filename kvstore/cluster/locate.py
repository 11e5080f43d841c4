"""What a node tells routers: which nodes there are, and how much of a prompt each of them holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvstore.nodes import NodeMatch, boundary_step
from kvstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.cluster.directory import Directory
    from kvstore.nodes import Node
    from kvstore.tokens import Tokens
    from kvstore.types import Namespace, PrefixMatch, Root

_FIRST_READ = 8  # boundaries; each further read is of twice as many, to the end of what anybody holds


class LocatedStore(Protocol):
    """What is asked of the store."""

    def match(
        self,
        namespace: Namespace,
        tokens: Tokens,
        *,
        root: Root | None = None,
        touch: bool = True,
        request_id: str | None = None,
    ) -> PrefixMatch:
        """The longest stored prefix."""
        ...

    def block_keys(self, namespace: Namespace, tokens: Tokens, *, root: Root | None = None) -> list[bytes]:
        """The keys of a prompt's whole blocks."""
        ...


class EngineMemory(Protocol):
    """What engines hold in their devices' memory."""

    def device_tokens(self, namespace: Namespace, tokens: Tokens, root: Root | None) -> dict[str, int]:
        """Leading tokens of a prompt, by the engine's name."""
        ...


class NodeView:
    """A kvstore.transport.cluster_view.ClusterView over a directory. Any thread may call."""

    def __init__(
        self,
        store: LocatedStore,
        directory: Directory,
        node_name: str,
        announce_tokens: int,
        *,
        engines: EngineMemory | None = None,
    ) -> None:
        self._store = store
        self._directory = directory
        self._announce_tokens = announce_tokens
        self._engines = engines
        self.node_name = node_name

    def nodes(self) -> Sequence[Node]:
        """The living nodes, and behind them those that are gone. Raises DirectoryUnavailableError."""
        gone = self._directory.departed()
        return (*self._directory.nodes(), *gone)

    def locate(self, namespace: Namespace, tokens: Tokens, root: Root | None) -> Sequence[NodeMatch]:
        """What each living node holds of a prompt, the most first. Raises DirectoryUnavailableError.

        O(blocks) for the keys; one read of the directory, and one more each time that the length doubles.
        """
        block_tokens = namespace.layout.block_tokens
        own = self._store.match(namespace, tokens, root=root, touch=False)
        device_tokens = {} if self._engines is None else self._engines.device_tokens(namespace, tokens, root)
        found = self._told(namespace, tokens, root)
        matches = []
        for node in self._directory.nodes():
            if self._directory.is_self(node):
                tiers = {tier: blocks * block_tokens for tier, blocks in own.tiers.items()}
                matches.append(NodeMatch(node, own.tokens, tiers, device_tokens))
            else:
                held = found.get(node.slot, 0) * block_tokens
                matches.append(NodeMatch(node, held, {Tier.PEER: held} if held else {}))
        return sorted(matches, key=lambda match: (-match.tokens, match.node.slot))

    def _told(self, namespace: Namespace, tokens: Tokens, root: Root | None) -> dict[int, int]:
        """Blocks to the last boundary that each slot holds."""
        if namespace.layout.state is not None:
            return {}  # states are not shared
        keys = self._store.block_keys(namespace, tokens, root=root)
        step = boundary_step(self._announce_tokens, namespace.layout.block_tokens)
        ends = range(step, len(keys) + 1, step)
        blocks: dict[int, int] = {}
        first, count = 0, _FIRST_READ
        while first < len(ends):
            read = ends[first : first + count]
            holders = self._directory.holders([keys[end - 1] for end in read])
            for end, slots in zip(read, holders, strict=True):
                blocks.update(dict.fromkeys(slots, end))
            if not holders[-1]:
                break  # who holds a block holds all before it
            first, count = first + count, 2 * count
        return blocks
