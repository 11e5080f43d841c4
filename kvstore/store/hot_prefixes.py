"""Which prefixes are worth most, for other nodes to take before this one leaves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvstore.nodes import boundary_step
from kvstore.radix.tree import NO_BLOCK
from kvstore.types import Symbols

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.store.index import Index
    from kvstore.store.space import Space
    from kvstore.types import Namespace, Root, TokenArray

CANDIDATES_MAX = 4096  # of one namespace


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """A stored prompt, as a client names it."""

    namespace: Namespace
    root: Root
    tokens: TokenArray


@dataclass(slots=True)
class _Choice:
    """What was chosen of one namespace, by ids that hold while nothing leaves the tree (`removals`)."""

    space: Space
    removals: int
    above: dict[int, int] = field(default_factory=dict)  # of each chosen block; all its ancestors are chosen too
    ends: dict[int, None] = field(default_factory=dict)  # those with no chosen block below, the most worth first


def hot_prefixes(index: Index, every_tokens: int, limit_bytes: int) -> list[HotPrefix]:
    """The prefixes worth most that end at a boundary and whose blocks have `limit_bytes` together at most.

    Blocks that several share count once, and of two of which one begins with the other the longer is named. What is
    worth how much is for the eviction policy to say. Of a namespace that loses blocks meanwhile less may be named, of
    one that is not of token ids, or of sequence states, nothing is. `index.lock` is held for one prefix at most.
    """
    choices: list[_Choice] = []
    candidates: list[tuple[float, int, int]] = []
    for space in index.spaces():
        if space.states is None and space.layout.symbols == Symbols.TOKENS:
            removals, rated = _rated(index, space, boundary_step(every_tokens, space.layout.block_tokens))
            candidates += [(worth, len(choices), block_id) for worth, block_id in rated]
            choices.append(_Choice(space, removals))
    left_bytes = limit_bytes
    for _, number, block_id in sorted(candidates, key=lambda rated: -rated[0]):
        left_bytes -= _choose(index, choices[number], block_id, left_bytes)
    return [prefix for choice in choices for prefix in _named(index, choice)]


def _rated(index: Index, space: Space, every: int) -> tuple[int, list[tuple[float, int]]]:
    """The boundaries worth most, and the state of the tree in which their ids hold."""
    found: list[tuple[float, int]] = []
    removals = space.tree.removals
    first_id: int | None = 0
    while first_id is not None:
        with index.lock:
            if space.tree.removals != removals:
                return removals, []
            ids, first_id = space.tree.boundaries(every, first_id)
            values = space.tree.values(ids, index.latest_tick) if ids.size else np.empty(0)
        found += [(space.worth(value), block_id) for value, block_id in zip(values.tolist(), ids.tolist(), strict=True)]
        found = sorted(found, reverse=True)[:CANDIDATES_MAX]
    return removals, found


def _choose(index: Index, choice: _Choice, block_id: int, left_bytes: int) -> int:
    """Choose a block with its ancestors if there is room for those that are new; returns their bytes."""
    block_bytes = choice.space.layout.block_bytes
    room = left_bytes // block_bytes
    if not room or block_id in choice.above:
        return 0
    with index.lock:
        if choice.space.tree.removals != choice.removals:
            return 0
        fresh = [block_id]
        while (parent := _parent(choice.space, fresh[-1])) != NO_BLOCK and parent not in choice.above:
            if len(fresh) == room:
                return 0
            fresh.append(parent)
    choice.above.update(zip(fresh, [*fresh[1:], parent], strict=True))
    choice.ends.pop(parent, None)
    choice.ends[block_id] = None
    return len(fresh) * block_bytes


def _named(index: Index, choice: _Choice) -> Iterator[HotPrefix]:
    space = choice.space
    for end in choice.ends:
        path = [end]
        while (above := choice.above[path[-1]]) != NO_BLOCK:
            path.append(above)
        with index.lock:
            if space.tree.removals != choice.removals:
                return
            tokens = space.tree.tokens(np.array(path[::-1], dtype=np.uint32)).reshape(-1)
            root = space.root_of(space.tree.root_of(end))
        if root is not None:
            yield HotPrefix(space.namespace, root, tokens)


def _parent(space: Space, block_id: int) -> int:
    """The block above one, or NO_BLOCK; the index lock must be held."""
    return int(space.tree.parents(np.array([block_id], dtype=np.uint32))[0])
