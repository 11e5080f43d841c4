"""Waiting in tests: for what has to come about, however slow the machine is, and how long calls of ours took."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

ANSWER_SECONDS = 240.0
"""After this time nobody waits any more: what has not come about by then never will, on any machine."""

SLACK_SECONDS = 1.0
"""What a call may take on a slow machine besides the time for which it waits for others; see `Stopwatch`."""

_LOOK_SECONDS = 0.002
_NS_PER_SECOND = 1e9


def wait_until(holds: Callable[[], object]) -> None:
    """Look until it holds, and leave the cores to those who have to bring it about; AssertionError if it never does."""
    ends_at = time.monotonic() + ANSWER_SECONDS
    pause = threading.Event()
    while not holds():
        assert time.monotonic() < ends_at, "it never came to hold"
        pause.wait(_LOOK_SECONDS)


async def until(holds: Callable[[], object]) -> None:
    """The same for tasks of the running loop, which go on meanwhile."""
    ends_at = time.monotonic() + ANSWER_SECONDS
    while not holds():
        assert time.monotonic() < ends_at, "it never came to hold"
        await asyncio.sleep(0)


class Stopwatch:
    """How long something took this process, without the time for which its threads waited for a core.

    What a deadline bounds is how long we wait for others. That a machine with more work than cores runs a thread late
    is not counted: Linux says for how long each was ready and did not run (proc(5), `schedstat`). Where it does not
    say so, all time counts.
    """

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._starved_seconds = _starved_seconds()

    @property
    def seconds(self) -> float:
        """Since it began. A thread that has ended meanwhile takes its waiting with it, so less may be left out."""
        starved = max(0.0, _starved_seconds() - self._starved_seconds)
        return max(0.0, time.monotonic() - self._began - starved)


def _starved_seconds() -> float:
    """For how long threads of this process were ready to run and did not, all together."""
    waited_ns = 0
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError, IndexError), open(f"/proc/self/task/{thread}/schedstat", encoding="ascii") as figures:
            waited_ns += int(figures.read().split()[1])
    return waited_ns / _NS_PER_SECOND
