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
from kvstore.connectors.huggingface_cache import CACHE_ARGUMENT, LayerTensors, layer_tensors
from kvstore.layer_groups import DTYPE_BYTES
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


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """The layout of a model's KV and the fingerprint of all that decides its bytes."""

    layout: KvLayout
    revision: str


def describe_model(model: PreTrainedModel, block_tokens: int) -> ModelDescription:
    """Check that the KV of `model` can be cached, and describe it.

    Reads every weight once (about 0.1 s for 135 M float32 parameters) and computes a few tokens. Raises
    UnsupportedModelError with the reason.
    """
    _check_class(model)
    _check_weights(model)
    rope = _rope_text(model.config)
    layout = _probe_layout(model, block_tokens, rope)
    return ModelDescription(layout, _fingerprint(model))


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
    rope_type = parameters.get("rope_type", "default")
    if rope_type not in STATIC_ROPE_TYPES:
        raise UnsupportedModelError(
            f"rope type {rope_type!r} is not supported: only {', '.join(sorted(STATIC_ROPE_TYPES))} are known to give "
            "a token the same key whatever the total length of the prompt"
        )
    unknown = [name for name, value in parameters.items() if isinstance(value, dict) or name == "mrope_section"]
    if unknown:
        raise UnsupportedModelError(f"rope parameters {', '.join(unknown)} are not supported: one kind of rope is")
    return json.dumps(parameters, sort_keys=True)


def _probe_layout(model: PreTrainedModel, block_tokens: int, rope: str) -> KvLayout:
    """Compute a few tokens and read from the cache they leave what the KV looks like."""
    tensors = _computed_tensors(model, PROBE_TOKENS)
    longer = _computed_tensors(model, 2 * PROBE_TOKENS)
    shapes = {tuple(tensor.shape) for pair in tensors for tensor in pair}
    dtypes = {tensor.dtype for pair in tensors for tensor in pair}
    if len(shapes) != 1 or len(dtypes) != 1:
        raise UnsupportedModelError("keys and values differ in shape or dtype from each other or between layers")
    shape = shapes.pop()
    if len(shape) != 4 or shape[0] != 1 or shape[2] != PROBE_TOKENS:
        raise UnsupportedModelError(f"the KV has shape {shape}, expected (1, heads, {PROBE_TOKENS}, head size)")
    if _prefix_differs(tensors, longer):
        raise UnsupportedModelError("the KV of a prefix depends on the tokens that follow it")
    dtype = str(dtypes.pop()).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise UnsupportedModelError(f"the KV has dtype {dtype}, expected one of {', '.join(DTYPE_BYTES)}")
    return KvLayout(
        layers=len(tensors),
        kv_heads=shape[1],
        head_dim=shape[3],
        dtype=dtype,
        block_tokens=block_tokens,
        rope=rope,
        engine="transformers",
    )


def _computed_tensors(model: PreTrainedModel, tokens: int) -> LayerTensors:
    cache = DynamicCache(config=model.config)
    ids = torch.arange(tokens, device=next(model.parameters()).device)[None]
    with torch.no_grad():
        model(ids, use_cache=True, **{CACHE_ARGUMENT: cache})
    tensors = layer_tensors(cache)
    if tensors is None:
        kinds = ", ".join(sorted({type(layer).__name__ for layer in cache.layers}))
        raise UnsupportedModelError(f"the cache has layers of {kinds}; only full attention, DynamicLayer, is supported")
    return tensors


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
