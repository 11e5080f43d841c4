"""Dropping what a scrub found to be wrong on disk: dense blocks with what lies below them, sparse
parts alone, states as wholes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore import hashing
from kvstore.types import Tier

if TYPE_CHECKING:
    from kvstore.store.index import Index
    from kvstore.store.room import RoomMaker
    from kvstore.store.space import Space
    from kvstore.store.sparse import SparseGroup
    from kvstore.tiers.base import SlotRange
    from kvstore.tiers.persistent import ScrubStep


def drop_bad(index: Index, room: RoomMaker, step: ScrubStep) -> None:
    """Let what a step found bad leave the disk unless somebody holds it, who finds out by reading it."""
    if not step.bad:
        return
    spaces = {space.ns_id: space for space in index.spaces()}
    groups = {
        hashing.group_pool_id(space.ns_id, number): group
        for space in spaces.values()
        for number, group in enumerate(space.sparse.groups)
    }
    for pool_id, bad in step.bad_ranges():
        with room.lock:
            if pool_id in spaces and spaces[pool_id].states is not None:
                room.states.drop_bad(spaces[pool_id], bad)
            elif pool_id in spaces:
                _drop_dense(index, spaces[pool_id], bad)
            elif pool_id in groups:
                _drop_sparse(index, groups[pool_id], bad)


def _drop_dense(index: Index, space: Space, bad: SlotRange) -> None:
    """Looks through the tree, in slices."""
    next_id: int | None = 0
    while next_id is not None:
        with index.lock:
            ids, next_id = space.tree.take_range(Tier.DISK, bad.first, bad.count, next_id)
        try:
            index.prepare_keys(space, ids)
        finally:
            with index.lock:
                freed = space.evict(ids, Tier.DISK)
                index.accounting.corrupt_blocks += ids.size
            index.settle(freed)


def _drop_sparse(index: Index, group: SparseGroup, bad: SlotRange) -> None:
    with index.lock:
        victims = group.take_range(Tier.DISK, bad)
        freed = group.leave(victims, Tier.DISK)
        index.accounting.corrupt_blocks += len(victims)
    for one in freed:
        one.pool.free(one.slots)
