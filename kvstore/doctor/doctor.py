"""Looks at lookups as they come, in a thread of its own, and never in their way."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from kvstore.doctor.causes import Examiner
from kvstore.doctor.report import Tallies

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.clock import Clock
    from kvstore.doctor.report import Report
    from kvstore.doctor.seen import SeenLookup

_WAITING_MAX = 64
PROMPT_TOKENS_MAX = 131_072  # of one prompt; what is behind is not looked at
# About 100 bytes each: 40 MB.
_PREFIXES_MAX = 200_000
_WINDOWS_MAX = 200_000
# Of a core, for looking at prompts; the rest of them is skipped and counted.
CPU_SHARE_MAX = 0.01
_BURST_SECONDS = 0.1
_TURN_SECONDS = 0.05


class Doctor:
    """Remembers fingerprints of prompts, bounded, never their tokens. Any thread may call.

    It spends CPU_SHARE_MAX of a core at most: a prompt that comes when that is spent, or while too many wait, is
    skipped. At the rates of inference servers that is none. Its thread looks every 50 ms: to wake it for each lookup
    would cost those more than all the rest does.
    """

    def __init__(self, clock: Clock, *, cpu_share_max: float = CPU_SHARE_MAX) -> None:
        self._clock = clock
        self._cpu_share_max = cpu_share_max
        self._examiner = Examiner(PROMPT_TOKENS_MAX, _PREFIXES_MAX, _WINDOWS_MAX)
        self._waiting: deque[Callable[[], SeenLookup]] = deque()
        self._resting = False  # what may be spent is; set by its thread alone
        self._skip_lock = threading.Lock()
        self._skipped = 0  # guarded by _skip_lock
        self._lock = threading.Lock()
        self._tallies = Tallies()  # guarded by _lock, as the two below
        self._began = clock.monotonic()
        self._spent_seconds = 0.0
        self._turned = threading.Condition()
        self._turn = 0  # guarded by _turned, as all below
        self._hurried = False
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="kvstore-doctor", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive()

    def see(self, lookup: SeenLookup) -> None:
        """Take a lookup to be looked at, or skip it. Keeps its tokens until then."""
        self.look(lambda: lookup)

    def look(self, read: Callable[[], SeenLookup]) -> None:
        """The same with what gives the lookup, called by the doctor's thread. A fraction of a microsecond."""
        if self._resting or len(self._waiting) >= _WAITING_MAX:
            self._skip(1)
        else:
            self._waiting.append(read)

    def report(self, tenant: str | None = None) -> Report:
        """What was found since the start, or since reset(); None stands for all tenants.

        Of what was skipped, a tenant has the share that it has of the rest.
        """
        with self._skip_lock:
            skipped = self._skipped
        with self._lock:
            return self._tallies.report(self._clock.monotonic() - self._began, skipped, tenant)

    def reset(self) -> None:
        """Begin to count anew; what is remembered of prompts stays."""
        with self._lock:
            self._tallies = Tallies()
            self._began = self._clock.monotonic()
            self._spent_seconds = 0.0
        with self._skip_lock:
            self._skipped = 0

    def wait(self) -> None:
        """Return when all that was taken has been looked at."""
        with self._turned:
            ends_at = self._turn + 2  # the turn that runs may have passed what was taken last
            self._hurried = True
            self._turned.notify_all()
            self._turned.wait_for(lambda: self._turn >= ends_at or self._closed)

    def close(self) -> None:
        """End the thread; idempotent."""
        with self._turned:
            self._closed = True
            self._turned.notify_all()
        self._thread.join()

    def _work(self) -> None:
        while True:
            with self._turned:
                if not self._hurried:
                    self._turned.wait_for(lambda: self._hurried or self._closed, _TURN_SECONDS)
                if self._closed:
                    return
                self._hurried = False
            self._look_at_all()
            with self._turned:
                self._turn += 1
                self._turned.notify_all()

    def _look_at_all(self) -> None:
        """Of what waits, as much as may be; what is over is skipped, so that no prompt is kept for long."""
        self._resting = not self._may_spend()
        while self._waiting and not self._resting:
            self._look_at(self._waiting.popleft()())
            self._resting = not self._may_spend()
        if self._resting:
            self._skip(len(self._waiting))
            self._waiting.clear()

    def _look_at(self, lookup: SeenLookup) -> None:
        began = time.thread_time()
        diagnosis = self._examiner.examine(lookup)
        with self._lock:
            self._tallies.add(lookup, diagnosis)
            self._spent_seconds += time.thread_time() - began

    def _may_spend(self) -> bool:
        with self._lock:
            return self._spent_seconds <= _BURST_SECONDS + self._cpu_share_max * (self._clock.monotonic() - self._began)

    def _skip(self, count: int) -> None:
        with self._skip_lock:
            self._skipped += count
