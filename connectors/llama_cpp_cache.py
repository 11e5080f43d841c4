"""Between an engine's one sequence and a store: what is restored before a prompt, and kept after its answer.

Imports no llama_cpp: the engine is whoever has the methods of Sequence.
"""

from __future__ import annotations

import secrets
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import kvstore
from kvstore.connectors.common import (
    BackgroundStores,
    CircuitBreaker,
    ConnectorCounters,
    Failure,
    GuardedCalls,
    HookGuard,
    SelfCheckError,
    prefetched,
)
from kvstore.connectors.llama_cpp_states import (
    gives_back_what_it_takes,
    is_worth_loading,
    is_worth_storing,
    load_state,
    shared_tokens,
    store_state,
)
from kvstore.errors import InvalidTokensError
from kvstore.tokens import as_token_array
from kvstore.types import require_state

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Items

    import numpy as np
    from numpy.typing import NDArray

    from kvstore.api import KvStore
    from kvstore.clock import Clock
    from kvstore.connectors.common import ConnectorStats
    from kvstore.connectors.llama_cpp_states import LoadedState
    from kvstore.types import Namespace, PrefixMatch, Root, TokenArray

T = TypeVar("T")

ATTACH_SECONDS = 5.0
CLOSE_SECONDS = 5.0
QUEUED_STORES_MAX = 16
_PREFETCH_RATIO = 0.5  # of the time for a load: what is not up by then is loaded from disk in the rest of it


class Sequence(Protocol):
    """An engine's context that holds the KV of one sequence."""

    @property
    def tokens(self) -> NDArray[np.intc]:
        """The tokens whose KV it holds; a copy."""
        ...

    @property
    def room_tokens(self) -> int:
        """How many tokens it can hold."""
        ...

    @property
    def state_bytes(self) -> int:
        """How large its state is now."""
        ...

    def save(self) -> NDArray[np.uint8] | None:
        """Its state; None where it is not that of `tokens`."""
        ...

    def restore(self, state: LoadedState, prompt: TokenArray) -> bool:
        """Hold the first `state.tokens` of `prompt`, and nothing else; where that fails it holds nothing."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long a prompt waits for the store, how many bytes wait to be stored, how many tokens are worth it."""

    lookup_seconds: float = 0.1
    load_seconds: float = 2.0
    queue_bytes_max: int = 1 << 30
    tokens_min: int = 64


class PrefixCache:
    """What one engine's sequence has to do with a store. Called by one thread at a time, as the engine itself.

    Lookups and loads run on one thread with a deadline, stores on another. `_verified` is written by either,
    `_stored_tokens` by the engine's thread. Nothing raises into the engine: every failure is a miss, and counted.
    """

    def __init__(
        self,
        sequence: Sequence,
        store: KvStore | str,
        namespace: Namespace,
        *,
        root: Root,
        limits: Limits,
        clock: Clock,
    ) -> None:
        self._sequence = sequence
        self.namespace = namespace
        self._root = root
        self._limits = limits
        self._clock = clock
        # Connecting happens at the first call; here only the address is checked.
        self._store = kvstore.connect(store, lookup_seconds=limits.lookup_seconds) if isinstance(store, str) else store
        self._breaker = breaker = CircuitBreaker(clock)
        self._counters = counters = ConnectorCounters()
        self._verified: bool | None = None
        self._broken = False
        self._stored_tokens: int | None = None  # of the sequence under way; None where nothing of it is to be stored

        def record_failure(error: Exception) -> None:
            breaker.record_failure(error)
            counters.count_failure(error)

        self._record_failure = record_failure
        self._guard = HookGuard(counters, self._give_up)
        self._calls = GuardedCalls("kvstore-lookup")
        self._stores = BackgroundStores(
            "kvstore-store", record_failure, jobs_max=QUEUED_STORES_MAX, queue_bytes_max=limits.queue_bytes_max
        )
        # The threads know nothing of this object, so that they end with one that is dropped without close().
        own_store = self._store if isinstance(store, str) else None
        self._end = weakref.finalize(self, _end, self._calls, self._stores, own_store)
        self._guarded(self._verify, ATTACH_SECONDS)

    def restore(self, prompt: Items[int]) -> None:
        """Bring what is stored of a prompt into the engine's sequence, unless it holds as much already."""
        self._stored_tokens = None
        self._guard.run(lambda: self._restore(prompt), None)

    def keep(self) -> None:
        """Store what the engine's sequence has become since restore(). The state is copied now, and sent later."""
        self._guard.run(self._keep, None)

    def bypass(self, reason: str) -> None:
        """Count a prompt that is computed without the store, and keep nothing of it."""
        self._stored_tokens = None
        self._counters.count_bypass(reason)

    def stats(self) -> ConnectorStats:
        """What was looked up, loaded, stored, bypassed, and what failed; blocks are pieces of a state."""
        return self._counters.snapshot(self._breaker.openings)

    def flush(self, timeout_seconds: float = 60.0) -> bool:
        """Wait until what was computed so far is stored, or refused; false when that takes too long."""
        return self._stores.wait_idle(timeout_seconds)

    def close(self) -> None:
        """Finish what is queued within a few seconds and let go of the store; idempotent."""
        self._end()

    def _restore(self, tokens: Items[int]) -> None:
        try:
            prompt = as_token_array(tokens)
        except InvalidTokensError:  # what the engine makes of them is its own business
            self._counters.count_bypass("inputs")
            return
        reason = self._trust_bypass()
        if reason is not None:
            self._counters.count_bypass(reason)
            return
        match = self._match(prompt[:-1])  # one token has to be computed, to know what follows it
        if match is None:
            self._counters.count_bypass("store")
            return
        self._stored_tokens = match.tokens
        held = shared_tokens(self._sequence.tokens, match.prompt)
        if not is_worth_loading(match.tokens, match.tokens, held, self._limits.tokens_min):
            return
        state = self._load(match, held)
        if state is None:
            self._stored_tokens = 0  # though it was found, it may be gone: it is offered again
        elif self._sequence.restore(state, prompt[: state.tokens]):
            self._counters.add(loaded_tokens=state.tokens)
        else:
            self._counters.count_bypass("refused")

    def _keep(self) -> None:
        stored_tokens, self._stored_tokens = self._stored_tokens, None
        held = self._sequence.tokens
        if stored_tokens is None or not is_worth_storing(held.size, stored_tokens, self._limits.tokens_min):
            return
        tokens = as_token_array(held)
        size = self._sequence.state_bytes
        pieces = -(-size // require_state(self.namespace.layout).piece_bytes)
        if not self._stores.has_room(size):
            self._counters.add(dropped_blocks=pieces)
            return
        blob = self._sequence.save()
        if blob is None:
            self._counters.count_bypass("other_tokens")
        elif not self._stores.offer(lambda: self._send(tokens, blob, pieces), blob.size):
            self._counters.add(dropped_blocks=pieces)

    def _send(self, tokens: TokenArray, blob: NDArray[np.uint8], pieces: int) -> None:
        if not self._breaker.allows_call():
            self._counters.add(dropped_blocks=pieces)
            return
        result = store_state(self._store, self.namespace, self._root, tokens, blob)
        self._breaker.record_success()
        self._counters.add(
            stored_blocks=result.blocks, present_blocks=result.present_blocks, refused_blocks=result.refused_blocks
        )

    def _match(self, head: TokenArray) -> PrefixMatch | None:
        if not self._breaker.allows_call():
            return None
        self._counters.add(lookups=1, lookup_tokens=head.size)
        # With an id of its own a lookup that is repeated on a new connection is still counted, and once.
        request_id = secrets.token_hex(8)
        match = self._guarded(
            lambda: self._store.match(self.namespace, head, root=self._root, request_id=request_id),
            self._limits.lookup_seconds,
        )
        if match is not None:
            self._breaker.record_success()
            self._counters.add(matched_tokens=match.tokens)
        return match

    def _load(self, match: PrefixMatch, held_tokens: int) -> LoadedState | None:
        room_tokens, limits = self._sequence.room_tokens, self._limits

        def load() -> LoadedState | None:
            with prefetched(self._store, [match], _PREFETCH_RATIO * limits.load_seconds, self._clock):
                return load_state(
                    self._store, match, held_tokens=held_tokens, tokens_min=limits.tokens_min, room_tokens=room_tokens
                )

        return self._guarded(load, limits.load_seconds)

    def _trust_bypass(self) -> str | None:
        """Whether the store is known to give back what it was given; asks it in the background where it is not."""
        if self._broken:
            return "broken"
        if self._verified is None and self._breaker.allows_call():
            self._stores.offer(self._verify, require_state(self.namespace.layout).piece_bytes)
        return None if self._verified else "unverified"

    def _verify(self) -> None:
        self._verified = gives_back_what_it_takes(self._store, self.namespace)
        self._breaker.record_success()
        if not self._verified:
            self._counters.count_failure(SelfCheckError("other bytes came back than were stored"))

    def _guarded(self, function: Callable[[], T], seconds: float) -> T | None:
        outcome = self._calls.call(function, seconds)
        if isinstance(outcome, Failure):
            self._record_failure(outcome.error)
            return None
        return outcome

    def _give_up(self) -> None:
        self._broken = True


def _end(calls: GuardedCalls, stores: BackgroundStores, own_store: KvStore | None) -> None:
    calls.close()
    stores.close(CLOSE_SECONDS)
    if own_store is not None:
        own_store.close()
