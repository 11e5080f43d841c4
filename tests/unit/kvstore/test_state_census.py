"""What is wrong with the sequence states of a namespace is found, also where the check is in slices and they change."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvstore.store import open_store
from kvstore.store.space import Space
from kvstore.store.state_census import StateCensus
from kvstore.store.state_records import StateRecords
from kvstore.store.states import StateTable, StoredState, path_of
from kvstore.testing.states import CUT_END, STATES
from kvstore.types import Tier

PIECE_BYTES = 4096
COUNT = 100
ROOT_KEY = b"root" * 4


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Space]:
    with open_store(tmp_path_factory.mktemp("states"), host_bytes=16 << 20, disk_bytes=16 << 20) as store:
        yield store._index.space(STATES)


@pytest.fixture
def table(space: Space) -> StateTable:
    """States of one to three pieces, every second one in both tiers."""
    return filled(StateTable(CUT_END, space.host, space.disk, StateRecords(b"key." * 4, PIECE_BYTES), 1 << 30))


def filled(table: StateTable) -> StateTable:
    for number in range(COUNT):
        pieces = 1 + number % 3
        path = path_of(np.arange(number % 7, 10 + number, dtype=np.uint32))
        state = table.records.make(ROOT_KEY, path, pieces * PIECE_BYTES, number)
        slots = np.arange(4 * number, 4 * number + pieces, dtype=np.uint32)
        state.slots = {tier: slots + tier.value for tier in (Tier.HOST, Tier.DISK)[: 1 + number % 2]}
        assert [] == table.add(state)
    return table


def problems_of(table: StateTable, between: Callable[[], object] = lambda: None) -> list[str]:
    """What a check finds where something is done after each slice."""
    census = table.census()
    found = census.problems(table.records)
    owners: dict[tuple[Tier, int], StoredState] = {}
    for listed in census.slices(table.records):
        found += table.problems(listed, owners)
        between()
    return found


def first_of(table: StateTable) -> StoredState:
    return table.all()[0]


def swap_two(table: StateTable) -> None:
    root = table._roots[ROOT_KEY]
    for column in (root.paths, root.states):
        column[3], column[4] = column[4], column[3]


def give_its_slot_away(table: StateTable) -> None:
    one, other = table.all()[3], table.all()[50]
    other.slots[Tier.HOST] = one.slots[Tier.HOST][:1].repeat(other.slots[Tier.HOST].size)


def lose_by_path(table: StateTable) -> None:
    table._roots[ROOT_KEY].remove(first_of(table))


def lose_by_id(table: StateTable) -> None:
    del table._states[first_of(table).state_id]


def lose_its_place_to_leave(table: StateTable) -> None:
    del table._order[Tier.HOST][first_of(table).state_id]


def lose_its_slots(table: StateTable) -> None:
    first_of(table).slots.clear()


def lose_a_tier(table: StateTable) -> None:
    del table.all()[1].slots[Tier.DISK]


def miscount_pieces(table: StateTable) -> None:
    table._pieces[Tier.DISK] += 1


def miscount_bytes(table: StateTable) -> None:
    table.index_bytes -= 1


def keep_a_path_of_nobody(table: StateTable) -> None:
    table._roots[ROOT_KEY].paths[0] = b"\0" * 4


@pytest.mark.parametrize(
    "damage",
    [
        swap_two,
        give_its_slot_away,
        lose_by_path,
        lose_by_id,
        lose_its_place_to_leave,
        lose_its_slots,
        lose_a_tier,
        miscount_pieces,
        miscount_bytes,
        keep_a_path_of_nobody,
    ],
)
def test_planted_damage_is_found(table: StateTable, damage: Callable[[StateTable], None]) -> None:
    assert [] == problems_of(table)
    damage(table)
    assert problems_of(table)


def test_a_slice_is_bounded_in_states_and_pieces(table: StateTable) -> None:
    slices = list(table.census().slices(table.records))
    assert table.census().by_path == [state for listed in slices for state in listed]
    assert max(map(len, slices)) <= 32
    wide = table.records.make(ROOT_KEY, path_of(np.arange(3, dtype=np.uint32)), 5000 * PIECE_BYTES, 0)
    table.add(wide)
    assert [[wide]] == [listed for listed in table.census().slices(table.records) if wide in listed]


def test_states_that_come_and_go_meanwhile_are_no_damage(table: StateTable) -> None:
    """Each time one leaves, and its slots are another's at once, and one leaves a tier."""
    counted = iter(range(COUNT, 2 * COUNT))

    def change() -> None:
        number = next(counted)
        gone = table.all()[0]
        slots = gone.slots[Tier.HOST]
        table.forget([gone])
        path = path_of(np.arange(number % 7, 10 + number, dtype=np.uint32))
        heir = table.records.make(ROOT_KEY, path, slots.size * PIECE_BYTES, number)
        heir.slots = {Tier.HOST: slots}
        table.add(heir)
        for state in table.all():
            if len(state.slots) == 2:
                table.hold(state)
                table.leave(state, Tier.DISK)
                return

    assert [] == problems_of(table, change)
    assert [] == problems_of(table)


def test_a_census_is_of_one_moment(table: StateTable) -> None:
    census = table.census()
    table.forget(table.all()[:50])
    assert [] == census.problems(table.records)
    assert COUNT == len(census.by_path)
    assert StateCensus([], [], {Tier.HOST: [], Tier.DISK: []}, {Tier.HOST: 0, Tier.DISK: 0}, 0) == _emptied(table)


def _emptied(table: StateTable) -> StateCensus:
    table.clear()
    return table.census()
