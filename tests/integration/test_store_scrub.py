"""Scrubbing a store, embedded and served by each lane: what rotted on disk is dropped, all else is left alone."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

import kvstore
from kvstore.cli import main
from kvstore.errors import InvalidArgumentError
from kvstore.testing.blocks import store_prompt, verified_blocks
from kvstore.testing.serving import served
from kvstore.types import KvLayout, Namespace, Tier

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LAYOUT = KvLayout(layers=2, kv_heads=2, head_dim=32, dtype="float16", block_tokens=4)
NAMESPACE = Namespace(model="model", revision="revision", layout=LAYOUT)
SIZES = {"host_bytes": 4 << 20, "disk_bytes": 32 << 20}
PROMPT = list(range(40))
BLOCKS = 10
LISTEN = {"gRPC": "grpc://127.0.0.1:0", "wire": "127.0.0.1:0"}


@pytest.fixture(params=["embedded", *LISTEN])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[kvstore.KvStore]:
    """A store whose prompt lies on disk alone."""
    write_to_disk(tmp_path)
    with ExitStack() as stack:
        opened = stack.enter_context(kvstore.open(tmp_path, **SIZES))
        if request.param != "embedded":
            address = stack.enter_context(served(opened, LISTEN[request.param], secrets={}))
            opened = stack.enter_context(kvstore.connect(address))
        yield opened


def write_to_disk(path: Path) -> None:
    with kvstore.open(path, **SIZES) as store:
        store_prompt(store, NAMESPACE, PROMPT)


def rot(path: Path, block: int) -> None:
    """Change a byte in the payload of a block; those of one prompt lie in order from the slab's second page on."""
    (slab,) = (path / "slabs").iterdir()
    with slab.open("r+b") as file:
        file.seek(4096 + block * 8192 + 4096)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def scrub(store: kvstore.KvStore, limit_bytes: int) -> list[kvstore.types.ScrubPage]:
    pages = [store.scrub(limit_bytes=limit_bytes)]
    while (after := pages[-1].next_after) is not None:
        pages.append(store.scrub(after=after, limit_bytes=limit_bytes))
    return pages


def test_all_blocks_are_read_whatever_a_page_may_read(store: kvstore.KvStore) -> None:
    for limit_bytes in (1, 20_000, 1 << 40):
        pages = scrub(store, limit_bytes)
        assert BLOCKS == sum(page.blocks for page in pages) == pages[0].blocks + pages[0].remaining_blocks
        assert {(0, 0)} == {(page.dropped_blocks, page.repaired_slots) for page in pages}
        assert 0 == pages[-1].remaining_blocks
    assert BLOCKS == verified_blocks(store, NAMESPACE, PROMPT)


@pytest.mark.parametrize("used", ["never", "before"])
def test_a_block_that_rotted_is_dropped_with_what_lies_below_it(
    store: kvstore.KvStore, tmp_path: Path, used: str
) -> None:
    if used == "before":
        assert {Tier.DISK: BLOCKS} == store.match(NAMESPACE, PROMPT).tiers
    rot(tmp_path, 6)
    assert 1 == sum(page.dropped_blocks for page in scrub(store, 20_000))
    assert 6 == store.match(NAMESPACE, PROMPT).blocks
    assert 0 == sum(page.dropped_blocks for page in scrub(store, 1 << 20))
    store_prompt(store, NAMESPACE, PROMPT)
    assert BLOCKS == verified_blocks(store, NAMESPACE, PROMPT)
    assert () == store.verify().problems


def test_a_block_with_a_copy_in_memory_loses_its_place_on_disk_alone(store: kvstore.KvStore, tmp_path: Path) -> None:
    assert BLOCKS == verified_blocks(store, NAMESPACE, PROMPT)
    rot(tmp_path, 6)
    assert 1 == sum(page.dropped_blocks for page in scrub(store, 1 << 20))
    assert BLOCKS == verified_blocks(store, NAMESPACE, PROMPT)


def test_a_position_or_a_limit_that_cannot_be_is_refused(store: kvstore.KvStore) -> None:
    for arguments in ({"after": -1}, {"limit_bytes": 0}):
        with pytest.raises(InvalidArgumentError):
            store.scrub(**arguments)


def test_a_store_without_a_disk_has_nothing_to_read() -> None:
    with kvstore.open(host_bytes=4 << 20) as store:
        store_prompt(store, NAMESPACE, PROMPT)
        assert (0, None) == (store.scrub().blocks, store.scrub().next_after)


def test_the_command_reads_everything_and_fails_if_something_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_to_disk(tmp_path)
    with kvstore.open(tmp_path, **SIZES) as store, served(store, "127.0.0.1:0", secrets={}) as address:
        command = ["verify", "--address", address, "--json", "--scrub", "--rate", "1GiB"]
        assert 0 == main(command)
        assert BLOCKS == json.loads(capsys.readouterr().out)["scrub"]["blocks"]
        rot(tmp_path, 0)
        assert 1 == main(command)
        found = json.loads(capsys.readouterr().out)["scrub"]
        assert (BLOCKS, 1, 0) == (found["blocks"], found["dropped_blocks"], found["remaining_blocks"])
        assert 1 == main([*command[:-1], "0"])
        assert "--rate" in capsys.readouterr().err
