"""What a transformers model is to the store: whether its KV can be cached, its layout, and a fingerprint of it."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import transformers
import xxhash
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel

from kvstore.connectors.common import UnsupportedModelError
from kvstore.connectors.huggingface_cache import CACHE_ARGUMENT, LayerSet, filled_layers
from kvstore.layer_groups import DTYPE_BYTES, SlidingWindow
from kvstore.types import KvLayout

if TYPE_CHECKING:
    from collections.abc import Iterator

# Rope types whose frequencies are fixed by the configuration. Dynamic NTK and LongRoPE change them with the total
# length, so that the keys of a prefix differ from prompt to prompt; types that are not known here may do so too.
STATIC_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})

# Fields of a configuration that change no key and no value. Fields not named here split the cache when they differ.
_NEUTRAL_CONFIG_FIELDS = frozenset(
    {
        "_name_or_path",
        "architectures",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "id2label",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "torch_dtype",
        "use_cache",
    }
)
_SAMPLES_PER_TENSOR = 16
PROBE_TOKENS = 4
LayerTensors = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """The layout of a model's KV, which layers make up its parts, and the fingerprint of all that decides its bytes."""

    layout: KvLayout
    revision: str
    sets: tuple[LayerSet, ...]


def describe_model(model: PreTrainedModel, block_tokens: int) -> ModelDescription:
    """Check that the KV of `model` can be cached, and describe it.

    Reads every weight once (about 0.1 s for 135 M float32 parameters) and computes a few tokens. Raises
    UnsupportedModelError with the reason.
    """
    _check_class(model)
    _check_weights(model)
    rope = _rope_text(model.config)
    sets = _probe_layers(model)
    return ModelDescription(_layout_of(sets, block_tokens, rope), _fingerprint(model), sets)


def has_adapter_layers(model: PreTrainedModel) -> bool:
    """Whether PEFT has put adapters into the model; which of them is active shows in no parameter."""
    return hasattr(model, "peft_config") or bool(getattr(model, "_hf_peft_config_loaded", False))


class WeightsWatch:
    """Notices that the weights of a model are no longer those that were fingerprinted.

    Sees every in-place write that autograd's version counters see, and every tensor that was replaced or moved. Writes
    through `.data`, as some adapter merges do, bypass the counters; for these up to 16 values of each tensor are
    compared. About 10 us a tensor.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._identities = _identities(model)
        self._views = _sample_views(model)
        self._samples = _read_samples(self._views)

    def sees_change(self, model: PreTrainedModel) -> bool:
        """Whether the weights differ from those at the time of construction."""
        return _identities(model) != self._identities or _read_samples(self._views) != self._samples


def _check_class(model: PreTrainedModel) -> None:
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(f"the model is a {type(model).__name__}, expected a transformers PreTrainedModel")
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} is an encoder-decoder model; only decoder-only models are supported")
    if getattr(type(model), "generate", None) is not GenerationMixin.generate:
        raise UnsupportedModelError(f"{name} has a generate() of its own; only that of transformers is supported")
    if "attention_mask" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModelError(f"{name}.forward() takes no attention_mask, so positions cannot follow the cache")
    _check_attention(model.config.get_text_config(decoder=True))
    if getattr(model.generation_config, "cache_implementation", None) == "quantized":
        raise UnsupportedModelError(
            "generation_config.cache_implementation is quantized: its scales are made at run time, so that "
            "equal tokens have other bytes each time; unset it, or do without kvstore"
        )


def _check_attention(config: PreTrainedConfig) -> None:
    if getattr(config, "use_bidirectional_attention", None):
        raise UnsupportedModelError("the attention is bidirectional: the KV of a prefix depends on what follows it")
    chunked = getattr(config, "attention_chunk_size", None)
    if chunked is not None or "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        raise UnsupportedModelError("attention in chunks is not supported: what a token sees depends on its position")


def _check_weights(model: PreTrainedModel) -> None:
    if getattr(model, "hf_quantizer", None) is not None:
        raise UnsupportedModelError("the weights are quantised, and no fingerprint covers their scales")
    devices = {tensor.device for _, tensor in _weights(model)}
    if len(devices) != 1 or next(iter(devices)).type not in ("cpu", "cuda"):
        places = ", ".join(sorted(str(device) for device in devices))
        raise UnsupportedModelError(f"the weights lie on {places}; expected one device, cpu or cuda")


def _rope_text(config: PreTrainedConfig) -> str:
    """The rope parameters as canonical text; refuses types whose keys depend on the total length of the prompt."""
    text_config = config.get_text_config(decoder=True)
    parameters = getattr(text_config, "rope_parameters", None) or getattr(text_config, "rope_scaling", None)
    if not parameters:
        return ""
    # Models with sliding windows may have a rope for each kind of layer.
    kinds = list(parameters.values()) if all(isinstance(value, dict) for value in parameters.values()) else [parameters]
    for kind in kinds:
        _check_rope(kind)
    return json.dumps(parameters, sort_keys=True)


def _check_rope(parameters: dict[str, Any]) -> None:
    rope_type = parameters.get("rope_type", "default")
    if rope_type not in STATIC_ROPE_TYPES:
        raise UnsupportedModelError(
            f"rope type {rope_type!r} is not supported: only {', '.join(sorted(STATIC_ROPE_TYPES))} are known to give "
            "a token the same key whatever the total length of the prompt"
        )
    unknown = [name for name, value in parameters.items() if isinstance(value, dict) or name == "mrope_section"]
    if unknown:
        raise UnsupportedModelError(f"rope parameters {', '.join(unknown)} are not supported")


def _probe_layers(model: PreTrainedModel) -> tuple[LayerSet, ...]:
    """Compute a few tokens and read from the cache they leave what the KV looks like."""
    probed = _computed_layers(model, PROBE_TOKENS)
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for number, layer in enumerate(probed):
        kinds.setdefault(_layer_kind(layer), []).append(number)
    if _prefix_differs(_tensors(probed), _tensors(_computed_layers(model, 2 * PROBE_TOKENS))):
        raise UnsupportedModelError("the KV of a prefix depends on the tokens that follow it")
    full = [kind for kind in kinds if kind[0] is None]
    if len(full) > 1:
        raise UnsupportedModelError("keys and values of full attention differ in shape or dtype between layers")
    ordered = full + [kind for kind in kinds if kind[0] is not None]
    numbers = [kinds[kind] for kind in ordered]
    if not full:
        # Each block needs a dense part: one of the layers stands in for the full attention that is not there.
        ordered, numbers = [ordered[0], *ordered], [numbers[0][:1], numbers[0][1:], *numbers[1:]]
        ordered = [kind for kind, layers in zip(ordered, numbers, strict=True) if layers]
    return tuple(
        LayerSet(part=part, layers=tuple(layers), window=kind[0], kv_heads=kind[1], head_dim=kind[2], dtype=kind[3])
        for part, (kind, layers) in enumerate(zip(ordered, filter(None, numbers), strict=True))
    )


def _layer_kind(layer: Any) -> tuple[int | None, int, int, str]:  # noqa: ANN401  # a class of transformers
    """Window, heads, head size and dtype of a layer that has computed PROBE_TOKENS tokens."""
    window = layer.sliding_window if layer.is_sliding else None
    if window is not None and window <= 2 * PROBE_TOKENS:
        raise UnsupportedModelError(f"a sliding window of {window} tokens, expected more than {2 * PROBE_TOKENS}")
    shapes, dtypes = {tuple(layer.keys.shape), tuple(layer.values.shape)}, {layer.keys.dtype, layer.values.dtype}
    if len(shapes) != 1 or len(dtypes) != 1:
        raise UnsupportedModelError("keys and values differ in shape or dtype from each other")
    shape = shapes.pop()
    if len(shape) != 4 or shape[0] != 1 or shape[2] != PROBE_TOKENS:
        raise UnsupportedModelError(f"the KV has shape {shape}, expected (1, heads, {PROBE_TOKENS}, head size)")
    dtype = str(dtypes.pop()).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise UnsupportedModelError(f"the KV has dtype {dtype}, expected one of {', '.join(DTYPE_BYTES)}")
    return window, shape[1], shape[3], dtype


def _layout_of(sets: tuple[LayerSet, ...], block_tokens: int, rope: str) -> KvLayout:
    dense = sets[0]
    groups = tuple(
        SlidingWindow(
            layers=len(layers.layers),
            window=layers.window or 0,
            kv_heads=layers.kv_heads,
            head_dim=layers.head_dim,
            dtype=layers.dtype,
        )
        for layers in sets[1:]
    )
    return KvLayout(
        layers=len(dense.layers),
        kv_heads=dense.kv_heads,
        head_dim=dense.head_dim,
        dtype=dense.dtype,
        block_tokens=block_tokens,
        rope=rope,
        engine="transformers",
        groups=groups,
    )


def _computed_layers(model: PreTrainedModel, tokens: int) -> list[Any]:
    cache = DynamicCache(config=model.config)
    ids = torch.arange(tokens, device=next(model.parameters()).device)[None]
    with torch.no_grad():
        model(ids, use_cache=True, **{CACHE_ARGUMENT: cache})
    layers = filled_layers(cache)
    if layers is None:
        kinds = ", ".join(sorted({type(layer).__name__ for layer in cache.layers}))
        raise UnsupportedModelError(
            f"the cache has layers of {kinds}; only full attention (DynamicLayer) and sliding windows "
            "(DynamicSlidingWindowLayer) are supported"
        )
    return layers


def _tensors(layers: list[Any]) -> LayerTensors:
    return [(layer.keys, layer.values) for layer in layers]


def _prefix_differs(shorter: LayerTensors, longer: LayerTensors) -> bool:
    """Whether the same leading tokens got other keys or values in a longer prompt, by more than rounding explains."""
    for pair, longer_pair in zip(shorter, longer, strict=True):
        for tensor, longer_tensor in zip(pair, longer_pair, strict=True):
            expected = tensor.float()
            difference = (longer_tensor[:, :, : tensor.shape[2]].float() - expected).abs().mean()
            if difference > max(1e-3, 8 * torch.finfo(tensor.dtype).eps) * expected.abs().mean():
                return True
    return False


def _fingerprint(model: PreTrainedModel) -> str:
    """A digest of the code's version, the configuration, and names, shapes, dtypes and bytes of all weights."""
    digest = hashlib.blake2b(digest_size=16, person=b"kvstore.hf.model")
    digest.update(f"transformers {transformers.__version__} {type(model).__qualname__}\n".encode())
    digest.update(_config_text(model.config).encode())
    for name, tensor in _weights(model):
        values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        digest.update(f"\n{name} {tuple(tensor.shape)} {tensor.dtype} {xxhash.xxh3_128_hexdigest(values)}".encode())
    return digest.hexdigest()


def _config_text(config: PreTrainedConfig) -> str:
    fields = {name: value for name, value in config.to_dict().items() if name not in _NEUTRAL_CONFIG_FIELDS}
    return json.dumps(fields, sort_keys=True, default=str)


def _weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    return itertools.chain(model.named_parameters(), model.named_buffers())


def _identities(model: PreTrainedModel) -> list[tuple[int, int]]:
    # Tensors made in inference mode have no version counter and cannot be written outside of it.
    return [(tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for _, tensor in _weights(model)]  # noqa: SLF001


def _sample_views(model: PreTrainedModel) -> dict[torch.dtype, list[torch.Tensor]]:
    views: dict[torch.dtype, list[torch.Tensor]] = {}
    for _, tensor in _weights(model):
        step = tensor.numel() // _SAMPLES_PER_TENSOR + 1
        views.setdefault(tensor.dtype, []).append(tensor.detach().flatten()[::step])
    return views


def _read_samples(views: dict[torch.dtype, list[torch.Tensor]]) -> list[Any]:
    return [torch.cat(group).cpu().view(torch.uint8).numpy().tobytes() for group in views.values()]
