"""What a node that drains does: it asks the nodes that stay to take what is worth most.

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
from kvstore.nodes import DrainProgress, NodeState

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
_STEP_SECONDS = 0.5  # after which it is looked whether to go on waiting


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
    targets: frozenset[str] = frozenset()  # the names of nodes that may be asked; none: all that are ready
    settle_seconds: float = 0.0  # until the directory knows what was stored last: others find it there


@dataclass(slots=True)
class HandedOver:
    """What came of it so far; see kvstore.nodes.DrainProgress."""

    held: int = 0
    prefixes: int = 0
    taken: int = 0
    taken_bytes: int = 0
    failures: int = 0


@dataclass(frozen=True, slots=True)
class _UnderWay:
    node: Node
    prefetch: Prefetch
    blocks: int
    block_bytes: int


class _Staying:
    """The nodes that stay. The least busy has its turn, and equals one after the other; who failed so often is out."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.slots = frozenset(node.slot for node in nodes)
        self._turns = deque(nodes)
        self._strikes: Counter[str] = Counter()
        self._under_way: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._turns)

    def next(self) -> Node:
        """Whose turn it is; there must be one left."""
        chosen = min(self._turns, key=lambda node: node.queue + self._under_way[node.name])
        self._turns.remove(chosen)
        self._turns.append(chosen)
        return chosen

    def begin(self, node: Node) -> None:
        """It has been asked for something."""
        self._under_way[node.name] += 1

    def end(self, node: Node) -> None:
        """That has come to an end."""
        self._under_way[node.name] -= 1

    def strike(self, node: Node, error: KvstoreError) -> None:
        """It has failed."""
        self._strikes[node.name] += 1
        if self._strikes[node.name] == _STRIKES_MAX:
            logger.warning("a node takes nothing from this one: node=%s cause=%s", node.name, error)
            self._turns.remove(node)


class HandOver:
    """Asks the other nodes once, by `run`; `stop` ends that soon. Any thread may ask how far it is."""

    def __init__(
        self, store: LeavingStore, directory: Directory, clients: Clients, settings: HandOverSettings, clock: Clock
    ) -> None:
        self._store = store
        self._directory = directory
        self._clients = clients
        self._settings = settings
        self._clock = clock
        self._done = HandedOver()  # changed by the thread of `run` alone
        self._is_stopped = threading.Event()
        self._has_ended = threading.Event()

    def run(self) -> HandedOver:
        """Hand over within the time of the settings, and return then. Raises nothing of the directory's or a peer's."""
        done = self._done
        ends_at = self._clock.monotonic() + self._settings.seconds
        try:
            self._is_stopped.wait(min(self._settings.settle_seconds, self._settings.seconds))
            staying = _Staying([node for node in self._directory.nodes() if self._may_take(node)])
            if staying:
                self._hand_over(staying, ends_at)
        except KvstoreError as err:
            logger.warning("the directory did not answer, so less is handed over: cause=%s", err)
            done.failures += 1
        finally:
            self._has_ended.set()
        logger.info("handed over: prefixes=%d taken=%d failures=%d", done.prefixes, done.taken, done.failures)
        return done

    def stop(self) -> None:
        """Begin nothing more, and wait for nothing. Idempotent."""
        self._is_stopped.set()

    def wait(self, seconds: float) -> bool:
        """Whether it has ended, after that long at most."""
        return self._has_ended.wait(seconds)

    @property
    def progress(self) -> DrainProgress:
        """How far it is."""
        is_done, done = self._has_ended.is_set(), self._done
        return DrainProgress(
            is_draining=True,
            is_done=is_done,
            held=done.held,
            prefixes=done.prefixes,
            taken=done.taken,
            taken_bytes=done.taken_bytes,
            failures=done.failures,
        )

    def _may_take(self, node: Node) -> bool:
        if self._directory.is_self(node) or node.state is not NodeState.READY or not peer_address(node.addresses):
            return False
        return not self._settings.targets or node.name in self._settings.targets

    def _is_over(self, ends_at: float) -> bool:
        return self._is_stopped.is_set() or self._clock.monotonic() >= ends_at

    def _hand_over(self, staying: _Staying, ends_at: float) -> None:
        under_way: deque[_UnderWay] = deque()
        try:
            for prefix in self._store.hot_prefixes(self._settings.announce_tokens, self._settings.limit_bytes):
                keys = self._store.block_keys(prefix.namespace, prefix.tokens, root=prefix.root)
                if self._has_holder(prefix, keys, staying.slots):
                    self._done.held += 1
                    continue
                self._done.prefixes += 1
                while len(under_way) >= max(1, _UNDER_WAY_PER_NODE * len(staying)):
                    self._finish(under_way.popleft(), staying, ends_at)
                if not staying or self._is_over(ends_at):
                    break
                under_way += self._begin(prefix, len(keys), staying)
        finally:
            while under_way:
                self._finish(under_way.popleft(), staying, ends_at)

    def _has_holder(self, prefix: HotPrefix, keys: Sequence[bytes], slots: frozenset[int]) -> bool:
        """Whether one that stays says it has the last boundary of a prefix, and so all above it."""
        ends = boundary_blocks(prefix.namespace.layout.block_tokens, self._settings.announce_tokens, len(keys))
        (holders,) = self._directory.holders([keys[ends[-1] - 1]])
        return bool(holders & slots)

    def _begin(self, prefix: HotPrefix, blocks: int, staying: _Staying) -> list[_UnderWay]:
        """What is under way now: nothing where nobody takes it."""
        block_bytes = prefix.namespace.layout.block_bytes
        while staying:
            node = staying.next()
            try:
                prefetch = self._clients.client(node).prefetch(prefix.namespace, prefix.tokens, root=prefix.root)
            except KvstoreError as err:
                self._done.failures += 1
                staying.strike(node, err)
            else:
                staying.begin(node)
                return [_UnderWay(node, prefetch, blocks, block_bytes)]
        return []

    def _finish(self, begun: _UnderWay, staying: _Staying, ends_at: float) -> None:
        staying.end(begun.node)
        try:
            blocks = self._taken_blocks(begun, ends_at)
            if blocks >= begun.blocks:
                self._done.taken += 1
                self._done.taken_bytes += begun.blocks * begun.block_bytes
            begun.prefetch.cancel()
        except KvstoreError as err:
            self._done.failures += 1
            staying.strike(begun.node, err)

    def _taken_blocks(self, begun: _UnderWay, ends_at: float) -> int:
        """How many blocks of a prompt the node has, when it has ended there or the time is over."""
        blocks = begun.prefetch.wait(0.0)
        while not begun.prefetch.done and not self._is_over(ends_at):
            blocks = begun.prefetch.wait(min(_STEP_SECONDS, max(0.0, ends_at - self._clock.monotonic())))
        return blocks
