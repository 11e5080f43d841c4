"""The class that SGLang loads: its HiCacheStorage interface over a SglangBackend, at the versions in docs/support.md.

The interface is described in sglang/srt/mem_cache/hicache_storage.py of SGLang 0.5.23.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any, TypeAlias

import sglang
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolTransferResult
from sglang.srt.observability.metrics_collector import StorageMetrics
from sglang.srt.runtime_context import get_server_args, get_serving

from kvstore.connectors.common import UnsupportedModelError
from kvstore.connectors.engine_settings import connect
from kvstore.connectors.sglang.backend import SglangBackend
from kvstore.connectors.sglang.layout import KV_POOL, Rank
from kvstore.connectors.sglang.revision import find_revision
from kvstore.connectors.sglang.settings import parse_settings
from kvstore.errors import ConfigError, KvstoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.connectors.common import ConnectorStats
    from kvstore.connectors.sglang.settings import SglangSettings

# What SGLang hands over and takes back: torch tensors, and dataclasses of its own, which are not typed.
Theirs: TypeAlias = Any

logger = logging.getLogger(__name__)


class KvstoreStorage(HiCacheStorage):  # type: ignore[misc]  # SGLang is not typed
    """SGLang's pages in a kvstore server. Where it cannot work it says so in one log line, and finds nothing."""

    def __init__(self, storage_config: Theirs, kwargs: dict[str, Theirs] | None = None) -> None:  # noqa: ARG002
        _join_engine_log()
        self._backend = _made_or_off(storage_config)

    def register_mem_pool_host(self, mem_pool_host: Theirs) -> None:
        """Serve the KV pages of this pool."""
        super().register_mem_pool_host(mem_pool_host)
        self._add_pool(KV_POOL, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Theirs, host_pool_name: Theirs) -> None:
        """Serve the pages of another pool."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._add_pool(str(host_pool_name), host_pool)

    def batch_exists(self, keys: list[str], extra_info: Theirs = None) -> int:
        """How many of the leading pages are stored."""
        return 0 if self._backend is None else self._backend.leading(keys, _prefix_keys(extra_info))

    def batch_exists_v2(self, keys: list[str], pool_transfers: Theirs = None, extra_info: Theirs = None) -> Theirs:
        """How many of the leading pages are stored, with what each pool needs."""
        if self._backend is None:
            return PoolTransferResult.empty()
        found = self._backend.lookup(keys, pool_transfers or (), _prefix_keys(extra_info))
        return PoolTransferResult(found.pages, dict(found.pool_pages), found.restorable)

    def batch_get_v1(self, keys: list[str], host_indices: Theirs, extra_info: Theirs = None) -> list[bool]:
        """Load KV pages into host memory."""
        if self._backend is None:
            return [False] * len(keys)
        return self._backend.load(KV_POOL, keys, host_indices, _prefix_keys(extra_info))

    def batch_set_v1(self, keys: list[str], host_indices: Theirs, extra_info: Theirs = None) -> list[bool]:
        """Store KV pages."""
        if self._backend is None:
            return [False] * len(keys)
        return self._backend.save(KV_POOL, keys, host_indices, _prefix_keys(extra_info))

    def batch_get_v2(self, transfers: Sequence[Theirs], extra_info: Theirs = None) -> dict[Theirs, list[bool]]:
        """Load pages of several pools."""
        return {item.name: self._moved(item, extra_info, self._load) for item in transfers}

    def batch_set_v2(self, transfers: Sequence[Theirs], extra_info: Theirs = None) -> dict[Theirs, list[bool]]:
        """Store pages of several pools."""
        return {item.name: self._moved(item, extra_info, self._save) for item in transfers}

    def exists(self, key: str) -> bool:
        """Whether a page is stored by itself."""
        return self.batch_exists([key]) == 1

    def get(self, key: str, *_: Theirs, **__: Theirs) -> None:  # noqa: ARG002  # SGLang's own interface
        """A miss: flat tensors have their bytes in another order than pages; see `interface_v1`."""
        return

    def batch_get(self, keys: list[str], *_: Theirs, **__: Theirs) -> list[None]:
        """Misses; see `get`."""
        return [None] * len(keys)

    def set(self, *_: Theirs, **__: Theirs) -> bool:
        """Stores nothing; see `get`."""
        return False

    def batch_set(self, *_: Theirs, **__: Theirs) -> bool:
        """Stores nothing; see `get`."""
        return False

    def clear(self) -> None:
        """Drop the pages of this rank from the store, on disk too."""
        if self._backend is not None:
            self._backend.clear()

    def get_stats(self) -> Theirs:
        """The batches moved since the last call, for SGLang's own metrics."""
        moved = [] if self._backend is None else self._backend.take_transfers()
        loads, saves = [item for item in moved if item.is_load], [item for item in moved if not item.is_load]
        return StorageMetrics(
            prefetch_pgs=[item.pages for item in loads],
            backup_pgs=[item.pages for item in saves],
            prefetch_bandwidth=[item.gb_per_second for item in loads],
            backup_bandwidth=[item.gb_per_second for item in saves],
        )

    def connector_stats(self) -> ConnectorStats | None:
        """What the connector has done since the start; None where it is off."""
        return None if self._backend is None else self._backend.stats()

    def close(self) -> None:
        """Leave the server."""
        if self._backend is not None:
            self._backend.close()

    def _add_pool(self, name: str, pool: Theirs) -> None:
        if self._backend is not None:
            self._backend.add_pool(name, pool, torch.arange(pool.page_size, dtype=torch.int64))

    def _moved(self, transfer: Theirs, extra_info: Theirs, move: Callable[..., list[bool]]) -> list[bool]:
        keys = transfer.keys or []
        if self._backend is None or not keys or transfer.host_indices is None:
            return [False] * len(keys)
        return move(str(transfer.name), keys, transfer.host_indices, _prefix_keys(extra_info))

    def _load(self, *batch: Theirs) -> list[bool]:
        return [] if self._backend is None else self._backend.load(*batch)

    def _save(self, *batch: Theirs) -> list[bool]:
        return [] if self._backend is None else self._backend.save(*batch)


def _made_or_off(storage_config: Theirs) -> SglangBackend | None:
    try:
        extra_config = storage_config.extra_config or {}
        if not extra_config.get("interface_v1"):
            raise ConfigError(
                '"interface_v1": 1 is missing in --hicache-storage-backend-extra-config; pages are moved by it alone'
            )
        settings = parse_settings(extra_config)
        rank = Rank.of_config(storage_config)
        model = settings.model or storage_config.model_name or "sglang"
        _epoch()  # a version of SGLang that does not tell cannot be kept from the pages of older weights
        backend = SglangBackend(settings, rank, model, connect(settings), epoch=_epoch)
    except (KvstoreError, AttributeError, RuntimeError) as error:
        logger.warning("kvstore connector goes on without the store: kind=%s error=%s", type(error).__name__, error)
        return None
    if settings.revision is not None:
        backend.use_revision(_with_version(settings.revision, settings))
    else:
        threading.Thread(target=_tell_revision, args=(backend, settings), name="kvstore-revision", daemon=True).start()
    return backend


def _tell_revision(backend: SglangBackend, settings: SglangSettings) -> None:
    """Name the weights, which takes as long as reading all of them once; until then nothing is found or stored."""
    try:
        revision = find_revision(get_server_args(), sglang.__version__)
    except (UnsupportedModelError, OSError) as error:
        backend.counters.count_failure(error)
        return
    backend.use_revision(_with_version(revision, settings))


def _with_version(revision: str, settings: SglangSettings) -> str:
    return revision if settings.weights_version is None else f"{revision} {settings.weights_version}"


def _prefix_keys(extra_info: Theirs) -> list[str] | None:
    return None if extra_info is None else extra_info.prefix_keys


def _epoch() -> str:
    """The weights that SGLang computes with now: updates in place that name a version never meet older pages."""
    return str(get_serving().weight_version)


def _join_engine_log() -> None:
    """Let what kvstore logs appear where SGLang's own log does, which goes through the root logger."""
    ours = logging.getLogger("kvstore")
    if ours.level == logging.NOTSET:
        ours.setLevel(logging.getLogger("sglang").getEffectiveLevel())
