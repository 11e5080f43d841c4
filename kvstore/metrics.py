"""Every metric of the sidecar, once, on a registry of the caller's.

Nothing is counted twice: what the store counts itself is read from its `StoreStats` when Prometheus scrapes, and only
calls are counted here. Hits are counted in tokens; rates and ratios are left to the query:

    hit rate = rate(kvstore_hit_tokens_total) / rate(kvstore_lookup_tokens_total)
"""

from __future__ import annotations

import bisect
import itertools
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from kvstore.cluster_metrics import CLUSTER_METRICS, NO_PEERS, PEER_METRICS
from kvstore.engine_event_metrics import ENGINE_METRICS, Engines
from kvstore.route_metrics import ROUTE_METRICS
from kvstore.source_metric import Sample, SourceMetric, by_label, single
from kvstore.stats import ClusterStats, PeerStats, RouteStats, StoreStats
from kvstore.tenant_metrics import TENANT_METRICS, TenantUse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prometheus_client.metrics_core import Metric

# 50 us .. 10 s: from a lookup in memory to a bulk transfer at its deadline.
CALL_SECONDS_BUCKETS = (
    0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip


StoreMetric = SourceMetric[StoreStats]


def _codec_samples(stats: StoreStats, *names: str) -> Iterator[Sample]:
    """Two fields of each codec's statistics, given as label and field in turn."""
    for codec, counted in sorted(stats.codecs.items()):
        for label, name in zip(names[::2], names[1::2], strict=True):
            yield (codec, label), getattr(counted, name)


STORE_METRICS = (
    StoreMetric(
        "kvstore_tier_capacity_bytes",
        "Most bytes that a tier may hold.",
        lambda stats: by_label({name: tier.capacity_bytes for name, tier in stats.tiers.items()}),
        ("tier",),
    ),
    StoreMetric(
        "kvstore_tier_used_bytes",
        "Bytes that a tier holds.",
        lambda stats: by_label({name: tier.used_bytes for name, tier in stats.tiers.items()}),
        ("tier",),
    ),
    StoreMetric(
        "kvstore_tier_blocks",
        "Blocks with a copy in a tier.",
        lambda stats: by_label({name: tier.blocks for name, tier in stats.tiers.items()}),
        ("tier",),
    ),
    StoreMetric("kvstore_namespaces", "Namespaces in use.", lambda stats: single(stats.namespaces)),
    StoreMetric("kvstore_lookups_total", "Lookups that count.", lambda stats: single(stats.lookups)),
    StoreMetric(
        "kvstore_lookup_tokens_total", "Tokens of prompts looked up.", lambda stats: single(stats.lookup_tokens)
    ),
    StoreMetric(
        "kvstore_hit_tokens_total",
        "Tokens found by lookups, by the tier of their best copy.",
        lambda stats: by_label(stats.hit_tokens),
        ("tier",),
    ),
    StoreMetric(
        "kvstore_loaded_tokens_total",
        "Tokens handed to engines, by the tier they were read from.",
        lambda stats: by_label(stats.loaded_tokens),
        ("tier",),
    ),
    StoreMetric("kvstore_stored_blocks_total", "Blocks committed.", lambda stats: single(stats.stored_blocks)),
    StoreMetric(
        "kvstore_present_blocks_total",
        "Blocks that a store left out since they were there already.",
        lambda stats: single(stats.present_blocks),
    ),
    StoreMetric(
        "kvstore_rejected_blocks_total",
        "Blocks that were offered and not taken, by reason.",
        lambda stats: by_label(stats.rejected_blocks),
        ("reason",),
    ),
    StoreMetric(
        "kvstore_evicted_blocks_total",
        "Blocks that left, by reason.",
        lambda stats: by_label(stats.evicted_blocks),
        ("reason",),
    ),
    StoreMetric(
        "kvstore_corrupt_blocks_total",
        "Blocks dropped since what was read is not what was written.",
        lambda stats: single(stats.corrupt_blocks),
    ),
    StoreMetric(
        "kvstore_disk_faults_total",
        "What the disk did wrong, by kind; each was a miss or a refused store.",
        lambda stats: by_label(stats.disk_faults),
        ("kind",),
    ),
    StoreMetric(
        "kvstore_quarantined_slots",
        "Places on disk that are not used since they could not be read, written or erased.",
        lambda stats: single(stats.quarantined_slots),
    ),
    StoreMetric(
        "kvstore_codec_blocks_total",
        "Blocks that a codec wrote to disk or read from there.",
        lambda stats: _codec_samples(stats, "written", "written_blocks", "read", "read_blocks"),
        ("codec", "direction"),
    ),
    StoreMetric(
        "kvstore_codec_seconds_total",
        "Time that a codec took for that, of all threads together.",
        lambda stats: _codec_samples(stats, "written", "encode_seconds", "read", "decode_seconds"),
        ("codec", "direction"),
    ),
    StoreMetric(
        "kvstore_codec_bytes_total",
        "Bytes of blocks that a codec wrote (raw), and those that they took on disk (slot).",
        lambda stats: _codec_samples(stats, "raw", "raw_bytes", "slot", "slot_bytes"),
        ("codec", "size"),
    ),
    StoreMetric(
        "kvstore_codec_error",
        "How far what a codec wrote is from what it was given: the largest difference, and the mean relative one.",
        lambda stats: _codec_samples(stats, "max_absolute", "max_absolute_error", "rms_relative", "rms_relative_error"),
        ("codec", "kind"),
    ),
    StoreMetric(
        "kvstore_sparse_blocks",
        "Blocks with parts of a layer group, counted once for each.",
        lambda stats: single(stats.sparse_blocks),
    ),
    StoreMetric("kvstore_states", "Sequence states stored.", lambda stats: single(stats.states)),
    StoreMetric(
        "kvstore_shortened_tokens_total",
        "Tokens stored in full and not matched, since a sparse part that a match needs was not there.",
        lambda stats: single(stats.shortened_tokens),
    ),
    StoreMetric(
        "kvstore_prefetches_total",
        "Prefetches that have ended, by outcome.",
        lambda stats: by_label(stats.prefetches),
        ("outcome",),
    ),
    StoreMetric(
        "kvstore_prefetched_blocks_total",
        "Blocks that prefetches brought from disk into host memory.",
        lambda stats: single(stats.prefetched_blocks),
    ),
    StoreMetric(
        "kvstore_disk_written_bytes_total",
        "Bytes of blocks that were written to disk.",
        lambda stats: single(stats.written_bytes),
    ),
    StoreMetric(
        "kvstore_moves",
        "Prefetches, and writes of write_through, that wait or run.",
        lambda stats: single(stats.moves),
    ),
    StoreMetric("kvstore_leases", "Leases that are held.", lambda stats: single(stats.leases)),
    StoreMetric("kvstore_stages", "Stores that have begun and not ended.", lambda stats: single(stats.stages)),
    StoreMetric("kvstore_pins", "Pins that are in force.", lambda stats: single(stats.pins)),
    StoreMetric("kvstore_index_bytes", "Memory of the index.", lambda stats: single(stats.index_bytes)),
    StoreMetric(
        "kvstore_policy_bytes",
        "Memory of what the eviction policy has learnt, and remembers of blocks that left.",
        lambda stats: single(stats.policy_bytes),
    ),
    StoreMetric(
        "kvstore_what_if_capacity_bytes",
        "A capacity that a tier could have, by its ratio to the one that it has.",
        lambda stats: (((row.tier, f"{row.scale:g}"), row.capacity_bytes) for row in stats.what_if),
        ("tier", "scale"),
    ),
    StoreMetric(
        "kvstore_what_if_hit_ratio",
        "Estimated share of the tokens looked up that it would find with that capacity, together with those before it.",
        lambda stats: (((row.tier, f"{row.scale:g}"), row.hit_rate) for row in stats.what_if),
        ("tier", "scale"),
    ),
)


CALL_SECONDS = "kvstore_call_seconds"
CALL_SECONDS_SENTENCE = "Duration of calls, by method and status."
BUILD_INFO = "kvstore_build_info"
BUILD_INFO_SENTENCE = "Always 1; the version is a label."
LOOP_STALLS = "kvstore_loop_stalls_total"
LOOP_STALLS_SENTENCE = "Times that the event loop stood still for seconds; the log says where."


@dataclass(slots=True)
class _CallCounts:
    in_bucket: list[int] = field(default_factory=lambda: [0] * (len(CALL_SECONDS_BUCKETS) + 1))
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class CallTotals:
    """Calls of one method, whatever came of them: a count for each of CALL_SECONDS_BUCKETS and one beyond them."""

    in_bucket: tuple[int, ...]


class CallMetrics(Collector):
    """A histogram of call durations; give it to the transport as its observer. Thread-safe, O(log buckets) a call.

    Kept by hand, not as a prometheus_client Histogram, since that adds a `_created` series to each of its own unless
    a switch for the whole process is thrown.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[tuple[str, str], _CallCounts] = {}  # guarded by _lock

    def observe(self, method: str, seconds: float, status: str) -> None:
        """Count one finished call."""
        index = bisect.bisect_left(CALL_SECONDS_BUCKETS, seconds)
        with self._lock:
            counts = self._calls.get((method, status))
            if counts is None:
                counts = self._calls[method, status] = _CallCounts()
            counts.in_bucket[index] += 1
            counts.seconds += seconds

    def totals(self) -> dict[str, CallTotals]:
        """The calls of each method since the start."""
        totals: dict[str, list[int]] = {}
        with self._lock:
            for (method, _), counts in self._calls.items():
                before = totals.setdefault(method, [0] * len(counts.in_bucket))
                totals[method] = [one + other for one, other in zip(before, counts.in_bucket, strict=True)]
        return {method: CallTotals(tuple(in_bucket)) for method, in_bucket in totals.items()}

    def collect(self) -> Iterator[Metric]:
        """Called by the registry at each scrape."""
        family = HistogramMetricFamily(CALL_SECONDS, CALL_SECONDS_SENTENCE, labels=("method", "status"))
        bounds = [str(bound) for bound in CALL_SECONDS_BUCKETS] + ["+Inf"]
        with self._lock:
            for labels, counts in sorted(self._calls.items()):
                totals = itertools.accumulate(counts.in_bucket)
                family.add_metric(labels, buckets=list(zip(bounds, totals, strict=True)), sum_value=counts.seconds)
        yield family


class ArenaUse(Protocol):
    """What processes on this host map of host memory."""

    @property
    def clients(self) -> int:
        """Sessions that read blocks where they lie."""
        ...

    @property
    def extents(self) -> int:
        """Extents that they map, each counted for each of them."""
        ...

    @property
    def mapped_bytes(self) -> int:
        """The bytes of these."""
        ...

    @property
    def quarantined_bytes(self) -> int:
        """Those that they should have let go."""
        ...


class ProcessState(Protocol):
    """What the sidecar counts outside its store."""

    @property
    def failures(self) -> int:
        """Calls, and ends of leases and stages, that failed with an error that is none of kvstore's own."""
        ...

    @property
    def connections(self) -> dict[str, int]:
        """Connections to addresses of both lanes that are open now, by lane."""
        ...

    @property
    def refused_connections(self) -> dict[str, int]:
        """Connections to addresses of both lanes that were refused, or ended for what came on them, by reason."""
        ...

    @property
    def refused_by_tenant_limits(self) -> dict[str, int]:
        """Calls refused for what their tenant has open already, or how fast it asks, by limit."""
        ...

    @property
    def reloads(self) -> dict[tuple[str, str], int]:
        """Loads of files that changed, by what was loaded and whether it was taken."""
        ...

    @property
    def resent_prompts(self) -> int:
        """Prompts that a client had to send whole since their beginning was not known here."""
        ...

    @property
    def arena_use(self) -> ArenaUse:
        """What processes on this host map of host memory."""
        ...

    @property
    def bulk_engine_bytes(self) -> dict[str, int]:
        """Bytes that the engine for remote memory has moved, by direction."""
        ...

    @property
    def bulk_engine_failures(self) -> dict[str, int]:
        """What the engine for remote memory could not do."""
        ...


ProcessMetric = SourceMetric[ProcessState]


PROCESS_METRICS = (
    ProcessMetric(
        "kvstore_failures_total",
        "Calls that failed by a fault of kvstore's own; the log has the trace.",
        lambda process: single(process.failures),
    ),
    ProcessMetric(
        "kvstore_connections",
        "Connections to addresses of both lanes, by lane.",
        lambda process: by_label(process.connections),
        ("lane",),
    ),
    ProcessMetric(
        "kvstore_refused_connections_total",
        "Connections that were refused, or ended for what came on them, by reason.",
        lambda process: by_label(process.refused_connections),
        ("reason",),
    ),
    ProcessMetric(
        "kvstore_tenant_refusals_total",
        "Calls that were refused for what their tenant has open already, or how fast it asks, by limit.",
        lambda process: by_label(process.refused_by_tenant_limits),
        ("limit",),
    ),
    ProcessMetric(
        "kvstore_reloads_total",
        "Certificates, access files and keys that were read again, by what came of it.",
        lambda process: sorted(process.reloads.items()),
        ("what", "outcome"),
    ),
    ProcessMetric(
        "kvstore_resent_prompts_total",
        "Prompts sent whole since what was sent before of them was not remembered any more.",
        lambda process: single(process.resent_prompts),
    ),
    ProcessMetric(
        "kvstore_arena_clients",
        "Sessions on this host that read blocks where they lie in host memory.",
        lambda process: single(process.arena_use.clients),
    ),
    ProcessMetric(
        "kvstore_arena_mapped_extents",
        "Extents that such sessions map, each counted for each session.",
        lambda process: single(process.arena_use.extents),
    ),
    ProcessMetric(
        "kvstore_arena_mapped_bytes",
        "Bytes that such sessions map, each counted for each session.",
        lambda process: single(process.arena_use.mapped_bytes),
    ),
    ProcessMetric(
        "kvstore_arena_quarantined_bytes",
        "Mapped bytes that a session should have let go a second ago; they go to no other namespace while it lives.",
        lambda process: single(process.arena_use.quarantined_bytes),
    ),
    ProcessMetric(
        "kvstore_bulk_engine_bytes_total",
        "Bytes that the engine for remote memory access has moved, by direction.",
        lambda process: by_label(process.bulk_engine_bytes),
        ("direction",),
    ),
    ProcessMetric(
        "kvstore_bulk_engine_failures_total",
        "Calls that the engine for remote memory access could not serve, by what it was asked; sockets did instead.",
        lambda process: by_label(process.bulk_engine_failures),
        ("what",),
    ),
)


class MemoryState(Protocol):
    """What host memory the store has."""

    @property
    def extents(self) -> int:
        """Pieces of shared memory."""
        ...

    @property
    def held_extents(self) -> int:
        """Those that some process was given to map."""
        ...

    @property
    def refused_extents(self) -> int:
        """How often the system refused memory that the capacity would have allowed."""
        ...

    @property
    def touched_bytes(self) -> int:
        """Bytes brought in ahead of their use."""
        ...

    @property
    def huge_bytes(self) -> int:
        """Bytes in huge pages."""
        ...

    @property
    def locked_bytes(self) -> int:
        """Bytes that are never swapped out."""
        ...


MemoryMetric = SourceMetric[MemoryState]


MEMORY_METRICS = (
    MemoryMetric(
        "kvstore_host_extents", "Extents of host memory that there are.", lambda memory: single(memory.extents)
    ),
    MemoryMetric(
        "kvstore_host_held_extents",
        "Extents that go to no other namespace since some process maps them.",
        lambda memory: single(memory.held_extents),
    ),
    MemoryMetric(
        "kvstore_host_refused_extents_total",
        "Extents that the system refused though the capacity had room for them.",
        lambda memory: single(memory.refused_extents),
    ),
    MemoryMetric(
        "kvstore_host_touched_bytes",
        "Bytes of host memory touched in the background; what is not pays for new pages at its first store.",
        lambda memory: single(memory.touched_bytes),
    ),
    MemoryMetric(
        "kvstore_host_huge_page_bytes",
        "Bytes of host memory in huge pages, counted when all is touched.",
        lambda memory: single(memory.huge_bytes),
    ),
    MemoryMetric(
        "kvstore_host_locked_bytes",
        "Bytes of host memory that are never swapped out.",
        lambda memory: single(memory.locked_bytes),
    ),
)


@dataclass(frozen=True, slots=True)
class Readers:
    """Where the numbers of a store and of the loop that serves it are read at each scrape."""

    stats: Callable[[], StoreStats]
    memory: Callable[[], MemoryState]
    loop_stalls: Callable[[], int]
    cluster: Callable[[], ClusterStats] = ClusterStats
    peers: Callable[[], PeerStats] = lambda: NO_PEERS
    engines: Callable[[], Engines] = tuple
    tenants: Callable[[], TenantUse] = TenantUse


class StoreCollector(Collector):
    """Reads what others count, at each scrape."""

    def __init__(self, readers: Readers, process: ProcessState, version: str) -> None:
        self._readers = readers
        self._process = process
        self._version = version

    def collect(self) -> Iterator[Metric]:
        """Called by the registry at each scrape."""
        build = GaugeMetricFamily(BUILD_INFO, BUILD_INFO_SENTENCE, labels=("version",))
        build.add_metric((self._version,), 1)
        yield build
        stalls = CounterMetricFamily(LOOP_STALLS, LOOP_STALLS_SENTENCE)
        stalls.add_metric((), self._readers.loop_stalls())
        yield stalls
        for metric in PROCESS_METRICS:
            yield _family(metric, metric.read(self._process))
        memory = self._readers.memory()
        for memory_metric in MEMORY_METRICS:
            yield _family(memory_metric, memory_metric.read(memory))
        cluster = self._readers.cluster()
        for cluster_metric in CLUSTER_METRICS:
            yield _family(cluster_metric, cluster_metric.read(cluster))
        peers = self._readers.peers()
        for peer_metric in PEER_METRICS:
            yield _family(peer_metric, peer_metric.read(peers))
        engines = self._readers.engines()
        for engine_metric in ENGINE_METRICS:
            yield _family(engine_metric, engine_metric.read(engines))
        tenants = self._readers.tenants()
        for tenant_metric in TENANT_METRICS:
            yield _family(tenant_metric, tenant_metric.read(tenants))
        stats = self._readers.stats()
        for store_metric in STORE_METRICS:
            yield _family(store_metric, store_metric.read(stats))


def _family(metric: SourceMetric[Any], samples: Iterable[Sample]) -> Metric:
    kind = CounterMetricFamily if metric.name.endswith("_total") else GaugeMetricFamily
    family = kind(metric.name, metric.sentence, labels=metric.labels)
    for labels, value in samples:
        family.add_metric(labels, value)
    return family


def metric_names() -> tuple[str, ...]:
    """Every metric of ours, as scraped."""
    declared = (
        *PROCESS_METRICS,
        *MEMORY_METRICS,
        *CLUSTER_METRICS,
        *PEER_METRICS,
        *ENGINE_METRICS,
        *TENANT_METRICS,
        *ROUTE_METRICS,
        *STORE_METRICS,
    )
    return (BUILD_INFO, LOOP_STALLS, CALL_SECONDS, *(metric.name for metric in declared))


def make_registry(readers: Readers, process: ProcessState, calls: CallMetrics, version: str) -> CollectorRegistry:
    """A registry of its own with all our metrics, and the usual `process_*` ones (memory, CPU, files)."""
    registry = CollectorRegistry()
    registry.register(calls)
    registry.register(StoreCollector(readers, process, version))
    ProcessCollector(registry=registry)
    return registry


class RouteCollector(Collector):
    """Reads what a proxy counts, at each scrape."""

    def __init__(self, read: Callable[[], RouteStats], version: str) -> None:
        self._read = read
        self._version = version

    def collect(self) -> Iterator[Metric]:
        """Called by the registry at each scrape."""
        build = GaugeMetricFamily(BUILD_INFO, BUILD_INFO_SENTENCE, labels=("version",))
        build.add_metric((self._version,), 1)
        yield build
        stats = self._read()
        for metric in ROUTE_METRICS:
            yield _family(metric, metric.read(stats))


def make_route_registry(read: Callable[[], RouteStats], version: str) -> CollectorRegistry:
    """A registry of a proxy's own, with the usual `process_*` metrics."""
    registry = CollectorRegistry()
    registry.register(RouteCollector(read, version))
    ProcessCollector(registry=registry)
    return registry


def render(registry: CollectorRegistry) -> bytes:
    """The page that Prometheus reads."""
    return generate_latest(registry)
