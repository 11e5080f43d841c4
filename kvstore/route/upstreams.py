"""The servers behind the proxy: which of them are well, what each has to do, and in which order to try them."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore.cluster.routing import DEFAULT_POLICY, EngineMatch, affinity_order, choose_engine, engine_cost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kvstore.cluster.routing import RoutingPolicy

DECODE_TOKENS = 64  # what an answer under way weighs, in tokens of a prompt that waits


@dataclass(slots=True)
class Upstream:
    """One server. Its name is that of its engine in `engine_events`, `node` that of the sidecar beside it."""

    name: str
    url: str
    node: str = ""
    is_healthy: bool = True
    waiting_tokens: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)

    def count(self, outcome: str) -> None:
        """One more request of this outcome."""
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    @contextmanager
    def busy(self, prompt_tokens: int) -> Iterator[Callable[[], None]]:
        """It has so much to compute, until what this gives is called at the first byte; then an answer under way."""
        weights = [prompt_tokens + DECODE_TOKENS]
        self.waiting_tokens += weights[0]

        def answers() -> None:
            self.waiting_tokens += DECODE_TOKENS - weights[0]
            weights[0] = DECODE_TOKENS

        try:
            yield answers
        finally:
            self.waiting_tokens -= weights[0]


def order_of(
    upstreams: Sequence[Upstream],
    matches: Mapping[str, EngineMatch],
    prompt_tokens: int,
    affinity_key: bytes,
    policy: RoutingPolicy = DEFAULT_POLICY,
) -> list[tuple[Upstream, int]]:
    """All servers, the best first, those that are not well last, and what each would have to compute of the prompt.

    Where nobody is known to hold any of it the affinity key decides, so that the same beginning goes to the same
    server, as long as that has no more than its share of all work. O(upstreams squared).
    """
    engines = {upstream.name: matches.get(upstream.name, EngineMatch(upstream.name)) for upstream in upstreams}
    costs = {name: round(engine_cost(engine, prompt_tokens, policy)) for name, engine in engines.items()}
    is_known = any(costs[upstream.name] < prompt_tokens for upstream in upstreams if upstream.is_healthy)
    left = {upstream.name: upstream for upstream in upstreams if upstream.is_healthy}
    order = []
    while left:
        waiting = {name: upstream.waiting_tokens for name, upstream in left.items()}
        if is_known:
            chosen = choose_engine(
                [engines[name] for name in left], prompt_tokens, waiting, affinity_key=affinity_key, policy=policy
            )
            name = next(iter(left)) if chosen is None else chosen.name
        else:
            limit = policy.load_ratio_max * (sum(waiting.values()) + prompt_tokens) / len(left)
            names = affinity_order(list(left), affinity_key)
            name = next((name for name in names if waiting[name] <= limit), names[0])
        order.append((left.pop(name), costs[name]))
    return order + [(upstream, costs[upstream.name]) for upstream in upstreams if not upstream.is_healthy]
