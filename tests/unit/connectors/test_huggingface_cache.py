"""Blocks cut out of a cache have the bytes of the model's own tensors, however these lie in memory."""

from __future__ import annotations

import pytest
import torch

from kvstore.connectors.huggingface_cache import blocks_from_cache, new_blocks
from kvstore.types import KvLayout

LAYERS, HEADS, TOKENS, SIZE, BLOCK = 3, 2, 37, 8, 4


def as_computed(rows):
    return torch.randn(rows, HEADS, TOKENS, SIZE)


def with_room_behind(rows):
    return torch.randn(rows, HEADS, TOKENS + 9, SIZE)[:, :, :TOKENS]


def tokens_outside_heads(rows):
    return torch.randn(rows, TOKENS, HEADS, SIZE).transpose(1, 2)


def sizes_outside_tokens(rows):
    return torch.randn(rows, HEADS, SIZE, TOKENS).transpose(2, 3)


@pytest.mark.parametrize("make", [as_computed, with_room_behind, tokens_outside_heads, sizes_outside_tokens])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("row", "first", "last"), [(0, 0, 9), (1, 2, 5), (1, 8, 9), (0, 3, 3)])
def test_blocks_are_those_of_the_tensors(make, dtype, row, first, last):
    layout = KvLayout(layers=LAYERS, kv_heads=HEADS, head_dim=SIZE, dtype=dtype, block_tokens=BLOCK)
    tensors = [(make(2).to(getattr(torch, dtype)), make(2).to(getattr(torch, dtype))) for _ in range(LAYERS)]
    expected = new_blocks(layout, last - first)
    for number in range(first, last):
        for layer, pair in enumerate(tensors):
            for plane, tensor in enumerate(pair):
                expected[number - first, layer, plane] = tensor[row, :, number * BLOCK : (number + 1) * BLOCK]
    blocks = blocks_from_cache(tensors, layout, row, first, last)
    assert blocks is not None
    assert torch.equal(expected, blocks)


def test_a_cache_of_another_layout_gives_no_blocks():
    layout = KvLayout(layers=LAYERS, kv_heads=HEADS, head_dim=SIZE, dtype="float32", block_tokens=BLOCK)
    tensors = [(as_computed(1), as_computed(1)) for _ in range(LAYERS)]
    assert blocks_from_cache(tensors[:2], layout, 0, 0, 1) is None
    assert blocks_from_cache(tensors, layout, 1, 0, 1) is None
    assert blocks_from_cache(tensors, layout, 0, 0, 10) is None
    assert blocks_from_cache([(keys.half(), values) for keys, values in tensors], layout, 0, 0, 1) is None
