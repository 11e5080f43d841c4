"""Lets an engine do its share of what its peers have begun, while somebody waits for that and no longer."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvstore.errors import BulkEngineError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.transport.bulk import BulkEngine

# Where the engine moves bytes in software this is how long they wait for it; with an adapter it only has to answer the
# first call of a peer.
_POLL_SECONDS = 50e-6
logger = logging.getLogger(__name__)


class Poller:
    """A thread that polls an engine while there are calls, from the first one on. Thread-safe.

    An engine that cannot be polled ends it, and the next call begins another. `_changed` guards `_calls`, `_thread` and
    `_closed`.
    """

    def __init__(self, engine: BulkEngine) -> None:
        self._engine = engine
        self._changed = threading.Condition()
        self._calls = 0
        self._thread: threading.Thread | None = None
        self._closed = False

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """While the block runs the engine is polled. Raises BulkEngineError where no thread is to be had for that."""
        with self._changed:
            if self._thread is None and not self._closed:
                self._thread = self._started()
            self._calls += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._calls -= 1

    def close(self) -> None:
        """End the thread; idempotent."""
        with self._changed:
            self._closed = True
            thread, self._thread = self._thread, None
            self._changed.notify_all()
        if thread is not None:
            thread.join()

    def _started(self) -> threading.Thread:
        thread = threading.Thread(target=self._run, name="bulk-engine-poll", daemon=True)
        try:
            thread.start()
        except RuntimeError as err:
            raise BulkEngineError(f"no thread is to be had to poll {self._engine.name}: {err}") from err
        return thread

    def _run(self) -> None:
        while self._has_work():
            try:
                self._engine.poll()
            except BulkEngineError as err:
                # Whoever waits for a transfer is told by the other side, or by its deadline.
                logger.warning("an engine for bytes cannot be polled: engine=%s cause=%s", self._engine.name, err)
                self._forget_thread()
                return
            time.sleep(_POLL_SECONDS)

    def _has_work(self) -> bool:
        with self._changed:
            while not self._calls and not self._closed:
                self._changed.wait()
            return not self._closed

    def _forget_thread(self) -> None:
        with self._changed:
            if self._thread is threading.current_thread():
                self._thread = None
