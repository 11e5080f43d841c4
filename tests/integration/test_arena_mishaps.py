"""Reading in place where something goes wrong at the worst moment: a lease ends, a process forks, descriptors lack."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import kvstore
from kvstore.errors import ClosedError, InvalidLayoutError, UnavailableError
from kvstore.store import Store, open_store
from kvstore.testing.blocks import expected_rows, store_prompt
from kvstore.testing.patience import wait_until
from kvstore.testing.serving import ServedStore
from kvstore.tiers.host import HostPool
from kvstore.transport import arena
from kvstore.types import KvLayout, Namespace, Tier

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from kvstore.tiers.host import ExtentPlace
    from kvstore.types import Slots

MIB = 1 << 20
LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=8192, dtype="int8", block_tokens=4)  # 64 KiB a block
OURS = Namespace(model="m", revision="r", tenant="ours", layout=LAYOUT)
BLOCKS = 8
PROMPT = list(range(BLOCKS * LAYOUT.block_tokens))
HOST_BYTES = 16 * MIB


@pytest.fixture
def store() -> Iterator[Store]:
    with open_store(host_bytes=HOST_BYTES) as store:
        yield store


@pytest.fixture
def served(store: Store, tmp_path: Path) -> Iterator[ServedStore]:
    with ServedStore(store, [f"unix://{tmp_path}/s"]) as served:
        yield served


@pytest.fixture
def client(served: ServedStore) -> Iterator[kvstore.Client]:
    with kvstore.connect(served.addresses[0]) as client:
        yield client


def load(lease: kvstore.Lease) -> np.ndarray:
    rows = np.zeros((lease.blocks, LAYOUT.block_bytes), dtype=np.uint8)
    assert lease.blocks == lease.load_into(rows).blocks
    return rows


def leased(client: kvstore.Client, prompt: list[int] = PROMPT) -> kvstore.Lease:
    return client.lease(client.match(OURS, prompt))


def test_a_late_ring_never_writes_to_another_file(served: ServedStore, monkeypatch: pytest.MonkeyPatch):
    """The last array of a client that was closed goes while its thread ends, and with it the line to the server."""
    client = kvstore.connect(served.addresses[0])
    store_prompt(client, OURS, PROMPT)
    with leased(client).read_in_place() as pieces:
        shown = list(pieces)
    del pieces
    client.close()
    write = os.eventfd_write
    rung = []

    def ring(fd: int, value: int) -> None:
        if threading.current_thread() is threading.main_thread():
            write(fd, value)
            wait_until(lambda: all(thread.name != "kvstore-arena" for thread in threading.enumerate()))
            rung.append(os.readlink(f"/proc/self/fd/{fd}"))
        write(fd, value)

    monkeypatch.setattr(os, "eventfd_write", ring)
    shown.clear()
    assert ["anon_inode:[eventfd]"] == rung


def test_a_read_in_place_of_what_there_is_not_is_refused_or_empty_as_a_load_is(client: kvstore.Client):
    store_prompt(client, OURS, PROMPT)
    lease = leased(client)
    for part in (-1, 1):
        with pytest.raises(InvalidLayoutError, match=f"part is {part}, expected 0..0"), lease.read_in_place(part=part):
            pass
    for from_block in (BLOCKS, 2**40):
        with lease.read_in_place(from_block=from_block) as pieces:
            assert [] == pieces


def test_a_lease_that_ends_while_its_places_are_looked_up_loads_nothing_and_the_next_is_read_in_place(
    store: Store, client: kvstore.Client, monkeypatch: pytest.MonkeyPatch
):
    """Its extents are gone by then, or hold others' blocks."""
    store_prompt(client, OURS, PROMPT)
    lease = leased(client)
    extents_of = HostPool.extents_of

    def end_lease(pool: HostPool, slots: Slots) -> tuple[ExtentPlace, ...]:
        monkeypatch.undo()
        lease.release()
        assert BLOCKS == store.evict(OURS, PROMPT)
        assert all(pool.give_back(extent) for extent in pool.ranges())
        return extents_of(pool, slots)

    monkeypatch.setattr(HostPool, "extents_of", end_lease)
    with pytest.raises(ClosedError):
        load(lease)
    store_prompt(client, OURS, PROMPT)
    before = client.arena.loaded_bytes
    np.testing.assert_array_equal(expected_rows(OURS, PROMPT), load(leased(client)))
    assert ("", BLOCKS * LAYOUT.block_bytes) == (client.arena.off, client.arena.loaded_bytes - before)


def test_what_is_wanted_back_while_a_lease_stands_comes_back_when_its_time_is_over(tmp_path: Path):
    """Nobody releases it, and nobody calls: the client is told."""
    with (
        open_store(host_bytes=HOST_BYTES) as store,
        ServedStore(store, [f"unix://{tmp_path}/s"]) as served,
        kvstore.connect(served.addresses[0]) as client,
    ):
        store_prompt(client, OURS, PROMPT)
        lease = leased(client)
        load(lease)
        (pool,) = store._index.host._pools.values()
        assert all(pool.is_kept(extent) for extent in pool.ranges())
        for open_lease in store._leases:
            open_lease.expires_at = 0.0
        wait_until(lambda: not store.stats().leases)
        wait_until(lambda: not store._index.host.memory().held_extents)
        assert 0 == client.arena.extents


def test_a_lease_that_is_read_piece_by_piece_counts_each_block_as_loaded_once(tmp_path: Path):
    """Also where its end lies on disk, so that each piece from there asks whether more has come into memory."""
    with (
        kvstore.open(tmp_path / "data", host_bytes=4 * MIB, disk_bytes=64 * MIB) as store,
        ServedStore(store, [f"unix://{tmp_path}/s"]) as served,
        kvstore.connect(served.addresses[0]) as client,
    ):
        prompt = [*range(240)]
        store_prompt(client, OURS, prompt)
        store.flush()
        store_prompt(client, OURS, [7, *prompt[:96]])
        match = client.match(OURS, prompt)
        assert [Tier.HOST, Tier.DISK] == [run.tier for run in match.runs]
        before = store.stats().loaded_tokens
        rows = np.zeros((4, LAYOUT.block_bytes), np.uint8)
        with client.lease(match) as lease:
            for first in range(0, 60, 4):
                assert 4 == lease.load_into(rows, from_block=first).blocks
        after = store.stats().loaded_tokens
    assert 240 == sum(after.values()) - sum(before.values())


def test_an_interrupt_while_the_server_is_asked_costs_a_while_and_not_the_session(
    client: kvstore.Client, monkeypatch: pytest.MonkeyPatch
):
    """The answer that nobody took would be taken for the next one's."""
    monkeypatch.setattr(arena, "_RETRY_SECONDS", 0.0)
    store_prompt(client, OURS, PROMPT)
    load(leased(client))
    receive_frame = arena.receive_frame

    def interrupt(*_: object) -> None:
        monkeypatch.setattr(arena, "receive_frame", receive_frame)
        raise KeyboardInterrupt

    monkeypatch.setattr(arena, "receive_frame", interrupt)
    lease = leased(client)
    with pytest.raises(KeyboardInterrupt):
        load(lease)
    wait_until(lambda: load(lease) is not None and bool(client.arena.extents))
    assert "" == client.arena.off


def test_a_server_without_descriptors_to_spare_sends_bytes_and_keeps_none(
    served: ServedStore, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "eventfd", refuse)
    for _ in range(3):
        with kvstore.connect(served.addresses[0]) as client:
            store_prompt(client, OURS, PROMPT)
            np.testing.assert_array_equal(expected_rows(OURS, PROMPT), load(leased(client)))
            assert "gives its memory to nobody" in client.arena.off
    links = (os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink())
    assert 0 == sum("pidfd" in link for link in links)


def test_a_child_that_leaves_a_read_in_place_is_told_that_it_has_nothing(store: Store, client: kvstore.Client):
    """Its pieces are not mapped there, and nor is what says whether the lease stands."""
    store_prompt(client, OURS, PROMPT)
    reading = leased(client).read_in_place()
    reading.__enter__()
    child = os.fork()
    if not child:
        os._exit(_leave_in_child(reading))
    assert (child, 0) == os.waitpid(child, 0)
    reading.__exit__(None, None, None)


def _leave_in_child(reading: AbstractContextManager[object]) -> int:
    try:
        reading.__exit__(None, None, None)
    except UnavailableError:
        return 0
    return 1
