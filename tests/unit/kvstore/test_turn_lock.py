"""The room lock goes round, in the order in which it was asked for."""

from __future__ import annotations

import threading

import pytest

from kvstore.store.turn_lock import TurnLock


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
