"""The sparse parts that a lease holds, and reading them."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from kvstore.errors import InvalidArgumentError
from kvstore.types import Tier

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvstore.store.space import Space
    from kvstore.store.sparse import SparseGroup, SparseHold
    from kvstore.store.sparse_moves import SparseMover
    from kvstore.types import Slots


class LeasedParts:
    """What a match needs of each sparse group, held until the lease ends."""

    def __init__(self, mover: SparseMover, space: Space, hold: SparseHold) -> None:
        self.hold = hold
        self._mover = mover
        self._space = space

    def load(self, rows: NDArray[np.uint8], from_block: int, part: int) -> tuple[int, int]:
        """Copy one sparse part of the blocks from `from_block` on into rows: how many are right, and were asked for."""
        number = self._group_of(part)
        first, held = self.hold.first_blocks[number], self.hold.blocks[number]
        if not first <= from_block <= first + len(held):
            raise InvalidArgumentError(
                f"from_block is {from_block}, expected {first}..{first + len(held)}: the blocks of which this match "
                f"needs part {part}"
            )
        group = self._space.sparse.groups[number]
        blocks = held[from_block - first : from_block - first + len(rows)]
        good = self._mover.load(self._space, group, blocks, rows[: len(blocks)], part - group.parts.start)
        return good, len(blocks)

    def first_block(self, part: int) -> int:
        """The block of which the first of `slots` is."""
        return self.hold.first_blocks[self._group_of(part)]

    def group(self, part: int) -> SparseGroup:
        """The group that a sparse part belongs to."""
        return self._space.sparse.groups[self._group_of(part)]

    def slots(self, part: int) -> Slots:
        """Where the leading blocks that a match needs of a part lie in host memory; the index lock must be held.

        They stay there as long as they are held.
        """
        found = (block.slots.get(Tier.HOST) for block in self.hold.blocks[self._group_of(part)])
        return np.array(list(takewhile(lambda slot: slot is not None, found)), dtype=np.uint32)

    def _group_of(self, part: int) -> int:
        number = self._space.layout.group_of(part)
        assert number is not None, f"part {part} is dense"
        return number
