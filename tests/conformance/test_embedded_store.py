from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import kvstore
from kvstore.testing.conformance import KvStoreConformance
from kvstore.testing.conformance_prefetch import PrefetchConformance

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.testing.conformance import OpenStore


class TestEmbeddedStore(PrefetchConformance, KvStoreConformance):
    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore:
        def open_embedded(host_bytes: int, disk_bytes: int = 0) -> kvstore.KvStore:
            return kvstore.open(tmp_path / "data", host_bytes=host_bytes, disk_bytes=disk_bytes)

        return open_embedded
