"""Checking every invariant of the index beside its use: the locks are held for a slice at a time."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from kvstore.radix.tree import SLICE_BLOCKS
from kvstore.types import Verification

if TYPE_CHECKING:
    from kvstore.store.index import Index
    from kvstore.store.room import RoomMaker
    from kvstore.store.space import Space
    from kvstore.store.sparse import SparseGroup
    from kvstore.store.states import StateTable, StoredState
    from kvstore.types import Tier

logger = logging.getLogger(__name__)

_PROBLEMS_MAX = 1000
# Who lets go of a lock and takes it again at once gets it before those who wait: beside a check of a million blocks, in
# 679 slices, others waited for up to 60 ms without a pause, 12 ms with one of no length, and 0.4 ms with this one.
_PAUSE_SECONDS = 100e-6


class Verifier:
    """Checks the spaces of an index, one after another. Thread-safe: who comes second waits."""

    def __init__(self, index: Index, room: RoomMaker) -> None:
        self._index = index
        self._room = room
        self._checking = threading.Lock()  # before all other locks

    def verify(self) -> Verification:
        """Check all of them; see kvstore.api.KvStore. No lock may be held."""
        spaces = self._index.spaces()
        blocks = 0
        problems: list[str] = []
        with self._checking:
            for space in spaces:
                with self._index.lock:
                    blocks += space.block_count
                problems += [f"namespace {space.ns_id.hex()}: {problem}" for problem in self._problems(space)]
        if problems:
            logger.error("the index is damaged, restart this process: problems=%d first=%s", len(problems), problems[0])
        return Verification(len(spaces), blocks, tuple(problems[:_PROBLEMS_MAX]))

    def _problems(self, space: Space) -> list[str]:
        found: list[str] | None = None
        while found is None:
            # A copy to disk holds single blocks, which is fine but looks like a lease of no prefix.
            with self._room.lock, self._index.lock:
                found = space.tree.check_slice()
            time.sleep(_PAUSE_SECONDS)
        for number, group in enumerate(space.sparse.groups):
            found += self._sparse_problems(space, number, group)
        return found + ([] if space.states is None else self._state_problems(space.states))

    def _state_problems(self, states: StateTable) -> list[str]:
        with self._room.lock, self._index.lock:
            census = states.census()
        found = census.problems(states.records)
        owners: dict[tuple[Tier, int], StoredState] = {}
        for listed in census.slices(states.records):
            with self._room.lock, self._index.lock:
                found += states.problems(listed, owners)
            time.sleep(_PAUSE_SECONDS)
        return found

    def _sparse_problems(self, space: Space, number: int, group: SparseGroup) -> list[str]:
        with self._index.lock:
            blocks = group.blocks()
        found: list[str] = []
        for begin in range(0, len(blocks), SLICE_BLOCKS):
            with self._room.lock, self._index.lock:
                found += space.sparse.problems(space.tree, number, blocks[begin : begin + SLICE_BLOCKS])
            time.sleep(_PAUSE_SECONDS)
        return found
