"""What every connector needs whatever its engine: a circuit breaker, guarded calls, background stores, counters.

A connector must never stall or break its engine. So each call into the store runs on a thread of the connector with a
deadline, each store waits in a bounded queue, and every failure ends as a count and one log line.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
from collections import Counter, deque
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import numpy as np

from kvstore.errors import KvstoreError, NoSpaceError, UnavailableError
from kvstore.tokens import as_prompt, unpacked_tokens
from kvstore.types import PLAIN_ROOT, CommitResult, PrefixMatch, Root, Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kvstore.api import BlockBuffer, KvStore, Lease, Prefetch, Stage
    from kvstore.clock import Clock
    from kvstore.tokens import Tokens
    from kvstore.types import Namespace

logger = logging.getLogger(__name__)
# What a node asks its peers for at least (kvstore.cluster.plan); less is computed before it is there.
PEER_TOKENS_MIN = 256

T = TypeVar("T")


class UnsupportedModelError(KvstoreError):
    """The KV of this model cannot be cached by this connector; the message says why."""


class SelfCheckError(KvstoreError):
    """The store gave back other bytes than a connector had stored; the connector is disabled."""


@dataclass(frozen=True, slots=True)
class ConnectorStats:
    """What a connector has done since it was attached. Tokens and blocks are summed over the rows of batches.

    `lookup_tokens` are the prompt tokens looked up, `matched_tokens` those that the store said it holds,
    `loaded_tokens` those that were loaded and verified. `stored_blocks` became visible in the store,
    `present_blocks` were there already, `refused_blocks` found no room in the store, and `dropped_blocks` were not
    even offered, since the queue of background stores was full. `bypassed` counts requests by the reason why they
    were computed without the store, `failures` errors by class.
    """

    lookups: int
    lookup_tokens: int
    matched_tokens: int
    loaded_tokens: int
    stored_blocks: int
    present_blocks: int
    refused_blocks: int
    dropped_blocks: int
    breaker_openings: int
    bypassed: Mapping[str, int]
    failures: Mapping[str, int]


class CircuitBreaker:
    """Stops calling a store that fails.

    Opens after `failures_max` failures in a row, or at once when the store is unavailable. While it is open one trial
    is let through after each back-off, which doubles up to `backoff_seconds_max`; a success closes it. Thread-safe.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        failures_max: int = 3,
        backoff_seconds: float = 1.0,
        backoff_seconds_max: float = 30.0,
    ) -> None:
        self._clock = clock
        self._failures_max = failures_max
        self._backoff_seconds_min = backoff_seconds
        self._backoff_seconds_max = backoff_seconds_max
        self._lock = threading.Lock()
        self._backoff_seconds = backoff_seconds
        self._failures = 0
        self._trial_at: float | None = None
        self._openings = 0

    @property
    def openings(self) -> int:
        """How often the breaker went from closed to open."""
        with self._lock:
            return self._openings

    def allows_call(self) -> bool:
        """Whether a call may be made now. A true answer of an open breaker is its one trial for this back-off."""
        with self._lock:
            if self._trial_at is None:
                return True
            now = self._clock.monotonic()
            if now < self._trial_at:
                return False
            self._trial_at = now + self._backoff_seconds
            return True

    def record_success(self) -> None:
        """Close the breaker."""
        with self._lock:
            self._failures = 0
            self._trial_at = None
            self._backoff_seconds = self._backoff_seconds_min

    def record_failure(self, error: Exception) -> None:
        """Count a failure; open the breaker, or keep it open for longer, when it is one too many."""
        with self._lock:
            self._failures += 1
            was_open = self._trial_at is not None
            if not was_open and self._failures < self._failures_max and not isinstance(error, UnavailableError):
                return
            if was_open:
                self._backoff_seconds = min(2 * self._backoff_seconds, self._backoff_seconds_max)
            else:
                self._openings += 1
            self._trial_at = self._clock.monotonic() + self._backoff_seconds


@contextmanager
def prefetched(
    store: KvStore, matches: Sequence[PrefixMatch], wait_seconds: float, clock: Clock
) -> Iterator[list[PrefixMatch]]:
    """Begin once what can be had of the prompts is in host memory, or that time is over; leaving ends the rest.

    That is what the matches have on disk alone, and what peers of the server have behind them: gives the matches as
    they are then. All prompts are brought side by side. Whatever does not come up is loaded from where it lies, so
    nothing is lost where prefetches are refused.
    """
    with ExitStack() as stack:
        begun: list[Prefetch | None] = []
        for match in matches:
            begun.append(None)
            if match.host_blocks < match.blocks or may_lie_at_peers(match):
                wanted = match.prompt if may_lie_at_peers(match) else match.prefix
                with suppress(NoSpaceError):
                    begun[-1] = stack.enter_context(store.prefetch(match.namespace, wanted, root=match.root))
        ends_at = clock.monotonic() + wait_seconds
        for prefetch in begun:
            with suppress(NoSpaceError):
                if prefetch is not None and not prefetch.done:
                    prefetch.wait(max(0.0, ends_at - clock.monotonic()))
        yield [
            match if prefetch is None or prefetch.host_blocks <= match.blocks else _again(store, match)
            for match, prefetch in zip(matches, begun, strict=True)
        ]


def may_lie_at_peers(match: PrefixMatch) -> bool:
    """Whether a prompt lacks enough for a server to ask its peers; one that has none says so at once."""
    return match.namespace.layout.prompt_tokens(match.prompt.size) - match.tokens >= PEER_TOKENS_MIN


def _again(store: KvStore, match: PrefixMatch) -> PrefixMatch:
    """What there is of the prompt now. It was counted as looked up already."""
    return store.match(match.namespace, match.prompt, root=match.root, touch=False)


@dataclass(frozen=True, slots=True)
class Failure:
    """A guarded call that did not end well."""

    error: Exception


@dataclass(slots=True)
class _Call(Generic[T]):
    function: Callable[[], T]
    done: threading.Event = field(default_factory=threading.Event)
    outcome: T | Failure | None = None


class GuardedCalls:
    """Runs calls on one thread of its own, so that a caller waits no longer than it said.

    A call that is late keeps running, and its result is dropped when it comes; until then every other call fails
    at once. The thread is a daemon: a store that hangs does not keep the process from ending.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[_Call[Any] | None] = queue.SimpleQueue()
        self._busy = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], T], seconds: float) -> T | Failure:
        """The result of `function`, or the error it raised, or an UnavailableError if that takes over `seconds`."""
        if not self._busy.acquire(blocking=False):
            return Failure(UnavailableError("an earlier call to the store has not returned yet"))
        call: _Call[T] = _Call(function)
        self._calls.put(call)
        if not call.done.wait(seconds):
            return Failure(UnavailableError(f"the store did not answer within {seconds:g} s"))
        return cast("T | Failure", call.outcome)

    def close(self) -> None:
        """Let the thread end after the call it is in; idempotent."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call.outcome = call.function()
            except Exception as error:  # noqa: BLE001  # thread root: the caller counts the failure
                call.outcome = Failure(error)
            self._busy.release()
            call.done.set()
            del call  # an idle thread holds on to no buffer


@dataclass(frozen=True, slots=True)
class _Job:
    run: Callable[[], None]
    held_bytes: int


class BackgroundStores:
    """One thread that works through a queue bounded in jobs and bytes; a job beyond the bounds is refused at once.

    A job that raises is reported to `on_failure` and forgotten. The lock guards the fields and is never held while a
    job runs.
    """

    def __init__(
        self,
        name: str,
        on_failure: Callable[[Exception], None],
        *,
        jobs_max: int,
        queue_bytes_max: int,
    ) -> None:
        self._on_failure = on_failure
        self._jobs_max = jobs_max
        self._queue_bytes_max = queue_bytes_max
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._held_bytes = 0
        self._unfinished = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def has_room(self, job_bytes: int) -> bool:
        """Whether a job that holds `job_bytes` would be taken now; ask before making it."""
        with self._changed:
            return self._fits(job_bytes)

    def offer(self, run: Callable[[], None], job_bytes: int) -> bool:
        """Queue a job that holds `job_bytes` until it is done; false if it is refused."""
        with self._changed:
            if not self._fits(job_bytes):
                return False
            self._jobs.append(_Job(run, job_bytes))
            self._held_bytes += job_bytes
            self._unfinished += 1
            self._changed.notify_all()
            return True

    def wait_idle(self, timeout_seconds: float) -> bool:
        """Wait until every job taken so far and meanwhile is done; false when that takes too long."""
        with self._changed:
            return self._changed.wait_for(lambda: self._unfinished == 0, timeout_seconds)

    def close(self, timeout_seconds: float) -> None:
        """Take no more jobs, wait for those queued, and drop what is left after the time-out; idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.wait_idle(timeout_seconds)
        with self._changed:
            self._unfinished -= len(self._jobs)
            self._jobs.clear()
            self._changed.notify_all()

    def _fits(self, job_bytes: int) -> bool:
        return (
            not self._closed
            and self._unfinished < self._jobs_max
            and self._held_bytes + job_bytes <= self._queue_bytes_max
        )

    def _run(self) -> None:
        while (job := self._next_job()) is not None:
            try:
                job.run()
            except Exception as error:  # noqa: BLE001  # thread root: counted by on_failure
                self._on_failure(error)
            held_bytes = job.held_bytes
            del job  # its buffer must not outlive the count of its bytes
            with self._changed:
                self._held_bytes -= held_bytes
                self._unfinished -= 1
                self._changed.notify_all()

    def _next_job(self) -> _Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closed)
            return self._jobs.popleft() if self._jobs else None


class ConnectorCounters:
    """The numbers behind ConnectorStats. Thread-safe. Logs the first failure of each kind, then only counts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: Counter[str] = Counter()
        self._bypassed: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()

    def add(self, **amounts: int) -> None:
        """Add to fields of ConnectorStats, by name."""
        with self._lock:
            self._sums.update(amounts)

    def count_bypass(self, reason: str) -> None:
        """Count a request that was computed without the store."""
        with self._lock:
            self._bypassed[reason] += 1

    def count_failure(self, error: Exception) -> None:
        """Count an error by its class."""
        kind = type(error).__name__
        with self._lock:
            self._failures[kind] += 1
            first = self._failures[kind] == 1
        if first:
            logger.warning("kvstore connector goes on without the store: kind=%s error=%s", kind, error)

    def snapshot(self, breaker_openings: int) -> ConnectorStats:
        """The counts as they are now."""
        with self._lock:
            return ConnectorStats(
                lookups=self._sums["lookups"],
                lookup_tokens=self._sums["lookup_tokens"],
                matched_tokens=self._sums["matched_tokens"],
                loaded_tokens=self._sums["loaded_tokens"],
                stored_blocks=self._sums["stored_blocks"],
                present_blocks=self._sums["present_blocks"],
                refused_blocks=self._sums["refused_blocks"],
                dropped_blocks=self._sums["dropped_blocks"],
                breaker_openings=breaker_openings,
                bypassed=dict(self._bypassed),
                failures=dict(self._failures),
            )


class HookGuard:
    """Runs what an engine calls of a connector, so that nothing of ours raises into the engine.

    After the first error `on_failure` is told, which is to take no new work; what is under way is still asked for.
    """

    def __init__(self, counters: ConnectorCounters, on_failure: Callable[[], None]) -> None:
        self._counters = counters
        self._on_failure = on_failure

    def run(self, function: Callable[[], T], instead: T) -> T:
        """What `function` returns, or `instead` where it raises."""
        try:
            return function()
        except Exception as error:  # noqa: BLE001  # the engine goes on whatever it was; counted
            self._counters.count_failure(error)
            self._on_failure()
            return instead


@dataclass(frozen=True, slots=True)
class Promise:
    """What a store said it has of a prompt, and a lease of the leading `blocks` that lie in host memory, verified."""

    match: PrefixMatch
    blocks: int
    lease: Lease | None


@dataclass(frozen=True, slots=True)
class Writer:
    """Which part of each block is stored or loaded, and by which rank of several; all parts by default."""

    rank: int | None = None
    part: int | None = None


WHOLE_BLOCKS = Writer()


@dataclass(frozen=True, slots=True)
class SparseRows:
    """Rows of a sparse part: those of block `first_block` and the blocks behind it."""

    part: int
    first_block: int
    rows: BlockBuffer

    def write_wanted(self, stage: Stage) -> None:
        """Write those rows that a stage wants."""
        for wanted in stage.wanted(self.part):
            first = max(wanted.start, self.first_block)
            last = min(wanted.stop, self.first_block + len(self.rows))
            if first < last:
                rows = self.rows[first - self.first_block : last - self.first_block]
                stage.write_from(rows, from_block=first, part=self.part)


class CacheClient:
    """A store as a connector sees it: every failure is a miss, and nothing raises.

    `match` finds 0 blocks, `load` brings none, `store` stores nothing. Failures are counted by `counters`, and logged
    once for each kind. How long a call may take, and when a server is not asked any more, the client of that server
    decides (kvstore.connect); an embedded store is asked always.
    """

    def __init__(self, store: KvStore, counters: ConnectorCounters) -> None:
        self._store = store
        self._counters = counters

    def match(
        self, namespace: Namespace, tokens: Tokens, *, root: Root | None = None, request_id: str | None = None
    ) -> PrefixMatch:
        """The longest stored prefix; of 0 blocks where the store does not answer."""

        def find() -> PrefixMatch:
            prompt = as_prompt(namespace, tokens)
            self._counters.add(lookups=1, lookup_tokens=namespace.layout.prompt_tokens(len(prompt)))
            return self._store.match(namespace, prompt, root=root, request_id=request_id)

        nothing = PrefixMatch(namespace, PLAIN_ROOT if root is None else root, unpacked_tokens(b""), 0, ())
        found = self._or(nothing, find)
        self._counters.add(matched_tokens=found.tokens)
        return found

    def load(self, match: PrefixMatch, buffer: BlockBuffer, *, part: int | None = None) -> int:
        """Copy the leading blocks of a match into the rows of `buffer`; returns how many of them are right.

        The rows behind them are undefined.
        """

        def fill() -> int:
            with self._store.lease(match) as lease:
                return lease.load_into(buffer, part=part).blocks

        blocks = self._or(0, fill) if match.blocks else 0
        if blocks:
            self._counters.add(loaded_tokens=blocks * match.namespace.layout.block_tokens)
        return blocks

    def store(
        self,
        namespace: Namespace,
        tokens: Tokens,
        buffer: BlockBuffer,
        *,
        root: Root | None = None,
        from_block: int = 0,
        writer: Writer = WHOLE_BLOCKS,
        sparse: Sequence[SparseRows] = (),
    ) -> CommitResult:
        """Store the rows of `buffer`: block `from_block` and those behind it, and what is wanted of the sparse ones.

        Says what became visible.
        """
        ranked: dict[str, Any] = {} if writer.rank is None else {"rank": writer.rank}

        def write() -> CommitResult:
            with self._store.stage(namespace, tokens, root=root, from_block=from_block, **ranked) as stage:
                if stage.blocks:
                    stage.write_from(buffer, from_block=from_block, part=writer.part)
                for rows in sparse:
                    rows.write_wanted(stage)
                return stage.commit()

        result = self._or(CommitResult(0, 0, 0), write)
        self._counters.add(
            stored_blocks=result.blocks, present_blocks=result.present_blocks, refused_blocks=result.refused_blocks
        )
        return result

    def promise(self, match: PrefixMatch, wait_seconds: float, clock: Clock) -> Promise:
        """Bring what a match has on disk alone, and peers behind it, into host memory for as long as that; lease it."""

        nothing = Promise(match, 0, None)

        def hold() -> Promise:
            with prefetched(self._store, [match], wait_seconds, clock) as (found,):
                pass
            if not found.blocks:
                return nothing
            lease = self._store.lease(found, tiers={Tier.HOST})
            return Promise(found, lease.blocks, lease)

        return self._or(nothing, hold) if match.blocks or may_lie_at_peers(match) else nothing

    def release(self, promise: Promise) -> None:
        """End the lease of a promise."""
        if promise.lease is not None:
            self._or(None, promise.lease.release)

    def load_leased(self, match: PrefixMatch, load: Callable[[Lease], None]) -> None:
        """Hand `load` a lease of a match. It may fail anywhere on the way: `load` itself notes how far it came."""

        def fill() -> None:
            with self._store.lease(match, tiers={Tier.HOST}) as lease:
                load(lease)

        self._or(None, fill)

    def check(self, namespace: Namespace) -> bool | None:
        """Whether a random block, under a root that nobody else has, comes back byte for byte; None: no answer."""
        return self._or(None, lambda: gives_back_what_it_takes(self._store, namespace))

    def _or(self, miss: T, call: Callable[[], T]) -> T:
        try:
            return call()
        except Exception as error:  # noqa: BLE001  # the engine goes on whatever it was; counted
            self._counters.count_failure(error)
            return miss


def gives_back_what_it_takes(store: KvStore, namespace: Namespace) -> bool | None:
    """Whether a random block, under a root that nobody else has, comes back byte for byte in all of its parts.

    None: there was no room.
    """
    layout = namespace.layout
    root = Root(salt=f"kvstore self-check {secrets.token_hex(16)}")
    tokens = unpacked_tokens(np.arange(layout.block_symbols, dtype=np.uint32).tobytes())
    sizes: dict[int | None, int] = {None: layout.block_bytes}
    sizes |= {part: layout.part_bytes(part) for part in range(layout.part_count, len(layout.parts))}
    written = {part: secrets.token_bytes(size) for part, size in sizes.items()}
    read = {part: bytearray(size) for part, size in sizes.items()}
    with store.stage(namespace, tokens, root=root) as stage:
        if stage.blocks:
            for part, row in written.items():
                stage.write_from(row, part=part)
    try:
        match = store.match(namespace, tokens, root=root, touch=False)
        with store.lease(match) as lease:
            loaded = [lease.load_into(row, part=part).blocks if match.blocks else 0 for part, row in read.items()]
    finally:
        store.evict(namespace, tokens, root=root)
    return all(read[part] == row for part, row in written.items()) if all(loaded) else None
