"""The sidecar process: builds the store, the gRPC service and the metrics page, and stops them in order.

Everything that a user can get wrong is raised as a KvstoreError before the ready line is written. That line is one
JSON object: {"ready": true, "pid": ..., "listen": [...], "metrics": "host:port" or null}, with the real ports.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import json
import logging
import os
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import uvloop

from kvstore import __version__
from kvstore.clock import SystemClock
from kvstore.cluster.assembly import (
    check_addresses,
    node_profile,
    open_announcer,
    open_deletions,
    open_drainer,
    open_membership,
)
from kvstore.cluster.locate import NodeView
from kvstore.cluster.peers import open_peers
from kvstore.cluster_metrics import NO_PEERS
from kvstore.config import Config, read_secret
from kvstore.doctor import Doctor, LookupWatch
from kvstore.engine_events.assembly import following
from kvstore.log_lines import log_to_stderr
from kvstore.loop_watch import STALL_TURNS, TURN_SECONDS, LoopWatch
from kvstore.metrics import CallMetrics, Readers, make_registry
from kvstore.node_pages import NodeHealth, NodePages
from kvstore.nodes import DrainOrder, NodeReport
from kvstore.page import PATHS, HotPrefixes, NodePage, PageSources
from kvstore.quantities import format_size
from kvstore.store import CodecRule, Quota, StoreSettings, open_store
from kvstore.tenant_metrics import TenantCounts
from kvstore.tiers.memory_limit import memory_limit, share_bytes
from kvstore.transport.bulk_choice import engine_host
from kvstore.transport.limits import ServiceLimits
from kvstore.transport.security import security_of
from kvstore.transport.server import TransportServer

if TYPE_CHECKING:
    from collections.abc import Callable

    from prometheus_client import CollectorRegistry

    from kvstore.cluster.announcer import Announcer
    from kvstore.cluster.deletions import Deletions
    from kvstore.cluster.directory import Membership
    from kvstore.cluster.drain import Drainer
    from kvstore.cluster.peers import ClusterPeers
    from kvstore.cluster_config import ClusterConfig
    from kvstore.engine_events.assembly import Engines
    from kvstore.insight_config import DoctorConfig
    from kvstore.quota_config import QuotaConfig
    from kvstore.store import Store

_MIB = 2**20
# A thread that wants the interpreter from a busy one gets it after this long, and some 70 us. The default of 5 ms would
# be most of what an engine gives a lookup; with this one, what a busy thread gets done is as much.
_SWITCH_SECONDS = 0.0001
# Numbers of malloc.h, and values. 32 MiB is the highest threshold that glibc takes.
_MALLOC_OPTIONS = {
    -8: 1,  # M_ARENA_MAX: one pool of freed memory for all threads, not one each
    -3: 32 * _MIB,  # M_MMAP_THRESHOLD: smaller blocks come from that pool
    -1: 32 * _MIB,  # M_TRIM_THRESHOLD: what the pool may keep at its end
}
# EX_SOFTWARE of sysexits.h: neither a stop that was asked for nor a mistake of the user.
_EXIT_STALLED = 70
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Beside:
    """What runs beside the server, and where the ready line goes."""

    announcer: Announcer
    drainer: Drainer | None
    pages: NodePages | None
    ready: TextIO


@dataclass(frozen=True, slots=True)
class ClusterSide:
    """This node among others: its name, and the parts that deal with them. Alone it has neither peers nor a drainer."""

    name: str
    announcer: Announcer
    deletions: Deletions
    peers: ClusterPeers | None
    drainer: Drainer | None


def run(config: Config, *, ready: TextIO) -> None:
    """Serve until SIGTERM or SIGINT, then drain, flush and close. A second signal ends the process at once."""
    log_to_stderr(config.log)
    sys.setswitchinterval(_SWITCH_SECONDS)
    keep_freed_memory()
    secrets = {
        tenant: [read_secret(Path(file)) for file in known.secret_files] for tenant, known in config.tenants.items()
    }
    limits = ServiceLimits(**asdict(config.limits))
    security = security_of(config)
    check_addresses(config.cluster, config.server.listen)
    with contextlib.ExitStack() as stack:
        clock = SystemClock()
        membership = open_membership(config.cluster, clock)
        store = stack.enter_context(_open(config))
        tenants = _count_tenants(config, store)
        side = _open_cluster(config, store, membership, stack, transfers=lambda: server.transfers)
        announcer = side.announcer
        engines = stack.enter_context(following(config.engine_events, clock))
        doctor = _open_doctor(config.doctor, store, tenants, stack)
        calls = CallMetrics()
        server = TransportServer(
            store,
            listen=config.server.listen,
            secrets=secrets,
            limits=limits,
            observer=calls,
            security=security,
            bulk_engine=engine_host(config.transport.bulk, config.transport.bulk_tenants),
            arena=config.transport.arena,
            cluster=NodeView(store, membership, side.name, config.cluster.announce_tokens, engines=engines),
            draining=side.drainer,
            deletions=side.deletions,
            doctor=doctor,
        )
        watch = LoopWatch(end=_end, end_turns=_end_turns(config.server.stall_seconds_max))
        peer_stats = (lambda: NO_PEERS) if side.peers is None else side.peers.stats
        cluster_stats = (announcer.stats, peer_stats, engines.stats, lambda: tenants.use(store.namespaces()))
        readers = Readers(store.stats, store.host_memory, lambda: watch.stalls, *cluster_stats)
        registry = make_registry(readers, server, calls, __version__)
        health = NodeHealth(
            lambda: _trouble(watch, server, announcer, engines, doctor), lambda: _unready(side.drainer, server)
        )
        nodes = membership.nodes if config.cluster.directory else tuple
        prefixes = HotPrefixes(store, clock)
        report = None if doctor is None else doctor.report
        sources = PageSources(store.stats, peer_stats, calls, prefixes, nodes, side.name, __version__, clock, report)
        pages = _open_pages(stack, config.server.metrics_address, registry, health, sources)
        # Until the loop handles them: asyncio exchanges handlers meanwhile, and a signal could go to neither.
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
        try:
            uvloop.run(watch.over(_serve(config, store, server, Beside(announcer, side.drainer, pages, ready))))
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
    logger.info("stopped")


def _open_pages(
    stack: contextlib.ExitStack, address: str, registry: CollectorRegistry, health: NodeHealth, sources: PageSources
) -> NodePages | None:
    """The node's pages until the stack ends; None: no address was given."""
    if not address:
        return None
    page = stack.enter_context(contextlib.closing(NodePage(sources)))
    return stack.enter_context(contextlib.closing(NodePages(registry, health, address, dict.fromkeys(PATHS, page))))


def _open_doctor(
    config: DoctorConfig, store: Store, tenants: TenantCounts, stack: contextlib.ExitStack
) -> Doctor | None:
    """What is told of the store's lookups until the stack ends; None: nothing is to be."""
    if not config.enabled:
        return None
    doctor = Doctor(SystemClock(), cpu_share_max=config.cpu_ratio_max)
    stack.callback(doctor.close)
    stack.callback(store.observe_lookups, tenants)  # the doctor no more, from then on
    store.observe_lookups(tenants, LookupWatch(doctor))
    return doctor


def keep_freed_memory() -> None:
    """Let malloc keep what messages of a few MiB leave behind, instead of asking the kernel for fresh pages each time.

    Without it fresh pages are most of what a load costs. To be called before there are threads. Works with glibc; any
    other C library is left as it is.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in _MALLOC_OPTIONS.items():
            mallopt(option, value)


def host_bytes(config: Config) -> int:
    """Capacity of the host tier: the setting, else a bounded share of what the machine and its control groups leave."""
    if config.tiers.host.capacity_bytes is not None:
        return config.tiers.host.capacity_bytes
    limit = memory_limit()
    capacity_bytes = share_bytes(limit)
    logger.info(
        "host capacity is a share of what is left: capacity=%s left=%s limit=%s; set it with --host-bytes",
        format_size(capacity_bytes),
        "unknown" if limit is None else format_size(limit.available_bytes // _MIB * _MIB),
        "none" if limit is None else limit.source,
    )
    return capacity_bytes


def _open(config: Config) -> Store:
    return open_store(
        config.data_dir or None,
        host_bytes=host_bytes(config),
        disk_bytes=config.disk_bytes,
        packed_bytes=config.tiers.packed.capacity_bytes,
        further_paths=config.tiers.disk.further_dirs,
        free_floor_bytes=config.tiers.disk.free_floor_bytes,
        disk_kind=config.tiers.disk.kind,
        key_file=config.tiers.disk.key_file or None,
        settings=StoreSettings(
            events_bytes=config.events.capacity_bytes,
            quotas=tuple(_quota(quota) for quota in config.quotas),
            codecs=codec_rules(config),
            node_secret=read_secret(Path(config.cluster.secret_file)) if config.cluster.secret_file else None,
            **asdict(config.store),
        ),
    )


def _count_tenants(config: Config, store: Store) -> TenantCounts:
    """Counts the store's lookups by tenant from now on."""
    lower_tiers = [name for name in _capacities(store) if name != "host"]
    tenants = TenantCounts(config.metrics, lower_tiers[0] if lower_tiers else "disk")
    store.observe_lookups(tenants)
    return tenants


def codec_rules(config: Config) -> tuple[CodecRule, ...]:
    """How blocks are stored. Raises ConfigError where the library of a codec is missing."""
    return tuple(
        CodecRule(
            tenant=codec.tenant or None,
            model=codec.model or None,
            compression=codec.compression,
            lossy=codec.lossy,
            encryption=codec.encryption,
        )
        for codec in config.codecs
    )


def _quota(quota: QuotaConfig) -> Quota:
    values = asdict(quota)
    return Quota(**{**values, "tenant": quota.tenant or None, "model": quota.model or None})


def _open_cluster(
    config: Config, store: Store, membership: Membership, stack: contextlib.ExitStack, *, transfers: Callable[[], int]
) -> ClusterSide:
    """What deals with other nodes, nothing of it started; `stack` ends it."""
    clock = SystemClock()
    deletions = open_deletions(config.data_dir, store, membership, clock)
    announcer = open_announcer(
        config.cluster,
        store,
        membership,
        clock,
        report=lambda: _node_report(store, transfers(), deletions),
        upkeep=deletions.sync,
    )
    profile = node_profile(config.cluster, config.data_dir)
    announcer.enter(profile)
    stack.callback(announcer.stop)
    peers = open_peers(config.cluster, store, membership, deletions)
    if peers is None:
        return ClusterSide(profile.name, announcer, deletions, None, None)
    stack.callback(peers.close)
    store.share_with(peers)
    drainer = open_drainer(
        config.cluster, profile.name, store, membership=membership, peers=peers, announcer=announcer, clock=clock
    )
    return ClusterSide(profile.name, announcer, deletions, peers, drainer)


def _node_report(store: Store, transfers: int, deletions: Deletions) -> NodeReport:
    """What this node says of itself in its lease."""
    stats = store.stats()
    used = {name: tier.used_bytes for name, tier in stats.tiers.items()}
    return NodeReport(
        queue=transfers,
        version=__version__,
        host_used_bytes=used.get("host", 0),
        disk_used_bytes=used.get("disk", 0),
        leases=stats.leases,
        deletions=deletions.applied_epoch,
    )


def _capacities(store: Store) -> dict[str, int]:
    return {name: tier.capacity_bytes for name, tier in store.stats().tiers.items()}


def _end_turns(stall_seconds_max: float) -> int | None:
    return max(STALL_TURNS, round(stall_seconds_max / TURN_SECONDS)) if stall_seconds_max else None


def _end() -> None:
    """End the process without asking the loop that hangs. What this leaves behind is what kill -9 leaves."""
    os._exit(_EXIT_STALLED)


def _trouble(
    watch: LoopWatch, server: TransportServer, announcer: Announcer, engines: Engines, doctor: Doctor | None
) -> str | None:
    if watch.stalled:
        return "the event loop stands still"
    dead = [*server.dead_threads, *([] if announcer.is_alive else ["kvstore-announcer"])]
    if not engines.is_alive:
        dead.append("kvstore-engine-events")
    if doctor is not None and not doctor.is_alive:
        dead.append("kvstore-doctor")
    return f"threads have ended: {', '.join(dead)}" if dead else None


def _unready(drainer: Drainer | None, server: TransportServer) -> str | None:
    """Why this node should be sent nothing."""
    return server.unready or (None if drainer is None else drainer.unready)


async def _serve(config: Config, store: Store, server: TransportServer, beside: Beside) -> None:
    stop_asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, _on_first_signal, loop, stop_asked)
    reloading: set[asyncio.Task[None]] = set()
    loop.add_signal_handler(signal.SIGHUP, _reload, server, reloading)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
    listen = await server.start()
    # What is there now stays to the end. Looking through it for garbage would stop every call for 20 ms at times.
    gc.collect()
    gc.freeze()
    announcer, ready = beside.announcer, beside.ready
    announcer.start(config.cluster.advertise or tuple(listen), _capacities(store))
    metrics = None if beside.pages is None else beside.pages.address
    for name, tier in store.stats().tiers.items():
        logger.info("tier ready: tier=%s capacity=%s blocks=%d", name, format_size(tier.capacity_bytes), tier.blocks)
    memory = store.host_memory()
    logger.info("host memory: pages=%s touched=%s", memory.pages.value, format_size(memory.touched_bytes))
    logger.info("serving: listen=%s metrics=%s version=%s", ",".join(listen), metrics or "none", __version__)
    ready.write(json.dumps({"ready": True, "pid": os.getpid(), "listen": listen, "metrics": metrics}) + "\n")
    ready.flush()
    await stop_asked.wait()
    logger.info("stopping: grace_seconds=%g; a second signal ends the process at once", config.server.grace_seconds)
    if beside.drainer is not None:
        await asyncio.to_thread(_leave, beside.drainer, config.cluster)
    await asyncio.to_thread(announcer.stop)  # first, so that nobody is sent here any more
    await server.stop(config.server.grace_seconds)


def _leave(drainer: Drainer, config: ClusterConfig) -> None:
    """Hand over, if the settings want that; one that is under way by an order ends."""
    if config.handover_seconds:
        drainer.leave(DrainOrder(config.handover_seconds, config.handover_bytes))
    drainer.close()


def _reload(server: TransportServer, reloading: set[asyncio.Task[None]]) -> None:
    """Read certificates, access file and keys again."""
    task = asyncio.get_running_loop().create_task(server.reload())
    reloading.add(task)  # the loop itself keeps none
    task.add_done_callback(reloading.discard)


def _on_first_signal(loop: asyncio.AbstractEventLoop, stop_asked: asyncio.Event) -> None:
    for number in _STOP_SIGNALS:
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL)
    stop_asked.set()
