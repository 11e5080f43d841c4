"""Threads that move blocks between tiers in the background, for whoever has a job for them."""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)


class Job(Protocol):
    """Something to move. Exactly one of the two is called, once."""

    def run(self) -> None:
        """Do it."""
        ...

    def drop(self) -> None:
        """It will not be done: the threads end."""
        ...


class Movers:
    """A bounded queue and the threads that work it off. Thread-safe; its lock is never held while a job runs.

    The threads start with the first job. A job that raises is logged and passed to `on_failure`; the threads go on, and
    one that has died all the same is replaced at the next job.
    """

    def __init__(self, *, threads: int, jobs_max: int, on_failure: Callable[[], None]) -> None:
        self._thread_count = threads
        self._jobs_max = jobs_max
        self._on_failure = on_failure
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()  # guarded by _changed, as all below
        self._running = 0
        self._closed = False
        self._threads: list[threading.Thread] = []

    def offer(self, job: Job) -> bool:
        """Queue a job; false, at once, where too many wait or run already, without any thread, or after close()."""
        with self._changed:
            if self._closed or len(self._waiting) + self._running >= self._jobs_max:
                return False
            self._man()
            if not self._threads:
                return False
            self._waiting.append(job)
            self._changed.notify()
            return True

    def withdraw(self, job: Job) -> bool:
        """Take a job back that waits still; false where it runs, or ran, or will never run."""
        with self._changed:
            if job not in self._waiting:
                return False
            self._waiting.remove(job)
            return True

    @property
    def depth(self) -> int:
        """Jobs that wait or run."""
        with self._changed:
            return len(self._waiting) + self._running

    def close(self) -> None:
        """Drop what waits and return when what runs has ended; idempotent."""
        with self._changed:
            self._closed = True
            dropped = list(self._waiting)
            self._waiting.clear()
            threads = self._threads
            self._changed.notify_all()
        for job in dropped:
            job.drop()
        for thread in threads:
            thread.join()

    def _man(self) -> None:
        """Start the threads that are missing: all at first, later such as have died."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        for number in range(len(self._threads), self._thread_count):
            thread = threading.Thread(target=self._work, name=f"kvstore-mover-{number}", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                logger.warning("no thread to move blocks is to be had: running=%d", len(self._threads))
                return
            self._threads.append(thread)

    def _work(self) -> None:
        while (job := self._next()) is not None:
            try:
                job.run()
            except Exception:
                # The root of a thread: the job has let go of what it held, and others wait for theirs.
                logger.exception("moving blocks failed")
                self._on_failure()
            finally:
                with self._changed:
                    self._running -= 1
            del job  # an idle thread holds on to nothing

    def _next(self) -> Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if not self._waiting:
                return None
            self._running += 1
            return self._waiting.popleft()
