"""Values about the nodes of a cluster."""

from __future__ import annotations

from dataclasses import dataclass
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
    all in the tier PEER.
    """

    node: Node
    tokens: int
    tiers: dict[Tier, int]


def boundary_step(announce_tokens: int, block_tokens: int) -> int:
    """How many blocks there are from one boundary to the next: `announce_tokens`, rounded to whole blocks."""
    return max(1, round(announce_tokens / block_tokens))
