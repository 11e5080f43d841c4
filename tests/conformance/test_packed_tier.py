from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.testing.tier_conformance import TierConformance
from kvstore.tiers.codecs.base import OPAQUE
from kvstore.tiers.codecs.coding import PoolCoding
from kvstore.tiers.codecs.registry import Pipeline, make_codec
from kvstore.tiers.packed import PackedTier

if TYPE_CHECKING:
    from kvstore.testing.tier_conformance import OpenTier
    from kvstore.tiers.disk_pool import DiskPool


class BloscTier(PackedTier):
    """Packed memory all of whose pools are compressed."""

    def pool(
        self, ns_id: bytes, part_sizes: tuple[int, ...], block_tokens: int, *, bytes_max: int | None = None
    ) -> DiskPool:
        pool = super().pool(ns_id, part_sizes, block_tokens, bytes_max=bytes_max)
        self.use_coding(ns_id, PoolCoding(Pipeline(make_codec("blosc2"), False), (OPAQUE,) * len(part_sizes)))
        return pool


@pytest.mark.parametrize("kind", [PackedTier, BloscTier])
class TestPackedTier(TierConformance):
    survives_restart = False

    @pytest.fixture
    def open_tier(self, kind: type[PackedTier]) -> OpenTier:
        return kind.in_memory
