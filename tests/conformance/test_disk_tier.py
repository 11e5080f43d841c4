from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.testing.tier_conformance import TierConformance
from kvstore.tiers.disk import DiskTier

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.testing.tier_conformance import OpenTier


@pytest.mark.parametrize("folders", [0, 2])
class TestDiskTier(TierConformance):
    @pytest.fixture
    def open_tier(self, tmp_path: Path, folders: int) -> OpenTier:
        further = [tmp_path / f"further{i}" for i in range(folders)]
        return lambda capacity_bytes: DiskTier.open(
            tmp_path / "data", capacity_bytes=capacity_bytes, further_paths=further, free_floor_bytes=0
        )
