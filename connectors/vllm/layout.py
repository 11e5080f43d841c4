"""What an engine of vLLM is to the store: whether its KV can be kept, its layout, and what decides the bytes.

Only attributes of vLLM's own configuration are read, so nothing here imports it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import Any

from kvstore.connectors.checkpoint_files import model_fingerprint
from kvstore.connectors.common import UnsupportedModelError
from kvstore.layer_groups import DTYPE_BYTES, SlidingWindow
from kvstore.types import GROUPS_MAX, KvForm, KvLayout

# Rope types that give a token the same key whatever the total length of the prompt and of the engine's context.
STATIC_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn", "mrope"})
# Speculation without layers of its own, whose rejected drafts leave no trace in whole blocks of known tokens.
_SPECULATION = frozenset({"ngram", "suffix"})
_ROPE_TEXT_MAX = 1000
# vLLM's specifications of what layers cache, by name: those of whole prompts, one of them latent, and with a window.
_LATENT = "MLAAttentionSpec"
_DENSE = frozenset({"FullAttentionSpec", _LATENT})
_SPARSE = frozenset({"SlidingWindowSpec"})
_NEUTRAL_CONFIG_FIELDS = frozenset(
    {"_name_or_path", "architectures", "bos_token_id", "eos_token_id", "pad_token_id", "transformers_version"}
)


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One of vLLM's groups of cache layers: the place of its block table, and its group of the layout.

    `group` is None for the layers of full attention, else a position in `KvLayout.groups`.
    """

    table: int
    layer_names: tuple[str, ...]
    group: int | None


def cache_groups(kv_cache_config: Any) -> tuple[CacheGroup, ...]:  # noqa: ANN401  # vLLM's own class
    """vLLM's groups in the order of the layout's parts: full attention, then those with windows as vLLM has them."""
    found = list(enumerate(kv_cache_config.kv_cache_groups))
    ordered = [item for item in found if _kind(item[1]) in _DENSE] + [
        item for item in found if _kind(item[1]) in _SPARSE
    ]
    return tuple(
        CacheGroup(table, tuple(group.layer_names), place - 1 if place else None)
        for place, (table, group) in enumerate(ordered)
    )


def describe_layout(vllm_config: Any, kv_cache_config: Any) -> KvLayout:  # noqa: ANN401  # vLLM's own classes
    """The layout of an engine's KV; raises UnsupportedModelError with the reason where there is none.

    The bytes of a block are canonical, whatever order the engine's attention wants in memory: layers, heads, tokens,
    and of each token its key and value, or its latent.
    """
    _check_parallelism(vllm_config.parallel_config)
    _check_speculation(vllm_config.speculative_config)
    groups = kv_cache_config.kv_cache_groups
    _check_groups([_kind(group) for group in groups])
    dense, *windows = [groups[group.table] for group in cache_groups(kv_cache_config)]
    spec = _checked(dense.kv_cache_spec)
    heads = 1 if _kind(dense) == _LATENT else vllm_config.model_config.get_total_num_kv_heads()
    ranks = vllm_config.parallel_config.tensor_parallel_size
    return KvLayout(
        layers=len(dense.layer_names),
        kv_heads=heads,
        head_dim=spec.head_size,
        dtype=_dtype(spec),
        block_tokens=spec.block_size,
        kv_form=(KvForm.LATENT if _kind(dense) == _LATENT else KvForm.SPLIT).value,
        axis_order="LHTKD",
        rope=_rope_text(vllm_config.model_config.hf_text_config),
        quantisation=str(vllm_config.cache_config.cache_dtype),
        tensor_parallel=ranks,
        engine="vllm",
        groups=tuple(_window(group, spec.block_size, heads, ranks) for group in windows),
    )


def whole_requests_reason(vllm_config: Any, layout: KvLayout) -> str | None:  # noqa: ANN401  # vLLM's own class
    """Why loads and stores cannot go layer by layer in this engine; None if they can."""
    if layout.groups:
        return "the model has several groups of cache layers, of which vLLM cannot compute again what failed in a step"
    if layout.tensor_parallel > 1:
        return "with several ranks, one would store what another's failed load has spoiled"
    if vllm_config.parallel_config.use_ubatching:
        return "a step is split into microbatches, each of which goes through all layers"
    if vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs():
        return "full CUDA graphs leave out what happens between layers"
    return None


def rank_layout(layout: KvLayout) -> KvLayout:
    """The layout of what one rank has of a block, as if it were all: for checks that one rank makes alone."""
    writers = layout.tensor_writers
    groups = tuple(replace(group, kv_heads=group.kv_heads // writers) for group in _windows(layout))
    return replace(layout, kv_heads=layout.kv_heads // writers, tensor_parallel=1, groups=groups)


def rank_part(layout: KvLayout, rank: int, group: int | None = None) -> int:
    """The part of a group that a rank has, whether it writes it or another rank writes the same bytes."""
    return next(number for number in layout.group_parts(group) if rank in layout.parts[number].ranks)


def token_shape(layout: KvLayout, group: int | None = None) -> tuple[int, int]:
    """Heads, and the numbers that one head keeps of a token: key and value, or a latent."""
    kept = layout if group is None else _windows(layout)[group]
    return kept.kv_heads, kept.head_dim * (1 if kept.kv_form == KvForm.LATENT else 2)


def find_revision(vllm_config: Any, version: str) -> str:  # noqa: ANN401  # vLLM's own class
    """A fingerprint of the weights an engine has loaded, and of how it computes with them.

    Reads the files of the checkpoint; raises UnsupportedModelError where they cannot be found.
    """
    model = vllm_config.model_config
    if str(vllm_config.load_config.load_format).endswith("dummy"):
        raise UnsupportedModelError('the weights are dummies; give them a name in the setting "revision"')
    config = {
        name: value for name, value in model.hf_text_config.to_dict().items() if name not in _NEUTRAL_CONFIG_FIELDS
    }
    detail = {"vllm": version, "dtype": str(model.dtype), "quantization": str(model.quantization), "config": config}
    text = json.dumps(detail, sort_keys=True, default=str)
    return model_fingerprint(checkpoint_folder(model.model, model.revision), text)


def checkpoint_folder(model: str, revision: str | None) -> str:
    """Where the engine found its weights: the folder it was given, or the snapshot that it downloaded."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return str(snapshot_download(model, revision=revision, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError, OSError):
        return model


def _check_parallelism(parallel: Any) -> None:  # noqa: ANN401  # vLLM's own class
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size != 1:
            raise UnsupportedModelError(f"{name} is {size}, and only tensor and data parallel engines are supported")


def _check_speculation(speculative: Any) -> None:  # noqa: ANN401  # vLLM's own class
    if speculative is not None and speculative.method not in _SPECULATION:
        raise UnsupportedModelError(
            f"speculative decoding by {speculative.method!r} is not supported, only {', '.join(sorted(_SPECULATION))}"
        )


def _kind(group: Any) -> str:  # noqa: ANN401  # vLLM's own class
    return type(group.kv_cache_spec).__name__


def _check_groups(kinds: list[str]) -> None:
    dense = [kind for kind in kinds if kind in _DENSE]
    if len(dense) != 1 or len(dense) + sum(kind in _SPARSE for kind in kinds) != len(kinds):
        raise UnsupportedModelError(
            f"the model has {len(kinds)} groups of cache layers ({', '.join(sorted(kinds))}), expected one of full "
            f"attention, and besides it only {', '.join(sorted(_SPARSE))}"
        )
    if dense == [_LATENT] and len(kinds) > 1:
        raise UnsupportedModelError("the model has latent layers beside layers with windows, which is not supported")
    if len(kinds) - 1 > GROUPS_MAX:
        raise UnsupportedModelError(
            f"the model has {len(kinds) - 1} groups of layers with windows, expected {GROUPS_MAX} at most"
        )


def _window(group: Any, block_tokens: int, heads: int, ranks: int) -> SlidingWindow:  # noqa: ANN401  # vLLM's own
    spec = _checked(group.kv_cache_spec)
    expected = {"block_size": block_tokens, "num_kv_heads": max(1, heads // ranks), "extra_retained_tokens": 0}
    for name, value in expected.items():
        if getattr(spec, name, value) != value:
            raise UnsupportedModelError(
                f"a group of layers with windows has {name} {getattr(spec, name)}, expected {value} as the others"
            )
    return SlidingWindow(
        layers=len(group.layer_names),
        window=spec.sliding_window,
        kv_heads=heads,
        head_dim=spec.head_size,
        dtype=_dtype(spec),
    )


def _windows(layout: KvLayout) -> list[SlidingWindow]:
    windows = [group for group in layout.groups if isinstance(group, SlidingWindow)]
    assert len(windows) == len(layout.groups), "no other groups are described here"
    return windows


def _checked(spec: Any) -> Any:  # noqa: ANN401  # vLLM's own class
    """The same; raises UnsupportedModelError if it keeps more or less than plain keys and values, or latents."""
    is_latent = type(spec).__name__ == _LATENT
    content_bytes = (1 if is_latent else 2) * spec.head_size * DTYPE_BYTES.get(_dtype(spec), 0)
    plain = {
        "head_size_v": (0 if is_latent else spec.head_size, None),
        "page_size_padded": (None,),
        "num_head_slots": (None, spec.num_kv_heads),
        "state_content_bytes": (None, content_bytes),
        "tokens_per_state": (1,),
        "non_causal": (False,),
        "attention_chunk_size": (None,),
        "cache_dtype_str": (None, "auto", _dtype(spec)),
        "is_index_group_leader": (False,),
        "non_causal_multi_token_decode": (False,),
    }
    for name, expected in plain.items():
        value = getattr(spec, name, expected[0])
        if value not in expected:
            raise UnsupportedModelError(f"the cache has {name} {value!r}, expected {expected[0]!r}")
    if getattr(spec, "kv_quant_mode", 0):
        raise UnsupportedModelError("the KV cache is quantised, and its scales are not stored with it")
    return spec


def _dtype(spec: Any) -> str:  # noqa: ANN401  # vLLM's own class
    dtype = str(spec.dtype).removeprefix("torch.")
    if dtype not in ("float32", "float16", "bfloat16"):
        raise UnsupportedModelError(f"the KV has dtype {dtype}, expected float32, float16 or bfloat16")
    return dtype


def _rope_text(config: Any) -> str:  # noqa: ANN401  # of transformers
    """The rope parameters as canonical text; refuses types whose keys depend on a total length."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not parameters:
        return ""
    kinds = parameters.values() if all(isinstance(value, dict) for value in parameters.values()) else [parameters]
    for kind in kinds:
        rope_type = kind.get("rope_type", "default")
        if rope_type not in STATIC_ROPE_TYPES:
            raise UnsupportedModelError(
                f"rope type {rope_type!r} is not supported: only {', '.join(sorted(STATIC_ROPE_TYPES))} are known to "
                "give a token the same key whatever the length of the prompt"
            )
    text = json.dumps(parameters, sort_keys=True, default=str)
    return text if len(text) <= _ROPE_TEXT_MAX else _digest_text(text)


def _digest_text(text: str) -> str:
    return f"blake2b {hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"
