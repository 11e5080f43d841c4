"""The room lock goes round, in the order in which it was asked for."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING

import pytest

from kvstore.store.turn_lock import TurnLock

if TYPE_CHECKING:
    from types import FrameType


def waiting(lock: TurnLock) -> int:
    return len(lock._waiting)


def test_who_asks_again_comes_after_all_who_wait() -> None:
    lock = TurnLock()
    order: list[int] = []

    def take(number: int) -> None:
        with lock:
            order.append(number)

    lock.acquire()
    threads = []
    for number in range(5):
        threads.append(threading.Thread(target=take, args=(number,)))
        threads[-1].start()
        while waiting(lock) <= number:
            pass
    lock.release()
    take(5)
    for thread in threads:
        thread.join()
    assert [0, 1, 2, 3, 4, 5] == order


def test_who_gives_up_waiting_is_passed_over() -> None:
    lock = TurnLock()
    lock.acquire()
    assert not lock.acquire(timeout=0.01)
    assert 0 == waiting(lock)
    lock.release()
    assert lock.acquire(timeout=0.0)
    lock.release()


def test_many_threads_exclude_each_other() -> None:
    lock = TurnLock()
    inside: list[int] = []
    wrong: list[int] = []

    def work() -> None:
        for _ in range(300):
            if lock.acquire(timeout=1e-4) or lock.acquire():
                inside.append(1)
                if len(inside) != 1:
                    wrong.append(1)
                inside.pop()
                lock.release()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ([], 0) == (wrong, waiting(lock))
    assert lock.acquire(timeout=0.0)


def test_only_what_is_held_is_released() -> None:
    with pytest.raises(AssertionError, match="holds"):
        TurnLock().release()


def test_who_is_interrupted_when_its_turn_has_come_leaves_the_lock_to_others() -> None:
    lock = TurnLock()
    lock.acquire()

    def hand_over_and_interrupt(number: int, frame: FrameType | None) -> None:
        lock.release()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, hand_over_and_interrupt)
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        while not waiting(lock):
            pass
        signal.pthread_kill(main, signal.SIGUSR1)

    interrupter = threading.Thread(target=interrupt)
    try:
        interrupter.start()
        with pytest.raises(KeyboardInterrupt):
            lock.acquire()
    finally:
        interrupter.join()
        signal.signal(signal.SIGUSR1, before)
    assert lock.acquire(timeout=0.0)
    lock.release()


def attempts(lock: TurnLock, count: int) -> int:
    """Take the lock many times, interrupted by an alarm a little later each time; how often that was in a wait."""
    interrupts = 0
    for number in range(count):
        signal.setitimer(signal.ITIMER_REAL, 1e-6 * (1 + number % 300))
        try:
            held = lock.acquire(timeout=2e-3)
        except KeyboardInterrupt:
            interrupts += 1
        else:
            if held:
                lock.release()
    signal.setitimer(signal.ITIMER_REAL, 0)
    return interrupts


def test_interrupts_at_any_moment_lose_neither_the_lock_nor_a_turn() -> None:
    lock = TurnLock()
    inside: list[int] = []
    wrong: list[int] = []
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            with lock:
                inside.append(1)
                if len(inside) != 1:
                    wrong.append(1)
                inside.pop()

    def interrupt(number: int, frame: FrameType | None) -> None:
        # Only within `acquire`: what comes behind it is the caller's.
        if frame is not None and frame.f_code in (TurnLock.acquire.__code__, TurnLock._take_or_wait.__code__):
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        interrupts = attempts(lock, 1500)
    finally:
        over.set()
        for thread in threads:
            thread.join()
        signal.signal(signal.SIGALRM, before)
    assert ([], 0) == (wrong, waiting(lock))
    assert lock.acquire(timeout=0.0)
    assert interrupts
