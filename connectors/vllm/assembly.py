"""Puts the two halves of the connector together from vLLM's configuration."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed import get_tensor_model_parallel_rank

from kvstore.clock import SystemClock
from kvstore.connectors.common import CacheClient, ConnectorCounters, Writer
from kvstore.connectors.engine_settings import connect
from kvstore.connectors.vllm.layout import (
    cache_groups,
    describe_layout,
    find_revision,
    rank_layout,
    rank_part,
    whole_requests_reason,
)
from kvstore.connectors.vllm.pages import check_copies, engine_pages
from kvstore.connectors.vllm.scheduler import SchedulerParts, SchedulerSide
from kvstore.connectors.vllm.settings import parse_settings
from kvstore.connectors.vllm.worker import Engine, WindowPages, WorkerParts, WorkerSide
from kvstore.tiers.device import DeviceSettings, open_copier
from kvstore.types import Namespace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


logger = logging.getLogger(__name__)

CHECK_SECONDS = 5.0
_CPU_THREADS = 2


class Assembly:
    """What both halves are made from; raises KvstoreError for settings or an engine that cannot be."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, counters: ConnectorCounters) -> None:  # noqa: ANN401
        transfer = vllm_config.kv_transfer_config
        self.settings = parse_settings(transfer.kv_connector_extra_config)
        self.layout = describe_layout(vllm_config, kv_cache_config)
        self.store = connect(self.settings)
        self._counters = counters
        self._vllm_config = vllm_config
        reason = whole_requests_reason(vllm_config, self.layout) if self.settings.by_layer else None
        if reason is not None:
            logger.warning("kvstore connector loads and stores whole requests, though by_layer is set: %s", reason)
        self.by_layer = self.settings.by_layer and reason is None
        self._kv_cache_config = kv_cache_config

    def scheduler_side(self) -> SchedulerSide:
        """The scheduler's half. Reads the files of the weights in the background, unless their revision is set."""
        parts = SchedulerParts(
            CacheClient(self.store, self._counters),
            self._counters,
            SystemClock(),
            self.settings,
            self.layout,
            self._namespaces(),
            tuple(group.table for group in cache_groups(self._kv_cache_config)),
            # Where an image's tokens look at those behind them, a block's end may cut what they depend on.
            serves_contents=not self._vllm_config.model_config.is_mm_prefix_lm,
            by_layer=self.by_layer,
        )
        return SchedulerSide(
            parts, lambda: self.settings.revision or find_revision(self._vllm_config, vllm.__version__)
        )

    def worker_side(self, kv_caches: Mapping[str, Any] | None) -> WorkerSide:
        """The worker's half, over the engine's memory where there is some that can be used."""
        rank, layout = get_tensor_model_parallel_rank(), self.layout
        ranks = layout.tensor_parallel
        writer = Writer() if ranks == 1 else Writer(rank, rank_part(layout, rank))
        parts = WorkerParts(
            CacheClient(self.store, self._counters),
            CacheClient(self.store.within(CHECK_SECONDS), self._counters),
            self._counters,
            SystemClock(),
            self.settings,
            layout,
            rank_layout(layout) if ranks > 1 else layout,
            self._namespaces(),
            writer,
            rank in layout.writers,
            self._kv_cache_config.kv_cache_groups[0].layer_names if self.by_layer else (),
        )
        return WorkerSide(parts, None if kv_caches is None else self._engine(kv_caches))

    def _engine(self, kv_caches: Mapping[str, Any]) -> Engine:
        layout, rank = rank_layout(self.layout), get_tensor_model_parallel_rank()
        full, *windows = [
            (group, engine_pages(kv_caches, group.layer_names, self._kv_cache_config.num_blocks, layout, group.group))
            for group in cache_groups(self._kv_cache_config)
        ]
        copier = open_copier(full[1].device, DeviceSettings(cpu_threads=_CPU_THREADS))
        for group, pages in (full, *windows):
            check_copies(copier, pages, [kv_caches[name] for name in group.layer_names])
        found = [WindowPages(pages, rank_part(self.layout, rank, group.group)) for group, pages in windows]
        return Engine(full[1], copier, tuple(found))

    def _namespaces(self) -> Callable[[str], Namespace]:
        model = self.settings.model or self._vllm_config.model_config.served_model_name
        name = model[0] if isinstance(model, list) else str(model)
        secret = self.settings.secret()

        def of_revision(revision: str) -> Namespace:
            return Namespace(
                model=name, revision=revision, layout=self.layout, tenant=self.settings.tenant, secret=secret
            )

        return of_revision


def join_engine_log() -> None:
    """Let what kvstore logs appear where vLLM's own log does, which has handlers for its own loggers alone."""
    ours, theirs = logging.getLogger("kvstore"), logging.getLogger("vllm")
    for handler in theirs.handlers:
        if handler not in ours.handlers:
            ours.addHandler(handler)
    if ours.level == logging.NOTSET:
        ours.setLevel(theirs.getEffectiveLevel())


def warn_of_settings(vllm_config: Any) -> None:  # noqa: ANN401  # vLLM's own class
    """One log line for what works, but not as well as it could."""
    policy = vllm_config.kv_transfer_config.kv_load_failure_policy
    if policy != "recompute":
        logger.warning(
            "kv_load_failure_policy is %r: a request whose blocks cannot be loaded ends with an error; set it to "
            "'recompute', and it is computed as without a store",
            policy,
        )
