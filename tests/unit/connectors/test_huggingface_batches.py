"""Every kind of model, cache and batch, over a real store: logits and tokens are those of transformers alone."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
import transformers

import kvstore
from kvstore.connectors.huggingface import cached, connector_of, uncache
from kvstore.connectors.huggingface_model import describe_model

BLOCK = 16
NEW_TOKENS = 4
CACHES = {"dynamic": {}, "static": {"cache_implementation": "static"}}
MODELS = ["new_llama", "new_gpt2", "new_mistral", "new_gemma3"]
# Where one model of each kind of layer tells most, the others are not in the core suite.
FEWER_MODELS = ["new_llama", pytest.param("new_gpt2", marks=pytest.mark.slow)]
FEWER_MODELS += [pytest.param("new_mistral", marks=pytest.mark.slow), "new_gemma3"]
# How far logits of about 20 may be apart that were computed in pieces of another size.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.3, torch.bfloat16: 2.0}


@pytest.fixture
def attach():
    """Caches a model in a store of its own, with patient deadlines."""
    with ExitStack() as stack:

        def attach_model(model, **options):
            store = stack.enter_context(kvstore.open(None, host_bytes=32 << 20))
            cached(model, store, **{"lookup_seconds": 20.0, "load_seconds": 20.0} | options)
            stack.callback(uncache, model)
            return model

        yield attach_model


def tokens_of(count, seed):
    return torch.randint(3, 120, (count,), generator=torch.Generator().manual_seed(seed))


def left_padded(rows):
    columns = max(map(len, rows))
    ids = torch.zeros(len(rows), columns, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, columns - len(row) :] = row
        mask[index, columns - len(row) :] = 1
    return ids, mask


def loaded_by_equal_answers(model, rows, **options):
    """The tokens loaded in a call whose logits and tokens are those of transformers alone."""
    ids, mask = left_padded(rows)
    options = {
        "attention_mask": mask,
        "max_new_tokens": NEW_TOKENS,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
        "pad_token_id": 0,
    } | options
    before = connector_of(model).stats().loaded_tokens
    expected = type(model).generate(model, ids, **options)
    result = model.generate(ids, **options)
    assert connector_of(model).flush(30)
    assert torch.equal(expected.sequences, result.sequences)
    tolerance = TOLERANCE[model.dtype]
    torch.testing.assert_close(torch.stack(expected.logits), torch.stack(result.logits), rtol=0, atol=tolerance)
    stats = connector_of(model).stats()
    assert ({}, {}) == (dict(stats.failures), dict(stats.bypassed))
    return stats.loaded_tokens - before


@pytest.fixture
def show(record_support):
    """Says which feature a test has shown of a model."""

    def show_feature(model, feature):
        layout = connector_of(model).namespace.layout
        windows = any(layers.window for layers in describe_model(model, BLOCK).sets[:1])
        kind = "sliding windows" if windows else "full attention"
        record_support(
            "hf",
            f"transformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}",
            layout="full attention and sliding windows" if layout.groups and not windows else kind,
            feature=feature,
            model=type(model).__name__.removesuffix("ForCausalLM").removesuffix("LMHeadModel"),
            dtype=layout.dtype,
        )

    return show_feature


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("make", MODELS)
def test_a_prompt_its_next_turn_and_a_branch_are_reused(make, cache, attach, request, show):
    model = attach(request.getfixturevalue(make)())
    options = CACHES[cache]
    first = tokens_of(150, seed=1)
    assert 0 == loaded_by_equal_answers(model, [first], **options)
    assert 144 == loaded_by_equal_answers(model, [first], **options)
    answer = model.generate(first[None], max_new_tokens=30, do_sample=False, **options)[0]
    assert connector_of(model).flush(30)
    turn = torch.cat([answer, tokens_of(20, seed=2)])
    assert 144 <= loaded_by_equal_answers(model, [turn], **options)
    branches = [torch.cat([first[:100], tokens_of(40, seed)]) for seed in (3, 4)]
    loaded_by_equal_answers(model, [branches[0]], **options)
    assert 96 == loaded_by_equal_answers(model, [branches[1]], **options)
    show(model, f"{cache} cache: prompts, turns, branches")


@pytest.mark.parametrize("make", ["new_llama", "new_mistral", "new_gemma3"])
def test_generated_tokens_are_reused_by_the_next_turn(make, attach, request, show):
    model = attach(request.getfixturevalue(make)())
    answer = model.generate(tokens_of(70, seed=1)[None], max_new_tokens=60, do_sample=False)[0]
    assert connector_of(model).flush(30)
    # 70 + 60 tokens, the last of which was never computed, are 8 whole blocks.
    assert 128 == loaded_by_equal_answers(model, [torch.cat([answer, tokens_of(10, seed=2)])])
    show(model, "generated tokens of earlier turns")


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("make", FEWER_MODELS)
def test_each_row_of_a_padded_batch_reuses_its_own_prefix(make, cache, attach, request, show):
    model = attach(request.getfixturevalue(make)())
    options = CACHES[cache]
    rows = [tokens_of(count, seed) for seed, count in enumerate((170, 103, 33, 250))]
    for row in (rows[0], rows[1], rows[3][:230]):
        loaded_by_equal_answers(model, [row], **options)
    assert 160 + 96 <= loaded_by_equal_answers(model, rows, **options)
    # What the batch stored is found by each row alone: padding is part of no key.
    assert [160, 96, 32, 240] == [loaded_by_equal_answers(model, [row], **options) for row in rows]
    show(model, "left-padded batches")


@pytest.mark.parametrize("make", FEWER_MODELS)
def test_short_prompts_and_much_padding_are_served(make, attach, request):
    model = attach(request.getfixturevalue(make)())
    rows = [tokens_of(count, seed) for seed, count in enumerate((1, 20, 60, 17))]
    for _ in range(2):
        loaded_by_equal_answers(model, rows)
        for row in rows:
            padded = torch.cat([torch.zeros(5, dtype=torch.long), row])
            mask = (padded != 0).long()[None]
            loaded_by_equal_answers(model, [padded], attention_mask=mask)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("make", FEWER_MODELS)
def test_half_precision_answers_are_the_same(make, dtype, attach, request, show):
    model = attach(request.getfixturevalue(make)(initializer_range=0.15).to(dtype))
    first, second = tokens_of(100, seed=1), tokens_of(60, seed=2)
    loaded_by_equal_answers(model, [first])
    assert 96 == loaded_by_equal_answers(model, [first])
    loaded_by_equal_answers(model, [first, second])
    assert 48 <= loaded_by_equal_answers(model, [second, first])
    show(model, "left-padded batches")


def test_rows_that_end_early_are_stored_up_to_their_end(new_llama, attach):
    model = attach(new_llama())
    rows = [tokens_of(40, seed=1), tokens_of(40, seed=2)]
    plain = type(model).generate(model, torch.stack(rows), max_new_tokens=40, do_sample=False)
    ends_at = next(place for place in range(8, 40) if plain[0, 40 + place] not in plain[1, 40:])
    eos = int(plain[0, 40 + ends_at])
    first_eos = int((plain[0, 40:] == eos).nonzero()[0])
    model.generate(torch.stack(rows), max_new_tokens=40, do_sample=False, eos_token_id=eos, pad_token_id=0)
    assert connector_of(model).flush(30)
    with_padding = torch.cat([plain[0, : 40 + first_eos + 1], torch.zeros(40, dtype=torch.long)])
    assert (40 + first_eos + 1) // BLOCK * BLOCK == loaded_by_equal_answers(
        model, [with_padding], attention_mask=torch.ones(1, len(with_padding), dtype=torch.long)
    )
    # Of the row that went on all blocks are there: 40 + 40 tokens, the last of which was never computed.
    assert 64 == loaded_by_equal_answers(model, [torch.cat([plain[1, :79], tokens_of(9, seed=3)])])


def test_a_prompt_longer_than_what_windows_remember_is_reused_at_its_end(new_gemma3, attach):
    model = attach(new_gemma3(max_position_embeddings=2048), window_bytes_max=0)
    prompt = tokens_of(1000, seed=1)
    loaded_by_equal_answers(model, [prompt])
    assert 992 == loaded_by_equal_answers(model, [torch.cat([prompt, tokens_of(20, seed=2)])])


def test_a_store_without_room_for_windows_breaks_no_generate(new_gemma3):
    with kvstore.open(None, host_bytes=2 << 20) as store:
        model = cached(new_gemma3(), store, lookup_seconds=20.0, load_seconds=20.0)
        for seed in range(6):
            loaded_by_equal_answers(model, [tokens_of(400, seed)], max_new_tokens=1)
        assert sum(store.stats().evicted_blocks.values()) > 0
        uncache(model)


def test_returned_caches_go_on_as_those_of_transformers(new_mistral, attach):
    model = attach(new_mistral())
    prompt = tokens_of(100, seed=1)[None]
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "return_dict_in_generate": True}
    model.generate(prompt, **options)
    assert connector_of(model).flush(30)
    expected, result = type(model).generate(model, prompt, **options), model.generate(prompt, **options)
    for ours, theirs in zip(result.past_key_values.layers, expected.past_key_values.layers, strict=True):
        assert theirs.cumulative_length == ours.cumulative_length
        torch.testing.assert_close(theirs.keys, ours.keys, rtol=0, atol=1e-4)
        torch.testing.assert_close(theirs.values, ours.values, rtol=0, atol=1e-4)
