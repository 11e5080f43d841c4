"""Which generate() calls the store can serve: plain greedy decoding or sampling from token ids, padded on the left."""

from __future__ import annotations

import copy
import enum
import inspect
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from kvstore.connectors.huggingface_cache import CACHE_ARGUMENTS
from kvstore.connectors.huggingface_model import has_adapter_layers
from kvstore.connectors.huggingface_rows import Prompt

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from transformers import PreTrainedModel

Arguments = dict[str, Any]

_DEFAULT_NEW_TOKENS = 20  # of generate(), which also takes a `max_length` for the prompt and them together


class Bypass(enum.StrEnum):
    """Why a call is computed without the store."""

    ADAPTER = "adapter"
    ARGUMENT = "argument"
    AUTOCAST = "autocast"
    BROKEN = "broken"
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
    "cache_implementation": ("dynamic", "static"),
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


def read_prompt(model: PreTrainedModel, arguments: Arguments) -> Prompt | Bypass:
    """The prompt of a call that the store can serve, else the reason why it cannot.

    `arguments` are those of generate(), by name. Nothing is changed.
    """
    reason = _state_bypass(model) or _argument_bypass(model, arguments)
    if reason is not None:
        return reason
    ids = _input_ids(arguments)
    if ids is None:
        return Bypass.INPUTS
    pads = _left_padding(model, arguments, ids)
    if pads is None or (any(pads) and not _follows_positions(model)):
        return Bypass.PADDING
    return Prompt(ids.cpu(), pads)


def given_cache(arguments: Arguments) -> object | None:
    """The cache that the caller handed over, if any."""
    return next((value for name in CACHE_ARGUMENTS if (value := arguments.get(name)) is not None), None)


def static_columns(model: PreTrainedModel, arguments: Arguments, columns: int) -> int | None:
    """How many columns a static cache needs for a prompt of so many; None where the call wants a growing cache."""
    if setting(model, arguments, "cache_implementation") != "static":
        return None
    new_tokens = setting(model, arguments, "max_new_tokens")
    if new_tokens is None:
        # Where transformers resolves defaults to less, the cache is only larger than it had to be.
        new_tokens = max(_DEFAULT_NEW_TOKENS, setting(model, arguments, "max_length") or 0)
    wanted = setting(model, arguments, "max_cache_len") or 0
    return int(max(columns + new_tokens - 1, wanted))


def without_cache_setting(
    model: PreTrainedModel, arguments: Arguments
) -> tuple[Arguments, AbstractContextManager[None]]:
    """The arguments without the wish for a kind of cache, and the model's own wish undone while the manager is open.

    generate() refuses a cache that is handed over beside such a wish.
    """
    changed = {name: value for name, value in arguments.items() if name != "cache_implementation"}
    if (config := arguments.get("generation_config")) is not None:
        changed["generation_config"] = copy.copy(config)
        changed["generation_config"].cache_implementation = None
    return changed, _unset_cache(model)


@contextmanager
def _unset_cache(model: PreTrainedModel) -> Iterator[None]:
    wish = model.generation_config.cache_implementation
    model.generation_config.cache_implementation = None
    try:
        yield
    finally:
        model.generation_config.cache_implementation = wish


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
    known = _NEUTRAL_ARGUMENTS.union(CACHE_ARGUMENTS, vars(model.generation_config))
    if any(value is not None for name, value in arguments.items() if name not in known):
        return Bypass.ARGUMENT
    for name, neutral in _NEUTRAL_SETTINGS.items():
        value = setting(model, arguments, name)
        if value is not None and value not in neutral:
            return Bypass.SETTING
    return None


def setting(model: PreTrainedModel, arguments: Arguments, name: str) -> Any:  # noqa: ANN401
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


def _left_padding(model: PreTrainedModel, arguments: Arguments, ids: torch.Tensor) -> tuple[int, ...] | None:
    """By how many columns each row is padded on the left; None if there is padding elsewhere, or nothing else."""
    mask = _mask(model, arguments, ids)
    if mask is None or mask.shape != ids.shape or not bool(((mask == 0) | (mask == 1)).all()):
        return None
    pads = ids.shape[1] - mask.sum(dim=1)
    expected = torch.arange(ids.shape[1], device=pads.device)[None] >= pads[:, None]
    if not torch.equal(mask == 1, expected) or int(pads.max()) == ids.shape[1]:
        return None
    return tuple(pads.tolist())


def _follows_positions(model: PreTrainedModel) -> bool:
    """Whether positions are told to the model; where it counts them itself, padding may shift them."""
    return "position_ids" in inspect.signature(model.forward).parameters


def _mask(model: PreTrainedModel, arguments: Arguments, ids: torch.Tensor) -> torch.Tensor | None:
    if (mask := arguments.get("attention_mask")) is not None:
        return mask.long() if isinstance(mask, torch.Tensor) and mask.ndim == ids.ndim else None
    # Without a mask generate() takes padding tokens for padding, unless they also end sequences.
    pad = setting(model, arguments, "pad_token_id")
    if pad is None or pad in end_ids(model, arguments):
        return torch.ones_like(ids)
    inferred: torch.Tensor = (ids != pad).long()
    return inferred


def end_ids(model: PreTrainedModel, arguments: Arguments) -> list[int]:
    """The tokens that end a row."""
    return _as_ids(setting(model, arguments, "eos_token_id"))


def _as_ids(ids: int | Iterable[int] | torch.Tensor | None) -> list[int]:
    if ids is None:
        return []
    return torch.as_tensor(ids).reshape(-1).tolist()
