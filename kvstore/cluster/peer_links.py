"""Connections to peers: one client for each living node, and how many fetches each of them serves us now."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from kvstore.cluster.peer_address import peer_address
from kvstore.transport.client import connect

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore.cluster.peer_settings import PeerCredentials
    from kvstore.nodes import Node
    from kvstore.transport.client import Client


@dataclass(frozen=True, slots=True)
class _Identity:
    """One start of one node at one address: whatever differs is asked by a connection of its own."""

    name: str
    incarnation: int
    address: str | None


class PeerLinks:
    """The clients of a node's peers. Thread-safe; `_lock` is never held while connecting or asking.

    A client connects at its first call, and its breaker keeps a peer that does not answer from being asked.
    """

    def __init__(self, credentials: PeerCredentials, *, fetches_per_holder_max: int) -> None:
        self._credentials = credentials
        self._fetches_max = fetches_per_holder_max
        self._lock = threading.Lock()
        self._clients: dict[_Identity, Client] = {}  # guarded by _lock, as all below
        self._fetches: Counter[str] = Counter()
        self._closed = False

    def client(self, node: Node) -> Client:
        """A client of a node that has an address. Raises ConfigError where the credentials do not go with it."""
        identity = _identity(node)
        assert identity.address is not None, "who has none is not asked"
        with self._lock:
            known = self._clients.get(identity)
        if known is not None:
            return known
        made = connect(identity.address, **asdict(self._credentials))
        with self._lock:
            kept = made if self._closed else self._clients.setdefault(identity, made)
        if kept is not made or self._closed:
            made.close()
        return kept

    @contextmanager
    def place(self, node: Node) -> Iterator[bool]:
        """A place among the fetches from a node for the time of the block; false if all are taken."""
        with self._lock:
            is_free = self._fetches[node.name] < self._fetches_max
            self._fetches[node.name] += is_free
        try:
            yield is_free
        finally:
            with self._lock:
                self._fetches[node.name] -= is_free
                self._fetches = +self._fetches

    def fetches(self, name: str) -> int:
        """How many fetches from a node are under way."""
        with self._lock:
            return self._fetches[name]

    def retain(self, nodes: Sequence[Node]) -> None:
        """Close the clients of all other nodes, and of earlier starts of these."""
        living = {_identity(node) for node in nodes}
        with self._lock:
            gone = [identity for identity in self._clients if identity not in living]
            closing = [self._clients.pop(identity) for identity in gone]
        for client in closing:
            client.close()

    def close(self) -> None:
        """End all connections; fetches under way fail. Idempotent."""
        with self._lock:
            self._closed = True
        self.retain([])


def _identity(node: Node) -> _Identity:
    return _Identity(node.name, node.incarnation, peer_address(node.addresses))
