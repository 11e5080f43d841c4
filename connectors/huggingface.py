"""Hugging Face transformers: generate() of a causal language model reuses and stores prefixes.

    from kvstore.connectors.huggingface import cached

    model = cached(model, "unix:///run/kvstore.sock")

What is served and what is bypassed stands in connectors/README.md. As with transformers itself, one model object
serves one generate() at a time.
"""

from __future__ import annotations

import inspect
import logging
import secrets
import weakref
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from transformers import PreTrainedModel

import kvstore
from kvstore.clock import SystemClock
from kvstore.connectors.common import (
    BackgroundStores,
    CircuitBreaker,
    ConnectorCounters,
    Failure,
    GuardedCalls,
    SelfCheckError,
    UnsupportedModelError,
    prefetched,
)
from kvstore.connectors.huggingface_blocks import (
    StoreJob,
    gives_back_what_it_takes,
    load_prefix,
    nothing_loaded,
    store_row,
)
from kvstore.connectors.huggingface_cache import (
    CACHE_ARGUMENT,
    CACHE_ARGUMENTS,
    CachePlan,
    ComputedKv,
    fill,
    row_of_blocks,
)
from kvstore.connectors.huggingface_model import WeightsWatch, describe_model
from kvstore.connectors.huggingface_request import (
    Bypass,
    adapter_bypass,
    end_ids,
    given_cache,
    read_prompt,
    setting,
    static_columns,
    without_cache_setting,
)
from kvstore.connectors.huggingface_rows import common_column, level_rows
from kvstore.errors import InvalidArgumentError, KvstoreError
from kvstore.types import Namespace, Root

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from transformers import Cache

    from kvstore.api import KvStore
    from kvstore.clock import Clock
    from kvstore.connectors.common import ConnectorStats
    from kvstore.connectors.huggingface_blocks import LoadedPrefix
    from kvstore.connectors.huggingface_model import ModelDescription
    from kvstore.connectors.huggingface_rows import Prompt
    from kvstore.types import PrefixMatch

__all__ = ["HuggingFaceConnector", "UnsupportedModelError", "cached", "connector_of", "uncache"]

logger = logging.getLogger(__name__)

ModelT = TypeVar("ModelT", bound=PreTrainedModel)
T = TypeVar("T")

ATTACH_SECONDS = 5.0
CLOSE_SECONDS = 5.0
QUEUED_STORES_MAX = 64
_PREFETCH_RATIO = 0.5  # of the time for a load: what is not up by then is loaded from disk in the rest of it
_ATTRIBUTE = "kvstore_connector"
_STATIC_COLUMNS = "_previous_max_cache_length"  # where transformers keeps the size of the last static cache
_NO_MEMORY = (MemoryError, RuntimeError)  # torch reports lack of memory as a RuntimeError


def cached(
    model: ModelT,
    store: KvStore | str,
    *,
    tenant: str = "default",
    secret: bytes | None = None,
    model_name: str | None = None,
    block_tokens: int = 16,
    lookup_seconds: float = 0.1,
    load_seconds: float = 2.0,
    queue_bytes_max: int = 1 << 30,
    window_bytes_max: int = 256 << 20,
    clock: Clock | None = None,
) -> ModelT:
    """Let `model.generate()` reuse the prefixes that `store` holds, and store what it computes. Returns `model`.

    `store` is a KvStore, which stays the caller's, or the address of a sidecar, which may be down now and come later.
    generate() takes two arguments more: `kvstore_salt`, so that only calls of the same salt share, and
    `kvstore_adapter`, a content digest of the adapter that is active. A lookup that takes over `lookup_seconds`, or a
    load over `load_seconds`, is given up and the prompt computed; up to `queue_bytes_max` wait to be stored. Of layers
    with a sliding window up to `window_bytes_max` are remembered during a call, on the model's device, to be stored.

    Reads all weights once for a fingerprint. Raises UnsupportedModelError when the KV of this model cannot be
    cached, InvalidArgumentError when it is cached already, and ConfigError for an address that cannot be. Afterwards
    no fault of the store reaches generate(). Undone by uncache(); do that before copying or pickling the model.
    """
    if isinstance(getattr(model, _ATTRIBUTE, None), HuggingFaceConnector):
        raise InvalidArgumentError("the model is cached already; call uncache(model) first")
    description = describe_model(model, block_tokens)
    namespace = Namespace(
        model=model_name or model.config.model_type,
        revision=description.revision,
        tenant=tenant,
        secret=secret,
        layout=description.layout,
    )
    limits = Limits(
        lookup_seconds=lookup_seconds,
        load_seconds=load_seconds,
        queue_bytes_max=queue_bytes_max,
        window_bytes_max=window_bytes_max,
    )
    served = ServedModel(namespace, _plan(model, description, window_bytes_max))
    connector = HuggingFaceConnector(model, store, served, limits, clock or SystemClock())
    layout = description.layout
    logger.info(
        "kvstore serves generate(): model=%s layers=%d groups=%d block_tokens=%d block_bytes=%d",
        namespace.model,
        layout.layers,
        len(layout.groups),
        layout.block_tokens,
        sum(part.size_bytes for part in layout.parts),
    )
    setattr(model, _ATTRIBUTE, connector)
    model.__dict__["generate"] = connector.generate
    return model


def connector_of(model: PreTrainedModel) -> HuggingFaceConnector:
    """The connector of a cached model: its counts, flush() and refresh(). Raises InvalidArgumentError for others."""
    connector = getattr(model, _ATTRIBUTE, None)
    if not isinstance(connector, HuggingFaceConnector):
        raise InvalidArgumentError("the model is not cached; call cached(model, store) first")
    return connector


def uncache(model: ModelT) -> ModelT:
    """Undo cached(): queued stores are finished for a few seconds, and generate() is again that of transformers."""
    connector = connector_of(model)
    del model.__dict__["generate"]
    delattr(model, _ATTRIBUTE)
    connector.close()
    return model


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long a generate() call waits for the store, how many bytes wait to be stored, or are remembered for it."""

    lookup_seconds: float
    load_seconds: float
    queue_bytes_max: int
    window_bytes_max: int


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Where a model's blocks lie, and which caches it needs."""

    namespace: Namespace
    plan: CachePlan


@dataclass(frozen=True, slots=True)
class _Call:
    """A generate() that goes on from loaded blocks; of each row the first `stored_blocks` are in the store already.

    Columns of a row before its `valid_columns` hold nothing in layers with a window.
    """

    served: ServedModel
    root: Root
    prompt: Prompt
    arguments: dict[str, Any]
    cache: Cache
    settings: AbstractContextManager[None]
    stored_blocks: tuple[int, ...]
    valid_columns: tuple[int, ...]


class HuggingFaceConnector:
    """Stands in for the generate() of one model. Made by cached().

    Lookups and loads run on one thread with a deadline, stores on another; `_verified` is written by either, all
    other fields by the thread that calls generate().
    """

    def __init__(
        self, model: PreTrainedModel, store: KvStore | str, served: ServedModel, limits: Limits, clock: Clock
    ) -> None:
        self._model = model
        self._plain_generate = cast("Callable[..., Any]", model.generate)
        # Of transformers, whoever may have put something around it: arguments are handed on by these names.
        self._signature = inspect.signature(type(model).generate.__get__(model))  # type: ignore[attr-defined]
        self._served: ServedModel | None = served
        self._settings = served.namespace
        self._limits = limits
        self._clock = clock
        self._watch = WeightsWatch(model)
        self._broken = False
        # Connecting happens at the first call; here only the address is checked.
        self._store = kvstore.connect(store, lookup_seconds=limits.lookup_seconds) if isinstance(store, str) else store
        self._breaker = breaker = CircuitBreaker(clock)
        self._counters = counters = ConnectorCounters()
        self._verified: bool | None = None

        def record_failure(error: Exception) -> None:
            breaker.record_failure(error)
            counters.count_failure(error)

        self._record_failure = record_failure
        self._calls = GuardedCalls("kvstore-lookup")
        self._stores = BackgroundStores(
            "kvstore-store", record_failure, jobs_max=QUEUED_STORES_MAX, queue_bytes_max=limits.queue_bytes_max
        )
        # The threads know nothing of the connector, so that they end with a model that is dropped without uncache().
        own_store = self._store if isinstance(store, str) else None
        self._end = weakref.finalize(self, _end, self._calls, self._stores, own_store)
        self._guarded(lambda: self._verify(served.namespace), ATTACH_SECONDS)

    def generate(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # the signature of transformers
        """As generate() of transformers, which see; `kvstore_salt` and `kvstore_adapter` are taken out."""
        root = Root(adapter=kwargs.pop("kvstore_adapter", None), salt=kwargs.pop("kvstore_salt", None))
        bound = self._signature.bind(*args, **kwargs).arguments
        arguments = bound | bound.pop("kwargs", {})
        call = self._harmless(lambda: self._begin(arguments, root)) or Bypass.BROKEN
        if isinstance(call, Bypass):
            self._counters.count_bypass(call)
            return self._plain_generate(**arguments)
        with call.settings:
            result = self._plain_generate(**call.arguments)
        sequences = result if isinstance(result, torch.Tensor) else result.sequences
        self._harmless(lambda: self._store_later(call, sequences))
        return result

    def stats(self) -> ConnectorStats:
        """What was looked up, loaded, stored, bypassed, and what failed, since cached()."""
        return self._counters.snapshot(self._breaker.openings)

    @property
    def namespace(self) -> Namespace | None:
        """Where this model's blocks lie; None while its weights cannot be cached."""
        return None if self._served is None else self._served.namespace

    def flush(self, timeout_seconds: float = 60.0) -> bool:
        """Wait until what was computed so far is stored, or refused; false when that takes too long."""
        return self._stores.wait_idle(timeout_seconds)

    def refresh(self) -> None:
        """Read all weights again: for changes that no version counter sees (see WeightsWatch)."""
        self._watch = WeightsWatch(self._model)
        self._verified = None
        try:
            description = describe_model(self._model, self._settings.layout.block_tokens)
        except KvstoreError as error:
            self._served = None
            self._counters.count_failure(error)
            return
        namespace = Namespace(
            model=self._settings.model,
            revision=description.revision,
            tenant=self._settings.tenant,
            secret=self._settings.secret,
            layout=description.layout,
        )
        self._served = ServedModel(namespace, _plan(self._model, description, self._limits.window_bytes_max))

    def close(self) -> None:
        """Finish what is queued within a few seconds and let go of the store; idempotent."""
        self._end()

    def _begin(self, arguments: dict[str, Any], root: Root) -> _Call | Bypass:
        """Look the prompt up, load what is stored of it, and put that into a cache."""
        prompt = read_prompt(self._model, arguments)
        if isinstance(prompt, Bypass):
            return prompt
        if self._watch.sees_change(self._model):
            self.refresh()
        reason = adapter_bypass(self._model, root.adapter) or self._trust_bypass()
        if reason is not None:
            return reason
        served = self._served
        assert served is not None, "an unsupported model is bypassed"
        given = given_cache(arguments)
        if given is not None and not served.plan.can_fill(given):
            return Bypass.OWN_CACHE
        matches = self._match(served.namespace, prompt, root)
        if matches is None:
            return Bypass.STORE
        matches = self._bring(matches)
        prefixes = self._load(served, prompt, matches)
        try:
            return self._continue(served, root, prompt, arguments, list(zip(matches, prefixes, strict=True)))
        except _NO_MEMORY as error:
            self._counters.count_failure(error)
            return Bypass.MEMORY

    def _continue(
        self,
        served: ServedModel,
        root: Root,
        prompt: Prompt,
        arguments: dict[str, Any],
        found: list[tuple[PrefixMatch, LoadedPrefix]],
    ) -> _Call:
        """The call with a cache that holds what was loaded, all rows of it brought to one column."""
        plan = served.plan
        size = plan.block_tokens
        known = [row_of_blocks(plan.sets, prefix.parts, size, prefix.blocks) for _, prefix in found]
        rows, column = level_rows(self._model, plan, prompt, known)
        columns = static_columns(self._model, arguments, prompt.ids.shape[1])
        settings: AbstractContextManager[None] = nullcontext()
        cache = cast("Cache | None", given_cache(arguments))
        if cache is None and columns is None:
            cache = plan.dynamic(len(rows))
        elif cache is None:
            assert columns is not None
            cache = plan.static(len(rows), _columns_without_recompiling(self._model, columns))
            arguments, settings = without_cache_setting(self._model, arguments)
        if column:
            try:
                fill(cache, plan.sets, rows, column, self._model.device)
            except BaseException:
                cache.reset()  # type: ignore[no-untyped-call]  # the caller's own goes on empty
                raise
        others = {name: value for name, value in arguments.items() if name not in CACHE_ARGUMENTS}
        return _Call(
            served,
            root,
            prompt,
            others | {CACHE_ARGUMENT: cache},
            cache,
            settings,
            # What did not come, though it was found, may be gone: it is offered again.
            tuple(prefix.blocks if prefix.is_short else match.blocks for match, prefix in found),
            tuple(row.first_column(plan.sets) if column else 0 for row in rows),
        )

    def _trust_bypass(self) -> Bypass | None:
        """Whether the store is known to give back what it was given; asks it in the background where it is not."""
        if self._broken:
            return Bypass.BROKEN
        if self._served is None:
            return Bypass.UNSUPPORTED
        namespace = self._served.namespace
        if self._verified is None and self._breaker.allows_call():
            self._stores.offer(lambda: self._verify(namespace), namespace.layout.block_bytes)
        return None if self._verified else Bypass.UNVERIFIED

    def _verify(self, namespace: Namespace) -> None:
        equal = gives_back_what_it_takes(self._store, namespace)
        self._breaker.record_success()
        if namespace is self.namespace:
            self._verified = equal
        if not equal:
            self._counters.count_failure(SelfCheckError("other bytes came back than were stored"))

    def _match(self, namespace: Namespace, prompt: Prompt, root: Root) -> list[PrefixMatch] | None:
        """What is stored of each row, one token at least left to compute; None if the store cannot be asked."""
        if not self._breaker.allows_call():
            return None
        heads = [prompt.row(index)[:-1] for index in range(len(prompt.pads))]
        self._counters.add(lookups=len(heads), lookup_tokens=sum(map(len, heads)))

        def match_rows() -> list[PrefixMatch]:
            # With an id of its own a lookup that is repeated on a new connection is still counted, and once.
            return [self._store.match(namespace, head, root=root, request_id=secrets.token_hex(8)) for head in heads]

        matches = self._guarded(match_rows, self._limits.lookup_seconds)
        if matches is not None:
            self._breaker.record_success()
            self._counters.add(matched_tokens=sum(match.tokens for match in matches))
        return matches

    def _bring(self, matches: list[PrefixMatch]) -> list[PrefixMatch]:
        """The matches, after what lies on disk, or at peers, came up in a part of the time that loads have."""
        seconds = _PREFETCH_RATIO * self._limits.load_seconds

        def wait() -> list[PrefixMatch]:
            with prefetched(self._store, matches, seconds, self._clock) as brought:
                return brought

        return self._guarded(wait, self._limits.load_seconds) or matches

    def _load(self, served: ServedModel, prompt: Prompt, matches: list[PrefixMatch]) -> list[LoadedPrefix]:
        """The leading blocks of each row: of those that the batch has use for, as many as could be loaded."""
        plan = served.plan
        nothing = [nothing_loaded(plan.sets, plan.block_tokens)] * len(matches)
        if not any(match.blocks for match in matches):
            return nothing
        levels = [pad + match.tokens for pad, match in zip(prompt.pads, matches, strict=True)]
        column = common_column(levels, prompt.ids.shape[1], may_cut=not plan.has_windows)
        limits = [-(-max(0, column - pad) // plan.block_tokens) for pad in prompt.pads]

        def load_rows() -> list[LoadedPrefix]:
            return [
                load_prefix(self._store, match, plan.sets, limit) if match.blocks else none
                for match, limit, none in zip(matches, limits, nothing, strict=True)
            ]

        prefixes = self._guarded(load_rows, self._limits.load_seconds)
        if prefixes is None:
            return nothing
        self._counters.add(loaded_tokens=sum(prefix.blocks for prefix in prefixes) * plan.block_tokens)
        return prefixes

    def _guarded(self, function: Callable[[], T], seconds: float) -> T | None:
        outcome = self._calls.call(function, seconds)
        if isinstance(outcome, Failure):
            self._record_failure(outcome.error)
            return None
        return outcome

    def _harmless(self, function: Callable[[], T]) -> T | None:
        """The result of `function`; None after an error of our own, which is counted, and keeps the connector off."""
        try:
            return function()
        except Exception as error:  # noqa: BLE001  # generate() goes on whatever it was; counted
            self._broken = True
            self._counters.count_failure(error)
            return None

    def _store_later(self, call: _Call, sequences: torch.Tensor) -> None:
        """Queue the whole blocks that were computed. Copies them now: the caller may go on with the cache."""
        plan = call.served.plan
        tokens = sequences.cpu()
        prompt_columns = call.prompt.ids.shape[1]
        if not torch.equal(tokens[:, :prompt_columns], call.prompt.ids.to(tokens.dtype)):
            return
        kv = ComputedKv(call.cache, plan.sets, plan.block_tokens)
        if not kv.matches(plan.sets, len(tokens)):
            return
        columns = min(kv.columns, tokens.shape[1] - 1)  # the last token was never computed
        ends = _row_ends(self._model, call, tokens) if len(tokens) > 1 else [columns]
        for row in range(len(tokens)):
            last_column = min(columns, ends[row])
            blocks = range(call.stored_blocks[row], (last_column - call.prompt.pads[row]) // plan.block_tokens)
            if blocks and not self._queue_row(call, kv, tokens[row], row, blocks):
                self._counters.add(dropped_blocks=len(blocks))

    def _queue_row(self, call: _Call, kv: ComputedKv, tokens: torch.Tensor, row: int, blocks: range) -> bool:
        plan, pad = call.served.plan, call.prompt.pads[row]
        spans = [kv.spans(layers, pad, call.valid_columns[row], range(blocks.stop)) for layers in plan.sets]
        spans[0] = kv.spans(plan.sets[0], pad, call.valid_columns[row], blocks)
        job_bytes = sum(
            len(span) * layers.token_bytes * plan.block_tokens
            for layers, found in zip(plan.sets, spans, strict=True)
            for _, span in found
        )
        if not spans[0] or spans[0][0][1].start != blocks.start or not self._stores.has_room(job_bytes):
            return False
        try:
            runs = tuple(
                tuple(kv.copy(layers, row, pad, span) for span in found)
                for layers, found in zip(plan.sets, spans, strict=True)
            )
        except _NO_MEMORY as error:
            self._counters.count_failure(error)
            return False
        whole = tokens[pad : pad + blocks.stop * plan.block_tokens]
        turn_end = min(len(whole), call.prompt.ids.shape[1] - pad)
        job = StoreJob(call.served.namespace, call.root, whole, (turn_end,), runs)
        return self._stores.offer(self._storing(job), job.held_bytes)

    def _storing(self, job: StoreJob) -> Callable[[], None]:
        def store_blocks() -> None:
            if not self._breaker.allows_call():
                self._counters.add(dropped_blocks=sum(len(run.blocks) for run in job.runs[0]))
                return
            result = store_row(self._store, job)
            self._breaker.record_success()
            self._counters.add(
                stored_blocks=result.blocks,
                present_blocks=result.present_blocks,
                refused_blocks=result.refused_blocks,
            )

        return store_blocks


def _plan(model: PreTrainedModel, description: ModelDescription, window_bytes_max: int) -> CachePlan:
    has_one = "logits_to_keep" in inspect.signature(model.forward).parameters
    return CachePlan(
        config=model.config,
        sets=description.sets,
        block_tokens=description.layout.block_tokens,
        window_bytes_max=window_bytes_max,
        one_logit={"logits_to_keep": 1} if has_one else {},
    )


def _columns_without_recompiling(model: PreTrainedModel, columns: int) -> int:
    """As transformers does: a static cache is no smaller than the one before, so that compiled code fits it."""
    columns = max(columns, getattr(model, _STATIC_COLUMNS, -1))
    setattr(model, _STATIC_COLUMNS, columns)
    return columns


def _row_ends(model: PreTrainedModel, call: _Call, tokens: torch.Tensor) -> list[int]:
    """Behind which column each row of a batch has nothing but padding: its end token is the last that counts."""
    pad, end_tokens = setting(model, call.arguments, "pad_token_id"), set(end_ids(model, call.arguments))
    prompt_columns = call.prompt.ids.shape[1]
    ends = []
    for row in tokens.tolist():
        end = next((column + 1 for column in range(prompt_columns, len(row)) if row[column] in end_tokens), len(row))
        while end > prompt_columns and row[end - 1] == pad and pad not in end_tokens:
            end -= 1
        ends.append(end)
    return ends


def _end(calls: GuardedCalls, stores: BackgroundStores, own_store: KvStore | None) -> None:
    calls.close()
    stores.close(CLOSE_SECONDS)
    if own_store is not None:
        own_store.close()
