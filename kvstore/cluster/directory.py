"""What nodes tell each other about themselves: who lives, who holds which prefix, who computes one just now.

A directory holds hints. Whoever reads one asks the holder, whose tree decides, so a stale entry costs a refused fetch
and never a wrong block. Entries name *boundaries*, by their 16-byte block keys, which name namespace, layout and root
too: blocks whose end is a multiple of `cluster.announce_tokens` tokens of their prefix. Nothing else of a prompt, and
no secret, is ever in a directory.

    node      a name, and at each start a new incarnation
    slot      the number that stands for one incarnation in entries; free for another one only when no entry of the
              old one can be left
    lease     what keeps a node in `nodes()`; renewed by `renew()`, over after `lease_seconds` without
    group     one of 64 equal shares of all keys: what is lost at a time, for instance with a shard
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvstore.nodes import Node as Node  # noqa: TC001  # offered here, to those who speak of directories

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvstore.nodes import NodeReport

GROUPS = 64
SLOTS_MAX = 1 << 16
DELETIONS_MAX = 1024  # of namespaces, that are remembered: those made last
HOLDERS_MAX = 20  # that one entry names; those told of last are kept
ALL_GROUPS = frozenset(range(GROUPS))


@dataclass(frozen=True, slots=True)
class NodeProfile:
    """What a node says of itself when it joins.

    `identity` tells a node that was started again from another one of the same name: it is kept with the node's data,
    which one process has at a time.
    """

    name: str
    identity: bytes
    addresses: tuple[str, ...] = ()
    host_bytes: int = 0
    disk_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Renewal:
    """What came of renewing a lease: the node as it stands, and the groups whose entries are to be announced again."""

    node: Node
    lost: frozenset[int] = frozenset()


class Claim(Protocol):
    """That this node computes something just now. It ends by itself when its time is over."""

    def renew(self, seconds: float) -> bool:
        """Hold it for so long from now on; False where it has ended, or is another's by now."""
        ...

    def release(self) -> None:
        """End it, if it is still this node's. Idempotent."""
        ...


class Directory(Protocol):
    """What is asked about the other nodes.

    Every call is bounded in time and raises DirectoryUnavailableError where the directory does not answer. Any thread
    may call.
    """

    def nodes(self) -> Sequence[Node]:
        """The living nodes, this one included, by slot; known for a lease's time at most."""
        ...

    def departed(self) -> Sequence[Node]:
        """Nodes whose lease is over and whose slot is not given again yet, in the state GONE."""
        ...

    def holders(self, keys: Sequence[bytes]) -> Sequence[frozenset[int]]:
        """For each key of a boundary the slots of living nodes that say they hold it, this one included."""
        ...

    def is_self(self, node: Node) -> bool:
        """Whether a living node is this one: its own lease, or one that sends whoever asks to this node's own address.

        Not its name: as long as a living node has the name of this one, this one has no lease, and that is a peer. A
        lease at this node's address is left of an earlier start, whose blocks nobody has.
        """
        ...

    def claim(self, key: bytes, seconds: float) -> Claim | None:
        """Claim a key; None where somebody living has it, this node included."""
        ...

    def claimed(self, key: bytes) -> float | None:
        """Seconds that a living node's claim of a key has left; None where there is none."""
        ...


class Membership(Directory, Protocol):
    """A directory with this node in it, which tells what it holds. One thread renews, announces and withdraws."""

    def join(self, profile: NodeProfile) -> Node:
        """Take a lease under a new incarnation and a slot of its own. Nothing is announced in it yet.

        A living node of the same name and identity is an earlier start of this one and gives way; one of another
        identity stays, and NodeNameTakenError is raised.
        """
        ...

    def renew(self, report: NodeReport) -> Renewal:
        """Renew the lease, and see whether the directory still has all it was told.

        A lease that was lost is taken again, if possible with its slot. Raises NodeNameTakenError where the name has
        become another's meanwhile.
        """
        ...

    def announce(self, keys: Sequence[bytes]) -> None:
        """Say that this node holds boundaries. Idempotent; to be repeated once in `entry_seconds / 2`."""
        ...

    def withdraw(self, keys: Sequence[bytes]) -> None:
        """Say that it holds them no more. Idempotent."""
        ...

    def leave(self) -> None:
        """End the lease at once; entries that were not withdrawn are masked from now on."""
        ...

    def bury(self, epochs: Mapping[bytes, int]) -> Mapping[bytes, int]:
        """Tell of deleted namespaces; those that anybody told of, the largest epoch of each, DELETIONS_MAX at most.

        Works without having joined. See deletions.py.
        """
        ...

    def close(self) -> None:
        """Let go of connections. Idempotent; does not leave."""
        ...


def key_group(key: bytes) -> int:
    """The group of a key: its first six bits."""
    return key[0] >> 2
