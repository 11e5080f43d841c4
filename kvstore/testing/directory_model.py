"""What every directory does, as a naive model: nodes come, go, say what they hold and claim, as time passes.

A subclass says how a directory is opened; every answer is compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.cluster.directory import Claim, Membership, NodeProfile
from kvstore.errors import DirectoryUnavailableError, NodeNameTakenError
from kvstore.nodes import NodeReport
from kvstore.testing.manual_clock import ManualClock

NAMES = ("a", "b", "c")
KEYS = [bytes([first]) * 16 for first in (0, 3, 4, 130, 255)]
LEASE_SECONDS = 10.0
ENTRY_SECONDS = 100.0


@dataclass
class NaiveMember:
    """One start of a node."""

    directory: Membership
    name: str
    identity: bytes
    slot: int
    incarnation: int
    until: float
    queue: int = 0
    is_superseded: bool = False  # by a later start of the same node
    told: dict[bytes, float] = field(default_factory=dict)  # until when each entry under its slot lasts
    is_in: bool = True


@dataclass
class NaiveClaim:
    key: bytes
    owner: NaiveMember
    until: float
    claim: Claim


class DirectoryMachine(RuleBasedStateMachine):
    """Every answer of the directory is compared with the model's."""

    can_wait = True

    @initialize()
    def open(self) -> None:
        self.clock = ManualClock()
        self.members: list[NaiveMember] = []
        self.claims: list[NaiveClaim] = []
        self.slots_since: dict[int, float] = {}  # when each slot was given back
        self.open_directory()

    def open_directory(self) -> None:
        """Begin with an empty one."""
        raise NotImplementedError

    def new_member(self) -> Membership:
        """What one start of a node uses."""
        raise NotImplementedError

    @property
    def now(self) -> float:
        return self.clock.monotonic()

    def living(self) -> list[NaiveMember]:
        for member in self.members:
            if member.is_in and member.until <= self.now:
                self.end(member)
        return [member for member in self.members if member.is_in]

    def end(self, member: NaiveMember) -> None:
        member.is_in = False
        member.told.clear()
        self.slots_since[member.slot] = self.now

    @rule(name=st.sampled_from(NAMES), identity=st.sampled_from([b"1", b"2"]))
    def join(self, name: str, identity: bytes) -> None:
        before = next((member for member in self.living() if member.name == name), None)
        directory = self.new_member()
        profile = NodeProfile(name, identity, (f"{name}:1",), 10, 20)
        if before is not None and before.identity != identity:
            try:
                directory.join(profile)
            except NodeNameTakenError:
                return
            raise AssertionError("a name of a living node was given away")
        if before is not None:
            self.end(before)
            before.is_superseded = True
        node = directory.join(profile)
        assert (name, (f"{name}:1",), 10, 20, 0) == (
            node.name,
            node.addresses,
            node.host_bytes,
            node.disk_bytes,
            node.queue,
        )
        self.check_slot(node.slot)
        assert node.incarnation not in [member.incarnation for member in self.members]
        self.members.append(
            NaiveMember(directory, name, identity, node.slot, node.incarnation, self.now + LEASE_SECONDS)
        )

    def check_slot(self, slot: int) -> None:
        assert slot not in [member.slot for member in self.living()]
        assert self.now >= self.slots_since.get(slot, -ENTRY_SECONDS) + ENTRY_SECONDS

    @precondition(lambda self: self.members)
    @rule(data=st.data(), queue=st.integers(0, 9))
    def renew(self, data: st.DataObject, queue: int) -> None:
        member = data.draw(st.sampled_from(self.members))
        living = self.living()
        rivals = [other for other in living if other.name == member.name and other is not member]
        if member.is_in:
            renewal = member.directory.renew(NodeReport(queue))
            assert (member.slot, member.incarnation, queue) == (
                renewal.node.slot,
                renewal.node.incarnation,
                renewal.node.queue,
            )
            assert not renewal.lost
        elif rivals or not member.until:
            try:
                member.directory.renew(NodeReport(queue))
            except (NodeNameTakenError, DirectoryUnavailableError):
                return
            raise AssertionError("a node renewed what it does not have")
        elif member.is_superseded:  # a process that its own next start has outlived is no more: nothing is promised
            return
        else:
            renewal = member.directory.renew(NodeReport(queue))
            assert member.incarnation == renewal.node.incarnation
            assert len(renewal.lost) == 64
            self.check_slot(renewal.node.slot)
            member.slot, member.is_in = renewal.node.slot, True
        member.until, member.queue = self.now + LEASE_SECONDS, queue

    @precondition(lambda self: self.living())
    @rule(data=st.data(), keys=st.lists(st.sampled_from(KEYS), unique=True))
    def announce(self, data: st.DataObject, keys: list[bytes]) -> None:
        member = data.draw(st.sampled_from(self.living()))
        member.directory.announce(keys)
        member.told.update(dict.fromkeys(keys, self.now + ENTRY_SECONDS))

    @precondition(lambda self: self.living())
    @rule(data=st.data(), keys=st.lists(st.sampled_from(KEYS)))
    def withdraw(self, data: st.DataObject, keys: list[bytes]) -> None:
        member = data.draw(st.sampled_from(self.living()))
        member.directory.withdraw(keys)
        for key in keys:
            member.told.pop(key, None)

    @precondition(lambda self: self.members)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        member = data.draw(st.sampled_from(self.members))
        is_in = member in self.living()
        member.directory.leave()
        member.until = 0.0
        if is_in:
            self.end(member)

    @precondition(lambda self: self.living())
    @rule(data=st.data(), key=st.sampled_from(KEYS), seconds=st.sampled_from([5.0, 30.0]))
    def claim(self, data: st.DataObject, key: bytes, seconds: float) -> None:
        member = data.draw(st.sampled_from(self.living()))
        held = self.claim_of(key)
        claim = member.directory.claim(key, seconds)
        assert (held is None) == (claim is not None)
        if claim is not None:
            self.claims = [other for other in self.claims if other.key != key]
            self.claims.append(NaiveClaim(key, member, self.now + seconds, claim))

    def claim_of(self, key: bytes) -> NaiveClaim | None:
        self.living()
        stands = (held for held in self.claims if held.key == key and held.until > self.now and held.owner.is_in)
        return next(stands, None)

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), seconds=st.sampled_from([5.0, 30.0]))
    def renew_a_claim(self, data: st.DataObject, seconds: float) -> None:
        held = data.draw(st.sampled_from(self.claims))
        if held.owner in self.living():
            assert (held.until > self.now) == held.claim.renew(seconds)
            if held.until > self.now:
                held.until = self.now + seconds

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def release_a_claim(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.claims))
        held.claim.release()
        self.claims.remove(held)

    @precondition(lambda self: self.can_wait)
    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0, 60.0]))
    def wait(self, seconds: float) -> None:
        for member in self.living():  # so that each lease ends at its own time
            assert member.until > self.now
        self.clock.advance(seconds)
        self.claims = [held for held in self.claims if held.until > self.now]

    @invariant()
    def the_living_are_known(self) -> None:
        for asker in self.living():
            expected = sorted((member.slot, member.name, member.queue) for member in self.living())
            assert expected == [(node.slot, node.name, node.queue) for node in asker.directory.nodes()]

    @invariant()
    def holders_are_those_who_said_so(self) -> None:
        for asker in self.living():
            expected = [
                {member.slot for member in self.living() if member.told.get(key, 0.0) > self.now} for key in KEYS
            ]
            assert expected == [set(found) for found in asker.directory.holders(KEYS)]

    @invariant()
    def claims_have_what_is_left_of_them(self) -> None:
        for asker in self.living():
            for key in KEYS:
                held = self.claim_of(key)
                left = asker.directory.claimed(key)
                assert (held is None) == (left is None)
                if held is not None and left is not None:
                    assert self.is_about(held.until - self.now, left)

    def is_about(self, expected: float, actual: float) -> bool:
        return abs(expected - actual) < 1e-6
