"""Hugging Face transformers: generate() of a causal language model reuses and stores prefixes.

    from kvstore.connectors.huggingface import cached

    model = cached(model, "unix:///run/kvstore.sock")

What is served and what is bypassed stands in connectors/README.md. As with transformers itself, one model object
serves one generate() at a time.
"""

from __future__ import annotations

import inspect
import secrets
import weakref
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
from kvstore.connectors.huggingface_cache import (
    CACHE_ARGUMENT,
    LayerTensors,
    blocks_from_cache,
    cache_from_rows,
    layer_tensors,
    new_blocks,
)
from kvstore.connectors.huggingface_model import WeightsWatch, describe_model
from kvstore.connectors.huggingface_request import Bypass, adapter_bypass, read_prompt
from kvstore.errors import InvalidArgumentError, NoSpaceError
from kvstore.types import Namespace, Root

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import DynamicCache

    from kvstore.api import KvStore
    from kvstore.clock import Clock
    from kvstore.connectors.common import ConnectorStats
    from kvstore.types import PrefixMatch

__all__ = ["HuggingFaceConnector", "UnsupportedModelError", "cached", "connector_of", "uncache"]

ModelT = TypeVar("ModelT", bound=PreTrainedModel)
T = TypeVar("T")

ATTACH_SECONDS = 5.0
CLOSE_SECONDS = 5.0
QUEUED_STORES_MAX = 64
_PREFETCH_RATIO = 0.5  # of the time for a load: what is not up by then is loaded from disk in the rest of it
_ATTRIBUTE = "kvstore_connector"
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
    clock: Clock | None = None,
) -> ModelT:
    """Let `model.generate()` reuse the prefixes that `store` holds, and store what it computes. Returns `model`.

    `store` is a KvStore, which stays the caller's, or the address of a sidecar, which may be down now and come later.
    generate() takes two arguments more: `kvstore_salt`, so that only calls of the same salt share, and
    `kvstore_adapter`, a content digest of the adapter that is active. A lookup that takes over `lookup_seconds`, or a
    load over `load_seconds`, is given up and the prompt computed; up to `queue_bytes_max` wait to be stored.

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
    limits = Limits(lookup_seconds=lookup_seconds, load_seconds=load_seconds, queue_bytes_max=queue_bytes_max)
    connector = HuggingFaceConnector(model, store, namespace, limits, clock or SystemClock())
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
    """How long a generate() call waits for the store, and how many bytes wait to be stored."""

    lookup_seconds: float
    load_seconds: float
    queue_bytes_max: int


@dataclass(frozen=True, slots=True)
class _Prefix:
    """What a prompt starts with that is loaded: for each row a buffer of the same number of blocks."""

    prompt: torch.Tensor
    root: Root
    rows: list[torch.Tensor]

    @property
    def blocks(self) -> int:
        return len(self.rows[0])


class HuggingFaceConnector:
    """Stands in for the generate() of one model. Made by cached().

    Lookups and loads run on one thread with a deadline, stores on another; `_verified` is written by either, all
    other fields by the thread that calls generate().
    """

    def __init__(
        self, model: PreTrainedModel, store: KvStore | str, namespace: Namespace, limits: Limits, clock: Clock
    ) -> None:
        self._model = model
        self._plain_generate = cast("Callable[..., Any]", model.generate)
        self._signature = inspect.signature(self._plain_generate)
        self._namespace: Namespace | None = namespace
        self._settings = namespace
        self._limits = limits
        self._clock = clock
        self._watch = WeightsWatch(model)
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
        self._guarded(lambda: self._verify(namespace), ATTACH_SECONDS)

    def generate(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # the signature of transformers
        """As generate() of transformers, which see; `kvstore_salt` and `kvstore_adapter` are taken out."""
        root = Root(adapter=kwargs.pop("kvstore_adapter", None), salt=kwargs.pop("kvstore_salt", None))
        bound = self._signature.bind(*args, **kwargs).arguments
        arguments = bound | bound.pop("kwargs", {})
        prefix = self._load_prefix(arguments, root)
        if isinstance(prefix, Bypass):
            self._counters.count_bypass(prefix)
            return self._plain_generate(**arguments)
        cache = self._filled_cache(prefix)
        if cache is None:
            self._counters.count_bypass(Bypass.MEMORY)
            return self._plain_generate(**arguments)
        result = self._plain_generate(**arguments | {CACHE_ARGUMENT: cache})
        sequences = result if isinstance(result, torch.Tensor) else result.sequences
        tensors = layer_tensors(cache)
        if tensors is not None:
            self._store_later(prefix, sequences, tensors)
        return result

    def stats(self) -> ConnectorStats:
        """What was looked up, loaded, stored, bypassed, and what failed, since cached()."""
        return self._counters.snapshot(self._breaker.openings)

    @property
    def namespace(self) -> Namespace | None:
        """Where this model's blocks lie; None while its weights cannot be cached."""
        return self._namespace

    def flush(self, timeout_seconds: float = 60.0) -> bool:
        """Wait until what was computed so far is stored, or refused; false when that takes too long."""
        return self._stores.wait_idle(timeout_seconds)

    def refresh(self) -> None:
        """Read all weights again: for changes that no version counter sees (see WeightsWatch)."""
        self._watch = WeightsWatch(self._model)
        self._verified = None
        try:
            description = describe_model(self._model, self._settings.layout.block_tokens)
        except UnsupportedModelError as error:
            self._namespace = None
            self._counters.count_failure(error)
            return
        self._namespace = Namespace(
            model=self._settings.model,
            revision=description.revision,
            tenant=self._settings.tenant,
            secret=self._settings.secret,
            layout=description.layout,
        )

    def close(self) -> None:
        """Finish what is queued within a few seconds and let go of the store; idempotent."""
        self._end()

    def _load_prefix(self, arguments: dict[str, Any], root: Root) -> _Prefix | Bypass:
        """What the store holds of the prompt; `blocks` is 0 when that is nothing."""
        prompt = read_prompt(self._model, arguments)
        if isinstance(prompt, Bypass):
            return prompt
        if self._watch.sees_change(self._model):
            self.refresh()
        reason = adapter_bypass(self._model, root.adapter) or self._trust_bypass()
        if reason is not None:
            return reason
        assert self._namespace is not None, "an unsupported model is bypassed"
        tokens = prompt.cpu()
        matches = self._match(self._namespace, tokens, root)
        return Bypass.STORE if matches is None else _Prefix(tokens, root, self._load(self._namespace, matches))

    def _trust_bypass(self) -> Bypass | None:
        """Whether the store is known to give back what it was given; asks it in the background where it is not."""
        namespace = self._namespace
        if namespace is None:
            return Bypass.UNSUPPORTED
        if self._verified is None and self._breaker.allows_call():
            self._stores.offer(lambda: self._verify(namespace), namespace.layout.block_bytes)
        return None if self._verified else Bypass.UNVERIFIED

    def _verify(self, namespace: Namespace) -> None:
        equal = _gives_back_what_it_takes(self._store, namespace)
        self._breaker.record_success()
        if namespace is self._namespace:
            self._verified = equal
        if not equal:
            self._counters.count_failure(SelfCheckError("other bytes came back than were stored"))

    def _match(self, namespace: Namespace, prompt: torch.Tensor, root: Root) -> list[PrefixMatch] | None:
        """What is stored of each row, one token at least left to compute; None if the store cannot be asked."""
        if not self._breaker.allows_call():
            return None
        heads = [row[:-1] for row in prompt]
        self._counters.add(lookups=len(heads), lookup_tokens=sum(map(len, heads)))

        def match_rows() -> list[PrefixMatch]:
            # With an id of its own a lookup that is repeated on a new connection is still counted, and once.
            return [self._store.match(namespace, head, root=root, request_id=secrets.token_hex(8)) for head in heads]

        matches = self._guarded(match_rows, self._limits.lookup_seconds)
        if matches is not None:
            self._breaker.record_success()
            self._counters.add(matched_tokens=sum(match.tokens for match in matches))
        return matches

    def _load(self, namespace: Namespace, matches: list[PrefixMatch]) -> list[torch.Tensor]:
        """The leading blocks of each row, as many as could be loaded of all of them."""
        layout = namespace.layout
        blocks = min(match.blocks for match in matches)
        nothing = [new_blocks(layout, 0)] * len(matches)
        if blocks == 0:
            return nothing

        def load_rows() -> list[torch.Tensor]:
            with prefetched(self._store, matches, _PREFETCH_RATIO * self._limits.load_seconds, self._clock):
                return [_load_blocks(self._store, match, blocks) for match in matches]

        rows = self._guarded(load_rows, self._limits.load_seconds)
        if rows is None:
            return nothing
        self._counters.add(loaded_tokens=sum(map(len, rows)) * layout.block_tokens)
        shortest = min(map(len, rows))
        return [row[:shortest] for row in rows]

    def _filled_cache(self, prefix: _Prefix) -> DynamicCache | None:
        try:
            return cache_from_rows(self._model.config, prefix.rows, self._model.device)
        except _NO_MEMORY as error:
            self._counters.count_failure(error)
            return None

    def _guarded(self, function: Callable[[], T], seconds: float) -> T | None:
        outcome = self._calls.call(function, seconds)
        if isinstance(outcome, Failure):
            self._record_failure(outcome.error)
            return None
        return outcome

    def _store_later(self, prefix: _Prefix, sequences: torch.Tensor, tensors: LayerTensors) -> None:
        """Queue the whole blocks that were computed. Copies them now: the caller may go on with the cache."""
        assert self._namespace is not None, "an unsupported model is bypassed"
        layout = self._namespace.layout
        prompt_tokens = prefix.prompt.shape[1]
        tokens = sequences.cpu()
        if not torch.equal(tokens[:, :prompt_tokens], prefix.prompt):
            return
        # A row of a batch that ended early goes on with padding, so of batches only the prompts are stored. The last
        # token of a sequence was never computed.
        covered_tokens = prompt_tokens if len(tokens) > 1 else min(tensors[0][0].shape[2], tokens.shape[1] - 1)
        last = covered_tokens // layout.block_tokens
        if last <= prefix.blocks:
            return
        for row, row_tokens in enumerate(tokens[:, : last * layout.block_tokens]):
            if not self._queue_row(prefix, row, row_tokens, tensors):
                self._counters.add(dropped_blocks=last - prefix.blocks)

    def _queue_row(self, prefix: _Prefix, row: int, tokens: torch.Tensor, tensors: LayerTensors) -> bool:
        assert self._namespace is not None, "an unsupported model is bypassed"
        layout = self._namespace.layout
        last = len(tokens) // layout.block_tokens
        job_bytes = (last - prefix.blocks) * layout.block_bytes
        if not self._stores.has_room(job_bytes):
            return False
        try:
            blocks = blocks_from_cache(tensors, layout, row, prefix.blocks, last)
        except _NO_MEMORY as error:
            self._counters.count_failure(error)
            return False
        return blocks is not None and self._stores.offer(
            self._store_job(self._namespace, tokens, prefix, blocks), job_bytes
        )

    def _store_job(
        self, namespace: Namespace, tokens: torch.Tensor, prefix: _Prefix, blocks: torch.Tensor
    ) -> Callable[[], None]:
        root, first = prefix.root, prefix.blocks

        def store_blocks() -> None:
            if not self._breaker.allows_call():
                self._counters.add(dropped_blocks=len(blocks))
                return
            stage = self._store.stage(namespace, tokens, root=root, from_block=first)
            try:
                if stage.blocks:
                    stage.write_from(blocks, from_block=first)
                result = stage.commit()
            finally:
                stage.abort()
            self._breaker.record_success()
            self._counters.add(
                stored_blocks=result.blocks,
                present_blocks=result.present_blocks,
                refused_blocks=result.refused_blocks,
            )

        return store_blocks


def _load_blocks(store: KvStore, match: PrefixMatch, blocks: int) -> torch.Tensor:
    """Up to `blocks` leading blocks of a match, as many as could be loaded and verified."""
    with store.lease(match) as lease:
        rows = new_blocks(match.namespace.layout, min(blocks, lease.blocks))
        return rows[: lease.load_into(rows).blocks] if len(rows) else rows


def _gives_back_what_it_takes(store: KvStore, namespace: Namespace) -> bool:
    """Whether a random block, under a root that nobody else has, comes back byte for byte.

    Raises NoSpaceError if the store has no room for it, which says nothing either way.
    """
    layout = namespace.layout
    root = Root(salt=f"kvstore self-check {secrets.token_hex(16)}")
    tokens = torch.arange(layout.block_tokens)
    written = torch.frombuffer(bytearray(secrets.token_bytes(layout.block_bytes)), dtype=torch.uint8)[None]
    with store.stage(namespace, tokens, root=root) as stage:
        if stage.blocks:
            stage.write_from(written)
    try:
        read = _load_blocks(store, store.match(namespace, tokens, root=root, touch=False), 1)
    finally:
        store.evict(namespace, tokens, root=root)
    if not len(read):
        raise NoSpaceError("the store took no block for the self-check")
    return torch.equal(read.view(torch.uint8).reshape(1, -1), written)


def _end(calls: GuardedCalls, stores: BackgroundStores, own_store: KvStore | None) -> None:
    calls.close()
    stores.close(CLOSE_SECONDS)
    if own_store is not None:
        own_store.close()
