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
    from kvstore.testing.securing import Keyring

TENANT_SECRETS = dict.fromkeys(("tenant", "other"), SECRETS)


LISTEN = {
    "gRPC, TCP": "grpc://127.0.0.1:0",
    "gRPC, Unix socket": "grpc+unix://{}/socket",
    "wire, TCP": "127.0.0.1:0",
    "wire, Unix socket": "unix://{}/socket",
    "gRPC, TLS": "grpc+tls://127.0.0.1:0",
    "wire, TLS": "tls://127.0.0.1:0",
}


@pytest.fixture(scope="module")
def keyring(tmp_path_factory: pytest.TempPathFactory) -> Keyring:
    pytest.importorskip("cryptography", reason="needs the extra certs")
    from kvstore.testing.securing import Keyring

    keyring = Keyring(tmp_path_factory.mktemp("keys"))
    keyring.let_in_certificate("engine", "CN:engine", "*", "admin")
    return keyring


# The core suite asks each lane over a Unix socket, and the wire also where it maps no memory of the server. Which
# socket carries gRPC is a matter of gRPC's, and TLS one of the transport's; all are asked with the slow tests.
SLOW = {"gRPC, TCP", "gRPC, TLS", "wire, TLS"}


@pytest.mark.parametrize(
    "carrier", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in LISTEN]
)
class TestServedStore(PrefetchConformance, KvStoreConformance):
    @pytest.fixture
    def open_store(self, tmp_path: Path, carrier: str, keyring: Keyring) -> Iterator[OpenStore]:
        shown = {}
        security = None
        with ExitStack() as stack:
            if carrier.endswith("TLS"):
                security = keyring.security(tls__require_client_cert="true")
                shown = {
                    "tls_ca": keyring.ca,
                    "tls_cert": keyring.path("client-engine.pem"),
                    "tls_key": keyring.path("client-engine.key"),
                }

            def open_served(host_bytes: int, disk_bytes: int = 0) -> kvstore.KvStore:
                path = tmp_path / "data"
                store = stack.enter_context(kvstore.open(path, host_bytes=host_bytes, disk_bytes=disk_bytes))
                listen = LISTEN[carrier].format(tmp_path)
                address = stack.enter_context(served(store, listen, secrets=TENANT_SECRETS, security=security))
                client = stack.enter_context(kvstore.connect(address, **shown))
                assert client.status().lane == carrier[:4].lower().rstrip(",")
                return client

            yield open_served
