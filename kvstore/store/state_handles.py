"""Leases and stages of one sequence state, whose blocks are its pieces: they are moved as blocks are."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from kvstore.buffers import readable_rows, writable_rows
from kvstore.errors import InvalidArgumentError
from kvstore.store.handles import OpenLease, OpenStage
from kvstore.types import CommitResult, LoadResult, StateSize, Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from kvstore.api import BlockBuffer
    from kvstore.store.index import Index
    from kvstore.store.room import RoomMaker
    from kvstore.store.space import Space
    from kvstore.store.state_moves import RisingState
    from kvstore.store.states import StoredState
    from kvstore.types import Slots

NO_STATE = StateSize(0, 0, 0)
_NO_SLOTS = np.empty(0, dtype=np.uint32)


class StateRowsLease(OpenLease):
    """A kvstore.api.Lease of the pieces of one state, or of nothing."""

    def __init__(
        self, index: Index, room: RoomMaker, space: Space, forget: Callable[[StateRowsLease], None], tokens: int = 0
    ) -> None:
        super().__init__(index.clock.monotonic() + index.settings.lease_seconds_max)
        self._index = index
        self._mover = room.states
        self._space = space
        self._forget = forget
        self._tokens = tokens
        self._state: StoredState | None = None
        self._rising: RisingState | None = None  # from the first read from disk on

    def hold(self, state: StoredState) -> None:
        """Protect a state; the index lock must be held."""
        assert self._space.states is not None, "a lease of states is of a namespace that has some"
        self._state = state
        self._space.states.hold(state)

    @property
    def size(self) -> StateSize:
        """What the state is, and how much it serves."""
        state = self._state
        return NO_STATE if state is None else StateSize(self._tokens, state.tokens, state.size_bytes)

    @property
    def blocks(self) -> int:
        """Number of pieces."""
        return -(-self.size.state_bytes // self._space.layout.block_bytes)

    def load_into(self, buffer: BlockBuffer, *, from_block: int = 0, part: int | None = None) -> LoadResult:
        """Copy pieces into the rows of `buffer`."""
        rows = writable_rows(buffer, self._row_bytes(part))
        _require_piece(from_block)
        with self._lock:
            self._check_open()
            rows = rows[: max(0, self.blocks - from_block)]
            good = 0
            if self._state is not None and len(rows):
                tier, good = self._mover.read(self._space, self._state, from_block, rows)
                self._count_loaded(tier, from_block, good)
                if tier is Tier.DISK and good:
                    self._keep(self._state, from_block, rows[:good])
        return LoadResult(good, len(rows), good * rows.shape[1])

    @contextmanager
    def lend(self, *, from_block: int, blocks: int, part: int | None) -> Iterator[list[NDArray[np.uint8]]]:
        """Pieces that lie in host memory, in place; none if the state lies on disk alone. They are held meanwhile."""
        self._row_bytes(part)
        with self._lock:
            self._check_open()
            state = self._state
            if state is None:
                yield []
                return
            with self._index.lock:
                slots = state.slots.get(Tier.HOST, _NO_SLOTS)[from_block : from_block + blocks]
                state.holds += 1
        try:
            yield self._space.host.pieces(slots)
            self._count_loaded(Tier.HOST, from_block, int(slots.size))
        finally:
            self._mover.release(self._space, state)

    def _let_go(self) -> None:
        if self._rising is not None:
            self._rising.end()
        if self._state is not None:
            self._mover.release(self._space, self._state)
        self._forget(self)

    def _row_bytes(self, part: int | None) -> int:
        return self._space.layout.part_bytes(0 if part is None else part)

    def _keep(self, state: StoredState, first: int, rows: NDArray[np.uint8]) -> None:
        """Have what was read from disk come up into host memory too."""
        if self._rising is None:
            self._rising = self._mover.rise(self._space, state)
        self._rising.take(first, rows)

    def _count_loaded(self, tier: Tier, first: int, pieces: int) -> None:
        """The tokens count with the last piece, once all that lies before it is loaded as well."""
        with self._index.lock:
            if pieces and first + pieces == self.blocks:
                self._index.accounting.loaded_tokens[tier.name.lower()] += self._tokens
            self._space.budget.earn(pieces * self._space.layout.block_bytes)


class StateRowsStage(OpenStage):
    """A kvstore.api.Stage of the pieces of one state: all of them, or none."""

    def __init__(
        self, index: Index, room: RoomMaker, space: Space, state: StoredState, forget: Callable[[StateRowsStage], None]
    ) -> None:
        super().__init__(index.clock.monotonic() + index.settings.stage_seconds_max)
        self._index = index
        self._mover = room.states
        self._space = space
        self._forget = forget
        self.state = state
        self._pieces = -(-state.size_bytes // space.layout.block_bytes)
        self._staged = False  # whether the table knows that this state is being stored
        self._generation = 0
        self._shared_tokens = 0
        self._slots: Slots = _NO_SLOTS
        self._written = np.zeros(0, dtype=np.bool_)
        self._refused = 0

    def enter(self) -> bool:
        """Tell the table; the index lock must be held. False where the state is not wanted."""
        table = self._space.states
        assert table is not None, "a stage of states is of a namespace that has some"
        root_key, path = self.state.root_key, self.state.path
        self._generation = table.generation
        self._shared_tokens = table.find(root_key, path)[1]
        self._staged = self._shared_tokens < self.state.tokens and table.begin(root_key, path)
        if not self._staged:
            self._index.accounting.present_blocks += self._pieces
        return self._staged

    def begin(self) -> None:
        """Reserve the slots of a state that is wanted."""
        with self._lock:
            self.check_open()
            slots, reason = self._mover.reserve(self._space, self.state.size_bytes, self._shared_tokens)
            self._slots = slots
            self._written = np.zeros(slots.size, dtype=np.bool_)
            if not slots.size:
                self._refuse(reason)

    def refuse(self, reason: str) -> None:
        """Take nothing, for a reason that counters name."""
        with self._lock:
            self._refuse(reason)

    @property
    def space(self) -> Space:
        """What it stores into."""
        return self._space

    @property
    def from_block(self) -> int:
        """First piece that wants bytes."""
        return 0

    @property
    def blocks(self) -> int:
        """How many pieces want bytes: all, or none."""
        return int(self._slots.size)

    def wanted(self, part: int) -> tuple[range, ...]:
        """The pieces that are wanted."""
        self._row_bytes(part)
        return (range(self.blocks),) if self.blocks else ()

    def write_from(self, buffer: BlockBuffer, *, from_block: int | None = None, part: int | None = None) -> int:
        """Copy rows of `buffer` into pieces; returns how many were taken."""
        rows = readable_rows(buffer, self._row_bytes(part))
        first = 0 if from_block is None else from_block
        _require_piece(first)
        with self._lock:
            self.check_open()
            rows = rows[: max(0, self.blocks - first)]
            if len(rows):
                self._space.host.write(self._slots[first : first + len(rows)], rows)
                self._written[first : first + len(rows)] = True
            return len(rows)

    @contextmanager
    def lend(self, *, from_block: int, blocks: int, part: int | None) -> Iterator[list[NDArray[np.uint8]]]:
        """The memory of some pieces, to be filled in place; see StoreStage.lend."""
        self._row_bytes(part)
        taken = slice(from_block, from_block + blocks)
        assert 0 <= taken.start <= taken.stop <= self.blocks, (taken, self.blocks)
        with self._lock:
            self.check_open()
            self._lent += 1
        filled = False
        try:
            yield self._space.host.pieces(self._slots[taken])
            filled = True
        finally:
            with self._lock:
                self._lent -= 1
                if self._open:
                    self._written[taken] |= filled
                elif not self._lent:
                    self._drop()

    def _commit(self) -> CommitResult:
        """Make the state visible if all of it was written; else drop it."""
        self._open = False
        if not self._slots.size:
            self._drop()
            present = 0 if self._refused else self._pieces
            return CommitResult(0, present, self._refused)
        if not self._written.all():
            self._drop()
            return CommitResult(0, 0, self._pieces)
        table = self._space.states
        assert table is not None, "a stage of states is of a namespace that has some"
        state = self.state
        with self._index.lock:
            self._end_staged()
            was_cleared = table.generation != self._generation
            is_stored = not was_cleared and not table.covers(state.root_key, state.path)
            if is_stored:
                state.slots[Tier.HOST], self._slots = self._slots, _NO_SLOTS
                freed = self._mover.forget(self._space, table.add(state))
                self._index.accounting.stored_blocks += self._pieces
                self._space.announce(Tier.HOST, [state.key], root_key=state.root_key, parent_key=state.root_key)
        if not is_stored:
            self._drop()
            return CommitResult(0, 0, self._pieces) if was_cleared else CommitResult(0, self._pieces, 0)
        for one in freed:
            one.pool.free(one.slots)
        return CommitResult(self._pieces, 0, 0)

    def _refuse(self, reason: str) -> None:
        self._refused = self._pieces
        with self._index.lock:
            self._index.accounting.rejected_blocks[reason] += self._pieces
            self._end_staged()

    def _drop(self) -> None:
        with self._index.lock:
            self._end_staged()
        slots, self._slots = self._slots, _NO_SLOTS
        self._space.host.free(slots)

    def _be_forgotten(self) -> None:
        self._forget(self)

    def _end_staged(self) -> None:
        """Others may store this state; the index lock must be held."""
        if self._staged and self._space.states is not None:
            self._staged = False
            self._space.states.end(self.state.root_key, self.state.path)

    def _row_bytes(self, part: int | None) -> int:
        return self._space.layout.part_bytes(0 if part is None else part)


def _require_piece(first: int) -> None:
    if first < 0:
        raise InvalidArgumentError(f"from_block is {first}, expected at least 0")
