"""In which order the batches of one engine count: gaps, repetitions, restarts. No sockets, no clock, no threads.

    connected -> replay from batch 0 -> live batches, one number after the other
                    ^                      | a number is missing: replay from there on
                    |                      | a number comes again, later by the engine's time: it began anew
                    +----------------------+

Batches that were missed for good may have removed blocks, so all that was held is forgotten then; what the engine
stores from there on is known again as far as its parents are.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kvstore.engine_events.messages import read_batch
from kvstore.engine_events.residency import Outcome
from kvstore.errors import EngineEventsError

if TYPE_CHECKING:
    from kvstore.engine_events.messages import EventBatch
    from kvstore.engine_events.residency import EngineResidency


class OutcomeCounts:
    """How often each outcome was. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[Outcome, int] = {}

    def add(self, outcome: Outcome, count: int = 1) -> None:
        """Count so many more."""
        if count:
            with self._lock:
                self._counts[outcome] = self._counts.get(outcome, 0) + count

    def snapshot(self) -> dict[str, int]:
        """All counts of one moment."""
        with self._lock:
            return {outcome.value: count for outcome, count in self._counts.items()}


class EngineFollower:
    """Brings the batches of one publisher into its engine's residency. One thread calls.

    Where an answer is a number, the caller asks for a replay from that batch on, hands over what comes by `replayed`,
    calls `replay_ended` when it is over or does not come, and takes no live batch meanwhile.
    """

    def __init__(self, residency: EngineResidency, counts: OutcomeCounts, *, replay_from: int | None) -> None:
        """`replay_from` is the number of an engine's first batch; None where it cannot be asked to repeat any."""
        self._residency = residency
        self._counts = counts
        self._replay_from = replay_from
        self._next: int | None = None  # None: whatever comes
        self._published = float("-inf")  # when the last batch was, by the engine's time
        self._held: tuple[int, bytes] | None = None  # the live batch that showed the gap

    def connected(self) -> int | None:
        """The engine is there: from which batch on a replay is wanted."""
        self.disconnected()
        return self._begin()

    def disconnected(self) -> None:
        """The engine has gone, or cannot be seen: nobody is to be sent there for what it held."""
        self._residency.clear()
        self._next = None
        self._published = float("-inf")
        self._held = None

    def live(self, sequence: int, payload: bytes) -> int | None:
        """Take a batch as it was published: from which batch on a replay is wanted first."""
        if self._next is not None and sequence > self._next:
            if self._replay_from is not None:
                self._counts.add(Outcome.GAP)
                self._held = (sequence, payload)
                return self._next
            self._lose(sequence)
        batch = self._read(payload)
        if self._next is not None and sequence < self._next:
            if batch is None or batch.published <= self._published:
                self._counts.add(Outcome.DUPLICATE, int(batch is not None))
                return None
            self._counts.add(Outcome.RESTART)
            self.disconnected()
            if self._replay_from is not None:
                self._held = (sequence, payload)
                return self._begin()
        self._take(sequence, batch)
        return None

    def replayed(self, sequence: int, payload: bytes) -> None:
        """Take a batch of a replay."""
        if self._next is not None and sequence < self._next:
            self._counts.add(Outcome.DUPLICATE)
            return
        if self._next is not None and sequence > self._next:
            self._lose(sequence)
        self._take(sequence, self._read(payload))

    def replay_ended(self) -> None:
        """There is no more of the replay: go on with the batch that it was asked for."""
        held, self._held = self._held, None
        if held is not None:
            sequence, payload = held
            if self._next is None or sequence >= self._next:
                self.replayed(sequence, payload)

    def _begin(self) -> int | None:
        self._next = self._replay_from
        return self._next

    def _lose(self, sequence: int) -> None:
        """The batches before this one will not come."""
        if self._residency.blocks:
            self._counts.add(Outcome.LOST)
            self._residency.clear()
        self._next = sequence

    def _read(self, payload: bytes) -> EventBatch | None:
        try:
            return read_batch(payload)
        except EngineEventsError:
            self._counts.add(Outcome.MALFORMED)
            return None

    def _take(self, sequence: int, batch: EventBatch | None) -> None:
        self._next = sequence + 1
        if batch is None:
            return
        self._published = max(self._published, batch.published)
        self._counts.add(Outcome.FOREIGN, batch.foreign)
        for event in batch.events:
            self._counts.add(self._residency.apply(event))
