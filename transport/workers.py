"""Threads for the store's synchronous calls, so that the event loop never waits for one."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from kvstore.errors import NoSpaceError
from kvstore.thread_pool import ThreadPool
from kvstore.tiers.buffers import aligned_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

T = TypeVar("T")
_IDLE_BUFFERS_MAX = 4


class Workers:
    """A pool of threads with a limited number of calls, running or queued. Used from one event loop."""

    def __init__(self, name: str, *, threads: int, calls: int) -> None:
        self._name = name
        self._pool = ThreadPool(threads, name)
        self._calls_max = calls
        self._calls = 0

    @property
    def depth(self) -> int:
        """Calls that run or are queued."""
        return self._calls

    @contextmanager
    def place(self) -> Iterator[None]:
        """Take one of the places for the time of a call; raises NoSpaceError at once if there is none."""
        if self._calls >= self._calls_max:
            raise NoSpaceError(f"{self._calls_max} {self._name} calls are running already; try again later")
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1

    async def call(self, function: Callable[[], T], *, undo: Callable[[T], object] | None = None) -> T:
        """Run `function` in a thread, within a place already taken.

        If the caller is cancelled meanwhile, nobody learns the result: `undo` then gets it, in the thread.
        """
        future = self._pool.submit(function)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if undo is not None:
                future.add_done_callback(lambda done: _undo(done, undo))
            raise

    async def run(self, function: Callable[[], T], *, undo: Callable[[T], object] | None = None) -> T:
        """Take a place and run `function` in it."""
        with self.place():
            return await self.call(function, undo=undo)

    def close(self) -> None:
        """Wait for what is running; what is queued is dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)


class BufferPool:
    """Memory for bulk calls, reused since fresh pages cost more than the copy itself. Thread-safe.

    A buffer that is not given back is simply freed: who is interrupted drops it, as a thread may still use it.
    """

    def __init__(self, buffer_bytes: int) -> None:
        self._buffer_bytes = buffer_bytes
        self._lock = threading.Lock()
        self._idle: list[NDArray[np.uint8]] = []  # guarded by _lock

    def take(self, size_bytes: int) -> NDArray[np.uint8]:
        """A buffer of at least `size_bytes`, of undefined content."""
        if size_bytes > self._buffer_bytes:
            return np.empty(size_bytes, dtype=np.uint8)
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return aligned_bytes(self._buffer_bytes)  # so that the disk reads blocks of whole pages straight into it

    def give_back(self, buffer: NDArray[np.uint8]) -> None:
        """Let others use the buffer."""
        with self._lock:
            if buffer.size == self._buffer_bytes and len(self._idle) < _IDLE_BUFFERS_MAX:
                self._idle.append(buffer)


def _undo(done: Future[T], undo: Callable[[T], object]) -> None:
    if not done.cancelled() and done.exception() is None:
        undo(done.result())
