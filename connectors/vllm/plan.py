"""What the scheduler's half of the connector tells the worker's half in each step. Knows no engine.

Everything here is pickled once a step where the workers are other processes, so token ids travel as packed bytes.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.connectors.vllm.contents import ContentKeys
    from kvstore.types import Root, TokenArray

TOKEN_BYTES = 4
# What stands in a block table of vLLM's where a block has slid out of a window: its null block, the first of all.
NULL_BLOCK = 0


@dataclass(frozen=True, slots=True)
class PackedPrefix:
    """The leading `count` of the token ids in `pieces`, which are shared, not copied, until somebody wants numbers."""

    pieces: tuple[bytes, ...] = field(repr=False)
    count: int

    def token_array(self) -> TokenArray:
        """The tokens as numbers."""
        whole = self.pieces[0] if len(self.pieces) == 1 else b"".join(self.pieces)
        return np.frombuffer(whole, dtype=np.uint32)[: self.count]


@dataclass(frozen=True, slots=True)
class PartBlocks:
    """Where one group of layers keeps the blocks [first_block, first_block + len(block_ids)) of a prompt."""

    first_block: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlockJob:
    """Load or store the blocks [first_block, first_block + len(block_ids)) of a prompt.

    `tokens` are those of the whole prefix up to the end of these blocks; `block_ids` are where the layers of full
    attention keep them. `windows` has the same for each group of layers with a window, of those blocks that it keeps.
    """

    request_id: str
    root: Root
    tokens: PackedPrefix
    first_block: int
    block_ids: tuple[int, ...]
    windows: tuple[PartBlocks, ...] = ()

    @property
    def full(self) -> PartBlocks:
        """The blocks in the layers of full attention."""
        return PartBlocks(self.first_block, self.block_ids)


@dataclass(slots=True)
class StepPlan:
    """The work of one step. `held` are requests that have ended: the worker says when nothing reads their blocks.

    `preempts` where requests lose their blocks in this step, so that others may write to them. `known_failures` are the
    loads by layer that failed before this step was planned: what was planned without knowing of one may be spoiled.
    """

    revision: str | None = None
    preempts: bool = False
    known_failures: int = 0
    loads: list[BlockJob] = field(default_factory=list)
    stores: list[BlockJob] = field(default_factory=list)
    held: list[str] = field(default_factory=list)


class PackedTokens:
    """The token ids of one request, packed as they are learned. Never shrinks; knows each token once.

    With `contents`, blocks that they touch are packed as their keys, and only whole blocks are taken over. Packing
    costs 20 ns a token, handing out what is packed a look at each piece, so the long first piece is packed beside a
    lookup and not by the scheduler.
    """

    def __init__(self, contents: ContentKeys | None = None) -> None:
        self._contents = contents
        self._pieces: list[bytes] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def extend_to(self, tokens: Sequence[int], count: int) -> None:
        """Take over the tokens that are not known yet, up to `count` in all."""
        if count > self._count:
            packed = array("I", tokens[self._count : count])
            assert packed.itemsize == TOKEN_BYTES, "C's unsigned int has 32 bits on every platform of ours"
            if self._contents is not None:
                packed = self._contents.keyed(packed, self._count)
            self._pieces.append(packed.tobytes())
            self._count += len(packed)

    def first(self, count: int) -> PackedPrefix:
        """The leading `count` tokens, which must be known."""
        assert count <= self._count, "only tokens that were taken over can be sent"
        return PackedPrefix(tuple(self._pieces), count)


def storable_blocks(computed_tokens: int, known_tokens: int, block_tokens: int) -> int:
    """How many leading blocks are whole: their KV is computed, and all their tokens are known for certain.

    An engine that schedules ahead has computed tokens that it has not told yet, and drafts that may be rejected.
    """
    return max(0, min(computed_tokens, known_tokens)) // block_tokens


def loadable_blocks(prompt_tokens: int, block_tokens: int) -> int:
    """How many leading blocks of a prompt may come from elsewhere: the engine has one token at least to compute."""
    return max(0, prompt_tokens - 1) // block_tokens


def live_blocks(table: Sequence[int], span: range) -> PartBlocks:
    """Those blocks of `span` that a group with a window still has: all behind the last that slid out of it."""
    ids = tuple(table[span.start : span.stop])
    gone = max((place + 1 for place, block_id in enumerate(ids) if block_id == NULL_BLOCK), default=0)
    return PartBlocks(span.start + gone, ids[gone:])
