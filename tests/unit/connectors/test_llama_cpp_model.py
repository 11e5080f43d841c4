"""Which engines of llama.cpp share, which are refused, which prompts are bypassed: with a stub of its library.

The real library, model and context are those of tests/engines.
"""

from __future__ import annotations

import importlib
import sys
import types
from types import SimpleNamespace

import pytest

from kvstore.connectors.common import UnsupportedModelError

NAME = "kvstore.connectors.llama_cpp_model"
MODEL = {
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "embd": 64,
    "trained": 2048,
    "swa": 0,
    "recurrent": False,
    "hybrid": False,
}
PARAMS = {
    "rope_scaling_type": -1,
    "rope_freq_base": 0.0,
    "rope_freq_scale": 0.0,
    "yarn_ext_factor": -1.0,
    "yarn_attn_factor": 1.0,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_orig_ctx": 0,
    "attention_type": -1,
    "flash_attn_type": 0,
    "type_k": 1,
    "type_v": 1,
    "swa_full": False,
    "embeddings": False,
}


@pytest.fixture
def described(monkeypatch):
    """The module under test, over a library whose models are dicts."""
    library, chat = types.ModuleType("llama_cpp"), types.ModuleType("llama_cpp.llama_chat_format")
    library.__version__, library.LLAMA_STATE_SEQ_VERSION, library.LLAMA_ATTENTION_TYPE_NON_CAUSAL = "0.3.36", 3, 1
    library.llama_get_memory = lambda ctx: ctx
    for function, key in (
        ("n_layer", "layers"),
        ("n_head", "heads"),
        ("n_head_kv", "kv_heads"),
        ("n_embd", "embd"),
        ("n_ctx_train", "trained"),
        ("n_swa", "swa"),
        ("is_recurrent", "recurrent"),
        ("is_hybrid", "hybrid"),
    ):
        setattr(library, f"llama_model_{function}", lambda model, key=key: model[key])
    library.llama_model_has_encoder = lambda model: model.get("encoder", False)
    chat.Llava15ChatHandler, chat.MTMDChatHandler = type("Llava", (), {}), type("Mtmd", (), {})
    monkeypatch.setitem(sys.modules, "llama_cpp", library)
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_chat_format", chat)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    yield importlib.import_module(NAME)
    sys.modules.pop(NAME)


@pytest.fixture
def new_engine(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF weights")

    def make(model=(), params=(), context=512, **fields):
        engine = {
            "model": MODEL | dict(model),
            "ctx": object(),
            "context_params": SimpleNamespace(**PARAMS | dict(params)),
            "metadata": {"general.architecture": "llama", "general.name": "Tiny"},
            "model_path": str(path),
            "kv_overrides": None,
            "lora_path": None,
            "lora_scale": 1.0,
            "draft_model": None,
            "_logits_all": False,
            "chat_handler": None,
            "n_ctx": lambda: context,
        }
        return SimpleNamespace(**engine | fields)

    return make


def test_a_layout_is_that_of_the_model(described, new_engine):
    layout = described.layout_of(new_engine())
    assert (2, 2, 16, "float16", 1) == (
        layout.layers,
        layout.kv_heads,
        layout.head_dim,
        layout.dtype,
        layout.block_tokens,
    )
    assert "any" == layout.state.cut


def test_contexts_of_other_sizes_share(described, new_engine):
    assert described.layout_of(new_engine()) == described.layout_of(new_engine(context=2048))


@pytest.mark.parametrize(
    "other",
    [
        {"params": {"type_k": 8}},
        {"params": {"type_v": 8}},
        {"params": {"flash_attn_type": 1}},
        {"params": {"rope_freq_base": 1e6}},
        {"context": 4096},  # beyond what the model was trained for LongRoPE takes other factors
        {"metadata": {"general.architecture": "llama", "llama.rope.scaling.original_context_length": "256"}},
    ],
)
def test_contexts_whose_bytes_mean_something_else_do_not(other, described, new_engine):
    assert described.layout_of(new_engine()) != described.layout_of(new_engine(**other))


def test_other_weights_overrides_and_adapters_have_other_names(described, new_engine, tmp_path):
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF other")
    overridden = new_engine(kv_overrides={"llama.rope.freq_base": 5.0})
    engines = (new_engine(), new_engine(model_path=str(other)), overridden)
    assert 3 == len({described.revision_of(engine, None) for engine in engines})
    adapters = (new_engine(lora_path=str(other)), new_engine(lora_path=str(other), lora_scale=0.5), new_engine())
    assert 3 == len({described.adapter_of(engine, None) for engine in adapters})


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ({"model": {"recurrent": True}}, "recurrent"),
        ({"model": {"hybrid": True}}, "recurrent"),
        ({"model": {"encoder": True}}, "encoder"),
        ({"model": {"swa": 1024}}, "swa_full=True"),
        ({"params": {"embeddings": True}}, "embeddings"),
        ({"params": {"attention_type": 1}}, "not causal"),
        ({"ctx": None}, "no memory"),
    ],
)
def test_engines_whose_states_serve_nobody_are_refused_with_the_reason(engine, reason, described, new_engine):
    with pytest.raises(UnsupportedModelError, match=reason):
        described.layout_of(new_engine(**engine))


def test_a_window_that_keeps_everything_is_served(described, new_engine):
    assert described.layout_of(new_engine(model={"swa": 1024}, params={"swa_full": True}))


@pytest.mark.parametrize(
    ("fields", "asked", "reason"),
    [
        ({}, {}, None),
        ({}, {"reset": True}, None),
        ({}, {"reset": False}, "no_reset"),
        ({"draft_model": object()}, {}, "draft_model"),
        ({"_logits_all": True}, {}, "logits_all"),
        ({"chat_handler": object()}, {}, None),
    ],
)
def test_prompts_that_need_more_than_a_prefix_are_bypassed(fields, asked, reason, described, new_engine):
    assert reason == described.bypass_reason(new_engine(**fields), asked)


@pytest.mark.parametrize("handler", ["Llava15ChatHandler", "MTMDChatHandler"])
def test_prompts_with_images_are_bypassed(handler, described, new_engine):
    vision = getattr(sys.modules["llama_cpp.llama_chat_format"], handler)()
    assert "multimodal" == described.bypass_reason(new_engine(chat_handler=vision), {})
