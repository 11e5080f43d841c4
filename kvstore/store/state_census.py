"""The sequence states of a namespace as they were at one moment, so that their sums can be checked without a lock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.store.state_records import StateRecords
    from kvstore.store.states import StoredState
    from kvstore.types import Tier

_SLICE_STEPS = 1024  # a step is a slot of a state; 1 ms
_STATE_STEPS = 32  # what a state costs besides its slots


@dataclass(frozen=True, slots=True)
class StateCensus:
    """The states of a table by each of the ways to them, and what it says they come to."""

    by_path: list[StoredState]
    by_id: list[StoredState]
    by_tier: dict[Tier, list[StoredState]]
    pieces: dict[Tier, int]
    index_bytes: int

    def problems(self, records: StateRecords) -> list[str]:
        """A sentence for each sum that is wrong. Needs no lock: it reads what never changes of a state."""
        found = []
        if sorted(map(id, self.by_path)) != sorted(map(id, self.by_id)):
            found.append("the states by path are not those by id")
        if self.index_bytes != sum(state.index_bytes for state in self.by_path):
            found.append("the bytes of the paths do not add up")
        for tier, states in self.by_tier.items():
            if self.pieces[tier] != sum(map(records.pieces, states)):
                found.append(f"the pieces in tier {tier.name} do not add up")
        return found

    def slices(self, records: StateRecords) -> Iterator[list[StoredState]]:
        """All states, so many at a time as are looked through in one go; one alone may be more than that."""
        taken: list[StoredState] = []
        steps = 0
        for state in self.by_path:
            cost = _STATE_STEPS + 2 * records.pieces(state)  # in both tiers
            if taken and steps + cost > _SLICE_STEPS:
                yield taken
                taken, steps = [], 0
            taken.append(state)
            steps += cost
        if taken:
            yield taken
