"""Whether a server gives back what it takes, found out in the background before anything of it is used."""

from __future__ import annotations

import enum
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.clock import Clock

RETRY_SECONDS = 5.0


class Soundness(enum.IntEnum):
    """What is known of a server, the worst last."""

    SOUND = 0
    CHECKING = 1
    UNANSWERED = 2
    UNSOUND = 3


class SelfCheck:
    """Stores and loads a random block on a thread of its own, again and again until there is an answer."""

    def __init__(self, check: Callable[[], bool | None], clock: Clock) -> None:
        self._check = check
        self._clock = clock
        self._state = Soundness.CHECKING
        self._retry_at = 0.0
        self._begin()

    @property
    def state(self) -> Soundness:
        """What is known so far."""
        return self._state

    def poll(self) -> None:
        """Ask again if the server did not answer, and it is time."""
        if self._state is Soundness.UNANSWERED and self._clock.monotonic() >= self._retry_at:
            self._retry_at = self._clock.monotonic() + RETRY_SECONDS
            self._begin()

    def wait(self, seconds: float) -> Soundness:
        """Wait for the check that is under way."""
        self._thread.join(seconds)
        return self._state

    def _begin(self) -> None:
        self._thread = threading.Thread(target=self._run, name="kvstore-vllm-check", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        found = None
        try:
            found = self._check()
        finally:
            self._retry_at = self._clock.monotonic() + RETRY_SECONDS
            self._state = {True: Soundness.SOUND, False: Soundness.UNSOUND, None: Soundness.UNANSWERED}[found]
