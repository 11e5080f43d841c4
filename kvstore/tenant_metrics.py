"""Metrics by tenant and model, for those that the operator lists; a part of kvstore.metrics.

What is not listed counts under `other`, so that sums over the labels are those of all. With 32 tenants and 16 models
there are at most 33 x 17 pairs, whoever calls.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore.metrics_config import OTHER
from kvstore.source_metric import SourceMetric
from kvstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstore.metrics_config import MetricsConfig
    from kvstore.stats import NamespaceStats
    from kvstore.types import PrefixMatch

_HOST = Tier.HOST.name.lower()


@dataclass(frozen=True, slots=True)
class TenantUse:
    """What each pair of tenant and model asked for and found since the start, and holds now, the latter by tier."""

    lookup_tokens: dict[tuple[str, str], int] = field(default_factory=dict)
    hit_tokens: dict[tuple[str, str, str], int] = field(default_factory=dict)
    held_bytes: dict[tuple[str, str, str], int] = field(default_factory=dict)


@dataclass(slots=True)
class _Counts:
    """Of one pair of tenant and model; hits by the number of their tier."""

    lookup_tokens: int = 0
    hit_tokens: list[int] = field(default_factory=lambda: [0] * (max(Tier) + 1))


class TenantCounts:
    """Told of each lookup that counts. Thread-safe; O(runs of the match), and a lock of its own for additions only."""

    def __init__(self, config: MetricsConfig, lower_tier: str) -> None:
        """`lower_tier` is what statistics call the tier below host memory."""
        self._tenants = frozenset(config.tenants)
        self._models = frozenset(config.models)
        self._tier_names = {tier: tier.name.lower() for tier in Tier} | {Tier.DISK: lower_tier}
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str], _Counts] = {}  # by labels; guarded by _lock

    def see(self, match: PrefixMatch) -> None:
        """Count a lookup."""
        namespace = match.namespace
        layout = namespace.layout
        labels = self._labels(namespace.tenant, namespace.model)
        with self._lock:
            counts = self._counts.get(labels)
            if counts is None:
                counts = self._counts[labels] = _Counts()
            counts.lookup_tokens += layout.prompt_tokens(match.prompt.size)
            for run in match.runs:
                counts.hit_tokens[run.tier] += run.blocks * layout.block_tokens

    def use(self, namespaces: Iterable[NamespaceStats]) -> TenantUse:
        """All that was counted, and what these namespaces hold. Those nobody has used since the start have no name."""
        held_bytes: Counter[tuple[str, str, str]] = Counter()
        for one in namespaces:
            tenant, model = self._labels(one.tenant, one.model)
            held_bytes[tenant, model, _HOST] += one.host_blocks * one.block_bytes
            held_bytes[tenant, model, self._tier_names[Tier.DISK]] += one.disk_blocks * one.block_bytes
        with self._lock:
            looked_up = {labels: counts.lookup_tokens for labels, counts in self._counts.items()}
            found = {
                (*labels, self._tier_names[tier]): counts.hit_tokens[tier]
                for labels, counts in self._counts.items()
                for tier in Tier
                if counts.hit_tokens[tier]
            }
        return TenantUse(looked_up, found, dict(held_bytes))

    def _labels(self, tenant: str, model: str) -> tuple[str, str]:
        return tenant if tenant in self._tenants else OTHER, model if model in self._models else OTHER


TenantMetric = SourceMetric[TenantUse]


TENANT_METRICS = (
    TenantMetric(
        "kvstore_tenant_lookup_tokens_total",
        "Tokens of prompts looked up, by the tenants and models listed in the settings.",
        lambda use: sorted(use.lookup_tokens.items()),
        ("tenant", "model"),
    ),
    TenantMetric(
        "kvstore_tenant_hit_tokens_total",
        "Tokens found by these lookups, by the tier of their best copy.",
        lambda use: sorted(use.hit_tokens.items()),
        ("tenant", "model", "tier"),
    ),
    TenantMetric(
        "kvstore_tenant_held_bytes",
        "Bytes of blocks in a tier, before codecs; those of tenants unknown since the start are among the others.",
        lambda use: sorted(use.held_bytes.items()),
        ("tenant", "model", "tier"),
    ),
)
