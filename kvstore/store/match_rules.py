"""How deep a match is and where sparse parts are kept: the one place that decides both. Pure functions.

A *point* is a number of blocks from the start of a prompt: the end of a possible match.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from kvstore.layer_groups import LayerGroup

    Mask = NDArray[np.bool_]

POINT_TOKENS = 2048


def usable_blocks(dense_blocks: int, groups: Sequence[LayerGroup], block_tokens: int, held: Sequence[Mask]) -> int:
    """The deepest point up to which all dense parts are there and at which the rule of each sparse group holds.

    The first `dense_blocks` blocks of a prompt have all their dense parts; `held[g][i]` says whether all parts of group
    g are there for block i. A group needs its last `blocks_back` blocks before the point, or as many as there are:
    those in reach of a sliding window, the one that ends at the point for a recurrent state.
    """
    holds = np.ones(dense_blocks + 1, dtype=np.bool_)
    for group, mask in zip(groups, held, strict=True):
        ends = np.arange(dense_blocks + 1)
        needed = np.minimum(ends, group.blocks_back(block_tokens))
        holds &= _run_lengths(mask[:dense_blocks]) >= needed
    return int(np.flatnonzero(holds)[-1])


def kept_points(prompt_tokens: int, block_tokens: int, present_blocks: int, turn_ends: Iterable[int]) -> list[int]:
    """The points of a prompt near which sparse parts are kept, ascending.

    These are where later prompts are likely to leave this one: its end, and the last point that leaves an engine a
    token to compute, for when it comes again as it is; the ends of its turns, in tokens; the point up to which it was
    stored before, where it may leave another prompt; and every 2,048 tokens.
    """
    blocks = prompt_tokens // block_tokens
    step = max(1, POINT_TOKENS // block_tokens)
    points = {blocks, max(0, prompt_tokens - 1) // block_tokens, min(present_blocks, blocks)}
    points.update(end // block_tokens for end in turn_ends if 0 <= end <= prompt_tokens)
    points.update(range(step, blocks + 1, step))
    return sorted(points - {0})


def kept_blocks(group: LayerGroup, block_tokens: int, blocks: int, points: Iterable[int]) -> Mask:
    """Which of the first `blocks` blocks of a prompt keep the parts of a group for matches at these points."""
    kept = np.zeros(blocks, dtype=np.bool_)
    back = group.blocks_back(block_tokens)
    for point in points:
        kept[max(0, point - back) : point] = True
    return kept


def runs_of(mask: Mask) -> tuple[range, ...]:
    """The runs of true entries."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
    return tuple(range(int(start), int(end)) for start, end in edges.reshape(-1, 2))


def _run_lengths(mask: Mask) -> NDArray[np.intp]:
    """For each end in 0..size how many true entries lie right before it."""
    ends = np.arange(mask.size + 1)
    last_false = np.zeros(mask.size + 1, dtype=np.intp)
    last_false[1:] = np.where(mask, 0, ends[1:])
    return ends - np.maximum.accumulate(last_false)
