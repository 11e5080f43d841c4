"""The sparse parts that a lease holds, and reading them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.errors import InvalidArgumentError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvstore.store.space import Space
    from kvstore.store.sparse import SparseHold
    from kvstore.store.sparse_moves import SparseMover


class LeasedParts:
    """What a match needs of each sparse group, held until the lease ends."""

    def __init__(self, mover: SparseMover, space: Space, hold: SparseHold) -> None:
        self.hold = hold
        self._mover = mover
        self._space = space

    def load(self, rows: NDArray[np.uint8], from_block: int, part: int) -> tuple[int, int]:
        """Copy one sparse part of the blocks from `from_block` on into rows: how many are right, and were asked for."""
        number = self._space.layout.group_of(part)
        assert number is not None, f"part {part} is dense"
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
