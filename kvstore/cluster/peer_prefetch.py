"""Prompts that are being brought from peers: who waits for which, on whose threads, and how they end.

Those that lack the same boundary are brought one after the other: the first one's blocks are there when the next is
looked at, which then most often lacks nothing. So a prefix comes once, and one that many wait for takes one thread.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from kvstore.api import Prefetch
    from kvstore.clock import Clock
    from kvstore.store.movers import Movers


class BringJob:
    """One caller's prompt. A kvstore.store.movers.Job and a kvstore.cluster.fetch.Wish."""

    def __init__(
        self,
        owner: BringJobs,
        key: bytes,
        steps: Callable[[BringJob], Iterator[float]],
        clock: Clock,
        seconds: float,
    ) -> None:
        self.key = key
        self.ended = threading.Event()
        self.followers: list[BringJob] = []  # guarded by the owner's lock
        self._owner = owner
        self._steps = steps
        self._clock = clock
        self._ends_at = clock.monotonic() + seconds
        self._cancelled = threading.Event()

    def left_seconds(self) -> float:
        """How much longer it is wanted."""
        return 0.0 if self._cancelled.is_set() else max(0.0, self._ends_at - self._clock.monotonic())

    def run(self) -> None:
        """Bring what is missing; on a mover's thread."""
        try:
            for pause_seconds in self._steps(self):
                if self._cancelled.wait(pause_seconds) or not self.left_seconds():
                    return
        finally:
            self._owner.finish(self)

    def drop(self) -> None:
        """The threads end."""
        self._owner.finish(self)

    def cancel(self) -> None:
        """Nobody waits for it any more; idempotent."""
        self.end_soon()
        self._owner.withdraw(self)

    def end_soon(self) -> None:
        """Let it end at its next step."""
        self._cancelled.set()


class BringJobs:
    """The jobs of one node, by the boundary they lack. Thread-safe; inside `_lock` only the movers' lock is taken."""

    def __init__(self, movers: Movers, *, waiting_max: int) -> None:
        self._movers = movers
        self._waiting_max = waiting_max
        self._lock = threading.Lock()
        self._leaders: dict[bytes, BringJob] = {}  # guarded by _lock, as all below
        self._count = 0
        self._closed = False

    @property
    def depth(self) -> int:
        """Prompts that are being brought, or wait for that."""
        return self._count

    def start(self, job: BringJob) -> bool:
        """Take a job; false, at once, where too many wait."""
        with self._lock:
            if self._count >= self._waiting_max or not self._enter(job):
                return False
            self._count += 1
            return True

    def withdraw(self, job: BringJob) -> None:
        """End a job that has not begun."""
        with self._lock:
            leader = self._leaders.get(job.key)
            if leader is not None and job in leader.followers:
                leader.followers.remove(job)
                self._count -= 1
            elif leader is not job or not self._movers.withdraw(job):
                return  # it runs, and sees that it is cancelled, or has ended
        if leader is job:
            self.finish(job)
        else:
            job.ended.set()

    def close(self) -> None:
        """Take no more jobs, and let those that run end at their next step; the movers are closed behind this."""
        with self._lock:
            self._closed = True
            for leader in self._leaders.values():
                leader.end_soon()

    def finish(self, job: BringJob) -> None:
        """A job has ended, or will never run: those that wait for it have their turn."""
        refused = []
        with self._lock:
            del self._leaders[job.key]
            self._count -= 1
            for follower in job.followers:
                if not self._enter(follower):
                    refused.append(follower)
                    self._count -= 1
        job.ended.set()
        for follower in refused:
            follower.ended.set()

    def _enter(self, job: BringJob) -> bool:
        """Queue a job, or have it follow one that lacks the same; `_lock` is held."""
        if self._closed:
            return False
        leader = self._leaders.get(job.key)
        if leader is not None:
            leader.followers.append(job)
            return True
        self._leaders[job.key] = job
        if self._movers.offer(job):
            return True
        del self._leaders[job.key]
        return False


class PeerPrefetch:
    """A kvstore.api.Prefetch of what lies on this node's disk and on peers."""

    def __init__(self, local: Prefetch, job: BringJob, clock: Clock, host_blocks: Callable[[], int]) -> None:
        self._local = local
        self._job = job
        self._clock = clock
        self._look = host_blocks
        self._host_blocks: int | None = None

    @property
    def host_blocks(self) -> int:
        """Leading blocks of the prompt in host memory, as of the last look."""
        if self._host_blocks is not None:
            return self._host_blocks
        if not self.done:
            return self._local.host_blocks
        self._host_blocks = self._look()  # two threads that look at once see the same, or one a little more
        return self._host_blocks

    @property
    def done(self) -> bool:
        """Whether both have ended."""
        return self._local.done and self._job.ended.is_set()

    def wait(self, seconds: float | None = None) -> int:
        """Wait until both have ended, at most so long; returns `host_blocks`."""
        ends_at = None if seconds is None else self._clock.monotonic() + seconds
        self._job.ended.wait(seconds)
        self._local.wait(None if ends_at is None else max(0.0, ends_at - self._clock.monotonic()))
        return self.host_blocks

    def cancel(self) -> None:
        """Stop both; idempotent."""
        self._local.cancel()
        self._job.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
