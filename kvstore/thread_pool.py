"""A pool of threads that either does a job or never begins it, also where the system refuses a thread."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Generic, ParamSpec, TypeVar

from kvstore.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
T = TypeVar("T")


class ThreadPool(ThreadPoolExecutor):
    """The executor of the standard library queues a job before it starts a thread for it. Where that thread is refused
    the caller gets an error while the job stays queued, and another thread does it at some later time, with memory that
    is the caller's again. Here it is taken back first.
    """

    def __init__(self, threads: int, name: str) -> None:
        super().__init__(threads, thread_name_prefix=f"kvstore-{name}")
        self._name = name

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """As ever; raises UnavailableError, and the job will not run, where a thread is needed and cannot be had."""
        job = _Job(lambda: fn(*args, **kwargs))
        try:
            return super().submit(job.run)
        except RuntimeError as error:
            if "shutdown" in str(error):
                raise
            if (done := job.withdraw()) is not None:
                return done
            raise UnavailableError(f"no thread is to be had for {self._name}: {error}") from error


class _Job(Generic[T]):
    """What a thread is to do, unless it was taken back. `_lock` is held while it runs."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call: Callable[[], T] | None = call
        self._lock = threading.Lock()
        self._done: Future[T] = Future()

    def run(self) -> T:
        with self._lock:
            call, self._call = self._call, None
            if call is not None:
                try:
                    self._done.set_result(call())
                except BaseException as error:  # noqa: BLE001  # it is whoever asks for the result who gets it
                    self._done.set_exception(error)
                return self._done.result()
        raise CancelledError

    def withdraw(self) -> Future[T] | None:
        """Returns when it does not run and never will; with what came of it, where a thread was quicker."""
        with self._lock:
            was_waiting, self._call = self._call is not None, None
            return None if was_waiting else self._done
