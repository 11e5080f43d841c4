"""What a lookup has to do tells nothing of other tenants: it walks its own tree alone, and that is as it was.

Counted, not timed. RadixTree.steps counts no walk of `match`, which is compared by what decides it instead: a walk is
deterministic, so with the same tree, root and tokens it compares the same blocks. The walks are compared by their trees
and roots, the trees by their shape, and by their steps that no other work was done in any of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

import kvstore
from kvstore.radix.tree import RadixTree
from kvstore.testing.blocks import store_prompt
from kvstore.testing.conformance import BLOCKS, LAYOUT, MIB, PROMPT
from kvstore.types import Namespace, Root

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.store import Store

ASKING = Namespace(model="model", revision="revision", layout=LAYOUT, tenant="asking")
OTHERS = {
    "another tenant": Namespace(model="model", revision="revision", layout=LAYOUT, tenant="other"),
    "another secret": Namespace(model="model", revision="revision", layout=LAYOUT, tenant="asking", secret=b"secret"),
}
OWN = [token + 9 for token in PROMPT]
GUESSES = {
    "right": PROMPT,
    "half of it": PROMPT[: len(PROMPT) // 2],
    "wrong at the end": [*PROMPT[:-1], 7],
    "wrong": [token + 1 for token in PROMPT],
    "of its own": OWN,
}


@dataclass
class Work:
    """What one lookup did: the trees and roots it walked with how many blocks it found, the steps that were counted."""

    walks: list[tuple[RadixTree, bytes, int]] = field(default_factory=list)
    steps: dict[int, int] = field(default_factory=dict)
    shape: tuple[int, ...] = ()


@pytest.fixture
def store() -> Iterator[Store]:
    with kvstore.open(None, host_bytes=64 * MIB) as store:
        yield store


def look_up(store: Store, monkeypatch: pytest.MonkeyPatch, tokens: list[int], root: Root | None = None) -> Work:
    """Look a prompt up in ASKING, and tell what that took in every tree of the store."""
    work = Work()
    walk = RadixTree.match
    own = store._index.space(ASKING).tree
    before = {id(space.tree): space.tree.steps for space in store._index.spaces()}

    def recorded(tree: RadixTree, key: bytes, asked: Any) -> Any:
        found = walk(tree, key, asked)
        work.walks.append((tree, key, int(found.size)))
        return found

    with monkeypatch.context() as patched:
        patched.setattr(RadixTree, "match", recorded)
        store.match(ASKING, tokens, root=root)
    work.steps = {id(space.tree): space.tree.steps - before[id(space.tree)] for space in store._index.spaces()}
    work.shape = (own.block_count, own.node_count, own.root_count, own.condemned)
    return work


@pytest.mark.parametrize("whose", OTHERS)
@pytest.mark.parametrize("guess", GUESSES)
def test_what_another_namespace_holds_changes_nothing_of_the_work(
    store: Store, monkeypatch: pytest.MonkeyPatch, whose: str, guess: str
):
    store_prompt(store, ASKING, OWN)
    alone = look_up(store, monkeypatch, GUESSES[guess])
    store_prompt(store, OTHERS[whose], PROMPT)
    beside = look_up(store, monkeypatch, GUESSES[guess])
    own, other = (store._index.space(namespace).tree for namespace in (ASKING, OTHERS[whose]))
    assert {own} == {tree for tree, _, _ in beside.walks}
    assert (alone.walks, alone.shape) == (beside.walks, beside.shape)
    assert {**alone.steps, id(other): 0} == beside.steps


@pytest.mark.parametrize("guess", GUESSES)
def test_what_another_salt_holds_changes_nothing_of_the_work(store: Store, monkeypatch: pytest.MonkeyPatch, guess: str):
    mine = Root(salt="mine")
    store_prompt(store, ASKING, OWN, root=mine)
    alone = look_up(store, monkeypatch, GUESSES[guess], mine)
    for salt in (None, "other", "min", "mine "):
        store_prompt(store, ASKING, PROMPT, root=Root(salt=salt))
    beside = look_up(store, monkeypatch, GUESSES[guess], mine)
    assert (alone.walks, alone.steps) == (beside.walks, beside.steps)
    assert 1 == len({key for _, key, _ in beside.walks})


def test_the_counts_do_tell_of_what_is_ones_own(store: Store, monkeypatch: pytest.MonkeyPatch):
    """Else the tests above would say nothing."""
    alone = look_up(store, monkeypatch, PROMPT)
    store_prompt(store, ASKING, PROMPT)
    beside = look_up(store, monkeypatch, PROMPT)
    assert [0] == [found for _, _, found in alone.walks]
    assert [BLOCKS] == [found for _, _, found in beside.walks]
    assert alone.shape != beside.shape
