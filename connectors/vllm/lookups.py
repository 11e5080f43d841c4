"""Lookups beside the scheduler: it asks, goes on scheduling, and asks again. Imports no vLLM."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.connectors.common import CacheClient, Promise
    from kvstore.types import Root

THREADS = 4


class Lookup:
    """One request's lookup. Its answer is either taken, or abandoned: then its lease ends as soon as there is one.

    `_lock` guards the step at which the answer meets the one who no longer wants it.
    """

    def __init__(self, ends_at: float) -> None:
        self.ends_at = ends_at
        self.root: Root | None = None
        self.found_blocks = 0
        self._lock = threading.Lock()
        self._promise: Promise | None = None
        self._abandoned = False
        self._settled = False

    @property
    def settled(self) -> bool:
        """Whether the answer has come, or is that there is none."""
        return self._settled

    @property
    def promise(self) -> Promise | None:
        """What is leased; None before the answer, and where it is nothing."""
        return self._promise

    def settle(self, promise: Promise | None) -> bool:
        """The answer is here; false if nobody wants it any more."""
        with self._lock:
            self._settled = True
            if not self._abandoned:
                self._promise = promise
            return not self._abandoned

    def take(self) -> Promise | None:
        """Take the answer over, or abandon it if it has not come; from now on it is not this lookup's any more."""
        with self._lock:
            self._abandoned = True
            promise, self._promise = self._promise, None
            return promise


class Lookups:
    """Runs lookups on a few threads of its own, so that one that waits for a disk does not hold up the others."""

    def __init__(self, client: CacheClient) -> None:
        self._client = client
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="kvstore-vllm-lookup")

    def start(self, find: Callable[[Lookup], Promise | None], ends_at: float) -> Lookup:
        """Run `find` in the background; what it returns is the answer. Who asked waits until `ends_at` at most."""
        lookup = Lookup(ends_at)

        def run() -> None:
            promise = None
            try:
                promise = find(lookup)
            finally:
                if not lookup.settle(promise) and promise is not None:
                    self._client.release(promise)

        self._threads.submit(run)
        return lookup

    def release(self, promise: Promise) -> None:
        """End a lease in the background."""
        if promise.lease is not None:
            self._threads.submit(self._client.release, promise)

    def close(self) -> None:
        """Take no more lookups; those that wait are dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)
