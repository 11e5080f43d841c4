"""What a node does before it leaves: it asks the nodes that stay to take what is worth most.

They take it as they take all blocks of peers: a prefetch, which looks into the directory, weighs the fetch against
computing the prompt, and reads the blocks from here.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvstore.cluster.peer_lookup import boundary_blocks, peer_address
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


class HandOver:
    """Asks the other nodes once, by `run`. They take turns, and one that fails is asked no more."""

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

    def run(self, own_name: str) -> HandedOver:
        """Hand over within the time of the settings, and return then. Raises nothing of the directory's or a peer's."""
        self._has_begun.set()
        done = HandedOver()
        ends_at = self._clock.monotonic() + self._settings.seconds
        try:
            others = [node for node in self._directory.nodes() if node.name != own_name and peer_address(node)]
            if others:
                self._hand_over(deque(others), frozenset(node.slot for node in others), ends_at, done)
        except KvstoreError as err:
            logger.warning("the directory did not answer, so less is handed over: cause=%s", err)
            done.failures += 1
        logger.info("handed over: prefixes=%d taken=%d failures=%d", done.prefixes, done.taken, done.failures)
        return done

    def _hand_over(self, others: deque[Node], slots: frozenset[int], ends_at: float, done: HandedOver) -> None:
        under_way: deque[_UnderWay] = deque()
        for prefix in self._store.hot_prefixes(self._settings.announce_tokens, self._settings.limit_bytes):
            keys = self._store.block_keys(prefix.namespace, prefix.tokens, root=prefix.root)
            if self._has_holder(prefix, keys, slots):
                continue
            done.prefixes += 1
            while len(under_way) >= _UNDER_WAY_PER_NODE * len(others):
                self._finish(under_way.popleft(), others, ends_at, done)
            if not others or self._clock.monotonic() >= ends_at:
                break
            begun = self._begin(prefix, len(keys), others, done)
            if begun is not None:
                under_way.append(begun)
        while under_way:
            self._finish(under_way.popleft(), others, ends_at, done)

    def _has_holder(self, prefix: HotPrefix, keys: Sequence[bytes], slots: frozenset[int]) -> bool:
        """Whether one that stays says it has the last boundary of a prefix, and so all above it."""
        ends = boundary_blocks(prefix.namespace.layout.block_tokens, self._settings.announce_tokens, len(keys))
        (holders,) = self._directory.holders([keys[ends[-1] - 1]])
        return bool(holders & slots)

    def _begin(self, prefix: HotPrefix, blocks: int, others: deque[Node], done: HandedOver) -> _UnderWay | None:
        node = others[0]
        others.rotate(-1)
        try:
            client = self._clients.client(node)
            return _UnderWay(node, client.prefetch(prefix.namespace, prefix.tokens, root=prefix.root), blocks)
        except KvstoreError as err:
            _give_up(node, others, done, err)
            return None

    def _finish(self, begun: _UnderWay, others: deque[Node], ends_at: float, done: HandedOver) -> None:
        try:
            done.taken += begun.prefetch.wait(max(0.0, ends_at - self._clock.monotonic())) >= begun.blocks
            begun.prefetch.cancel()
        except KvstoreError as err:
            _give_up(begun.node, others, done, err)


def _give_up(node: Node, others: deque[Node], done: HandedOver, error: KvstoreError) -> None:
    done.failures += 1
    if node in others:
        logger.warning("a node takes nothing from this one: node=%s cause=%s", node.name, error)
        others.remove(node)
