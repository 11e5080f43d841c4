"""Writing to pools whose blocks differ in size: which slots they need is known only when they are written."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvstore.tiers.persistent import SizingPool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.tiers.base import BlockIdentity, Bytes1D, Mask
    from kvstore.tiers.persistent import PersistentPool
    from kvstore.types import Slots

_TRIES_MAX = 4


@dataclass(frozen=True, slots=True)
class Written:
    """Which blocks are on disk, and why the others are not, as counters call it."""

    stored: Mask
    refused: Counter[str]


def write_blocks(
    pool: PersistentPool,
    slots: Slots,
    blocks: tuple[Sequence[BlockIdentity], Sequence[Sequence[Bytes1D]]],
    free_some: Callable[[int], bool],
) -> Written:
    """Write blocks, given as identities and sources; see PersistentPool.write. The room lock must be held.

    Where slots were free, but none so large as some blocks turned out to need, `free_some(missing)` lets others leave,
    and these blocks are written again: as often as that helps, and a few times where it does not.
    """
    identities, sources = blocks
    before = _unfitting_blocks(pool)
    written = pool.write(slots, identities, sources)
    unfitting_count = _unfitting_blocks(pool) - before
    tries = 0
    while tries < _TRIES_MAX and unfitting_count and free_some(int((~written).sum())):
        before = _unfitting_blocks(pool)
        missing = np.flatnonzero(~written).tolist()
        again = slots[missing]
        try:
            stored = pool.write(again, [identities[i] for i in missing], [sources[i] for i in missing])
        finally:
            slots[missing] = again
        written[missing] = stored
        unfitting_count = _unfitting_blocks(pool) - before
        tries = 0 if stored.any() else tries + 1
    refused = Counter(no_slot_of_size=unfitting_count, disk_error=int((~written).sum()) - unfitting_count)
    return Written(written, +refused)


def _unfitting_blocks(pool: PersistentPool) -> int:
    return pool.unfitting_blocks if isinstance(pool, SizingPool) else 0
