"""Values about the nodes of a cluster."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.types import Tier


@dataclass(frozen=True, slots=True)
class Node:
    """A living node, as its lease says."""

    name: str
    slot: int  # of this incarnation in entries
    incarnation: int  # another one at each start
    addresses: tuple[str, ...]  # where peers reach its fast lane
    host_bytes: int
    disk_bytes: int
    queue: int  # transfers that peers wait for here, as last told


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


def boundary_step(announce_tokens: int, block_tokens: int) -> int:
    """How many blocks there are from one boundary to the next: `announce_tokens`, rounded to whole blocks."""
    return max(1, round(announce_tokens / block_tokens))
