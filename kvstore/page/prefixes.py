"""The hottest prefixes of a store, for people to look at."""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, Protocol

from kvstore.page.sources import ShownPrefix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.clock import Clock
    from kvstore.types import Namespace, TokenArray

PREFIXES_MAX = 20
# Looking for them goes through every tree, so that is done once in so long however many people look.
REMEMBERED_SECONDS = 30.0
_SEARCHED_BYTES = 2**30  # of the most worth
_BOUNDARY_TOKENS = 512


class StoredPrefix(Protocol):
    """A stored prompt."""

    @property
    def namespace(self) -> Namespace:
        """Whose it is."""
        ...

    @property
    def tokens(self) -> TokenArray:
        """What it says."""
        ...


class PrefixStore(Protocol):
    """What is asked of the store."""

    def hot_prefixes(self, every_tokens: int, limit_bytes: int) -> Sequence[StoredPrefix]:
        """The prefixes worth most that have so many bytes together."""
        ...


class HotPrefixes:
    """Asks a store for them, and remembers the answer for a while. Thread-safe."""

    def __init__(self, store: PrefixStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._lock = threading.Lock()
        self._found: list[ShownPrefix] = []  # guarded by _lock, as is the next
        self._until = float("-inf")

    def __call__(self) -> Sequence[ShownPrefix]:
        """The prefixes worth most, PREFIXES_MAX at most."""
        with self._lock:
            if self._clock.monotonic() >= self._until:
                stored = self._store.hot_prefixes(_BOUNDARY_TOKENS, _SEARCHED_BYTES)
                self._found = [_shown(one) for one in itertools.islice(stored, PREFIXES_MAX)]
                self._until = self._clock.monotonic() + REMEMBERED_SECONDS
            return self._found


def _shown(stored: StoredPrefix) -> ShownPrefix:
    namespace, tokens = stored.namespace, int(stored.tokens.size)
    blocks = tokens // namespace.layout.block_tokens
    return ShownPrefix(namespace.tenant, namespace.model, tokens, blocks * namespace.layout.block_bytes)
