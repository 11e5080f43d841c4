"""The directory in memory against the model of all directories, and how much it keeps."""

from __future__ import annotations

from hypothesis import settings

from kvstore.cluster.directory import HOLDERS_MAX, NodeProfile
from kvstore.cluster.memory_directory import MemoryDirectory, SharedDirectory
from kvstore.testing.directory_model import ENTRY_SECONDS, KEYS, LEASE_SECONDS, DirectoryMachine
from kvstore.testing.manual_clock import ManualClock


class MemoryMachine(DirectoryMachine):
    def open_directory(self) -> None:
        self.shared = SharedDirectory(self.clock, lease_seconds=LEASE_SECONDS, entry_seconds=ENTRY_SECONDS)

    def new_member(self) -> MemoryDirectory:
        return MemoryDirectory(self.shared)


MemoryMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestMemoryDirectory = MemoryMachine.TestCase


def test_an_entry_keeps_the_holders_told_of_last():
    shared = SharedDirectory(ManualClock())
    nodes = []
    for number in range(HOLDERS_MAX + 5):
        directory = MemoryDirectory(shared)
        nodes.append(directory.join(NodeProfile(f"n{number}", b"1")))
        directory.announce([KEYS[0]])
    assert {node.slot for node in nodes[5:]} == directory.holders([KEYS[0]])[0]


def test_entries_told_of_longest_ago_make_room():
    shared = SharedDirectory(ManualClock(), entries_max=2)
    directory = MemoryDirectory(shared)
    slot = directory.join(NodeProfile("a", b"1")).slot
    directory.announce(KEYS[:3])
    assert [frozenset(), {slot}, {slot}] == list(directory.holders(KEYS[:3]))
