"""Which boundaries a node holds: blocks at whose end a prefix has a multiple of so many tokens. For other nodes."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from kvstore import hashing
from kvstore.nodes import boundary_step
from kvstore.tiers.persistent import KeepingTier

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore.store.index import Index
    from kvstore.store.space import Space
    from kvstore.tiers.base import RecoveredBlock
    from kvstore.types import BlockIds

_TRIES = 16


def boundaries(index: Index, every_tokens: int) -> Iterator[tuple[bytes, list[bytes]]]:
    """Namespaces and keys of their boundaries, a slice at a time; `index.lock` is held for a slice at most.

    What is stored or removed meanwhile may be among them or not: the event log from before the call on tells. What a
    disk kept of a namespace that nobody has used yet is taken from the headers, so that it is known to others, too.
    """
    opened = index.spaces()
    for space in opened:
        if space.states is None:
            yield from _of_space(index, space, boundary_step(every_tokens, space.layout.block_tokens))
    disk = index.disk
    if isinstance(disk, KeepingTier):
        pool_ids = {pool_id for space in opened for pool_id in space.pool_ids}
        for kept in disk.recovered_namespaces():
            if kept.ns_id not in pool_ids:
                every = boundary_step(every_tokens, kept.block_tokens)
                yield kept.ns_id, _of_kept(disk.untaken(kept.ns_id), every)


def _of_space(index: Index, space: Space, every: int) -> Iterator[tuple[bytes, list[bytes]]]:
    first_id: int | None = 0
    while first_id is not None:
        keys, first_id = _slice(index, space, every, first_id)
        if keys:
            yield space.ns_id, keys


def _slice(index: Index, space: Space, every: int, first_id: int) -> tuple[list[bytes], int | None]:
    """Keys of the boundaries of one slice; it is looked at again where blocks left meanwhile, and in one go at last."""
    for _ in range(_TRIES):
        with index.lock:
            ids, next_id = space.tree.boundaries(every, first_id)
            removals = space.tree.removals
        is_ready = not ids.size
        while not is_ready:
            with index.lock:
                if space.tree.removals != removals:
                    break
                is_ready = space.tree.prepare_keys(ids)
                if is_ready:
                    return _keys(space, ids), next_id
        else:
            return [], next_id
    with index.lock:
        ids, next_id = space.tree.boundaries(every, first_id)
        return _keys(space, ids), next_id


def _keys(space: Space, ids: BlockIds) -> list[bytes]:
    return hashing.split_keys(np.ascontiguousarray(space.tree.keys(ids)[:, 1])) if ids.size else []


def _of_kept(blocks: Sequence[RecoveredBlock], every: int) -> list[bytes]:
    """Keys of the boundaries among blocks all of whose ancestors are there. O(blocks)."""
    children: defaultdict[tuple[bytes, bytes], list[bytes]] = defaultdict(list)
    for block in blocks:
        children[block.identity.root_key, block.identity.parent_key].append(block.identity.key)
    found: list[bytes] = []
    level = [(root_key, key) for root_key in {root for root, _ in children} for key in children[root_key, root_key]]
    depth = 1
    while level:
        if depth % every == 0:
            found += [key for _, key in level]
        level = [(root_key, key) for root_key, parent in level for key in children.pop((root_key, parent), ())]
        depth += 1
    return found
