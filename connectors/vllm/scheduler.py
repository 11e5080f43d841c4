"""The scheduler's half of the connector: what can be loaded, what is to be stored, which blocks are held. No vLLM here.

Runs in vLLM's scheduling loop, so nothing of it waits: whatever asks the server does so on threads of `lookups.py`,
and "ask again" is the answer meanwhile. All state belongs to the scheduling thread.
"""

from __future__ import annotations

import logging
import secrets
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvstore.connectors.checkpoint_files import AdapterDigests
from kvstore.connectors.common import HookGuard
from kvstore.connectors.vllm.contents import contents_of
from kvstore.connectors.vllm.lookups import Lookups
from kvstore.connectors.vllm.plan import BlockJob, PackedTokens, StepPlan, live_blocks, loadable_blocks, storable_blocks
from kvstore.connectors.vllm.requests import TrackedRequest, bypass_reason, root_of
from kvstore.connectors.vllm.soundness import Soundness
from kvstore.errors import KvstoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from typing import TypeAlias

    from kvstore.clock import Clock
    from kvstore.connectors.common import CacheClient, ConnectorCounters, Promise
    from kvstore.connectors.vllm.lookups import Lookup
    from kvstore.connectors.vllm.plan import PackedPrefix, PartBlocks
    from kvstore.connectors.vllm.settings import VllmSettings
    from kvstore.types import KvLayout, Namespace, PrefixMatch, Tier

    # Of one request the ids of its blocks, in each of vLLM's groups of layers.
    Tables: TypeAlias = Sequence[Sequence[int]]

logger = logging.getLogger(__name__)

# While a request generates, its blocks are stored in runs of this many tokens, and the rest when it ends.
GENERATED_RUN_TOKENS = 256
NOTHING_TO_LOAD: tuple[int | None, bool] = (0, False)
ASK_AGAIN: tuple[int | None, bool] = (None, False)


@dataclass(slots=True)
class _Load:
    """A load that the worker was told of: it may use the promise until it has said how it ended."""

    promise: Promise
    first_block: int
    block_ids: tuple[int, ...]
    failed: bool = False


@dataclass(slots=True)
class SchedulerParts:
    """What the scheduler's half is made of.

    `tables` are the places of vLLM's block tables: that of full attention, then one for each group of the layout.
    `serves_contents` unless the KV of an image's tokens is more than its beginning decides.
    With `by_layer`, loads happen inside the step that uses them.
    """

    client: CacheClient
    counters: ConnectorCounters
    clock: Clock
    settings: VllmSettings
    layout: KvLayout
    namespace: Callable[[str], Namespace]
    tables: tuple[int, ...] = (0,)
    serves_contents: bool = True
    by_layer: bool = False
    adapters: AdapterDigests = field(default_factory=AdapterDigests)


class SchedulerSide:
    """The scheduler's half. Its methods are those of vLLM's connector, without vLLM's classes."""

    def __init__(self, parts: SchedulerParts, find_revision: Callable[[], str]) -> None:
        self._parts = parts
        self._block_tokens = parts.layout.block_tokens
        self._backs = [group.blocks_back(self._block_tokens) for group in parts.layout.groups]
        self._lookups = Lookups(parts.client, HookGuard(parts.counters, self.switch_off))
        self._tracked: dict[str, TrackedRequest] = {}
        self._loads: dict[str, _Load] = {}
        self._held: set[str] = set()
        self._plan = StepPlan()
        self._weights_epoch = parts.settings.weights_version
        self._off = False
        self._soundness = Soundness.CHECKING
        self._failures = 0
        # Set once by the thread below, and only read by others.
        self._namespace: Namespace | None = None
        self._starting = threading.Thread(
            target=self._find_namespace, args=(find_revision,), name="kvstore-vllm-fingerprint", daemon=True
        )
        self._starting.start()

    @property
    def held_requests(self) -> int:
        """Finished requests whose blocks are kept until their copies have ended."""
        return len(self._held)

    @property
    def leased_requests(self) -> int:
        """Requests for which something is leased, or being looked up."""
        return len(self._loads) + sum(tracked.lookup is not None for tracked in self._tracked.values())

    def switch_off(self) -> None:
        """Take no new work; what is under way is brought to its end."""
        self._off = True

    def wait_started(self, seconds: float) -> bool:
        """Wait until it is known which weights these are; false if that takes longer, or failed."""
        self._starting.join(seconds)
        return self._namespace is not None

    def add(self, request: Any) -> None:  # noqa: ANN401  # vLLM's own class
        """A request has arrived."""
        reason = "disabled" if self._off else bypass_reason(request, self._block_tokens)
        if reason is None and request.mm_features and not self._parts.serves_contents:
            reason = "multimodal"
        if reason is not None:
            self._parts.counters.count_bypass(reason)
            return
        contents = contents_of(request.mm_features, self._block_tokens)
        self._tracked[request.request_id] = TrackedRequest(
            request, self._weights_epoch, contents, PackedTokens(contents)
        )

    def is_asking(self, request_id: str) -> bool:
        """Whether a lookup is under way that may still be waited for: all that most asks come to, for 0.5 us."""
        tracked = self._tracked.get(request_id)
        lookup = None if tracked is None else tracked.lookup
        return lookup is not None and not lookup.settled and self._parts.clock.monotonic() < lookup.ends_at

    def matched_tokens(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:  # noqa: ANN401
        """How many tokens behind those that the engine has can be loaded; None while that is being looked up."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or not tracked.reads or self._off:
            return NOTHING_TO_LOAD
        if self._namespace is None or self._soundness is not Soundness.SOUND:
            return self._await_start(tracked)
        if tracked.lookup is None:
            blocks = loadable_blocks(request.num_tokens, self._block_tokens)
            if computed_tokens < blocks * self._block_tokens:
                tracked.lookup = self._look_up(tracked, blocks, self._promise)
                return ASK_AGAIN
            # The engine has it all: the store is told of the use, and nobody waits for it.
            if tracked.touch is None:
                tracked.touch = self._look_up(tracked, blocks, self._nothing)
            return NOTHING_TO_LOAD
        if not tracked.lookup.settled:
            return self._await(tracked, tracked.lookup)
        _learn(tracked, tracked.lookup)
        promise = tracked.lookup.promise
        tokens = 0 if promise is None else promise.blocks * self._block_tokens - computed_tokens
        return (tokens, not self._parts.by_layer) if tokens > 0 else NOTHING_TO_LOAD

    def allocated(self, request: Any, tables: Tables, external_tokens: int) -> None:  # noqa: ANN401
        """The engine has given a request its blocks; `external_tokens` of them it wants to be loaded."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.lookup is None:
            return
        lookup, tracked.lookup = tracked.lookup, None
        promise = lookup.take()
        if promise is None:
            return
        if not external_tokens:
            self._lookups.release(promise)
            return
        assert tracked.root is not None, "what was found, was found under a root"
        first = promise.blocks - external_tokens // self._block_tokens
        span = range(first, promise.blocks)
        targets = tuple(tables[self._parts.tables[0]][first : span.stop])
        tokens = self._tokens(tracked, span.stop * self._block_tokens)
        windows = self._windows(tables, [range(max(first, span.stop - back), span.stop) for back in self._backs])
        self._plan.loads.append(BlockJob(request.request_id, tracked.root, tokens, first, targets, windows))
        self._loads[request.request_id] = _Load(promise, first, targets)

    def hit_tiers(self, request: Any, external_tokens: int) -> dict[Tier, int]:  # noqa: ANN401
        """In which tiers the tokens that are being loaded lay when they were looked up."""
        load = self._loads.get(request.request_id)
        if load is None:
            return {}
        end = load.first_block + external_tokens // self._block_tokens
        counts: dict[Tier, int] = {}
        position = 0
        for run in load.promise.match.runs:
            blocks = min(position + run.blocks, end) - max(position, load.first_block)
            if blocks > 0:
                counts[run.tier] = counts.get(run.tier, 0) + blocks * self._block_tokens
            position += run.blocks
        return counts

    def scheduled(self, request_id: str, computed_tokens: int, tables: Callable[[], Tables]) -> None:
        """In this step the KV of a request's leading `computed_tokens` is computed, at the latest."""
        tracked = self._tracked.get(request_id)
        if tracked is None or not tracked.writes:
            return
        if tracked.touch is not None and not self._touched(tracked, tracked.touch):
            return
        request = tracked.request
        blocks = storable_blocks(computed_tokens, request.num_tokens, self._block_tokens)
        new = blocks - tracked.stored_blocks
        if new <= 0:
            return
        is_generated = tracked.stored_blocks >= request.num_prompt_tokens // self._block_tokens
        keeps = self._parts.settings.store_generated
        if is_generated and (not keeps or new * self._block_tokens < GENERATED_RUN_TOKENS):
            return
        self._store(tracked, blocks, tables)

    def preempted(self) -> None:
        """In this step requests lose blocks that may still be read."""
        self._plan.preempts = True

    def take_plan(self) -> StepPlan:
        """What the worker is to do in this step."""
        plan, self._plan = self._plan, StepPlan()
        plan.known_failures = self._failures
        plan.revision = None if self._namespace is None else self._namespace.revision
        return plan

    def finished(self, request: Any, tables: Tables) -> bool:  # noqa: ANN401  # vLLM's own class
        """A request has ended, however; true if its blocks must stay until the worker says that nothing reads them."""
        request_id = request.request_id
        tracked = self._tracked.pop(request_id, None)
        if tracked is None:
            return False
        self._drop_lookup(tracked)
        if request_id in self._loads and not self._parts.by_layer:
            return False  # vLLM itself keeps the blocks until the worker says how the load ended
        computed = request.num_computed_tokens - request.num_in_flight_tokens
        blocks = storable_blocks(computed, request.num_tokens, self._block_tokens)
        prompt_blocks = request.num_prompt_tokens // self._block_tokens
        if not self._parts.settings.store_generated:
            blocks = min(blocks, prompt_blocks)
        if tracked.writes and tracked.stored_blocks < blocks <= len(tables[self._parts.tables[0]]):
            self._store(tracked, blocks, lambda: tables)
        if tracked.has_stores:
            self._held.add(request_id)
            self._plan.held.append(request_id)
        return tracked.has_stores

    def workers_are(self, soundness: Soundness) -> None:
        """What the workers found out of the server: the worst that one of them did."""
        if soundness is not self._soundness:
            address = self._parts.settings.address
            logger.info("kvstore connector: the server at %s is %s", address, soundness.name.lower())
        self._soundness = soundness

    def worker_said(
        self, sent: set[str], received: set[str], invalid_block_ids: set[int], failed: Collection[str] = ()
    ) -> None:
        """What the workers have ended: stores of held requests, loads, and blocks or requests that were not loaded."""
        self._held -= sent
        for request_id, load in self._loads.items():
            load.failed = load.failed or request_id in failed or not invalid_block_ids.isdisjoint(load.block_ids)
            tracked = self._tracked.get(request_id)
            if load.failed and tracked is not None:
                tracked.reads = False  # no second try: the engine computes it
                tracked.stored_blocks = min(tracked.stored_blocks, load.first_block)
        for request_id in received:
            ended = self._loads.pop(request_id, None)
            if ended is not None:
                self._lookups.release(ended.promise)

    def layers_said(self, ended: Collection[str], failures: int) -> None:
        """Behind `worker_said`: which loads by layer have ended, and how many have failed since the start."""
        self._failures = max(self._failures, failures)
        self.worker_said(set(), set(ended), set())

    def reset(self) -> None:
        """The weights have changed, or the engine's cache was reset: nothing of before is found from now on."""
        self._weights_epoch = secrets.token_hex(8)
        for tracked in self._tracked.values():
            tracked.reads = tracked.writes = False
            self._drop_lookup(tracked)
        logger.info(
            "kvstore connector begins weights epoch %s: what was stored before is not used", self._weights_epoch
        )

    def close(self) -> None:
        """Take no more lookups."""
        self._off = True
        self._lookups.close()

    def _find_namespace(self, find_revision: Callable[[], str]) -> None:
        try:
            self._namespace = self._parts.namespace(find_revision())
        except (KvstoreError, OSError) as error:
            self._parts.counters.count_failure(error)
            self._off = True

    def _look_up(
        self, tracked: TrackedRequest, blocks: int, promise: Callable[[PrefixMatch], Promise | None]
    ) -> Lookup:
        request, parts, namespace = tracked.request, self._parts, self._namespace
        assert namespace is not None, "nothing is looked up before the namespace is known"
        epoch, count = tracked.weights_epoch, blocks * self._block_tokens

        def find(lookup: Lookup) -> Promise | None:
            lookup.tokens.extend_to(request.all_token_ids, count)  # only ever appended to, so these are what they were
            try:
                root = lookup.root = root_of(request, parts.adapters, epoch)
            except (KvstoreError, OSError) as error:
                parts.counters.count_failure(error)
                return None
            if not count:
                return None
            tokens = lookup.tokens.first(count).token_array()
            match = parts.client.match(namespace, tokens, root=root, request_id=request.request_id)
            lookup.found_blocks = match.blocks
            return promise(match)

        wait_seconds = parts.settings.lookup_seconds + parts.settings.promote_seconds
        return self._lookups.start(find, parts.clock.monotonic() + wait_seconds, PackedTokens(tracked.contents))

    def _promise(self, match: PrefixMatch) -> Promise:
        return self._parts.client.promise(match, self._parts.settings.promote_seconds, self._parts.clock)

    def _nothing(self, _match: PrefixMatch) -> None:
        return None

    def _await_start(self, tracked: TrackedRequest) -> tuple[int | None, bool]:
        """Whether the server can be used is not known yet, or is known not to be: wait for it a moment at most."""
        now = self._parts.clock.monotonic()
        if tracked.gives_up_at is None:
            tracked.gives_up_at = now + self._parts.settings.lookup_seconds
        if self._soundness in (Soundness.SOUND, Soundness.CHECKING) and now < tracked.gives_up_at:
            return ASK_AGAIN
        self._parts.counters.count_bypass("starting")
        tracked.reads = False
        return NOTHING_TO_LOAD

    def _await(self, tracked: TrackedRequest, lookup: Lookup) -> tuple[int | None, bool]:
        if self._parts.clock.monotonic() < lookup.ends_at:
            return ASK_AGAIN
        self._parts.counters.count_bypass("late")
        tracked.reads = False
        self._drop_lookup(tracked)
        return NOTHING_TO_LOAD

    def _touched(self, tracked: TrackedRequest, touch: Lookup) -> bool:
        """Whether it is known what the store has of a request's prompt, or will not be known in time."""
        if not touch.settled and self._parts.clock.monotonic() < touch.ends_at:
            return False
        _learn(tracked, touch)
        tracked.touch = None
        return True

    def _drop_lookup(self, tracked: TrackedRequest) -> None:
        lookup, tracked.lookup = tracked.lookup, None
        promise = None if lookup is None else lookup.take()
        if promise is not None:
            self._lookups.release(promise)

    def _store(self, tracked: TrackedRequest, blocks: int, tables: Callable[[], Tables]) -> None:
        # Only workers that are there, and have a server to store in, say when they have ended.
        if self._soundness is not Soundness.SOUND:
            return
        if tracked.root is None and tracked.request.lora_request is None:
            tracked.root = root_of(tracked.request, self._parts.adapters, tracked.weights_epoch)
        if self._off or tracked.root is None or self._namespace is None:
            return
        first = tracked.stored_blocks
        found = tables()
        sources = tuple(found[self._parts.tables[0]][first:blocks])
        tokens = self._tokens(tracked, blocks * self._block_tokens)
        windows = self._windows(found, [range(max(0, min(first, blocks - back)), blocks) for back in self._backs])
        self._plan.stores.append(BlockJob(tracked.request.request_id, tracked.root, tokens, first, sources, windows))
        tracked.stored_blocks = blocks
        tracked.has_stores = True

    def _windows(self, tables: Tables, spans: Sequence[range]) -> tuple[PartBlocks, ...]:
        """Of each group with a window those blocks of its span that the engine still has."""
        places = self._parts.tables[1:]
        return tuple(live_blocks(tables[place], span) for place, span in zip(places, spans, strict=True))

    @staticmethod
    def _tokens(tracked: TrackedRequest, count: int) -> PackedPrefix:
        tracked.tokens.extend_to(tracked.request.all_token_ids, count)
        return tracked.tokens.first(count)


def _learn(tracked: TrackedRequest, lookup: Lookup) -> None:
    """Take over what a settled lookup found out."""
    if lookup.root is not None:
        tracked.root = lookup.root
    if len(lookup.tokens) > len(tracked.tokens):
        tracked.tokens = lookup.tokens
    tracked.stored_blocks = max(tracked.stored_blocks, lookup.found_blocks)
