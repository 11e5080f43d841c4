from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

import kvstore
from kvstore.testing.conformance import SECRETS, KvStoreConformance
from kvstore.testing.conformance_prefetch import PrefetchConformance
from kvstore.testing.serving import served

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.testing.conformance import OpenStore

TENANT_SECRETS = dict.fromkeys(("tenant", "other"), SECRETS)


LISTEN = {
    "gRPC, TCP": "grpc://127.0.0.1:0",
    "gRPC, Unix socket": "grpc+unix://{}/socket",
    "wire, TCP": "127.0.0.1:0",
    "wire, Unix socket": "unix://{}/socket",
}


@pytest.mark.parametrize("carrier", LISTEN)
class TestServedStore(PrefetchConformance, KvStoreConformance):
    @pytest.fixture
    def open_store(self, tmp_path: Path, carrier: str) -> Iterator[OpenStore]:
        with ExitStack() as stack:

            def open_served(host_bytes: int, disk_bytes: int = 0) -> kvstore.KvStore:
                path = tmp_path / "data"
                store = stack.enter_context(kvstore.open(path, host_bytes=host_bytes, disk_bytes=disk_bytes))
                address = stack.enter_context(served(store, LISTEN[carrier].format(tmp_path), secrets=TENANT_SECRETS))
                client = stack.enter_context(kvstore.connect(address))
                assert client.status().lane == carrier[:4].lower().rstrip(",")
                return client

            yield open_served
