"""A secondary tier for vLLM's own OffloadingConnector: chunks of its host memory, kept in a kvstore server.

    "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8589934592,
        "secondary_tiers": [{"type": "KvstoreTier", "module_path": "kvstore.connectors.vllm.tier",
            "address": "unix:///run/kvstore.sock"}]}

Written for the interface of vLLM 0.32 (vllm/v1/kv_offload/tiering/base.py). Every method runs in the scheduler, so none
waits, but `drain_jobs`. A tier that cannot work says so in one log line, and has nothing.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import vllm
from vllm.v1.kv_offload.base import LookupResult, Medium, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvstore.clock import SystemClock
from kvstore.connectors.checkpoint_files import model_fingerprint
from kvstore.connectors.common import CacheClient, ConnectorCounters, UnsupportedModelError
from kvstore.connectors.engine_settings import connect
from kvstore.connectors.vllm.assembly import join_engine_log
from kvstore.connectors.vllm.chunks import ChunkParts, Chunks, Job, chunk_layout
from kvstore.connectors.vllm.layout import checkpoint_folder
from kvstore.connectors.vllm.settings import parse_settings
from kvstore.errors import KvstoreError
from kvstore.types import Namespace

# ruff: noqa: ANN401  # vLLM's own classes, of which it tells no types

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from kvstore.connectors.vllm.chunks import Rows
    from kvstore.connectors.vllm.settings import VllmSettings
    from kvstore.transport.client import Client

_ANSWERS = {True: LookupResult.HIT, False: LookupResult.MISS, None: LookupResult.RETRY}


class KvstoreTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM has no types here
    """The tier. Settings are those of the connector, as far as they fit; `locality` is vLLM's own."""

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        locality: str | None = None,  # noqa: ARG002  # vLLM sets the attribute itself
        **settings: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        join_engine_log()
        self.counters = ConnectorCounters()
        self._store: Client | None = None
        self._chunks: Chunks | None = None
        self._refused: list[int] = []
        rows = np.asarray(primary_kv_view).view(np.uint8)
        self._row_bytes = int(rows.shape[1])
        try:
            parsed = parse_settings(settings)
            self._store = connect(parsed)
            self._chunks = Chunks(
                ChunkParts(
                    CacheClient(self._store, self.counters),
                    self.counters,
                    SystemClock(),
                    rows,
                    partial(_namespace, parsed, parsed.secret(), rows, offloading_spec),
                    parsed.weights_version,
                    parsed.lookup_seconds,
                )
            )
        except KvstoreError as error:
            self.counters.count_failure(error)

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """Whether a chunk is stored, or ask again."""
        return _ANSWERS[False if self._chunks is None else self._chunks.look_up(bytes(key), req_context.req_id)]

    def submit_store(self, job_metadata: Any) -> None:
        """Store chunks in the background."""
        if self._chunks is None:
            self._refused.append(job_metadata.job_id)
        else:
            self._chunks.store(_job(job_metadata))

    def submit_load(self, job_metadata: Any) -> None:
        """Load chunks in the background."""
        if self._chunks is None:
            self._refused.append(job_metadata.job_id)
        else:
            self._chunks.load(_job(job_metadata))

    def get_finished_jobs(self) -> Iterable[Any]:
        """How jobs ended since the last call."""
        refused, self._refused = self._refused, []
        return [JobResult(job_id, success=False) for job_id in refused] + [
            JobResult(
                outcome.job.job_id,
                success=outcome.is_whole,
                successful_keys=outcome.keys,
                transfer_time=outcome.seconds,
                transfer_bytes=len(outcome.keys) * self._row_bytes,
            )
            for outcome in ([] if self._chunks is None else self._chunks.take_outcomes())
        ]

    def has_pending_work(self) -> bool:
        """Whether something is under way that will be told of."""
        return bool(self._refused) or (self._chunks is not None and self._chunks.is_busy)

    def on_new_request(self, req_context: Any) -> Any:  # noqa: ARG002  # every request is served alike
        """Chunks as they come are enough."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """Nothing more is asked for this request."""
        if self._chunks is not None:
            self._chunks.forget(req_context.req_id)

    def on_schedule_end(self, context: Any) -> None:  # noqa: ARG002
        """Ask the store for what this step has looked up."""
        if self._chunks is not None:
            self._chunks.flush()

    def drain_jobs(self) -> None:
        """Wait until nothing touches vLLM's memory."""
        if self._chunks is not None:
            self._chunks.drain()

    def shutdown(self) -> None:
        """Leave the server."""
        if self._chunks is not None:
            self._chunks.close()
        if self._store is not None:
            self._store.close()


def _job(metadata: Any) -> Job:
    keys: Collection[bytes] = metadata.keys
    return Job(metadata.job_id, tuple(bytes(key) for key in keys), tuple(int(row) for row in metadata.chunk_ids))


def _namespace(settings: VllmSettings, secret: bytes | None, rows: Rows, spec: Any) -> Namespace:
    """Whose chunks these are. Reads the weights, unless `revision` names them."""
    config = getattr(spec, "config", None)
    model = settings.model or (None if config is None else config.model.name)
    if model is None:
        raise UnsupportedModelError('vLLM does not say which model this is; name it in the setting "model"')
    facts = "" if config is None else _facts(config)
    revision = settings.revision
    if revision is None:
        revision = model_fingerprint(checkpoint_folder(model, None), f"vllm {vllm.__version__} {facts}")
    tokens = 1 if config is None else config.groups[0].tokens_per_block * config.cache.blocks_per_chunk
    layout = chunk_layout(rows.shape[1], tokens, facts)
    return Namespace(model=model, revision=revision, layout=layout, tenant=settings.tenant, secret=secret)


def _facts(config: Any) -> str:
    """What gives the bytes of a chunk meaning, as far as vLLM says it; of ranks only how many there are."""
    groups = [(group.tokens_per_block, *group.layer_names) for group in config.groups]
    parallel = config.parallel
    return (
        f"{config.model.dtype} {config.kv_cache_layout} {config.canonical_layout} {config.replicated_layout} "
        f"{config.cache} {config.worker_kv_bytes_per_block} {parallel.world_size} {parallel.tp_size} "
        f"{parallel.pp_size} {parallel.pcp_size} {parallel.dcp_size} {groups}"
    )
