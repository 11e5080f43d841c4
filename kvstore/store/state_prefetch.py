"""Prefetching of states: one that lies on disk alone moves up into host memory while its request waits."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kvstore.store.prefetch import StorePrefetch
from kvstore.store.states import path_of
from kvstore.types import Tier

if TYPE_CHECKING:
    from kvstore.store.index import Index
    from kvstore.store.movers import Movers
    from kvstore.store.room import RoomMaker
    from kvstore.store.space import Space
    from kvstore.store.states import StoredState
    from kvstore.types import TokenArray


class StatePrefetchJob:
    """A held state on its way up, for one caller; it holds the state until it has ended."""

    def __init__(self, owner: StatePrefetcher, space: Space, state: StoredState | None, tokens: int) -> None:
        self.space = space
        self.state = state
        self.tokens = tokens
        self.host_blocks = tokens if state is not None and Tier.HOST in state.slots else 0
        self.ended = threading.Event()
        self._owner = owner

    def run(self) -> None:
        """Bring it up; on a mover's thread."""
        self._owner.run(self)

    def drop(self) -> None:
        """End without having run."""
        self._owner.finish(self, "cancelled")

    def leave(self) -> None:
        """Nobody waits for it any more; once it has begun it goes on, so that its reading was not for nothing."""
        self._owner.leave(self)


class StatePrefetcher:
    """Owner of the prefetches of states. They have a reserve of their own, as large as that of blocks.

    `_lock` guards what is reserved; only the movers' is taken inside it.
    """

    def __init__(self, index: Index, room: RoomMaker, movers: Movers) -> None:
        self._index = index
        self._room = room
        self._movers = movers
        self._lock = threading.Lock()
        self._reserved_bytes = 0

    def start(self, space: Space, root_key: bytes, prompt: TokenArray) -> StorePrefetch:
        """Begin to bring up the state that serves most of a prompt; returns at once."""
        assert space.states is not None, "prefetches of blocks have another owner"
        path = path_of(prompt)
        with self._index.lock:
            state, tokens = space.states.find(root_key, path)
            job = StatePrefetchJob(self, space, state, tokens)
            if state is not None:
                space.states.hold(state)
        outcome = "present" if state is None or job.host_blocks else self._enter(job, state)
        if outcome:
            self._end(job, outcome)
        return StorePrefetch(job)

    def run(self, job: StatePrefetchJob) -> None:
        """Bring a state up."""
        outcome = "failed"
        try:
            assert job.state is not None, "only what lies on disk is entered"
            outcome = "done" if self._room.states.bring_up(job.space, job.state) else "no_room"
        finally:
            self.finish(job, outcome)

    def finish(self, job: StatePrefetchJob, outcome: str) -> None:
        """End a job that was entered."""
        assert job.state is not None, "only what lies on disk is entered"
        with self._lock:
            self._reserved_bytes -= job.state.size_bytes
        if outcome == "done":
            with self._index.lock:
                self._index.accounting.prefetched_blocks += -(-job.state.size_bytes // job.space.layout.block_bytes)
        self._end(job, outcome)

    def leave(self, job: StatePrefetchJob) -> None:
        """End a job that has not begun."""
        if self._movers.withdraw(job):
            self.finish(job, "cancelled")

    def _enter(self, job: StatePrefetchJob, state: StoredState) -> str:
        """Queue a job; why not, if not."""
        most_bytes = int(self._index.host.capacity_bytes * self._index.settings.prefetch_ratio)
        with self._lock:
            if self._reserved_bytes + state.size_bytes > most_bytes:
                return "reserve_full"
            if not self._movers.offer(job):
                return "queue_full"
            self._reserved_bytes += state.size_bytes
        return ""

    def _end(self, job: StatePrefetchJob, outcome: str) -> None:
        with self._index.lock:
            if job.state is not None and Tier.HOST in job.state.slots:
                job.host_blocks = job.tokens
            self._index.accounting.prefetches[outcome] += 1
        if job.state is not None:
            self._room.states.release(job.space, job.state)
        job.ended.set()
