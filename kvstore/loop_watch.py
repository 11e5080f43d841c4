"""Notices an event loop that stands still, from outside of it.

Whatever lives in a loop cannot tell that it has stopped: its health checks stop too. A thread asks the loop for a sign
at every turn. It counts its own turns and reads no clock, so a process that was paused as a whole is not taken for one
whose loop hangs.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import FrameType

logger = logging.getLogger(__name__)

TURN_SECONDS = 1.0
# A loop may be late for a page fault or a neighbour on its core; seconds on end are something else.
STALL_TURNS = 5
_FRAMES_SHOWN = 6


class LoopWatch:
    """Watches the loop of one piece of work.

    A loop that gives no sign for STALL_TURNS turns is stalled: counted, and logged with the place where it stands.
    `end` is called after `end_turns` turns without a sign; None: never.
    """

    def __init__(self, *, end: Callable[[], None], end_turns: int | None, turn_seconds: float = TURN_SECONDS) -> None:
        self._end = end
        self._end_turns = end_turns
        self._turn_seconds = turn_seconds
        self._stopping = threading.Event()
        self._sign = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-loop-watch", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._silent_turns = 0
        self._stalls = 0

    @property
    def stalled(self) -> bool:
        """Whether the loop stands still."""
        return self._silent_turns >= STALL_TURNS

    @property
    def stalls(self) -> int:
        """How often it did."""
        return self._stalls

    async def over(self, work: Awaitable[None]) -> None:
        """Do the work and watch the loop that does it, until it is done. Once only."""
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._thread.start()
        try:
            await work
        finally:
            self._stopping.set()
            self._thread.join()

    def _run(self) -> None:
        while self._ask() and not self._stopping.wait(self._turn_seconds):
            if self._sign.is_set():
                self._sign.clear()
                self._on_sign()
            else:
                self._on_silence()

    def _ask(self) -> bool:
        """Ask for a sign, once until it is given; false where the loop has been closed."""
        if self._silent_turns == 0 and self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(self._sign.set)
            except RuntimeError:
                return False
        return True

    def _on_sign(self) -> None:
        if self.stalled:
            logger.warning("the event loop goes on: stood_still_turns=%d", self._silent_turns)
        self._silent_turns = 0

    def _on_silence(self) -> None:
        self._silent_turns += 1
        if self._silent_turns == STALL_TURNS:
            self._stalls += 1
            logger.error("the event loop stands still: where=%s", self._where())
        if self._silent_turns == self._end_turns:
            logger.critical("the event loop does not go on, ending the process: where=%s", self._where())
            self._end()

    def _where(self) -> str:
        """The innermost functions of the thread of the loop."""
        frame = sys._current_frames().get(self._loop_thread)  # noqa: SLF001  # documented
        return " < ".join(_places(frame)) or "unknown"


def _places(frame: FrameType | None) -> list[str]:
    places: list[str] = []
    while frame is not None and len(places) < _FRAMES_SHOWN:
        code = frame.f_code
        places.append(f"{code.co_filename.rpartition('/')[2]}:{frame.f_lineno}:{code.co_name}")
        frame = frame.f_back
    return places
