"""Dropping what operators name: a prefix, or what one writer wrote, with all below it, from host memory and disk."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from kvstore.errors import StorageError
from kvstore.radix.tree import SLICE_BLOCKS
from kvstore.store.interrupts import uninterrupted
from kvstore.tiers.persistent import PurgingTier
from kvstore.types import Tier
from kvstore.writers import WriterPage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.store.index import Index
    from kvstore.store.room import RoomMaker
    from kvstore.store.space import Freed, Space
    from kvstore.tiers.base import RecoveredBlock
    from kvstore.types import BlockIds, TokenArray

# Blocks of the writer at a step: at 20 us for each slot that is erased on disk, a third of a second.
STEP_BLOCKS = 16_384
_IDLE_SLICES = 16
_TRIES = 16


@uninterrupted
def evict_prefix(
    index: Index, room: RoomMaker, space: Space, root_key: bytes, prompt: TokenArray, *, from_block: int
) -> int:
    """Drop what is not held of a prompt from a block on, with all below it; how many blocks. Raises StorageError."""
    with room.lock, space.removing:  # what is being copied is held, and would stay
        dropped = [*_drop_unheld(index, space, root_key, prompt, from_block), *index.reap_all(space)]
    blocks, is_gone = _free_for_good(space, dropped)
    with index.lock:
        index.accounting.evicted_blocks["request"] += blocks
    _require_gone(blocks, is_gone=is_gone)
    return blocks


def _drop_unheld(index: Index, space: Space, root_key: bytes, prompt: TokenArray, from_block: int) -> list[Freed]:
    """Cut off what a prompt has below a block but for what is held, a slice at a time; as Index.reap_all."""
    dropped: list[Freed] = []
    idle = 0  # slices that found held blocks alone; more than the whole tree has mean that others keep changing it
    resume: tuple[int, int] | None = None
    while True:
        with index.lock:
            freed, resume = space.drop_unheld(root_key, prompt, from_block, resume)
            idle_max = space.tree.block_count // SLICE_BLOCKS + _IDLE_SLICES
        freed.settle_host()
        dropped.append(freed)
        idle += not freed.blocks
        if resume is None or idle > idle_max:
            return dropped


class WriterEviction:
    """One step of dropping a writer's blocks. Holds the index lock for a slice of the tree at a time.

    Whoever holds such a block keeps it until the hold ends, but nobody finds it any more: to read what a bad engine
    wrote is worse than to miss. What the disk keeps of a namespace that nobody has used yet goes by its headers.
    """

    def __init__(self, index: Index, room: RoomMaker, writer: int) -> None:
        self._index = index
        self._room = room
        self._writer = writer
        self._left = STEP_BLOCKS  # of the writer, to be dropped at this step
        self._remaining = 0
        self._blocks = 0
        self._is_gone = True

    @uninterrupted
    def step(self) -> WriterPage:
        """Drop some. Raises StorageError where a power cut may bring them back."""
        self._drop_untaken()  # before those who may take them are asked
        for space in self._index.settled_spaces():
            if space.states is not None:
                self._drop_states(space)
            else:
                self._drop_blocks(space)
        with self._index.lock:
            self._index.accounting.evicted_blocks["writer"] += self._blocks
        _require_gone(self._blocks, is_gone=self._is_gone)
        return WriterPage(self._blocks, self._remaining)

    def _drop_blocks(self, space: Space) -> None:
        next_id: int | None = 0
        while next_id is not None:
            with self._room.lock, space.removing:  # what is being copied to disk would be found there
                freed, next_id = self._cut_slice(space, next_id)
                if freed is None:
                    continue
                freed.settle_host()
                dropped = [freed, *self._index.reap_all(space)]
            blocks, is_gone = _free_for_good(space, dropped)
            self._blocks += blocks
            self._is_gone &= is_gone

    def _cut_slice(self, space: Space, first_id: int) -> tuple[Freed | None, int | None]:
        """Cut off the writer's blocks among a slice of ids, their keys made before; as boundaries.py looks at one."""
        for _ in range(_TRIES):
            with self._index.lock:
                mine, _ = self._slice(space, first_id)
                removals = space.tree.removals
            is_ready = not mine.size
            while not is_ready:
                with self._index.lock:
                    if space.tree.removals != removals:
                        break
                    is_ready = space.tree.prepare_keys(mine)
                    if is_ready:
                        return self._cut(space, first_id)
            else:
                break
        with self._index.lock:
            return self._cut(space, first_id)

    def _slice(self, space: Space, first_id: int) -> tuple[BlockIds, int | None]:
        """The writer's blocks among a slice of ids, and where the next one begins; the index lock must be held.

        Those at which it wrote sparse parts alone are among them: who loaded these went on from there.
        """
        ids, next_id = space.tree.boundaries(1, first_id)
        mine = space.writers.those_of(self._writer, ids)
        for group in space.sparse.groups:
            written = [found.block_id for found in group.find(ids.tolist()) if found.identity.writer == self._writer]
            mine = np.union1d(mine, np.array(written, dtype=np.uint32))
        return mine, next_id

    def _cut(self, space: Space, first_id: int) -> tuple[Freed | None, int | None]:
        """Cut off as many of a slice as may go at this step; the index lock must be held."""
        found, next_id = self._slice(space, first_id)
        mine = found[: self._left]
        self._left -= int(mine.size)
        freed = space.drop(mine) if mine.size else None
        if mine.size < found.size:  # of the others some lay below
            self._remaining += int(self._slice(space, first_id)[0].size)
        return freed, next_id

    def _drop_states(self, space: Space) -> None:
        table = space.states
        assert table is not None, "a namespace of blocks has no states"
        with self._room.lock, self._index.lock:  # what is being copied is held, and would stay
            found = [state for state in table.all() if state.writer == self._writer]
            mine = {
                below.state_id: below
                for state in found[: self._left]
                for below in table.below(state.root_key, state.path)
            }
            freed = self._room.states.forget(space, list(mine.values()))
            self._blocks += sum(map(table.records.pieces, mine.values()))
            self._remaining += sum(1 for state in found if state.state_id not in mine)
        self._left -= min(self._left, len(found))
        for one in freed:
            if one.tier is Tier.DISK and space.disk is not None:
                self._is_gone &= space.disk.free_for_good(one.slots)
            else:
                one.pool.free(one.slots)

    def _drop_untaken(self) -> None:
        disk = self._index.disk
        if not isinstance(disk, PurgingTier):
            return
        for kept in disk.recovered_namespaces():
            below = _with_below(disk.untaken(kept.ns_id), self._writer)
            if below:
                self._blocks += len(below)
                self._is_gone &= disk.drop_untaken(kept.ns_id, np.array(below, dtype=np.uint32))


def _free_for_good(space: Space, dropped: Sequence[Freed]) -> tuple[int, bool]:
    """Return the disk slots of what was dropped: how many blocks it was, and whether no power cut brings one back."""
    for freed in dropped:
        freed.settle_sparse(Tier.DISK)  # which no restart finds without their dense blocks
    slots = np.concatenate([freed.disk for freed in dropped])
    is_gone = space.disk is None or not slots.size or space.disk.free_for_good(slots)
    return sum(freed.blocks for freed in dropped), is_gone


def _require_gone(blocks: int, *, is_gone: bool) -> None:
    """Raises StorageError where a power cut may bring dropped blocks back."""
    if not is_gone:
        raise StorageError(
            f"{blocks} blocks were dropped, but the disk cannot be synced: a power cut may bring them back; "
            "check the kernel log"
        )


def _with_below(blocks: Sequence[RecoveredBlock], writer: int) -> list[int]:
    """Slots of a writer's blocks and of all below them. O(blocks)."""
    level = [block for block in blocks if block.identity.writer == writer]
    if not level:
        return []
    children: defaultdict[tuple[bytes, bytes], list[RecoveredBlock]] = defaultdict(list)
    for block in blocks:
        children[block.identity.root_key, block.identity.parent_key].append(block)
    slots: set[int] = set()
    while level:
        slots.update(block.slot for block in level)
        below = [child for block in level for child in children.pop((block.identity.root_key, block.identity.key), ())]
        level = [child for child in below if child.slot not in slots]
    return sorted(slots)
