"""The directory in Valkey against the naive model of that in memory, but for time, which no test can move there."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, ClassVar

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from kvstore.clock import SystemClock
from kvstore.cluster.directory import NodeProfile
from kvstore.cluster.valkey_address import parse_valkey_address
from kvstore.cluster.valkey_directory import DirectoryTimes, ValkeyDirectory
from kvstore.cluster.valkey_link import LinkOptions, ValkeyLink
from kvstore.testing.directory_model import DirectoryMachine

if TYPE_CHECKING:
    from kvstore.cluster.directory import Membership
    from kvstore.testing.valkey_server import ValkeyServer


class HurriedClock:
    """An hour passes between any two looks at it, so that nothing known before is new enough."""

    def __init__(self) -> None:
        self._hours = itertools.count()

    def monotonic(self) -> float:
        return next(self._hours) * 3600.0

    def unix(self) -> float:
        return next(self._hours) * 3600.0


class ValkeyMachine(DirectoryMachine):
    can_wait = False
    url = ""
    numbers: ClassVar = itertools.count()

    def open_directory(self) -> None:
        self.link = ValkeyLink(parse_valkey_address(self.url), LinkOptions(timeout_seconds=30.0), SystemClock())
        self.name = f"model{next(self.numbers)}"

    def new_member(self) -> Membership:
        return ValkeyDirectory(self.link, self.name, DirectoryTimes(lease_seconds=600.0), HurriedClock())

    def is_about(self, expected: float, actual: float) -> bool:
        return 0 < actual <= expected

    def teardown(self) -> None:
        self.link.close()


SETTINGS = settings(max_examples=10, stateful_step_count=25, deadline=None)


def test_valkey_answers_as_the_model(valkey: ValkeyServer):
    ValkeyMachine.url = valkey.url
    run_state_machine_as_test(ValkeyMachine, settings=SETTINGS)


def test_a_valkey_cluster_answers_as_the_model(cluster_url: str):
    ValkeyMachine.url = cluster_url
    run_state_machine_as_test(ValkeyMachine, settings=settings(SETTINGS, max_examples=4))


@pytest.mark.parametrize("count", [20, 25])
def test_an_entry_keeps_the_holders_that_told_last(valkey: ValkeyServer, open_directory, count: int):
    key = b"k" * 16
    directories = [open_directory(valkey.url, f"last{count}") for _ in range(count)]
    slots = [directory.join(NodeProfile(f"n{number}", b"1")).slot for number, directory in enumerate(directories)]
    for directory in directories:
        directory.announce([key])
    assert set(slots[-20:]) == directories[-1].holders([key])[0]
