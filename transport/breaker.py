"""Keeps a client from a server that fails: calls end at once until a probe in the background finds it well again.

   failures_max failures in a row              back-off over
CLOSED ------------------------------> OPEN -----------------> HALF_OPEN
   ^                                     ^    probe failed         |
   |                                     +-------------------------+
   +---------------------------------------------------------------+
                              probe answered
"""

from __future__ import annotations

import enum
import logging
import os
import random
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.errors import KvstoreError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)
FAILURES_MAX = 3
BACKOFF_SECONDS_MIN = 0.1
BACKOFF_SECONDS_MAX = 5.0


class BreakerState(enum.Enum):
    """Whether calls are let through: only when closed."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


@dataclass(frozen=True, slots=True)
class BreakerStatus:
    """What a breaker says of itself: failures in a row, how often it has opened, and why it did last."""

    state: BreakerState
    failures: int
    openings: int
    cause: str


class Breaker:
    """The state alone. Thread-safe; `_lock` guards all fields, and nothing is called under it.

    `closed` may be read without the lock: a call that slips through an opening breaker is one more failure.
    """

    def __init__(self, peer: str, failures_max: int = FAILURES_MAX) -> None:
        self.closed = True
        self._peer = peer
        self._failures_max = failures_max
        self._lock = threading.Lock()
        self._state = BreakerState.CLOSED
        self._failures = 0
        self._openings = 0
        self._cause = ""

    @property
    def status(self) -> BreakerStatus:
        """The state as it is now."""
        with self._lock:
            return BreakerStatus(self._state, self._failures, self._openings, self._cause)

    def check(self) -> None:
        """Raises UnavailableError at once unless closed."""
        if not self.closed:
            raise UnavailableError(f"not asking {self._peer}, which failed {self._failures} times: {self._cause}")

    def record_success(self) -> None:
        """A call was answered. That closes no open breaker: a probe does."""
        if self._failures and self.closed:
            with self._lock:
                self._failures = 0 if self._state is BreakerState.CLOSED else self._failures

    def record_failure(self, cause: str) -> bool:
        """A call was not answered. True for the one failure that opens the breaker."""
        with self._lock:
            self._failures += 1
            self._cause = cause
            if self._state is not BreakerState.CLOSED or self._failures < self._failures_max:
                return False
            self._openings += 1
            self._state = BreakerState.OPEN
            self.closed = False
            return True

    def begin_probe(self) -> None:
        """One trial is under way."""
        with self._lock:
            if self._state is BreakerState.OPEN:
                self._state = BreakerState.HALF_OPEN

    def end_probe(self, failure: str | None) -> None:
        """The trial is over; None closes the breaker."""
        with self._lock:
            if failure is not None:
                self._state, self._cause = BreakerState.OPEN, failure
                return
            self._state = BreakerState.CLOSED
            self._failures = 0
            self.closed = True

    def forget(self) -> None:
        """In the child of a fork: nobody probes here, so that the next call finds out by itself."""
        self._lock = threading.Lock()
        self._state = BreakerState.CLOSED
        self._failures = 0
        self.closed = True


class GuardedServer:
    """A breaker, and the thread that probes while it is open. Thread-safe.

    The thread is there only while the breaker is open, belongs to this object and ends with `close`, or when who
    probes is gone: `probe` returns False then. It raises a KvstoreError while the server does not answer. `on_change`
    is called from the thread that saw the change, which must not be made to wait.
    """

    def __init__(
        self, peer: str, probe: Callable[[], bool], on_change: Callable[[BreakerStatus], None] | None = None
    ) -> None:
        self.breaker = Breaker(peer)
        self._peer = peer
        self._probe = probe
        self._on_change = on_change
        self._closing = threading.Event()
        self._lock = threading.Lock()  # guards _prober
        self._prober: threading.Thread | None = None
        _guards.add(self)

    def record_failure(self, error: UnavailableError) -> None:
        """Count a failure; where it opens the breaker, begin to probe."""
        if self.breaker.record_failure(str(error)):
            status = self.breaker.status
            logger.warning(
                "server not asked for a while: address=%s failures=%d cause=%s", self._peer, status.failures, error
            )
            self._tell(status)
            self._begin_to_probe()

    def close(self) -> None:
        """End the probing thread, after the probe it is in; idempotent."""
        self._closing.set()
        with self._lock:
            prober = self._prober
        if prober is not None and prober is not threading.current_thread():
            prober.join()

    def forget(self) -> None:
        """In the child of a fork, where the thread is not."""
        self._lock = threading.Lock()
        self._prober = None
        closing = threading.Event()
        if self._closing.is_set():
            closing.set()
        self._closing = closing
        self.breaker.forget()

    def _begin_to_probe(self) -> None:
        with self._lock:
            if not self._closing.is_set():
                prober = threading.Thread(target=self._probe_until_well, name="kvstore-probe", daemon=True)
                try:
                    prober.start()
                except RuntimeError:
                    # No thread is to be had. Calls find out by themselves, as nobody else would ever close the breaker.
                    self.breaker.end_probe(None)
                else:
                    self._prober = prober

    def _probe_until_well(self) -> None:
        backoff_seconds = BACKOFF_SECONDS_MIN
        while not self._closing.wait(jittered(backoff_seconds)):
            self.breaker.begin_probe()
            try:
                if not self._probe():
                    return
            except KvstoreError as error:
                self.breaker.end_probe(str(error))
                backoff_seconds = min(2 * backoff_seconds, BACKOFF_SECONDS_MAX)
                continue
            self.breaker.end_probe(None)
            logger.info("server asked again: address=%s", self._peer)
            self._tell(self.breaker.status)
            return

    def _tell(self, status: BreakerStatus) -> None:
        if self._on_change is not None:
            self._on_change(status)


def jittered(seconds: float) -> float:
    """Between half and one and a half of `seconds`, so that many clients do not ask a server at once."""
    return seconds * (0.5 + random.random())


_guards: weakref.WeakSet[GuardedServer] = weakref.WeakSet()


def _forget_all() -> None:
    for guard in list(_guards):
        guard.forget()


os.register_at_fork(after_in_child=_forget_all)
