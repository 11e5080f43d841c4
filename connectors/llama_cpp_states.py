"""What is asked of a store for an engine that keeps whole sequences: loads, stores, the self-check.

Imports no llama_cpp. A state is worth loading, or storing, by how many tokens need not be computed for its bytes.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvstore.errors import NoSpaceError
from kvstore.tokens import as_token_array
from kvstore.types import Root, require_state

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvstore.api import KvStore
    from kvstore.types import CommitResult, Namespace, PrefixMatch, TokenArray

# A state is loaded in full even where a prompt shares only its beginning. On a CPU the KV of a token is computed in
# milliseconds and copied in some 30 us, on a GPU in tens of microseconds: 16 times as much copied as won is the limit.
STATE_TOKENS_PER_GAIN_MAX = 16
# Each state is stored in full too: it has to be longer by this share than what is stored of it, so that the states of
# one conversation sum up to no more than 8 times the last of them, and a turn computes 1/8 of its prompt again at most.
GROWTH_RATIO_MIN = 1 / 8


@dataclass(frozen=True, slots=True)
class LoadedState:
    """A state as it was stored: its first `tokens` are those of the prompt that asked for it."""

    blob: NDArray[np.uint8]
    tokens: int
    state_tokens: int


def shared_tokens(one: NDArray[np.generic], other: NDArray[np.generic]) -> int:
    """How many leading tokens two sequences share."""
    length = min(one.size, other.size)
    differing = np.flatnonzero(one[:length] != other[:length])
    return int(differing[0]) if differing.size else length


def is_worth_loading(tokens: int, state_tokens: int, held_tokens: int, tokens_min: int) -> bool:
    """Whether a state that serves `tokens` of a prompt saves enough, where the engine holds `held_tokens` of it."""
    gain = tokens - held_tokens
    return gain >= max(1, tokens_min) and state_tokens <= gain * STATE_TOKENS_PER_GAIN_MAX


def is_worth_storing(tokens: int, stored_tokens: int, tokens_min: int) -> bool:
    """Whether the state of so many tokens is to be stored, where a stored one serves `stored_tokens` of them."""
    return tokens - stored_tokens >= max(1, tokens_min, tokens * GROWTH_RATIO_MIN)


def load_state(
    store: KvStore, match: PrefixMatch, *, held_tokens: int, tokens_min: int, room_tokens: int
) -> LoadedState | None:
    """The state that serves most of a match; None where it is gone, damaged, or not worth it.

    Not worth it is one that is too long for `room_tokens`, too. What is damaged the store has dropped, and counted.
    """
    with store.lease_state(match) as lease:
        if lease.state_tokens > room_tokens or not is_worth_loading(
            lease.tokens, lease.state_tokens, held_tokens, tokens_min
        ):
            return None
        blob = np.empty(lease.state_bytes, dtype=np.uint8)
        if lease.load_into(blob) != lease.state_bytes:
            return None
        return LoadedState(blob, lease.tokens, lease.state_tokens)


def store_state(
    store: KvStore, namespace: Namespace, root: Root, tokens: TokenArray, blob: NDArray[np.uint8]
) -> CommitResult:
    """Store a state unless another one serves as much already; counts are in pieces of `layout.state.piece_bytes`."""
    with store.stage_state(namespace, tokens, state_bytes=blob.size, root=root) as stage:
        if stage.wanted:
            stage.write_from(blob)
        return stage.commit()


def gives_back_what_it_takes(store: KvStore, namespace: Namespace) -> bool:
    """Whether a random state, under a root that nobody else has, comes back byte for byte.

    Raises NoSpaceError if the store has no room for it, which says nothing either way.
    """
    root = Root(salt=f"kvstore self-check {secrets.token_hex(16)}")
    tokens = as_token_array(range(16))
    # Of two pieces, the last one of which is not full.
    written = np.frombuffer(secrets.token_bytes(require_state(namespace.layout).piece_bytes + 123), dtype=np.uint8)
    store_state(store, namespace, root, tokens, written)
    try:
        match = store.match(namespace, tokens, root=root, touch=False)
        read = load_state(store, match, held_tokens=0, tokens_min=1, room_tokens=tokens.size)
    finally:
        store.evict(namespace, tokens, root=root)
    if read is None:
        if match.tokens:
            return False
        raise NoSpaceError("the store took no state for the self-check")
    return bool(np.array_equal(read.blob, written))
