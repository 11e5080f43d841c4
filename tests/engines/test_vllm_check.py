"""`kvstore check vllm` in vLLM's own environment: says beforehand what an engine would find out at its start."""

from __future__ import annotations

import json
import subprocess

import pytest
from transformers import Gemma3TextConfig, LlamaConfig

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

SMALL = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
}
MODELS = {
    "dynamic rope": LlamaConfig(
        architectures=["LlamaForCausalLM"],
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        **SMALL,
    ),
    "some windows": Gemma3TextConfig(
        architectures=["Gemma3ForCausalLM"],
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"] * 2,
        **SMALL,
    ),
}


@pytest.fixture
def check(vllm_python, tmp_path):
    def run(*arguments):
        command = [vllm_python, "-P", "-m", "kvstore.cli", "check", "vllm", "--json", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500)
        assert done.stdout, done.stderr[-3000:]
        report = json.loads(done.stdout)
        assert (report["works"], done.returncode) in ((True, 0), (False, 1))
        found = {finding["subject"]: (finding["verdict"], finding["sentence"]) for finding in report["findings"]}
        return report["works"], found

    return run


@pytest.fixture
def model(request, tmp_path):
    MODELS[request.param].save_pretrained(tmp_path)
    return tmp_path


def test_a_tiny_model_is_made_up_and_works_over_a_real_server(check, start_server, new_address):
    address = new_address()
    start_server(address)
    works, found = check("--address", address, "--block-tokens", "64", "--engine-arguments=--dtype float32")
    assert works
    assert {verdict for verdict, _ in found.values()} == {"ok"}
    assert ["store", "engine", "model", "settings", "layout", "block"] == list(found)
    assert "a block of 64 tokens" in found["layout"][1]


def test_a_model_with_weights_is_found_to_have_them(check, tiny_model):
    works, found = check("--embedded", "--model", str(tiny_model))
    assert works
    assert ("ok", "ok") == (found["weights"][0], found["block"][0])


@pytest.mark.parametrize("model", ["dynamic rope"], indirect=True)
def test_a_model_that_cannot_be_cached_fails_with_the_reason(check, model):
    works, found = check("--embedded", "--model", str(model))
    assert not works
    assert "layout" == list(found)[-1]
    assert "dynamic" in found["layout"][1]


@pytest.mark.parametrize("model", ["some windows"], indirect=True)
@pytest.mark.parametrize(
    ("arguments", "layers"),
    [((), "2 layers, 2 with a window,"), (("--engine-arguments=--disable-hybrid-kv-cache-manager",), "4 layers,")],
)
def test_a_model_with_windows_works_whether_or_not_every_token_is_kept(check, model, arguments, layers):
    works, found = check("--embedded", "--model", str(model), *arguments)
    assert (works, found["weights"][0]) == (True, "warning")
    assert found["layout"][1].startswith(layers)


def test_arguments_that_vllm_refuses_are_a_finding(check):
    works, found = check("--embedded", "--engine-arguments=--nonsense")
    assert not works
    assert "--nonsense" in found["model"][1]
