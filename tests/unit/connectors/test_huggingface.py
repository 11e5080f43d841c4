"""generate() of a cached model gives what it gives without kvstore, and the store is used as it should be."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, StaticCache, TextIteratorStreamer

from kvstore.connectors import huggingface, huggingface_cache
from kvstore.connectors.huggingface import cached, connector_of, uncache
from kvstore.connectors.huggingface_cache import CACHE_ARGUMENT
from kvstore.errors import (
    ConfigError,
    InvalidArgumentError,
    InvalidNamespaceError,
    NoSpaceError,
    StorageError,
    UnavailableError,
)
from kvstore.testing.manual_clock import ManualClock
from kvstore.testing.patience import ANSWER_SECONDS

BLOCK = 16
NEW_TOKENS = 20


@pytest.fixture
def attach(store):
    """Caches models with patient deadlines, and undoes it."""
    models = []

    def attach_model(model, **options):
        options = {"lookup_seconds": 20.0, "load_seconds": 20.0} | options
        models.append(cached(model, options.pop("store", store), **options))
        return model

    yield attach_model
    for model in models:
        if "generate" in vars(model):
            uncache(model)


def prompt_of(tokens, seed=5, rows=1):
    return torch.randint(3, 120, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def plain(model, ids, **options):
    """What transformers itself answers."""
    return type(model).generate(model, ids, **{"max_new_tokens": NEW_TOKENS, "do_sample": False} | options)


def served(model, ids, **options):
    """What the cached model answers, with everything stored afterwards."""
    result = model.generate(ids, **{"max_new_tokens": NEW_TOKENS, "do_sample": False} | options)
    assert connector_of(model).flush(30)
    return result


def stats(model):
    return connector_of(model).stats()


@pytest.mark.parametrize("make", ["llama", "gpt2"])
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 31, 32, 33, 100])
def test_tokens_are_the_same_for_every_length_of_a_hit(make, tokens, request, attach):
    model = attach(request.getfixturevalue(make))
    ids = prompt_of(tokens)
    expected = plain(model, ids)
    assert torch.equal(expected, served(model, ids))
    assert torch.equal(expected, served(model, ids))
    assert stats(model).loaded_tokens == (tokens - 1) // BLOCK * BLOCK


def test_int32_prompts_are_served(llama, attach):
    model = attach(llama)
    expected = plain(model, prompt_of(64))
    served(model, prompt_of(64).int())
    assert torch.equal(expected, served(model, prompt_of(64).int()).long())
    assert stats(model).loaded_tokens == 48


def test_a_longer_prompt_reuses_the_shared_prefix_alone(llama, attach):
    model = attach(llama)
    first = prompt_of(90)
    served(model, first, max_new_tokens=1)
    second = torch.cat([first[:, :70], prompt_of(40, seed=6)], dim=1)
    expected = plain(model, second)
    assert torch.equal(expected, served(model, second))
    assert stats(model).loaded_tokens == 64


def test_the_next_turn_reuses_generated_tokens(llama, attach):
    model = attach(llama)
    answer = served(model, prompt_of(40), max_new_tokens=30)
    turn = torch.cat([answer, prompt_of(10, seed=6)], dim=1)
    expected = plain(model, turn)
    assert torch.equal(expected, served(model, turn))
    # 40 + 30 tokens, the last of which was never computed, are 4 whole blocks.
    assert stats(model).loaded_tokens == 64


def test_only_new_blocks_are_stored(llama, attach, store):
    model = attach(llama)
    served(model, prompt_of(64), max_new_tokens=1)
    assert stats(model).stored_blocks == 4
    served(model, torch.cat([prompt_of(64), prompt_of(32, seed=6)], dim=1), max_new_tokens=1)
    assert stats(model).stored_blocks == 6
    assert stats(model).present_blocks == 0
    assert len(store.blocks) == 6


def test_counts_are_those_of_the_store(llama, attach, store):
    model = attach(llama)
    self_check_loads = store.loaded_blocks
    served(model, prompt_of(50), max_new_tokens=1)
    served(model, prompt_of(50), max_new_tokens=1)
    counts = stats(model)
    assert (counts.lookups, counts.lookup_tokens) == (2, 98)
    assert counts.matched_tokens == counts.loaded_tokens == 48
    assert counts.loaded_tokens == (store.loaded_blocks - self_check_loads) * BLOCK
    assert counts.stored_blocks == len(store.blocks) == 3
    assert (counts.bypassed, counts.failures, store.open_leases) == ({}, {}, 0)


def test_other_block_sizes_work(llama, attach):
    model = attach(llama, block_tokens=32)
    expected = plain(model, prompt_of(100))
    served(model, prompt_of(100))
    assert torch.equal(expected, served(model, prompt_of(100)))
    assert stats(model).loaded_tokens == 96


def test_bfloat16_blocks_come_back(llama, attach):
    model = attach(llama.to(torch.bfloat16))
    assert connector_of(model).namespace.layout.dtype == "bfloat16"
    served(model, prompt_of(100))
    served(model, prompt_of(100))
    assert stats(model).loaded_tokens == 96
    assert stats(model).failures == {}


def test_two_models_of_equal_weights_share(new_llama, attach):
    first, second = attach(new_llama()), attach(new_llama())
    served(first, prompt_of(64))
    expected = plain(second, prompt_of(64))
    assert torch.equal(expected, served(second, prompt_of(64)))
    assert stats(second).loaded_tokens == 48


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"kvstore_salt": "a"}, {"kvstore_salt": "b"}),
        ({"kvstore_salt": "a"}, {}),
        ({"kvstore_adapter": "a"}, {"kvstore_adapter": "b"}),
        ({"kvstore_adapter": "a"}, {"kvstore_salt": "a"}),
    ],
)
def test_calls_of_different_roots_never_share(one, other, llama, attach):
    model = attach(llama)
    served(model, prompt_of(64), **one)
    served(model, prompt_of(64), **other)
    assert stats(model).matched_tokens == 0
    served(model, prompt_of(64), **one)
    assert stats(model).loaded_tokens == 48


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"tenant": "a"}, {"tenant": "b"}),
        ({"secret": b"a"}, {"secret": b"b"}),
        ({"model_name": "a"}, {"model_name": "b"}),
    ],
)
def test_models_of_different_namespaces_never_share(one, other, new_llama, attach):
    first, second = attach(new_llama(), **one), attach(new_llama(), **other)
    served(first, prompt_of(64))
    served(second, prompt_of(64))
    assert stats(second).matched_tokens == 0


@pytest.mark.parametrize("other", [{"seed": 1}, {"rms_norm_eps": 1e-5}])
def test_models_of_other_weights_or_configuration_never_share(other, new_llama, attach):
    first, second = attach(new_llama()), attach(new_llama(**other))
    served(first, prompt_of(64))
    served(second, prompt_of(64))
    assert stats(second).matched_tokens == 0


def scale_in_place(weight):
    with torch.no_grad():
        weight.mul_(1.5)


def scale_data(weight):
    weight.data *= 1.5


def replace_data(weight):
    weight.data = weight.data * 1.5


@pytest.mark.parametrize("change", [scale_in_place, scale_data, replace_data])
def test_changed_weights_miss(change, llama, attach):
    model = attach(llama)
    served(model, prompt_of(64))
    change(model.model.layers[0].self_attn.k_proj.weight)
    served(model, prompt_of(64))  # the store is checked anew, in the background
    expected = plain(model, prompt_of(64))
    assert torch.equal(expected, served(model, prompt_of(64)))
    assert stats(model).matched_tokens == 0
    assert torch.equal(expected, served(model, prompt_of(64)))
    assert stats(model).loaded_tokens == 48


def test_rows_of_a_batch_share_the_shortest_match(llama, attach):
    model = attach(llama)
    rows = prompt_of(80, rows=2)
    served(model, rows[:1], max_new_tokens=1)
    served(model, rows[1:, :40], max_new_tokens=1)
    expected = plain(model, rows)
    assert torch.equal(expected, served(model, rows))
    assert stats(model).loaded_tokens == 2 * 32
    assert torch.equal(expected, served(model, rows))
    assert stats(model).loaded_tokens == 2 * 32 + 2 * 64


def test_padding_that_is_not_on_the_left_is_computed_without_the_store(llama, attach):
    model = attach(llama)
    ids = prompt_of(64, rows=2)
    mask = torch.ones_like(ids)
    mask[1, 10:20] = 0
    expected = plain(model, ids, attention_mask=mask, pad_token_id=0)
    assert torch.equal(expected, served(model, ids, attention_mask=mask, pad_token_id=0))
    assert stats(model).bypassed == {"padding": 1}


def test_padding_tokens_without_a_mask_are_padding(llama, attach):
    model = attach(llama)
    served(model, prompt_of(64)[:, 5:])
    ids = prompt_of(64)
    ids[0, :5] = 0
    expected = plain(model, ids, pad_token_id=0)
    assert torch.equal(expected, served(model, ids, pad_token_id=0))
    assert stats(model).loaded_tokens == 48


def test_a_full_attention_mask_is_no_padding(llama, attach):
    model = attach(llama)
    ids = prompt_of(64)
    served(model, None, input_ids=ids, attention_mask=torch.ones_like(ids))
    served(model, None, input_ids=ids, attention_mask=torch.ones_like(ids))
    assert stats(model).loaded_tokens == 48


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_beams": 2}, "setting"),
        ({"num_return_sequences": 2, "do_sample": True}, "setting"),
        ({"use_cache": False}, "setting"),
        ({"prompt_lookup_num_tokens": 2}, "setting"),
        ({"prefill_chunk_size": 8}, "setting"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "setting"),
        ({"generation_config": GenerationConfig(num_beams=2, max_new_tokens=4)}, "setting"),
        ({"position_ids": torch.arange(64)[None]}, "argument"),
    ],
)
def test_calls_that_need_more_than_a_prefix_are_computed_without_the_store(options, reason, llama, attach, store):
    model = attach(llama)
    if "generation_config" not in options:
        options = options | {"max_new_tokens": 4}
    torch.manual_seed(0)
    expected = type(model).generate(model, prompt_of(64), **options)
    torch.manual_seed(0)
    result = model.generate(prompt_of(64), **options)
    sequences = [getattr(answer, "sequences", answer) for answer in (expected, result)]
    assert torch.equal(*sequences)
    assert stats(model).bypassed == {reason: 1}
    assert store.blocks == {}


@pytest.mark.parametrize("name", ["offloaded", "offloaded_static", "quantized"])
def test_kinds_of_caches_that_cannot_be_filled_are_bypassed(name, llama):
    assert huggingface.read_prompt(llama, {"inputs": prompt_of(64), "cache_implementation": name}) == "setting"


def test_a_cache_of_the_caller_that_is_empty_is_filled(llama, attach):
    model = attach(llama)
    expected = plain(model, prompt_of(64))
    served(model, prompt_of(64))
    for cache in (DynamicCache(), DynamicCache(config=model.config), StaticCache(model.config, max_cache_len=90)):
        assert torch.equal(expected, served(model, prompt_of(64), **{CACHE_ARGUMENT: cache}))
        assert int(cache.get_seq_length()) == 64 + NEW_TOKENS - 1
    assert (stats(model).loaded_tokens, stats(model).bypassed) == (3 * 48, {})


def test_a_cache_of_the_caller_that_holds_tokens_is_left_alone(llama, attach):
    model = attach(llama)
    cache = DynamicCache(config=model.config)
    first = served(model, prompt_of(64), **{CACHE_ARGUMENT: cache})
    served(model, torch.cat([first, prompt_of(10, seed=6)], dim=1), **{CACHE_ARGUMENT: cache})
    assert cache.get_seq_length() == 64 + NEW_TOKENS + 10 + NEW_TOKENS - 1
    assert stats(model).bypassed == {"own_cache": 1}


def test_embeddings_are_computed_without_the_store(llama, attach):
    model = attach(llama)
    embeddings = model.get_input_embeddings()(prompt_of(64)).detach()
    model.generate(inputs_embeds=embeddings, max_new_tokens=2)
    assert stats(model).bypassed == {"argument": 1}


def test_a_model_in_training_mode_is_computed_without_the_store(llama, attach):
    model = attach(llama).train()
    served(model, prompt_of(64))
    assert stats(model).bypassed == {"training": 1}


def test_a_model_with_adapters_is_served_only_under_a_named_adapter(llama, attach):
    model = attach(llama)
    model.peft_config = {}
    served(model, prompt_of(64))
    served(model, prompt_of(64), kvstore_adapter="digest")
    assert stats(model).bypassed == {"adapter": 1}
    assert stats(model).lookups == 1


def test_results_of_every_form_are_handed_on(llama, attach):
    model = attach(llama)
    served(model, prompt_of(64))
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    expected, result = plain(model, prompt_of(64), **options), served(model, prompt_of(64), **options)
    assert type(expected) is type(result)
    assert torch.equal(expected.sequences, result.sequences)
    assert len(expected.scores) == len(result.scores)
    torch.testing.assert_close(expected.logits, result.logits)
    assert result.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length()


def test_sampling_draws_the_same_tokens(llama, attach):
    model = attach(llama)
    served(model, prompt_of(64))
    torch.manual_seed(7)
    expected = plain(model, prompt_of(64), do_sample=True)
    torch.manual_seed(7)
    assert torch.equal(expected, served(model, prompt_of(64), do_sample=True))
    assert stats(model).loaded_tokens == 48


def test_streamers_and_logits_processors_see_every_token(llama, attach):
    model = attach(llama)
    served(model, prompt_of(64))
    seen = []

    class Recorder(TextIteratorStreamer):
        def __init__(self):
            pass

        def put(self, value):
            seen.append(value.reshape(-1).tolist())

        def end(self):
            seen.append("end")

    lengths = []

    def record_length(ids, scores):
        lengths.append(ids.shape[1])
        return scores

    result = served(model, prompt_of(64), streamer=Recorder(), logits_processor=[record_length], max_new_tokens=3)
    assert seen == [prompt_of(64)[0].tolist(), *([token] for token in result[0, 64:].tolist()), "end"]
    assert lengths == [64, 65, 66]


@pytest.mark.parametrize("method", ["match", "lease", "load_into", "stage", "write_from", "commit"])
@pytest.mark.parametrize(
    "error", [UnavailableError("gone"), NoSpaceError("full"), StorageError("broken"), RuntimeError("a bug")]
)
def test_a_failing_store_never_reaches_generate(method, error, llama, attach, store):
    model = attach(llama)
    expected = plain(model, prompt_of(64))
    served(model, prompt_of(64))
    store.faults.errors[method] = error
    longer = torch.cat([prompt_of(64), prompt_of(40, seed=8)], dim=1)
    expected_longer = plain(model, longer)
    for _ in range(2):
        assert torch.equal(expected, served(model, prompt_of(64)))
        assert torch.equal(expected_longer, served(model, longer))
    assert sum(stats(model).failures.values()) >= 1
    assert store.open_leases == 0


def test_a_store_that_is_down_from_the_start_serves_once_it_is_back(llama, attach, store):
    store.faults.errors["stage"] = UnavailableError("not yet")
    clock = ManualClock()
    model = attach(llama, clock=clock)
    expected = plain(model, prompt_of(64))
    assert torch.equal(expected, served(model, prompt_of(64)))
    assert stats(model).bypassed == {"unverified": 1}
    store.faults.errors.clear()
    clock.advance(60)
    served(model, prompt_of(64))  # checks the store in the background
    served(model, prompt_of(64))
    assert torch.equal(expected, served(model, prompt_of(64)))
    assert stats(model).loaded_tokens == 48


def test_an_address_where_nobody_listens_is_no_error(llama, attach, tmp_path):
    model = attach(llama, store=f"unix://{tmp_path}/nobody.sock")
    assert torch.equal(plain(model, prompt_of(64)), served(model, prompt_of(64)))
    assert stats(model).loaded_tokens == 0


def test_a_dead_store_is_not_asked_again_before_the_backoff_ends(llama, attach, store):
    model = attach(llama, clock=ManualClock())
    store.faults.errors["match"] = UnavailableError("gone")
    asked = store.calls["match"]
    for _ in range(5):
        served(model, prompt_of(64))
    assert store.calls["match"] == asked + 1
    assert stats(model).bypassed == {"store": 5}
    assert stats(model).breaker_openings == 1


def test_a_slow_store_costs_no_more_than_the_lookup_deadline(llama, attach, store):
    model = attach(llama, lookup_seconds=0.05)
    expected = plain(model, prompt_of(64))
    store.faults.gate = threading.Event()
    assert torch.equal(expected, served(model, prompt_of(64)))
    assert stats(model).bypassed == {"store": 1}
    assert stats(model).failures == {"UnavailableError": 1}
    store.faults.gate.set()


def test_a_load_cut_short_leaves_the_shorter_prefix(llama, attach, store):
    model = attach(llama)
    expected = plain(model, prompt_of(64))
    served(model, prompt_of(64))
    store.faults.load_blocks_max = 2
    assert torch.equal(expected, served(model, prompt_of(64)))
    assert stats(model).matched_tokens == 48
    assert stats(model).loaded_tokens == 32


def test_a_full_store_is_counted(llama, attach, store):
    model = attach(llama)
    store.faults.stored_blocks_max = 1
    served(model, prompt_of(64), max_new_tokens=1)
    assert (stats(model).stored_blocks, stats(model).refused_blocks) == (1, 3)


def test_a_full_queue_of_stores_drops_and_counts(llama, attach):
    model = attach(llama, queue_bytes_max=10)
    served(model, prompt_of(64), max_new_tokens=1)
    assert (stats(model).stored_blocks, stats(model).dropped_blocks) == (0, 4)


def test_a_store_that_changes_bytes_disables_the_connector(llama, attach, store):
    store.faults.flip = True
    model = attach(llama)
    assert torch.equal(plain(model, prompt_of(64)), served(model, prompt_of(64)))
    assert stats(model).bypassed == {"unverified": 1}
    assert stats(model).failures == {"SelfCheckError": 1}
    assert store.calls["match"] == 1
    assert store.blocks == {}


def test_lack_of_memory_for_the_loaded_blocks_breaks_no_generate(llama, attach, monkeypatch):
    model = attach(llama)
    expected = plain(model, prompt_of(64))
    served(model, prompt_of(64))

    def fail(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(huggingface, "fill", fail)
    assert torch.equal(expected, served(model, prompt_of(64)))
    assert stats(model).bypassed == {"memory": 1}


def test_lack_of_memory_in_the_middle_leaves_a_cache_of_the_caller_empty(llama, attach, monkeypatch):
    model = attach(llama)
    expected = served(model, prompt_of(64))

    cache, room = DynamicCache(config=model.config), iter([True, False])
    plain_update = cache.update

    def update(keys, values, layer):
        if not next(room, True):
            raise RuntimeError("out of memory")
        return plain_update(keys, values, layer)

    monkeypatch.setattr(huggingface_cache, "_restore", lambda cache, layer, states, columns: update(*states, layer))
    assert torch.equal(expected, served(model, prompt_of(64), **{CACHE_ARGUMENT: cache}))
    assert stats(model).bypassed == {"memory": 1}


@pytest.mark.parametrize("place", ["read_prompt", "ComputedKv"])
def test_a_mistake_of_the_connector_breaks_no_generate_and_turns_it_off(place, llama, attach, monkeypatch, caplog):
    model = attach(llama)
    expected = plain(model, prompt_of(64))

    def fail(*_):
        raise KeyError(place)

    monkeypatch.setattr(huggingface, place, fail)
    assert torch.equal(expected, served(model, prompt_of(64)))
    monkeypatch.undo()
    for _ in range(2):
        assert torch.equal(expected, served(model, prompt_of(64)))
    assert stats(model).failures == {"KeyError": 1}
    assert stats(model).bypassed["broken"] >= 2
    assert len([record for record in caplog.records if record.name == "kvstore.connectors.common"]) == 1


def test_a_model_that_becomes_unsupported_is_computed_without_the_store(llama, attach):
    model = attach(llama)
    expected = plain(model, prompt_of(64))
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    connector_of(model).refresh()
    assert torch.equal(expected, served(model, prompt_of(64)))
    assert stats(model).bypassed == {"unsupported": 1}
    assert stats(model).failures == {"UnsupportedModelError": 1}


def test_an_address_that_cannot_be_is_told_at_once(llama):
    with pytest.raises(ConfigError):
        cached(llama, "nonsense://x")
    assert "generate" not in vars(llama)


def test_uncache_gives_back_the_plain_model(llama, store):
    model = cached(llama, store)
    assert uncache(model) is llama
    assert "generate" not in vars(model)
    with pytest.raises(InvalidArgumentError, match="not cached"):
        uncache(model)


def test_caching_twice_is_refused(llama, attach, store):
    attach(llama)
    with pytest.raises(InvalidArgumentError, match="cached already"):
        cached(llama, store)


def test_a_malformed_salt_is_refused_before_any_forward_pass(llama, attach):
    model = attach(llama)
    with pytest.raises(InvalidNamespaceError, match="salt"):
        served(model, prompt_of(64), kvstore_salt=3)


def test_a_generate_that_someone_wrapped_is_called_as_it_was(llama, attach):
    calls = []

    def wrapped(*args, **kwargs):
        calls.append(kwargs)
        return type(llama).generate(llama, *args, **kwargs)

    expected = plain(llama, prompt_of(64))
    llama.__dict__["generate"] = wrapped
    model = attach(llama)
    for _ in range(2):
        assert torch.equal(expected, served(model, prompt_of(64)))
    assert (2, 48) == (len(calls), stats(model).loaded_tokens)


def test_errors_of_the_caller_are_those_of_transformers(llama, attach):
    model = attach(llama)
    with pytest.raises(ValueError, match="not used by the model"):
        served(model, prompt_of(64), no_such_argument=1)
    with pytest.raises(TypeError):
        model.generate(*range(20))


def test_a_model_dropped_without_uncache_ends_its_threads(new_llama, store):
    model = cached(new_llama(), store)
    served(model, prompt_of(64))
    served(model, prompt_of(64))
    names = {"kvstore-lookup", "kvstore-store"}
    mine = [thread for thread in threading.enumerate() if thread.name in names]
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
    for thread in mine:
        thread.join(ANSWER_SECONDS)
    assert not any(thread.is_alive() for thread in mine)
