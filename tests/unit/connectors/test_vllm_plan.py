"""Counting tokens and blocks, settings, and fingerprints of the vLLM connector; none of it needs vLLM."""

from __future__ import annotations

import hashlib
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.connectors.checkpoint_files import AdapterDigests, model_fingerprint
from kvstore.connectors.common import UnsupportedModelError
from kvstore.connectors.vllm.plan import (
    NULL_BLOCK,
    BlockJob,
    PackedTokens,
    PartBlocks,
    live_blocks,
    loadable_blocks,
    storable_blocks,
)
from kvstore.connectors.vllm.requests import bypass_reason, root_of
from kvstore.connectors.vllm.rows import RowPool
from kvstore.connectors.vllm.settings import VllmSettings, parse_settings
from kvstore.errors import ConfigError
from kvstore.types import Root


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), max_size=50), st.lists(st.integers(0, 60), max_size=8))
def test_packed_tokens_hold_what_they_were_told_once(tokens, counts):
    packed = PackedTokens()
    known = []
    for count in counts:
        count = min(count, len(tokens))
        packed.extend_to(tokens, count)
        known = tokens[: max(count, len(known))]
        job = BlockJob("r", Root(), packed.first(len(known)), 0, ())
        assert known == pickle.loads(pickle.dumps(job)).tokens.token_array().tolist()


@settings(deadline=None)
@given(st.integers(0, 300), st.integers(0, 300), st.integers(1, 40))
def test_only_blocks_of_computed_and_known_tokens_are_stored(computed, known, block_tokens):
    naive = [
        block
        for block in range(300)
        if all(
            position < computed and position < known
            for position in range(block * block_tokens, (block + 1) * block_tokens)
        )
    ]
    assert len(naive) == storable_blocks(computed, known, block_tokens)


@settings(deadline=None)
@given(st.integers(0, 300), st.integers(1, 40))
def test_a_load_leaves_the_engine_a_token_to_compute(prompt_tokens, block_tokens):
    blocks = loadable_blocks(prompt_tokens, block_tokens)
    assert blocks * block_tokens <= max(0, prompt_tokens - 1) < (blocks + 1) * block_tokens


def test_settings_are_read_and_sizes_may_have_units():
    assert VllmSettings() == parse_settings({})
    read = parse_settings({"address": "host:7070", "buffer_bytes": "1GiB", "lookup_seconds": 1, "model": None})
    assert ("host:7070", 1 << 30, 1, None) == (
        read.address,
        read.buffer_bytes,
        read.lookup_seconds,
        read.model,
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"adress": "x"}, "setting 'adress' is unknown, expected one of address"),
        ({"address": ""}, "address is '', expected a text"),
        ({"tenant": 7}, "tenant is 7, expected a text"),
        ({"lookup_seconds": 0}, "lookup_seconds is 0, expected seconds, more than 0"),
        ({"lookup_seconds": True}, "lookup_seconds is True, expected seconds"),
        ({"buffer_bytes": "much"}, "buffer_bytes is 'much'"),
        ({"buffer_bytes": -1}, "buffer_bytes is -1, expected bytes"),
        ({"store_generated": "yes"}, "store_generated is 'yes', expected true or false"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_name(given, said):
    with pytest.raises(ConfigError, match=said):
        parse_settings(given)


def test_a_secret_comes_from_a_file_and_is_not_shown(tmp_path):
    (tmp_path / "secret").write_bytes(b"s3cret\n")
    read = parse_settings({"secret_file": str(tmp_path / "secret")})
    assert b"s3cret" == read.secret()
    assert "s3cret" not in repr(read)
    with pytest.raises(ConfigError, match="cannot be read"):
        parse_settings({"secret_file": str(tmp_path / "nowhere")}).secret()


def test_a_fingerprint_tells_weights_configurations_and_ways_to_load_apart(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "a.safetensors").write_bytes(bytes(3 << 20))
    seen = [model_fingerprint(str(tmp_path), ""), model_fingerprint(str(tmp_path), "bfloat16")]
    assert seen[0] == model_fingerprint(str(tmp_path), "")
    (tmp_path / "a.safetensors").write_bytes(bytes((3 << 20) - 1) + b"\1")
    seen.append(model_fingerprint(str(tmp_path), ""))
    (tmp_path / "config.json").write_text("{ }")
    seen.append(model_fingerprint(str(tmp_path), ""))
    (tmp_path / "a.safetensors").rename(tmp_path / "b.safetensors")
    seen.append(model_fingerprint(str(tmp_path), ""))
    (tmp_path / "tokenizer.txt").write_text("neutral")
    assert seen[-1] == model_fingerprint(str(tmp_path), "")
    assert len(seen) == len(set(seen))


def test_no_weights_have_no_fingerprint(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UnsupportedModelError, match="give the checkpoint's revision"):
            model_fingerprint(str(path), "")


def test_an_adapter_is_known_by_its_content_and_read_again_when_it_changed(tmp_path):
    digests = AdapterDigests()
    for name in ("one", "copy"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_model.safetensors").write_bytes(b"weights")
    before = digests.digest(str(tmp_path / "one"))
    assert before == digests.digest(str(tmp_path / "copy")) == digests.digest(str(tmp_path / "one"))
    (tmp_path / "one" / "adapter_model.safetensors").write_bytes(b"other weights")
    assert before != digests.digest(str(tmp_path / "one"))
    with pytest.raises(UnsupportedModelError, match="no adapter"):
        digests.digest(str(tmp_path / "nowhere"))


def request(**changes):
    plain = {
        "request_id": "r",
        "prompt_token_ids": [1, 2, 3],
        "prompt_embeds": None,
        "mm_features": [],
        "pooling_params": None,
        "sampling_params": SimpleNamespace(prompt_logprobs=None),
        "skip_reading_prefix_cache": False,
        "resumable": False,
        "cache_salt": None,
        "lora_request": None,
    }
    return SimpleNamespace(**plain | changes)


def image(identifier):
    return SimpleNamespace(modality="image", identifier=identifier, mm_position=SimpleNamespace(offset=1, length=2))


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        (None, {}),
        (None, {"cache_salt": "tenant-b"}),
        (None, {"mm_features": [image("a")]}),
        ("multimodal", {"mm_features": [image("a"), image("")]}),
        ("embeddings", {"prompt_token_ids": None}),
        ("embeddings", {"prompt_embeds": "tensor"}),
        ("pooling", {"pooling_params": "mean", "sampling_params": None}),
        ("prompt_logprobs", {"sampling_params": SimpleNamespace(prompt_logprobs=0)}),
        ("skip_reading", {"skip_reading_prefix_cache": True}),
        ("streaming_input", {"resumable": True}),
        ("salt", {"cache_salt": "ü" * 513}),
    ],
)
def test_requests_whose_kv_is_not_that_of_their_tokens_are_bypassed(reason, changes):
    assert reason == bypass_reason(request(**changes), block_tokens=16)


def test_adapters_salts_and_weights_have_roots_of_their_own(tmp_path):
    digests = AdapterDigests()
    (tmp_path / "adapter_model.bin").write_bytes(b"weights")
    lora = SimpleNamespace(lora_path=str(tmp_path))
    name = digests.digest(str(tmp_path))
    roots = [
        root_of(request(), digests, None),
        root_of(request(cache_salt=name), digests, None),
        root_of(request(lora_request=lora), digests, None),
        root_of(request(), digests, name),
    ]
    assert [Root(), Root(salt=name), Root(adapter=name), Root(weights_epoch=name)] == roots
    assert hashlib.blake2b(digest_size=16).digest_size * 2 == len(name)


class NumpyRows:
    """What a pool needs of a copier."""

    def new_rows(self, blocks, block_bytes):
        return np.zeros((blocks, block_bytes), dtype=np.uint8)


@settings(deadline=None)
@given(st.data())
def test_runs_of_rows_never_overlap_and_all_come_back(data):
    pool = RowPool(NumpyRows(), 4, 20)
    taken = []
    for _ in range(data.draw(st.integers(0, 25))):
        if taken and data.draw(st.booleans()):
            pool.give_back(taken.pop(data.draw(st.integers(0, len(taken) - 1))))
        else:
            wanted = data.draw(st.integers(1, 25))
            run = pool.take(wanted)
            used = {row for other in taken for row in other}
            free = [row in used for row in range(pool.count)]
            longest = max((len(part) for part in "".join("x" if row else "." for row in free).split("x")), default=0)
            assert (0 if run is None else len(run)) == min(wanted, longest)
            if run is not None:
                assert used.isdisjoint(run)
                assert pool.rows(run).shape == (len(run), 4)
                taken.append(run)
    for run in taken:
        pool.give_back(run)
    assert range(pool.count) == pool.take(pool.count)


@pytest.mark.parametrize(
    ("table", "span", "expected"),
    [
        ([5, 6, 7, 8], range(1, 4), PartBlocks(1, (6, 7, 8))),
        ([NULL_BLOCK, NULL_BLOCK, 7, 8], range(1, 4), PartBlocks(2, (7, 8))),
        ([NULL_BLOCK] * 4, range(2, 4), PartBlocks(4, ())),
        ([], range(0), PartBlocks(0, ())),
    ],
)
def test_blocks_that_slid_out_of_a_window_are_left_out(table, span, expected):
    assert expected == live_blocks(table, span)
