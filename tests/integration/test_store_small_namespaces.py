"""Many small namespaces in one host memory: what an extent's size decides."""

from __future__ import annotations

import numpy as np
import pytest

import kvstore
from kvstore.errors import ConfigError
from kvstore.store.settings import StoreSettings

MIB = 1 << 20
BLOCKS = 60
LAYOUT = kvstore.KvLayout(layers=4, kv_heads=2, head_dim=16, dtype="float16", block_tokens=16)  # 8 KiB
NAMESPACES = [kvstore.Namespace(model=f"m{number}", revision="r", layout=LAYOUT) for number in range(60)]
PROMPT = list(range(BLOCKS * LAYOUT.block_tokens))
ROWS = np.zeros((BLOCKS, LAYOUT.block_bytes), dtype=np.uint8)


def kept_blocks(extent_bytes: int | None) -> int:
    """Blocks that are there after each namespace stored its own."""
    with kvstore.open(host_bytes=64 * MIB, settings=StoreSettings(extent_bytes=extent_bytes)) as store:
        for namespace in NAMESPACES:
            with store.stage(namespace, PROMPT) as stage:
                stage.write_from(ROWS[: stage.blocks])
        return sum(store.match(namespace, PROMPT).blocks for namespace in NAMESPACES)


def test_sixty_namespaces_keep_all_where_each_has_room_for_an_extent():
    assert kept_blocks(MIB) == 60 * BLOCKS


def test_with_extents_of_a_sixteenth_as_many_namespaces_keep_their_blocks():
    assert kept_blocks(None) <= 16 * BLOCKS


def test_extents_that_would_be_too_many_are_refused_by_name():
    with pytest.raises(ConfigError, match="extent_bytes is 65536, expected at least 131072"):
        kvstore.open(host_bytes=128 * MIB, settings=StoreSettings(extent_bytes=65536))
