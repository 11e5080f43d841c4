"""A lookup walks without the index lock; what it found is used only if it still holds."""

import dataclasses
from collections.abc import Iterator

import pytest

import kvstore
from kvstore.store import Store
from kvstore.store.space import Space
from kvstore.testing.blocks import store_prompt
from kvstore.testing.conformance import BASE, BLOCKS, PROMPT
from kvstore.tokens import as_token_array
from kvstore.types import PLAIN_ROOT, Tier

OTHER_PROMPT = [token + 1000 for token in PROMPT]


@pytest.fixture
def store() -> Iterator[Store]:
    with kvstore.open(host_bytes=64 << 20) as store:
        store_prompt(store, BASE, PROMPT)
        yield store


def space_of(store: Store) -> Space:
    return store._index.space(BASE)


def test_ids_found_before_a_removal_are_not_used_after_it(store: Store) -> None:
    space = space_of(store)
    root_key, prompt = space.root_key(None), as_token_array(PROMPT)
    found = space.find(root_key, prompt)
    assert BLOCKS == found.ids.size
    store.evict(BASE, PROMPT, from_block=3)
    store_prompt(store, BASE, OTHER_PROMPT)  # its blocks get the ids that came free
    other_ids = space.tree.match(root_key, as_token_array(OTHER_PROMPT))
    assert set(found.ids.tolist()) & set(other_ids.tolist())
    with store._index.lock:
        assert found.ids[:3].tolist() == space.confirm(found).tolist()


def test_a_lease_of_an_outdated_match_holds_the_blocks_of_its_prompt_alone(store: Store) -> None:
    match = store.match(BASE, PROMPT)
    store.evict(BASE, PROMPT, from_block=3)
    store_prompt(store, BASE, OTHER_PROMPT)
    with store.lease(match) as lease:
        assert 3 == lease.blocks
        assert BLOCKS == store.evict(BASE, OTHER_PROMPT)


def test_what_others_add_meanwhile_leaves_a_match_as_it_was(store: Store) -> None:
    space = space_of(store)
    found = space.find(space.root_key(PLAIN_ROOT), as_token_array(PROMPT))
    store_prompt(store, BASE, [*PROMPT[:20], *OTHER_PROMPT])
    with store._index.lock:
        assert space.confirm(found) is found.ids


def test_a_damaged_index_is_reported_by_namespace(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store_prompt(store, dataclasses.replace(BASE, model="other"), PROMPT)
    monkeypatch.setattr("kvstore.store.space.RadixTree.check_slice", lambda tree: ["a block is of no node (7)"])
    found = store.verify()
    assert (2, 2 * BLOCKS) == (found.namespaces, found.blocks)
    assert f"namespace {store.namespace_id(BASE).hex()}: a block is of no node (7)" == found.problems[0]
    assert 2 == len(found.problems)
    assert BLOCKS == store.match(BASE, PROMPT).tiers[Tier.HOST]
