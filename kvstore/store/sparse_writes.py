"""What one stage writes of sparse parts: which blocks want them, and the slots they are written to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore.store.match_rules import kept_blocks, runs_of
from kvstore.tiers.base import BlockIdentity
from kvstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from kvstore.store.space import Space
    from kvstore.store.sparse import SparseGroup
    from kvstore.store.sparse_moves import SparseMover
    from kvstore.types import BlockIds, TokenArray

    Mask = NDArray[np.bool_]


class SparseWrites:
    """The sparse parts of one stage. Guarded by the stage's lock; `begin` and `attach` need the index lock too."""

    def __init__(self, space: Space, mover: SparseMover, writer: int) -> None:
        self._space = space
        self._writer = writer
        self._mover = mover
        self._groups = [_GroupWrites(group) for group in space.sparse.groups]
        self.refused_blocks = 0

    @property
    def any_written(self) -> bool:
        """Whether some group has slots to attach."""
        return any(group.slots for group in self._groups)

    def begin(self, path: BlockIds, points: Iterable[int]) -> None:
        """Want the parts that are kept for matches at these points and are not there yet."""
        points = list(points)
        for group in self._groups:
            group.begin(path, points, self._space.layout.block_tokens)

    def wanted(self, part: int) -> tuple[range, ...]:
        """The runs of blocks of which this part is wanted."""
        return runs_of(self._group(part).wanted)

    def write(self, rows: NDArray[np.uint8], first_block: int, part: int) -> int:
        """Take the wanted rows among those of the blocks from `first_block` on, as far as there is room for them."""
        group = self._group(part)
        window = np.zeros(len(group.wanted), dtype=np.bool_)
        window[first_block : first_block + len(rows)] = True
        taken = 0
        for run in runs_of(group.wanted & window):
            missing = [block for block in run if block not in group.slots]
            slots = self._mover.reserve(self._space, group.table, len(missing)).tolist() if missing else []
            for block, slot in zip(missing, slots, strict=False):
                group.slots[block] = slot
                group.written[block] = set()
            self.refused_blocks += len(missing) - len(slots)
            blocks = [block for block in run if block in group.slots]
            taken += len(blocks)
            for some in _neighbours(blocks):
                group.write(some, rows[some.start - first_block : some.stop - first_block], part)
        return taken

    def attach(self, ids: NDArray[np.int64], keys: Sequence[bytes], prompt: TokenArray) -> None:
        """Give the tree's blocks what was written for them in full: `ids` by position in the prompt, -1 for none.

        `keys` are those of Space.prompt_keys.
        """
        symbols = self._space.layout.block_symbols
        for group in self._groups:
            for position in [block for block in group.slots if ids[block] >= 0 and group.is_complete(block)]:
                tokens = prompt[position * symbols : (position + 1) * symbols].tobytes()
                identity = BlockIdentity(keys[0], keys[position], keys[position + 1], tokens, self._writer)
                if group.table.put(int(ids[position]), identity, Tier.HOST, group.slots[position]):
                    del group.slots[position]

    def free_rest(self) -> None:
        """Give back the slots that were not attached. The index lock must not be held."""
        for group in self._groups:
            if group.slots:
                group.table.host.free(np.array(list(group.slots.values()), dtype=np.uint32))
            group.slots = {}

    def _group(self, part: int) -> _GroupWrites:
        return next(group for group in self._groups if part in group.table.parts)


class _GroupWrites:
    """One group: wanted blocks, and for those begun their slots and the parts written so far."""

    def __init__(self, table: SparseGroup) -> None:
        self.table = table
        self.wanted: Mask = np.zeros(0, dtype=np.bool_)
        self.slots: dict[int, int] = {}
        self.written: dict[int, set[int]] = {}

    def begin(self, path: BlockIds, points: list[int], block_tokens: int) -> None:
        kept = kept_blocks(self.table.rule, block_tokens, path.size, points)
        is_there = self.table.mask(path)
        self.table.touch(self.table.find(path[kept & is_there].tolist()))
        self.wanted = kept & ~is_there

    def write(self, blocks: range, rows: NDArray[np.uint8], part: int) -> None:
        slots = np.array([self.slots[block] for block in blocks], dtype=np.uint32)
        self.table.host.write(slots, rows, part=part - self.table.parts.start)
        for block in blocks:
            self.written[block].add(part)

    def is_complete(self, block: int) -> bool:
        return block in self.slots and len(self.written[block]) == len(self.table.parts)


def _neighbours(blocks: Sequence[int]) -> tuple[range, ...]:
    """Ascending numbers as runs."""
    if not blocks:
        return ()
    mask = np.zeros(blocks[-1] + 1 - blocks[0], dtype=np.bool_)
    mask[np.array(blocks) - blocks[0]] = True
    return tuple(range(run.start + blocks[0], run.stop + blocks[0]) for run in runs_of(mask))
