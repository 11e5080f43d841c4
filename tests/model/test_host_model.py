"""The host tier against a naive model: two namespaces, blocks of several sizes, extents held and retired at random."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.tiers.extent_stock import HostMemory
from kvstore.tiers.host import HostPool, HostTier

if TYPE_CHECKING:
    from kvstore.tiers.extent import ExtentHold

PARTS = {b"a" * 16: (700, 33), b"b" * 16: (5000,), b"c" * 16: (10_000, 1, 4096)}


@dataclass
class NaivePool:
    """Extents by their first slot: how many slots, which are used, what they hold, how many hold it."""

    block_bytes: int
    slots: dict[int, int] = field(default_factory=dict)
    used: dict[int, np.ndarray] = field(default_factory=dict)
    holds: dict[int, int] = field(default_factory=dict)

    def used_in(self, first: int) -> list[int]:
        return [slot for slot in self.used if first <= slot < first + self.slots[first]]

    @property
    def slot_count(self) -> int:
        return sum(self.slots.values())


class HostMachine(RuleBasedStateMachine):
    """Every answer of the tier is compared with the model's."""

    memory = HostMemory(huge_pages="never", reserve_from_bytes=1 << 60)
    capacity = 64_000
    extent = 9_000
    missing_max = 0  # slots that an extent may have less than the bytes of their parts allow

    @initialize()
    def open(self) -> None:
        self.tier = HostTier(self.capacity, extent_bytes=self.extent, memory=self.memory)
        self.pools: dict[bytes, HostPool] = {}
        self.naive: dict[bytes, NaivePool] = {}
        for ns_id, parts in PARTS.items():
            self.pools[ns_id] = self.tier.pool(ns_id, parts)
            self.naive[ns_id] = NaivePool(sum(parts))
        self.retired: dict[int, int] = {}  # bytes by extent id
        self.open_holds: list[tuple[bytes, int, ExtentHold]] = []
        self.seen_ids: set[int] = set()
        self.seed = 0

    @property
    def claimed_bytes(self) -> int:
        lent = sum(naive.slot_count * naive.block_bytes for naive in self.naive.values())
        return lent + sum(self.retired.values())

    @rule(ns_id=st.sampled_from(sorted(PARTS)), count=st.integers(1, 25))
    def allocate_and_write(self, ns_id: bytes, count: int) -> None:
        pool, naive = self.pools[ns_id], self.naive[ns_id]
        slots = pool.allocate(count)
        self._follow_growth(ns_id, count)
        assert min(count, naive.slot_count - len(naive.used)) == len(slots)
        assert not set(slots.tolist()) & set(naive.used)
        self.seed += 1
        rows = np.random.default_rng(self.seed).integers(0, 256, (len(slots), naive.block_bytes), dtype=np.uint8)
        pool.write(slots, rows)
        naive.used.update(zip(slots.tolist(), rows, strict=True))

    def _follow_growth(self, ns_id: bytes, count: int) -> None:
        """Extents are added while slots are missing, each of the usual size or what is left."""
        naive = self.naive[ns_id]
        known = set(naive.slots)
        while naive.slot_count - len(naive.used) < count:
            left = self.capacity - self.claimed_bytes
            grown = min(max(self.extent, naive.block_bytes), left) // naive.block_bytes
            if grown == 0:
                break
            found = [item for item in self.pools[ns_id].ranges() if item.first not in naive.slots]
            item = next(item for item in found if max(1, grown - self.missing_max) <= item.count <= grown)
            naive.slots[item.first] = item.count
        for place in self.pools[ns_id].extents():
            if place.slots.first not in known:
                assert place.extent_id not in self.seen_ids
                self.seen_ids.add(place.extent_id)

    @precondition(lambda self: any(naive.used for naive in self.naive.values()))
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        ns_id = data.draw(st.sampled_from([key for key, naive in self.naive.items() if naive.used]))
        used = sorted(self.naive[ns_id].used)
        slots = data.draw(st.lists(st.sampled_from(used), unique=True, min_size=1))
        if data.draw(st.booleans()):
            slots = used
        self.pools[ns_id].free(np.array(slots, dtype=np.uint32))
        for slot in slots:
            del self.naive[ns_id].used[slot]

    @precondition(lambda self: any(naive.slots for naive in self.naive.values()))
    @rule(data=st.data(), retire=st.booleans())
    def give_up_an_extent(self, data: st.DataObject, retire: bool) -> None:
        ns_id = data.draw(st.sampled_from([key for key, naive in self.naive.items() if naive.slots]))
        pool, naive = self.pools[ns_id], self.naive[ns_id]
        place = data.draw(st.sampled_from(pool.extents()))
        is_held = naive.holds.get(place.extent_id, 0) > 0
        done = pool.retire(place.slots) if retire else pool.give_back(place.slots)
        assert (not naive.used_in(place.slots.first) and (retire or not is_held)) == done
        if done:
            count = naive.slots.pop(place.slots.first)
            if is_held:
                self.retired[place.extent_id] = count * naive.block_bytes

    @precondition(lambda self: any(naive.slots for naive in self.naive.values()))
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        ns_id = data.draw(st.sampled_from([key for key, naive in self.naive.items() if naive.slots]))
        place = data.draw(st.sampled_from(self.pools[ns_id].extents()))
        hold = self.pools[ns_id].hold(place.extent_id)
        assert hold is not None
        self.open_holds.append((ns_id, place.extent_id, hold))
        holds = self.naive[ns_id].holds
        holds[place.extent_id] = holds.get(place.extent_id, 0) + 1

    @precondition(lambda self: self.open_holds)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.open_holds) - 1))
        ns_id, extent_id, hold = self.open_holds.pop(index)
        hold.release()
        holds = self.naive[ns_id].holds
        holds[extent_id] -= 1
        if not holds[extent_id]:
            self.retired.pop(extent_id, None)

    @invariant()
    def answers_agree(self) -> None:
        if not hasattr(self, "tier"):
            return
        assert self.claimed_bytes == self.tier.reserved_bytes <= self.capacity
        for ns_id, naive in self.naive.items():
            pool = self.pools[ns_id]
            assert naive.slots == {item.first: item.count for item in pool.ranges()}
            assert (len(naive.used), naive.slot_count - len(naive.used)) == (pool.used_slots, pool.free_slots)
            slots = np.array(sorted(naive.used, key=lambda slot: slot % 7), dtype=np.uint32)
            rows = np.zeros((len(slots), naive.block_bytes), dtype=np.uint8)
            pool.read(slots, rows)
            for slot, row in zip(slots.tolist(), rows, strict=True):
                np.testing.assert_array_equal(naive.used[slot], row)

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.tier.close()
            for _, _, hold in self.open_holds:
                hold.release()
            assert 0 == self.tier.reserved_bytes


class ReservedHostMachine(HostMachine):
    """The same with extents made and touched ahead by the tier's thread; parts in whole pages must fit into those."""

    memory = HostMemory(huge_pages="never", reserve_from_bytes=1)
    capacity = 7 << 16
    extent = 1 << 16
    missing_max = 12  # two pages' worth of the smallest blocks


TestHostModel = HostMachine.TestCase
TestHostModel.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
TestReservedHostModel = ReservedHostMachine.TestCase
TestReservedHostModel.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
