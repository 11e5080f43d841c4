from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.tiers.buffers import PAGE_BYTES
from kvstore.tiers.size_classes import CLASSES_PER_FACTOR, RecentSizes, class_bytes, fit


@given(size=st.integers(1, 1 << 28))
def test_a_slot_wastes_at_most_an_eighth_beyond_its_last_page(size: int) -> None:
    whole = -(-size // PAGE_BYTES) * PAGE_BYTES
    slot = class_bytes(size, 1 << 29)
    assert slot % PAGE_BYTES == 0
    assert size <= slot
    assert (slot - whole) * 8 <= slot
    assert class_bytes(slot, 1 << 29) == slot


def test_what_most_blocks_take_is_a_size_of_its_own() -> None:
    usual = 37 * PAGE_BYTES - 100
    assert 37 * PAGE_BYTES == class_bytes(usual, 1 << 20, usual)
    assert 40 * PAGE_BYTES == class_bytes(usual - 1, 1 << 20, usual)


def test_there_are_eight_sizes_for_each_factor_of_two() -> None:
    for pages in (64, 128, 1024):
        sizes = {class_bytes(count * PAGE_BYTES, 1 << 30) for count in range(pages + 1, 2 * pages + 1)}
        assert CLASSES_PER_FACTOR == len(sizes)


@given(largest=st.integers(1, 1 << 24), size=st.integers(1, 1 << 24))
def test_no_slot_is_larger_than_the_largest_block_needs(largest: int, size: int) -> None:
    assert class_bytes(min(size, largest), largest) <= -(-largest // PAGE_BYTES) * PAGE_BYTES


@given(
    needed=st.lists(st.integers(1, 6), max_size=12),
    sizes=st.lists(st.integers(1, 6), max_size=14),
)
def test_blocks_get_slots_of_their_size_else_larger_ones_while_there_are_any(
    needed: list[int], sizes: list[int]
) -> None:
    slots = [(size, number) for number, size in enumerate(sizes)]
    fitted = fit(needed, slots)
    assert len(fitted) == len(set(fitted.values()))
    assert all(sizes[slot] >= needed[position] for position, slot in fitted.items())
    left = sorted(sizes)
    possible = 0
    for size in sorted(needed):  # the smallest blocks into the smallest slots is the most there can be
        while left and left[0] < size:
            left.pop(0)
        if left:
            left.pop(0)
            possible += 1
    assert possible >= len(fitted)
    exact = sum(min(needed.count(size), sizes.count(size)) for size in set(needed))
    assert exact == sum(sizes[slot] == needed[position] for position, slot in fitted.items())
    free = [size for number, size in enumerate(sizes) if number not in fitted.values()]
    assert not [size for position, size in enumerate(needed) if position not in fitted and max(free, default=0) >= size]


def test_slots_of_the_right_size_go_in_order() -> None:
    assert {0: 7, 1: 3, 2: 8} == fit([2, 1, 2], [(2, 7), (1, 3), (2, 8)])
    assert {0: 9} == fit([3, 5], [(4, 9)])


def test_sizes_are_handed_out_where_most_blocks_fit_first() -> None:
    recent = RecentSizes()
    assert [100] == recent.in_order([10, 50, 100], 100)
    recent.note([30, 50, 40])
    assert [50, 100, 40, 30] == recent.in_order([10, 30, 40, 50, 100], 100)
    recent.note([10] * 64)
    assert (10, [10, 30, 50]) == (recent.largest(100), recent.in_order([50, 30, 10], 100))
