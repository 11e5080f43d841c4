"""Blocks cut out of a cache have the bytes of the model's own tensors, however these lie in memory."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from kvstore.connectors.huggingface_cache import ComputedKv, LayerSet, new_blocks

LAYERS, HEADS, TOKENS, SIZE, BLOCK = 3, 2, 37, 8, 4


def as_computed(rows):
    return torch.randn(rows, HEADS, TOKENS, SIZE)


def with_room_behind(rows):
    return torch.randn(rows, HEADS, TOKENS + 9, SIZE)[:, :, :TOKENS]


def tokens_outside_heads(rows):
    return torch.randn(rows, TOKENS, HEADS, SIZE).transpose(1, 2)


def sizes_outside_tokens(rows):
    return torch.randn(rows, HEADS, SIZE, TOKENS).transpose(2, 3)


def full_layers(dtype="float32"):
    return LayerSet(part=0, layers=tuple(range(LAYERS)), window=None, kv_heads=HEADS, head_dim=SIZE, dtype=dtype)


def cache_of(tensors):
    cache = DynamicCache()
    for number, (keys, values) in enumerate(tensors):
        cache.update(keys[:, :, :0], values[:, :, :0], number)
        cache.layers[number].keys, cache.layers[number].values = keys, values
    return cache


@pytest.mark.parametrize("make", [as_computed, with_room_behind, tokens_outside_heads, sizes_outside_tokens])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("row", "pad", "first", "last"), [(0, 0, 0, 9), (1, 0, 2, 5), (1, 5, 7, 8), (0, 1, 0, 9)])
def test_blocks_are_those_of_the_tensors(make, dtype, row, pad, first, last):
    tensors = [(make(2).to(getattr(torch, dtype)), make(2).to(getattr(torch, dtype))) for _ in range(LAYERS)]
    layers = full_layers(dtype)
    expected = new_blocks(layers, BLOCK, last - first)
    for number in range(first, last):
        for layer, pair in enumerate(tensors):
            for plane, tensor in enumerate(pair):
                columns = slice(pad + number * BLOCK, pad + (number + 1) * BLOCK)
                expected[number - first, layer, plane] = tensor[row, :, columns]
    kv = ComputedKv(cache_of(tensors), [layers], BLOCK)
    (span,) = kv.spans(layers, pad, 0, range(first, last))
    run = kv.copy(layers, row, pad, span)
    assert first == run.first
    assert torch.equal(expected, run.blocks)


def test_blocks_that_are_not_whole_or_not_there_are_left_out():
    kv = ComputedKv(cache_of([(as_computed(1), as_computed(1))] * LAYERS), [full_layers()], BLOCK)
    assert [(0, range(9))] == kv.spans(full_layers(), 0, 0, range(20))
    assert [(0, range(8))] == kv.spans(full_layers(), 3, 0, range(20))
    assert [] == kv.spans(full_layers(), 0, 0, range(9, 20))


def test_a_cache_of_other_layers_is_told_apart():
    tensors = [(as_computed(1), as_computed(1)) for _ in range(LAYERS)]
    kv = ComputedKv(cache_of(tensors), [full_layers()], BLOCK)
    assert kv.matches([full_layers()], 1)
    assert not kv.matches([full_layers()], 2)
    assert not kv.matches([full_layers("float16")], 1)
