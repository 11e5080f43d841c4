"""The sequence states of one namespace: which prompts they serve, in which slots they lie, and who may leave first.

A state is one blob, stored for a path of tokens and cut over slots of the namespace's pools. The states of a root lie
in the order of their paths, so that those which share most with a prompt are neighbours of the place where it would
lie: a lookup compares the tokens of a few. A state leaves a tier as a whole. Nothing here takes a lock: whoever calls
holds the index lock.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from kvstore.layer_groups import StateCut
from kvstore.store.sparse import FreedSparse
from kvstore.store.state_census import StateCensus
from kvstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from kvstore.layer_groups import SequenceState
    from kvstore.store.state_records import StateRecords
    from kvstore.tiers.base import Pool, RecoveredBlock
    from kvstore.tiers.host import HostPool
    from kvstore.tiers.persistent import PersistentPool
    from kvstore.types import Slots, TokenArray

TICKS_PER_SECOND = 1e6
_TIERS = (Tier.HOST, Tier.DISK)
_TOKEN_BYTES = 4
_STATE_BYTES = 1024  # what a state costs in the index besides its path, about
_LOOKS_MAX = 64  # states that one lookup compares
_VICTIMS_MAX = 64  # states of which the one that brings least leaves


def path_of(prompt: TokenArray) -> bytes:
    """Tokens as bytes whose order is that of the tokens."""
    return prompt.astype(">u4").tobytes()


@dataclass(slots=True, eq=False)
class StoredState:
    """One state. `path` is of `path_of`, `key` that of the block at its end.

    `slots` are by tier: those of its pieces, in order, and on disk behind them those that hold the path. `holds` are
    those of leases, of pins and of who moves it. Detached it serves nobody, and its slots come back when the last hold
    ends.
    """

    state_id: bytes
    root_key: bytes
    path: bytes = field(repr=False)
    key: bytes
    size_bytes: int
    stored_at: int
    used_at: int
    writer: int = 0
    uses: int = 1
    holds: int = 0
    attached: bool = False
    slots: dict[Tier, Slots] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Tokens of its path."""
        return len(self.path) // _TOKEN_BYTES

    @property
    def index_bytes(self) -> int:
        """What it costs in the index, about."""
        return len(self.path) + _STATE_BYTES

    def uses_per_second(self, tick: int) -> float:
        """How often it is used, as far as its past tells: less, the longer that is ago.

        At first once a second, which is what the survival policy takes blocks for before it knows better.
        """
        ticks = max(0, tick - self.stored_at) + max(0, tick - self.used_at)
        return self.uses / (1 + ticks / TICKS_PER_SECOND)


@dataclass(slots=True)
class _RootStates:
    """The states of one root in the order of their paths, of which no two are equal."""

    paths: list[bytes] = field(default_factory=list)
    states: list[StoredState] = field(default_factory=list)

    def outward(self, prompt: bytes) -> Iterator[tuple[StoredState, int]]:
        """States and how many tokens each shares with a prompt, at least one; most first."""
        right = bisect_left(self.paths, prompt)
        left = right - 1
        shared = [self._shared(left, prompt), self._shared(right, prompt)]
        while max(shared):
            if shared[1] >= shared[0]:
                yield self.states[right], shared[1]
                right += 1
                shared[1] = self._shared(right, prompt)
            else:
                yield self.states[left], shared[0]
                left -= 1
                shared[0] = self._shared(left, prompt)

    def ancestors(self, prompt: bytes) -> Iterator[tuple[StoredState, int]]:
        """States whose whole path a prompt begins with, and the tokens of it; the longest first.

        A path that the prompt begins with lies right before it, or before what it shares with the one that does.
        """
        while (place := bisect_right(self.paths, prompt) - 1) >= 0:
            shared_bytes = self._shared(place, prompt) * _TOKEN_BYTES
            if not shared_bytes:
                return
            if shared_bytes == len(self.paths[place]):
                yield self.states[place], shared_bytes // _TOKEN_BYTES
                shared_bytes -= _TOKEN_BYTES
            prompt = prompt[:shared_bytes]

    def below(self, path: bytes) -> Iterator[StoredState]:
        """States whose path begins with this one."""
        place = bisect_left(self.paths, path)
        while place < len(self.paths) and self.paths[place].startswith(path):
            yield self.states[place]
            place += 1

    def add(self, state: StoredState) -> None:
        place = bisect_left(self.paths, state.path)
        self.paths.insert(place, state.path)
        self.states.insert(place, state)

    def remove(self, state: StoredState) -> None:
        place = bisect_left(self.paths, state.path)
        assert self.states[place] is state, "the states of a root are out of order"
        del self.paths[place], self.states[place]

    def holds_in_order(self, state: StoredState) -> bool:
        """Whether a state lies here at the place of its path, and between its neighbours."""
        place = bisect_left(self.paths, state.path)
        near = self.paths[max(0, place - 1) : place + 2]
        return self.states[place : place + 1] == [state] and near == sorted(set(near)) and state.path in near

    def _shared(self, place: int, prompt: bytes) -> int:
        """How many tokens the state at a place has in common with a prompt; 0 where there is none."""
        if not 0 <= place < len(self.paths):
            return 0
        count = min(len(prompt), len(self.paths[place])) // _TOKEN_BYTES
        differs = np.frombuffer(prompt, np.uint32, count) != np.frombuffer(self.paths[place], np.uint32, count)
        return int(differs.argmax()) if differs.any() else count


class StateTable:
    """All states of a namespace, and what is being stored of it."""

    def __init__(
        self, form: SequenceState, host: HostPool, disk: PersistentPool | None, records: StateRecords, bytes_max: int
    ) -> None:
        self.records = records
        self.bytes_max = bytes_max  # of the index
        self.generation = 0  # of the last clear: what was begun before it is not stored
        self.index_bytes = 0
        self._is_cut = form.cut == StateCut.ANY
        self._host = host
        self._disk = disk
        self._roots: dict[bytes, _RootStates] = {}
        self._states: OrderedDict[bytes, StoredState] = OrderedDict()  # what was used last comes last, as in _order
        self._order: dict[Tier, OrderedDict[bytes, StoredState]] = {tier: OrderedDict() for tier in _TIERS}
        self._pieces = dict.fromkeys(_TIERS, 0)
        self._staged: set[tuple[bytes, bytes]] = set()

    def __len__(self) -> int:
        return len(self._states)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is stored, or being stored."""
        return not self._states and not self._staged

    def all(self) -> list[StoredState]:
        """All that serve."""
        return list(self._states.values())

    def of_key(self, key: bytes) -> StoredState | None:
        """The state whose path ends at the block of this key. O(states)."""
        return next((state for state in self._states.values() if state.key == key), None)

    def pieces(self, tier: Tier) -> int:
        """Pieces of blobs in a tier."""
        return self._pieces[tier]

    def held_bytes(self, tier: Tier) -> int:
        """Bytes of the slots in a tier that cannot come free now, since somebody holds what lies there. O(states)."""
        pieces = sum(self.records.pieces(state) for state in self._order[tier].values() if state.holds)
        return pieces * self.records.piece_bytes

    def find(
        self, root_key: bytes, prompt: bytes, tiers: Collection[Tier] | None = None
    ) -> tuple[StoredState | None, int]:
        """The state with a copy in one of these tiers that serves most of a prompt, and how many tokens of it.

        Of several that serve as much, one in host memory and of few bytes. None where no state does.
        """
        best: StoredState | None = None
        best_tokens = 0
        for looks, (state, tokens) in enumerate(self._serving(root_key, prompt)):
            if looks == _LOOKS_MAX or tokens < best_tokens:
                break
            if tiers is not None and state.slots.keys().isdisjoint(tiers):
                continue
            if best is None or _cost(state) < _cost(best):
                best, best_tokens = state, tokens
        return best, best_tokens

    def covers(self, root_key: bytes, path: bytes) -> bool:
        """Whether some state serves all of a path, so that none need be stored for it."""
        return self.find(root_key, path)[1] * _TOKEN_BYTES == len(path)

    def below(self, root_key: bytes, path: bytes) -> list[StoredState]:
        """The states whose path begins with this one."""
        root = self._roots.get(root_key)
        return [] if root is None else list(root.below(path))

    def begin(self, root_key: bytes, path: bytes) -> bool:
        """Begin to store a state; false where that is under way already. `end` must follow."""
        if (root_key, path) in self._staged:
            return False
        self._staged.add((root_key, path))
        return True

    def end(self, root_key: bytes, path: bytes) -> None:
        """Storing this one has ended, however."""
        self._staged.discard((root_key, path))

    def add(self, state: StoredState) -> list[StoredState]:
        """Take a state; returns those that nobody needs any more, which the caller forgets.

        These are the ones that it serves as well, and those that go since the index has no room for all paths.
        """
        assert not state.attached, "a state is taken once"
        assert state.path, "a state has a path"
        root = self._roots.setdefault(state.root_key, _RootStates())
        served = [other for other, _ in root.ancestors(state.path)] if self._is_cut else []
        root.add(state)
        self._states[state.state_id] = state
        state.attached = True
        for tier in state.slots:
            self._enter(state, tier)
        self.index_bytes += state.index_bytes
        unneeded = [other for other in served if not other.holds]
        return unneeded + self._beyond_limit(state, unneeded)

    def touch(self, state: StoredState, tick: int) -> None:
        """A request was told of this state."""
        state.used_at = tick
        state.uses += 1
        self._states.move_to_end(state.state_id)
        for tier in state.slots:
            self._order[tier].move_to_end(state.state_id)

    def retire(self, state: StoredState) -> None:
        """A state is used never again: it is the first to leave."""
        state.used_at = state.stored_at = state.uses = 0
        self._states.move_to_end(state.state_id, last=False)
        for tier in state.slots:
            self._order[tier].move_to_end(state.state_id, last=False)

    def hold(self, state: StoredState) -> None:
        """Keep a state where it is."""
        state.holds += 1

    def release(self, state: StoredState) -> tuple[FreedSparse, ...]:
        """End one hold."""
        state.holds -= 1
        return () if state.holds or state.attached else self._free(state, _TIERS)

    def forget(self, states: Iterable[StoredState]) -> tuple[FreedSparse, ...]:
        """Let go of states, whoever holds them."""
        freed: tuple[FreedSparse, ...] = ()
        for state in states:
            self._detach(state)
            if not state.holds:
                freed += self._free(state, _TIERS)
        return freed

    def clear(self) -> tuple[FreedSparse, ...]:
        """Let go of all, and of what is being stored."""
        self.generation += 1
        return self.forget(self.all())

    def victim(self, tier: Tier, tick: int) -> StoredState | None:
        """The state that leaves a tier first: of those used longest ago, the one whose use brings least for its bytes.

        Nobody holds it.
        """

        def worth(state: StoredState) -> float:
            return state.uses_per_second(tick) * state.tokens / state.size_bytes

        unheld = (state for state in self._order[tier].values() if not state.holds)
        return min(islice(unheld, _VICTIMS_MAX), key=worth, default=None)

    def leave(self, state: StoredState, tier: Tier) -> tuple[FreedSparse, ...]:
        """Let a state leave a tier that its caller alone holds, and end that hold; with its last copy it is gone."""
        state.holds -= 1
        if state.holds:
            return ()
        if state.attached and len(state.slots) == 1:
            self._detach(state)
        if state.attached:
            self._exit(state, tier)
        return self._free(state, (tier,) if state.attached else _TIERS)

    def place(self, state: StoredState, tier: Tier, slots: Slots) -> bool:
        """Give a state its slots in another tier; false, with the slots left to the caller, where it cannot be."""
        if not state.attached or tier in state.slots:
            return False
        state.slots[tier] = slots
        self._enter(state, tier)
        return True

    def adopt(self, recovered: Iterable[RecoveredBlock], tick: int) -> Slots:
        """Take what the disk held into a new table; returns the slots of what is not whole, or not needed."""
        assert self._disk is not None, "a disk that holds states has a pool for them"
        states, left_over = self.records.recover(recovered, self._disk, tick)
        for state in states:
            if self.covers(state.root_key, state.path):
                left_over += state.slots[Tier.DISK].tolist()
                continue
            for freed in self.forget(self.add(state)):
                left_over += freed.slots.tolist()
        return np.array(left_over, dtype=np.uint32)

    def census(self) -> StateCensus:
        """All states and their sums at this moment, to be checked later. O(states): takes references."""
        return StateCensus(
            by_path=[state for root in self._roots.values() for state in root.states],
            by_id=list(self._states.values()),
            by_tier={tier: list(order.values()) for tier, order in self._order.items()},
            pieces=dict(self._pieces),
            index_bytes=self.index_bytes,
        )

    def problems(self, listed: Iterable[StoredState], owners: dict[tuple[Tier, int], StoredState]) -> list[str]:
        """A sentence for each thing that is wrong with some states, of which those that left meanwhile are passed over.

        `owners` are those of the slots seen so far: one dict for all calls of a check.
        """
        found = []
        for state in listed:
            if state.attached:
                found += [f"state {state.state_id.hex()} {problem}" for problem in self._place_problems(state)]
                found += _slot_problems(state, owners)
        return found

    def _place_problems(self, state: StoredState) -> Iterator[str]:
        root = self._roots.get(state.root_key)
        if root is None or not root.holds_in_order(state):
            yield "is not where its path belongs"
        if self._states.get(state.state_id) is not state:
            yield "is not found by its id"
        if not state.slots:
            yield "serves and lies nowhere"
        for tier, order in self._order.items():
            if (order.get(state.state_id) is state) != (tier in state.slots):
                yield f"lies in tier {tier.name} and cannot leave it, or the other way round"

    def _serving(self, root_key: bytes, prompt: bytes) -> Iterator[tuple[StoredState, int]]:
        root = self._roots.get(root_key)
        if root is None:
            return iter(())
        return root.outward(prompt) if self._is_cut else root.ancestors(prompt)

    def _beyond_limit(self, newest: StoredState, unneeded: list[StoredState]) -> list[StoredState]:
        """Those that go, besides `unneeded`, so that the index keeps to its bytes."""
        excess = self.index_bytes - sum(state.index_bytes for state in unneeded) - self.bytes_max
        gone: list[StoredState] = []
        if excess <= 0:
            return gone
        for state in self._states.values():
            if excess <= 0:
                break
            if state is not newest and not state.holds and state not in unneeded:
                gone.append(state)
                excess -= state.index_bytes
        return gone

    def _detach(self, state: StoredState) -> None:
        if not state.attached:
            return
        state.attached = False
        for tier in state.slots:
            self._exit(state, tier)
        del self._states[state.state_id]
        self.index_bytes -= state.index_bytes
        root = self._roots[state.root_key]
        root.remove(state)
        if not root.states:
            del self._roots[state.root_key]

    def _enter(self, state: StoredState, tier: Tier) -> None:
        self._order[tier][state.state_id] = state
        self._pieces[tier] += self.records.pieces(state)

    def _exit(self, state: StoredState, tier: Tier) -> None:
        del self._order[tier][state.state_id]
        self._pieces[tier] -= self.records.pieces(state)

    def _free(self, state: StoredState, tiers: Iterable[Tier]) -> tuple[FreedSparse, ...]:
        pools: dict[Tier, Pool | None] = {Tier.HOST: self._host, Tier.DISK: self._disk}
        return tuple(
            FreedSparse(pool, tier, state.slots.pop(tier))
            for tier in tiers
            if tier in state.slots and (pool := pools[tier]) is not None
        )


def _cost(state: StoredState) -> tuple[bool, int]:
    return Tier.HOST not in state.slots, state.size_bytes


def _slot_problems(state: StoredState, owners: dict[tuple[Tier, int], StoredState]) -> Iterator[str]:
    for tier, slots in state.slots.items():
        for slot in slots.tolist():
            other = owners.get((tier, slot), state)
            # Who had the slot a moment ago may have lost it meanwhile.
            if other is not state and slot in other.slots.get(tier, ()):
                names = f"{other.state_id.hex()} and {state.state_id.hex()}"
                yield f"states {names} lie in one slot of tier {tier.name}: {slot}"
            owners[tier, slot] = state
