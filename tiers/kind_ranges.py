"""Which ranges of a pool's slots are of which kind, in which folder, and who is next to give some."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.tiers.slab import Slab
    from kvstore.tiers.slab_volume import SlabVolume
    from kvstore.tiers.slots import SlotMap
    from kvstore.types import Slots


class KindRanges:
    """Takes slots of one kind from a SlotMap. Not thread-safe: the pool, which owns both, locks them."""

    def __init__(self, slots: SlotMap, volumes: Sequence[SlabVolume]) -> None:
        self._slots = slots
        self._volumes = volumes
        self._firsts: defaultdict[tuple[SlabVolume, int], set[int]] = defaultdict(set)  # by volume and kind
        self._turn = 0

    def add(self, slab: Slab, first: int) -> None:
        """Note a range, which begins at `first`."""
        self._firsts[slab.volume, slab.geometry.kind].add(first)

    def remove(self, slab: Slab, first: int) -> None:
        """Forget it."""
        self._firsts[slab.volume, slab.geometry.kind].discard(first)

    def kinds(self) -> set[int]:
        """Kinds of which there are ranges."""
        return {kind for (_, kind), firsts in self._firsts.items() if firsts}

    def free_slots(self, kind: int) -> int:
        """Free slots of a kind."""
        return self._slots.free_within(self._firsts_of(kind))

    def take(self, count: int, kind: int, *, share_min: int) -> Slots:
        """Up to `count` free slots of a kind.

        Large requests are spread over all folders alike, small ones go to each in turn: none gives less than
        `share_min` where more is wanted.
        """
        if len(self._volumes) == 1:
            return self._slots.take(count, within=self._firsts[self._volumes[0], kind])
        self._turn += 1
        turned = [self._volumes[(self._turn + i) % len(self._volumes)] for i in range(len(self._volumes))]
        working = [volume for volume in turned if not volume.failing]
        share = max(-(-count // max(1, len(working))), share_min)
        taken: list[Slots] = []
        left = count
        for volume in working:
            taken.append(self._slots.take(min(share, left), within=self._firsts[volume, kind]))
            left -= len(taken[-1])
        taken.append(self._slots.take(left, within=self._firsts_of(kind)))
        return np.sort(np.concatenate(taken))

    def _firsts_of(self, kind: int) -> set[int]:
        return set().union(*(self._firsts[volume, kind] for volume in self._volumes))
