"""The demo's core path with a tiny random model: real sidecar, two real engine processes, kill -9, a hit from disk."""

from __future__ import annotations

import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvstore.demo.flow import DemoPlan, run_flow
from kvstore.demo.report import as_json, as_table

TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """A byte-level tokenizer and a Llama of 100,000 parameters, as from_pretrained() wants them."""
    folder = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def plan_of(model_dir, **changes):
    values = {
        "model_dir": model_dir,
        "system_prompt": "You answer questions about the sea and its tides. " * 8,
        "questions": (("How deep is it?", "How salty?"), ("Who lives there?",)),
        "threads": 1,
        "new_tokens": 20,
        "host_bytes": 64 << 20,
        "disk_bytes": 256 << 20,
    }
    return DemoPlan(**values | changes)


@pytest.mark.kill
def test_two_engines_share_one_system_prompt(model_dir):
    steps = []
    report = run_flow(plan_of(model_dir), steps.append)
    rows = [*report.rows, report.restart]
    assert [row.broken for row in rows] == [()] * 4
    assert report.holds
    assert [row.engine for row in rows] == ["A", "A", "B", "B"]
    assert [row.tiers for row in rows] == [(), ("host",), ("host",), ("disk",)]
    assert rows[0].reused_tokens == 0
    assert min(row.reused_tokens for row in rows[1:]) >= 400
    assert json.loads(json.dumps(as_json(report)))["identical"] is True
    assert "identical" in as_table(report)
    assert len(steps) == 8
