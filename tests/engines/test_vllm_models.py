"""A model of which some layers have a window answers over a sidecar as without one, where vLLM keeps every token."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

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
