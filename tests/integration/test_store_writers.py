"""Who wrote a block outlives restarts, crashes and a lost index, and what was dropped for its writer stays away."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import shutil
import signal
from typing import TYPE_CHECKING

import numpy as np
import pytest

import kvstore
from kvstore.store.block_writers import BlockWriters
from kvstore.store.codecs import CodecRule
from kvstore.store.settings import StoreSettings
from kvstore.testing.blocks import store_prompt, verified_blocks
from kvstore.testing.serving import served
from kvstore.testing.states import STATES, store_state
from kvstore.types import KvLayout, Namespace
from kvstore.writers import WriterPage, WriterRun, new_writer, parse_writer, writer_text

if TYPE_CHECKING:
    from pathlib import Path

LAYOUT = KvLayout(layers=2, kv_heads=2, head_dim=32, dtype="float16", block_tokens=4)
NAMESPACE = Namespace(model="model", revision="revision", layout=LAYOUT)
OTHER = dataclasses.replace(NAMESPACE, model="other")
MIB = 1 << 20
GOOD, BAD = 7, 2**64 - 1
GOOD_PROMPT, BAD_PROMPT = list(range(160)), list(range(1000, 1160))
LATER = [*GOOD_PROMPT[:80], *range(2000, 2080)]  # by the bad one, below blocks of the good one
BLOCKS, SHARED = 40, 20


def opened(path: Path, **more: object) -> kvstore.KvStore:
    return kvstore.open(path, host_bytes=4 * MIB, disk_bytes=32 * MIB, free_floor_bytes=0, **more)


def fill(store: kvstore.KvStore, namespace: Namespace = NAMESPACE) -> None:
    store_prompt(store, namespace, GOOD_PROMPT, writer=GOOD)
    store_prompt(store, namespace, BAD_PROMPT, writer=BAD)
    store_prompt(store, namespace, LATER, writer=BAD)
    store.flush()


def fill_and_die(path: Path, *, evict: bool) -> None:
    store = opened(path)
    fill(store)
    if evict:
        store.evict_writer(BAD)
    os.kill(os.getpid(), signal.SIGKILL)


def crashed(path: Path, *, evict: bool) -> None:
    process = multiprocessing.get_context("spawn").Process(target=fill_and_die, args=(path,), kwargs={"evict": evict})
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def lose_index(path: Path) -> None:
    found = [entry for entry in path.rglob("*") if "index" in entry.name]
    assert found
    for entry in found:
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def check_kept(store: kvstore.KvStore) -> None:
    assert store.writers_of(NAMESPACE, GOOD_PROMPT) == (WriterRun(GOOD, BLOCKS),)
    assert store.writers_of(NAMESPACE, LATER) == (WriterRun(GOOD, SHARED), WriterRun(BAD, BLOCKS - SHARED))
    assert store.evict_writer(BAD) == WriterPage(2 * BLOCKS - SHARED, 0)
    check_gone(store)


def check_gone(store: kvstore.KvStore) -> None:
    assert verified_blocks(store, NAMESPACE, GOOD_PROMPT) == BLOCKS
    assert store.match(NAMESPACE, BAD_PROMPT).blocks == 0
    assert store.match(NAMESPACE, LATER).blocks == SHARED
    assert store.evict_writer(BAD) == WriterPage(0, 0)
    assert store.verify().problems == ()


def test_writers_outlive_a_restart(tmp_path: Path):
    with opened(tmp_path) as store:
        fill(store)
    with opened(tmp_path) as store:
        check_kept(store)
    with opened(tmp_path) as store:
        check_gone(store)


@pytest.mark.parametrize("index", ["kept", "lost"])
def test_writers_outlive_a_kill(tmp_path: Path, index: str):
    crashed(tmp_path, evict=False)
    if index == "lost":
        lose_index(tmp_path)
    with opened(tmp_path) as store:
        check_kept(store)


@pytest.mark.parametrize("index", ["kept", "lost"])
def test_what_was_dropped_stays_away_after_a_kill(tmp_path: Path, index: str):
    crashed(tmp_path, evict=True)
    if index == "lost":
        lose_index(tmp_path)
    with opened(tmp_path) as store:
        check_gone(store)


def test_what_nobody_has_used_since_the_start_goes_too(tmp_path: Path):
    with opened(tmp_path) as store:
        fill(store)
        fill(store, OTHER)
    with opened(tmp_path) as store:
        assert store.evict_writer(BAD) == WriterPage(2 * (2 * BLOCKS - SHARED), 0)
        assert store.match(OTHER, BAD_PROMPT).blocks == 0
    with opened(tmp_path) as store:
        check_gone(store)


def test_coded_slots_keep_their_writers(tmp_path: Path):
    pytest.importorskip("blosc2", reason="needs the extra blosc")
    settings = StoreSettings(codecs=(CodecRule(compression="blosc2"),))
    with opened(tmp_path, settings=settings) as store:
        fill(store)
    lose_index(tmp_path)
    with opened(tmp_path, settings=settings) as store:
        check_kept(store)


def test_states_keep_their_writer_over_a_restart(tmp_path: Path):
    with opened(tmp_path) as store:
        store_state(store, STATES, GOOD_PROMPT, writer=BAD)
    with opened(tmp_path) as store:
        assert store.writers_of(STATES, GOOD_PROMPT) == (WriterRun(BAD, len(GOOD_PROMPT)),)
        assert store.evict_writer(BAD).blocks > 0
    with opened(tmp_path) as store:
        assert store.match(STATES, GOOD_PROMPT).tokens == 0


def test_a_client_stores_under_the_id_that_it_was_given(tmp_path: Path):
    with (
        opened(tmp_path / "data") as store,
        served(store, f"unix://{tmp_path}/socket", secrets={}) as address,
        kvstore.connect(address, writer=BAD) as client,
        kvstore.connect(address) as other,
    ):
        store_prompt(client, NAMESPACE, BAD_PROMPT)
        store_prompt(other, NAMESPACE, GOOD_PROMPT)
        assert other.writer not in (0, BAD, store.writer)
        assert store.writers_of(NAMESPACE, BAD_PROMPT) == (WriterRun(BAD, BLOCKS),)
        assert store.writers_of(NAMESPACE, GOOD_PROMPT) == (WriterRun(other.writer, BLOCKS),)


def test_a_step_is_bounded_and_says_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvstore.store.evictions.STEP_BLOCKS", 15)
    with opened(tmp_path) as store:
        fill(store)
        pages = [store.evict_writer(BAD)]
        while pages[-1].remaining_blocks:
            pages.append(store.evict_writer(BAD))
            assert pages[-1].blocks
        assert sum(page.blocks for page in pages) == 2 * BLOCKS - SHARED
        assert len(pages) > 1
        check_gone(store)


def test_the_table_of_writers_answers_as_a_dictionary():
    random = np.random.default_rng(1)
    table, model = BlockWriters(), {}
    for _ in range(200):
        ids = random.choice(5000, size=50, replace=False).astype(np.uint32)
        writer = int(random.integers(1, 12)) << 60
        table.note(ids, writer)
        model.update(dict.fromkeys(ids.tolist(), writer))
    known = np.array(sorted(model), dtype=np.uint32)
    assert table.of(known).tolist() == [model[block] for block in known.tolist()]
    for writer in {*model.values(), 5}:
        assert table.those_of(writer, known).tolist() == [block for block in known.tolist() if model[block] == writer]
    assert table.memory_bytes <= 2.5 * 5000 + 1024


def test_writers_without_blocks_make_room_for_others_in_the_table(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvstore.store.block_writers._WRITERS_MAX", 4)
    table, one = BlockWriters(), np.array([3], dtype=np.uint32)
    for writer in range(1, 50):
        table.note(one, writer)
        assert table.of(one).tolist() == [writer]
    for block_id in range(10, 20):
        table.note(np.array([block_id], dtype=np.uint32), 100 + block_id)
    assert table.of(np.arange(10, 20, dtype=np.uint32)).tolist() == [110, 111, *[0] * 8]


def test_ids_read_as_they_are_written():
    writer = new_writer()
    assert parse_writer(writer_text(writer)) == writer
    for text in ("", "g", "1" * 17, "-1"):
        with pytest.raises(kvstore.InvalidArgumentError, match="writer"):
            parse_writer(text)
