"""What a node tells of what it holds, against a naive model: random events, failed calls, snapshots, lost groups."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.cluster.announcements import Announcements
from kvstore.cluster.directory import key_group
from kvstore.events import Event, EventKind
from kvstore.types import Tier

NAMESPACES = (b"n" * 16, b"m" * 16)
BLOCKS = 6  # of each path
BLOCK_TOKENS = 4
ANNOUNCE_TOKENS = 8
YOUNG_SECONDS = 2.0


def key_of(ns_id: bytes, depth: int) -> bytes:
    return bytes([depth * 40 + ns_id[0] % 7]) * 16


class AnnouncementsMachine(RuleBasedStateMachine):
    """One path of blocks in each of two namespaces; the directory is what is left of the calls that went well."""

    @initialize()
    def begin(self) -> None:
        self.announcements = Announcements(ANNOUNCE_TOKENS, YOUNG_SECONDS, gone_max=1000)
        self.held = dict.fromkeys(NAMESPACES, 0)  # blocks of the path
        self.directory: set[bytes] = set()
        self.now = 0.0
        self.stored_at: dict[bytes, float] = {}
        self.sequence = 0

    def boundaries(self) -> set[bytes]:
        return {
            key_of(ns_id, depth)
            for ns_id, count in self.held.items()
            for depth in range(count)
            if (depth + 1) * BLOCK_TOKENS % ANNOUNCE_TOKENS == 0
        }

    def apply(self, kind: EventKind, ns_id: bytes, **fields: object) -> None:
        self.sequence += 1
        self.announcements.apply(Event(self.sequence, kind, ns_id, **fields), self.now)

    @rule(ns_id=st.sampled_from(NAMESPACES), count=st.integers(1, BLOCKS))
    def store(self, ns_id: bytes, count: int) -> None:
        first = self.held[ns_id]
        keys = tuple(key_of(ns_id, depth) for depth in range(first, min(BLOCKS, first + count)))
        if keys:
            self.held[ns_id] += len(keys)
            self.stored_at.update(dict.fromkeys(keys, self.now))
            self.apply(EventKind.STORED, ns_id, tier=Tier.HOST, keys=keys, first_block=first, block_tokens=BLOCK_TOKENS)

    @rule(ns_id=st.sampled_from(NAMESPACES))
    def demote(self, ns_id: bytes) -> None:
        keys = tuple(key_of(ns_id, depth) for depth in range(self.held[ns_id]))
        self.apply(EventKind.STORED, ns_id, tier=Tier.DISK, keys=keys)
        self.apply(EventKind.REMOVED, ns_id, tier=Tier.HOST, keys=keys)

    @rule(ns_id=st.sampled_from(NAMESPACES), count=st.integers(1, BLOCKS))
    def lose(self, ns_id: bytes, count: int) -> None:
        left = max(0, self.held[ns_id] - count)
        keys = tuple(key_of(ns_id, depth) for depth in range(left, self.held[ns_id]))
        self.held[ns_id] = left
        self.apply(EventKind.REMOVED, ns_id, keys=keys, last_copy=True)

    @rule(ns_id=st.sampled_from(NAMESPACES))
    def clear(self, ns_id: bytes) -> None:
        self.held[ns_id] = 0
        self.apply(EventKind.CLEARED, ns_id)

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(does_work=st.booleans(), is_done=st.booleans(), limit=st.integers(1, 5))
    def tell(self, does_work: bool, is_done: bool, limit: int) -> None:
        """A call that fails may have been done or not."""
        self.announcements.mature(self.now)
        gone, due = self.announcements.take_gone(limit), self.announcements.take_due(limit)
        if does_work or is_done:
            self.directory -= set(gone)
            self.directory |= set(due)
        if not does_work:
            self.announcements.withdraw_again(gone)
            self.announcements.tell_again(due)

    @precondition(lambda self: self.directory)
    @rule(group=st.integers(0, 63))
    def lose_a_group(self, group: int) -> None:
        self.directory = {key for key in self.directory if key_group(key) != group}
        self.announcements.tell_groups_again([group])

    @rule()
    def look_through_the_store(self) -> None:
        self.announcements.begin_snapshot()
        for ns_id in NAMESPACES:
            prefixes = {key_of(ns_id, depth) for depth in range(self.held[ns_id])}
            self.announcements.add_snapshot(ns_id, sorted(self.boundaries() & prefixes))
        self.announcements.end_snapshot()

    @rule()
    def lose_events_and_look(self) -> None:
        for ns_id in NAMESPACES:
            self.held[ns_id] = BLOCKS - self.held[ns_id]
        self.look_through_the_store()

    @invariant()
    def what_waits_is_bounded(self) -> None:
        assert self.announcements.waiting <= 2 * BLOCKS * len(NAMESPACES)

    @invariant()
    def all_is_right_once_it_was_told(self) -> None:
        """On a copy of the state, as if time went by and every call worked from now on."""
        rest = Announcements(ANNOUNCE_TOKENS, YOUNG_SECONDS, gone_max=1000)
        for name in ("_young", "_due", "_told", "_gone"):
            setattr(rest, name, getattr(self.announcements, name).copy())
        rest.mature(self.now + 10.0)
        found = (self.directory - set(rest.take_gone(1000))) | set(rest.take_due(1000))
        assert self.boundaries() == found
        assert len(found) == rest.told


AnnouncementsMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAnnouncements = AnnouncementsMachine.TestCase


def test_a_boundary_is_told_only_after_a_while_or_a_move():
    announcements = Announcements(ANNOUNCE_TOKENS, YOUNG_SECONDS, gone_max=10)
    ns_id = NAMESPACES[0]
    keys = tuple(key_of(ns_id, depth) for depth in range(4))
    announcements.apply(
        Event(1, EventKind.STORED, ns_id, tier=Tier.HOST, keys=keys, first_block=0, block_tokens=BLOCK_TOKENS), 10.0
    )
    announcements.mature(11.9)
    assert [] == announcements.take_due(10)
    announcements.apply(Event(2, EventKind.STORED, ns_id, tier=Tier.DISK, keys=(keys[3],)), 11.9)
    assert [keys[3]] == announcements.take_due(10)
    announcements.mature(12.0)
    assert [keys[1]] == announcements.take_due(10)


def test_only_the_last_ones_to_go_are_remembered():
    announcements = Announcements(ANNOUNCE_TOKENS, 0.0, gone_max=2)
    ns_id = NAMESPACES[0]
    keys = tuple(bytes([number]) * 16 for number in range(8))
    announcements.apply(
        Event(1, EventKind.STORED, ns_id, tier=Tier.HOST, keys=keys, first_block=0, block_tokens=BLOCK_TOKENS), 0.0
    )
    announcements.mature(0.0)
    assert list(keys[1::2]) == announcements.take_due(10)
    announcements.apply(Event(2, EventKind.REMOVED, ns_id, keys=keys, last_copy=True), 0.0)
    assert [keys[5], keys[7]] == announcements.take_gone(10)
