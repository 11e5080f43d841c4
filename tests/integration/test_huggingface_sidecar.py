"""The transformers connector over a real sidecar and over an embedded store."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

import kvstore
from kvstore.connectors.huggingface import cached, connector_of, uncache
from kvstore.demo.processes import start_sidecar
from kvstore.testing.patience import ANSWER_SECONDS

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "huggingface" / "generate.py"
HOST_BYTES, DISK_BYTES = 64 << 20, 256 << 20


def new_model(dtype=torch.float32):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def new_hybrid():
    """One layer of full attention among three with a window."""
    torch.manual_seed(0)
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    config = Gemma3TextConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=40,
        layer_types=kinds,
        max_position_embeddings=512,
        initializer_range=0.3,
        eos_token_id=None,
        pad_token_id=None,
    )
    return Gemma3ForCausalLM(config).eval()


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    # More threads than free cores make small models many times slower.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def attach():
    models = []

    def attach_model(store, dtype=torch.float32, make=None):
        model = cached(make() if make else new_model(dtype), store, lookup_seconds=20.0, load_seconds=20.0)
        models.append(model)
        return model

    yield attach_model
    for model in models:
        uncache(model)


@pytest.fixture
def address(tmp_path_factory):
    # A short path: the name of a Unix socket has 108 bytes at most.
    return f"unix://{tmp_path_factory.mktemp('s')}/kv.sock"


@pytest.fixture
def sidecar(tmp_path, address):
    with start_sidecar(tmp_path, address, HOST_BYTES, DISK_BYTES) as process:
        assert process.receive()["ready"] is True
        yield process


def prompt_of(tokens, seed=5):
    return torch.randint(3, 120, (1, tokens), generator=torch.Generator().manual_seed(seed))


def answer(model, ids):
    result = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert connector_of(model).flush(60)
    return result


def plain(model, ids):
    return type(model).generate(model, ids, max_new_tokens=8, do_sample=False)


@pytest.mark.kill
def test_two_models_share_through_a_sidecar_and_both_counts_agree(sidecar, address, attach):
    first, second = attach(address), attach(address)
    with kvstore.connect(address) as store:
        before = store.stats()
        expected = plain(first, prompt_of(100))
        assert torch.equal(expected, answer(first, prompt_of(100)))
        assert torch.equal(expected, answer(second, prompt_of(100)))
        after = store.stats()
    counts = [connector_of(model).stats() for model in (first, second)]
    assert [count.loaded_tokens for count in counts] == [0, 96]
    assert [count.stored_blocks for count in counts] == [6, 0]
    assert [count.failures for count in counts] == [{}, {}]
    assert sum(after.loaded_tokens.values()) - sum(before.loaded_tokens.values()) == 96
    assert after.stored_blocks - before.stored_blocks == 6
    assert after.lookups - before.lookups == 2


@pytest.mark.kill
def test_a_killed_sidecar_breaks_no_generate_and_its_disk_serves_after_a_restart(sidecar, address, attach, tmp_path):
    model = attach(address)
    expected = plain(model, prompt_of(100))
    answer(model, prompt_of(100))
    with kvstore.connect(address) as store:
        store.flush()
    sidecar.kill()
    assert torch.equal(expected, answer(model, prompt_of(100)))
    assert connector_of(model).stats().loaded_tokens == 0
    with start_sidecar(tmp_path, address, HOST_BYTES, DISK_BYTES) as again:
        again.receive()
        newcomer = attach(address)
        assert torch.equal(expected, answer(newcomer, prompt_of(100)))
        with kvstore.connect(address) as store:
            assert store.stats().hit_tokens["disk"] == 96


@pytest.mark.kill
def test_layers_with_a_window_are_shared_and_found_on_disk_after_a_kill(sidecar, address, attach, tmp_path):
    first, second = attach(address, make=new_hybrid), attach(address, make=new_hybrid)
    padded = torch.cat([torch.zeros(1, 30, dtype=torch.long), prompt_of(70, seed=9)], dim=1)
    batch = {"attention_mask": torch.cat([torch.ones(1, 100), padded != 0]).long(), "pad_token_id": 0}
    rows = torch.cat([prompt_of(100), padded])
    expected = type(first).generate(first, rows, max_new_tokens=8, do_sample=False, **batch)
    answer(first, prompt_of(100))
    answer(first, prompt_of(70, seed=9))
    result = second.generate(rows, max_new_tokens=8, do_sample=False, **batch)
    assert connector_of(second).flush(60)
    assert torch.equal(expected, result)
    assert 96 + 64 == connector_of(second).stats().loaded_tokens
    with kvstore.connect(address) as store:
        store.flush()
    sidecar.kill()
    assert torch.equal(expected, second.generate(rows, max_new_tokens=8, do_sample=False, **batch))
    with start_sidecar(tmp_path, address, HOST_BYTES, DISK_BYTES) as again:
        again.receive()
        newcomer = attach(address, make=new_hybrid)
        assert torch.equal(expected, newcomer.generate(rows, max_new_tokens=8, do_sample=False, **batch))
        assert 96 + 64 == connector_of(newcomer).stats().loaded_tokens
        assert {} == connector_of(newcomer).stats().failures


@pytest.mark.kill
@pytest.mark.slow
def test_the_example_reuses_what_an_earlier_run_stored(sidecar, address):
    command = [sys.executable, "-P", str(EXAMPLE), "--address", address, "--patience", "30"]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    for has_stored in (False, True):
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=ANSWER_SECONDS, env=one_thread
        )
        assert 0 == done.returncode, done.stdout + done.stderr
        number, prompt_tokens, reused, *_, same = done.stdout.splitlines()[1].split()
        assert ("1", "yes") == (number, same)
        assert ((int(prompt_tokens) - 1) // 16 * 16 if has_stored else 0) == int(reused)
        assert "kvstore serves generate(): model=example" in done.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_embedded_store_serves_every_dtype(dtype, attach, tmp_path):
    with kvstore.open(tmp_path / "data", host_bytes=HOST_BYTES, disk_bytes=DISK_BYTES) as store:
        model = attach(store, dtype)
        expected = plain(model, prompt_of(100))
        answer(model, prompt_of(100))
        assert torch.equal(expected, answer(model, prompt_of(100)))
        assert connector_of(model).stats().loaded_tokens == 96
        assert connector_of(model).stats().failures == {}


def test_a_full_store_breaks_no_generate(attach, tmp_path):
    with kvstore.open(None, host_bytes=2 << 20, disk_bytes=0) as store:
        model = attach(store)
        for seed in range(20):
            model.generate(prompt_of(500, seed), max_new_tokens=1)
            assert connector_of(model).flush(60)
        assert store.stats().evicted_blocks
        assert connector_of(model).stats().failures == {}
