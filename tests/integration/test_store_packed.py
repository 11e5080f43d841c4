"""A store with packed memory in the place of a disk."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore.errors import ConfigError
from kvstore.store.codecs import CodecRule
from kvstore.store.settings import StoreSettings
from kvstore.types import Tier

MIB = 1 << 20
LAYOUT = kvstore.KvLayout(layers=4, kv_heads=2, head_dim=64, dtype="float16", block_tokens=16)
NAMESPACE = kvstore.Namespace(model="packed", revision="r", layout=LAYOUT)
PROMPT_BLOCKS = 8
PROMPTS = 40  # 40 prompts of 8 blocks of 32 KiB are 10 MiB
INT8 = CodecRule(compression="int8", lossy="accept")


def tokens(prompt: int) -> list[int]:
    first = prompt * PROMPT_BLOCKS * LAYOUT.block_tokens
    return list(range(first, first + PROMPT_BLOCKS * LAYOUT.block_tokens))


def values(prompt: int) -> np.ndarray:
    """Rows of blocks, as float16."""
    elements = np.random.default_rng(prompt).normal(size=(PROMPT_BLOCKS, LAYOUT.block_bytes // 2))
    return elements.astype(np.float16)


def fill(store: kvstore.Store) -> None:
    for prompt in range(PROMPTS):
        with store.stage(NAMESPACE, tokens(prompt)) as stage:
            stage.write_from(values(prompt).view(np.uint8))


def loaded(store: kvstore.Store, prompt: int) -> np.ndarray:
    rows = np.zeros((PROMPT_BLOCKS, LAYOUT.block_bytes), dtype=np.uint8)
    with store.lease(store.match(NAMESPACE, tokens(prompt))) as lease:
        assert lease.load_into(rows).blocks == PROMPT_BLOCKS
    return rows.view(np.float16)


def opened(*rules: CodecRule, packed_bytes: int = 16 * MIB) -> kvstore.Store:
    return kvstore.open(host_bytes=4 * MIB, packed_bytes=packed_bytes, settings=StoreSettings(codecs=rules))


def test_what_leaves_host_memory_is_loaded_from_packed_memory_bit_for_bit():
    with opened(CodecRule(compression="blosc2")) as store:
        fill(store)
        assert store.match(NAMESPACE, tokens(0)).tiers == {Tier.DISK: PROMPT_BLOCKS}
        for prompt in range(PROMPTS):
            assert loaded(store, prompt).tobytes() == values(prompt).tobytes()
        stats = store.stats()
    assert stats.tiers.keys() == {"host", "packed"}
    assert stats.loaded_tokens["packed"] > 0
    assert "disk" not in stats.loaded_tokens


def test_packed_blocks_come_back_to_host_memory_before_they_are_used():
    with opened(CodecRule(compression="blosc2")) as store:
        fill(store)
        store.prefetch(NAMESPACE, tokens(0), wait_seconds=60)
        assert store.match(NAMESPACE, tokens(0)).tiers == {Tier.HOST: PROMPT_BLOCKS}


def test_eight_bits_keep_nearly_twice_as_many_blocks_in_the_same_memory():
    kept = {}
    for name, rules in {"plain": (), "int8": (INT8,)}.items():
        with opened(*rules, packed_bytes=5 * MIB) as store:
            fill(store)
            stats = store.stats()
            assert stats.tiers["packed"].used_bytes <= 5 * MIB
            kept[name] = stats.tiers["packed"].blocks
    assert kept["int8"] > 1.5 * kept["plain"]


def test_eight_bits_are_as_near_as_their_error_says():
    with opened(INT8) as store:
        fill(store)
        error = np.abs(loaded(store, 0).astype(np.float32) - values(0))
        told = store.stats().codecs["int8"].max_absolute_error
    assert 0 < error.max() <= told


def test_nothing_is_flushed_to_where_it_would_not_last():
    with opened() as store:
        with store.stage(NAMESPACE, tokens(0)) as stage:
            stage.write_from(values(0).view(np.uint8))
        store.flush()
        assert store.stats().tiers["packed"].blocks == 0


def test_a_cleared_namespace_is_gone_from_packed_memory():
    with opened() as store:
        fill(store)
        store.clear(NAMESPACE)
        assert store.stats().tiers["packed"].blocks == 0
        assert [store.match(NAMESPACE, tokens(prompt)).blocks for prompt in range(PROMPTS)] == [0] * PROMPTS


def test_a_disk_and_packed_memory_together_are_refused_and_nothing_is_made(tmp_path: Path):
    with pytest.raises(ConfigError, match="packed memory stands in the place of a disk"):
        kvstore.open(tmp_path / "data", host_bytes=MIB, packed_bytes=4 * MIB)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"packed_bytes": 1000}, "packed_bytes is 1000, expected at least 1048576"),
        ({"packed_bytes": -1}, "packed_bytes is -1"),
        ({"packed_bytes": MIB, "host_bytes": 1 << 50}, "lower one, or raise the limit"),
    ],
)
def test_sizes_that_cannot_be_are_refused_by_name(settings: dict[str, int], message: str):
    with pytest.raises(ConfigError, match=message):
        kvstore.open(**{"host_bytes": MIB, **settings})


def test_encryption_is_refused_where_nothing_rests():
    rule = dataclasses.replace(CodecRule(), encryption="aes-gcm")
    with pytest.raises(ConfigError, match="packed memory has no keys"):
        opened(rule)
