"""Fetch or recompute, from whom, and how long to wait for another: decisions as pure functions of plain values.

No I/O, no locks, no clock. A fetch costs the time until the bytes are there. A prefill costs its time too, and on top
of that a GPU that could have done something else: `gpu_weight` says how many seconds of waiting one GPU second is
worth.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from kvstore.cluster.prefill import PrefillModel
    from kvstore.nodes import Node

# Fewer tokens than this are computed before a fetch is worth its calls.
FETCH_TOKENS_MIN = 256
# How far waits for another's computation are spread, so that those who wait do not all begin to compute at once.
_JITTER_RATIO = 0.2
# Of what others wait for at a holder, each takes as much of its bandwidth as this fetch.
_QUEUE_MAX = 1024


@dataclass(frozen=True, slots=True)
class Path:
    """What is known of the way to a peer: until the first byte comes, and how fast they come then."""

    latency_seconds: float
    bytes_per_second: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """A peer that may have a prefix: how many leading tokens, how many transfers wait there, and the way to it."""

    node: Node
    tokens: int
    queue: int
    path: Path


@dataclass(frozen=True, slots=True)
class Need:
    """What a prompt lacks: it has `prompt_tokens`, of which `present_tokens` are here already."""

    present_tokens: int
    prompt_tokens: int
    bytes_per_token: float


class Choice(enum.Enum):
    """What to do about what a prompt lacks. The values are what counters call it."""

    FETCH = "fetch"
    RECOMPUTE = "recompute"  # a peer has it, and computing is cheaper
    SHORT = "short"  # too little to ask anybody
    ABSENT = "absent"  # no peer has more than is here


@dataclass(frozen=True, slots=True)
class Plan:
    """A choice; the peer to fetch from, or None where nothing is to be fetched."""

    choice: Choice
    candidate: Candidate | None = None


def fetch_seconds(candidate: Candidate, tokens: int, bytes_per_token: float) -> float:
    """How long it takes to fetch so many tokens: those who wait there share the bandwidth with us."""
    path = candidate.path
    sharers = 1 + min(max(candidate.queue, 0), _QUEUE_MAX)
    return path.latency_seconds + sharers * tokens * bytes_per_token / path.bytes_per_second


def is_worth_asking(need: Need) -> bool:
    """Whether a prompt lacks enough to ask peers for it."""
    return need.prompt_tokens - need.present_tokens >= FETCH_TOKENS_MIN


def make_plan(
    need: Need, candidates: Sequence[Candidate], prefill: PrefillModel, gpu_weight: float, random: Random
) -> Plan:
    """What to do. Of the peers that have most, the one whose bytes come first is asked; of equals, any."""
    if not is_worth_asking(need):
        return Plan(Choice.SHORT)
    useful = [candidate for candidate in candidates if _gain(need, candidate) >= FETCH_TOKENS_MIN]
    if not useful:
        return Plan(Choice.ABSENT)
    most_tokens = max(candidate.tokens for candidate in useful)
    deepest = [candidate for candidate in useful if candidate.tokens == most_tokens]
    tokens = _gain(need, deepest[0])
    seconds, _, chosen = min(
        ((fetch_seconds(candidate, tokens, need.bytes_per_token), random.random(), candidate) for candidate in deepest),
        key=lambda costed: costed[:2],
    )
    compute_seconds = prefill.seconds(need.present_tokens, tokens)
    if seconds >= compute_seconds * (1 + gpu_weight):
        return Plan(Choice.RECOMPUTE)
    return Plan(Choice.FETCH, chosen)


def claim_seconds(need: Need, prefill: PrefillModel, settle_seconds: float, most_seconds: float) -> float:
    """How long to claim what is about to be computed: twice as long as that should take, and until others see it."""
    missing_tokens = need.prompt_tokens - need.present_tokens
    return min(most_seconds, 2 * prefill.seconds(need.present_tokens, missing_tokens) + settle_seconds)


def patience_seconds(
    need: Need, prefill: PrefillModel, claimed_seconds: float, gpu_weight: float, random: Random
) -> float:
    """How long to wait for another who computes it: no longer than its claim, nor than computing it would cost.

    To wait for one's own prefill time alone would be of no use to those who ask when the other begins: they would give
    up just before its blocks are there. The cost counts the GPU, too, as that of a fetch does.
    """
    own_seconds = prefill.seconds(need.present_tokens, need.prompt_tokens - need.present_tokens)
    cost_seconds = own_seconds * (1 + gpu_weight)
    return min(claimed_seconds, cost_seconds * (1 - _JITTER_RATIO * random.random()))


def _gain(need: Need, candidate: Candidate) -> int:
    return min(candidate.tokens, need.prompt_tokens) - need.present_tokens
