"""What the doctor says: findings, the one that costs most first, and what to do about each."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore.doctor.causes import Cause

if TYPE_CHECKING:
    from kvstore.doctor.causes import Diagnosis
    from kvstore.doctor.seen import SeenLookup

DAY_SECONDS = 86_400
_NAMESPACES_MAX = 256
_PLACES_MAX = 64  # at which prompts of one namespace part, by cause

ADVICE = {
    Cause.SHORT: "prompts shorter than a block are never stored: smaller blocks would take them, at more cost each",
    Cause.EVICTED: "it was stored and had to leave: more room would keep it; `kvstore stats --what-if` says how much",
    Cause.SPLIT: "the same tokens are kept apart by their {differs_in}: where results are the same, make that the same "
    "(a root is adapter, cache salt and weights epoch)",
    Cause.VOLATILE: "text that changes with each request (a date, an id, a name) stands before text that does not: "
    "put it behind, or into the user's turn",
    Cause.REORDERED: "the same parts come in another order (tools, documents, examples): sort them",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that costs tokens in one namespace.

    `parted_at` is the token at which most of its prompts part from what is stored, `block` the block it is in. `share`
    is of the namespace's requests, 0..1. `tokens_per_day` is what would not have to be computed again.
    """

    tenant: str
    model: str
    cause: Cause
    parted_at: int
    block: int
    requests: int
    share: float
    tokens_per_day: int
    advice: str


@dataclass(frozen=True, slots=True)
class Report:
    """What was seen in `seconds`, and what of it could be better.

    `causes` are requests by cause; `skipped` ones were not looked at.
    """

    seconds: float
    requests: int
    skipped: int
    causes: dict[Cause, int]
    findings: tuple[Finding, ...]


@dataclass(slots=True)
class _Tally:
    requests: int = 0
    lost_tokens: int = 0
    block_tokens: int = 1
    places: Counter[int] = field(default_factory=Counter)
    differs_in: Counter[tuple[str, ...]] = field(default_factory=Counter)


class Tallies:
    """Counts diagnoses by namespace and cause. Bounded; not thread-safe."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, str]] = Counter()
        self._tallies: defaultdict[tuple[tuple[str, str], Cause], _Tally] = defaultdict(_Tally)

    def add(self, lookup: SeenLookup, diagnosis: Diagnosis) -> None:
        """Count one. Beyond the most namespaces, new ones count as one together."""
        key = (lookup.home.tenant, lookup.home.model)
        if key not in self._requests and len(self._requests) >= _NAMESPACES_MAX:
            key = ("", "others")
        self._requests[key] += 1
        tally = self._tallies[key, diagnosis.cause]
        tally.requests += 1
        tally.lost_tokens += diagnosis.lost_tokens
        tally.block_tokens = lookup.block_tokens
        if diagnosis.parted_at in tally.places or len(tally.places) < _PLACES_MAX:
            tally.places[diagnosis.parted_at] += 1
        tally.differs_in[diagnosis.differs_in] += 1

    def report(self, seconds: float, skipped: int, tenant: str | None = None) -> Report:
        """All that was counted in so many seconds, or what is a tenant's own of it; `skipped` were not looked at."""
        mine = {key: tally for key, tally in self._tallies.items() if tenant in (None, key[0][0])}
        causes: Counter[Cause] = Counter()
        for (_, cause), tally in mine.items():
            causes[cause] += tally.requests
        requests = causes.total()
        seen = max(self._requests.total(), 1)
        scale = DAY_SECONDS / max(seconds, 1.0) * (seen + skipped) / seen
        findings = [self._finding(key, cause, tally, scale) for (key, cause), tally in mine.items() if cause in ADVICE]
        ordered = sorted(findings, key=lambda finding: (-finding.tokens_per_day, finding.tenant, finding.model))
        share = skipped if tenant is None else round(skipped * requests / seen)
        return Report(seconds, requests, share, dict(causes), tuple(ordered))

    def _finding(self, key: tuple[str, str], cause: Cause, tally: _Tally, scale: float) -> Finding:
        (parted_at, _), *_ = tally.places.most_common(1)
        (differs_in, _), *_ = tally.differs_in.most_common(1)
        return Finding(
            tenant=key[0],
            model=key[1],
            cause=cause,
            parted_at=parted_at,
            block=parted_at // tally.block_tokens,
            requests=tally.requests,
            share=tally.requests / self._requests[key],
            tokens_per_day=round(tally.lost_tokens * scale),
            advice=ADVICE[cause].format(differs_in=" and ".join(differs_in)),
        )
