"""A pool of threads whose jobs either run or never begin."""

from __future__ import annotations

import threading

import pytest

from kvstore.errors import UnavailableError
from kvstore.testing.patience import ANSWER_SECONDS
from kvstore.thread_pool import ThreadPool


def refuse(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_results_and_errors_are_those_of_the_jobs():
    with ThreadPool(2, "test") as pool:
        assert 7 == pool.submit(lambda number, *, plus: number + plus, 3, plus=4).result()
        with pytest.raises(ValueError, match="this"):
            pool.submit(int, "this").result()


def test_a_job_that_finds_no_thread_is_refused_by_name_and_never_runs(monkeypatch):
    ran: list[int] = []
    with ThreadPool(2, "test") as pool:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(UnavailableError, match="no thread is to be had for test"):
                pool.submit(ran.append, 1)
        pool.submit(ran.append, 2).result()
    assert [2] == ran


def test_a_job_that_a_busy_pool_cannot_start_is_not_left_to_its_other_thread(monkeypatch):
    ran: list[int] = []
    begun, go_on = threading.Event(), threading.Event()
    with ThreadPool(2, "test") as pool:
        pool.submit(lambda: (begun.set(), go_on.wait()))
        assert begun.wait(ANSWER_SECONDS)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(UnavailableError):
                pool.submit(ran.append, 1)
        go_on.set()
    assert [] == ran


def test_after_its_end_a_pool_says_so_as_ever():
    pool = ThreadPool(1, "test")
    pool.shutdown()
    with pytest.raises(RuntimeError, match="shutdown"):
        pool.submit(print)
