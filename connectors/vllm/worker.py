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
from functools import partial
from typing import TYPE_CHECKING

from kvstore.connectors.common import SelfCheckError, SparseRows
from kvstore.connectors.vllm.by_layer import LayeredCopy, LayeredLoad
from kvstore.connectors.vllm.rows import RowPool
from kvstore.connectors.vllm.soundness import SelfCheck, Soundness
from kvstore.errors import KvstoreError
from kvstore.thread_pool import ThreadPool
from kvstore.tiers.device import CopyOutcome
from kvstore.types import PrefixMatch, Tier, TierRun

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import TypeAlias

    from kvstore.api import Lease
    from kvstore.clock import Clock
    from kvstore.connectors.common import CacheClient, ConnectorCounters, Writer
    from kvstore.connectors.vllm.plan import BlockJob, PartBlocks, StepPlan
    from kvstore.connectors.vllm.settings import VllmSettings
    from kvstore.tiers.base import Bytes2D
    from kvstore.tiers.device import BlockCopier, CopyHandle, PagedKv
    from kvstore.tiers.device_copies import Stream
    from kvstore.types import KvLayout, Namespace

    AnyCopy: TypeAlias = CopyHandle | LayeredCopy
    BeginCopy: TypeAlias = Callable[[tuple[int, ...], Bytes2D], AnyCopy]

logger = logging.getLogger(__name__)

LOAD_THREADS = 2
CHUNK_BYTES = 16 << 20
COPY_SECONDS_MAX = 60.0
_CHECK_REVISION = "kvstore self-check"


@dataclass(frozen=True, slots=True)
class WindowPages:
    """The memory of a group of layers with a window, and which part of each block this rank has there."""

    pages: PagedKv
    part: int


@dataclass(frozen=True, slots=True)
class Engine:
    """The engine's memory as one rank sees it: that of full attention, and of each group with a window."""

    pages: PagedKv
    copier: BlockCopier
    windows: tuple[WindowPages, ...] = ()


@dataclass(slots=True)
class WorkerParts:
    """What the worker's half is made of.

    `check_client` may take longer than `client`. `writes` is false where another rank writes the same bytes. `layers`
    are the names of those that are loaded and stored by layer; without any, whole requests are, between steps.
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
    layers: Sequence[str] = ()


@dataclass(slots=True)
class _Outcomes:
    """What threads have ended since the engine asked last. `lock` guards all."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    loaded: set[str] = field(default_factory=set)
    failed_blocks: set[int] = field(default_factory=set)
    failed_requests: set[str] = field(default_factory=set)


class WorkerSide:
    """The worker's half. Without an engine every load fails at once, and nothing is stored."""

    def __init__(self, parts: WorkerParts, engine: Engine | None) -> None:
        self._parts = parts
        self._engine = engine
        self._outcomes = _Outcomes()
        self._copies: defaultdict[str, list[AnyCopy]] = defaultdict(list)
        self._window_copies: list[AnyCopy] = []
        self._layers = {name: place for place, name in enumerate(parts.layers)}
        self._layered_loads: list[LayeredLoad] = []
        self._layered_stores: list[tuple[BlockJob, list[_Copied]]] = []
        self._loaded_in_step: set[str] = set()
        self._layer_failures = 0
        self._held: set[str] = set()
        self._namespace: Namespace | None = None
        self._off = engine is None
        self._threads = ThreadPool(LOAD_THREADS, "vllm-load")
        self._store_thread = ThreadPool(1, "vllm-store")
        parts_here = [] if engine is None else self._parts_of(engine)
        self._full: _Part | None = parts_here[0] if parts_here else None
        self._windows = parts_here[1:]
        self._check = None if engine is None else SelfCheck(self._gives_back, parts.clock)

    @property
    def soundness(self) -> Soundness:
        """Whether anything may be promised to this worker."""
        return Soundness.UNSOUND if self._off or self._check is None else self._check.state

    def switch_off(self) -> None:
        """Take no new work; what is under way is reported all the same."""
        self._off = True

    def protect_copies(self, plan: StepPlan) -> None:
        """Let what this step computes begin behind the copies out of blocks that it may write to.

        These are blocks that slid out of a window since, and all those of requests that lose theirs in this step.
        """
        handles = [*self._window_copies, *(handle for of_one in self._copies.values() for handle in of_one)]
        reused = handles if plan.preempts else self._window_copies
        if self._engine is not None and reused:
            stream = self._engine.copier.current_stream()
            for handle in reused:
                if handle.outcome is CopyOutcome.PENDING:
                    handle.record(stream)
        self._window_copies = []

    def start_loads(self, plan: StepPlan) -> None:
        """Begin the loads of a step, on threads. One that cannot be begun is reported as failed."""
        waiting = plan.loads[::-1]
        try:
            self._learn(plan)
            if self._check is not None:
                self._check.poll()
            stream = None if self._engine is None else self._engine.copier.current_stream()
            while waiting:
                if self._layers:
                    self._begin_layered(waiting[-1], stream)
                else:
                    self._threads.submit(self._load, waiting[-1], stream)
                waiting.pop()
        finally:
            for job in waiting:
                self._refuse_load(job)

    def start_stores(self, plan: StepPlan) -> None:
        """Copy out the blocks that a step has filled, behind its computation, and store them later."""
        self._end_layered_loads()
        self._held.update(plan.held)
        self._learn(plan)
        begun, self._layered_stores = self._layered_stores, []
        for job, copies in begun:
            self._end_layered_store(job, copies, plan)
        done = {id(job) for job, _ in begun}
        for job in plan.stores:
            if self._parts.writes and id(job) not in done:
                copied = 0 if self._may_be_spoiled(plan) else self._copy_out(job)
                self._parts.counters.add(dropped_blocks=len(job.block_ids) - copied)

    @property
    def layer_failures(self) -> int:
        """How many loads by layer have failed, or were cut short."""
        return self._layer_failures

    def take_loaded_in_step(self) -> set[str]:
        """Requests whose loads by layer have ended, however, since this was asked last."""
        ended, self._loaded_in_step = self._loaded_in_step, set()
        return ended

    def wait_layer(self, layer_name: str) -> None:
        """Let the engine compute a layer behind what is loaded of it in this step."""
        layer = self._layers.get(layer_name)
        if layer is not None and self._layered_loads and self._engine is not None:
            stream = self._engine.copier.current_stream()
            for load in self._layered_loads:
                load.wait_layer(layer, stream)

    def save_layer(self, layer_name: str, plan: StepPlan) -> None:
        """A layer of this step is computed: begin to copy out what it has filled."""
        layer = self._layers.get(layer_name)
        if layer is None or not plan.stores or self._off or not self._parts.writes or self._may_be_spoiled(plan):
            return
        if not self._layered_stores:
            self._learn(plan)
            self._layered_stores = [(job, self._plan_layers(job)) for job in plan.stores]
        for _, copies in self._layered_stores:
            for copied in copies:
                assert isinstance(copied.handle, LayeredCopy), "planned above"
                copied.handle.copy_layer(layer)

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

    def take_failed_requests(self) -> set[str]:
        """Requests of which nothing counts as loaded: of an engine with several groups of layers."""
        with self._outcomes.lock:
            failed, self._outcomes.failed_requests = self._outcomes.failed_requests, set()
        return failed

    def close(self) -> None:
        """Take no more work; what waits is dropped."""
        self._off = True
        for threads in (self._threads, self._store_thread):
            threads.shutdown(wait=False, cancel_futures=True)

    def _parts_of(self, engine: Engine) -> list[_Part]:
        """What this rank moves of each block; each part has its share of the rows."""
        found = [(engine.pages, self._parts.writer.part), *((window.pages, window.part) for window in engine.windows)]
        row_bytes = sum(pages.block_bytes for pages, _ in found)
        rows = self._parts.settings.buffer_bytes // 2 // row_bytes
        return [
            _Part(pages, number, *(RowPool(engine.copier, pages.block_bytes, rows) for _ in range(2)))
            for pages, number in found
        ]

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
            if self._engine is not None and self._is_sound:
                self._load_into_engine(job, progress, self._engine.copier, stream)
        finally:
            self._report_load(job, progress)

    def _report_load(self, job: BlockJob, progress: _Progress) -> None:
        """Of several groups of layers all is loaded or nothing: a shorter prefix needs other blocks of a window."""
        several = bool(self._parts.layout.groups)
        good = progress.blocks if progress.is_whole or not several else 0
        self._parts.counters.add(loaded_tokens=good * self._parts.layout.block_tokens)
        with self._outcomes.lock:
            if not several:
                self._outcomes.failed_blocks.update(job.block_ids[good:])
            elif not progress.is_whole:
                self._outcomes.failed_requests.add(job.request_id)
            self._outcomes.loaded.add(job.request_id)

    def _load_into_engine(self, job: BlockJob, progress: _Progress, copier: BlockCopier, stream: Stream | None) -> None:
        assert self._namespace is not None, "loads come behind the revision"
        assert self._full is not None, "an engine has layers of full attention"
        end = job.first_block + len(job.block_ids)
        runs = (TierRun(Tier.HOST, end),)
        match = PrefixMatch(self._namespace, job.root, job.tokens.token_array(), end, runs)
        full = self._full

        def load(lease: Lease) -> None:
            for blocks in _fill(copier, full, lease, job.full, stream):
                progress.blocks += blocks
            windows = [
                sum(_fill(copier, part, lease, blocks, stream)) == len(blocks.block_ids)
                for part, blocks in zip(self._windows, job.windows, strict=True)
            ]
            progress.is_whole = progress.blocks == len(job.block_ids) and all(windows)

        self._parts.client.load_leased(match, load)

    def _copy_out(self, job: BlockJob) -> int:
        """Begin to copy a job's blocks into rows, as many as there is room for; how many of them.

        What layers with windows have goes with the last of them, since only then the store knows where it is wanted.
        """
        if self._engine is None or self._full is None or self._namespace is None or not self._is_sound:
            return 0
        store = self._engine.copier.store
        full = self._begin_copies(partial(store, self._full.pages), self._full, job.full)
        done = sum(len(copied.run) for copied in full)
        windows: list[_Copied] = []
        if done == len(job.block_ids):
            for part, blocks in zip(self._windows, job.windows, strict=True):
                windows += self._begin_copies(partial(store, part.pages), part, blocks)
        self._copies[job.request_id] += [copied.handle for copied in (*full, *windows)]
        self._window_copies += [copied.handle for copied in windows]
        for copied in full:
            self._store_thread.submit(self._store, job, copied, windows if copied is full[-1] else [])
        return done

    def _may_be_spoiled(self, plan: StepPlan) -> bool:
        """Whether this step may have computed with blocks that a load left empty, which was not known when planned."""
        return plan.known_failures < self._layer_failures

    def _refuse_load(self, job: BlockJob) -> None:
        if not self._layers:
            self._report_load(job, _Progress())
            return
        load = LayeredLoad(job)
        load.end()
        self._layered_loads.append(load)

    def _begin_layered(self, job: BlockJob, stream: Stream | None) -> None:
        load = LayeredLoad(job)
        self._threads.submit(self._fill_layered, load, stream)
        self._layered_loads.append(load)

    def _fill_layered(self, load: LayeredLoad, stream: Stream | None) -> None:
        """On a thread: read a load and copy it by layer, whatever happens."""
        full, engine = self._full, self._engine
        run = None
        try:
            if full is None or engine is None or stream is None or not self._is_sound:
                return
            assert self._namespace is not None, "loads come behind the revision"
            job, end = load.job, load.job.first_block + len(load.job.block_ids)
            match = PrefixMatch(self._namespace, job.root, job.tokens.token_array(), end, (TierRun(Tier.HOST, end),))
            run = full.load_rows.take(min(len(job.block_ids), full.load_rows.count // LOAD_THREADS))
            assert run is not None, "no thread that loads holds more than its share"
            rows = full.load_rows.rows(run)
            part = self._parts.writer.part
            self._parts.client.load_leased(
                match, lambda lease: load.fill(lease, engine.copier, full.pages, rows, part=part, stream=stream)
            )
        finally:
            if full is not None and run is not None:
                full.load_rows.give_back(run)
            load.end()

    def _end_layered_loads(self) -> None:
        """The step has computed: say which of its loads have not come."""
        loads, self._layered_loads = self._layered_loads, []
        for load in loads:
            good = load.wait_end()
            self._parts.counters.add(loaded_tokens=good * self._parts.layout.block_tokens)
            if good < len(load.job.block_ids):
                self._layer_failures += 1
                with self._outcomes.lock:
                    self._outcomes.failed_blocks.update(load.job.block_ids[good:])
            self._loaded_in_step.add(load.job.request_id)

    def _plan_layers(self, job: BlockJob) -> list[_Copied]:
        """Rows for a job's blocks, as many as there are, whose layers are still to be copied."""
        engine, full = self._engine, self._full
        if engine is None or full is None or self._namespace is None or not self._is_sound:
            return []

        def begin(ids: tuple[int, ...], rows: Bytes2D) -> LayeredCopy:
            layer = partial(_store_layer, engine.copier, full.pages, ids, rows)
            return LayeredCopy(layer, len(self._layers))

        return self._begin_copies(begin, full, job.full)

    def _end_layered_store(self, job: BlockJob, copies: list[_Copied], plan: StepPlan) -> None:
        for copied in copies:
            assert isinstance(copied.handle, LayeredCopy), "planned by _plan_layers"
            copied.handle.copy_rest()
            if copied.handle.error is not None:
                self._parts.counters.count_failure(copied.handle.error)
        self._copies[job.request_id] += [copied.handle for copied in copies]
        send = self._drop if self._may_be_spoiled(plan) else self._store
        for copied in copies:
            self._store_thread.submit(send, job, copied, [])
        self._parts.counters.add(dropped_blocks=len(job.block_ids) - sum(len(copied.run) for copied in copies))

    def _drop(self, _job: BlockJob, copied: _Copied, _windows: Sequence[_Copied]) -> None:
        """On the store thread: give up rows of what may have been computed from nothing."""
        copied.handle.wait(COPY_SECONDS_MAX)
        self._parts.counters.add(dropped_blocks=len(copied.run))
        copied.let_go()

    def _begin_copies(self, begin: BeginCopy, part: _Part, blocks: PartBlocks) -> list[_Copied]:
        """Begin to copy blocks into rows, until there is no room."""
        begun: list[_Copied] = []
        done = 0
        while done < len(blocks.block_ids):
            wanted = min(len(blocks.block_ids) - done, max(1, CHUNK_BYTES // part.pages.block_bytes))
            run = part.store_rows.take(wanted)
            if run is None:
                break
            rows = part.store_rows.rows(run)
            try:
                handle = begin(blocks.block_ids[done : done + len(run)], rows)
            except KvstoreError as error:
                part.store_rows.give_back(run)
                self._parts.counters.count_failure(error)
                break
            begun.append(_Copied(part, blocks.first_block + done, run, rows, handle))
            done += len(run)
        return begun

    def _store(self, job: BlockJob, full: _Copied, windows: Sequence[_Copied]) -> None:
        """On the store thread: send the rows once they are copied."""
        assert self._namespace is not None, "stores come behind the revision"
        outcomes = {id(copied): copied.handle.wait(COPY_SECONDS_MAX) for copied in (full, *windows)}
        try:
            if outcomes[id(full)] is CopyOutcome.COPIED and self._is_sound:
                end = (full.first_block + len(full.run)) * self._parts.layout.block_tokens
                self._parts.client.store(
                    self._namespace,
                    job.tokens.token_array()[:end],
                    full.rows,
                    root=job.root,
                    from_block=full.first_block,
                    writer=self._parts.writer,
                    sparse=[copied.sparse_rows for copied in windows if outcomes[id(copied)] is CopyOutcome.COPIED],
                )
            else:
                self._parts.counters.add(dropped_blocks=len(full.run))
        finally:
            for copied in (full, *windows):
                copied.let_go()


@dataclass(slots=True)
class _Progress:
    """How many leading blocks of a load are in the engine, verified, and whether all that belongs to them is."""

    blocks: int = 0
    is_whole: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """What a rank moves of each block in one group of layers: part `number`, or all of it; and rows for that."""

    pages: PagedKv
    number: int | None
    load_rows: RowPool
    store_rows: RowPool


@dataclass(frozen=True, slots=True, eq=False)
class _Copied:
    """Blocks on their way to the server, in rows of a part."""

    part: _Part
    first_block: int
    run: range
    rows: Bytes2D
    handle: AnyCopy

    @property
    def sparse_rows(self) -> SparseRows:
        """The rows as those of a sparse part."""
        assert self.part.number is not None, "the part of a window has a number"
        return SparseRows(self.part.number, self.first_block, self.rows)

    def let_go(self) -> None:
        """Give the rows back, unless the copy may still write to them."""
        if self.handle.outcome not in (CopyOutcome.PENDING, CopyOutcome.LOST):
            self.part.store_rows.give_back(self.run)


def _store_layer(
    copier: BlockCopier, pages: PagedKv, block_ids: tuple[int, ...], rows: Bytes2D, layers: range
) -> CopyHandle:
    return copier.store(pages, block_ids, rows, layers=layers)


def _fill(copier: BlockCopier, part: _Part, lease: Lease, blocks: PartBlocks, stream: Stream | None) -> Iterator[int]:
    """Load blocks of a part into the engine, in runs; how many are right in each, until one is cut short."""
    if not blocks.block_ids:
        return
    # Half of the rows for each thread: there is always a run for who asks.
    run = part.load_rows.take(min(len(blocks.block_ids), part.load_rows.count // LOAD_THREADS))
    assert run is not None, "no thread that loads holds more than its share"
    buffer = part.load_rows.rows(run)
    try:
        done = 0
        while done < len(blocks.block_ids):
            targets = blocks.block_ids[done : done + len(buffer)]
            rows = buffer[: len(targets)]
            good = lease.load_into(rows, from_block=blocks.first_block + done, part=part.number).blocks
            if good:
                copy = copier.load(part.pages, targets[:good], rows[:good], stream=stream)
                if copy.wait(COPY_SECONDS_MAX) is not CopyOutcome.COPIED:
                    return
                yield good
            if good < len(targets):
                return
            done += good
    finally:
        part.load_rows.give_back(run)
