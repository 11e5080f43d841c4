"""Chunks of vLLM's offloading in a store: what its secondary tier asks for, answered later from threads. No vLLM here.

vLLM hands over hashes alone, so the namespace is opaque, and it does not say which chunk comes before another, so each
is stored by itself: a path of one block. A call by the scheduler costs a look into a dictionary, or a submitted job.
"""

from __future__ import annotations

import hashlib
import threading
from collections import defaultdict
from concurrent.futures import wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from kvstore.connectors.vllm.soundness import SelfCheck, Soundness
from kvstore.errors import KvstoreError
from kvstore.layer_groups import FIELD_BYTES_MAX
from kvstore.thread_pool import ThreadPool
from kvstore.types import BLOCK_TOKENS_MAX, DIGEST_BYTES, KvForm, KvLayout, Root, Symbols

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    import numpy as np
    from numpy.typing import NDArray

    from kvstore.clock import Clock
    from kvstore.connectors.common import CacheClient, ConnectorCounters
    from kvstore.types import Namespace, PrefixMatch

    Rows: TypeAlias = NDArray[np.uint8]

# Of a key, the bytes behind the hash: the number of the group of layers.
GROUP_BYTES = 4
KEY_BYTES = DIGEST_BYTES + GROUP_BYTES
STORES_MAX = 64
LOAD_THREADS = 2


@dataclass(slots=True)
class ChunkParts:
    """What a tier is made of. `rows` is vLLM's own host memory: [chunks, bytes of a chunk].

    `namespace` may take as long as reading the weights; a KvstoreError or OSError of it keeps the tier off.
    """

    client: CacheClient
    counters: ConnectorCounters
    clock: Clock
    rows: Rows
    namespace: Callable[[], Namespace]
    weights_version: str | None
    lookup_seconds: float


@dataclass(frozen=True, slots=True)
class Job:
    """Store chunks from rows, or load them into rows; both sequences are of one length."""

    job_id: int
    keys: tuple[bytes, ...]
    row_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended: the keys whose bytes are where they should be. `seconds` is how long it took."""

    job: Job
    keys: tuple[bytes, ...]
    seconds: float = 0.0

    @property
    def is_whole(self) -> bool:
        """Whether all of it was done."""
        return len(self.keys) == len(self.job.keys)


@dataclass(slots=True)
class _Asked:
    """A key that requests have asked for. The thread of lookups sets `match` before `answered`."""

    requests: set[str] = field(default_factory=set)
    match: PrefixMatch | None = None
    answered: bool = False


class Chunks:
    """Lookups, loads and stores of chunks, on threads. The methods are for one thread, vLLM's scheduler.

    Nothing is found or stored before a random block came back from the store as it went there. `_asked` holds what
    unfinished requests ask for; of stores STORES_MAX wait at most, and one more ends at once with nothing stored.
    """

    def __init__(self, parts: ChunkParts) -> None:
        self._parts = parts
        self._asked: dict[bytes, _Asked] = {}
        self._by_request: defaultdict[str, set[bytes]] = defaultdict(set)
        self._new: list[tuple[bytes, _Asked]] = []
        self._loads: dict[int, tuple[Job, Future[Outcome]]] = {}
        self._stores: dict[int, tuple[Job, Future[Outcome]]] = {}
        self._refused: list[Outcome] = []
        # Both set once by the thread below, the namespace first, and only read by others.
        self._namespace: Namespace | None = None
        self._check: SelfCheck | None = None
        self._lookup_thread = ThreadPool(1, "vllm-tier-lookup")
        self._load_threads = ThreadPool(LOAD_THREADS, "vllm-tier-load")
        self._store_thread = ThreadPool(1, "vllm-tier-store")
        self._finding: Future[None] | None = None
        self._beginning = threading.Thread(target=self._begin, name="kvstore-vllm-tier-begin", daemon=True)
        self._beginning.start()

    @property
    def soundness(self) -> Soundness:
        """Whether anything is found or stored now."""
        return Soundness.CHECKING if self._check is None else self._check.state

    @property
    def is_busy(self) -> bool:
        """Whether something is under way that will be told of."""
        is_asking = self._finding is not None and not self._finding.done()
        return is_asking or bool(self._loads or self._stores or self._refused or self._new)

    def wait_checked(self, seconds: float) -> Soundness:
        """Wait until it is known whether the store can be used."""
        self._beginning.join(seconds)
        return self.soundness if self._check is None else self._check.wait(seconds)

    def look_up(self, key: bytes, request_id: str) -> bool | None:
        """Whether a chunk is stored; None while that is being found out, which the next `flush` begins."""
        if self.soundness is not Soundness.SOUND or len(key) != KEY_BYTES:
            return False
        asked = self._asked.get(key)
        if asked is None:
            asked = self._asked[key] = _Asked()
            self._new.append((key, asked))
        asked.requests.add(request_id)
        self._by_request[request_id].add(key)
        return asked.match is not None if asked.answered else None

    def flush(self) -> None:
        """Ask the store for all that was looked up since the last call."""
        if self._check is not None:
            self._check.poll()
        if self._new:
            batch, self._new = self._new, []
            self._finding = self._lookup_thread.submit(self._find, batch)

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        for key in self._by_request.pop(request_id, ()):
            asked = self._asked[key]
            asked.requests.discard(request_id)
            if not asked.requests:
                del self._asked[key]

    def store(self, job: Job) -> None:
        """Copy chunks to the store, later."""
        if self.soundness is not Soundness.SOUND or len(self._stores) >= STORES_MAX:
            self._parts.counters.add(dropped_blocks=len(job.keys))
            self._refused.append(Outcome(job, ()))
        else:
            self._stores[job.job_id] = (job, self._store_thread.submit(self._store, job))

    def load(self, job: Job) -> None:
        """Copy chunks that were found into rows, later."""
        asked = [self._asked.get(key) for key in job.keys]
        matches = [None if found is None else found.match for found in asked]
        self._loads[job.job_id] = (job, self._load_threads.submit(self._load, job, matches))

    def take_outcomes(self) -> list[Outcome]:
        """How jobs ended since the last call. What could not be loaded counts as not stored from then on."""
        ended, self._refused = self._refused, []
        ended += [self._ended(self._stores, job_id) for job_id in _done(self._stores)]
        for job_id in _done(self._loads):
            outcome = self._ended(self._loads, job_id)
            for key in set(outcome.job.keys).difference(outcome.keys):
                if key in self._asked:
                    self._asked[key].match = None
            ended.append(outcome)
        return ended

    def drain(self) -> None:
        """Wait until no job touches the rows any more; each call to the store in it has a deadline."""
        wait([future for _, future in (*self._loads.values(), *self._stores.values())])

    def close(self) -> None:
        """Take no more work; what waits is dropped, and what runs is waited for, so that nothing touches the rows."""
        for threads in (self._lookup_thread, self._load_threads, self._store_thread):
            threads.shutdown(wait=True, cancel_futures=True)

    def _ended(self, jobs: dict[int, tuple[Job, Future[Outcome]]], job_id: int) -> Outcome:
        job, future = jobs.pop(job_id)
        error = None if future.cancelled() else future.exception()
        if isinstance(error, Exception):
            self._parts.counters.count_failure(error)
        return Outcome(job, ()) if future.cancelled() or error is not None else future.result()

    def _begin(self) -> None:
        """On a thread of its own: find out whose chunks these are, then whether the store can be used."""
        try:
            namespace = self._parts.namespace()
        except (KvstoreError, OSError) as error:
            self._parts.counters.count_failure(error)
            return
        self._namespace = namespace
        self._check = SelfCheck(lambda: self._parts.client.check(namespace), self._parts.clock)

    def _find(self, batch: list[tuple[bytes, _Asked]]) -> None:
        """On the thread of lookups. What is not found out in time is not there."""
        ends_at = self._parts.clock.monotonic() + self._parts.lookup_seconds
        for key, asked in batch:
            if self._parts.clock.monotonic() < ends_at:
                match = self._match(key)
                asked.match = match if match.blocks else None
            asked.answered = True

    def _match(self, key: bytes) -> PrefixMatch:
        assert self._namespace is not None, "nothing is asked before the self-check"
        return self._parts.client.match(self._namespace, [key[:DIGEST_BYTES]], root=self._root(key))

    def _root(self, key: bytes) -> Root:
        """Chunks of other groups of layers have the same hash, and other bytes."""
        group = int.from_bytes(key[DIGEST_BYTES:], "big")
        return Root(salt=f"group {group}", weights_epoch=self._parts.weights_version)

    def _load(self, job: Job, matches: Sequence[PrefixMatch | None]) -> Outcome:
        start = self._parts.clock.monotonic()
        pairs = zip(job.keys, job.row_ids, matches, strict=True)
        loaded = [
            key
            for key, row, match in pairs
            if match is not None and self._parts.client.load(match, self._parts.rows[row])
        ]
        return Outcome(job, tuple(loaded), self._parts.clock.monotonic() - start)

    def _store(self, job: Job) -> Outcome:
        assert self._namespace is not None, "nothing is stored before the self-check"
        start = self._parts.clock.monotonic()
        stored = []
        for key, row in zip(job.keys, job.row_ids, strict=True):
            if len(key) == KEY_BYTES:
                result = self._parts.client.store(
                    self._namespace, [key[:DIGEST_BYTES]], self._parts.rows[row], root=self._root(key)
                )
                if result.blocks + result.present_blocks:
                    stored.append(key)
        return Outcome(job, tuple(stored), self._parts.clock.monotonic() - start)


def _done(jobs: dict[int, tuple[Job, Future[Outcome]]]) -> list[int]:
    return [job_id for job_id, (_, future) in jobs.items() if future.done()]


def chunk_layout(row_bytes: int, tokens: int, facts: str) -> KvLayout:
    """The layout of a chunk: opaque bytes, told from all others by `facts`, what vLLM says about them."""
    if not 1 <= tokens <= BLOCK_TOKENS_MAX or row_bytes % tokens:
        tokens = 1
    if len(facts.encode()) > FIELD_BYTES_MAX:
        facts = f"blake2b {hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()}"
    return KvLayout(
        layers=1,
        kv_heads=1,
        head_dim=row_bytes // tokens,
        dtype="uint8",
        block_tokens=tokens,
        kv_form=KvForm.LATENT.value,
        axis_order=facts,
        engine="vllm-offload",
        symbols=Symbols.DIGESTS.value,
    )
