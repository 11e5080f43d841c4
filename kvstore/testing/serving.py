"""A server over any store, in a thread of this process."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from kvstore.transport.limits import ServiceLimits
from kvstore.transport.roles import Role
from kvstore.transport.security import local_security
from kvstore.transport.server import TransportServer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    from kvstore.api import KvStore
    from kvstore.transport.bulk_rows import BulkEngineHost
    from kvstore.transport.cluster_view import Diagnosing
    from kvstore.transport.limits import CallObserver, NamespaceSecrets
    from kvstore.transport.security import Security


class ServedStore:
    """Serves from construction to `stop`; the store stays its owner's. `addresses` have the real ports.

    Without `security` whoever is on this machine may do everything.
    """

    def __init__(
        self,
        store: KvStore,
        listen: Sequence[str] = ("127.0.0.1:0",),
        *,
        secrets: NamespaceSecrets | None = None,
        limits: ServiceLimits | None = None,
        observer: CallObserver | None = None,
        security: Security | None = None,
        bulk_engine: BulkEngineHost | None = None,
        arena: str = "map",
        doctor: Diagnosing | None = None,
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="served-store")
        self._thread.start()
        self.server = TransportServer(
            store,
            listen=listen,
            secrets=secrets or {},
            limits=limits or ServiceLimits(),
            observer=observer,
            security=security or local_security(Role.ADMIN),
            bulk_engine=bulk_engine,
            arena=arena,
            doctor=doctor,
        )
        try:
            self.addresses = asyncio.run_coroutine_threadsafe(self.server.start(), self._loop).result()
        except BaseException:
            self._end_loop()
            raise

    def reload(self) -> None:
        """Read certificates, access file and keys again."""
        asyncio.run_coroutine_threadsafe(self.server.reload(), self._loop).result()

    def stop(self, grace_seconds: float = 0.0) -> None:
        """Stop the server and its thread; idempotent."""
        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self.server.stop(grace_seconds), self._loop).result()
            self._end_loop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _end_loop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._loop.shutdown_default_executor(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@contextmanager
def served(
    store: KvStore,
    listen: str,
    *,
    secrets: NamespaceSecrets,
    limits: ServiceLimits | None = None,
    security: Security | None = None,
) -> Iterator[str]:
    """Serve `store` on `listen` while the block runs; gives the bound address."""
    with ServedStore(store, [listen], secrets=secrets, limits=limits, security=security) as running:
        yield running.addresses[0]


def grpc_address(address: str) -> str:
    """An address of both lanes, such that a client uses gRPC."""
    return f"grpc+{address}" if address.startswith("unix:") else f"grpc://{address}"
