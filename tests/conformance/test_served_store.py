from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

import kvstore
from kvstore.testing.conformance import SECRETS, KvStoreConformance
from kvstore.testing.serving import served

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.testing.conformance import OpenStore

TENANT_SECRETS = dict.fromkeys(("tenant", "other"), SECRETS)


@pytest.mark.parametrize("carrier", ["tcp", "unix socket"])
class TestServedStore(KvStoreConformance):
    @pytest.fixture
    def open_store(self, tmp_path: Path, carrier: str) -> Iterator[OpenStore]:
        listen = "grpc://127.0.0.1:0" if carrier == "tcp" else f"grpc+unix://{tmp_path}/socket"
        with ExitStack() as stack:

            def open_served(host_bytes: int, disk_bytes: int = 0) -> kvstore.KvStore:
                path = tmp_path / "data"
                store = stack.enter_context(kvstore.open(path, host_bytes=host_bytes, disk_bytes=disk_bytes))
                address = stack.enter_context(served(store, listen, secrets=TENANT_SECRETS))
                return stack.enter_context(kvstore.connect(address))

            yield open_served
