"""Checks Hugging Face transformers: its version, a model and its layout, a block there and back, a prompt twice."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from kvstore.connectors.check import Finding, Verdict, came_again, round_trip
from kvstore.connectors.checkpoint_files import read_config
from kvstore.connectors.common import UnsupportedModelError
from kvstore.connectors.huggingface import cached, connector_of, uncache
from kvstore.connectors.huggingface_blocks import gives_back_what_it_takes
from kvstore.quantities import format_size
from kvstore.types import Root

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

    from kvstore.api import KvStore
    from kvstore.connectors.check import CheckOptions
    from kvstore.types import KvLayout

# The versions that the test suite runs with; others from MINIMUM on are likely to do.
TESTED = ("5.24",)
MINIMUM = (5, 16)
_BLOCK_TOKENS = 16
_NEW_TOKENS = 4
_PATIENT_SECONDS = 30.0
_MADE_UP_BYTES_MAX = 2 << 30


def check(options: CheckOptions, store: KvStore) -> Iterator[Finding]:
    """See kvstore.connectors.check.Checker."""
    engine = _engine()
    yield engine
    if engine.verdict is Verdict.FAILED:
        return
    try:
        model = _load(options.model)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        yield Finding("model", Verdict.FAILED, f"{options.model}: {error}")
        return
    yield Finding("model", Verdict.OK, _model_sentence(model, options.model))
    block_tokens = _BLOCK_TOKENS if options.block_tokens is None else options.block_tokens
    try:
        cached(
            model,
            store,
            block_tokens=block_tokens,
            lookup_seconds=_PATIENT_SECONDS,
            load_seconds=_PATIENT_SECONDS,
        )
    except UnsupportedModelError as error:
        yield Finding("layout", Verdict.FAILED, f"the KV of this model cannot be cached: {error}")
        return
    try:
        yield from _check_cached(model, store, block_tokens)
    finally:
        uncache(model)


def _check_cached(model: PreTrainedModel, store: KvStore, block_tokens: int) -> Iterator[Finding]:
    namespace = connector_of(model).namespace
    assert namespace is not None, "cached() has described the model"
    yield Finding("layout", Verdict.OK, _layout_sentence(namespace.layout))
    block = round_trip("block", lambda: gives_back_what_it_takes(store, namespace))
    yield block
    if block.verdict is not Verdict.FAILED:
        yield _generate_twice(model, store, block_tokens)


def _engine() -> Finding:
    version = transformers.__version__
    sentence = f"transformers {version}, torch {torch.__version__}"
    if tuple(int(number) for number in version.split(".")[:2]) < MINIMUM:
        return Finding(
            "engine", Verdict.FAILED, f"{sentence}: expected transformers {MINIMUM[0]}.{MINIMUM[1]} or newer"
        )
    if not version.startswith(TESTED):
        return Finding("engine", Verdict.WARNING, f"{sentence}: not tested, only {', '.join(TESTED)} is")
    return Finding("engine", Verdict.OK, sentence)


def _load(folder: str | None) -> PreTrainedModel:
    """The model of a folder, without weights of random ones; a tiny Llama where no folder is named."""
    loader: Any = AutoModelForCausalLM  # not typed in transformers
    loaded: Any
    if folder is None:
        config = LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
        )
        loaded = LlamaForCausalLM(config)
    else:
        path = Path(folder)
        read_config(path)
        if any(path.glob("*.safetensors")) or any(path.glob("*.bin")):
            loaded = loader.from_pretrained(path, local_files_only=True, dtype="auto")
        else:
            loaded = _made_up(loader, AutoConfig.from_pretrained(path, local_files_only=True))
    model: PreTrainedModel = loaded.eval()
    return model


def _made_up(loader: Any, config: Any) -> Any:  # noqa: ANN401  # not typed in transformers
    """A model of random weights, as large as the real one, which the meta device tells without taking memory."""
    with torch.device("meta"):
        size = sum(parameter.nbytes for parameter in loader.from_config(config).parameters())
    if size > _MADE_UP_BYTES_MAX:
        raise ValueError(
            f"there are no weights, and random ones would take {format_size(size)}, over "
            f"{format_size(_MADE_UP_BYTES_MAX)}; put the weights there, or make num_hidden_layers smaller"
        )
    return loader.from_config(config)


def _model_sentence(model: PreTrainedModel, folder: str | None) -> str:
    size = sum(parameter.numel() for parameter in model.parameters())
    origin = "made up, to try the rest (--model PATH checks yours)" if folder is None else f"from {folder}"
    return f"{type(model).__name__} of {size:,} parameters in {str(model.dtype).removeprefix('torch.')}, {origin}"


def _layout_sentence(layout: KvLayout) -> str:
    windows = "".join(
        f", {group.layers} with a window of {group.window}" for group in layout.groups if hasattr(group, "window")
    )
    return (
        f"{layout.layers} layers in full{windows}; {layout.kv_heads} KV heads of {layout.head_dim}, {layout.dtype}; "
        f"a block of {layout.block_tokens} tokens has {format_size(sum(part.size_bytes for part in layout.parts))}"
    )


def _generate_twice(model: PreTrainedModel, store: KvStore, block_tokens: int) -> Finding:
    """Whether a prompt that comes again is reused and gives the same tokens."""
    connector = connector_of(model)
    salt = f"kvstore check {secrets.token_hex(16)}"
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(vocabulary // 2, (1, 4 * block_tokens + 1), generator=torch.Generator().manual_seed(0))
    asked: dict[str, Any] = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": _NEW_TOKENS,
        "do_sample": False,
        "kvstore_salt": salt,
    }
    answers = []
    for _ in range(2):
        answers.append(connector.generate(ids.to(model.device), **asked))
        connector.flush(_PATIENT_SECONDS)
    stats = connector.stats()
    assert connector.namespace is not None, "the model was not changed"
    store.evict(connector.namespace, ids[0].numpy(), root=Root(salt=salt))
    return came_again(
        stats,
        reusable_tokens=4 * block_tokens,
        prompt_tokens=ids.shape[1],
        same=torch.equal(*answers),
        excuse=f"rounding, in {model.dtype}, may do that",
    )
