from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kvstore.store.movers import Movers
from kvstore.testing.patience import ANSWER_SECONDS

if TYPE_CHECKING:
    import pytest


class Job:
    """Waits to be let go; tells what became of it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.outcome = threading.Event()
        self.fate = ""
        self._error = error

    def run(self) -> None:
        self.begun.set()
        self.go_on.wait()
        self.end("run")
        if self._error is not None:
            raise self._error

    def drop(self) -> None:
        self.end("dropped")

    def end(self, fate: str) -> None:
        assert not self.fate
        self.fate = fate
        self.outcome.set()


def new_movers(**named: object) -> Movers:
    return Movers(**{"threads": 1, "jobs_max": 3, "on_failure": lambda: None, **named})  # type: ignore[arg-type]


def test_a_full_queue_refuses_at_once_and_takes_jobs_again_when_one_has_ended():
    movers = new_movers()
    jobs = [Job() for _ in range(3)]
    assert [True] * 3 == [movers.offer(job) for job in jobs]
    assert not movers.offer(Job())
    assert 3 == movers.depth
    assert jobs[0].begun.wait(ANSWER_SECONDS)
    jobs[0].go_on.set()
    assert jobs[1].begun.wait(ANSWER_SECONDS)  # so the first one has been counted off
    jobs.append(Job())
    assert movers.offer(jobs[3])
    for job in jobs:
        job.go_on.set()
    assert all(job.outcome.wait(ANSWER_SECONDS) for job in jobs)
    movers.close()
    assert ["run"] * 4 == [job.fate for job in jobs]


def test_a_job_can_be_taken_back_until_it_runs():
    movers = new_movers()
    running, waiting = Job(), Job()
    movers.offer(running)
    movers.offer(waiting)
    assert running.begun.wait(ANSWER_SECONDS)
    assert not movers.withdraw(running)
    assert movers.withdraw(waiting)
    assert not movers.withdraw(waiting)
    assert 1 == movers.depth
    running.go_on.set()
    movers.close()
    assert ["run", ""] == [running.fate, waiting.fate]


def test_close_drops_what_waits_and_returns_when_what_runs_has_ended():
    movers = new_movers()
    running, waiting = Job(), Job()
    movers.offer(running)
    movers.offer(waiting)
    assert running.begun.wait(ANSWER_SECONDS)
    closing = threading.Thread(target=movers.close)
    closing.start()
    assert waiting.outcome.wait(ANSWER_SECONDS)
    assert closing.is_alive()
    running.go_on.set()
    closing.join(ANSWER_SECONDS)
    assert ["run", "dropped"] == [running.fate, waiting.fate]
    assert not movers.offer(Job())
    movers.close()


def test_without_a_job_there_is_no_thread():
    before = threading.active_count()
    movers = new_movers(threads=4)
    assert before == threading.active_count()
    movers.close()


def test_a_job_that_raises_is_counted_and_the_thread_goes_on(caplog: pytest.LogCaptureFixture):
    failures: list[int] = []
    movers = new_movers(on_failure=lambda: failures.append(1))
    jobs = [Job(ValueError("planted")), Job()]
    for job in jobs:
        job.go_on.set()
        assert movers.offer(job)
    assert all(job.outcome.wait(ANSWER_SECONDS) for job in jobs)
    movers.close()
    assert [1] == failures
    assert "moving blocks failed" in caplog.text


def test_a_thread_that_has_died_is_replaced_at_the_next_job(monkeypatch):
    ended: list[object] = []
    monkeypatch.setattr(threading, "excepthook", ended.append)
    movers = new_movers()
    deadly = Job(SystemExit())  # type: ignore[arg-type]  # nothing that a job should raise: the thread does not catch it
    deadly.go_on.set()
    assert movers.offer(deadly)
    assert deadly.outcome.wait(ANSWER_SECONDS)
    while any(thread.name.startswith("kvstore-mover") for thread in threading.enumerate()):
        pass

    job = Job()
    job.go_on.set()
    assert movers.offer(job)
    assert job.outcome.wait(ANSWER_SECONDS)
    movers.close()
    assert "run" == job.fate
    assert 0 == movers.depth


def test_without_a_thread_to_be_had_a_job_is_refused_at_once(monkeypatch):
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    movers = new_movers()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert not movers.offer(Job())
    assert 0 == movers.depth

    job = Job()
    job.go_on.set()
    assert movers.offer(job)
    assert job.outcome.wait(ANSWER_SECONDS)
    movers.close()
