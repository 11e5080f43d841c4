from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.testing.tier_conformance import TierConformance
from kvstore.tiers.codecs.base import OPAQUE
from kvstore.tiers.codecs.coding import PoolCoding
from kvstore.tiers.codecs.keys import FileKeys
from kvstore.tiers.codecs.registry import Pipeline, make_codec
from kvstore.tiers.disk import DiskTier

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.testing.tier_conformance import OpenTier
    from kvstore.tiers.disk_pool import DiskPool


class CodedTier(DiskTier):
    """A disk tier all of whose pools have one pipeline."""

    pipeline: Pipeline

    def pool(
        self, ns_id: bytes, part_sizes: tuple[int, ...], block_tokens: int, *, bytes_max: int | None = None
    ) -> DiskPool:
        pool = super().pool(ns_id, part_sizes, block_tokens, bytes_max=bytes_max)
        self.use_coding(ns_id, PoolCoding(self.pipeline, (OPAQUE,) * len(part_sizes)))
        return pool


@pytest.mark.parametrize("folders", [0, 2])
@pytest.mark.parametrize(("codec", "encrypts"), [("blosc2", False), ("none", True), ("blosc2", True)])
class TestCodedDiskTier(TierConformance):
    @pytest.fixture
    def open_tier(self, tmp_path: Path, codec: str, encrypts: bool, folders: int) -> OpenTier:
        (tmp_path / "keys").write_text(f"key {'5a' * 32}\n")
        (tmp_path / "keys").chmod(0o600)
        further = [tmp_path / f"further{i}" for i in range(folders)]
        kind = type("CodedTier", (CodedTier,), {"pipeline": Pipeline(make_codec(codec), encrypts)})
        return lambda capacity_bytes: kind.open(
            tmp_path / "data",
            capacity_bytes=capacity_bytes,
            further_paths=further,
            free_floor_bytes=0,
            keys=FileKeys(tmp_path / "keys"),
        )
