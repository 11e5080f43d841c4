"""Sparse parts on the same host are read where they lie, as dense ones are, by the word of their lease on the board."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import pytest

import kvstore
from kvstore.errors import InvalidArgumentError, UnavailableError
from kvstore.store import Store, open_store
from kvstore.testing.blocks import expected_part_rows, sparse_parts, store_prompt, verified_blocks
from kvstore.testing.conformance import BLOCKS, LAYOUT, PROMPT
from kvstore.testing.conformance_sparse import HYBRIDS
from kvstore.testing.serving import ServedStore
from kvstore.transport import arena_frames
from kvstore.transport.arena_memory import Reader

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MIB = 1 << 20


@pytest.fixture
def store() -> Iterator[Store]:
    with open_store(host_bytes=16 * MIB) as store:
        yield store


@pytest.fixture
def client(store: Store, tmp_path: Path) -> Iterator[kvstore.Client]:
    with ServedStore(store, [f"unix://{tmp_path}/s"]) as served, kvstore.connect(served.addresses[0]) as client:
        yield client


def hybrid(groups: str, tensor_parallel: int = 1) -> kvstore.Namespace:
    layout = dataclasses.replace(LAYOUT, groups=HYBRIDS[groups], tensor_parallel=tensor_parallel)
    return kvstore.Namespace(model="hybrid", revision="r", layout=layout)


@pytest.mark.parametrize("groups", HYBRIDS)
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_all_parts_of_a_hybrid_are_read_in_place(client: kvstore.Client, groups: str, tensor_parallel: int):
    namespace = hybrid(groups, tensor_parallel)
    store_prompt(client, namespace, PROMPT)
    assert BLOCKS == verified_blocks(client, namespace, PROMPT)
    assert ("", 0) == (client.arena.off, client.arena.fallbacks)
    with client.lease(client.match(namespace, PROMPT)) as lease:
        for part in sparse_parts(namespace):
            expected = expected_part_rows(namespace, PROMPT, part)
            first = first_held(namespace, part)
            with lease.read_in_place(from_block=first, part=part) as pieces:
                np.testing.assert_array_equal(expected[first:].reshape(-1), np.concatenate(pieces))
                del pieces


def first_held(namespace: kvstore.Namespace, part: int) -> int:
    """The first block of which a match needs the part."""
    group = namespace.layout.group_of(part)
    assert group is not None
    return BLOCKS - namespace.layout.groups[group].blocks_back(namespace.layout.block_tokens)


@pytest.mark.parametrize("groups", HYBRIDS)
def test_a_block_of_which_no_part_is_needed_is_refused_as_without_an_arena(client: kvstore.Client, groups: str):
    namespace = hybrid(groups)
    store_prompt(client, namespace, PROMPT)
    with client.lease(client.match(namespace, PROMPT)) as lease:
        for part in sparse_parts(namespace):
            rows = np.zeros((BLOCKS, namespace.layout.part_bytes(part)), dtype=np.uint8)
            first = first_held(namespace, part)
            assert BLOCKS - first == lease.load_into(rows, from_block=first, part=part).blocks
            with pytest.raises(InvalidArgumentError, match=f"from_block is {first - 1}"):
                lease.load_into(rows, from_block=first - 1, part=part)
            with lease.read_in_place(from_block=first - 1, part=part) as pieces:
                assert [] == pieces


def test_a_lease_that_ends_during_a_read_of_a_sparse_part_is_an_error(client: kvstore.Client):
    namespace = hybrid(next(iter(HYBRIDS)))
    store_prompt(client, namespace, PROMPT)
    lease = client.lease(client.match(namespace, PROMPT))
    part = sparse_parts(namespace)[0]
    first = first_held(namespace, part)
    with pytest.raises(UnavailableError, match="the lease has ended"), lease.read_in_place(from_block=first, part=part):
        lease.release()


def test_a_lease_that_ends_during_a_copy_of_a_sparse_part_loads_nothing_of_it(
    client: kvstore.Client, monkeypatch: pytest.MonkeyPatch
):
    namespace = hybrid(next(iter(HYBRIDS)))
    store_prompt(client, namespace, PROMPT)
    lease = client.lease(client.match(namespace, PROMPT))
    part = sparse_parts(namespace)[0]
    first = first_held(namespace, part)
    rows = np.zeros((BLOCKS - first, namespace.layout.part_bytes(part)), dtype=np.uint8)
    copy = Reader.copy

    def end_lease(reader: Reader, *arguments: object) -> None:
        monkeypatch.undo()
        copy(reader, *arguments)  # type: ignore[arg-type]
        lease.release()

    monkeypatch.setattr(Reader, "copy", end_lease)
    with pytest.raises(kvstore.KvstoreError):
        lease.load_into(rows, from_block=first, part=part)
    assert 0 == client.arena.loaded_bytes


def test_sparse_parts_travel_where_the_server_does_not_tell_their_places(
    client: kvstore.Client, monkeypatch: pytest.MonkeyPatch
):
    """As one of an earlier version, whose board has a zero there."""
    board = arena_frames.encode_board
    monkeypatch.setattr(arena_frames, "encode_board", lambda words, _knows: board(words))
    namespace = hybrid(next(iter(HYBRIDS)))
    store_prompt(client, namespace, PROMPT)
    assert BLOCKS == verified_blocks(client, namespace, PROMPT)
    assert ("", True) == (client.arena.off, client.arena.fallbacks > 0)
