"""What the services of one server share: the store, its sessions, threads and buffers."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from kvstore.errors import UnavailableError
from kvstore.transport.session import SessionTable
from kvstore.transport.tenants import Owners, Tenants
from kvstore.transport.workers import BufferPool, Workers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from kvstore.api import KvStore
    from kvstore.clock import Clock
    from kvstore.transport.access import Access
    from kvstore.transport.bulk_rows import BulkEngineHost
    from kvstore.transport.cluster_view import ClusterView, Deleting, Diagnosing, Draining
    from kvstore.transport.limits import NamespaceSecrets, ServiceLimits
    from kvstore.transport.session import Session

_SHORT_THREADS = 8
_BULK_THREADS = 8
_LONG_THREADS = 4
_ENDING_THREADS = 2


class ServiceState:
    """What the services of one server share. Used from its event loop, but for what the workers run."""

    def __init__(
        self, store: KvStore, secrets: NamespaceSecrets, limits: ServiceLimits, access: Access, clock: Clock
    ) -> None:
        self.store = store
        self.secrets = secrets
        self.limits = limits
        self.access = access
        self.clock = clock
        self.began_at = clock.monotonic()
        self.tenants = Tenants(limits, clock)
        self.namespaces = Owners()
        self.pins = Owners()
        self.sessions = SessionTable(limits)
        self.buffers = BufferPool(limits.bulk_buffer_bytes)
        self.short = Workers("short", threads=_SHORT_THREADS, calls=limits.short_calls)
        self.bulk = Workers("bulk", threads=_BULK_THREADS, calls=limits.bulk_calls)
        self.long = Workers("long", threads=_LONG_THREADS, calls=limits.long_calls)
        self.prefetch = Workers("prefetch", threads=limits.prefetch_waiters, calls=limits.prefetch_waiters)
        self.events = Workers("event", threads=limits.event_readers, calls=limits.event_readers)
        # Set before the server starts, if it has one.
        self.bulk_engine: BulkEngineHost | None = None
        self.lends_memory = True  # to clients on this host; likewise
        self.cluster: ClusterView | None = None
        self.draining: Draining | None = None
        self.deletions: Deleting | None = None
        self.doctor: Diagnosing | None = None
        self.stopping = asyncio.Event()
        self.unended_handles = 0
        # Takes every call, without a place: what is held must be given back, however busy the rest is.
        self.endings = Workers("ending", threads=_ENDING_THREADS, calls=limits.sessions)
        self._ending: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def bulk_call(self) -> AsyncIterator[None]:
        """A place among the bulk calls, for a limited time, so that a stalled client cannot keep it."""
        with self.bulk.place():
            try:
                async with asyncio.timeout(self.limits.bulk_seconds_max):
                    yield
            except TimeoutError as err:
                raise UnavailableError(f"the transfer took longer than {self.limits.bulk_seconds_max} s") from err

    def end_session(self, session: Session) -> None:
        """Forget the session at once; its leases and stages end in the background."""
        self.sessions.remove(session)
        self.end_in_background(session.close)

    def dismiss_strangers(self) -> None:
        """End the sessions of those whose token or certificate has expired or was revoked."""
        for session in self.sessions:
            if not self.access.holds(session.principal):
                session.dismiss()

    def end_in_background(self, end: Callable[[], int]) -> None:
        """Run `end` in a thread that waits for no other call; it returns how many things could not be ended."""
        task = asyncio.get_running_loop().create_task(self._count_unended(end))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """Wait for sessions that are ending and for running store calls. No call may be open any more."""
        while self._ending:
            await asyncio.wait(self._ending)
        for workers in (self.short, self.bulk, self.long, self.prefetch, self.events, self.endings):
            await asyncio.to_thread(workers.close)
        if self.bulk_engine is not None:
            await asyncio.to_thread(self.bulk_engine.close)

    async def _count_unended(self, end: Callable[[], int]) -> None:
        self.unended_handles += await self.endings.call(end)
