"""Jobs that lack the same boundary: one runs at a time, each has its turn, and all of them end."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from kvstore.clock import SystemClock
from kvstore.cluster.peer_prefetch import BringJob, BringJobs
from kvstore.store.movers import Movers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KEY, OTHER_KEY = b"k" * 16, b"o" * 16
SECONDS = 30.0


class Work:
    """Steps of jobs, which run until they are let go; the names of those that ran, in order."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.running = threading.Semaphore(0)
        self.gate = threading.Event()

    def steps(self, name: str) -> Callable[[BringJob], Iterator[float]]:
        def run(_job: BringJob) -> Iterator[float]:
            self.ran.append(name)
            self.running.release()
            while not self.gate.is_set():
                yield 0.001

        return run


@pytest.fixture
def movers() -> Iterator[Movers]:
    made = Movers(threads=2, jobs_max=8, on_failure=lambda: None)
    yield made
    made.close()


@pytest.fixture
def work() -> Iterator[Work]:
    made = Work()
    yield made
    made.gate.set()


def job_of(jobs: BringJobs, work: Work, name: str, key: bytes = KEY) -> BringJob:
    return BringJob(jobs, key, work.steps(name), SystemClock(), SECONDS)


def test_those_that_lack_the_same_run_one_after_the_other(movers: Movers, work: Work) -> None:
    jobs = BringJobs(movers, waiting_max=8)
    started = [job_of(jobs, work, name) for name in ("a", "b", "c")]
    assert [True] * 3 == [jobs.start(job) for job in started]
    work.running.acquire()
    assert (["a"], 3) == (work.ran, jobs.depth)
    work.gate.set()
    assert [True] * 3 == [job.ended.wait(SECONDS) for job in started]
    assert ({"a", "b", "c"}, 0) == (set(work.ran), jobs.depth)


def test_those_that_lack_something_else_run_beside_them(movers: Movers, work: Work) -> None:
    jobs = BringJobs(movers, waiting_max=8)
    for job in (job_of(jobs, work, "a"), job_of(jobs, work, "b", OTHER_KEY)):
        assert jobs.start(job)
    assert work.running.acquire(timeout=SECONDS)
    assert work.running.acquire(timeout=SECONDS)


def test_one_too_many_is_refused_at_once(movers: Movers, work: Work) -> None:
    jobs = BringJobs(movers, waiting_max=2)
    taken = [job_of(jobs, work, "a"), job_of(jobs, work, "b")]
    assert [True, True, False] == [jobs.start(job) for job in (*taken, job_of(jobs, work, "c"))]
    work.gate.set()
    assert all(job.ended.wait(SECONDS) for job in taken)
    assert jobs.start(job_of(jobs, work, "d"))


def test_who_is_cancelled_while_it_runs_lets_the_next_one_run(movers: Movers, work: Work) -> None:
    jobs = BringJobs(movers, waiting_max=8)
    first, second = job_of(jobs, work, "a"), job_of(jobs, work, "b")
    jobs.start(first)
    jobs.start(second)
    work.running.acquire()
    first.cancel()
    assert first.ended.wait(SECONDS)
    assert work.running.acquire(timeout=SECONDS)
    assert ["a", "b"] == work.ran


def test_who_is_cancelled_before_its_turn_never_runs(movers: Movers, work: Work) -> None:
    jobs = BringJobs(movers, waiting_max=8)
    first, second, third = (job_of(jobs, work, name) for name in "abc")
    for job in (first, second, third):
        jobs.start(job)
    second.cancel()
    second.cancel()
    assert second.ended.is_set()
    work.gate.set()
    assert third.ended.wait(SECONDS)
    assert (["a", "c"], 0) == (work.ran, jobs.depth)


def test_who_waits_for_a_thread_and_is_cancelled_never_runs(movers: Movers, work: Work) -> None:
    jobs = BringJobs(movers, waiting_max=8)
    busy = [job_of(jobs, work, name, name.encode() * 16) for name in "abc"]
    for job in busy:
        jobs.start(job)
    waiting = busy[2]
    follower = job_of(jobs, work, "d", waiting.key)
    jobs.start(follower)
    waiting.cancel()
    assert waiting.ended.is_set()
    work.gate.set()
    assert follower.ended.wait(SECONDS)
    assert {"a", "b", "d"} == set(work.ran)


def test_threads_that_end_take_all_jobs_with_them(movers: Movers, work: Work) -> None:
    jobs = BringJobs(movers, waiting_max=8)
    started = [job_of(jobs, work, str(number), bytes([number % 3]) * 16) for number in range(7)]
    for job in started:
        jobs.start(job)
    work.running.acquire()
    jobs.close()
    movers.close()
    assert all(job.ended.is_set() for job in started)
    assert 0 == jobs.depth
