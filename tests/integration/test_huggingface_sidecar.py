"""The transformers connector over a real sidecar and over an embedded store."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvstore
from kvstore.connectors.huggingface import cached, connector_of, uncache
from kvstore.demo.processes import start_sidecar

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

    def attach_model(store, dtype=torch.float32):
        model = cached(new_model(dtype), store, lookup_seconds=20.0, load_seconds=20.0)
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
