"""Values about the nodes of a cluster."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.types import Tier


class NodeState(enum.Enum):
    """What a node is up to. The values are what leases and commands call it."""

    READY = "ready"
    DRAINING = "draining"  # it serves what it has, and takes nothing from others any more
    GONE = "gone"  # its lease is over


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What a node says of itself each time that it renews its lease."""

    queue: int = 0
    state: NodeState = NodeState.READY
    version: str = ""
    host_used_bytes: int = 0
    disk_used_bytes: int = 0
    leases: int = 0
    deletions: int = 0  # the epoch of the last deletion of a namespace that it has applied


@dataclass(frozen=True, slots=True)
class Node:
    """A node, as its lease says. Of one that is gone no more is known than its name and slot."""

    name: str
    slot: int  # of this incarnation in entries
    incarnation: int  # another one at each start
    addresses: tuple[str, ...]  # where peers reach its fast lane
    host_bytes: int
    disk_bytes: int
    queue: int  # transfers that peers wait for here, as last told
    state: NodeState = NodeState.READY
    version: str = ""  # empty: of a release before leases had it
    host_used_bytes: int = 0
    disk_used_bytes: int = 0
    leases: int = 0
    deletions: int = 0
    age_seconds: float = field(default=0.0, compare=False)  # since it renewed its lease


@dataclass(frozen=True, slots=True)
class NodeMatch:
    """How many tokens of a prompt a node holds, by tier.

    Of the node that was asked it is exact. Of others it is what the directory says: the last boundary that they hold,
    all in the tier PEER. `device_tokens` is what engines that this node follows hold in their devices' memory, by
    the engine's name, whether or not the node holds it too; it is no part of `tokens`.
    """

    node: Node
    tokens: int
    tiers: dict[Tier, int]
    device_tokens: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DrainOrder:
    """What a node that drains hands over at most, for how long, and to whom; no names: to all that are ready."""

    seconds: float
    limit_bytes: int
    targets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DrainProgress:
    """How far a hand-over is. Prefixes are the longest ones, each with its head.

    `held` are those that others had, `prefixes` those that none had, `taken` of these what a node has all of by now,
    with so many bytes, heads that several share counted with each. `failures` are calls that failed.
    """

    is_draining: bool = False
    is_done: bool = True
    held: int = 0
    prefixes: int = 0
    taken: int = 0
    taken_bytes: int = 0
    failures: int = 0


@dataclass(frozen=True, slots=True)
class Deletion:
    """What came of deleting a namespace: `is_told` says whether the directory knows; else it will, once it answers."""

    epoch: int
    blocks: int
    is_told: bool


def boundary_step(announce_tokens: int, block_tokens: int) -> int:
    """How many blocks there are from one boundary to the next: `announce_tokens`, rounded to whole blocks."""
    return max(1, round(announce_tokens / block_tokens))
