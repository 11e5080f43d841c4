"""Reading leased blocks in place, against real processes: who may, what ends it, and when memory goes to others."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kvstore
from kvstore.errors import ClosedError, UnavailableError
from kvstore.store import Store, StoreSettings, open_store
from kvstore.testing.blocks import expected_rows, store_prompt, verified_blocks
from kvstore.testing.patience import SLACK_SECONDS, Stopwatch, wait_until
from kvstore.testing.serving import ServedStore
from kvstore.tiers.extent import ExtentHold
from kvstore.transport import arena, arena_frames
from kvstore.transport.arena_memory import Reader
from kvstore.transport.link import flat_deadlines
from kvstore.types import KvLayout, Namespace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB = 1 << 20
LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=8192, dtype="int8", block_tokens=4)  # 64 KiB a block
OURS = Namespace(model="m", revision="r", tenant="ours", layout=LAYOUT)
OTHERS = Namespace(model="m", revision="r", tenant="others", layout=LAYOUT)
BLOCKS = 8
PROMPT = list(range(BLOCKS * LAYOUT.block_tokens))
HOST_BYTES = 16 * MIB

# Reads in place, and then does what it is told, a line each.
CLIENT_PROGRAM = """
import sys, kvstore, numpy as np
from kvstore.types import KvLayout, Namespace
layout = KvLayout(layers=1, kv_heads=1, head_dim=8192, dtype="int8", block_tokens=4)
namespace = Namespace(model="m", revision="r", tenant="ours", layout=layout)
client = kvstore.connect(sys.argv[1], lookup_seconds=10.0, bulk_seconds=30.0)
lease = client.lease(client.match(namespace, list(range(32))))
rows = np.zeros((lease.blocks, layout.block_bytes), np.uint8)
lease.load_into(rows)
print(lease.blocks, client.arena.loaded_bytes // layout.block_bytes, flush=True)
for line in sys.stdin:
    if line == "release\\n":
        lease.release()
        print("released", flush=True)
    elif line == "write\\n":
        stage = client.stage(namespace, [7, *range(31)])
        print(stage.blocks, flush=True)
        while True:
            stage.write_from(rows)
"""

SERVER_PROGRAM = """
import sys, kvstore
from kvstore.testing.serving import ServedStore
from kvstore.tiers.extent import ExtentHold
from kvstore.transport import arena, arena_frames
from kvstore.transport.arena_memory import Reader
with kvstore.open(None, host_bytes=1 << 24) as store, ServedStore(store, [sys.argv[1]]) as served:
    print(served.addresses[0], flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def store() -> Iterator[Store]:
    with open_store(host_bytes=HOST_BYTES, settings=StoreSettings(eviction_policy="lru")) as store:
        yield store


@pytest.fixture
def served(store: Store, tmp_path: Path) -> Iterator[ServedStore]:
    with ServedStore(store, [f"unix://{tmp_path}/s", "127.0.0.1:0"]) as served:
        yield served


@pytest.fixture
def client(served: ServedStore) -> Iterator[kvstore.Client]:
    with kvstore.connect(served.addresses[0]) as client:
        yield client


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def load(lease: kvstore.Lease) -> np.ndarray:
    rows = np.zeros((lease.blocks, LAYOUT.block_bytes), dtype=np.uint8)
    assert lease.blocks == lease.load_into(rows).blocks
    return rows


def leased(client: kvstore.Client, prompt: list[int] = PROMPT) -> kvstore.Lease:
    return client.lease(client.match(OURS, prompt))


def mapped_for(pid: int | str, permissions: str) -> int:
    """Mappings of host memory in a process with such permissions."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return len(re.findall(rf"^\S+ {permissions} .*memfd:kvstore-host", maps, re.MULTILINE))


def fill(
    store: kvstore.KvStore, namespace: Namespace, prompts: int = HOST_BYTES // (BLOCKS * LAYOUT.block_bytes)
) -> None:
    for name in range(prompts):
        store_prompt(store, namespace, [*range(name * 1000, name * 1000 + len(PROMPT))])


def test_a_load_on_the_same_host_copies_from_where_the_blocks_lie(client: kvstore.Client):
    store_prompt(client, OURS, PROMPT)
    with leased(client) as lease:
        for _ in range(2):
            np.testing.assert_array_equal(expected_rows(OURS, PROMPT), load(lease))
        tail = np.zeros((3, LAYOUT.block_bytes), dtype=np.uint8)
        assert 3 == lease.load_into(tail, from_block=5).blocks
        np.testing.assert_array_equal(expected_rows(OURS, PROMPT)[5:], tail)
    assert ("", 0, 19 * LAYOUT.block_bytes) == (client.arena.off, client.arena.fallbacks, client.arena.loaded_bytes)


def test_the_client_cannot_write_to_what_it_maps(client: kvstore.Client):
    store_prompt(client, OURS, PROMPT)
    with leased(client) as lease, lease.read_in_place(from_block=2) as pieces:
        shown = np.concatenate(pieces).reshape(-1, LAYOUT.block_bytes)
        np.testing.assert_array_equal(expected_rows(OURS, PROMPT)[2:], shown)
        assert [False] * len(pieces) == [piece.flags.writeable for piece in pieces]
        assert 1 == mapped_for("self", "r--s")
        del pieces, shown


def test_parts_are_read_in_place_one_by_one_and_together(served: ServedStore):
    layout = KvLayout(layers=2, kv_heads=2, head_dim=64, dtype="int8", block_tokens=4, tensor_parallel=2)
    namespace = Namespace(model="parts", revision="r", layout=layout)
    with kvstore.connect(served.addresses[0]) as client:
        store_prompt(client, namespace, PROMPT)
        whole = expected_rows(namespace, PROMPT)
        with client.lease(client.match(namespace, PROMPT)) as lease:
            first = 0
            for part in range(layout.part_count):
                size = layout.part_bytes(part)
                rows = np.zeros((BLOCKS, size), dtype=np.uint8)
                assert BLOCKS == lease.load_into(rows, part=part).blocks
                np.testing.assert_array_equal(whole[:, first : first + size], rows)
                with lease.read_in_place(part=part) as pieces:
                    np.testing.assert_array_equal(rows.reshape(-1), np.concatenate(pieces))
                first += size
            with lease.read_in_place(blocks=3) as pieces:
                np.testing.assert_array_equal(whole[:3].reshape(-1), np.concatenate(pieces))
                del pieces
        assert (layout.part_count > 1, 0) == (True, client.arena.fallbacks)


def test_bytes_travel_where_there_is_no_unix_socket(client: kvstore.Client, served: ServedStore):
    store_prompt(client, OURS, PROMPT)
    with kvstore.connect(served.addresses[1]) as far:
        with leased(far) as lease, lease.read_in_place() as pieces:
            assert [] == pieces
            np.testing.assert_array_equal(expected_rows(OURS, PROMPT), load(lease))
        assert ("the connection is no Unix socket", 0, 1) == (far.arena.off, far.arena.extents, far.arena.fallbacks)


def test_blocks_that_lie_on_disk_alone_come_behind_those_in_memory(tmp_path: Path):
    with (
        kvstore.open(tmp_path / "data", host_bytes=4 * MIB, disk_bytes=64 * MIB) as store,
        ServedStore(store, [f"unix://{tmp_path}/s"]) as served,
        kvstore.connect(served.addresses[0]) as client,
    ):
        prompts = [[*range(name * 1000, name * 1000 + 80)] for name in range(6)]
        for prompt in prompts:
            store_prompt(client, OURS, prompt)
        for prompt in prompts:
            assert 20 == verified_blocks(client, OURS, prompt)
        assert 0 < client.arena.loaded_bytes < 120 * LAYOUT.block_bytes
        assert client.arena.fallbacks


def spanning(client: kvstore.Client) -> np.ndarray:
    """Store and load a prompt that takes up all four extents."""
    prompt = list(range(HOST_BYTES // LAYOUT.block_bytes * LAYOUT.block_tokens))
    store_prompt(client, OURS, prompt)
    with leased(client, prompt) as lease:
        np.testing.assert_array_equal(expected_rows(OURS, prompt), load(lease))
        return load(lease)


def test_descriptors_come_in_as_many_messages_as_it_takes(client: kvstore.Client, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(arena_frames, "DESCRIPTORS_MAX", 3)
    rows = spanning(client)
    assert (2 * rows.nbytes, 0, 4) == (client.arena.loaded_bytes, client.arena.fallbacks, client.arena.extents)


def test_what_lies_beyond_the_most_that_a_client_maps_is_sent(client: kvstore.Client, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(arena_frames, "MAPPINGS_MAX", 2)
    rows = spanning(client)
    assert (rows.nbytes, 2, 2) == (client.arena.loaded_bytes, client.arena.fallbacks, client.arena.extents)


def test_without_descriptors_to_spare_bytes_travel(client: kvstore.Client, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(ExtentHold, "open_read_only", refuse)
    store_prompt(client, OURS, PROMPT)
    assert BLOCKS == verified_blocks(client, OURS, PROMPT)
    assert ("", 0, 1) == (client.arena.off, client.arena.loaded_bytes, client.arena.fallbacks)


def test_an_event_loop_reads_in_place_too(client: kvstore.Client, served: ServedStore):
    store_prompt(client, OURS, PROMPT)

    async def read() -> np.ndarray:
        async with kvstore.connect_async(served.addresses[0]) as own:
            rows = np.zeros((BLOCKS, LAYOUT.block_bytes), dtype=np.uint8)
            async with await own.lease(await own.match(OURS, PROMPT)) as lease:
                assert BLOCKS == (await lease.load_into(rows)).blocks
            assert (rows.nbytes, "") == (own.arena.loaded_bytes, own.arena.off)
            return rows

    np.testing.assert_array_equal(expected_rows(OURS, PROMPT), asyncio.run(read()))


def test_a_closed_client_maps_nothing(store: Store, served: ServedStore):
    with kvstore.connect(served.addresses[0]) as client:
        store_prompt(client, OURS, PROMPT)
        load(leased(client))
        assert 1 == store.host_memory().held_extents
    wait_until(lambda: (0, 0) == (store.host_memory().held_extents, mapped_for("self", "r--s")))
    wait_until(lambda: served.server.arena_use.clients == 0)


def test_what_a_reader_still_looks_at_is_kept_until_it_looks_away(store: Store, served: ServedStore):
    with kvstore.connect(served.addresses[0]) as client:
        store_prompt(client, OURS, PROMPT)
        with leased(client) as lease, lease.read_in_place() as pieces:
            kept = pieces[0]
            del pieces
    right = expected_rows(OURS, PROMPT).reshape(-1)[: kept.size]
    store.clear(OURS)
    fill(store, OTHERS)
    np.testing.assert_array_equal(right, kept)
    assert 1 == store.host_memory().held_extents
    del kept
    wait_until(lambda: store.host_memory().held_extents == 0)


def test_an_idle_client_gives_memory_back_for_another_namespace_at_its_first_store(
    store: Store, client: kvstore.Client
):
    fill(store, OURS)
    for name in range(HOST_BYTES // (BLOCKS * LAYOUT.block_bytes)):
        with leased(client, [*range(name * 1000, name * 1000 + len(PROMPT))]) as lease:
            load(lease)
    assert 4 == client.arena.extents
    assert BLOCKS == store_prompt(store, OTHERS, PROMPT).blocks
    assert client.arena.extents < 4
    assert BLOCKS == verified_blocks(client, OTHERS, PROMPT)
    assert BLOCKS == verified_blocks(client, OURS, [*range(31_000, 31_000 + len(PROMPT))])


def test_a_lease_that_ends_during_a_read_in_place_is_an_error(store: Store, client: kvstore.Client):
    store_prompt(client, OURS, PROMPT)
    lease = leased(client)
    load(lease)
    reading = lease.read_in_place()
    assert reading.__enter__()
    for held in tuple(store._leases):
        held.release()
    with pytest.raises(UnavailableError, match="ended"):
        reading.__exit__(None, None, None)
    with lease.read_in_place() as pieces:
        assert [] == pieces


def test_a_lease_that_ends_during_a_copy_loads_nothing(
    store: Store, client: kvstore.Client, monkeypatch: pytest.MonkeyPatch
):
    store_prompt(client, OURS, PROMPT)
    lease = leased(client)
    load(lease)
    copy = Reader.copy

    def copied_too_late(reader: Reader, *arguments: Any) -> None:
        copy(reader, *arguments)
        for held in tuple(store._leases):
            held.release()

    monkeypatch.setattr(Reader, "copy", copied_too_late)
    before = client.arena.loaded_bytes
    with pytest.raises(ClosedError):
        lease.load_into(np.zeros((BLOCKS, LAYOUT.block_bytes), dtype=np.uint8))
    assert before == client.arena.loaded_bytes


@pytest.mark.kill
def test_a_killed_client_frees_its_leases_and_what_it_mapped_at_once(
    store: Store, served: ServedStore, start_process: Callable[..., subprocess.Popen[str]]
):
    store_prompt(store, OURS, PROMPT)
    process = start_process(CLIENT_PROGRAM, served.addresses[0])
    assert f"{BLOCKS} {BLOCKS}\n" == line_of(process)
    assert (1, 1) == (store.host_memory().held_extents, store.stats().leases)
    process.kill()
    watch = Stopwatch()
    wait_until(lambda: (0, 0) == (store.host_memory().held_extents, store.stats().leases))
    assert watch.seconds < SLACK_SECONDS
    assert 0 == served.server.arena_use.clients


@pytest.mark.kill
def test_a_client_killed_in_the_middle_of_a_write_leaves_nothing_staged(
    store: Store, served: ServedStore, start_process: Callable[..., subprocess.Popen[str]]
):
    store_prompt(store, OURS, PROMPT)
    process = start_process(CLIENT_PROGRAM, served.addresses[0])
    line_of(process)
    tell(process, "write")
    assert f"{BLOCKS}\n" == line_of(process)
    process.kill()
    wait_until(lambda: (0, 0) == (store.host_memory().held_extents, store.stats().stages))
    written = [7, *range(31)]
    assert BLOCKS == store_prompt(store, OURS, written).blocks
    assert BLOCKS == verified_blocks(store, OURS, written)


@pytest.mark.kill
def test_a_stopped_client_keeps_its_memory_from_others_and_is_counted_and_nobody_waits_for_it(
    store: Store, served: ServedStore, start_process: Callable[..., subprocess.Popen[str]]
):
    fill(store, OURS)
    process = start_process(CLIENT_PROGRAM, served.addresses[0])
    line_of(process)
    tell(process, "release")
    line_of(process)
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    assert 0 == store.clear(OURS) % BLOCKS
    for name in range(4):
        watch = Stopwatch()
        store_prompt(store, OTHERS, [*range(name * 1000, name * 1000 + len(PROMPT))])
        assert watch.seconds < SLACK_SECONDS
    wait_until(lambda: served.server.arena_use.quarantined_bytes == 4 * MIB)
    fill(store, OTHERS)
    assert 1 == store.host_memory().held_extents
    process.send_signal(signal.SIGCONT)
    wait_until(lambda: store.host_memory().held_extents == 0)
    assert 0 == served.server.arena_use.quarantined_bytes


@pytest.mark.kill
def test_a_killed_server_leaves_its_client_with_misses_and_without_its_memory(
    start_process: Callable[..., subprocess.Popen[str]], tmp_path: Path
):
    process = start_process(SERVER_PROGRAM, f"unix://{tmp_path}/s")
    address = line_of(process).strip()
    with kvstore.connect(address) as client:
        store_prompt(client, OURS, PROMPT)
        lease = leased(client)
        with lease.read_in_place() as pieces:
            process.kill()
            process.wait()
            wait_until(lambda: client.arena.extents == 0)
            # Who reads goes on: nobody else has that memory.
            right = expected_rows(OURS, PROMPT).reshape(-1)
            np.testing.assert_array_equal(right, np.concatenate(pieces))
            assert 1 == mapped_for("self", "r--s")
            del pieces
        wait_until(lambda: mapped_for("self", "r--s") == 0)
        with pytest.raises(UnavailableError):
            lease.load_into(bytearray(LAYOUT.block_bytes))
        (tmp_path / "s").unlink()
        assert address == line_of(start_process(SERVER_PROGRAM, f"unix://{tmp_path}/s")).strip()
        wait_until(lambda: client.breaker.state == "closed" or client.status().serving)
        store_prompt(client, OURS, PROMPT)
        before = client.arena.loaded_bytes
        np.testing.assert_array_equal(expected_rows(OURS, PROMPT), load(leased(client)))
        assert BLOCKS * LAYOUT.block_bytes == client.arena.loaded_bytes - before


@pytest.mark.kill
def test_a_stopped_server_does_not_keep_a_client_from_what_it_has_leased(
    start_process: Callable[..., subprocess.Popen[str]], tmp_path: Path
):
    process = start_process(SERVER_PROGRAM, f"unix://{tmp_path}/s")
    with kvstore.connect(line_of(process).strip()) as client:
        store_prompt(client, OURS, PROMPT)
        lease = leased(client)
        load(lease)
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        np.testing.assert_array_equal(expected_rows(OURS, PROMPT), load(lease))
        process.send_signal(signal.SIGCONT)


@pytest.mark.kill
def test_a_server_that_was_stopped_for_a_while_is_read_in_place_again(
    start_process: Callable[..., subprocess.Popen[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(arena, "_RETRY_SECONDS", 0.0)
    process = start_process(SERVER_PROGRAM, f"unix://{tmp_path}/s")
    with kvstore.connect(line_of(process).strip()) as client:
        store_prompt(client, OURS, PROMPT)
        load(leased(client))
        before, unasked = client.arena.loaded_bytes, leased(client)
        unasked._held._deadlines = flat_deadlines(0.4)
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        watch = Stopwatch()
        with pytest.raises(UnavailableError):
            load(unasked)
        assert watch.seconds < 10.0
        process.send_signal(signal.SIGCONT)
        assert 0 == client.arena.extents

        def is_read_in_place() -> bool:
            np.testing.assert_array_equal(expected_rows(OURS, PROMPT), load(leased(client)))
            return client.arena.loaded_bytes > before

        wait_until(is_read_in_place)
        assert ("", 1) == (client.arena.off, client.arena.extents)


@pytest.mark.kill
def test_a_child_of_a_fork_has_nothing_of_what_its_parent_maps(store: Store, client: kvstore.Client):
    store_prompt(client, OURS, PROMPT)
    lease = leased(client)
    load(lease)
    child = os.fork()
    if child == 0:
        os._exit(_use_in_child(client))
    assert 0 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    np.testing.assert_array_equal(expected_rows(OURS, PROMPT), load(lease))
    assert 0 == client.arena.fallbacks
    lease.release()
    wait_until(lambda: store.host_memory().held_extents == 1)


def _use_in_child(client: kvstore.Client) -> int:
    """What a child of a fork does with a client of its parent; returns which step failed."""
    if mapped_for("self", "r--s"):
        return 1
    with leased(client) as lease:
        right = np.array_equal(expected_rows(OURS, PROMPT), load(lease))
    return 0 if right and not client.arena.fallbacks and mapped_for("self", "r--s") == 1 else 2


def test_a_client_that_is_told_not_to_map_has_bytes_travel(client: kvstore.Client, served: ServedStore):
    store_prompt(client, OURS, PROMPT)
    with kvstore.connect(served.addresses[0], arena="off") as plain:
        with leased(plain) as lease, lease.read_in_place() as pieces:
            assert [] == pieces
            np.testing.assert_array_equal(expected_rows(OURS, PROMPT), load(lease))
        assert ("the client was told so (arena=off)", 0) == (plain.arena.off, plain.arena.loaded_bytes)


def test_a_server_without_an_arena_lends_nothing_and_is_asked_once(store: Store, tmp_path: Path):
    with (
        ServedStore(store, [f"unix://{tmp_path}/lends-nothing"], arena="off") as served,
        kvstore.connect(served.addresses[0]) as client,
    ):
        store_prompt(client, OURS, PROMPT)
        assert BLOCKS == verified_blocks(client, OURS, PROMPT)
        assert (0, 0) == (client.arena.extents, client.arena.loaded_bytes)
        assert "gives its memory to nobody" in client.arena.off


def test_an_event_loop_reads_in_place_what_a_thread_would(client: kvstore.Client, served: ServedStore):
    store_prompt(client, OURS, PROMPT)

    async def read() -> None:
        async with kvstore.connect_async(served.addresses[0], lookup_seconds=10.0) as ours:
            lease = await ours.lease(await ours.match(OURS, PROMPT))
            async with lease.read_in_place(from_block=2) as pieces:
                shown = np.concatenate(pieces)
                assert not any(piece.flags.writeable for piece in pieces)
                del pieces
            async with lease.read_in_place(from_block=BLOCKS) as pieces:
                assert [] == pieces
        np.testing.assert_array_equal(expected_rows(OURS, PROMPT)[2:].reshape(-1), shown)

    asyncio.run(read())


def test_an_event_loop_is_told_of_a_lease_that_ended_during_a_read_in_place(
    client: kvstore.Client, served: ServedStore
):
    store_prompt(client, OURS, PROMPT)

    async def read() -> None:
        async with kvstore.connect_async(served.addresses[0], lookup_seconds=10.0) as ours:
            lease = await ours.lease(await ours.match(OURS, PROMPT))
            reading = lease.read_in_place()
            assert await reading.__aenter__()
            await lease.release()
            with pytest.raises(UnavailableError, match="ended"):
                await reading.__aexit__(None, None, None)

    asyncio.run(read())
