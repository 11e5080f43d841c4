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

    A node takes at most `load_ratio_max` times the mean load of all, that of this prompt included. A token in an
    engine's own memory saves all of its prefill, one in host memory `host_worth` of that where an engine is chosen;
    between nodes, host memory counts as one, a token on disk as `disk_worth`, one of whose tier nothing is known as
    `peer_worth`.
    """

    load_ratio_max: float = 1.25
    disk_worth: float = 0.8
    peer_worth: float = 0.9
    host_worth: float = 0.95

    def __post_init__(self) -> None:
        if not self.load_ratio_max > 1:
            raise InvalidArgumentError(f"load_ratio_max is {self.load_ratio_max}, expected more than 1")
        for name in ("disk_worth", "peer_worth", "host_worth"):
            if not 0 <= getattr(self, name) <= 1:
                raise InvalidArgumentError(f"{name} is {getattr(self, name)}, expected 0..1")


DEFAULT_POLICY = RoutingPolicy()


@dataclass(frozen=True, slots=True)
class EngineMatch:
    """An engine that may be chosen: tokens of the prompt in its device's memory, and what its node holds."""

    name: str
    device_tokens: int = 0
    node: NodeMatch | None = None


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
    matches = [match for match in matches if match.node.state is NodeState.READY] or matches
    costs = {match.node.name: _computed_tokens(match.tiers, prompt_tokens, policy, 1.0) for match in matches}
    chosen = _choose(costs, prompt_tokens, waiting_tokens, affinity_key, policy)
    return next((match for match in matches if match.node.name == chosen), None)


def choose_engine(
    engines: Sequence[EngineMatch],
    prompt_tokens: int,
    waiting_tokens: Mapping[str, int],
    *,
    affinity_key: bytes = b"",
    policy: RoutingPolicy = DEFAULT_POLICY,
) -> EngineMatch | None:
    """The engine that a prompt should go to, as `choose_node` chooses nodes; None where there is none. O(engines)."""
    costs = {engine.name: engine_cost(engine, prompt_tokens, policy) for engine in engines}
    chosen = _choose(costs, prompt_tokens, waiting_tokens, affinity_key, policy)
    return next((engine for engine in engines if engine.name == chosen), None)


def engine_cost(engine: EngineMatch, prompt_tokens: int, policy: RoutingPolicy = DEFAULT_POLICY) -> float:
    """The tokens that an engine has to compute of a prompt, or what takes as long.

    Both holdings are prefixes, so of what the node holds only what is behind the engine's own counts.
    """
    held = 0 if engine.node is None else engine.node.tokens
    device = min(engine.device_tokens, prompt_tokens)
    if engine.node is None or held <= device:
        return float(prompt_tokens - device)
    share = (held - device) / held
    behind = {tier: tokens * share for tier, tokens in engine.node.tiers.items()}
    return _computed_tokens(behind, prompt_tokens - device, policy, policy.host_worth)


def affinity_order(names: Sequence[str], affinity_key: bytes) -> list[str]:
    """Names in the order of rendezvous hashing: that of a key stays as it is when others come and go."""
    return sorted(names, key=lambda name: _rank(name, affinity_key))


def _choose(
    costs: Mapping[str, float],
    prompt_tokens: int,
    waiting_tokens: Mapping[str, int],
    affinity_key: bytes,
    policy: RoutingPolicy,
) -> str | None:
    if prompt_tokens < 0 or any(tokens < 0 for tokens in waiting_tokens.values()):
        raise InvalidArgumentError(f"prompt_tokens is {prompt_tokens}, and no count of tokens may be below 0")
    if not costs:
        return None
    loads = {name: waiting_tokens.get(name, 0) for name in costs}
    limit = policy.load_ratio_max * (sum(loads.values()) + min(costs.values())) / len(costs)
    # Whoever has the least is always within the limit but for what this prompt adds, so somebody is left.
    allowed = [name for name in costs if loads[name] <= limit]
    return min(allowed, key=lambda name: (costs[name] + loads[name], _rank(name, affinity_key)))


def _computed_tokens(
    tiers: Mapping[Tier, float], prompt_tokens: int, policy: RoutingPolicy, host_worth: float
) -> float:
    """What has to be computed of a prompt, or what takes as long."""
    worth = {Tier.HOST: host_worth, Tier.DISK: policy.disk_worth, Tier.PEER: policy.peer_worth}
    saved = sum(tokens * worth.get(tier, 1.0) for tier, tokens in tiers.items())
    return max(0.0, prompt_tokens - saved)


def _rank(name: str, affinity_key: bytes) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=8, key=affinity_key[:64]).digest()
