"""Blocks on their way: read from disk and verified, placed in host memory, moved out of an extent.

An extent is emptied without losing what lies in it: its blocks move to free slots of the same pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore.radix.tree import NO_SLOT
from kvstore.store.placement import leading
from kvstore.types import Tier

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvstore.store.index import Index
    from kvstore.store.space import Space
    from kvstore.tiers.base import SlotRange
    from kvstore.types import BlockIds, Slots

_COPY_BYTES = 8 << 20


def read_from_disk(index: Index, space: Space, ids: BlockIds, rows: NDArray[np.uint8], part: int | None = None) -> int:
    """Read blocks that the caller holds into rows; how many leading ones are right. The first wrong one is dropped."""
    index.prepare_keys(space, ids)
    with index.lock:
        slots = space.tree.slots(ids, Tier.DISK)
        identities = space.identities(ids)
    if space.disk is None or (slots == NO_SLOT).any():
        raise AssertionError("a block that is held lies in no tier")
    good = leading(space.disk.read(slots, identities, rows, part=part))
    if good < ids.size:
        with index.lock:
            freed = space.drop(ids[good : good + 1])
            index.accounting.corrupt_blocks += 1
        index.settle(freed)
    return good


def place_on_host(index: Index, space: Space, ids: BlockIds, rows: NDArray[np.uint8], slots: Slots) -> int:
    """Copy rows of blocks that the caller holds into slots, which the index then owns; how many it took.

    The others, whose blocks got a copy or were dropped meanwhile, are freed.
    """
    placed = np.zeros(slots.size, dtype=np.bool_)
    try:
        space.host.write(slots, rows, part=None)
        with index.lock:
            placed = space.tree.place(ids, Tier.HOST, slots)
            keys = space.tree.keys(ids[placed])
            space.announce(Tier.HOST, [pair[1].tobytes() for pair in keys])
    finally:
        if not placed.all():
            space.host.free(slots[~placed])
    return int(placed.sum())


def is_movable(index: Index, space: Space, extent: SlotRange) -> bool:
    """Whether nobody holds, or is about to fill, a slot of the extent. Looks through the whole tree, in slices."""
    unheld_count = 0
    next_id: int | None = 0
    while next_id is not None:
        with index.lock:
            ids, next_id = space.tree.take_range(Tier.HOST, extent.first, extent.count, next_id)
            freed = space.keep(ids)
        index.settle(freed)
        unheld_count += ids.size
    return unheld_count == space.host.used_in(extent)


def move_out(index: Index, space: Space, extent: SlotRange) -> None:
    """Move what nobody holds out of an extent, as far as there are free slots outside; the room lock must be held.

    At most one extent is copied, at the speed of memory. Blocks that are leased meanwhile stay.
    """
    next_id: int | None = 0
    while next_id is not None:
        first_id = next_id
        slots = np.empty(0, dtype=np.uint32)
        copied_count = 0
        with index.lock:
            ids, next_id = space.tree.take_range(Tier.HOST, extent.first, extent.count, first_id)
            sources = space.tree.slots(ids, Tier.HOST)
        try:
            slots = space.host.allocate_outside(extent, ids.size)
            _copy(space, sources[: slots.size], slots)
            index.prepare_keys(space, ids)
            copied_count = slots.size
        finally:
            with index.lock:
                freed = space.move(ids, slots[:copied_count], extent, first_id)
            space.host.free(slots[copied_count:])
            index.settle(freed)


def _copy(space: Space, sources: Slots, targets: Slots) -> None:
    step = max(1, _COPY_BYTES // space.layout.block_bytes)
    rows = np.empty((min(step, sources.size), space.layout.block_bytes), dtype=np.uint8)
    for start in range(0, sources.size, step):
        count = min(step, sources.size - start)
        space.host.read(sources[start : start + count], rows[:count])
        space.host.write(targets[start : start + count], rows[:count])
