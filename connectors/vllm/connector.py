"""KvstoreConnector: vLLM's KVConnectorBase_V1 on top of the two halves in `scheduler.py` and `worker.py`.

Written for the interface of vLLM 0.32 (vllm/distributed/kv_transfer/kv_connector/v1/base.py). Loads and stores are
asynchronous and of whole requests, so the engine runs its full CUDA graphs, unless the setting `by_layer` is on.
Nothing raises into the engine: a connector that cannot work, or fails, says so in one log line, and the engine
computes everything as without it.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvstore.connectors.common import ConnectorCounters, HookGuard
from kvstore.connectors.vllm.assembly import Assembly, join_engine_log, warn_of_settings
from kvstore.connectors.vllm.metadata import StepMetadata, WorkerState
from kvstore.connectors.vllm.plan import StepPlan
from kvstore.connectors.vllm.scheduler import ASK_AGAIN, NOTHING_TO_LOAD
from kvstore.connectors.vllm.soundness import Soundness
from kvstore.connectors.vllm.stats import KvstorePromMetrics, KvstoreStats, StatsReporter
from kvstore.types import Tier

# ruff: noqa: ANN401, ARG002  # vLLM's own classes, and arguments that its interface has and we do not need

if TYPE_CHECKING:
    import torch

    from kvstore.connectors.vllm.scheduler import SchedulerSide
    from kvstore.connectors.vllm.worker import WorkerSide

logger = logging.getLogger(__name__)

_SOURCES = {Tier.HOST: CacheHitSource.HOST, Tier.DISK: CacheHitSource.DISK, Tier.PEER: CacheHitSource.P2P}


class KvstoreConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM has no types here
    """One half of the connector: of the scheduler's process, or of a worker's."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        join_engine_log()
        self._counters = ConnectorCounters()
        self._reporter = StatsReporter(self._counters)
        self._guard = HookGuard(self._counters, self._switch_off)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._assembly = self._guard.run(partial(Assembly, vllm_config, kv_cache_config, self._counters), None)
        if role is KVConnectorRole.SCHEDULER and self._assembly is not None:
            warn_of_settings(vllm_config)
            self._scheduler = self._guard.run(self._assembly.scheduler_side, None)

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache owes nobody its blocks: preempted requests go on as ever."""
        return False

    def shutdown(self) -> None:
        """Take no more work, and end the session with the server."""
        for side in (self._scheduler, self._worker):
            if side is not None:
                self._guard.run(side.close, None)
        if self._assembly is not None:
            self._guard.run(self._assembly.store.close, None)

    def get_kv_connector_stats(self) -> KvstoreStats | None:
        """What was counted since the last call."""
        return self._guard.run(self._reporter.take, None)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Whether the hooks between layers do anything: a full CUDA graph would leave them out."""
        return extra_config.get("by_layer") is True

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvstoreStats:
        """The counts as they arrive in another process."""
        return KvstoreStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: Any,
        per_engine_labelvalues: Any,
    ) -> KvstorePromMetrics:
        """The counters in vLLM's /metrics."""
        return KvstorePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # The scheduler's half.

    def on_new_request(self, request: Any) -> None:
        """A request has arrived."""
        if self._scheduler is not None:
            self._guard.run(partial(self._scheduler.add, request), None)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many more tokens can be loaded; None while that is being found out."""
        if self._scheduler is None:
            return NOTHING_TO_LOAD
        if self._scheduler.is_asking(request.request_id):
            return ASK_AGAIN
        ask = partial(self._scheduler.matched_tokens, request, num_computed_tokens)
        return self._guard.run(ask, NOTHING_TO_LOAD)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The engine has blocks for what is to be loaded."""
        if self._scheduler is not None:
            tables = blocks.get_block_ids() if num_external_tokens else ()
            self._guard.run(partial(self._scheduler.allocated, request, tables, num_external_tokens), None)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """In which tiers the tokens lay that are loaded."""
        if self._scheduler is None:
            return {}
        nowhere: dict[Tier, int] = {}
        tiers = self._guard.run(partial(self._scheduler.hit_tiers, request, num_external_tokens), nowhere)
        return {_SOURCES.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED): tokens for tier, tokens in tiers.items()}

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """What the workers are to do in this step."""
        if self._scheduler is None:
            return StepMetadata()
        self._guard.run(partial(self._see_step, self._scheduler, scheduler_output), None)
        return StepMetadata(self._guard.run(self._scheduler.take_plan, StepPlan()))

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers have ended, and what they know of the server."""
        if self._scheduler is None:
            return
        state = connector_output.kv_connector_worker_meta
        if isinstance(state, WorkerState):
            self._scheduler.workers_are(state.soundness)
        said = partial(
            self._scheduler.worker_said,
            set(connector_output.finished_sending or ()),
            set(connector_output.finished_recving or ()),
            set(connector_output.invalid_block_ids or ()),
            set(connector_output.failed_recving or ()),
        )
        self._guard.run(said, None)
        if isinstance(state, WorkerState):
            self._guard.run(partial(self._scheduler.layers_said, state.loaded_in_step, state.failures), None)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended; true if its blocks are kept until nothing reads them."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self,
        request: Any,
        block_ids: tuple[list[int], ...],
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same with the blocks of each group of layers."""
        if self._scheduler is None:
            return False, None
        return self._guard.run(partial(self._scheduler.finished, request, block_ids), False), None

    def has_pending_block_frees(self) -> bool:
        """Whether blocks of finished requests come free soon."""
        return self._scheduler is not None and self._scheduler.held_requests > 0

    def reset_cache(self) -> bool:
        """Nothing that was stored before is found from now on."""
        if self._scheduler is not None:
            self._guard.run(self._scheduler.reset, None)
        return True

    # The worker's half.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The engine's memory is there."""
        if self._assembly is not None:
            self._worker = self._guard.run(partial(self._assembly.worker_side, kv_caches), None)
            if self._worker is None:
                self._worker = self._guard.run(partial(self._assembly.worker_side, None), None)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Blocks may be about to be overwritten."""
        if self._worker is not None:
            plan = _plan_of(kv_connector_metadata)
            self._guard.run(partial(self._worker.protect_copies, plan), None)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the loads of this step."""
        if self._worker is not None:
            self._guard.run(partial(self._worker.start_loads, self._bound_plan()), None)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Let a layer be computed behind what is loaded of it, where loads go by layer."""
        if self._worker is not None:
            self._guard.run(partial(self._worker.wait_layer, layer_name), None)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Begin to store what this step has filled of a layer, where stores go by layer."""
        if self._worker is not None:
            self._guard.run(partial(self._worker.save_layer, layer_name, self._bound_plan()), None)

    def wait_for_save(self) -> None:
        """Begin to store what this step has filled; nothing is waited for."""
        if self._worker is not None:
            self._guard.run(partial(self._worker.start_stores, self._bound_plan()), None)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose blocks nothing reads any more, and requests whose loads have ended."""
        return (None, None) if self._worker is None else self._worker.take_finished()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """The same, and the requests whose loads have failed, of engines with several groups of layers."""
        # Asked first: what has failed until now is among those that have ended.
        failed = set() if self._worker is None else self._worker.take_failed_requests()
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving = failed
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that were to be loaded and must be computed."""
        return set() if self._worker is None else self._worker.take_failed_blocks()

    def build_connector_worker_meta(self) -> WorkerState:
        """What this worker knows of the server."""
        worker = self._worker
        if worker is None:
            return WorkerState(Soundness.UNSOUND)
        return WorkerState(worker.soundness, frozenset(worker.take_loaded_in_step()), worker.layer_failures)

    def _bound_plan(self) -> StepPlan:
        return _plan_of(self._get_connector_metadata())

    def _see_step(self, scheduler: SchedulerSide, output: Any) -> None:
        """Look at each request that computes in this step for blocks that it fills."""
        if output.preempted_req_ids:
            scheduler.preempted()
        scheduled = output.num_scheduled_tokens
        resolve = output.kv_connector_block_state.resolve_block_ids
        for new in output.scheduled_new_reqs:
            self._see_request(scheduler, new.req_id, new.num_computed_tokens + scheduled[new.req_id], resolve)
        cached = output.scheduled_cached_reqs
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            self._see_request(scheduler, request_id, computed + scheduled.get(request_id, 0), resolve)

    @staticmethod
    def _see_request(scheduler: SchedulerSide, request_id: str, computed: int, resolve: Any) -> None:
        scheduler.scheduled(request_id, computed, lambda: resolve(request_id))

    def _switch_off(self) -> None:
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.switch_off()


def _plan_of(metadata: Any) -> StepPlan:
    return metadata.plan if isinstance(metadata, StepMetadata) else StepPlan()
