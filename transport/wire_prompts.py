"""Prompts sent by their growth: what a server remembers of a client's prompts, and what the client knows of that.

Both sides keep the last few prompts of one session, under ids that the client chooses. A request names an id, how many
leading tokens it shares with what is remembered there, and their digest; the rest travels. Whenever the server does
not have exactly those tokens it asks for the whole prompt, so a prompt is never put together wrongly: forgetting is
always allowed.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash

from kvstore.errors import InvalidTokensError
from kvstore.tokens import PROMPT_TOKENS_MAX
from kvstore.transport.convert import tokens_from_proto
from kvstore.transport.wire import Delta

if TYPE_CHECKING:
    from kvstore.types import TokenArray

PROMPTS_MAX = 16
TOKEN_BYTES = 4
# Prompts that share less than this with an older one are sent whole: finding the rest out would cost more.
_SHARED_BYTES_MIN = 1024


def prompt_digest(packed: bytes, prefix_bytes: int) -> int:
    """XXH3-64, seed 0, of the leading bytes of packed token ids. https://xxhash.com/doc/v0.8.3/ has the function."""
    return xxhash.xxh3_64_intdigest(memoryview(packed)[:prefix_bytes])


class KnownPrompt:
    """A remembered prompt; the digest of all of it, and its ids as an array, are made when they are first asked for."""

    __slots__ = ("_digest", "_tokens", "packed")

    def __init__(self, packed: bytes) -> None:
        self.packed = packed
        self._digest: int | None = None
        self._tokens: TokenArray | None = None

    @property
    def tokens(self) -> TokenArray:
        """Its token ids. Raises InvalidTokensError if the bytes are no whole ids."""
        if self._tokens is None:
            self._tokens = tokens_from_proto(self.packed)
        return self._tokens

    def digest(self, prefix_bytes: int) -> int:
        """The digest of its leading bytes."""
        if prefix_bytes != len(self.packed):
            return prompt_digest(self.packed, prefix_bytes)
        if self._digest is None:
            self._digest = prompt_digest(self.packed, prefix_bytes)
        return self._digest


class PromptBudget:
    """Bytes that all sessions of a server may remember together. Used from one event loop."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.used_bytes = 0

    def claim(self, size_bytes: int) -> bool:
        """Take bytes; false, and nothing taken, if there are not as many left."""
        if self.used_bytes + size_bytes > self._limit_bytes:
            return False
        self.used_bytes += size_bytes
        return True

    def refund(self, size_bytes: int) -> None:
        """Give bytes back."""
        self.used_bytes -= size_bytes


class PromptMemory:
    """The prompts that a server remembers of one session, the least recently used forgotten first.

    Used from one event loop. At most PROMPTS_MAX prompts and `limit_bytes`, and no more than `budget` has left.
    """

    def __init__(self, limit_bytes: int, budget: PromptBudget) -> None:
        self._limit_bytes = limit_bytes
        self._budget = budget
        self._prompts: OrderedDict[int, KnownPrompt] = OrderedDict()
        self._used_bytes = 0

    def complete(self, delta: tuple[int, int, int, int], tail: bytes) -> KnownPrompt | None:
        """The whole prompt of a Delta, which is remembered from now on; None if its beginning is not known here.

        Raises InvalidTokensError for a prompt longer than any may be.
        """
        prompt_id, base_id, prefix_tokens, digest = delta
        prefix_bytes = prefix_tokens * TOKEN_BYTES
        if prefix_bytes + len(tail) > PROMPT_TOKENS_MAX * TOKEN_BYTES:
            tokens = prefix_tokens + len(tail) // TOKEN_BYTES
            raise InvalidTokensError(f"the prompt has {tokens} tokens, expected at most {PROMPT_TOKENS_MAX}")
        if not prefix_bytes:
            return self._remember(prompt_id, KnownPrompt(tail))
        base = self._prompts.get(base_id)
        if base is None or len(base.packed) < prefix_bytes or base.digest(prefix_bytes) != digest:
            return None
        known = base.packed
        if not tail:
            # A prefix of what is known, such as the part that a lease is for: the longer one stays.
            self._prompts.move_to_end(base_id)
            return base if len(known) == prefix_bytes else KnownPrompt(known[:prefix_bytes])
        whole = known + tail if len(known) == prefix_bytes else known[:prefix_bytes] + tail
        return self._remember(prompt_id, KnownPrompt(whole))

    def clear(self) -> None:
        """Forget everything."""
        while self._prompts:
            self._forget_oldest()

    def _remember(self, prompt_id: int, prompt: KnownPrompt) -> KnownPrompt:
        """Keep a prompt as far as the limits allow it; returns it."""
        size_bytes = len(prompt.packed)
        old = self._prompts.pop(prompt_id, None)
        if old is not None:
            self._give_back(len(old.packed))
        if size_bytes > self._limit_bytes:
            return prompt
        while self._prompts and (
            len(self._prompts) >= PROMPTS_MAX or self._used_bytes + size_bytes > self._limit_bytes
        ):
            self._forget_oldest()
        while not self._budget.claim(size_bytes):
            if not self._prompts:
                return prompt
            self._forget_oldest()
        self._used_bytes += size_bytes
        self._prompts[prompt_id] = prompt
        return prompt

    def _forget_oldest(self) -> None:
        self._give_back(len(self._prompts.popitem(last=False)[1].packed))

    def _give_back(self, size_bytes: int) -> None:
        self._used_bytes -= size_bytes
        self._budget.refund(size_bytes)


class Growth(NamedTuple):
    """How a prompt is sent: the delta, and the bytes of the tokens behind its prefix."""

    delta: Delta
    tail: bytes


class SentPrompts:
    """What a client believes its server to remember, the least recently sent forgotten first. Not thread-safe.

    `limit_bytes` is what the server said it remembers for a session; 0 means that every prompt is sent whole.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._prompts: OrderedDict[int, KnownPrompt] = OrderedDict()
        self._used_bytes = 0
        self._last_id = 0

    def growth(self, whole: bytes) -> Growth | None:
        """How to send `whole`, taken as sent from now on; None if it is too large to be remembered."""
        if len(whole) > self._limit_bytes:
            return None
        base_id, shared_bytes = self._most_shared(whole)
        if not shared_bytes:
            prompt_id = self._new_id()
            self._record(prompt_id, whole)
            return Growth(Delta(prompt_id, 0, 0, 0), whole)
        base = self._prompts[base_id]
        digest = base.digest(shared_bytes)
        prompt_id = base_id
        if shared_bytes == len(whole):
            self._prompts.move_to_end(base_id)
        else:
            if shared_bytes < len(base.packed):
                prompt_id = self._new_id()  # another conversation that begins alike
            self._record(prompt_id, whole)
        return Growth(Delta(prompt_id, base_id, shared_bytes // TOKEN_BYTES, digest), whole[shared_bytes:])

    def whole_again(self, growth: Growth, whole: bytes) -> Growth:
        """How to send a prompt again whose beginning the server did not know."""
        self._record(growth.delta.prompt_id, whole)
        return Growth(Delta(growth.delta.prompt_id, 0, 0, 0), whole)

    def _most_shared(self, whole: bytes) -> tuple[int, int]:
        """Id and shared bytes of the prompt to build on; 0 bytes if there is none worth it."""
        best_id, best_bytes = 0, 0
        for prompt_id, prompt in reversed(self._prompts.items()):
            known = prompt.packed
            if len(known) >= len(whole):
                if known is whole or known.startswith(whole):
                    return prompt_id, len(whole)
            elif len(known) > best_bytes and whole.startswith(known):
                best_id, best_bytes = prompt_id, len(known)
        if not best_id and self._prompts:
            best_id = next(reversed(self._prompts))
            best_bytes = _common_bytes(self._prompts[best_id].packed, whole)
        return (best_id, best_bytes) if best_bytes >= _SHARED_BYTES_MIN else (0, 0)

    def _new_id(self) -> int:
        self._last_id = self._last_id % (2**32 - 1) + 1
        return self._last_id

    def _record(self, prompt_id: int, whole: bytes) -> None:
        old = self._prompts.pop(prompt_id, None)
        self._used_bytes -= len(old.packed) if old is not None else 0
        while self._prompts and (
            len(self._prompts) >= PROMPTS_MAX or self._used_bytes + len(whole) > self._limit_bytes
        ):
            self._used_bytes -= len(self._prompts.popitem(last=False)[1].packed)
        self._used_bytes += len(whole)
        self._prompts[prompt_id] = KnownPrompt(whole)


def _common_bytes(one: bytes, other: bytes) -> int:
    """How many leading bytes of two packed prompts are equal, in whole tokens; 0 if it is clearly not worth it."""
    if one[:_SHARED_BYTES_MIN] != other[:_SHARED_BYTES_MIN]:
        return 0
    count = min(len(one), len(other)) // TOKEN_BYTES
    differs = np.frombuffer(one, dtype="<u4", count=count) != np.frombuffer(other, dtype="<u4", count=count)
    return (int(differs.argmax()) if differs.any() else count) * TOKEN_BYTES
