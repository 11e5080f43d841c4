"""The directory of a simulated cluster, with what can happen to it and on the way there.

It is the one in memory, with the marks by which the one in Valkey finds out that it has lost something, on a clock of
its own that may jump.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from kvstore.cluster.directory import ALL_GROUPS, GROUPS, Renewal, key_group
from kvstore.cluster.memory_directory import MemoryClaim, MemoryDirectory, SharedDirectory
from kvstore.errors import DirectoryUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from random import Random

    from kvstore.clock import Clock
    from kvstore.cluster.directory import NodeProfile
    from kvstore.nodes import Node, NodeReport

Answer = TypeVar("Answer")
_TURNS = 3  # renewals in which the marks of all groups are looked at once


class JumpingClock:
    """Another clock, a bit off; `jump` moves it at once."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._off_seconds = 0.0
        self._latest = 0.0  # that it ever read at a jump

    def jump(self, seconds: float) -> None:
        """Forth, or back where it is less than 0."""
        self._latest = max(self._latest, self.monotonic())
        self._off_seconds += seconds

    @property
    def behind_seconds(self) -> float:
        """How long until it is as late as it was once: what was to end then, ends so much later."""
        return max(0.0, self._latest - self.monotonic())

    def monotonic(self) -> float:
        """See Clock."""
        return self._clock.monotonic() + self._off_seconds

    def unix(self) -> float:
        """See Clock."""
        return self._clock.unix() + self._off_seconds


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a dump of the directory has."""

    leases: dict[int, Any]
    free_from: dict[int, float]
    entries: OrderedDict[bytes, dict[int, float]]
    claims: dict[bytes, Any]
    marks: dict[tuple[int, int], tuple[int, float]]


class WorldDirectory:
    """What the nodes of one world share, and copies of it from before."""

    def __init__(self, clock: Clock, lease_seconds: float) -> None:
        self.clock = JumpingClock(clock)
        self.shared = SharedDirectory(self.clock, lease_seconds)
        self.marks: dict[tuple[int, int], tuple[int, float]] = {}  # by slot and group: how many writes, and when last
        self._kept = self._copy()

    def save(self) -> None:
        """What is there now is what `set_back` brings back."""
        self._kept = self._copy()

    def set_back(self) -> None:
        """The last writes are lost; all of them where nothing was saved."""
        kept, shared = self._kept, self.shared
        shared.leases, shared.free_from, shared.entries = kept.leases, kept.free_from, kept.entries
        shared.claims, self.marks = kept.claims, kept.marks
        self._kept = self._copy()

    def _copy(self) -> _Kept:
        shared = self.shared
        return _Kept(
            {slot: copy.copy(lease) for slot, lease in shared.leases.items()},
            dict(shared.free_from),
            OrderedDict((key, dict(slots)) for key, slots in shared.entries.items()),
            dict(shared.claims),
            dict(self.marks),
        )


@dataclass(slots=True)
class Road:
    """The way from one node to the directory: what becomes of its calls."""

    random: Random
    is_cut: bool = False
    loses_answers: bool = False  # calls arrive and are done
    doubles_ratio: float = 0.0  # of calls that arrive twice
    calls: int = 0

    def travel(self, call: Callable[[], Answer]) -> Answer:
        """Make a call there."""
        self.calls += 1
        if self.is_cut:
            raise DirectoryUnavailableError("the directory cannot be reached")
        answer = call()
        if self.random.random() < self.doubles_ratio:
            answer = call()
        if self.loses_answers:
            raise DirectoryUnavailableError("the directory did not answer")
        return answer


@dataclass(slots=True)
class _Marks:
    """What a node last wrote to each group: for sure, and perhaps, where a call had no answer."""

    told: dict[int, tuple[int, int]] = field(default_factory=dict)
    is_lost: bool = False
    turn: int = 0


class WorldMembership(MemoryDirectory):
    """One node's Membership there; see ValkeyDirectory, which finds by the same marks what was lost."""

    def __init__(self, directory: WorldDirectory, road: Road) -> None:
        super().__init__(directory.shared)
        self._directory = directory
        self._road = road
        self._own_marks = _Marks()

    def join(self, profile: NodeProfile) -> Node:
        """See Membership."""
        self._own_marks = _Marks()
        return self._road.travel(lambda: super(WorldMembership, self).join(profile))

    def renew(self, report: NodeReport) -> Renewal:
        """See Membership."""
        renewal = self._road.travel(lambda: super(WorldMembership, self).renew(report))
        marks = self._own_marks
        if not renewal.lost:
            marks.turn = (marks.turn + 1) % _TURNS
            self._write(range(marks.turn, GROUPS, _TURNS), lambda: None)
            if not marks.is_lost:
                return renewal
            with self._shared.lock:
                self._shared.end(renewal.node.slot)
            renewal = super().renew(report)
        self._own_marks = _Marks()
        return Renewal(renewal.node, ALL_GROUPS)

    def announce(self, keys: Sequence[bytes]) -> None:
        """See Membership."""
        self._write(_groups(keys), lambda: super(WorldMembership, self).announce(keys))

    def withdraw(self, keys: Sequence[bytes]) -> None:
        """See Membership."""
        self._write(_groups(keys), lambda: super(WorldMembership, self).withdraw(keys))

    def nodes(self) -> Sequence[Node]:
        """See Directory."""
        return self._road.travel(super().nodes)

    def holders(self, keys: Sequence[bytes]) -> Sequence[frozenset[int]]:
        """See Directory."""
        return self._road.travel(lambda: super(WorldMembership, self).holders(keys))

    def claim(self, key: bytes, seconds: float) -> MemoryClaim | None:
        """See Directory."""
        return self._road.travel(lambda: super(WorldMembership, self).claim(key, seconds))

    def claimed(self, key: bytes) -> float | None:
        """See Directory."""
        return self._road.travel(lambda: super(WorldMembership, self).claimed(key))

    def _write(self, groups: Iterable[int], call: Callable[[], None]) -> None:
        """Do a call, and see whether the marks of its groups are as this node left them."""
        own, there = self._own_marks, self._directory.marks
        slot = self._joined().slot
        expected = {group: own.told.get(group, (0, 0)) for group in groups}
        own.told.update({group: (sure, sent + 1) for group, (sure, sent) in expected.items()})

        def write() -> bool:
            call()
            now = self._shared.clock.monotonic()
            found = {group: there.get((slot, group), (0, now)) for group in expected}
            there.update({(slot, group): (sent + 1, now) for group, (_, sent) in expected.items()})
            return all(self._is_as_left(*found[group], *expected[group], now) for group in expected)

        own.is_lost |= not self._road.travel(write)
        own.told.update({group: (sent + 1, sent + 1) for group, (_, sent) in expected.items()})

    def _is_as_left(self, count: int, told_at: float, sure: int, sent: int, now: float) -> bool:
        is_of_last_owner = sure == 0 and now - told_at > self._shared.entry_seconds
        return is_of_last_owner or sure <= count <= sent


def _groups(keys: Iterable[bytes]) -> list[int]:
    return sorted({key_group(key) for key in keys})
