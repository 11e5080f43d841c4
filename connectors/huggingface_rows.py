"""The rows of a batch before its forward pass: how each is brought to one common column of the cache.

generate() computes all rows of a batch from the same column on. Rows that are padded on the left, or of which less is
stored, end elsewhere: those before the common column compute what they lack in a forward pass of their own, without
padding, and those behind it, where their layers allow, give up some of what was loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from kvstore.connectors.huggingface_cache import CACHE_ARGUMENT, RowKv, fill, row_of_cache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from kvstore.connectors.huggingface_cache import CachePlan

# A forward pass takes as long as one of so many tokens, however few it has: all weights are read for it.
PASS_TOKENS_MIN = 64


@dataclass(frozen=True, slots=True)
class Prompt:
    """The token ids [rows, columns] of a call, and by how many columns each row is padded on the left."""

    ids: torch.Tensor
    pads: tuple[int, ...]

    def row(self, index: int) -> torch.Tensor:
        """The tokens of a row without its padding."""
        return self.ids[index, self.pads[index] :]


def common_column(levels: Sequence[int], columns: int, *, may_cut: bool) -> int:
    """The column from which on computing a batch costs least, where row i is known up to column `levels[i]`.

    Costs are counted in tokens: of the passes of rows before that column, and of the pass of all rows behind it.
    Without `may_cut` no row gives up what is known of it.
    """
    if not may_cut:
        return max(levels)

    def cost(column: int) -> int:
        alone = sum(max(column - level, PASS_TOKENS_MIN) for level in levels if level < column)
        return alone + max(len(levels) * (columns - column), PASS_TOKENS_MIN)

    return min(sorted(set(levels), reverse=True), key=cost)


def advance(model: PreTrainedModel, plan: CachePlan, known: RowKv, tokens: torch.Tensor) -> RowKv:
    """Compute what an unpadded row lacks of `tokens`; what is known of it are its first tokens."""
    cache = plan.dynamic(1)
    if known.tokens:
        fill(cache, plan.sets, [known], known.tokens, model.device)
    rest = tokens[known.tokens :].to(model.device)[None]
    with torch.no_grad():
        model(input_ids=rest, use_cache=True, **{CACHE_ARGUMENT: cache}, **plan.one_logit)
    return row_of_cache(cache, plan.sets)


def level_rows(
    model: PreTrainedModel, plan: CachePlan, prompt: Prompt, known: Sequence[RowKv]
) -> tuple[list[RowKv], int]:
    """Bring what is known of each row, unpadded, to the common column; returns the padded rows and that column."""
    levels = [pad + row.tokens for pad, row in zip(prompt.pads, known, strict=True)]
    if not any(row.tokens for row in known):
        return list(known), 0
    column = common_column(levels, prompt.ids.shape[1], may_cut=not plan.has_windows)
    rows = []
    for index, (pad, row) in enumerate(zip(prompt.pads, known, strict=True)):
        lacks = pad + row.tokens < column
        level = advance(model, plan, row, prompt.row(index)[: column - pad]) if lacks else row
        rows.append(replace(level, pad=pad, tokens=max(0, column - pad)))
    return rows, column
