"""Sparse parts on a disk that fails: a match gets shorter, nothing wrong is read, nothing leaks, nothing raises."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import kvstore
from kvstore.clock import SystemClock
from kvstore.errors import StorageError
from kvstore.layer_groups import Recurrent, SlidingWindow
from kvstore.store import Store, StoreSettings
from kvstore.testing.blocks import store_prompt, verified_blocks
from kvstore.testing.faulty import FaultyIo, IoCall
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.host import HostTier
from kvstore.types import KvLayout, Namespace

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent
MIB = 1 << 20
GROUPS = (
    SlidingWindow(layers=2, window=10, kv_heads=1, head_dim=64, dtype="int8"),  # 3 blocks of 4, 1 KiB each
    Recurrent(layers=2, state_bytes=2048),
)
LAYOUT = KvLayout(layers=2, kv_heads=1, head_dim=64, dtype="int8", block_tokens=4, groups=GROUPS)
NAMESPACE = Namespace(model="m", revision="r", layout=LAYOUT)
PROMPTS = [list(range(start, start + 42)) for start in range(0, 40 * 42, 42)]
BLOCKS = 10
ALWAYS = 1 << 30


def open_with(path: Path, io: FaultyIo, host_bytes: int = MIB // 4) -> Store:
    disk = DiskTier.open(path, capacity_bytes=64 * MIB, io=io)
    return Store(HostTier(host_bytes), disk, StoreSettings(), SystemClock())


@pytest.fixture
def io() -> FaultyIo:
    return FaultyIo()


@pytest.fixture
def store(tmp_path: Path, io: FaultyIo) -> Iterator[Store]:
    with open_with(tmp_path, io) as store:
        yield store
        io.heal()
        assert () == store.verify().problems
        store.clear(NAMESPACE)
        assert (0, 0) == (store.stats().tiers["host"].used_bytes, store.stats().sparse_blocks)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_takes_nothing_stops_no_store(store: Store, io: FaultyIo, error: int) -> None:
    io.fail(IoCall.WRITE, error, times=ALWAYS)
    for prompt in PROMPTS:
        assert BLOCKS == store_prompt(store, NAMESPACE, prompt).blocks
        assert BLOCKS == verified_blocks(store, NAMESPACE, prompt)
    group = store._index.space(NAMESPACE).sparse.groups[1]
    assert group.disk is not None
    assert 0 == group.disk.used_slots


@pytest.mark.parametrize("damage", ["error", "short read"])
def test_what_cannot_be_read_is_a_miss_and_can_be_stored_anew(store: Store, io: FaultyIo, damage: str) -> None:
    for prompt in PROMPTS:
        store_prompt(store, NAMESPACE, prompt)
    # What lies on disk alone; which prompt that is depends on when each was stored.
    on_disk = next(one for one in PROMPTS if not store.match(NAMESPACE, one, touch=False).host_blocks)
    assert BLOCKS == store.match(NAMESPACE, on_disk).blocks
    if damage == "error":
        io.fail(IoCall.READ, errno.EIO, times=ALWAYS)
    else:
        io.shorten(IoCall.READ, 100, times=ALWAYS)
    assert 0 == verified_blocks(store, NAMESPACE, on_disk)
    io.heal()
    assert BLOCKS > store.match(NAMESPACE, on_disk).blocks
    assert 0 == store_prompt(store, NAMESPACE, on_disk).refused_blocks
    assert BLOCKS == verified_blocks(store, NAMESPACE, on_disk)
    assert 0 == store.stats().leases


def test_a_clear_that_cannot_be_made_durable_keeps_every_answer_right(store: Store, io: FaultyIo) -> None:
    for prompt in PROMPTS:
        store_prompt(store, NAMESPACE, prompt)
    io.fail(IoCall.SYNC, errno.EIO, times=ALWAYS)
    with pytest.raises(StorageError, match="cannot clear namespace"):
        store.clear(NAMESPACE)
    io.heal()
    assert [BLOCKS] * len(PROMPTS) == [verified_blocks(store, NAMESPACE, prompt) for prompt in PROMPTS]


def test_a_flipped_bit_in_a_sparse_part_shortens_one_match(tmp_path: Path) -> None:
    """Every page of a slab of states is damaged once, each time in a store that is opened anew."""
    with kvstore.open(tmp_path, host_bytes=MIB, disk_bytes=8 * MIB) as store:
        store_prompt(store, NAMESPACE, PROMPTS[0], turn_ends=(20,))
        store.flush()
        number = store._index.space(NAMESPACE).sparse.groups[1].disk.slabs[0].number
    slab = tmp_path / "slabs" / f"slab-{number:08d}.kvs"
    whole = slab.read_bytes()
    found = set()
    for offset in range(4096 + 100, min(len(whole), 10 * 4096), 4096):
        slab.write_bytes(whole[:offset] + bytes([whole[offset] ^ 1]) + whole[offset + 1 :])
        with kvstore.open(tmp_path, host_bytes=MIB, disk_bytes=8 * MIB) as store:
            first = verified_blocks(store, NAMESPACE, PROMPTS[0])
            second = verified_blocks(store, NAMESPACE, PROMPTS[0])
            assert second == (first or 5), offset
            found.add(second)
            store.close()
        slab.write_bytes(whole)
    assert {5, BLOCKS} == found


@pytest.mark.kill
@pytest.mark.parametrize("lines", [2, 5, 9])
def test_after_kill_every_match_is_right_and_what_was_flushed_is_there(tmp_path: Path, lines: int) -> None:
    command = [sys.executable, str(HERE / "writer_process.py"), str(tmp_path), "0", "hybrid"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = [line.split() for line, _ in zip(process.stdout, range(lines), strict=False)]
        process.send_signal(signal.SIGKILL)
    flushed = max((int(number) for word, number in said if word == "flushed"), default=0)
    writer = load_writer()
    with kvstore.open(tmp_path, host_bytes=writer.HOST_BYTES, disk_bytes=writer.DISK_BYTES) as store:
        for index in range(flushed + 30):
            prompt = writer.prompt_at(index, 0)
            found = verified_blocks(store, writer.HYBRID, prompt)
            if index < flushed:
                assert len(prompt) // 4 == found, index
        assert (0, ()) == (store.stats().corrupt_blocks, store.verify().problems)


def load_writer():
    import importlib.util

    spec = importlib.util.spec_from_file_location("writer_process", HERE / "writer_process.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
