"""What the connector does for SGLang, without SGLang: pools, namespaces, and answers that are never an exception."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from kvstore.clock import SystemClock
from kvstore.connectors.common import CacheClient, ConnectorCounters, HookGuard, SelfCheckError, UnsupportedModelError
from kvstore.connectors.sglang.chains import Chain, PageStore
from kvstore.connectors.sglang.layout import KV_POOL, TRAILING_POOLS, page_layout
from kvstore.connectors.sglang.pages import Bounce, HostPages
from kvstore.types import Namespace, Root

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.api import KvStore
    from kvstore.clock import Clock
    from kvstore.connectors.common import ConnectorStats
    from kvstore.connectors.sglang.layout import Rank
    from kvstore.connectors.sglang.pages import HostPool, Indices
    from kvstore.connectors.sglang.settings import SglangSettings

logger = logging.getLogger(__name__)

CHECK_SECONDS = 5.0
_TRANSFERS_MAX = 4096


class Transfer(Protocol):
    """What we use of a PoolTransfer of SGLang's."""

    name: Any
    host_indices: Indices
    keys: list[str] | None
    hit_policy: str


@dataclass(frozen=True, slots=True)
class Lookup:
    """Of a lookup over several pools: usable pages, those that each pool has, and all lengths that can be restored."""

    pages: int
    pool_pages: dict[str, int]
    restorable: list[int]


@dataclass(frozen=True, slots=True)
class PageTransfer:
    """One batch that was read or written: its pages, and how many a second."""

    is_load: bool
    pages: int
    gb_per_second: float


class SglangBackend:
    """Finds, loads and stores pages. Every failure is a miss, counted, and logged once for each kind.

    Called from SGLang's storage threads: lookups, loads and stores each have one, and the lock guards what they share.
    Nothing is asked of the store before `use_revision` said which weights these are, and of a pool not before a random
    page of it came back as it was stored; where other bytes come back, that pool stays off. `epoch` names the weights
    that the engine computes with now: pages of other ones are not found.
    """

    def __init__(
        self,
        settings: SglangSettings,
        rank: Rank,
        model: str,
        store: KvStore,
        *,
        epoch: Callable[[], str | None],
        clock: Clock | None = None,
    ) -> None:
        self.counters = ConnectorCounters()
        self._guard = HookGuard(self.counters, lambda: None)
        self._settings = settings
        self._rank = rank
        self._model = model
        self._store = store
        self._epoch = epoch
        self._clock = SystemClock() if clock is None else clock
        self._revision: str | None = None
        self._lock = threading.Lock()
        self._pools: dict[str, tuple[HostPool, Indices]] = {}
        self._stores: dict[str, PageStore | None] = {}
        self._loads, self._saves = Bounce(settings.buffer_bytes), Bounce(settings.buffer_bytes)
        self._transfers: list[PageTransfer] = []

    def use_revision(self, revision: str) -> None:
        """These are the weights: what the store has of them may be used from now on."""
        with self._lock:
            self._revision = revision

    def add_pool(self, name: str, pool: HostPool, first_page: Indices) -> None:
        """Serve the pages of this pool, too; `first_page` are the token indices of any of them."""
        with self._lock:
            self._pools[name] = (pool, first_page)
            self._stores.pop(name, None)

    def leading(self, keys: Sequence[str], prefix_keys: Sequence[str] | None) -> int:
        """How many of the leading KV pages are stored."""

        def find() -> int:
            store = self._ready(KV_POOL)
            if store is None:
                return 0
            tokens = store.namespace.layout.block_tokens
            self.counters.add(lookups=1, lookup_tokens=len(keys) * tokens)
            found = store.leading(Chain.of_keys(keys, prefix_keys), self._root(), self._settings.lookup_seconds)
            self.counters.add(matched_tokens=found * tokens)
            return found

        return self._guard.run(find, 0)

    def lookup(self, keys: Sequence[str], transfers: Sequence[Transfer], prefix_keys: Sequence[str] | None) -> Lookup:
        """At which lengths the KV pages and what the other pools need with them are all stored."""
        ends_at = self._clock.monotonic() + self._settings.lookup_seconds
        kv_pages = self.leading(keys, prefix_keys)
        pool_pages = {KV_POOL: kv_pages} if kv_pages else {}
        restorable = set(range(1, kv_pages + 1))
        for transfer in transfers:
            if not restorable:
                break
            lengths = self._lengths(transfer, keys[:kv_pages], prefix_keys, ends_at)
            if lengths:
                pool_pages[_name(transfer)] = max(lengths)
            restorable &= lengths
        ordered = sorted(restorable)
        return Lookup(ordered[-1] if ordered else 0, pool_pages, ordered)

    def load(self, name: str, keys: Sequence[str], indices: Indices, prefix_keys: Sequence[str] | None) -> list[bool]:
        """Copy pages of a pool into host memory; says of which the bytes are right."""

        def read() -> int:
            store = self._ready(name)
            if store is None:
                return 0
            began = self._clock.monotonic()
            chain = Chain.of_keys(keys, None if name in TRAILING_POOLS else prefix_keys)
            pages = store.load(chain, self._root(), indices, self._loads, self._settings.bulk_seconds)
            self._note(store, pages, self._clock.monotonic() - began, is_load=True)
            return pages

        return _leading_true(self._guard.run(read, 0), len(keys))

    def save(self, name: str, keys: Sequence[str], indices: Indices, prefix_keys: Sequence[str] | None) -> list[bool]:
        """Store pages of a pool; says which are stored now. Where another rank writes the same pages, all are."""
        if not self._rank.writes(name):
            return [True] * len(keys)

        def write() -> int:
            store = self._ready(name)
            if store is None:
                return 0
            began = self._clock.monotonic()
            chain = Chain.of_keys(keys, None if name in TRAILING_POOLS else prefix_keys)
            pages = store.save(chain, self._root(), indices, self._saves, self._settings.bulk_seconds)
            self._note(store, pages, self._clock.monotonic() - began, is_load=False)
            return pages

        return _leading_true(self._guard.run(write, 0), len(keys))

    def clear(self) -> None:
        """Drop what the store has of the pools of this rank, in all weights epochs."""
        with self._lock:
            names = list(self._pools)
        for name in names:
            self._guard.run(partial(self._clear, name), None)

    def stats(self) -> ConnectorStats:
        """What was done since the start."""
        return self.counters.snapshot(0)

    def take_transfers(self) -> list[PageTransfer]:
        """The batches moved since the last call; the oldest are dropped where nobody asks."""
        with self._lock:
            taken, self._transfers = self._transfers, []
        return taken

    def close(self) -> None:
        """Leave the store."""
        self._guard.run(self._store.close, None)

    def _clear(self, name: str) -> None:
        store = self._ready(name)
        if store is not None:
            self._store.clear(store.namespace)

    def _lengths(
        self, transfer: Transfer, keys: Sequence[str], prefix_keys: Sequence[str] | None, ends_at: float
    ) -> set[int]:
        nothing: set[int] = set()
        return self._guard.run(lambda: self._restorable(transfer, keys, prefix_keys, ends_at), nothing)

    def _restorable(
        self, transfer: Transfer, keys: Sequence[str], prefix_keys: Sequence[str] | None, ends_at: float
    ) -> set[int]:
        """The lengths at which a pool has what it needs; none where the time for the lookup is over."""
        store = self._ready(_name(transfer))
        left_seconds = ends_at - self._clock.monotonic()
        if store is None or left_seconds <= 0:
            return set()
        if transfer.hit_policy == "all_pages":
            chain = Chain.of_keys(keys, prefix_keys)
            return set(range(1, store.leading(chain, self._root(), left_seconds) + 1))
        if transfer.hit_policy != "trailing_pages":
            return set()
        stored = store.stored(Chain.of_keys(keys, None), self._root(), left_seconds)
        return _windows(stored, len(keys), max(1, len(transfer.keys or ())))

    def _ready(self, name: str) -> PageStore | None:
        """The pages of a pool where they are fit to be used."""
        with self._lock:
            if name in self._stores or self._revision is None:
                return self._stores.get(name)
            pool, first_page = self._pools.get(name, (None, None))
            revision = self._revision
        if pool is None:
            return None
        try:
            store = self._make_store(name, pool, first_page, revision)
        except UnsupportedModelError:
            self._use(name, None)
            raise
        is_sound = CacheClient(self._store, self.counters).check(store.namespace)
        if is_sound is None:
            return None
        self._use(name, store if is_sound else None)
        if not is_sound:
            raise SelfCheckError(f"a random page of pool {name!r} came back with other bytes; the pool stays off")
        logger.info(
            "kvstore connector: pages of pool %s are kept: page_bytes=%d tokens=%d layout=%s",
            name,
            store.namespace.layout.block_bytes,
            store.namespace.layout.block_tokens,
            store.namespace.layout.axis_order,
        )
        return store

    def _use(self, name: str, store: PageStore | None) -> None:
        with self._lock:
            self._stores[name] = store

    def _make_store(self, name: str, pool: HostPool, first_page: Indices, revision: str) -> PageStore:
        pages = HostPages(pool, first_page)
        namespace = Namespace(
            model=self._model,
            revision=revision,
            layout=page_layout(name, pool, pages, self._rank),
            tenant=self._settings.tenant,
            secret=self._settings.secret(),
        )
        return PageStore(self._store, namespace, pages, self._clock, self.counters)

    def _root(self) -> Root | None:
        epoch = self._epoch()
        return None if epoch is None else Root(weights_epoch=epoch)

    def _note(self, store: PageStore, pages: int, seconds: float, *, is_load: bool) -> None:
        moved = pages * store.namespace.layout.block_bytes
        with self._lock:
            self._transfers.append(PageTransfer(is_load, pages, moved / max(seconds, 1e-9) / 1e9))
            del self._transfers[:-_TRANSFERS_MAX]


def _name(transfer: Transfer) -> str:
    return str(transfer.name)


def _leading_true(count: int, length: int) -> list[bool]:
    return [index < count for index in range(length)]


def _windows(stored: set[int], pages: int, window: int) -> set[int]:
    """The lengths up to `pages` whose last `window` pages are all stored; of shorter ones all pages."""
    lengths, run = set(), 0
    for length in range(1, pages + 1):
        run = run + 1 if length - 1 in stored else 0
        if run >= min(window, length):
            lengths.add(length)
    return lengths
