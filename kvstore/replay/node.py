"""One node's index without its bytes: the radix tree of the store, over slot numbers of a host tier and a disk tier.

The rules are the store's (kvstore/store): victims leave host memory in the tree's order and go to disk, root to leaf,
where they have no copy yet and the rule of admission takes them; disk victims leave for good. A prefix found on disk
moves up into host memory as far as there is free room. A prompt for which there is not enough room keeps its head.
tests/model/test_replay_model.py compares with the store itself. Two things are simpler here: nothing is held back by a
budget of bytes, and all victims of a prompt move at once, where the store moves 64 MiB at a time. With a disk tier that
could change which of them find room there. On the Mooncake conversation trace (host 1 %, disk 5 %) batches of 1, 32
and 512 blocks gave the same hits and the same 99,182 demotions, and batches of 1 took ten times as long.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from kvstore.radix.tree import NO_SLOT
from kvstore.store.demotion import demotion
from kvstore.store.placement import DiskAdmission, DiskTerms, room_price
from kvstore.store.settings import MEASURING_POLICIES
from kvstore.store.turnover import Turnover
from kvstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.radix.tree import RadixTree, Removed
    from kvstore.types import BlockIds, Slots, TokenArray

_ROOT = bytes(16)


@dataclass(frozen=True, slots=True)
class Found:
    """Blocks of a prompt that were found, by the tier of their best copy."""

    host_blocks: int
    disk_blocks: int

    @property
    def blocks(self) -> int:
        """All of them."""
        return self.host_blocks + self.disk_blocks


class Node:
    """Serves prompts one after another. Not thread-safe.

    `demoted_blocks` and `promoted_blocks` count copies to disk and from there to host memory. With `disk_blocks` 0
    there is no disk tier. `admission` is the store's `disk_admission`.
    """

    def __init__(
        self,
        tree: RadixTree,
        *,
        host_blocks: int,
        disk_blocks: int,
        admission: DiskAdmission = DiskAdmission.DEMOTION,
    ) -> None:
        self.demoted_blocks = 0
        self.promoted_blocks = 0
        self._tree = tree
        self._host = _FreeSlots(host_blocks)
        self._disk = _FreeSlots(disk_blocks)
        self._disk_blocks = disk_blocks
        self._has_disk = disk_blocks > 0
        self._tick = 0
        self._seconds = 0.0
        self._admission = admission
        self._disk_is_full = False
        self._turnover: Turnover | None = None

    def serve(self, prompt: TokenArray, seconds: float) -> Found:
        """Look a prompt up, load what is found and store the rest."""
        self._tick = max(self._tick + 1, int(seconds * 1_000_000))
        self._seconds = seconds
        if self._turnover is None:
            self._turnover = Turnover(self._disk_blocks, seconds)
        ids = self._tree.match(_ROOT, prompt)
        self._tree.touch(ids, self._tick, prompt.size // self._tree.block_tokens)
        found = Found(int(ids.size), 0)
        if self._has_disk:
            on_disk_alone = ids[self._tree.slots(ids, Tier.HOST) == NO_SLOT]
            found = Found(int(ids.size - on_disk_alone.size), int(on_disk_alone.size))
            self._promote(on_disk_alone)
        if ids.size * self._tree.block_tokens < prompt.size:
            self._store(prompt)
        return found

    def _promote(self, ids: BlockIds) -> None:
        slots = self._host.allocate(ids.size)
        self._tree.place(ids[: slots.size], Tier.HOST, slots)
        self.promoted_blocks += slots.size

    def _store(self, prompt: TokenArray) -> None:
        existing, path = self._tree.stage(_ROOT, prompt, 0, self._tick)
        missing = path[existing:]
        worth = self._tree.value_of(int(path[-1]), self._tick) if missing.size else inf
        price = room_price(worth, has_disk=self._has_disk, is_owed=False)
        slots = _allocate_with(self._host, missing.size, lambda wanted: self._free_host(wanted, price))
        if slots.size < missing.size:
            self._settle(self._tree.drop(missing[slots.size :]))
        self._tree.place(missing[: slots.size], Tier.HOST, slots)
        if self._has_disk and self._admission is DiskAdmission.WRITE_THROUGH:
            self._copy_to_disk(missing[: slots.size])
        self._settle(self._tree.release(path))

    def _free_host(self, wanted: int, worth: float) -> bool:
        """Let some blocks leave host memory; false if none could."""
        victims = self._tree.take_victims(Tier.HOST, wanted, worth)
        if self._has_disk:
            terms = self._disk_terms(victims.size)
            self._copy_to_disk(demotion(self._tree, victims, self._admission, terms, self._tick).ids)
        removed = self._tree.evict(victims, Tier.HOST)
        self._settle(removed)
        return bool(removed.slots(Tier.HOST).size)

    def _disk_terms(self, count: int) -> DiskTerms:
        if not self._disk_is_full or self._disk.free_count >= count or self._turnover is None:
            return DiskTerms(None, None)
        is_measured = self._tree.policy_name in MEASURING_POLICIES
        seconds = self._turnover.seconds(self._seconds) if is_measured else None
        return DiskTerms(self._tree.victim_value(Tier.DISK, self._tick), seconds)

    def _copy_to_disk(self, ids: BlockIds) -> None:
        if ids.size:
            self._disk_is_full = self._disk.free_count < ids.size
        slots = _allocate_with(self._disk, ids.size, self._free_disk)
        placed = self._tree.place(ids[: slots.size], Tier.DISK, slots)
        # A victim that was dropped meanwhile with an ancestor, which left the disk to make room, needs no slot.
        self._disk.free(slots[~placed])
        self.demoted_blocks += int(placed.sum())
        if self._turnover is not None:
            self._turnover.note(int(placed.sum()), self._seconds)

    def _free_disk(self, wanted: int) -> bool:
        removed = self._tree.evict(self._tree.take_victims(Tier.DISK, wanted), Tier.DISK)
        self._settle(removed)
        return bool(removed.slots(Tier.DISK).size)

    def _settle(self, removed: Removed) -> None:
        self._host.free(removed.slots(Tier.HOST))
        self._disk.free(removed.slots(Tier.DISK))
        while self._tree.condemned:
            removed = self._tree.reap()
            self._host.free(removed.slots(Tier.HOST))
            self._disk.free(removed.slots(Tier.DISK))


class _FreeSlots:
    """The slot numbers of a tier that are free, used again last in, first out."""

    def __init__(self, count: int) -> None:
        self._free = np.arange(count, dtype=np.uint32)
        self._count = count

    @property
    def free_count(self) -> int:
        """How many are free."""
        return self._count

    def allocate(self, count: int) -> Slots:
        """Up to `count` slots."""
        self._count -= (taken := min(count, self._count))
        return self._free[self._count : self._count + taken].copy()

    def free(self, slots: Slots) -> None:
        """Take slots back."""
        self._free[self._count : self._count + slots.size] = slots
        self._count += slots.size


def _allocate_with(tier: _FreeSlots, count: int, free_some: Callable[[int], bool]) -> Slots:
    """Allocate until `count` slots are there or nothing more comes free."""
    slots = tier.allocate(count)
    while slots.size < count and free_some(count - slots.size):
        slots = np.concatenate([slots, tier.allocate(count - slots.size)])
    return slots
