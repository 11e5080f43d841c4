"""Metrics: each exported number is the one that the store or the calls have, to the unit."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, ClassVar

import pytest

from kvstore.metrics import (
    CALL_SECONDS_BUCKETS,
    STORE_METRICS,
    CallMetrics,
    Readers,
    make_registry,
    make_route_registry,
    metric_names,
)
from kvstore.stats import (
    ClusterStats,
    CodecStats,
    EngineStats,
    PeerStats,
    RouteStats,
    StoreStats,
    TierStats,
    UpstreamStats,
    WhatIf,
)
from kvstore.tenant_metrics import TenantUse
from kvstore.tiers.extent_stock import HostMemoryState
from kvstore.tiers.huge_pages import PageKind
from kvstore.transport.arena_service import ArenaUse

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

STATS = StoreStats(
    tiers={"host": TierStats(1000, 600, 6), "disk": TierStats(9000, 2000, 20)},
    namespaces=2,
    lookups=3,
    lookup_tokens=480,
    hit_tokens={"host": 160, "disk": 32},
    loaded_tokens={"host": 144},
    stored_blocks=11,
    present_blocks=4,
    rejected_blocks={"full": 5},
    evicted_blocks={"space": 7, "clear": 8},
    corrupt_blocks=1,
    disk_faults={"read_error": 18},
    codecs={"fp8": CodecStats(32, 33_000, 34_000, 35, 0.5, 0.02, 1.5, 0.75)},
    prefetches={"done": 23},
    prefetched_blocks=24,
    written_bytes=25,
    moves=26,
    leases=12,
    stages=13,
    pins=14,
    index_bytes=4096,
    policy_bytes=2048,
    quarantined_slots=7,
    what_if=(WhatIf("host", 0.5, 500, 0.25),),
    sparse_blocks=30,
    shortened_tokens=31,
    states=32,
)


MEMORY = HostMemoryState(
    pages=PageKind.TRANSPARENT,
    capacity_bytes=1000,
    extents=23,
    touched_bytes=700,
    huge_bytes=512,
    locked_bytes=256,
    held_extents=24,
    refused_extents=25,
)
CLUSTER = ClusterStats(
    node="a",
    is_member=True,
    announced_boundaries=41,
    waiting_boundaries=42,
    announcements=43,
    withdrawals=44,
    snapshots=45,
    failures=46,
)
PEERS = PeerStats(
    fetches={"fetched": 101, "stale": 102}, choices={"recompute": 103}, bytes=104, tokens=105, claims=106, depth=107
)
ENGINES = (EngineStats("gpu-0", is_connected=True, blocks=41, events={"applied": 42, "gap": 43}),)
ROUTE = RouteStats(
    1, 2, 3, 4, 5, 6.0, (UpstreamStats("gpu-0", is_healthy=True, waiting_tokens=7, outcomes={"answered": 8}),)
)
TENANTS = TenantUse({("acme", "llama"): 90}, {("acme", "llama", "host"): 91}, {("other", "other", "disk"): 92})
READERS = Readers(
    lambda: STATS, lambda: MEMORY, lambda: 32, lambda: CLUSTER, lambda: PEERS, lambda: ENGINES, lambda: TENANTS
)


class Process:
    failures = 17
    connections: ClassVar = {"wire": 19, "grpc": 20}
    refused_connections: ClassVar = {"full": 21}
    resent_prompts = 22
    arena_use = ArenaUse(clients=27, extents=28, mapped_bytes=29, quarantined_bytes=30)
    bulk_engine_bytes: ClassVar = {"load": 23}
    bulk_engine_failures: ClassVar = {"connect": 24}
    refused_by_tenant_limits: ClassVar = {"rate": 23}
    reloads: ClassVar = {("tls", "ok"): 24}


EXPECTED = {
    ("kvstore_engine_connected", "gpu-0"): 1,
    ("kvstore_engine_device_blocks", "gpu-0"): 41,
    ("kvstore_engine_events_total", "gpu-0,applied"): 42,
    ("kvstore_engine_events_total", "gpu-0,gap"): 43,
    ("kvstore_tenant_lookup_tokens_total", "acme,llama"): 90,
    ("kvstore_tenant_hit_tokens_total", "acme,llama,host"): 91,
    ("kvstore_tenant_held_bytes", "other,other,disk"): 92,
    ("kvstore_build_info", "1.2.3"): 1,
    ("kvstore_loop_stalls_total", ""): 32,
    ("kvstore_peer_fetches_total", "fetched"): 101,
    ("kvstore_peer_fetches_total", "stale"): 102,
    ("kvstore_peer_choices_total", "recompute"): 103,
    ("kvstore_peer_received_bytes_total", ""): 104,
    ("kvstore_peer_fetched_tokens_total", ""): 105,
    ("kvstore_peer_claims", ""): 106,
    ("kvstore_peer_prompts", ""): 107,
    ("kvstore_failures_total", ""): 17,
    ("kvstore_connections", "wire"): 19,
    ("kvstore_connections", "grpc"): 20,
    ("kvstore_tenant_refusals_total", "rate"): 23,
    ("kvstore_reloads_total", "tls,ok"): 24,
    ("kvstore_refused_connections_total", "full"): 21,
    ("kvstore_resent_prompts_total", ""): 22,
    ("kvstore_arena_clients", ""): 27,
    ("kvstore_arena_mapped_extents", ""): 28,
    ("kvstore_arena_mapped_bytes", ""): 29,
    ("kvstore_arena_quarantined_bytes", ""): 30,
    ("kvstore_bulk_engine_bytes_total", "load"): 23,
    ("kvstore_bulk_engine_failures_total", "connect"): 24,
    ("kvstore_cluster_member", ""): 1,
    ("kvstore_cluster_announced_boundaries", ""): 41,
    ("kvstore_cluster_waiting_boundaries", ""): 42,
    ("kvstore_cluster_announcements_total", ""): 43,
    ("kvstore_cluster_withdrawals_total", ""): 44,
    ("kvstore_cluster_snapshots_total", ""): 45,
    ("kvstore_cluster_directory_failures_total", ""): 46,
    ("kvstore_tier_capacity_bytes", "host"): 1000,
    ("kvstore_tier_capacity_bytes", "disk"): 9000,
    ("kvstore_tier_used_bytes", "host"): 600,
    ("kvstore_tier_used_bytes", "disk"): 2000,
    ("kvstore_tier_blocks", "host"): 6,
    ("kvstore_tier_blocks", "disk"): 20,
    ("kvstore_namespaces", ""): 2,
    ("kvstore_lookups_total", ""): 3,
    ("kvstore_lookup_tokens_total", ""): 480,
    ("kvstore_hit_tokens_total", "host"): 160,
    ("kvstore_hit_tokens_total", "disk"): 32,
    ("kvstore_loaded_tokens_total", "host"): 144,
    ("kvstore_stored_blocks_total", ""): 11,
    ("kvstore_present_blocks_total", ""): 4,
    ("kvstore_rejected_blocks_total", "full"): 5,
    ("kvstore_evicted_blocks_total", "space"): 7,
    ("kvstore_evicted_blocks_total", "clear"): 8,
    ("kvstore_corrupt_blocks_total", ""): 1,
    ("kvstore_disk_faults_total", "read_error"): 18,
    ("kvstore_host_extents", ""): 23,
    ("kvstore_host_held_extents", ""): 24,
    ("kvstore_host_refused_extents_total", ""): 25,
    ("kvstore_host_touched_bytes", ""): 700,
    ("kvstore_host_huge_page_bytes", ""): 512,
    ("kvstore_host_locked_bytes", ""): 256,
    ("kvstore_prefetches_total", "done"): 23,
    ("kvstore_prefetched_blocks_total", ""): 24,
    ("kvstore_disk_written_bytes_total", ""): 25,
    ("kvstore_moves", ""): 26,
    ("kvstore_leases", ""): 12,
    ("kvstore_stages", ""): 13,
    ("kvstore_pins", ""): 14,
    ("kvstore_index_bytes", ""): 4096,
    ("kvstore_policy_bytes", ""): 2048,
    ("kvstore_quarantined_slots", ""): 7,
    ("kvstore_codec_blocks_total", "fp8,written"): 32,
    ("kvstore_codec_blocks_total", "fp8,read"): 35,
    ("kvstore_codec_bytes_total", "fp8,raw"): 33_000,
    ("kvstore_codec_bytes_total", "fp8,slot"): 34_000,
    ("kvstore_codec_seconds_total", "fp8,written"): 1.5,
    ("kvstore_codec_seconds_total", "fp8,read"): 0.75,
    ("kvstore_codec_error", "fp8,max_absolute"): 0.5,
    ("kvstore_codec_error", "fp8,rms_relative"): 0.02,
    ("kvstore_sparse_blocks", ""): 30,
    ("kvstore_shortened_tokens_total", ""): 31,
    ("kvstore_states", ""): 32,
    ("kvstore_what_if_capacity_bytes", "host,0.5"): 500,
    ("kvstore_what_if_hit_ratio", "host,0.5"): 0.25,
}


def values(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    """Every sample by its name and its label values."""
    return {
        (sample.name, ",".join(sample.labels.values())): sample.value
        for family in registry.collect()
        for sample in family.samples
    }


def test_each_store_metric_has_the_exact_value_of_the_store():
    found = values(make_registry(READERS, Process(), CallMetrics(), "1.2.3"))

    assert EXPECTED == {name: value for name, value in found.items() if name[0].startswith("kvstore_")}


@pytest.mark.parametrize(
    "name", [item.name for item in fields(StoreStats) if item.name not in ("node", "uptime_seconds")]
)
def test_every_counter_of_the_store_moves_a_metric(name):
    value = getattr(STATS, name)
    if name == "tiers":
        changed = {"host": TierStats(1001, 601, 7), "disk": value["disk"]}
    elif name == "codecs":
        changed = {**value, "int8": CodecStats(written_blocks=1)}
    elif name == "what_if":
        changed = (WhatIf("host", 0.5, 501, 0.25),)
    else:
        changed = {**value, "other": 9} if isinstance(value, dict) else value + 1

    before = values(make_registry(READERS, Process(), CallMetrics(), "1"))
    after = values(
        make_registry(replace(READERS, stats=lambda: replace(STATS, **{name: changed})), Process(), CallMetrics(), "1")
    )

    moved = [key for key in after if key[0].startswith("kvstore_") and after[key] != before.get(key)]
    assert {"tiers": 3, "codecs": 8}.get(name, 1) == len(moved)


def test_calls_are_counted_in_their_bucket_by_method_and_status():
    calls = CallMetrics()
    for seconds in (0.00004, 0.00005, 0.3, 11.0):
        calls.observe("Match", seconds, "OK")
    calls.observe("Match", 0.001, "NOT_FOUND")

    family = next(iter(calls.collect()))
    buckets = {
        sample.labels["le"]: sample.value
        for sample in family.samples
        if sample.name == "kvstore_call_seconds_bucket" and sample.labels["status"] == "OK"
    }
    totals = {
        (sample.name, sample.labels["status"]): sample.value for sample in family.samples if "le" not in sample.labels
    }
    assert len(CALL_SECONDS_BUCKETS) + 1 == len(buckets)
    assert (2, 2, 3, 3, 4) == tuple(buckets[le] for le in ("5e-05", "0.25", "0.5", "10.0", "+Inf"))
    assert 4 == totals["kvstore_call_seconds_count", "OK"]
    assert pytest.approx(11.30009) == totals["kvstore_call_seconds_sum", "OK"]
    assert 1 == totals["kvstore_call_seconds_count", "NOT_FOUND"]


def test_there_are_no_created_series_and_no_names_beyond_the_declared_ones():
    calls = CallMetrics()
    calls.observe("Match", 0.001, "OK")

    names = {name for name, _ in values(make_registry(READERS, Process(), calls, "1"))}
    names |= {name for name, _ in values(make_route_registry(lambda: ROUTE, "1"))}

    ours = {name for name in names if name.startswith("kvstore_")}
    assert [] == [name for name in names if name.endswith("_created")]
    histogram = {f"kvstore_call_seconds_{suffix}" for suffix in ("bucket", "count", "sum")}
    assert set(metric_names()) - {"kvstore_call_seconds"} | histogram == ours


def test_two_registries_stand_side_by_side():
    make_registry(READERS, Process(), CallMetrics(), "1")
    make_registry(READERS, Process(), CallMetrics(), "1")


def test_names_have_base_units_and_each_is_declared_once():
    names = metric_names()

    assert len(names) == len(set(names))
    assert [] == [metric.name for metric in STORE_METRICS if not metric.sentence.endswith(".")]
    assert [] == [name for name in names if ":" in name or name.endswith(("_ms", "_mb", "_gb", "_percent"))]
