"""The client for event loops, as a KvStore: each method runs in a loop of its own thread."""

from __future__ import annotations

import asyncio
import inspect
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

import kvstore
from kvstore.testing.conformance import SECRETS, KvStoreConformance
from kvstore.testing.serving import served

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.testing.conformance import OpenStore
    from kvstore.testing.securing import Keyring

TENANT_SECRETS = dict.fromkeys(("tenant", "other"), SECRETS)
LISTEN = {
    "grpc": "grpc+unix://{}/socket",
    "wire": "unix://{}/socket",
    "wire over TCP": "127.0.0.1:0",
    "grpc over TLS": "grpc+tls://127.0.0.1:0",
    "wire over TLS": "tls://127.0.0.1:0",
}
# The core suite asks one of them; what the others add is carried by the client for threads, which it asks too.
CARRIERS = ["wire", *(pytest.param(name, marks=pytest.mark.slow) for name in LISTEN if name != "wire")]


class LoopThread:
    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def run(self, awaitable: Any) -> Any:
        async def wait() -> Any:
            return await awaitable

        return asyncio.run_coroutine_threadsafe(wait(), self.loop).result()

    def close(self) -> None:
        self.run(self.loop.shutdown_default_executor())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class Blocking:
    """An object with awaitable methods, its methods made blocking. Leases and stages that they return likewise."""

    def __init__(self, inner: Any, thread: LoopThread) -> None:
        self._inner = inner
        self._thread = thread

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        return self._blocking(value) if callable(value) else value

    def _blocking(self, method: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            result = method(*arguments, **named)
            if inspect.isawaitable(result):
                result = self._thread.run(result)
            return Blocking(result, self._thread) if hasattr(result, "__aexit__") else result

        return call

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *raised: Any) -> None:
        self._thread.run(self._inner.__aexit__(*raised))


@pytest.fixture(scope="module")
def keyring(tmp_path_factory: pytest.TempPathFactory) -> Keyring:
    pytest.importorskip("cryptography", reason="needs the extra certs")
    from kvstore.testing.securing import Keyring

    keyring = Keyring(tmp_path_factory.mktemp("keys"))
    keyring.let_in("engine", "*", "admin")
    return keyring


@pytest.mark.parametrize("carrier", CARRIERS)
class TestAsyncStore(KvStoreConformance):
    @pytest.fixture
    def open_store(self, tmp_path: Path, carrier: str, keyring: Keyring) -> Iterator[OpenStore]:
        shown = {}
        security = None
        if carrier.endswith("TLS"):
            shown = {"tls_ca": keyring.ca, "token_file": keyring.path("engine.token")}
            security = keyring.security()
        with ExitStack() as stack:
            thread = LoopThread()
            stack.callback(thread.close)

            def open_served(host_bytes: int, disk_bytes: int = 0) -> Any:
                path = tmp_path / "data"
                store = stack.enter_context(kvstore.open(path, host_bytes=host_bytes, disk_bytes=disk_bytes))
                address = stack.enter_context(
                    served(store, LISTEN[carrier].format(tmp_path), secrets=TENANT_SECRETS, security=security)
                )
                client = stack.enter_context(Blocking(kvstore.connect_async(address, **shown), thread))
                assert client.status().lane == carrier[:4]
                return client

            yield open_served
