"""Between a transformers DynamicCache and buffers of blocks. The only place that knows both shapes.

A block is (layers, 2, heads, block_tokens, head_dim), keys before values; a cache layer holds keys and values as
(rows, heads, tokens, head_dim).
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import torch
from transformers import DynamicCache, GenerationMixin
from transformers.cache_utils import DynamicLayer

from kvstore.errors import InvalidBufferError
from kvstore.tiers.device import PagedKv
from kvstore.tiers.device_cpu import gather_blocks

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from kvstore.types import KvLayout

LayerTensors = list[tuple[torch.Tensor, torch.Tensor]]

# Every name that transformers has had for the cache handed to a model, the newest first, and the one it has here.
CACHE_ARGUMENTS = ("cache", "past_key_values")
_PARAMETERS = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE_ARGUMENT = next(name for name in CACHE_ARGUMENTS if name in _PARAMETERS)


def layer_tensors(cache: object) -> LayerTensors | None:
    """Keys and values of each layer; None unless every layer is a filled layer of full attention and no more."""
    if type(cache) is not DynamicCache:
        return None
    tensors: LayerTensors = []
    for layer in cache.layers:
        # A subclass keeps something else besides, or not all tokens.
        if type(layer) is not DynamicLayer or layer.keys is None or layer.values is None:
            return None
        tensors.append((layer.keys, layer.values))
    return tensors or None


def new_blocks(layout: KvLayout, blocks: int) -> torch.Tensor:
    """An uninitialised CPU buffer of whole blocks: (blocks, layers, 2, heads, block_tokens, head_dim)."""
    shape = (blocks, layout.layers, 2, layout.kv_heads, layout.block_tokens, layout.head_dim)
    return torch.empty(shape, dtype=getattr(torch, layout.dtype))


def cache_from_rows(config: PreTrainedConfig, rows: list[torch.Tensor], device: torch.device) -> DynamicCache:
    """A cache that holds the blocks of each row; all rows have equally many. Copies the bytes."""
    cache = DynamicCache(config=config)
    if not len(rows[0]):
        return cache
    for layer in range(rows[0].shape[1]):
        keys, values = (_as_tokens([row[:, layer, plane] for row in rows]).to(device) for plane in range(2))
        cache.update(keys, values, layer)
    return cache


def blocks_from_cache(tensors: LayerTensors, layout: KvLayout, row: int, first: int, last: int) -> torch.Tensor | None:
    """A private copy of blocks [first, last) of one row; None if the cache is not of this layout or too short."""
    shape = (layout.kv_heads, layout.head_dim)
    dtype = getattr(torch, layout.dtype)
    if len(tensors) != layout.layers or any(
        (tensor.shape[1], tensor.shape[3]) != shape
        or tensor.dtype != dtype
        or tensor.shape[0] <= row
        or tensor.shape[2] < last * layout.block_tokens
        for pair in tensors
        for tensor in pair
    ):
        return None
    blocks = new_blocks(layout, last - first)
    tokens = slice(first * layout.block_tokens, last * layout.block_tokens)
    by_block = (last - first, layout.block_tokens)
    pieces = [
        [torch.unflatten(tensor[row, :, tokens], 1, by_block).transpose(0, 1) for tensor in pair] for pair in tensors
    ]
    try:
        # One call of our own threads: torch's meet after each of 2 copies a layer, which is slow where cores are busy.
        gather_blocks(PagedKv.of_pieces(pieces), range(len(blocks)), blocks, threads=torch.get_num_threads())
    except InvalidBufferError:  # on another device, or in an order of its own: torch copies anything
        for layer, pair in enumerate(pieces):
            for plane, piece in enumerate(pair):
                blocks[:, layer, plane] = piece
    return blocks


def _as_tokens(planes: list[torch.Tensor]) -> torch.Tensor:
    """(blocks, heads, block_tokens, head_dim) of each row as (rows, heads, tokens, head_dim), in one copy."""
    return torch.stack([plane.transpose(0, 1) for plane in planes]).flatten(2, 3)
