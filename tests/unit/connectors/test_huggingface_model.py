"""Models whose KV cannot be cached are refused, and fingerprints follow everything that decides KV."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    BertConfig,
    BertLMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from kvstore.connectors.common import UnsupportedModelError
from kvstore.connectors.huggingface import cached
from kvstore.connectors.huggingface_model import WeightsWatch, describe_model
from kvstore.layer_groups import SlidingWindow

SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def rope(rope_type, **more):
    return {"rope_type": rope_type, "rope_theta": 10000.0} | more


STATIC = {
    "default": rope("default"),
    "linear": rope("linear", factor=2.0),
    "yarn": rope("yarn", factor=2.0, original_max_position_embeddings=256),
    "llama3": rope(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=256
    ),
}
LENGTH_DEPENDENT = {
    "dynamic": rope("dynamic", factor=2.0),
    "longrope": rope(
        "longrope",
        factor=2.0,
        long_factor=[1.0] * 8,
        short_factor=[1.0] * 8,
        original_max_position_embeddings=256,
    ),
}


@pytest.mark.parametrize("name", STATIC)
def test_static_rope_is_described(name, new_llama):
    layout = describe_model(new_llama(rope_parameters=STATIC[name]), 16).layout
    assert (layout.layers, layout.kv_heads, layout.head_dim, layout.dtype) == (2, 2, 16, "float32")
    assert f'"rope_type": "{name}"' in layout.rope


@pytest.mark.parametrize("name", LENGTH_DEPENDENT)
def test_rope_that_depends_on_the_total_length_is_refused(name, new_llama, store):
    model = new_llama(rope_parameters=LENGTH_DEPENDENT[name])
    with pytest.raises(UnsupportedModelError, match=name):
        cached(model, store)
    assert "generate" not in vars(model)


def test_gpt2_is_described_without_rope(gpt2):
    layout = describe_model(gpt2, 16).layout
    assert (layout.layers, layout.kv_heads, layout.head_dim, layout.rope) == (2, 4, 16, "")


def test_layers_with_a_window_are_a_group(new_gemma3):
    description = describe_model(new_gemma3(), 16)
    assert (1, 2, 16) == (description.layout.layers, description.layout.kv_heads, description.layout.head_dim)
    window = SlidingWindow(layers=3, window=40, kv_heads=2, head_dim=16, dtype="float32")
    assert (window,) == description.layout.groups
    assert [(2,), (0, 1, 3)] == [layers.layers for layers in description.sets]


def test_where_all_layers_have_a_window_one_of_them_is_dense(new_mistral):
    description = describe_model(new_mistral(), 16)
    assert (1, 3) == (description.layout.layers, description.layout.groups[0].layers)
    assert [((0,), 40), ((1, 2, 3), 40)] == [(layers.layers, layers.window) for layers in description.sets]
    alone = describe_model(new_mistral(num_hidden_layers=1), 16)
    assert (1, ()) == (alone.layout.layers, alone.layout.groups)


def test_a_window_of_a_few_tokens_is_refused(new_mistral):
    with pytest.raises(UnsupportedModelError, match="sliding window of 8 tokens"):
        describe_model(new_mistral(sliding_window=8), 16)


def test_one_rope_of_several_that_depends_on_the_length_is_refused(new_gemma3):
    parameters = {"full_attention": LENGTH_DEPENDENT["dynamic"], "sliding_attention": STATIC["default"]}
    with pytest.raises(UnsupportedModelError, match="dynamic"):
        describe_model(new_gemma3(rope_parameters=parameters), 16)


def test_bidirectional_attention_is_refused(new_gemma3):
    with pytest.raises(UnsupportedModelError, match="bidirectional"):
        describe_model(new_gemma3(use_bidirectional_attention=True), 16)


def test_attention_in_chunks_is_refused(new_llama):
    model = new_llama()
    model.config.attention_chunk_size = 64
    with pytest.raises(UnsupportedModelError, match="chunks"):
        describe_model(model, 16)


def test_a_quantised_cache_is_refused(new_llama):
    model = new_llama()
    model.generation_config.cache_implementation = "quantized"
    with pytest.raises(UnsupportedModelError, match="quantized"):
        describe_model(model, 16)


def test_recurrent_layers_are_refused():
    config = MambaConfig(vocab_size=128, hidden_size=32, state_size=4, num_hidden_layers=1)
    with pytest.raises(UnsupportedModelError):
        describe_model(MambaForCausalLM(config), 16)


def test_encoder_decoder_models_are_refused():
    model = T5ForConditionalGeneration(T5Config(vocab_size=128, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2))
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        describe_model(model, 16)


def test_bidirectional_models_are_refused():
    small = {name: value for name, value in SMALL.items() if name != "num_key_value_heads"}
    with pytest.raises(UnsupportedModelError):
        describe_model(BertLMHeadModel(BertConfig(**small)), 16)


def test_what_is_no_transformers_model_is_refused():
    with pytest.raises(UnsupportedModelError, match="PreTrainedModel"):
        describe_model(torch.nn.Linear(2, 2), 16)


def test_weights_off_the_device_are_refused(new_llama):
    with pytest.raises(UnsupportedModelError, match="meta"):
        describe_model(new_llama().to("meta"), 16)


def test_models_with_their_own_generate_are_refused(new_llama):
    model = new_llama()
    model.__class__ = type("Own", (type(model),), {"generate": lambda self: None})
    with pytest.raises(UnsupportedModelError, match="generate"):
        describe_model(model, 16)


def test_equal_models_have_equal_fingerprints(new_llama):
    assert describe_model(new_llama(), 16) == describe_model(new_llama(), 16)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.model.norm.weight.data.add_(1),
        lambda model: model.to(torch.bfloat16),
        lambda model: setattr(model.config, "rms_norm_eps", 1e-3),
        lambda model: model.model.rotary_emb.inv_freq.mul_(2),
    ],
)
def test_whatever_changes_kv_changes_the_fingerprint(change, new_llama):
    model = new_llama()
    before = describe_model(model, 16).revision
    change(model)
    assert before != describe_model(model, 16).revision


def test_names_and_places_change_no_fingerprint(new_llama):
    model = new_llama()
    before = describe_model(model, 16)
    model.config._name_or_path = "/somewhere/else"
    model.config.eos_token_id = 5
    assert before == describe_model(model, 16)


def test_watch_sees_no_change_in_a_model_that_only_computes(new_llama):
    model = new_llama()
    watch = WeightsWatch(model)
    model.generate(torch.arange(10)[None], max_new_tokens=3)
    assert not watch.sees_change(model)


def test_watch_sees_a_replaced_parameter(new_llama):
    model = new_llama()
    watch = WeightsWatch(model)
    model.model.norm.weight = torch.nn.Parameter(torch.ones(64))
    assert watch.sees_change(model)


def test_watch_works_for_weights_made_in_inference_mode(new_llama):
    with torch.inference_mode():
        model = new_llama()
    watch = WeightsWatch(model)
    assert not watch.sees_change(model)
