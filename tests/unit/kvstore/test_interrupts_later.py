"""SIGINT kept back for a while, in programs that handle signals themselves: theirs is the last word."""

from __future__ import annotations

import _thread
import asyncio
import signal
import threading
from typing import TYPE_CHECKING

import pytest

from kvstore.store.interrupts import InterruptsLater, uninterrupted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def on_sigterm(call: Callable[[], object]) -> None:
    signal.signal(signal.SIGTERM, lambda _number, _frame: call())


def test_a_handler_installed_meanwhile_stays_and_hears_what_was_kept() -> None:
    heard: list[int] = []

    def hear(number: int, _frame: object) -> None:
        heard.append(number)

    on_sigterm(lambda: signal.signal(signal.SIGINT, hear))
    with InterruptsLater():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
    assert (hear, [signal.SIGINT]) == (signal.getsignal(signal.SIGINT), heard)


def test_an_interrupt_that_is_to_be_ignored_from_now_on_is_ignored() -> None:
    on_sigterm(lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    with InterruptsLater():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
    assert signal.SIG_IGN == signal.getsignal(signal.SIGINT)


def test_the_handler_that_another_takes_note_of_meanwhile_works_when_it_is_put_back() -> None:
    noted: list[signal._HANDLER] = []
    on_sigterm(lambda: noted.append(signal.getsignal(signal.SIGINT)))
    with InterruptsLater():
        signal.raise_signal(signal.SIGTERM)
    signal.signal(signal.SIGINT, noted[0])
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_within_each_other_the_outermost_tells_once() -> None:
    reached = []

    @uninterrupted
    def inner() -> None:
        signal.raise_signal(signal.SIGINT)
        reached.append("inner")

    @uninterrupted
    def outer() -> None:
        inner()
        reached.append("outer")

    with pytest.raises(KeyboardInterrupt):
        outer()
    assert (["inner", "outer"], signal.default_int_handler) == (reached, signal.getsignal(signal.SIGINT))


def test_a_loop_that_handles_the_signal_itself_hears_it_once() -> None:
    async def run() -> int:
        heard = []
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, heard.append, 1)
        with InterruptsLater():
            signal.raise_signal(signal.SIGINT)
        for _ in range(10):
            await asyncio.sleep(0)
        return len(heard)

    assert 1 == asyncio.run(run())


def test_a_task_that_a_loop_cancels_for_an_interrupt_is_cancelled_after_the_block() -> None:
    ended = []

    async def run() -> None:
        with InterruptsLater():
            signal.raise_signal(signal.SIGINT)
            ended.append("block")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("task")
            raise

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(run())
    assert (["block", "task"], signal.default_int_handler) == (ended, signal.getsignal(signal.SIGINT))


def test_a_thread_that_python_did_not_start_leaves_nothing_behind() -> None:
    def run(ended: _thread.LockType) -> None:
        with InterruptsLater():
            pass
        ended.release()

    before = threading.active_count()
    for _ in range(20):
        ended = _thread.allocate_lock()
        ended.acquire()
        _thread.start_new_thread(run, (ended,))
        ended.acquire()
    assert before == threading.active_count()
