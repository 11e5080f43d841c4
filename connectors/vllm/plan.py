"""What the scheduler's half of the connector tells the worker's half in each step. Knows no engine.

Everything here is pickled once a step, so token ids travel as packed bytes.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.types import Root, TokenArray

TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class BlockJob:
    """Load or store the blocks [first_block, first_block + len(block_ids)) of a prompt.

    `tokens` are those of the whole prefix up to the end of these blocks; `block_ids` are where the engine keeps them.
    """

    request_id: str
    root: Root
    tokens: bytes = field(repr=False)
    first_block: int
    block_ids: tuple[int, ...]

    def token_array(self) -> TokenArray:
        """The tokens as numbers."""
        return np.frombuffer(self.tokens, dtype=np.uint32)


@dataclass(slots=True)
class StepPlan:
    """The work of one step. `held` are requests that have ended: the worker says when nothing reads their blocks."""

    revision: str | None = None
    loads: list[BlockJob] = field(default_factory=list)
    stores: list[BlockJob] = field(default_factory=list)
    held: list[str] = field(default_factory=list)


class PackedTokens:
    """The token ids of one request, packed as they are learned. Never shrinks; knows each token once."""

    def __init__(self) -> None:
        self._packed = array("I")
        assert self._packed.itemsize == TOKEN_BYTES, "C's unsigned int has 32 bits on every platform of ours"

    def __len__(self) -> int:
        return len(self._packed)

    def extend_to(self, tokens: Sequence[int], count: int) -> None:
        """Take over the tokens that are not known yet, up to `count` in all."""
        known = len(self._packed)
        if count > known:
            self._packed.extend(tokens[known:count])

    def first(self, count: int) -> bytes:
        """The leading `count` tokens, which must be known."""
        assert count <= len(self._packed), "only tokens that were taken over can be sent"
        return self._packed[:count].tobytes()


def storable_blocks(computed_tokens: int, known_tokens: int, block_tokens: int) -> int:
    """How many leading blocks are whole: their KV is computed, and all their tokens are known for certain.

    An engine that schedules ahead has computed tokens that it has not told yet, and drafts that may be rejected.
    """
    return max(0, min(computed_tokens, known_tokens)) // block_tokens


def loadable_blocks(prompt_tokens: int, block_tokens: int) -> int:
    """How many leading blocks of a prompt may come from elsewhere: the engine has one token at least to compute."""
    return max(0, prompt_tokens - 1) // block_tokens
