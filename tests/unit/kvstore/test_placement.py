"""Each decision as a table: what is known, and what follows."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.store.placement import (
    NO_PARENT,
    USES_WORTH_WRITING,
    Budget,
    DiskAdmission,
    DiskTerms,
    Leaving,
    StoreRequest,
    admit_disk,
    admit_host,
    demote,
    leading,
    may_leave,
    prefetch_blocks,
    prefetch_price,
    promote,
    room_price,
    shortage,
)


@pytest.mark.parametrize(
    ("count", "present", "left_bytes", "expected"),
    [
        (10, 0, 1000, 10),  # a full bucket
        (10, 0, 320, 1),  # what begins anew leaves a quarter of 1000 to others
        (10, 0, 312, 0),  # and waits for a sixteenth of it
        (10, 0, 470, 4),
        (10, 3, 250, 5),  # what continues a stored prefix may have all of it
        (10, 3, 63, 1),
        (10, 3, 62, 0),
        (1, 3, 50, 1),  # all that there is to store is enough
        (1, 3, 49, 0),
        (10, 3, -20, 0),
        (0, 3, 1000, 0),
        (2, 3, 1000, 2),
    ],
)
def test_the_head_of_what_is_new_is_taken_while_the_budget_lasts(count, present, left_bytes, expected):
    assert expected == admit_host(StoreRequest(count, 50, present), Budget(left_bytes, 1000))


def test_a_block_larger_than_the_budget_is_taken_all_the_same():
    assert 1 == admit_host(StoreRequest(3, 5000, 1), Budget(63, 1000))


@pytest.mark.parametrize(
    ("has_disk", "is_owed", "expected"),
    [(False, False, 3.5), (True, False, inf), (False, True, inf), (True, True, inf)],
)
def test_where_what_leaves_is_lost_no_more_is_paid_than_the_new_blocks_are_worth(has_disk, is_owed, expected):
    assert expected == room_price(3.5, has_disk=has_disk, is_owed=is_owed)


@pytest.mark.parametrize(
    ("worth", "price", "expected"), [(1, 1, True), (1.009, 1, True), (1.02, 1, False), (9, inf, True)]
)
def test_what_is_worth_no_more_may_leave(worth, price, expected):
    assert expected == may_leave(worth, price)


@pytest.mark.parametrize(
    ("values", "worth", "expected"),
    [
        ([5.0, 4.0], 4.1, False),
        ([5.0, 4.0], 3.9, True),
        ([2.0**46], 2.0**46 + 1, False),
        ([2.0**46], 2.0**46 - 1, True),
    ],
)
def test_a_prefetch_drives_out_what_is_worth_less_than_all_of_it(values, worth, expected):
    assert expected == may_leave(worth, prefetch_price(np.array(values)))


@pytest.mark.parametrize(
    ("givers", "price", "at_limit", "expected"),
    [
        ([5.0, 2.0], 1.0, False, "not_worth"),
        ([5.0, 1.0], 1.0, False, "host_full"),
        ([5.0, 1.0], 1.0, True, "quota"),
        ([], 1.0, False, "host_full"),
        ([], 1.0, True, "quota"),
    ],
)
def test_a_shortage_has_one_reason(givers, price, at_limit, expected):
    assert expected == shortage(givers, price, at_limit=at_limit)


def leaving(uses, values=None, carries=None, parents=None) -> Leaving:
    count = len(uses)
    return Leaving(
        uses=np.array(uses, dtype=np.uint16),
        values=np.array(values or [0.0] * count),
        carries=np.array(carries or [False] * count, dtype=np.bool_),
        parents=np.array(parents or [NO_PARENT] * count, dtype=np.intp),
    )


ROOM = DiskTerms(None, None)
FULL = DiskTerms(2.0, None)


@pytest.mark.parametrize(
    ("rule", "blocks", "terms", "expected"),
    [
        ("demotion", leaving([1, 1]), FULL, [True, True]),
        ("write_through", leaving([1, 1]), FULL, [True, True]),
        ("reuse", leaving([1, 2, 3]), ROOM, [False, True, True]),
        ("worth", leaving([1, 1], values=[0.0, 9.0]), ROOM, [True, True]),  # it drives nobody out
        ("worth", leaving([1, 1, 1], values=[1.0, 2.0, 3.0]), FULL, [False, False, True]),
        ("worth", leaving([1, 1], values=[3.0, 4.0]), DiskTerms(2.0, USES_WORTH_WRITING / 4.0), [False, True]),
        # Something below it lies on disk, and would be lost with it.
        ("reuse", leaving([1, 1], carries=[True, False]), ROOM, [True, False]),
        # What is above an admitted block goes, too, however little it is worth itself; the others do not.
        (
            "worth",
            leaving([1, 1, 1], values=[3.0, 1.0, 1.0], parents=[1, NO_PARENT, NO_PARENT]),
            FULL,
            [True, True, False],
        ),
        ("reuse", leaving([2, 1, 1, 1], parents=[2, 3, 3, NO_PARENT]), ROOM, [True, False, True, True]),
        ("reuse", leaving([]), ROOM, []),
    ],
)
def test_a_rule_admits_to_disk(rule, blocks, terms, expected):
    assert expected == admit_disk(DiskAdmission(rule), blocks, terms).tolist()


@given(st.data(), st.sampled_from(DiskAdmission))
def test_what_is_admitted_has_no_holes_above_it(data, rule):
    count = data.draw(st.integers(1, 12))
    numbers = st.lists(st.integers(0, 3), min_size=count, max_size=count)
    parents = [data.draw(st.sampled_from([NO_PARENT, *range(index + 1, count)])) for index in range(count)]
    blocks = leaving(data.draw(numbers), data.draw(numbers), [flag > 2 for flag in data.draw(numbers)], parents)
    admitted = admit_disk(rule, blocks, DiskTerms(data.draw(st.sampled_from([None, 1.5])), None))
    assert [] == [
        index for index in range(count) if admitted[index] and parents[index] >= 0 and not admitted[parents[index]]
    ]
    assert admitted[blocks.carries].all()


@pytest.mark.parametrize(
    ("on_disk", "admitted", "expected"),
    [
        ([False, False, False], [True, True, True], [2, 1, 0]),  # given deeper ones first, written heads first
        ([False, True, False], [True, True, True], [2, 0]),  # one copy on disk is enough
        ([False, False, False], [False, False, True], [2]),
        ([True, True], [False, False], []),
        ([], [], []),
    ],
)
def test_what_is_admitted_and_not_there_is_written_heads_first(on_disk, admitted, expected):
    assert expected == demote(np.array(on_disk, dtype=np.bool_), np.array(admitted, dtype=np.bool_)).tolist()


@pytest.mark.parametrize(
    ("on_host", "room_blocks", "expected"),
    [
        ([True, False, False, False], 2, [1, 2]),
        ([False, True, False], 9, [0, 2]),  # a hole above is filled before what lies below it
        ([True, True], 9, []),
        ([False], 0, []),
        ([], 3, []),
    ],
)
def test_a_prefix_moves_up_from_its_head_on(on_host, room_blocks, expected):
    assert expected == promote(np.array(on_host, dtype=np.bool_), room_blocks).tolist()


@pytest.mark.parametrize(
    ("missing", "free_bytes", "expected"), [(5, 1000, 5), (5, 399, 3), (5, 99, 0), (5, -1, 0), (0, 1000, 0)]
)
def test_a_prefetch_brings_what_the_reserve_has_left(missing, free_bytes, expected):
    assert expected == prefetch_blocks(missing, 100, free_bytes)


@pytest.mark.parametrize(("mask", "expected"), [([True, True], 2), ([True, False, True], 1), ([False], 0), ([], 0)])
def test_only_the_leading_part_can_be_promised(mask, expected):
    assert expected == leading(np.array(mask, dtype=np.bool_))
