"""A directory in this process: for a node alone, and for tests of many nodes in one."""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvstore.cluster.directory import ALL_GROUPS, DELETIONS_MAX, HOLDERS_MAX, SLOTS_MAX, Renewal
from kvstore.cluster.peer_address import peer_address
from kvstore.errors import DirectoryUnavailableError, NodeNameTakenError
from kvstore.nodes import Node, NodeState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvstore.clock import Clock
    from kvstore.cluster.directory import NodeProfile
    from kvstore.nodes import NodeReport

ENTRIES_MAX = 1 << 20


@dataclass(slots=True)
class _Lease:
    node: Node
    identity: bytes
    until: float
    renewed_at: float


@dataclass(frozen=True, slots=True)
class _Held:
    incarnation: int
    token: object
    until: float


@dataclass(slots=True)
class SharedDirectory:
    """What several MemoryDirectory of one process have in common. Its lock guards every field and is never held while
    calling out.

    Entries beyond `entries_max` push out those announced longest ago.
    """

    clock: Clock
    lease_seconds: float = 15.0
    entry_seconds: float = 3600.0
    entries_max: int = ENTRIES_MAX
    lock: threading.Lock = field(default_factory=threading.Lock)
    leases: dict[int, _Lease] = field(default_factory=dict)  # by slot
    free_from: dict[int, float] = field(default_factory=dict)  # by slot, of those that were given back
    departed: dict[int, Node] = field(default_factory=dict)  # by slot, those that ended and were not given again
    entries: OrderedDict[bytes, dict[int, float]] = field(default_factory=OrderedDict)  # slots, and until when, by key
    deletions: dict[bytes, int] = field(default_factory=dict)  # epochs by namespace
    claims: dict[bytes, _Held] = field(default_factory=dict)

    def living(self) -> dict[int, Node]:
        """Nodes whose lease stands, by slot; ends the leases that are over. `lock` must be held."""
        now = self.clock.monotonic()
        for slot in [slot for slot, lease in self.leases.items() if lease.until <= now]:
            self.end(slot)
        return {
            slot: replace(lease.node, age_seconds=now - lease.renewed_at) for slot, lease in sorted(self.leases.items())
        }

    def end(self, slot: int) -> None:
        """End a lease; `lock` must be held."""
        lease = self.leases.pop(slot, None)
        if lease is not None:
            self.departed[slot] = gone_node(lease.node.name, slot)
            self.free_from[slot] = self.clock.monotonic() + self.entry_seconds

    def take_slot(self) -> int:
        """The lowest slot of which no entry can be left; `lock` must be held."""
        now = self.clock.monotonic()
        for slot in range(SLOTS_MAX):
            if slot not in self.leases and self.free_from.get(slot, now) <= now:
                self.free_from.pop(slot, None)
                self.departed.pop(slot, None)
                return slot
        raise DirectoryUnavailableError(f"all {SLOTS_MAX} slots of the directory are in use; try again in an hour")


class MemoryDirectory:
    """A Membership of one node in a SharedDirectory."""

    def __init__(self, shared: SharedDirectory) -> None:
        self._shared = shared
        self._profile: NodeProfile | None = None
        self._node: Node | None = None

    def join(self, profile: NodeProfile) -> Node:
        """Take a lease; see Membership."""
        shared = self._shared
        self._profile = profile
        with shared.lock:
            for slot, node in shared.living().items():
                if node.name == profile.name:
                    if shared.leases[slot].identity != profile.identity:
                        raise name_taken(profile.name)
                    shared.end(slot)
            self._node = self._take(profile, secrets.randbits(63))
            return self._node

    def renew(self, report: NodeReport) -> Renewal:
        """Renew the lease; see Membership."""
        shared = self._shared
        with shared.lock:
            node = reported(self._joined(), report)
            living = shared.living()
            lost: frozenset[int] = frozenset()
            if living.get(node.slot, node).incarnation != node.incarnation or node.slot not in living:
                if any(other.name == node.name for other in living.values()):
                    raise name_taken(node.name)
                assert self._profile is not None, "who has a node has a profile"
                node = reported(self._take(self._profile, node.incarnation), report)
                lost = ALL_GROUPS
            shared.leases[node.slot].node = node
            shared.leases[node.slot].renewed_at = shared.clock.monotonic()
            shared.leases[node.slot].until = shared.clock.monotonic() + shared.lease_seconds
            self._node = node
            return Renewal(node, lost)

    def announce(self, keys: Sequence[bytes]) -> None:
        """Say what this node holds; see Membership."""
        shared = self._shared
        with shared.lock:
            slot = self._joined().slot
            until = shared.clock.monotonic() + shared.entry_seconds
            for key in keys:
                holders = shared.entries.setdefault(key, {})
                shared.entries.move_to_end(key)
                holders.pop(slot, None)
                holders[slot] = until
                if len(holders) > HOLDERS_MAX:
                    del holders[next(iter(holders))]
            while len(shared.entries) > shared.entries_max:
                shared.entries.popitem(last=False)

    def withdraw(self, keys: Sequence[bytes]) -> None:
        """Say what it holds no more; see Membership."""
        shared = self._shared
        with shared.lock:
            slot = self._joined().slot
            for key in keys:
                holders = shared.entries.get(key, {})
                holders.pop(slot, None)
                if not holders:
                    shared.entries.pop(key, None)

    def leave(self) -> None:
        """End the lease; see Membership."""
        with self._shared.lock:
            node, self._node = self._node, None
            lease = None if node is None else self._shared.leases.get(node.slot)
            if node is not None and lease is not None and lease.node.incarnation == node.incarnation:
                self._shared.end(node.slot)

    def bury(self, epochs: Mapping[bytes, int]) -> Mapping[bytes, int]:
        """Tell of deleted namespaces; see Membership."""
        shared = self._shared
        with shared.lock:
            told = {ns_id: max(epoch, shared.deletions.get(ns_id, 0)) for ns_id, epoch in epochs.items()}
            latest = sorted({**shared.deletions, **told}.items(), key=lambda entry: -entry[1])[:DELETIONS_MAX]
            shared.deletions = dict(latest)
            return shared.deletions

    def close(self) -> None:
        """Nothing to let go of."""

    def nodes(self) -> Sequence[Node]:
        """The living nodes; see Directory."""
        with self._shared.lock:
            return tuple(self._shared.living().values())

    def departed(self) -> Sequence[Node]:
        """Nodes that are gone; see Directory."""
        with self._shared.lock:
            names = {node.name for node in self._shared.living().values()}
            return tuple(node for _, node in sorted(self._shared.departed.items()) if node.name not in names)

    def holders(self, keys: Sequence[bytes]) -> Sequence[frozenset[int]]:
        """Who holds boundaries; see Directory."""
        shared = self._shared
        with shared.lock:
            living, now = shared.living(), shared.clock.monotonic()
            return tuple(
                frozenset(slot for slot, until in shared.entries.get(key, {}).items() if slot in living and until > now)
                for key in keys
            )

    def is_self(self, node: Node) -> bool:
        """Whether it is this node; see Directory."""
        return is_same_node(node, self._node, self._profile)

    def claim(self, key: bytes, seconds: float) -> MemoryClaim | None:
        """Claim a key; see Directory."""
        shared = self._shared
        with shared.lock:
            if self._left(key) is not None:
                return None
            held = _Held(self._joined().incarnation, object(), shared.clock.monotonic() + seconds)
            shared.claims[key] = held
            return MemoryClaim(shared, key, held)

    def claimed(self, key: bytes) -> float | None:
        """What a claim has left; see Directory."""
        with self._shared.lock:
            return self._left(key)

    def _left(self, key: bytes) -> float | None:
        """The same; drops claims whose time is over, so that there are no more than keys being computed.

        One whose owner's lease has ended counts again where the owner takes its lease anew in time.
        """
        shared = self._shared
        now = shared.clock.monotonic()
        for over in [key for key, held in shared.claims.items() if held.until <= now]:
            del shared.claims[over]
        held = shared.claims.get(key)
        alive = {node.incarnation for node in shared.living().values()}
        return None if held is None or held.incarnation not in alive else held.until - now

    def _joined(self) -> Node:
        if self._node is None:
            raise DirectoryUnavailableError("this node has not joined the directory yet, or left it")
        return self._node

    def _take(self, profile: NodeProfile, incarnation: int) -> Node:
        shared = self._shared
        node = Node(
            profile.name,
            shared.take_slot(),
            incarnation,
            profile.addresses,
            profile.host_bytes,
            profile.disk_bytes,
            queue=0,
        )
        now = shared.clock.monotonic()
        shared.leases[node.slot] = _Lease(node, profile.identity, now + shared.lease_seconds, now)
        return node


class MemoryClaim:
    """A Claim in a SharedDirectory."""

    def __init__(self, shared: SharedDirectory, key: bytes, held: _Held) -> None:
        self._shared = shared
        self._key = key
        self._held = held

    def renew(self, seconds: float) -> bool:
        """Hold it for longer; see Claim."""
        with self._shared.lock:
            now = self._shared.clock.monotonic()
            held = self._shared.claims.get(self._key)
            if held is None or held.token is not self._held.token or held.until <= now:
                return False
            self._shared.claims[self._key] = replace(held, until=now + seconds)
            return True

    def release(self) -> None:
        """End it; see Claim."""
        with self._shared.lock:
            held = self._shared.claims.get(self._key)
            if held is not None and held.token is self._held.token:
                del self._shared.claims[self._key]


def reported(node: Node, report: NodeReport) -> Node:
    """A node as it says it is now."""
    return replace(
        node,
        queue=report.queue,
        state=report.state,
        version=report.version,
        host_used_bytes=report.host_used_bytes,
        disk_used_bytes=report.disk_used_bytes,
        leases=report.leases,
        deletions=report.deletions,
    )


def gone_node(name: str, slot: int) -> Node:
    """What is left of a node whose lease is over."""
    return Node(name, slot, 0, (), 0, 0, 0, state=NodeState.GONE)


def is_same_node(node: Node, own: Node | None, profile: NodeProfile | None) -> bool:
    """What Directory.is_self answers to a node of this lease and profile, either of which it may not have yet."""
    if own is not None and node.incarnation == own.incarnation:
        return True
    address = peer_address(node.addresses)
    return profile is not None and address is not None and address == peer_address(profile.addresses)


def name_taken(name: str) -> NodeNameTakenError:
    """What is raised where a living node of another identity has the name."""
    return NodeNameTakenError(
        f"a living node of this cluster is called {name!r} already, expected a name of this node's own; set another "
        "one (--node), or wait for the lease of one that died to end"
    )
