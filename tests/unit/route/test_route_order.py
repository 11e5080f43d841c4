from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.cluster.routing import DEFAULT_POLICY, EngineMatch
from kvstore.errors import ConfigError
from kvstore.nodes import Node, NodeMatch
from kvstore.route.locator import matches_of
from kvstore.route.prompts import LocalTokenizer, affinity_of, given_tokens, read_body
from kvstore.route.upstreams import DECODE_TOKENS, Upstream, order_of
from kvstore.types import Tier


def upstreams_of(*waiting):
    return [Upstream(name, f"http://{name}", waiting_tokens=tokens) for name, tokens in zip("abcd", waiting)]  # noqa: B905


@given(
    waiting=st.lists(st.integers(0, 10_000), min_size=1, max_size=4),
    held=st.lists(st.integers(0, 4096), min_size=4, max_size=4),
    key=st.binary(max_size=4),
)
def test_every_healthy_server_is_tried_once_and_none_has_more_than_its_share_at_first(waiting, held, key):
    upstreams = upstreams_of(*waiting)
    matches = {name: EngineMatch(name, tokens) for name, tokens in zip("abcd", held, strict=True)}
    order = order_of(upstreams, matches, 4096, key)
    assert sorted(upstream.name for upstream in upstreams) == sorted(upstream.name for upstream, _ in order)
    assert {upstream.name: 4096 - matches[upstream.name].device_tokens for upstream in upstreams} == {
        upstream.name: cost for upstream, cost in order
    }
    first, _ = order[0]
    limit = DEFAULT_POLICY.load_ratio_max * (sum(waiting) + 4096) / len(waiting)
    assert first.waiting_tokens <= limit


def test_servers_that_are_not_well_are_tried_last():
    upstreams = upstreams_of(0, 9, 0)
    upstreams[0].is_healthy = False
    held = {"a": EngineMatch("a", 10)}
    assert ["c", "b", "a"] == [upstream.name for upstream, _ in order_of(upstreams, held, 10, b"")]
    upstreams[1].is_healthy = upstreams[2].is_healthy = False
    assert ["a", "b", "c"] == [upstream.name for upstream, _ in order_of(upstreams, held, 10, b"")]


def test_a_request_weighs_its_prompt_until_it_is_answered_and_then_a_little_until_it_ends():
    (upstream,) = upstreams_of(0)
    seen = []
    with upstream.busy(1000) as answers:
        seen.append(upstream.waiting_tokens)
        answers()
        seen.append(upstream.waiting_tokens)
    assert ([1000 + DECODE_TOKENS, DECODE_TOKENS], 0) == (seen, upstream.waiting_tokens)


def test_a_node_that_is_alone_is_that_of_every_server_and_names_decide_between_several():
    alone = NodeMatch(Node("n", 0, 0, (), 0, 0, 0), 64, {Tier.HOST: 64}, {"a": 32})
    other = NodeMatch(Node("m", 1, 0, (), 0, 0, 0), 16, {Tier.PEER: 16})
    upstreams = [Upstream("a", "http://a"), Upstream("b", "http://b", node="m")]
    assert {"a": EngineMatch("a", 32, alone), "b": EngineMatch("b", 0, None)} == matches_of([alone], upstreams)
    assert {"a": EngineMatch("a", 32, None), "b": EngineMatch("b", 0, other)} == matches_of([alone, other], upstreams)


@pytest.mark.parametrize("raw", [b"", b"[]", b"\xff", b"[" * 100_000, b"7"])
def test_what_is_no_object_has_no_fields(raw):
    assert {} == read_body(raw)


@pytest.mark.parametrize("prompt", ["text", [], [1, -1], [True], [2**32], ["a"], None, [[1, 2]]])
def test_prompts_that_are_no_ids_have_none(prompt):
    assert given_tokens({"prompt": prompt}) is None


def test_what_begins_alike_has_one_affinity():
    assert affinity_of(None, {"prompt": "x" * 1024 + "a"}) == affinity_of(None, {"prompt": "x" * 1024 + "b"})
    assert affinity_of(None, {"prompt": "a"}) != affinity_of(None, {"prompt": "b"})
    assert affinity_of([1] * 256 + [2], {}) == affinity_of([1] * 256 + [3], {})


@pytest.fixture
def tokenizer(tmp_path):
    """One of transformers, for which each word is a token."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("jinja2")
    words = {word: number for number, word in enumerate(["?", "user", "say", "hello", "go", "thinking"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    template = (
        "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
        "{% if thinking %}thinking {% endif %}{% if add_generation_prompt %}go{% endif %}"
    )
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, chat_template=template)
    fast.save_pretrained(tmp_path)
    return LocalTokenizer(str(tmp_path))


def test_a_local_tokenizer_renders_chats_by_the_models_template_with_their_options(tokenizer):
    chat = {"messages": [{"role": "user", "content": "say hello"}]}
    bodies = [
        chat,
        chat | {"add_generation_prompt": False},
        chat | {"chat_template_kwargs": {"thinking": True, "chat_template": "x", "tokenize": False}},
        {"messages": [{"role": "user"}]},
        {"messages": 7},
        {},
    ]

    async def render():
        chats = [await tokenizer.tokens("/v1/chat/completions", body) for body in bodies]
        return [*chats, await tokenizer.tokens("/v1/completions", {"prompt": "say hello"})]

    found = asyncio.run(render())
    assert [[1, 2, 3, 4], [1, 2, 3], [1, 2, 3, 5, 4]] == found[:3]
    assert [None, None] == found[4:6]
    assert [2, 3] == found[6]


def test_a_chat_too_deep_for_its_template_has_no_tokens(tokenizer):
    deep = []
    for _ in range(5_000):
        deep = [deep]
    chat = {"messages": [{"role": "user", "content": deep}]}
    assert None is asyncio.run(tokenizer.tokens("/v1/chat/completions", chat))


def test_a_folder_without_a_tokenizer_is_refused_by_name(tmp_path):
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match="there is no tokenizer at"):
        LocalTokenizer(str(tmp_path))
