from __future__ import annotations

from kvstore.store.budget import StoreBudget, default_bytes_per_second

MIB = 1 << 20
MOST = 512 * MIB


def test_a_budget_begins_with_what_host_memory_holds_and_a_minimum():
    assert MOST == StoreBudget(1, MOST, 0).left(0).left_bytes
    assert 256 * MIB == StoreBudget(1, 1000, 0).left(0).left_bytes


def test_a_budget_fills_with_time_up_to_its_most():
    budget = StoreBudget(10 * MIB, MOST, 5)
    budget.spend(MOST)
    assert 0 == budget.left(5).left_bytes
    assert 20 * MIB == budget.left(7).left_bytes
    assert MOST == budget.left(1000).left_bytes
    assert MOST == budget.left(1000).most_bytes


def test_the_last_block_may_take_more_than_is_left_and_is_waited_for():
    budget = StoreBudget(10 * MIB, MOST, 0)
    budget.spend(MOST + 10 * MIB)
    assert 0 == budget.left(1).left_bytes
    assert 10 * MIB == budget.left(2).left_bytes


def test_what_is_loaded_earns_twenty_times_as_much_and_what_found_no_room_comes_back():
    budget = StoreBudget(1, MOST, 0)
    budget.spend(MOST)
    budget.earn(MIB)
    assert 20 * MIB == budget.left(0).left_bytes
    budget.refund(5 * MIB)
    assert 25 * MIB == budget.left(0).left_bytes
    budget.earn(MOST)
    assert MOST == budget.left(0).left_bytes


def test_without_reuse_a_four_hundredth_of_the_bandwidth_of_memory_is_stored():
    # Machines copy between 1 and 200 GB a second with one thread.
    assert 1e8 < 10 * default_bytes_per_second() < 2e11
    assert default_bytes_per_second() == default_bytes_per_second()
