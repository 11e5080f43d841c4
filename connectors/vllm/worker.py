"""The worker's half of the connector: copies between the engine's blocks and rows, and rows from and to the server.

Runs in vLLM's worker, one for each tensor-parallel rank. Nothing that the engine calls waits for the server: loads and
stores run on threads. Every load that is begun is reported once, as loaded or with the blocks that are not, and so is
every held request, whatever happens to the server or to a thread.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvstore.connectors.common import SelfCheckError
from kvstore.connectors.vllm.rows import RowPool
from kvstore.connectors.vllm.soundness import SelfCheck, Soundness
from kvstore.errors import KvstoreError
from kvstore.thread_pool import ThreadPool
from kvstore.tiers.device import CopyOutcome
from kvstore.types import PrefixMatch, Tier, TierRun

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.api import Lease
    from kvstore.clock import Clock
    from kvstore.connectors.common import CacheClient, ConnectorCounters, Writer
    from kvstore.connectors.vllm.plan import BlockJob, StepPlan
    from kvstore.connectors.vllm.settings import VllmSettings
    from kvstore.tiers.base import Bytes2D
    from kvstore.tiers.device import BlockCopier, CopyHandle, PagedKv
    from kvstore.tiers.device_copies import Stream
    from kvstore.types import KvLayout, Namespace

logger = logging.getLogger(__name__)

LOAD_THREADS = 2
CHUNK_BYTES = 16 << 20
COPY_SECONDS_MAX = 60.0
_CHECK_REVISION = "kvstore self-check"


@dataclass(frozen=True, slots=True)
class Engine:
    """The engine's memory as one rank sees it."""

    pages: PagedKv
    copier: BlockCopier


@dataclass(slots=True)
class WorkerParts:
    """What the worker's half is made of.

    `check_client` may take longer than `client`. `writes` is false where another rank writes the same bytes.
    """

    client: CacheClient
    check_client: CacheClient
    counters: ConnectorCounters
    clock: Clock
    settings: VllmSettings
    layout: KvLayout
    check_layout: KvLayout
    namespace: Callable[[str], Namespace]
    writer: Writer
    writes: bool


@dataclass(slots=True)
class _Outcomes:
    """What threads have ended since the engine asked last. `lock` guards all."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    loaded: set[str] = field(default_factory=set)
    failed_blocks: set[int] = field(default_factory=set)


class WorkerSide:
    """The worker's half. Without an engine every load fails at once, and nothing is stored."""

    def __init__(self, parts: WorkerParts, engine: Engine | None) -> None:
        self._parts = parts
        self._engine = engine
        self._outcomes = _Outcomes()
        self._copies: defaultdict[str, list[CopyHandle]] = defaultdict(list)
        self._held: set[str] = set()
        self._namespace: Namespace | None = None
        self._off = engine is None
        self._threads = ThreadPool(LOAD_THREADS, "vllm-load")
        self._store_thread = ThreadPool(1, "vllm-store")
        self._load_rows, self._store_rows = self._pools(engine)
        self._check = None if engine is None else SelfCheck(self._gives_back, parts.clock)

    @property
    def soundness(self) -> Soundness:
        """Whether anything may be promised to this worker."""
        return Soundness.UNSOUND if self._off or self._check is None else self._check.state

    def switch_off(self) -> None:
        """Take no new work; what is under way is reported all the same."""
        self._off = True

    def settle_copies(self) -> None:
        """Wait until nothing reads the engine's blocks: some of them are about to be given to other requests."""
        for handles in self._copies.values():
            for handle in handles:
                handle.wait(COPY_SECONDS_MAX)

    def start_loads(self, plan: StepPlan) -> None:
        """Begin the loads of a step, on threads. One that cannot be begun is reported as failed."""
        waiting = plan.loads[::-1]
        try:
            self._learn(plan)
            if self._check is not None:
                self._check.poll()
            stream = None if self._engine is None else self._engine.copier.current_stream()
            while waiting:
                self._threads.submit(self._load, waiting[-1], stream)
                waiting.pop()
        finally:
            for job in waiting:
                self._report_load(job, 0)

    def start_stores(self, plan: StepPlan) -> None:
        """Copy out the blocks that a step has filled, behind its computation, and store them later."""
        self._held.update(plan.held)
        self._learn(plan)
        for job in plan.stores:
            if self._parts.writes:
                self._parts.counters.add(dropped_blocks=len(job.block_ids) - self._copy_out(job))

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Held requests whose blocks nothing reads any more, and requests whose loads have ended."""
        for request_id in list(self._copies):
            pending = [handle for handle in self._copies[request_id] if handle.outcome is CopyOutcome.PENDING]
            if pending:
                self._copies[request_id] = pending
            else:
                del self._copies[request_id]
        sent = {request_id for request_id in self._held if request_id not in self._copies}
        self._held -= sent
        with self._outcomes.lock:
            loaded, self._outcomes.loaded = self._outcomes.loaded, set()
        return sent, loaded

    def take_failed_blocks(self) -> set[int]:
        """The engine's blocks that were to be loaded and hold nothing."""
        with self._outcomes.lock:
            failed, self._outcomes.failed_blocks = self._outcomes.failed_blocks, set()
        return failed

    def close(self) -> None:
        """Take no more work; what waits is dropped."""
        self._off = True
        for threads in (self._threads, self._store_thread):
            threads.shutdown(wait=False, cancel_futures=True)

    def _pools(self, engine: Engine | None) -> tuple[RowPool | None, RowPool | None]:
        if engine is None:
            return None, None
        row_bytes, half = engine.pages.block_bytes, self._parts.settings.buffer_bytes // 2
        return RowPool(engine.copier, row_bytes, half), RowPool(engine.copier, row_bytes, half)

    @property
    def _is_sound(self) -> bool:
        return self.soundness is Soundness.SOUND

    def _gives_back(self) -> bool | None:
        namespace = replace(self._parts.namespace(_CHECK_REVISION), layout=self._parts.check_layout)
        found = self._parts.check_client.check(namespace)
        if found is False:
            error = SelfCheckError("the store gave back other bytes than it was given; it is not used any more")
            self._parts.counters.count_failure(error)
        return found

    def _learn(self, plan: StepPlan) -> None:
        if self._namespace is None and plan.revision is not None:
            self._namespace = self._parts.namespace(plan.revision)

    def _load(self, job: BlockJob, stream: Stream | None) -> None:
        """On a thread: load what can be, and report it, whatever happens."""
        progress = _Progress()
        try:
            if self._engine is not None and self._load_rows is not None and self._is_sound:
                self._load_into_engine(job, progress, self._engine, self._load_rows, stream=stream)
        finally:
            self._report_load(job, progress.blocks)

    def _report_load(self, job: BlockJob, good: int) -> None:
        self._parts.counters.add(loaded_tokens=good * self._parts.layout.block_tokens)
        with self._outcomes.lock:
            self._outcomes.failed_blocks.update(job.block_ids[good:])
            self._outcomes.loaded.add(job.request_id)

    def _load_into_engine(
        self, job: BlockJob, progress: _Progress, engine: Engine, pool: RowPool, *, stream: Stream | None
    ) -> None:
        assert self._namespace is not None, "loads come behind the revision"
        end = job.first_block + len(job.block_ids)
        runs = (TierRun(Tier.HOST, end),)
        match = PrefixMatch(self._namespace, job.root, job.tokens.token_array(), end, runs)
        # Half of the rows for each thread: there is always a run for who asks.
        run = pool.take(min(len(job.block_ids), pool.count // LOAD_THREADS))
        assert run is not None, "no thread that loads holds more than its share"
        buffer = pool.rows(run)

        def load(lease: Lease) -> None:
            while progress.blocks < len(job.block_ids):
                targets = job.block_ids[progress.blocks : progress.blocks + len(buffer)]
                rows = buffer[: len(targets)]
                first = job.first_block + progress.blocks
                good = lease.load_into(rows, from_block=first, part=self._parts.writer.part).blocks
                if good:
                    copy = engine.copier.load(engine.pages, targets[:good], rows[:good], stream=stream)
                    if copy.wait(COPY_SECONDS_MAX) is not CopyOutcome.COPIED:
                        return
                progress.blocks += good
                if good < len(targets):
                    return

        try:
            self._parts.client.load_leased(match, load)
        finally:
            pool.give_back(run)

    def _copy_out(self, job: BlockJob) -> int:
        """Begin to copy a job's blocks into rows, as many as there is room for; how many of them."""
        engine, pool = self._engine, self._store_rows
        if engine is None or pool is None or self._namespace is None or not self._is_sound:
            return 0
        done = 0
        while done < len(job.block_ids):
            run = pool.take(min(len(job.block_ids) - done, max(1, CHUNK_BYTES // engine.pages.block_bytes)))
            if run is None:
                break
            rows = pool.rows(run)
            try:
                copy = engine.copier.store(engine.pages, job.block_ids[done : done + len(run)], rows)
            except KvstoreError as error:
                pool.give_back(run)
                self._parts.counters.count_failure(error)
                break
            self._copies[job.request_id].append(copy)
            self._store_thread.submit(self._store, job, job.first_block + done, copy, _Rows(pool, run, rows))
            done += len(run)
        return done

    def _store(self, job: BlockJob, first: int, copy: CopyHandle, held: _Rows) -> None:
        """On the store thread: send the rows once they are copied."""
        assert self._namespace is not None, "stores come behind the revision"
        outcome = copy.wait(COPY_SECONDS_MAX)
        try:
            if outcome is CopyOutcome.COPIED and self._is_sound:
                end = (first + len(held.rows)) * self._parts.layout.block_tokens
                tokens = job.tokens.token_array()[:end]
                self._parts.client.store(
                    self._namespace, tokens, held.rows, root=job.root, from_block=first, writer=self._parts.writer
                )
            else:
                self._parts.counters.add(dropped_blocks=len(held.rows))
        finally:
            if outcome not in (CopyOutcome.PENDING, CopyOutcome.LOST):  # what may still be written to is not reused
                held.pool.give_back(held.run)


@dataclass(slots=True)
class _Progress:
    """How many leading blocks of a load are in the engine, verified."""

    blocks: int = 0


@dataclass(frozen=True, slots=True)
class _Rows:
    """Blocks on their way to the server, in rows of a pool."""

    pool: RowPool
    run: range
    rows: Bytes2D
