"""Looks at lookups as they come, in a thread of its own, and never in their way."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from kvstore.doctor.causes import Examiner
from kvstore.doctor.report import Tallies

if TYPE_CHECKING:
    from kvstore.clock import Clock
    from kvstore.doctor.report import Report
    from kvstore.doctor.seen import SeenLookup

_QUEUED_MAX = 64
_PROMPT_TOKENS_MAX = 131_072  # of one prompt; what is behind is not looked at
# About 100 bytes each: 40 MB.
_PREFIXES_MAX = 200_000
_WINDOWS_MAX = 200_000
# Of a core, for looking at prompts; the rest of them is skipped and counted.
CPU_SHARE_MAX = 0.01
_BURST_SECONDS = 0.1


class Doctor:
    """Remembers fingerprints of prompts, bounded, never their tokens. `see` may be called by any thread.

    It spends CPU_SHARE_MAX of a core at most: a prompt that comes when that is spent, or when the queue is full, is
    skipped. At the rates of inference servers that is none.
    """

    def __init__(self, clock: Clock, *, cpu_share_max: float = CPU_SHARE_MAX) -> None:
        self._clock = clock
        self._cpu_share_max = cpu_share_max
        self._examiner = Examiner(_PROMPT_TOKENS_MAX, _PREFIXES_MAX, _WINDOWS_MAX)
        self._queue: queue.Queue[SeenLookup | None] = queue.Queue(_QUEUED_MAX)
        self._lock = threading.Lock()
        self._tallies = Tallies()  # guarded by _lock, as all below
        self._began = clock.monotonic()
        self._spent_seconds = 0.0
        self._thread = threading.Thread(target=self._work, name="kvstore-doctor", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive()

    def see(self, lookup: SeenLookup) -> None:
        """Take a lookup to be looked at, or skip it. Keeps its tokens until then. Some microseconds."""
        try:
            if self._may_spend():
                self._queue.put_nowait(_bounded(lookup))
                return
        except queue.Full:
            pass
        with self._lock:
            self._tallies.skip(lookup)

    def report(self, tenant: str | None = None) -> Report:
        """What was found since the start, or since reset(); None stands for all tenants."""
        with self._lock:
            return self._tallies.report(self._clock.monotonic() - self._began, tenant)

    def reset(self) -> None:
        """Begin to count anew; what is remembered of prompts stays."""
        with self._lock:
            self._tallies = Tallies()
            self._began = self._clock.monotonic()
            self._spent_seconds = 0.0

    def wait(self) -> None:
        """Return when all that was taken has been looked at."""
        self._queue.join()

    def close(self) -> None:
        """End the thread; idempotent."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _may_spend(self) -> bool:
        with self._lock:
            return self._spent_seconds <= _BURST_SECONDS + self._cpu_share_max * (self._clock.monotonic() - self._began)

    def _work(self) -> None:
        while (lookup := self._queue.get()) is not None:
            began = time.thread_time()
            diagnosis = self._examiner.examine(lookup)
            with self._lock:
                self._tallies.add(lookup, diagnosis)
                self._spent_seconds += time.thread_time() - began
            del lookup, diagnosis  # a prompt is kept no longer than it is looked at
            self._queue.task_done()
        self._queue.task_done()


def _bounded(lookup: SeenLookup) -> SeenLookup:
    """What is looked at of it: of a long prompt a copy of its head, so that the rest need not be kept."""
    if lookup.tokens.size <= _PROMPT_TOKENS_MAX:
        return lookup
    return replace(lookup, tokens=lookup.tokens[:_PROMPT_TOKENS_MAX].copy())
