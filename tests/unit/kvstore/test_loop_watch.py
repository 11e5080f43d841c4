"""The watch of an event loop: told of what stands still, and of nothing else. Turns are short here, not timed."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading

import pytest

from kvstore.loop_watch import STALL_TURNS, LoopWatch
from kvstore.testing.patience import ANSWER_SECONDS

TURN_SECONDS = 0.01
HANGING = """
import asyncio, os, time
from kvstore.log_lines import log_to_stderr
from kvstore.insight_config import LogConfig
from kvstore.loop_watch import LoopWatch

async def hang_for_ever():
    time.sleep(1000)

log_to_stderr(LogConfig())
watch = LoopWatch(end=lambda: os._exit(70), end_turns=10, turn_seconds=0.01)
asyncio.run(watch.over(hang_for_ever()))
"""


def watch_until(stalled: threading.Event, *, end_turns: int | None = None, end=lambda: None) -> LoopWatch:
    """A watch whose log sets an event when the loop stands still."""
    handler = logging.Handler()
    handler.emit = lambda record: stalled.set() if record.levelno >= logging.ERROR else None  # type: ignore[method-assign]
    logging.getLogger("kvstore.loop_watch").addHandler(handler)
    return LoopWatch(end=end, end_turns=end_turns, turn_seconds=TURN_SECONDS)


def test_a_loop_that_turns_is_left_alone():
    watch = LoopWatch(end=lambda: pytest.fail("ended"), end_turns=STALL_TURNS, turn_seconds=TURN_SECONDS)

    async def work() -> None:
        for _ in range(3 * STALL_TURNS):
            await asyncio.sleep(TURN_SECONDS)
        assert not watch.stalled

    asyncio.run(watch.over(work()))
    assert 0 == watch.stalls


def test_a_loop_that_stands_still_is_counted_named_and_found_well_again(caplog):
    stalled = threading.Event()
    watch = watch_until(stalled)

    async def stand_still() -> None:
        stalled.wait(ANSWER_SECONDS)
        assert watch.stalled
        for _ in range(1000):
            await asyncio.sleep(TURN_SECONDS)
            if not watch.stalled:
                return

    with caplog.at_level(logging.WARNING):
        asyncio.run(watch.over(stand_still()))

    assert 1 == watch.stalls
    said = [record.getMessage() for record in caplog.records]
    assert ["the event loop stands still", "the event loop goes on"] == [line.partition(":")[0] for line in said]
    assert "test_loop_watch.py" in said[0]
    assert "stand_still" in said[0]


def test_what_ends_the_work_reaches_the_caller_and_ends_the_watch():
    watch = LoopWatch(end=lambda: None, end_turns=None, turn_seconds=TURN_SECONDS)

    async def fail() -> None:
        raise ValueError("this")

    with pytest.raises(ValueError, match="this"):
        asyncio.run(watch.over(fail()))
    assert [] == [thread for thread in threading.enumerate() if thread.name == "kvstore-loop-watch"]


def test_a_loop_that_does_not_go_on_ends_the_process_and_says_where():
    done = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=ANSWER_SECONDS)

    assert 70 == done.returncode
    lines = done.stderr.splitlines()
    assert 2 == len(lines), done.stderr
    assert "hang_for_ever" in lines[-1]
