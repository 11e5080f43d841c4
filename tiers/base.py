"""What the host and disk tiers share: identities of blocks and the contracts that the store relies on.

A *slot* names the place of one block in one tier, with a region of exact size for each part of the block. A *pool*
is the memory or disk space lent to one namespace; it is cut into *extents* (host) or *slabs* (disk), which go from
pool to pool as wholes. Slots are numbered per pool.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvstore.types import Slots

    Bytes1D = NDArray[np.uint8]
    Bytes2D = NDArray[np.uint8]
    Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class BlockIdentity:
    """What a block is, whatever its bytes: compared in full whenever a block comes from disk or a wire.

    `tokens` are the block's token ids as little-endian u32. `writer` is who wrote it (kvstore.writers), which is kept
    with the block but does not make it another one.
    """

    root_key: bytes
    parent_key: bytes
    key: bytes
    tokens: bytes = field(repr=False)
    writer: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class SlotRange:
    """The slots [first, first + count) of one extent or slab."""

    first: int
    count: int


class Pool(Protocol):
    """Slots of one namespace in one tier. Thread-safe. Slots belong to the caller from allocate() to free()."""

    @property
    def part_sizes(self) -> tuple[int, ...]:
        """Exact bytes of each part of a block."""
        ...

    @property
    def slot_bytes(self) -> int:
        """Bytes that a block takes up."""
        ...

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the extents or slabs that the pool holds now."""
        ...

    @property
    def at_limit(self) -> bool:
        """Whether its own limit, not the tier's capacity, keeps the pool from another extent."""
        ...

    @property
    def free_slots(self) -> int:
        """Slots that allocate() can hand out without another extent."""
        ...

    @property
    def used_slots(self) -> int:
        """Slots handed out and not freed."""
        ...

    def allocate(self, count: int) -> Slots:
        """Up to `count` slots, fewer or none when the tier is full; grows by extents within the tier's capacity.

        Never waits. Neighbouring slots where possible, in ascending order.
        """
        ...

    def free(self, slots: Slots) -> None:
        """Give slots back; their bytes are undefined from now on."""
        ...

    def ranges(self) -> Sequence[SlotRange]:
        """The extents or slabs the pool holds now."""
        ...

    def is_kept(self, slot_range: SlotRange) -> bool:
        """Whether an extent or slab cannot go back, whatever leaves it: somebody maps it, or a slot of it is bad."""
        ...

    def give_back(self, slot_range: SlotRange) -> bool:
        """Return one extent to the tier if all its slots are free; false and unchanged otherwise."""
        ...


@dataclass(frozen=True, slots=True)
class RecoveredBlock:
    """A block that the disk held when it was opened; its payload is verified when it is first read."""

    identity: BlockIdentity
    slot: int
    sequence: int
