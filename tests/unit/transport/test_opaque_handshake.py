from __future__ import annotations

import pytest

from kvstore.errors import LayoutMismatchError
from kvstore.transport.link import OpenNamespaces
from kvstore.types import KvLayout, Namespace
from kvstore.v1 import cache_service_pb2 as pb


def of_symbols(symbols: str) -> Namespace:
    layout = KvLayout(layers=1, kv_heads=1, head_dim=8, dtype="int8", symbols=symbols)
    return Namespace(model="model", revision="revision", layout=layout)


def test_a_server_that_knows_no_digests_is_refused_by_name() -> None:
    old = pb.OpenNamespaceResponse(ns_id=bytes(16), block_bytes=256, part_bytes=[256])
    with pytest.raises(LayoutMismatchError, match="upgrade it"):
        OpenNamespaces().add(of_symbols("digests"), old)
    assert OpenNamespaces().add(of_symbols("tokens"), old) == bytes(16)
    assert OpenNamespaces().add(of_symbols("digests"), pb.OpenNamespaceResponse(ns_id=bytes(16), block_symbols=8))
