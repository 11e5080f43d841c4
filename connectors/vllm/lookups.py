"""Lookups beside the scheduler: it asks, goes on scheduling, and asks again. Imports no vLLM."""

from __future__ import annotations

import queue
import threading
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.connectors.common import CacheClient, HookGuard, Promise
    from kvstore.connectors.vllm.plan import PackedTokens
    from kvstore.types import Root

THREADS = 4


class Lookup:
    """One request's lookup. Its answer is either taken, or abandoned: then its lease ends as soon as there is one.

    `tokens`, `root` and `found_blocks` are for who asked once it is settled, and belong to the lookup until then. It is
    `settled` when the answer has come, or is that there is none; a plain attribute, since it is looked at so often.
    `_lock` guards the step at which the answer meets the one who no longer wants it.
    """

    def __init__(self, ends_at: float, tokens: PackedTokens) -> None:
        self.ends_at = ends_at
        self.tokens = tokens
        self.root: Root | None = None
        self.found_blocks = 0
        self._lock = threading.Lock()
        self._promise: Promise | None = None
        self._abandoned = False
        self.settled = False

    @property
    def promise(self) -> Promise | None:
        """What is leased; None before the answer, and where it is nothing."""
        return self._promise

    def settle(self, promise: Promise | None) -> bool:
        """The answer is here; false if nobody wants it any more."""
        with self._lock:
            self.settled = True
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
    """Runs lookups on a few threads of its own, so that one that waits for a disk does not hold up the others.

    A plain queue: handing something over costs the scheduler 1 us, and 20 us by way of futures.
    """

    def __init__(self, client: CacheClient, guard: HookGuard) -> None:
        self._client = client
        self._guard = guard
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        for number in range(THREADS):
            threading.Thread(target=self._run, name=f"kvstore-vllm-lookup-{number}", daemon=True).start()

    def start(self, find: Callable[[Lookup], Promise | None], ends_at: float, tokens: PackedTokens) -> Lookup:
        """Run `find` in the background; what it returns is the answer. Who asked waits until `ends_at` at most.

        `tokens`, empty so far, are what the request's are to be packed into.
        """
        lookup = Lookup(ends_at, tokens)

        def run() -> None:
            promise = self._guard.run(partial(find, lookup), None)
            if not lookup.settle(promise) and promise is not None:
                self._client.release(promise)

        self._jobs.put(run)
        return lookup

    def release(self, promise: Promise) -> None:
        """End a lease in the background."""
        if promise.lease is not None:
            self._jobs.put(partial(self._client.release, promise))

    def close(self) -> None:
        """Let the threads end after what was asked of them so far; idempotent."""
        for _ in range(THREADS):
            self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
