"""What the survival policy rehearses costs a request no more when many prefixes are known than when few are."""

from __future__ import annotations

from statistics import median
from time import perf_counter

import numpy as np

from kvstore.radix.tree import RadixTree
from kvstore.types import Tier

BLOCK_TOKENS = 128  # one block to a fingerprint
CAPACITY_BLOCKS = 8192  # the most of which every prefix is rehearsed
ROOT = b"r" * 16
RATIO_MAX = 20


class FullTier:
    """A tier in which each new prompt of one block takes the place of another."""

    def __init__(self) -> None:
        self.tree = RadixTree(BLOCK_TOKENS, hash_seed=7, ns_key=bytes(16), policy="survival")
        self.tokens = np.zeros(BLOCK_TOKENS, dtype=np.uint32)
        self.free_slots = np.arange(CAPACITY_BLOCKS, dtype=np.uint32)
        self.stored = 0

    def store(self) -> float:
        """Store one more prompt; returns the seconds that entering it took."""
        if not self.free_slots.size:
            victims = self.tree.take_victims(Tier.HOST, 64)
            self.free_slots = self.tree.evict(victims, Tier.HOST).slots(Tier.HOST)
        self.stored += 1
        self.tokens[0] = self.stored
        start = perf_counter()
        _, ids = self.tree.stage(ROOT, self.tokens, 0, self.stored * 20_000)
        seconds = perf_counter() - start
        self.tree.place(ids, Tier.HOST, self.free_slots[:1])
        self.free_slots = self.free_slots[1:]
        self.tree.release(ids)
        return seconds


def test_a_request_costs_no_more_when_most_known_prefixes_are_rehearsed() -> None:
    tier = FullTier()
    early = [tier.store() for _ in range(2 * CAPACITY_BLOCKS)]
    for _ in range(5 * CAPACITY_BLOCKS):
        tier.store()
    late = [tier.store() for _ in range(300)]
    assert median(late) < RATIO_MAX * median(early[-CAPACITY_BLOCKS:])
