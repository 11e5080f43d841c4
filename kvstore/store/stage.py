"""Writing: a stage reserves its blocks in the index and their slots in host memory, and makes them visible at once."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvstore.buffers import readable_rows
from kvstore.errors import InvalidArgumentError
from kvstore.store.handles import OpenStage
from kvstore.store.match_rules import kept_points
from kvstore.store.sparse_writes import SparseWrites
from kvstore.types import MARK_BYTES, CommitResult, Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from kvstore.api import BlockBuffer
    from kvstore.store.index import Index
    from kvstore.store.room import RoomMaker
    from kvstore.store.space import Space
    from kvstore.store.sparse_moves import SparseMover
    from kvstore.types import BlockIds, KvLayout, Slots, TokenArray


@dataclass(frozen=True, slots=True)
class Points:
    """Of what a stage knows which matches are likely: the whole length of its prompt and where its turns end."""

    prompt_tokens: int
    turn_ends: tuple[int, ...] = ()

    def kept(self, layout: KvLayout, present_blocks: int) -> list[int]:
        """The points near which sparse parts are kept."""
        return kept_points(self.prompt_tokens, layout.block_tokens, present_blocks, self.turn_ends)


class StoreStage(OpenStage):
    """A kvstore.api.Stage in this process's store.

    `path` are the ids of all blocks of the prompt, held once by this stage; `present` of them were there before.
    `slots` belong to the stage until the commit gives them to the index.
    """

    def __init__(
        self,
        index: Index,
        space: Space,
        *,
        root_key: bytes,
        prompt: TokenArray,
        requested_from: int,
        points: Points,
        mover: SparseMover,
        writer: int,
        forget: Callable[[StoreStage], None],
    ) -> None:
        super().__init__(index.clock.monotonic() + index.settings.stage_seconds_max)
        self._index = index
        self._space = space
        self.root_key = root_key
        self.prompt = prompt
        self.requested_from = requested_from
        self._points = points
        self._sparse = SparseWrites(space, mover, writer)
        self.writer = writer
        self._forget = forget
        self._path: BlockIds = np.empty(0, dtype=np.uint32)
        self._present = requested_from
        self._slots: Slots = np.empty(0, dtype=np.uint32)
        self._refused = 0
        self._written = np.zeros((space.layout.part_count, 0), dtype=np.bool_)

    def begin(self, present: int, path: BlockIds, room: RoomMaker) -> None:
        """Take over the placeholders that the index made for this stage and reserve their slots.

        Placeholders for which there is no room are dropped again: what is stored stays prefix-closed.
        """
        with self._lock:
            self._path = path
            self._present = present if path.size else self.requested_from
            if not self._open:
                self._drop()
            self.check_open()
            missing = self.prompt.size // self._space.layout.block_symbols - self._present
            reasons = Counter({"missing_prefix": missing})
            if path.size:
                reserved = room.reserve(self._space, path, missing)
                self._slots, reasons = reserved.slots, reserved.refused
            self._refused = missing - int(self._slots.size)
            self._written = np.zeros((self._space.layout.part_count, self._slots.size), dtype=np.bool_)
            if not self._space.layout.layers:
                self._write_marks()
            self._drop_refused(reasons)

    def _write_marks(self) -> None:
        """Without layers of full attention no engine writes dense parts."""
        self._space.host.write(self._slots, np.zeros((self._slots.size, MARK_BYTES), dtype=np.uint8))
        self._written[:] = True

    def _drop_refused(self, reasons: Counter[str]) -> None:
        with self._index.lock:
            accounting = self._index.accounting
            accounting.present_blocks += self._present - self.requested_from
            accounting.rejected_blocks.update(reasons)
            staged_end = self._present + int(self._slots.size)
            if self._path.size:
                self._sparse.begin(self._path[:staged_end], self._points.kept(self._space.layout, self._present))
            freed = self._space.drop(self._path[staged_end:])
        self._index.settle(freed)

    @property
    def space(self) -> Space:
        """What it stores into."""
        return self._space

    @property
    def is_open(self) -> bool:
        """Whether it has not ended."""
        return self._open

    @property
    def ns_id(self) -> bytes:
        """The public name of its namespace."""
        return self._space.ns_id

    @property
    def layout(self) -> KvLayout:
        """The layout of its rows."""
        return self._space.layout

    @property
    def present_blocks(self) -> int:
        """Blocks that were asked for and are stored, or being stored, by others."""
        return self._present - self.requested_from

    @property
    def refused_blocks(self) -> int:
        """Blocks that were asked for and for which there was no room, or no budget."""
        return self._refused

    @property
    def wants_nothing(self) -> bool:
        """Whether there is nothing to write, of any part."""
        return not any(self.wanted(part) for part in range(len(self.layout.parts)))

    @property
    def from_block(self) -> int:
        """First block that wants bytes."""
        return self._present

    @property
    def blocks(self) -> int:
        """How many blocks want bytes."""
        return int(self._slots.size)

    def wanted(self, part: int) -> tuple[range, ...]:
        """The blocks of which a part is wanted; see kvstore.api.Stage."""
        if self._space.layout.group_of(part) is not None:
            return self._sparse.wanted(part)
        return (range(self._present, self._present + self.blocks),) if self.blocks else ()

    def write_from(self, buffer: BlockBuffer, *, from_block: int | None = None, part: int | None = None) -> int:
        """Copy rows of `buffer` into the stage; see kvstore.api.Stage."""
        layout = self._space.layout
        rows = readable_rows(buffer, layout.block_bytes if part is None else layout.part_bytes(part))
        first = self.requested_from if from_block is None else from_block
        if first < 0:
            raise InvalidArgumentError(f"from_block is {first}, expected at least 0")
        with self._lock:
            self.check_open()
            if part is not None and layout.group_of(part) is not None:
                return self._sparse.write(rows, first, part)
            begin = max(first, self._present)
            end = min(first + len(rows), self._present + self.blocks)
            if begin >= end:
                return 0
            taken = slice(begin - self._present, end - self._present)
            self._space.host.write(self._slots[taken], rows[begin - first : end - first], part=part)
            self._written[slice(None) if part is None else part, taken] = True
            return end - begin

    @contextmanager
    def lend(self, *, from_block: int, blocks: int, part: int | None) -> Iterator[list[NDArray[np.uint8]]]:
        """The memory of blocks [from_block, from_block + blocks), all of which want bytes, to be filled in place.

        They count as written once the block is left without an exception. A stage that ends meanwhile keeps its slots
        until then, so that a slow writer delays nobody and never writes where others read. Raises ClosedError if the
        stage has ended.
        """
        taken = slice(from_block - self._present, from_block - self._present + blocks)
        assert 0 <= taken.start <= taken.stop <= self.blocks, (taken, self.blocks)
        with self._lock:
            self.check_open()
            self._lent += 1
        filled = False
        try:
            yield self._space.host.pieces(self._slots[taken], part=part)
            filled = True
        finally:
            with self._lock:
                self._lent -= 1
                if self._open:
                    self._written[slice(None) if part is None else part, taken] |= filled
                elif not self._lent:
                    self._drop()

    def _commit(self) -> CommitResult:
        """Make the leading blocks whose every part was written visible, atomically; drop the others."""
        complete = self._written.all(axis=0)
        count = int(complete.size if complete.all() else complete.argmin())
        is_needed = count or self._sparse.any_written
        keys = self._space.prompt_keys(self.root_key, self.prompt) if is_needed else []
        self._open = False
        stored = self._finish(count, keys)
        incomplete = self.blocks - stored
        return CommitResult(stored, self.present_blocks, self._refused + incomplete)

    def _drop(self) -> None:
        self._finish(0, [])

    def _be_forgotten(self) -> None:
        self._forget(self)

    def _finish(self, count: int, keys: Sequence[bytes]) -> int:
        """Give the first `count` blocks to the index, drop the rest, end the holds. Returns how many were placed.

        `keys` are those of the whole prompt, the root key first; without them no sparse part is kept.
        """
        space = self._space
        staged = self._path[self._present : self._present + self.blocks]
        placed = np.zeros(staged.size, dtype=np.bool_)
        with self._index.lock:
            placed[:count] = space.tree.place(staged[:count], Tier.HOST, self._slots[:count])
            stored = int(placed.sum())
            self._index.accounting.stored_blocks += stored
            if stored:
                first = self._present
                space.announce_new(keys[first + 1 : first + 1 + stored], keys, first)
            if keys:
                self._sparse.attach(self._standing(staged, placed), keys, self.prompt)
            self._index.accounting.rejected_blocks["sparse_full"] += self._sparse.refused_blocks
            dropped = space.drop(self._path[self._present + count :])
            released = space.release(self._path)
        if not placed.all():
            space.host.free(self._slots[~placed])
        self._sparse.free_rest()
        self._index.settle(dropped)
        self._index.settle(released)
        return stored

    def _standing(self, staged: BlockIds, placed: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Ids of the prompt's blocks that may have sparse parts, -1 for the others; the index lock must be held.

        They are the visible ones, and those placed now, which may still lie below blocks of another stage.
        """
        ids = np.full(self._path.size, -1, dtype=np.int64)
        visible = self._space.tree.match(self.root_key, self.prompt)
        ids[: visible.size] = visible
        ids[self._present : self._present + staged.size][placed] = staged[placed]
        return ids
