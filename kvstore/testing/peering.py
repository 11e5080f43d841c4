"""Nodes that share blocks, in this process: each a store with its server, its place in a directory and its peers."""

from __future__ import annotations

import secrets as randomness
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

from kvstore.clock import SystemClock
from kvstore.cluster.directory import NodeProfile
from kvstore.cluster.memory_directory import MemoryDirectory
from kvstore.cluster.peer_lookup import boundary_blocks
from kvstore.cluster.peer_settings import PeerCredentials, PeerSettings
from kvstore.cluster.peers import ClusterPeers
from kvstore.store import open_store
from kvstore.testing.blocks import store_prompt
from kvstore.testing.serving import ServedStore

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from kvstore.cluster.directory import Directory
    from kvstore.cluster.memory_directory import SharedDirectory
    from kvstore.store import StoreSettings
    from kvstore.transport.limits import NamespaceSecrets
    from kvstore.transport.security import Security
    from kvstore.types import Namespace, Root

HOST_BYTES = 16 << 20
NO_CREDENTIALS = PeerCredentials()


class PeerNode:
    """A node of a cluster in memory. `announced_address` is where peers are told to find it, by default where it is."""

    def __init__(
        self,
        shared: SharedDirectory,
        name: str,
        *,
        listen: str = "127.0.0.1:0",
        announced_address: str | None = None,
        host_bytes: int = HOST_BYTES,
        settings: StoreSettings | None = None,
        peer_settings: PeerSettings | None = None,
        credentials: PeerCredentials = NO_CREDENTIALS,
        secrets: NamespaceSecrets | None = None,
        security: Security | None = None,
        directory: Directory | None = None,
    ) -> None:
        self.name = name
        self.peer_settings = peer_settings or PeerSettings()
        with ExitStack() as stack:
            self.store = stack.enter_context(open_store(None, host_bytes=host_bytes, settings=settings))
            served = ServedStore(self.store, [listen], secrets=secrets, security=security)
            stack.callback(served.stop)
            self.address = served.addresses[0]
            self.membership = MemoryDirectory(shared)
            profile = NodeProfile(name, randomness.token_bytes(16), (announced_address or self.address,))
            self.node = self.membership.join(profile)
            self.peers = ClusterPeers(
                self.store,
                self.membership if directory is None else directory,
                settings=self.peer_settings,
                credentials=credentials,
                clock=SystemClock(),
            )
            stack.callback(self.peers.close)
            self.store.share_with(self.peers)
            self._stack = stack.pop_all()

    def announce(self, namespace: Namespace, tokens: Sequence[int], root: Root | None = None) -> list[bytes]:
        """Say that this node holds a prompt, whether it does or not; returns the keys of the boundaries."""
        keys = boundary_keys(self, namespace, tokens, root)
        self.membership.announce(keys)
        return keys

    def store_and_announce(self, namespace: Namespace, tokens: Sequence[int], root: Root | None = None) -> None:
        """Store the right bytes of a prompt, and say so."""
        store_prompt(self.store, namespace, tokens, root=root)
        self.announce(namespace, tokens, root)

    def held(self, namespace: Namespace, tokens: Sequence[int], root: Root | None = None) -> int:
        """Leading blocks of a prompt that are here."""
        return self.store.match(namespace, tokens, root=root, touch=False).blocks

    def close(self) -> None:
        """End peers, server and store; idempotent."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def boundary_keys(node: PeerNode, namespace: Namespace, tokens: Sequence[int], root: Root | None = None) -> list[bytes]:
    """The keys by which the directory knows a prompt."""
    keys = node.store.block_keys(namespace, tokens, root=root)
    ends = boundary_blocks(namespace.layout.block_tokens, node.peer_settings.announce_tokens, len(keys))
    return [keys[end - 1] for end in ends]
