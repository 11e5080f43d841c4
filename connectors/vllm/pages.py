"""Where vLLM keeps the bytes of each block, and whether copying them there and back is right on this engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvstore.connectors.common import SelfCheckError, UnsupportedModelError
from kvstore.connectors.vllm.layout import rank_part, token_shape
from kvstore.errors import InvalidBufferError
from kvstore.tiers.device import CopyOutcome, PagedKv

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvstore.tiers.device import BlockCopier
    from kvstore.types import KvLayout

_CHECK_SECONDS = 30.0


def engine_pages(
    kv_caches: Mapping[str, Any], layer_names: Sequence[str], blocks: int, layout: KvLayout, group: int | None = None
) -> PagedKv:
    """The pages of one group of layers, each a tensor (blocks, heads, tokens, key and value), whatever its strides.

    Of latents that is (blocks, tokens, latent), with or without an axis for the one head. Raises
    UnsupportedModelError for tensors of another shape: what they mean is not known, so nothing is guessed.
    """
    missing = [name for name in layer_names if not isinstance(kv_caches.get(name), torch.Tensor)]
    if missing:
        raise UnsupportedModelError(f"the engine has no cache tensor of layer {missing[0]}")
    heads, width = token_shape(layout, group)
    expected = (blocks, heads, layout.block_tokens, width)
    tensors = [_with_heads(kv_caches[name], len(expected), heads) for name in layer_names]
    for name, tensor in zip(layer_names, tensors, strict=True):
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tuple(tensor.shape) != expected or dtype != layout.dtype:
            raise UnsupportedModelError(
                f"the cache of {name} is {tuple(tensor.shape)} of {dtype}, expected {expected} of {layout.dtype}"
            )
    try:
        pages = PagedKv.of_pieces([(tensor,) for tensor in tensors])
    except InvalidBufferError:  # tokens before heads: each head is a piece of its own, with the same bytes in a row
        pages = PagedKv.of_pieces([tensor.unbind(1) for tensor in tensors])
    pages.require_layout(layout, rank_part(layout, 0, group))
    return pages


def _with_heads(tensor: torch.Tensor, dimensions: int, heads: int) -> torch.Tensor:
    """The tensor with an axis of heads, which memory of one head may lack."""
    return tensor.unsqueeze(1) if heads == 1 and tensor.ndim == dimensions - 1 else tensor


def check_copies(copier: BlockCopier, pages: PagedKv, tensors: Sequence[torch.Tensor]) -> None:
    """Copy a random block out and in again at another place, and compare the engine's own tensors.

    Uses the last two blocks, before the engine does, and leaves their bytes as they were. Raises SelfCheckError if what
    arrives is not what left.
    """
    first, second = pages.blocks - 2, pages.blocks - 1
    if first < 0:
        raise SelfCheckError(f"the engine has {pages.blocks} blocks, expected two at least to check copies with")
    kept = [tensor[[first, second]].clone() for tensor in tensors]
    for tensor in tensors:
        tensor[first] = torch.rand(tensor.shape[1:], device=tensor.device).to(tensor.dtype)
        tensor[second] = 0
    rows = copier.new_rows(1, pages.block_bytes)
    stored = copier.store(pages, [first], rows).wait(_CHECK_SECONDS)
    loaded = copier.load(pages, [second], rows).wait(_CHECK_SECONDS)
    same = all(torch.equal(tensor[first], tensor[second]) for tensor in tensors)
    canonical = torch.cat([tensor[first].contiguous().reshape(-1).view(torch.uint8) for tensor in tensors])
    same = same and torch.equal(canonical.cpu(), torch.frombuffer(bytearray(rows[0]), dtype=torch.uint8))
    for tensor, before in zip(tensors, kept, strict=True):
        tensor[[first, second]] = before
    if not same or {stored, loaded} != {CopyOutcome.COPIED}:
        raise SelfCheckError("a block that was copied out of the engine and in again is not the same")
