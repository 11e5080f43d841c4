"""Which generate() calls the store can serve: plain greedy decoding or sampling from token ids, without padding."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import torch

from kvstore.connectors.huggingface_cache import CACHE_ARGUMENTS
from kvstore.connectors.huggingface_model import has_adapter_layers

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from transformers import PreTrainedModel

Arguments = dict[str, Any]


class Bypass(enum.StrEnum):
    """Why a call is computed without the store."""

    ADAPTER = "adapter"
    ARGUMENT = "argument"
    AUTOCAST = "autocast"
    INPUTS = "inputs"
    MEMORY = "memory"
    OWN_CACHE = "own_cache"
    PADDING = "padding"
    SETTING = "setting"
    STORE = "store"
    TRAINING = "training"
    UNSUPPORTED = "unsupported"
    UNVERIFIED = "unverified"


# Arguments that leave keys and values as they are. Anything else may reach forward() and change them.
_NEUTRAL_ARGUMENTS = frozenset(
    {
        "attention_mask",
        "generation_config",
        "input_ids",
        "inputs",
        "logits_processor",
        "prefix_allowed_tokens_fn",
        "stopping_criteria",
        "streamer",
        "tokenizer",
    }
)

# Settings of generation that need other caches, other passes over the prompt, or outputs for tokens of the prefix;
# with the values besides None that do not.
_NEUTRAL_SETTINGS: Mapping[str, tuple[object, ...]] = {
    "assistant_early_exit": (),
    "cache_implementation": ("dynamic",),
    "constraints": (),
    "dola_layers": (),
    "force_words_ids": (),
    "guidance_scale": (1, 1.0),
    "is_assistant": (False,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "penalty_alpha": (0, 0.0),
    "prefill_chunk_size": (),
    "prompt_lookup_num_tokens": (),
    "token_healing": (False,),
    "use_cache": (True,),
    "use_mtp": (False,),
}


def read_prompt(model: PreTrainedModel, arguments: Arguments) -> torch.Tensor | Bypass:
    """The token ids [rows, tokens] of a call that the store can serve, else the reason why it cannot.

    `arguments` are those of generate(), by name. Nothing is changed.
    """
    reason = _state_bypass(model) or _argument_bypass(model, arguments)
    if reason is not None:
        return reason
    prompt = _input_ids(arguments)
    if prompt is None:
        return Bypass.INPUTS
    return Bypass.PADDING if _has_padding(model, arguments, prompt) else prompt


def adapter_bypass(model: PreTrainedModel, adapter: str | None) -> Bypass | None:
    """A model with adapter layers is served only if the caller names the adapter that is active."""
    return Bypass.ADAPTER if adapter is None and has_adapter_layers(model) else None


def _state_bypass(model: PreTrainedModel) -> Bypass | None:
    if model.training:
        return Bypass.TRAINING
    if torch.is_autocast_enabled(model.device.type):
        return Bypass.AUTOCAST
    return None


def _argument_bypass(model: PreTrainedModel, arguments: Arguments) -> Bypass | None:
    if any(arguments.get(name) is not None for name in CACHE_ARGUMENTS):
        return Bypass.OWN_CACHE
    known = vars(model.generation_config).keys()
    if any(value is not None for name, value in arguments.items() if name not in _NEUTRAL_ARGUMENTS | known):
        return Bypass.ARGUMENT
    for name, neutral in _NEUTRAL_SETTINGS.items():
        value = _setting(model, arguments, name)
        if value is not None and value not in neutral:
            return Bypass.SETTING
    return None


def _setting(model: PreTrainedModel, arguments: Arguments, name: str) -> Any:  # noqa: ANN401
    """A setting as generate() resolves it: the argument, the given configuration, the model's own."""
    value = arguments.get(name)
    for config in (arguments.get("generation_config"), model.generation_config):
        value = getattr(config, name, None) if value is None else value
    return value


def _input_ids(arguments: Arguments) -> torch.Tensor | None:
    candidates = [value for name in ("inputs", "input_ids") if (value := arguments.get(name)) is not None]
    if len(candidates) != 1 or not isinstance(candidates[0], torch.Tensor):
        return None
    prompt = candidates[0]
    if prompt.ndim != 2 or prompt.numel() == 0 or prompt.dtype not in (torch.int32, torch.int64):
        return None
    return prompt


def _has_padding(model: PreTrainedModel, arguments: Arguments, prompt: torch.Tensor) -> bool:
    mask = arguments.get("attention_mask")
    if mask is not None:
        return not isinstance(mask, torch.Tensor) or mask.shape != prompt.shape or not bool((mask == 1).all())
    # Without a mask generate() takes padding tokens for padding, unless they also end sequences.
    pad = _setting(model, arguments, "pad_token_id")
    if pad is None or pad in _as_ids(_setting(model, arguments, "eos_token_id")):
        return False
    return bool((prompt == pad).any())


def _as_ids(ids: int | Iterable[int] | torch.Tensor | None) -> list[int]:
    if ids is None:
        return []
    return torch.as_tensor(ids).reshape(-1).tolist()
