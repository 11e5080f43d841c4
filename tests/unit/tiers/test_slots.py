from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.tiers.base import SlotRange
from kvstore.tiers.slots import HolderTable, SlotMap, as_slots


def test_the_lowest_free_slots_are_taken_first() -> None:
    slots = SlotMap()
    slots.add(4)
    slots.add(4)
    assert [0, 1, 2, 3, 4] == slots.take(5).tolist()
    slots.release(as_slots([3, 1]))
    assert [1, 3, 5] == slots.take(3).tolist()


def test_take_gives_fewer_when_there_are_fewer() -> None:
    slots = SlotMap()
    assert [] == slots.take(1).tolist()
    slots.add(2)
    assert [0, 1] == slots.take(5).tolist()


def test_free_slots_behind_a_long_used_run_are_found() -> None:
    slots = SlotMap()
    slots.add(20_000)
    slots.take(20_000)
    slots.release(as_slots([0, 19_999]))
    assert [0, 19_999] == slots.take(3).tolist()


def test_a_slot_freed_twice_is_a_programming_error() -> None:
    slots = SlotMap()
    slots.add(2)
    taken = slots.take(1)
    slots.release(taken)
    with pytest.raises(AssertionError):
        slots.release(taken)


def test_a_slot_named_twice_in_one_call_is_a_programming_error() -> None:
    slots = SlotMap()
    slots.add(2)
    slots.take(2)
    with pytest.raises(AssertionError):
        slots.release(as_slots([1, 1]))


@pytest.mark.parametrize("slot", [2, 5])
def test_a_foreign_slot_is_a_programming_error(slot: int) -> None:
    slots = SlotMap()
    slots.add(2)
    slots.take(2)
    with pytest.raises(AssertionError):
        slots.release(as_slots([slot]))


def test_a_range_with_a_used_slot_stays() -> None:
    slots = SlotMap()
    first = slots.add(2)
    slots.take(1)
    assert not slots.remove(first)
    assert (SlotRange(0, 2),) == slots.ranges()


def test_numbers_of_removed_ranges_are_used_again() -> None:
    slots = SlotMap()
    ranges = [slots.add(3) for _ in range(3)]
    assert slots.remove(ranges[1])
    assert SlotRange(9, 4) == slots.add(4)
    assert SlotRange(3, 3) == slots.add(3)


def test_runs_are_cut_at_gaps_and_at_holders() -> None:
    table: HolderTable[str] = HolderTable()
    table = table.with_added(SlotRange(4, 4), "b").with_added(SlotRange(0, 4), "a")
    runs = [(run.holder, run.index, run.start, run.count) for run in table.runs(as_slots([2, 3, 4, 5, 7, 0]))]
    assert [("a", 2, 0, 2), ("b", 0, 2, 2), ("b", 3, 4, 1), ("a", 0, 5, 1)] == runs
    assert [] == list(table.runs(as_slots([])))


def test_runs_of_a_foreign_slot_are_a_programming_error() -> None:
    table: HolderTable[str] = HolderTable()
    table = table.with_added(SlotRange(2, 2), "a")
    for slot in (1, 4):
        with pytest.raises(AssertionError):
            list(table.runs(as_slots([slot])))


class SlotMapMachine(RuleBasedStateMachine):
    """SlotMap against a set of free numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = SlotMap()
        self.free: set[int] = set()
        self.used: set[int] = set()

    @rule(count=st.integers(1, 6))
    def add(self, count: int) -> None:
        added = self.slots.add(count)
        numbers = set(range(added.first, added.first + added.count))
        assert not numbers & (self.free | self.used)
        self.free |= numbers

    @rule(count=st.integers(0, 9))
    def take(self, count: int) -> None:
        expected = sorted(self.free)[:count]
        assert expected == self.slots.take(count).tolist()
        self.free -= set(expected)
        self.used |= set(expected)

    @rule(count=st.integers(0, 9), data=st.data())
    def take_within(self, count: int, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.slots.ranges()))) if self.slots.ranges() else []
        within = {n for item in chosen for n in range(item.first, item.first + item.count)}
        expected = sorted(self.free & within)[:count]
        assert expected == self.slots.take(count, within={item.first for item in chosen}).tolist()
        self.free -= set(expected)
        self.used |= set(expected)

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.used)), unique=True))
        self.slots.release(as_slots(chosen))
        self.used -= set(chosen)
        self.free |= set(chosen)

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def take_these(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.free)), unique=True))
        self.slots.take_these(as_slots(chosen))
        self.free -= set(chosen)
        self.used |= set(chosen)

    @precondition(lambda self: self.slots.ranges())
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from(self.slots.ranges()))
        numbers = set(range(chosen.first, chosen.first + chosen.count))
        assert (numbers <= self.free) == self.slots.remove(chosen)
        if numbers <= self.free:
            self.free -= numbers

    @invariant()
    def counts_agree(self) -> None:
        assert (len(self.free), len(self.used)) == (self.slots.free_slots, self.slots.used_slots)
        numbers = [n for item in self.slots.ranges() for n in range(item.first, item.first + item.count)]
        assert sorted(self.free | self.used) == numbers


TestSlotMapMachine = SlotMapMachine.TestCase
TestSlotMapMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_slots_are_uint32_without_a_copy() -> None:
    slots = np.array([1, 2], dtype=np.uint32)
    assert as_slots(slots) is slots
    assert np.dtype(np.uint32) == as_slots([3]).dtype
