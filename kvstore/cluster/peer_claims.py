"""Claims of this node: prefixes that its engines compute just now, so that nobody else computes the same."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.errors import DirectoryUnavailableError

if TYPE_CHECKING:
    from kvstore.clock import Clock
    from kvstore.cluster.directory import Claim
    from kvstore.store.space import Space
    from kvstore.types import TokenArray

logger = logging.getLogger(__name__)
_CLAIMS_MAX = 4096


@dataclass(frozen=True, slots=True)
class _Held:
    claim: Claim
    ends_at: float


class HeldClaims:
    """The claims that this node holds, by the key of the boundary. Thread-safe; calls nobody while its lock is held.

    A claim is taken when an engine was told that it has to compute a prefix. It is let go at once when the store of
    that prefix was given up. One that was committed is left to run out: the others, who look for holders too, wait for
    it to be announced, which takes a moment, and would compute it if they saw no claim meanwhile.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._held: OrderedDict[bytes, _Held] = OrderedDict()  # guarded by _lock

    def __len__(self) -> int:
        return len(self._held)

    def keep(self, key: bytes, claim: Claim, seconds: float) -> None:
        """This node computes what is up to that boundary."""
        now = self._clock.monotonic()
        with self._lock:
            self._held[key] = _Held(claim, now + seconds)
            self._held.move_to_end(key)
            over = [known for known, held in self._held.items() if held.ends_at <= now]
            over += list(self._held)[: max(0, len(self._held) - len(over) - _CLAIMS_MAX)]
            for known in over:
                self._held.pop(known, None)

    def stage_ended(self, space: Space, root_key: bytes, prompt: TokenArray) -> None:
        """A store has ended: what it did not make visible is not being computed any more."""
        if not self._held:
            return
        keys = space.prompt_keys(root_key, prompt)[1:]
        stored_blocks = space.find(root_key, prompt).ids.size
        with self._lock:
            claimed = [(blocks, self._held.pop(key)) for blocks, key in enumerate(keys, 1) if key in self._held]
        for blocks, held in claimed:
            if blocks > stored_blocks:
                self._release(held.claim)

    def release_all(self) -> None:
        """The node stops: others need not wait for it."""
        with self._lock:
            held = list(self._held.values())
            self._held.clear()
        for each in held:
            self._release(each.claim)

    def _release(self, claim: Claim) -> None:
        try:
            claim.release()
        except DirectoryUnavailableError as error:
            logger.info("a claim is left to run out: cause=%s", error)
