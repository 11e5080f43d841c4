"""What a node does before it leaves: it asks the nodes that stay to take what is worth most.

They take it as they take all blocks of peers: a prefetch, which looks into the directory, weighs the fetch against
computing the prompt, and reads the blocks from here.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvstore.cluster.peer_address import peer_address
from kvstore.cluster.peer_lookup import boundary_blocks
from kvstore.errors import KvstoreError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.api import Prefetch
    from kvstore.clock import Clock
    from kvstore.cluster.directory import Directory
    from kvstore.nodes import Node
    from kvstore.store.hot_prefixes import HotPrefix
    from kvstore.types import Namespace, Root, TokenArray

logger = logging.getLogger(__name__)

_UNDER_WAY_PER_NODE = 4
_STRIKES_MAX = 3


class LeavingStore(Protocol):
    """What is asked of the store of the node that leaves."""

    def hot_prefixes(self, every_tokens: int, limit_bytes: int) -> Sequence[HotPrefix]:
        """The prefixes worth most that have so many bytes together."""
        ...

    def block_keys(self, namespace: Namespace, tokens: TokenArray, *, root: Root | None = None) -> Sequence[bytes]:
        """The keys of all whole blocks."""
        ...


class PeerClient(Protocol):
    """What is asked of a node that stays."""

    def prefetch(
        self, namespace: Namespace, tokens: TokenArray, *, root: Root | None = None, wait_seconds: float | None = 0.0
    ) -> Prefetch:
        """Begin to bring a prompt there."""
        ...


class Clients(Protocol):
    """The way to the other nodes."""

    def client(self, node: Node) -> PeerClient:
        """A client of a node that has an address."""
        ...


@dataclass(frozen=True, slots=True)
class HandOverSettings:
    """How long it may take, and how much is handed over."""

    seconds: float
    limit_bytes: int
    announce_tokens: int


@dataclass(slots=True)
class HandedOver:
    """What came of it: prefixes that nobody else had, those of which a node has all by now, and calls that failed."""

    prefixes: int = 0
    taken: int = 0
    failures: int = 0


@dataclass(frozen=True, slots=True)
class _UnderWay:
    node: Node
    prefetch: Prefetch
    blocks: int


class _Staying:
    """The nodes that stay. They take turns; one that has failed so often is out."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.slots = frozenset(node.slot for node in nodes)
        self._turns = deque(nodes)
        self._strikes: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._turns)

    def next(self) -> Node:
        """Whose turn it is; there must be one left."""
        self._turns.rotate(-1)
        return self._turns[-1]

    def strike(self, node: Node, error: KvstoreError) -> None:
        """It has failed."""
        self._strikes[node.name] += 1
        if self._strikes[node.name] == _STRIKES_MAX:
            logger.warning("a node takes nothing from this one: node=%s cause=%s", node.name, error)
            self._turns.remove(node)


class HandOver:
    """Asks the other nodes once, by `run`."""

    def __init__(
        self, store: LeavingStore, directory: Directory, clients: Clients, settings: HandOverSettings, clock: Clock
    ) -> None:
        self._store = store
        self._directory = directory
        self._clients = clients
        self._settings = settings
        self._clock = clock
        self._has_begun = threading.Event()

    @property
    def unready(self) -> str | None:
        """Why the node should be sent nothing; None: it does not leave."""
        return "handing over" if self._has_begun.is_set() else None

    def run(self) -> HandedOver:
        """Hand over within the time of the settings, and return then. Raises nothing of the directory's or a peer's."""
        self._has_begun.set()
        done = HandedOver()
        ends_at = self._clock.monotonic() + self._settings.seconds
        try:
            others = [node for node in self._directory.nodes() if not self._directory.is_self(node)]
            staying = _Staying([node for node in others if peer_address(node.addresses)])
            if staying:
                self._hand_over(staying, ends_at, done)
        except KvstoreError as err:
            logger.warning("the directory did not answer, so less is handed over: cause=%s", err)
            done.failures += 1
        logger.info("handed over: prefixes=%d taken=%d failures=%d", done.prefixes, done.taken, done.failures)
        return done

    def _hand_over(self, staying: _Staying, ends_at: float, done: HandedOver) -> None:
        under_way: deque[_UnderWay] = deque()
        try:
            for prefix in self._store.hot_prefixes(self._settings.announce_tokens, self._settings.limit_bytes):
                keys = self._store.block_keys(prefix.namespace, prefix.tokens, root=prefix.root)
                if self._has_holder(prefix, keys, staying.slots):
                    continue
                done.prefixes += 1
                while len(under_way) >= max(1, _UNDER_WAY_PER_NODE * len(staying)):
                    self._finish(under_way.popleft(), staying, ends_at, done)
                if not staying or self._clock.monotonic() >= ends_at:
                    break
                under_way += self._begin(prefix, len(keys), staying, done)
        finally:
            while under_way:
                self._finish(under_way.popleft(), staying, ends_at, done)

    def _has_holder(self, prefix: HotPrefix, keys: Sequence[bytes], slots: frozenset[int]) -> bool:
        """Whether one that stays says it has the last boundary of a prefix, and so all above it."""
        ends = boundary_blocks(prefix.namespace.layout.block_tokens, self._settings.announce_tokens, len(keys))
        (holders,) = self._directory.holders([keys[ends[-1] - 1]])
        return bool(holders & slots)

    def _begin(self, prefix: HotPrefix, blocks: int, staying: _Staying, done: HandedOver) -> list[_UnderWay]:
        """What is under way now: nothing where nobody takes it."""
        while staying:
            node = staying.next()
            try:
                client = self._clients.client(node)
                return [_UnderWay(node, client.prefetch(prefix.namespace, prefix.tokens, root=prefix.root), blocks)]
            except KvstoreError as err:
                done.failures += 1
                staying.strike(node, err)
        return []

    def _finish(self, begun: _UnderWay, staying: _Staying, ends_at: float, done: HandedOver) -> None:
        try:
            done.taken += begun.prefetch.wait(max(0.0, ends_at - self._clock.monotonic())) >= begun.blocks
            begun.prefetch.cancel()
        except KvstoreError as err:
            done.failures += 1
            staying.strike(begun.node, err)
