"""What every KvStore must do, as a test class to inherit.

    class TestMyStore(KvStoreConformance):
        @pytest.fixture
        def open_store(self, tmp_path):
            return lambda host_bytes, disk_bytes=0: my_store(tmp_path, host_bytes, disk_bytes)

The fixture returns a function that opens a fresh store of the given sizes; the class closes what it opened.
Namespaces with a secret use one of SECRETS, so that a served store can be told of them beforehand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.testing.conformance_cases import BASE, BLOCKS, LAYOUT, MIB, PROMPT, SECRETS, OpenStore
from kvstore.testing.conformance_digests import DigestConformance
from kvstore.testing.conformance_limits import LimitConformance
from kvstore.testing.conformance_prefixes import PrefixConformance
from kvstore.testing.conformance_sparse import SparseConformance
from kvstore.testing.conformance_states import StateConformance
from kvstore.testing.conformance_writers import WriterConformance

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.api import KvStore

__all__ = ["BASE", "BLOCKS", "LAYOUT", "MIB", "PROMPT", "SECRETS", "KvStoreConformance", "OpenStore"]


class KvStoreConformance(
    PrefixConformance, LimitConformance, SparseConformance, StateConformance, DigestConformance, WriterConformance
):
    """Inherit and provide the fixture `open_store`; see the module."""

    @pytest.fixture
    def open_store(self) -> OpenStore:
        """Return a function (host_bytes, disk_bytes=0) -> KvStore."""
        raise pytest.UsageError("a subclass of KvStoreConformance defines the fixture open_store")

    @pytest.fixture
    def store(self, open_store: OpenStore) -> Iterator[KvStore]:
        """A store with ample room."""
        with open_store(64 * MIB, 64 * MIB) as store:
            yield store
