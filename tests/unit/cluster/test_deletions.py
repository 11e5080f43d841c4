"""Deletions of namespaces: every node applies each once, whoever was away, was killed, or had no directory."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.cluster.deletions import Deletions
from kvstore.cluster.directory import DELETIONS_MAX
from kvstore.cluster.memory_directory import MemoryDirectory, SharedDirectory
from kvstore.errors import DirectoryUnavailableError, InvalidArgumentError, StorageError
from kvstore.testing.manual_clock import ManualClock

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

NS_IDS = [bytes([number]) * 16 for number in range(3)]


class NaiveStore:
    """Values by namespace; a deletion may fail."""

    def __init__(self) -> None:
        self.held: dict[bytes, list[int]] = {}
        self.drops = 0
        self.fails = False

    def delete_namespace(self, ns_id: bytes) -> int:
        if self.fails:
            raise StorageError("the disk is gone")
        self.drops += 1
        return len(self.held.pop(ns_id, []))


class Directory(MemoryDirectory):
    """One that may be unreachable for one node."""

    is_down = False

    def bury(self, epochs: Mapping[bytes, int]) -> Mapping[bytes, int]:
        if self.is_down:
            raise DirectoryUnavailableError("nobody is there")
        return super().bury(epochs)


class NaiveNode:
    def __init__(self, shared: SharedDirectory, clock: ManualClock, path: Path | None = None) -> None:
        self.store = NaiveStore()
        self.directory = Directory(shared)
        self.clock, self.path = clock, path
        self.start()

    def start(self) -> None:
        self.deletions = Deletions(self.store, self.directory, self.path, self.clock)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def shared(clock: ManualClock) -> SharedDirectory:
    return SharedDirectory(clock)


def test_a_node_that_was_away_applies_what_it_missed_once(shared: SharedDirectory, clock: ManualClock) -> None:
    one, other = NaiveNode(shared, clock), NaiveNode(shared, clock)
    other.store.held[NS_IDS[0]] = [1, 2]
    done = one.deletions.delete(NS_IDS[0])
    assert (True, 0) == (done.is_told, other.deletions.applied_epoch)
    other.deletions.sync()
    assert ({}, done.epoch) == (other.store.held, other.deletions.applied_epoch)
    other.store.held[NS_IDS[0]] = [3]  # what is stored behind it stays
    other.deletions.sync()
    assert [3] == other.store.held[NS_IDS[0]]


def test_a_directory_that_was_lost_is_told_again(shared: SharedDirectory, clock: ManualClock) -> None:
    one = NaiveNode(shared, clock)
    done = one.deletions.delete(NS_IDS[0])
    shared.deletions = {}
    one.deletions.sync()
    assert {NS_IDS[0]: done.epoch} == shared.deletions


def test_one_made_while_the_directory_is_down_is_told_later(shared: SharedDirectory, clock: ManualClock) -> None:
    one = NaiveNode(shared, clock)
    one.directory.is_down = True
    one.store.held[NS_IDS[0]] = [1]
    done = one.deletions.delete(NS_IDS[0])
    assert (False, 1, {}) == (done.is_told, done.blocks, shared.deletions)
    one.directory.is_down = False
    one.deletions.sync()
    assert {NS_IDS[0]: done.epoch} == shared.deletions


def test_one_that_could_not_be_applied_is_neither_said_to_be_nor_forgotten(
    shared: SharedDirectory, clock: ManualClock, tmp_path: Path
) -> None:
    node = NaiveNode(shared, clock, tmp_path / "deletions.json")
    node.store.held[NS_IDS[0]] = [1]
    node.store.fails = True
    with pytest.raises(StorageError, match="the disk is gone"):
        node.deletions.delete(NS_IDS[0])
    assert node.deletions.known(NS_IDS[0])
    assert 0 == node.deletions.applied(NS_IDS[0]) == node.deletions.applied_epoch
    node.store.fails = False
    node.start()  # as after kill -9
    node.deletions.sync()
    assert {} == node.store.held
    assert node.deletions.known(NS_IDS[0]) == node.deletions.applied_epoch


def test_epochs_grow_though_the_clock_goes_back(shared: SharedDirectory, clock: ManualClock) -> None:
    node, other = NaiveNode(shared, clock), NaiveNode(shared, ManualClock())
    shared.deletions = {NS_IDS[1]: 1 << 52}
    node.deletions.sync()
    assert node.deletions.delete(NS_IDS[0]).epoch > 1 << 52
    assert other.deletions.delete(NS_IDS[0]).epoch > node.deletions.known(NS_IDS[0])  # though it had not heard of it


def test_those_made_last_are_remembered(shared: SharedDirectory, clock: ManualClock) -> None:
    shared.deletions = {number.to_bytes(16, "big"): number + 1 for number in range(DELETIONS_MAX)}
    node = NaiveNode(shared, clock)
    node.deletions.sync()
    node.deletions.delete(NS_IDS[1])
    assert DELETIONS_MAX == len(shared.deletions)
    assert (0, 2) == (node.deletions.known(bytes(16)), node.deletions.known((1).to_bytes(16, "big")))


def test_what_is_no_id_is_refused_and_a_file_that_is_none_named(
    shared: SharedDirectory, clock: ManualClock, tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgumentError, match="ns_id has 3 bytes, expected 16"):
        NaiveNode(shared, clock).deletions.delete(b"abc")
    path = tmp_path / "deletions.json"
    path.write_text(json.dumps({"known": 5}))
    with pytest.raises(StorageError, match=r"deletions\.json cannot be used"):
        NaiveNode(shared, clock, path)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["store", "delete", "sync", "restart", "down", "up", "lose"]),
        st.integers(0, 2),
        st.sampled_from(NS_IDS),
    ),
    max_size=40,
)


@given(STEPS)
def test_when_all_have_heard_nothing_stored_before_a_deletion_is_left(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, bytes]]
) -> None:
    clock = ManualClock()
    shared, folder = SharedDirectory(clock), tmp_path_factory.mktemp("d")
    nodes = [NaiveNode(shared, clock, folder / f"{number}.json") for number in range(3)]
    latest: dict[bytes, int] = {}
    for time, (step, number, ns_id) in enumerate(steps):
        node = nodes[number]
        clock.advance(1.0)
        if step == "store":
            node.store.held.setdefault(ns_id, []).append(time)
        elif step == "delete":
            node.deletions.delete(ns_id)
            latest[ns_id] = time
        elif step == "sync":
            node.deletions.sync()
        elif step == "restart":
            node.start()
        elif step == "lose":
            shared.deletions = {}
        else:
            node.directory.is_down = step == "down"
    for node in [*nodes, *nodes]:
        node.directory.is_down = False
        node.deletions.sync()
    for node in nodes:
        for ns_id, at in latest.items():
            assert all(stored > at for stored in node.store.held.get(ns_id, []))
        assert 1 == len({other.deletions.applied_epoch for other in nodes})
