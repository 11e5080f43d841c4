"""The smallest tier that conforms: blocks in a dict, which end with the process."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import numpy as np

from kvstore.errors import ClosedError, LayoutMismatchError
from kvstore.tiers.persistent import ScrubStep
from kvstore.tiers.slots import SlotMap, as_slots

if TYPE_CHECKING:
    from kvstore.tiers.base import SlotRange

RANGE_BYTES = 256 << 10


class TinyPool:
    def __init__(self, tier, part_sizes, block_tokens):
        self.part_sizes = part_sizes
        self.block_tokens = block_tokens
        self.slot_bytes = sum(part_sizes)
        self.bytes_max = None
        self.blocks = {}
        self._tier = tier
        self._slots = SlotMap()
        self._range_slots = max(1, RANGE_BYTES // self.slot_bytes)

    @property
    def reserved_bytes(self):
        return sum(self.range_bytes(item) for item in self.ranges())

    @property
    def at_limit(self):
        return self.bytes_max is not None and self.reserved_bytes + self._range_slots * self.slot_bytes > self.bytes_max

    @property
    def free_slots(self):
        return self._slots.free_slots

    @property
    def used_slots(self):
        return self._slots.used_slots

    def allocate(self, count):
        with self._tier.lock:
            while (
                self.free_slots < count
                and not self.at_limit
                and self._tier.has_room(self._range_slots * self.slot_bytes)
            ):
                self._slots.add(self._range_slots)
            return self._slots.take(count)

    def free(self, slots):
        with self._tier.lock:
            for slot in as_slots(slots).tolist():
                self.blocks.pop(slot, None)
            self._slots.release(as_slots(slots))

    def free_for_good(self, slots):
        self.free(slots)
        return True

    def ranges(self):
        return self._slots.ranges()

    def range_bytes(self, slot_range: SlotRange):
        return slot_range.count * self.slot_bytes

    def is_kept(self, slot_range):
        return False

    def give_back(self, slot_range):
        with self._tier.lock:
            return self._slots.remove(slot_range)

    def write(self, slots, identities, sources):
        self._tier.check_open()
        for slot, identity, parts in zip(slots.tolist(), identities, sources, strict=True):
            self.blocks[slot] = identity, [bytes(part) for part in parts]
        return np.ones(len(slots), dtype=np.bool_)

    def read(self, slots, identities, rows, *, part=None):
        good = np.zeros(len(slots), dtype=np.bool_)
        for position, (slot, identity) in enumerate(zip(slots.tolist(), identities, strict=True)):
            known, parts = self.blocks.get(slot, (None, ()))
            if known == identity:
                content = b"".join(parts) if part is None else parts[part]
                rows[position] = np.frombuffer(content, dtype=np.uint8)
                good[position] = True
        return good


class TinyPolicyFiles:
    bytes_max = 64 << 10

    def __init__(self):
        self._contents = {}
        self.load = self._contents.get

    def save(self, ns_id, content):
        if len(content) > self.bytes_max:
            return False
        self._contents[ns_id] = content
        return True

    def refuse(self):
        pass

    def remove(self, ns_id):
        self._contents.pop(ns_id, None)


class TinyTier:
    start_count = 1
    quarantined_slots = 0

    def __init__(self, capacity_bytes):
        self.capacity_bytes = capacity_bytes
        self.node_secret = os.urandom(32)
        self.policy_files = TinyPolicyFiles()
        self.faults = {}
        self.lock = threading.RLock()
        self._pools = {}
        self._open = True

    @property
    def used_bytes(self):
        return sum(pool.reserved_bytes for pool in self._pools.values())

    def has_room(self, size_bytes):
        return self.used_bytes + size_bytes <= self.capacity_bytes

    def check_open(self):
        if not self._open:
            raise ClosedError("the tiny tier is closed")

    def pool(self, ns_id, part_sizes, block_tokens, *, bytes_max=None):
        self.check_open()
        pool = self._pools.setdefault(ns_id, TinyPool(self, part_sizes, block_tokens))
        if (pool.part_sizes, pool.block_tokens) != (part_sizes, block_tokens):
            raise LayoutMismatchError(f"namespace {ns_id.hex()} has blocks of another layout")
        pool.bytes_max = pool.bytes_max if bytes_max is None else bytes_max
        return pool

    def recovered_namespaces(self):
        return []

    def recovered(self, ns_id):
        return []

    def forget(self, ns_id):
        pool = self._pools.get(ns_id)
        if pool is not None and not pool.used_slots:
            del self._pools[ns_id]

    def clear(self, ns_id):
        self.check_open()

    def scrub(self, after, limit_bytes):
        """One block at a time: in memory there is nothing to find."""
        left = sum(len(pool.blocks) for pool in self._pools.values()) - after
        step = min(1, left)
        return ScrubStep(step, step, (), 0, left - step, after + 1 if left > 1 else None)

    def flush(self):
        self.check_open()

    def close(self):
        self._open = False


def open_tier(path, *, capacity_bytes, further_paths, free_floor_bytes):
    return TinyTier(capacity_bytes)
