"""Models whose layers cache different things answer over a sidecar as without one: with windows, and with latents."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig

BLOCK_TOKENS = 32
pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]


def save_window_model(folder):
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        initializer_range=0.2,
        eos_token_id=None,
        sliding_window=48,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    Gemma3ForCausalLM(config).save_pretrained(folder)


def save_latent_model(folder):
    """A DeepSeek V2 of random weights, with the only head size that vLLM's kernels for latents know."""
    torch.manual_seed(0)
    config = DeepseekV2Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=3,
        max_position_embeddings=4096,
        initializer_range=0.2,
        eos_token_id=None,
    )
    DeepseekV2ForCausalLM(config).save_pretrained(folder)


def prompts_of(count, step):
    shared = random.Random(0).choices(range(3, 500), k=150)
    return [shared + random.Random(number).choices(range(3, 500), k=step * number + 1) for number in range(count)]


@pytest.fixture
def answers(start_engine, start_server, new_address):
    """What a model answers without a connector, what a first engine over a sidecar does, and what a second one.

    Without a connector it is asked twice: the second time it computes behind what it has cached itself, as an engine
    does that loads. `arriving` is how many blocks of each load arrive when the second engine is asked again.
    """

    def run(options, prompts, max_tokens, settings=None, arriving=1):
        address, found = None, []
        for _ in range(3):
            engine = start_engine(address, settings, **options)
            found.append(engine.ask("generate", prompts=prompts, max_tokens=max_tokens))
            if address is None:
                found[0]["again"] = engine.ask("generate", prompts=prompts, max_tokens=max_tokens)
            else:
                found[-1]["counts"] = engine.ask("wait_stored")
            if len(found) == 3:
                found[-1]["cut"] = cut_short(engine, prompts, max_tokens, arriving)
            engine.close()
            if address is None:
                address = new_address()
                start_server(address)
        return found

    return run


def cut_short(engine, prompts, max_tokens, arriving):
    """What the engine answers where each load breaks off behind so many blocks."""
    assert engine.ask("reset") == {"reset": True}
    engine.ask("limit", blocks=arriving)
    answer = engine.ask("generate", prompts=prompts, max_tokens=max_tokens)
    return answer | {"counts": engine.ask("counts")}


def check_equal(found, prompts):
    plain, first, second = found
    answered = [first["tokens"], second["tokens"], second["cut"]["tokens"]]
    assert answered == [plain["tokens"], plain["again"]["tokens"], plain["tokens"]]
    assert second["cut"]["reasons"] == ["length"] * len(prompts)
    counts = [first["counts"], second["counts"], second["cut"]["counts"]]
    assert [(one["failures"], one["bypassed"], one["held"], one["leased"]) for one in counts] == [({}, {}, 0, 0)] * 3
    assert first["counts"]["stored_blocks"] > 0


@pytest.mark.slow
def test_two_engines_with_a_group_for_windows_answer_as_without_a_connector(answers, tmp_path, record_vllm):
    save_window_model(tmp_path)
    prompts = prompts_of(24, 7)
    found = answers({"model": str(tmp_path)}, prompts, max_tokens=16)
    check_equal(found, prompts)
    whole = [(len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for prompt in prompts]
    assert found[2]["cached"] == whole  # the end of each prompt is a point at which its windows are kept
    assert found[2]["counts"]["loaded_tokens"] > 0
    assert found[2]["cut"]["counts"]["loaded_tokens"] == found[2]["counts"]["loaded_tokens"]  # all or nothing
    record_vllm("prompts, two groups of layers, loads that break off", "full attention and sliding windows", "Gemma3")


@pytest.mark.slow
def test_loads_and_stores_by_layer_change_no_answer(answers, record_vllm):
    prompts = prompts_of(24, 7)
    found = answers({}, prompts, max_tokens=16, settings={"by_layer": True})
    check_equal(found, prompts)
    whole = [(len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for prompt in prompts]
    assert found[2]["cached"] == whole
    assert found[2]["counts"]["loaded_tokens"] > 0
    assert found[2]["cut"]["counts"]["loaded_tokens"] > found[2]["counts"]["loaded_tokens"]  # the first block of each
    record_vllm("loads and stores by layer, loads that break off")


@pytest.mark.slow
def test_two_engines_of_latents_answer_as_without_a_connector(answers, tmp_path, record_vllm):
    save_latent_model(tmp_path)
    prompts = prompts_of(6, 9)
    # bfloat16 is all that the kernels know, and has near ties: where a prompt is split changes what is computed.
    options = {"model": str(tmp_path), "dtype": "bfloat16", "max_num_seqs": 1}
    found = answers(options, prompts, max_tokens=4, arriving=0)
    check_equal(found, prompts)
    assert found[2]["cached"] == [(len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for prompt in prompts]
    record_vllm("prompts", "latent (MLA)", "DeepSeek-V2", "bfloat16")


def test_a_model_with_windows_answers_the_same_computed_and_loaded(
    start_engine, start_server, new_address, tmp_path, record_vllm
):
    save_window_model(tmp_path)
    options = {"model": str(tmp_path), "disable_hybrid_kv_cache_manager": True}
    shared = random.Random(0).choices(range(3, 500), k=150)
    prompts = [shared + random.Random(number).choices(range(3, 500), k=9 * number + 1) for number in range(6)]
    plain = start_engine(**options)
    expected = plain.ask("generate", prompts=prompts, max_tokens=16)["tokens"]
    plain.close()
    address = new_address()
    start_server(address)
    engine = start_engine(address, **options)
    assert engine.ask("generate", prompts=prompts, max_tokens=16)["tokens"] == expected
    assert engine.ask("wait_stored")["stored_blocks"] > 0
    assert engine.ask("reset") == {"reset": True}
    assert engine.ask("generate", prompts=prompts, max_tokens=16)["tokens"] == expected
    counts = engine.ask("counts")
    assert counts["loaded_tokens"] >= sum(len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS for prompt in prompts) // 2
    assert (counts["failures"], counts["bypassed"]) == ({}, {})
    record_vllm("prompts, without the hybrid KV cache manager", "full attention and sliding windows", "Gemma3")
