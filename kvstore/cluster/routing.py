"""Which node a prompt should go to: a reference policy for routers, as a pure function of what `Locate` answers.

A node that holds much of a prompt saves its prefill, and one with a long queue makes it wait; what is sent where the
prefix lies makes that node busier still. So each node costs the tokens that it has to compute and those that wait
before them, and the cheapest is taken, unless it has more than its share of all work: then affinity ends. That bounds
the load of a node that holds what everybody asks for, as bounded-load consistent hashing does (Mirrokni, Thorup and
Zadimoghaddam, "Consistent Hashing with Bounded Loads", https://arxiv.org/abs/1608.01350).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.errors import InvalidArgumentError
from kvstore.nodes import NodeState
from kvstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvstore.nodes import NodeMatch


@dataclass(frozen=True, slots=True)
class RoutingPolicy:
    """What counts how much.

    A node takes at most `load_ratio_max` times the mean load of all, that of this prompt included. A token on disk
    saves `disk_worth` of one in host memory, one of whose tier nothing is known `peer_worth`.
    """

    load_ratio_max: float = 1.25
    disk_worth: float = 0.8
    peer_worth: float = 0.9

    def __post_init__(self) -> None:
        if not self.load_ratio_max > 1:
            raise InvalidArgumentError(f"load_ratio_max is {self.load_ratio_max}, expected more than 1")
        for name in ("disk_worth", "peer_worth"):
            if not 0 <= getattr(self, name) <= 1:
                raise InvalidArgumentError(f"{name} is {getattr(self, name)}, expected 0..1")


DEFAULT_POLICY = RoutingPolicy()


def choose_node(
    matches: Sequence[NodeMatch],
    prompt_tokens: int,
    waiting_tokens: Mapping[str, int],
    *,
    affinity_key: bytes = b"",
    policy: RoutingPolicy = DEFAULT_POLICY,
) -> NodeMatch | None:
    """The node that a prompt should go to; None where there is none.

    `matches` is the answer of `Locate`, one entry for each node that may be chosen, and `waiting_tokens` what each of
    them has yet to compute, by name, as the router knows it; 0 where it does not. Among equals `affinity_key`, such as
    the first block key or the id of a conversation, decides by rendezvous hashing, so that the same prompt goes to the
    same node before anybody holds it. Nodes that drain are chosen where there are no others. O(nodes).
    """
    if prompt_tokens < 0 or any(tokens < 0 for tokens in waiting_tokens.values()):
        raise InvalidArgumentError(f"prompt_tokens is {prompt_tokens}, and no count of tokens may be below 0")
    if not matches:
        return None
    matches = [match for match in matches if match.node.state is NodeState.READY] or matches
    loads = {match.node.name: waiting_tokens.get(match.node.name, 0) for match in matches}
    costs = {match.node.name: _computed_tokens(match, prompt_tokens, policy) for match in matches}
    limit = policy.load_ratio_max * (sum(loads.values()) + min(costs.values())) / len(matches)
    # Whoever has the least is always within the limit but for what this prompt adds, so somebody is left.
    allowed = [match for match in matches if loads[match.node.name] <= limit]

    def order(match: NodeMatch) -> tuple[float, bytes]:
        name = match.node.name
        return (costs[name] + loads[name], _rank(name, affinity_key))

    return min(allowed, key=order)


def _computed_tokens(match: NodeMatch, prompt_tokens: int, policy: RoutingPolicy) -> float:
    """What a node has to compute of a prompt, or what takes as long."""
    worth = {Tier.DISK: policy.disk_worth, Tier.PEER: policy.peer_worth}
    saved = sum(tokens * worth.get(tier, 1.0) for tier, tokens in match.tiers.items())
    return max(0.0, prompt_tokens - saved)


def _rank(name: str, affinity_key: bytes) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=8, key=affinity_key[:64]).digest()
