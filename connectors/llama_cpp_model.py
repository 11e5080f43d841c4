"""Which models and contexts of llama.cpp can be served, their fingerprint and their layout."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llama_cpp
from llama_cpp.llama_chat_format import Llava15ChatHandler, MTMDChatHandler

from kvstore.connectors.common import UnsupportedModelError
from kvstore.connectors.llama_cpp_fingerprint import gguf_digest, text_digest
from kvstore.layer_groups import SequenceState, StateCut
from kvstore.types import KvLayout

if TYPE_CHECKING:
    from collections.abc import Mapping

# What of a context gives the bytes of its KV their meaning. Not its size, batches, threads or devices.
_CONTEXT_FIELDS = (
    "rope_scaling_type",
    "rope_freq_base",
    "rope_freq_scale",
    "yarn_ext_factor",
    "yarn_attn_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_orig_ctx",
    "attention_type",
    "flash_attn_type",
    "type_k",
    "type_v",
)
# ggml.h: enum ggml_type
_TYPE_NAMES = {0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 20: "iq4_nl", 30: "bf16"}
_LAYOUT_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
_VISION_HANDLERS = (Llava15ChatHandler, MTMDChatHandler)


def revision_of(llm: llama_cpp.Llama, digests: Path | None) -> str:
    """A fingerprint of the model's files and of what changes their weights; reads them unless `digests` knows them."""
    overrides = llm.kv_overrides or {}
    texts = [
        gguf_digest(Path(os.fsdecode(llm.model_path)), digests),
        *(f"{key}={overrides[key]!r}" for key in sorted(overrides)),
    ]
    return text_digest(texts)


def adapter_of(llm: llama_cpp.Llama, digests: Path | None) -> str | None:
    """The content digest of the LoRA adapter that the engine was made with, and its scale."""
    if not llm.lora_path:
        return None
    return text_digest([gguf_digest(Path(os.fsdecode(llm.lora_path)), digests), repr(float(llm.lora_scale))])


def name_of(llm: llama_cpp.Llama) -> str:
    """What the model calls itself, else the name of its file."""
    return str(llm.metadata.get("general.name") or Path(os.fsdecode(llm.model_path)).stem)


def layout_of(llm: llama_cpp.Llama) -> KvLayout:
    """The layout of the engine's states; raises UnsupportedModelError where they serve no other prompts.

    The same for contexts of other sizes: a state holds the tokens that it is of.
    """
    require_served(llm)
    kinds = kv_types(llm)
    return KvLayout(
        layers=llama_cpp.llama_model_n_layer(llm.model),
        kv_heads=max(1, llama_cpp.llama_model_n_head_kv(llm.model)),
        head_dim=_head_dim(llm),
        dtype=_LAYOUT_DTYPES.get(kinds[0], "uint8"),
        block_tokens=1,
        engine="llama.cpp",
        quantisation=f"k={kinds[0]} v={kinds[1]}",
        state=SequenceState(cut=StateCut.ANY, form=_form(llm)),
    )


def kv_types(llm: llama_cpp.Llama) -> tuple[str, str]:
    """The types of keys and values in the context, as llama.cpp calls them."""
    params = llm.context_params
    return _type_name(params.type_k), _type_name(params.type_v)


def require_served(llm: llama_cpp.Llama) -> None:
    """Raise UnsupportedModelError, with the reason, for a model or a context whose states are of no use."""
    params = llm.context_params
    window = llama_cpp.llama_model_n_swa(llm.model)
    reasons = {
        "recurrent layers, whose state cannot be cut down to a prefix": (
            llama_cpp.llama_model_is_recurrent(llm.model) or llama_cpp.llama_model_is_hybrid(llm.model)
        ),
        "an encoder": llama_cpp.llama_model_has_encoder(llm.model),
        f"a sliding window ({window} tokens) that drops what a prefix needs: make it with swa_full=True": (
            window > 0 and not params.swa_full
        ),
        "a context for embeddings": bool(params.embeddings),
        "attention that is not causal": params.attention_type == llama_cpp.LLAMA_ATTENTION_TYPE_NON_CAUSAL,
        "no memory": llama_cpp.llama_get_memory(llm.ctx) is None,
    }
    found = [reason for reason, applies in reasons.items() if applies]
    if found:
        raise UnsupportedModelError(f"{llm.model_path} has {', and '.join(found)}")


def bypass_reason(llm: llama_cpp.Llama, asked: Mapping[str, Any]) -> str | None:
    """Why a prompt is to be computed without the store; None where it need not."""
    if llm.draft_model is not None:
        return "draft_model"  # the sequence may end with tokens that were only guessed
    if llm._logits_all:  # noqa: SLF001  # nothing else tells
        return "logits_all"
    if isinstance(llm.chat_handler, _VISION_HANDLERS):
        return "multimodal"  # more than token ids decides their KV
    return "no_reset" if asked.get("reset") is False else None


def _form(llm: llama_cpp.Llama) -> str:
    """What the bytes of a state are; the states of another version of llama.cpp are never tried.

    LongRoPE takes its factors by whether the context is longer than the model was trained for.
    """
    params = llm.context_params
    trained = int(params.yarn_orig_ctx) or int(_metadata(llm, "rope.scaling.original_context_length") or 0)
    texts = [
        *(f"{name}={getattr(params, name)!r}" for name in _CONTEXT_FIELDS),
        f"long={llm.n_ctx() > (trained or llama_cpp.llama_model_n_ctx_train(llm.model))}",
    ]
    versions = f"llama-cpp-python {llama_cpp.__version__}, state {llama_cpp.LLAMA_STATE_SEQ_VERSION}"
    return f"{versions}, {text_digest(texts)}"


def _head_dim(llm: llama_cpp.Llama) -> int:
    told = _metadata(llm, "attention.key_length")
    return int(told) if told else llama_cpp.llama_model_n_embd(llm.model) // llama_cpp.llama_model_n_head(llm.model)


def _metadata(llm: llama_cpp.Llama, key: str) -> str | None:
    value = llm.metadata.get(f"{llm.metadata.get('general.architecture')}.{key}")
    return None if value is None else str(value)


def _type_name(kind: int) -> str:
    return _TYPE_NAMES.get(kind, f"type {kind}")
