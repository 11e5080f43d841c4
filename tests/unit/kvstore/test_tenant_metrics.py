"""Series by tenant and model: exact for those that are listed, one for all others, and their sums are the store's."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from kvstore.errors import ConfigError
from kvstore.metrics_config import MODELS_MAX, TENANTS_MAX, MetricsConfig, check_metrics
from kvstore.store import Store, open_store
from kvstore.tenant_metrics import TENANT_METRICS, TenantCounts
from kvstore.testing.states import STATES
from kvstore.types import KvLayout, Namespace

LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=64, dtype="float16", block_tokens=16)
KNOWN = Namespace(tenant="acme", model="llama", revision="r1", layout=LAYOUT)
OTHER_MODEL = replace(KNOWN, model="qwen")
OTHER_TENANT = replace(KNOWN, tenant="zeta")
LISTED = MetricsConfig(tenants=("acme",), models=("llama",))
PROMPT = list(range(64))


def put(store: Store, namespace: Namespace, tokens: list[int]) -> None:
    with store.stage(namespace, tokens) as stage:
        stage.write_from(np.zeros((stage.blocks, LAYOUT.block_bytes), dtype=np.uint8))


def test_listed_tenants_and_models_count_for_themselves_and_all_else_as_other():
    counts = TenantCounts(LISTED, "disk")
    with open_store(None, host_bytes=8 << 20, disk_bytes=0) as store:
        store.observe_lookups(counts)
        put(store, KNOWN, PROMPT)
        put(store, OTHER_TENANT, PROMPT[:32])
        store.match(KNOWN, PROMPT + [7] * 10)
        store.match(KNOWN, PROMPT, touch=False)
        store.match(OTHER_MODEL, PROMPT)
        store.match(OTHER_TENANT, PROMPT)
        use = counts.use(store.namespaces())
    assert use.lookup_tokens == {("acme", "llama"): 74, ("acme", "other"): 64, ("other", "llama"): 64}
    assert use.hit_tokens == {("acme", "llama", "host"): 64, ("other", "llama", "host"): 32}
    held = {labels: size for labels, size in use.held_bytes.items() if size}
    assert held == {
        ("acme", "llama", "host"): 4 * LAYOUT.block_bytes,
        ("other", "llama", "host"): 2 * LAYOUT.block_bytes,
    }


def test_a_request_that_asks_twice_counts_once():
    counts = TenantCounts(LISTED, "disk")
    with open_store(None, host_bytes=8 << 20, disk_bytes=0) as store:
        store.observe_lookups(counts)
        for _ in range(2):
            store.match(KNOWN, PROMPT, request_id="r")
    assert counts.use(()).lookup_tokens == {("acme", "llama"): 64}


def test_sums_are_what_the_store_counts_also_with_states_and_packed_memory():
    counts = TenantCounts(LISTED, "packed")
    prompts = [list(range(start, start + 64)) for start in range(0, 64 * 600, 64)]
    with open_store(None, host_bytes=1 << 20, disk_bytes=0, packed_bytes=8 << 20) as store:
        store.observe_lookups(counts)
        for turn, tokens in enumerate(prompts):
            put(store, (KNOWN, OTHER_TENANT)[turn % 2], tokens)
        for turn, tokens in enumerate(prompts):
            store.match((KNOWN, OTHER_TENANT, OTHER_MODEL, STATES)[turn % 4], tokens)
            store.match((KNOWN, OTHER_TENANT)[turn % 2], tokens)
        stats, use = store.stats(), counts.use(store.namespaces())
    assert sum(use.lookup_tokens.values()) == stats.lookup_tokens
    by_tier: Counter[str] = Counter()
    for (_, _, tier), tokens in use.hit_tokens.items():
        by_tier[tier] += tokens
    assert by_tier == stats.hit_tokens
    assert {"host", "packed"} == set(by_tier)


def test_every_series_has_its_labels():
    counts = TenantCounts(LISTED, "disk")
    with open_store(None, host_bytes=8 << 20, disk_bytes=0) as store:
        store.observe_lookups(counts)
        put(store, KNOWN, PROMPT)
        store.match(KNOWN, PROMPT)
        use = counts.use(store.namespaces())
    for metric in TENANT_METRICS:
        assert {len(labels) for labels, _ in metric.read(use)} == {len(metric.labels)}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (MetricsConfig(tenants=("*",)), r"metrics.tenants has '\*', expected names"),
        (MetricsConfig(models=("other",)), "metrics.models has 'other'"),
        (
            MetricsConfig(tenants=tuple(map(str, range(TENANTS_MAX + 1)))),
            f"has 33 names, expected at most {TENANTS_MAX}",
        ),
        (MetricsConfig(models=tuple(map(str, range(MODELS_MAX + 1)))), f"has 17 names, expected at most {MODELS_MAX}"),
    ],
)
def test_lists_that_are_not_names_or_too_long_are_refused(settings: MetricsConfig, told: str):
    with pytest.raises(ConfigError, match=told):
        check_metrics(settings)
