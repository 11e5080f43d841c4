"""The suite of the embedded store, against the same store behind a server, over TCP and over a Unix socket."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

import kvstore
from kvstore.testing.conformance import SECRETS, KvStoreConformance
from kvstore.testing.serving import ServedStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.testing.conformance import OpenStore


class _GrpcConformance(KvStoreConformance):
    listen: str
    connect_to: str

    @pytest.fixture
    def open_store(self, tmp_path: Path) -> Iterator[OpenStore]:
        with ExitStack() as stack:

            def open_served(host_bytes: int, disk_bytes: int = 0) -> kvstore.KvStore:
                path = tmp_path / "data" if disk_bytes else None
                store = stack.enter_context(kvstore.open(path, host_bytes=host_bytes, disk_bytes=disk_bytes))
                secrets = {"tenant": SECRETS, "other": SECRETS}
                listen = self.listen.format(directory=tmp_path)
                served = stack.enter_context(ServedStore(store, [listen], secrets=secrets))
                return stack.enter_context(kvstore.connect(self.connect_to.format(address=served.addresses[0])))

            yield open_served


class TestStoreOverTcp(_GrpcConformance):
    listen = "127.0.0.1:0"
    connect_to = "grpc://{address}"


class TestStoreOverUnixSocket(_GrpcConformance):
    listen = "unix://{directory}/s"
    connect_to = "grpc+{address}"
