"""Evicting by request what is on its way to disk: nobody leases it, so it goes, and stays away."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from kvstore.store import Store, open_store, room
from kvstore.testing.blocks import store_prompt
from kvstore.testing.conformance import BASE, PROMPT
from kvstore.testing.states import STATES, store_state

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


@pytest.mark.parametrize("kind", ["blocks", "states"])
def test_what_is_being_written_to_disk_is_gone_when_its_eviction_returns(tmp_path: Path, kind: str) -> None:
    namespace = BASE if kind == "blocks" else STATES
    with _opened(tmp_path) as store:
        assert store_prompt(store, BASE, PROMPT).blocks if kind == "blocks" else store_state(store, STATES, PROMPT)
        disk = store._index.space(namespace).disk
        assert disk is not None
        is_writing, goes_on, write = threading.Event(), threading.Event(), disk.write

        def write_later(*arguments: object) -> object:
            is_writing.set()
            goes_on.wait()
            return write(*arguments)  # type: ignore[arg-type]

        disk.write = write_later  # type: ignore[assignment,method-assign]
        flush = threading.Thread(target=store.flush)
        flush.start()
        is_writing.wait()
        evicted: list[int] = []
        evict = threading.Thread(target=lambda: evicted.append(store.evict(namespace, PROMPT)))
        evict.start()
        evict.join(0.05)  # were it not to wait, it would be over by now, with nothing evicted
        goes_on.set()
        flush.join()
        evict.join()
        assert evicted[0] > 0
        assert 0 == store.match(namespace, PROMPT).tokens
    with _opened(tmp_path) as store:
        assert 0 == store.match(namespace, PROMPT).tokens


def test_an_eviction_waits_for_one_batch_of_a_flush_and_not_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "_BATCH_BYTES", 1)
    prompts = [[1000 * number, *PROMPT[1:]] for number in range(1, 6)]
    with _opened(tmp_path) as store:
        for prompt in prompts:
            assert store_prompt(store, BASE, prompt).blocks
        disk = store._index.space(BASE).disk
        assert disk is not None
        is_writing, goes_on, write = threading.Semaphore(0), threading.Semaphore(0), disk.write

        def write_later(*arguments: object) -> object:
            is_writing.release()
            goes_on.acquire()
            return write(*arguments)  # type: ignore[arg-type]

        disk.write = write_later  # type: ignore[assignment,method-assign]
        flush = threading.Thread(target=store.flush)
        flush.start()
        is_writing.acquire()
        evicted: list[int] = []
        evict = threading.Thread(target=lambda: evicted.append(store.evict(BASE, prompts[4])))
        evict.start()
        while not store._room.lock.has_waiting:
            pass
        goes_on.release()
        is_writing.acquire()  # the flush is at its second block, and has many before it
        evict.join()
        assert evicted[0] > 0
        goes_on.release(1000)
        flush.join()
        assert [0] + [1] * 4 == sorted(bool(store.match(BASE, prompt).tokens) for prompt in prompts)


def _opened(path: Path) -> Store:
    return open_store(path, host_bytes=4 * MIB, disk_bytes=16 * MIB, free_floor_bytes=0)
