"""Which requests of vLLM can be served from a store, under which root, and what is known of each. Imports no vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvstore.connectors.vllm.contents import have_keys
from kvstore.layer_groups import FIELD_BYTES_MAX
from kvstore.types import Root

if TYPE_CHECKING:
    from kvstore.connectors.checkpoint_files import AdapterDigests
    from kvstore.connectors.vllm.contents import ContentKeys
    from kvstore.connectors.vllm.lookups import Lookup
    from kvstore.connectors.vllm.plan import PackedTokens


def bypass_reason(request: Any, block_tokens: int) -> str | None:  # noqa: ANN401  # vLLM's own class
    """Why a request is computed as without a store, neither read nor stored; None if it is served."""
    sampling = request.sampling_params
    if not have_keys(request.mm_features, block_tokens):
        return "multimodal"
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return "embeddings"
    if request.pooling_params is not None:
        return "pooling"
    if sampling is not None and sampling.prompt_logprobs is not None:
        return "prompt_logprobs"
    if request.skip_reading_prefix_cache:
        return "skip_reading"
    if request.resumable:
        return "streaming_input"
    if request.cache_salt is not None and len(request.cache_salt.encode(errors="replace")) > FIELD_BYTES_MAX:
        return "salt"
    return None


def root_of(request: Any, adapters: AdapterDigests, weights_epoch: str | None) -> Root:  # noqa: ANN401
    """What a request adds to its namespace. Reads the adapter's files the first time, so call it in the background.

    Raises UnsupportedModelError where there are none, and InvalidNamespaceError for a salt that is no text.
    """
    lora = request.lora_request
    adapter = None if lora is None else adapters.digest(lora.lora_path)
    return Root(adapter=adapter, salt=request.cache_salt or None, weights_epoch=weights_epoch)


@dataclass(slots=True)
class TrackedRequest:
    """What the scheduler's half knows of a request that is served.

    `stored_blocks` lead the prompt that the store has, or was given. `root` is None until it is known. A request that
    `reads` is looked up when it is scheduled from its first token on; one that `writes` is stored as its blocks fill.
    `lookup` is under way or has an answer that is not used yet; `touch` is one that nobody waits for.
    `has_stores` once any of its blocks went to the worker to be stored.
    """

    request: Any
    weights_epoch: str | None
    contents: ContentKeys | None
    tokens: PackedTokens
    root: Root | None = None
    stored_blocks: int = 0
    lookup: Lookup | None = None
    touch: Lookup | None = None
    reads: bool = True
    writes: bool = True
    gives_up_at: float | None = None
    has_stores: bool = False
