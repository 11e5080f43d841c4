"""Moving sequence states: making room for them, writing them to disk, reading them.

A state moves as a whole, piece by piece in batches. Where host memory is short, the one leaves whose use brings least
for its bytes: for the disk, if that takes it. Namespaces of states and of blocks take extents from each other by the
rules of room.py; a piece of a state is worth what its state is used.
"""

from __future__ import annotations

from functools import partial
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from kvstore.store.disk_writes import write_blocks
from kvstore.store.placement import REUSED_USES, DiskAdmission, StoreRequest, admit_host, leading
from kvstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from kvstore.store.index import Index
    from kvstore.store.room import RoomMaker
    from kvstore.store.space import Space
    from kvstore.store.sparse import FreedSparse
    from kvstore.store.states import StateTable, StoredState
    from kvstore.tiers.base import BlockIdentity, SlotRange
    from kvstore.types import Slots

_BATCH_BYTES = 64 << 20
_BUFFER_BYTES = 16 << 20
_LARGE_SHARE = 4  # of host memory: for smaller states nothing is reckoned up
_EMPTY_EXTENTS = 4  # that many extents' worth of free slots among used ones say that none will be empty soon


class StateMover:
    """Moves states between tiers and buffers. The room lock is held while they change their tier."""

    def __init__(self, index: Index, room: RoomMaker) -> None:
        self._index = index
        self._room = room

    def reserve(self, space: Space, size_bytes: int, shared_tokens: int) -> tuple[Slots, str]:
        """Host slots for a blob, after letting others leave where needed; none, and why, where there is no room.

        All or nothing: nothing leaves for one that could never fit, or for which the budget has not enough. One that
        continues a stored state, which shares some tokens with it, may spend all of the budget.
        """
        count = -(-size_bytes // space.layout.block_bytes)
        request = StoreRequest(count, space.layout.block_bytes, present=shared_tokens)
        limit_bytes = space.quota.host_max
        most_bytes = self._index.host.capacity_bytes if limit_bytes is None else limit_bytes
        if size_bytes > most_bytes - self._held_bytes(space, size_bytes, most_bytes):
            return np.empty(0, dtype=np.uint32), "host_full" if limit_bytes is None else "quota"
        with self._index.lock:
            if admit_host(request, space.budget.left(self._index.clock.monotonic())) < count:
                return np.empty(0, dtype=np.uint32), "budget"
            space.budget.spend(count * request.block_bytes)
        slots = self._room.host_slots(space, count, inf)
        if slots.size == count:
            return slots, ""
        space.host.free(slots)
        with self._index.lock:
            space.budget.refund(count * request.block_bytes)
        return slots[:0], "quota" if space.host.at_limit else "host_full"

    def read(self, space: Space, state: StoredState, first: int, rows: NDArray[np.uint8]) -> tuple[Tier, int]:
        """Copy pieces of a held state from `first` on into rows: from where, and how many leading ones are right.

        A state of which some piece does not come from disk as it was written is dropped.
        """
        with self._index.lock:
            on_host, on_disk = state.slots.get(Tier.HOST), state.slots.get(Tier.DISK)
        if on_host is not None:
            space.host.read(on_host[first : first + len(rows)], rows)
            return Tier.HOST, len(rows)
        if space.disk is None or on_disk is None:
            raise AssertionError("a held state lies in no tier")
        records = _table(space).records
        pieces = range(first, first + len(rows))
        good = leading(space.disk.read(on_disk[pieces.start : pieces.stop], records.identities(state, pieces), rows))
        if good < len(rows):
            self._drop_corrupt(space, state)
        return Tier.DISK, good

    def rise(self, space: Space, state: StoredState) -> RisingState:
        """For a held state that is being read from disk: where its pieces gather in host memory, if that has room."""
        return RisingState(self, space, state)

    def bring_up(self, space: Space, state: StoredState) -> bool:
        """Have a held state that lies on disk alone come up into host memory; false where there is no room for it.

        It takes room only from what is worth less.
        """
        with self._index.lock:
            price = space.worth(space.state_value(state, self._index.latest_tick))
        count = _table(space).records.pieces(state)
        slots = self._room.host_slots(space, count, price)
        placed = False
        try:
            if slots.size == count and self._fill(space, state, slots):
                placed = self.place(space, state, Tier.HOST, slots)
        finally:
            if not placed:
                space.host.free(slots)
        return placed

    def evict(self, space: Space, tier: Tier, worth: float) -> bool:
        """Let the state leave a tier that brings least, if it is worth no more; the room lock must be held."""
        with self._index.lock:
            state = _table(space).victim(tier, self._index.latest_tick)
            if state is None or space.worth(space.state_value(state, self._index.latest_tick)) > worth:
                return False
            state.holds += 1
        return self._leave(space, tier, state)

    def reclaim(self, space: Space, tier: Tier, worth: float) -> bool:
        """Let states leave until an extent, or slab, is empty, and give that back; the room lock must be held.

        Nothing of what its quota ensures the namespace leaves for others.
        """
        pool = space.pool(tier)
        if pool is None:
            return False
        records = _table(space).records
        step = max((one.count for one in pool.ranges() if not pool.is_kept(one)), default=0)
        while pool.free_slots < _EMPTY_EXTENTS * step:
            with self._index.lock:
                state = _table(space).victim(tier, self._index.latest_tick)
            if state is None or records.pieces(state) > space.spare_blocks(tier) or not self.evict(space, tier, worth):
                return False
            if sum([pool.give_back(one) for one in pool.ranges()]):
                return True
        return False

    def flush(self, space: Space) -> None:
        """Write the states that are in host memory alone to disk, as far as that has room; takes the room lock."""
        with self._index.lock:
            states = [state for state in _table(space).all() if tuple(state.slots) == (Tier.HOST,)]
        for state in states:
            with self._room.lock:
                self.write_through(space, state)

    def write_through(self, space: Space, state: StoredState) -> None:
        """Write one state to disk if it is there still, in host memory alone; the room lock must be held."""
        with self._index.lock:
            if not state.attached or tuple(state.slots) != (Tier.HOST,):
                return
            state.holds += 1
        try:
            self._write(space, state)
        finally:
            self.release(space, state)

    def release(self, space: Space, state: StoredState) -> None:
        """End one hold. No lock of the index may be held."""
        with self._index.lock:
            freed = _table(space).release(state)
        _settle(freed)

    def drop_bad(self, space: Space, bad: SlotRange) -> None:
        """Let states leave the disk of which something lies in these slots, but for those that somebody holds."""
        with self._index.lock:
            states = [
                state
                for state in _table(space).all()
                if not state.holds and np.any((state.slots.get(Tier.DISK, _NONE) - bad.first) < bad.count)
            ]
            for state in states:
                state.holds += 1
            self._index.accounting.corrupt_blocks += bad.count
        for state in states:
            self._end_leave(space, Tier.DISK, state)

    def forget(self, space: Space, states: list[StoredState]) -> tuple[FreedSparse, ...]:
        """Let go of states; the index lock must be held, and the caller gives the slots back."""
        space.announce_states(states, None, is_last_copy=True)
        return _table(space).forget(states)

    def _held_bytes(self, space: Space, size_bytes: int, most_bytes: int) -> int:
        """Host memory, within a limit, that held states keep from one of so many bytes; only of large ones it matters.

        At its own limit the namespace has what it holds itself to reckon with, else what all hold.
        """
        if size_bytes <= most_bytes // _LARGE_SHARE:
            return 0
        with self._index.lock:
            spaces = [space] if space.quota.host_max is not None else self._index.spaces()
            return sum(other.states.held_bytes(Tier.HOST) for other in spaces if other.states is not None)

    def _leave(self, space: Space, tier: Tier, state: StoredState) -> bool:
        """Have a state that was taken leave a tier, host memory for the disk; true if slots came free."""
        try:
            if tier is Tier.HOST and space.disk is not None and Tier.DISK not in state.slots:
                if self._is_admitted(space, state):
                    self._write(space, state)
                else:
                    with self._index.lock:
                        self._index.accounting.rejected_blocks["not_admitted"] += _table(space).records.pieces(state)
        finally:
            freed = self._end_leave(space, tier, state)
        return any(one.tier is tier for one in freed)

    def _end_leave(self, space: Space, tier: Tier, state: StoredState) -> tuple[FreedSparse, ...]:
        with self._index.lock:
            was_attached = state.attached
            freed = _table(space).leave(state, tier)
            if freed and was_attached:
                space.announce_states([state], tier, is_last_copy=not state.attached)
            left = sum(int(one.slots.size) for one in freed if one.tier is tier)
            self._index.accounting.evicted_blocks[tier.name.lower()] += left
        _settle(freed)
        return freed

    def _is_admitted(self, space: Space, state: StoredState) -> bool:
        """Whether the rule for what goes to disk takes this state; the room lock must be held."""
        rule = DiskAdmission(self._index.settings.disk_admission)
        if rule is DiskAdmission.REUSE:
            return state.uses >= REUSED_USES
        terms = self._room.disk_terms(space, _table(space).records.pieces(state))
        with self._index.lock:
            value = space.state_value(state, self._index.latest_tick)
        return terms.victim_value is None or value > terms.victim_value

    def _write(self, space: Space, state: StoredState) -> bool:
        """Write a held state to disk, its path last; false where there is no room or it cannot be written."""
        if space.disk is None:
            return False
        records = _table(space).records
        pieces = records.pieces(state)
        count = pieces + records.path_pieces(state)
        slots = self._room.disk_slots(space, count)
        placed, reason = False, "quota" if space.disk.at_limit else "disk_full"
        try:
            if slots.size == count:
                reason = self._write_pieces(space, state, slots)
                if not reason:
                    placed = self.place(space, state, Tier.DISK, slots)
        finally:
            if not placed:
                space.disk.free(slots)
        with self._index.lock:
            if placed:
                self._index.accounting.written_bytes += count * space.layout.block_bytes
            elif reason:  # else it was dropped meanwhile
                self._index.accounting.rejected_blocks[reason] += pieces
        return placed

    def _write_pieces(self, space: Space, state: StoredState, slots: Slots) -> str:
        """Write all pieces and the path; why that is not done, as counters call it, or nothing."""
        assert space.disk is not None, "only what has a pool is written"
        records = _table(space).records
        on_host = state.slots[Tier.HOST]
        path_rows = records.path_rows(state)
        step = max(1, _BATCH_BYTES // space.layout.block_bytes)
        for first in range(0, on_host.size, step):
            batch = on_host[first : first + step]
            sources = [space.host.views(int(slot)) for slot in batch]
            identities = records.identities(state, range(first, first + batch.size))
            if reason := self._write_batch(space, slots[first : first + batch.size], identities, sources):
                return reason
        identities = records.identities(state, range(on_host.size, slots.size))
        return self._write_batch(space, slots[on_host.size :], identities, [(row,) for row in path_rows])

    def _write_batch(
        self, space: Space, slots: Slots, identities: list[BlockIdentity], sources: list[tuple[NDArray[np.uint8], ...]]
    ) -> str:
        assert space.disk is not None, "only what has a pool is written"
        free_some = partial(self._room.free_disk, space)
        refused = write_blocks(space.disk, slots, (identities, sources), free_some).refused
        return max(refused, key=refused.__getitem__, default="")

    def _fill(self, space: Space, state: StoredState, slots: Slots) -> bool:
        """Read a held state from disk into host slots, in place; false, and it is dropped, where it is not right."""
        step = max(1, _BUFFER_BYTES // space.layout.block_bytes)
        rows = np.empty((min(step, slots.size), space.layout.block_bytes), dtype=np.uint8)
        for first in range(0, slots.size, step):
            batch = slots[first : first + step]
            _, good = self.read(space, state, first, rows[: batch.size])
            if good < batch.size:
                return False
            space.host.write(batch, rows[: batch.size])
        return True

    def place(self, space: Space, state: StoredState, tier: Tier, slots: Slots) -> bool:
        """Give a state that was copied its slots in another tier; false, with the slots left to the caller, if not."""
        with self._index.lock:
            placed = _table(space).place(state, tier, slots)
            if placed:
                space.announce(tier, [state.key])
        return placed

    def _drop_corrupt(self, space: Space, state: StoredState) -> None:
        with self._index.lock:
            freed = self.forget(space, [state] if state.attached else [])
            self._index.accounting.corrupt_blocks += 1
        _settle(freed)


class RisingState:
    """Host slots that fill with the pieces of a state as these are read from disk; `end` must follow.

    They are taken where host memory has free ones for all of it, and given to the state when all are filled.
    """

    def __init__(self, mover: StateMover, space: Space, state: StoredState) -> None:
        self._mover = mover
        self._space = space
        self._state = state
        count = _table(space).records.pieces(state)
        self._slots = space.host.allocate(count)
        if self._slots.size < count:
            self.end()
        self._missing = np.ones(self._slots.size, dtype=np.bool_)

    def take(self, first: int, rows: NDArray[np.uint8]) -> None:
        """Keep pieces that were verified."""
        slots = self._slots[first : first + len(rows)]
        if not slots.size:
            return
        self._space.host.write(slots, rows)
        self._missing[first : first + len(rows)] = False
        if not self._missing.any() and self._mover.place(self._space, self._state, Tier.HOST, self._slots):
            self._slots = _NONE

    def end(self) -> None:
        """Give back what was not filled; idempotent."""
        slots, self._slots = self._slots, _NONE
        self._space.host.free(slots)


def _table(space: Space) -> StateTable:
    assert space.states is not None, "a namespace of blocks has no states"
    return space.states


def _settle(freed: Iterable[FreedSparse]) -> None:
    for one in freed:
        one.pool.free(one.slots)


_NONE = np.empty(0, dtype=np.uint32)
