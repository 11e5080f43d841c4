"""A gRPC server over any store, in a thread of this process."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvstore.transport.limits import ServiceLimits
from kvstore.transport.server import GrpcServer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.api import KvStore
    from kvstore.transport.limits import NamespaceSecrets


@contextmanager
def served(
    store: KvStore, listen: str, *, secrets: NamespaceSecrets, limits: ServiceLimits | None = None
) -> Iterator[str]:
    """Serve `store` on `listen` while the block runs; gives the bound address. The store stays the caller's."""
    loop = asyncio.new_event_loop()
    server = GrpcServer(store, listen=[listen], secrets=secrets, limits=limits or ServiceLimits(), observer=None)
    thread = threading.Thread(target=loop.run_forever, name="served")
    thread.start()
    try:
        (address,) = asyncio.run_coroutine_threadsafe(server.start(), loop).result()
        yield address
        asyncio.run_coroutine_threadsafe(server.stop(1.0), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
