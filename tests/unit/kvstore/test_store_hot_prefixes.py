"""Which prefixes a store names as worth most, compared with a look at all of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.store import StoreSettings, open_store
from kvstore.testing.blocks import store_prompt
from kvstore.types import KvLayout, Namespace, Root

LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=16, dtype="int8", block_tokens=4)
NAMESPACE = Namespace(model="m", revision="r", layout=LAYOUT)
EVERY_TOKENS = 8  # two blocks
PLENTY = 1 << 30


@pytest.fixture
def store():
    with open_store(None, host_bytes=4 << 20) as opened:
        yield opened


def named(store, limit_bytes=PLENTY):
    """What is named, by salt and tokens."""
    found = store.hot_prefixes(EVERY_TOKENS, limit_bytes)
    return [(prefix.root.salt, tuple(prefix.tokens.tolist())) for prefix in found]


def prompt(head, blocks):
    return [head] * LAYOUT.block_tokens + list(range(LAYOUT.block_tokens * (blocks - 1)))


def test_an_empty_store_names_nothing(store):
    assert [] == named(store)


def test_of_two_prompts_of_which_one_begins_with_the_other_the_longer_is_named(store):
    store_prompt(store, NAMESPACE, prompt(1, 8))
    store_prompt(store, NAMESPACE, prompt(1, 4))
    assert [(None, tuple(prompt(1, 8)))] == named(store)


def test_a_prompt_is_named_up_to_its_last_boundary(store):
    store_prompt(store, NAMESPACE, prompt(1, 5))
    assert [(None, tuple(prompt(1, 4)))] == named(store)


def test_prompts_of_other_roots_are_named_with_them(store):
    store_prompt(store, NAMESPACE, prompt(1, 4))
    store_prompt(store, NAMESPACE, prompt(1, 4), root=Root(salt="s"))
    assert {(None, tuple(prompt(1, 4))), ("s", tuple(prompt(1, 4)))} == set(named(store))


def test_what_the_policy_keeps_longest_is_named_where_there_is_no_room_for_all():
    with open_store(None, host_bytes=4 << 20, settings=StoreSettings(eviction_policy="lru")) as store:
        for head in range(8):
            store_prompt(store, NAMESPACE, prompt(head, 4))
        store.match(NAMESPACE, prompt(5, 4))
        store.match(NAMESPACE, prompt(6, 4))
        assert [(None, tuple(prompt(head, 4))) for head in (6, 5)] == named(store, 8 * LAYOUT.block_bytes)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=8),
    limit_blocks=st.integers(0, 24),
)
def test_within_any_limit_stored_and_different_prefixes_are_named_and_without_one_all(prompts, limit_blocks):
    """A letter stands for a boundary of two blocks."""
    letters = {tuple(letters) for letters in prompts}
    with open_store(None, host_bytes=4 << 20) as store:
        for word in letters:
            store_prompt(store, NAMESPACE, np.repeat(word, EVERY_TOKENS).tolist())
        every = {tokens[::EVERY_TOKENS] for _, tokens in named(store)}
        some = [tokens[::EVERY_TOKENS] for _, tokens in named(store, limit_blocks * LAYOUT.block_bytes)]
    leaves = {word for word in letters if not any(other[: len(word)] == word != other for other in letters)}
    beginnings = {word[:end] for word in some for end in range(1, len(word) + 1)}
    assert leaves == every
    assert 2 * len(beginnings) <= limit_blocks
    assert beginnings <= {word[:end] for word in leaves for end in range(1, len(word) + 1)}
    assert not any(other[: len(word)] == word != other for word in some for other in some)
