"""Pins outlive the process that placed them, however it ends; what was on disk is pinned again at its first use."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from kvstore.errors import StorageFormatError
from kvstore.store import Store, open_store
from kvstore.store.pin_records import PinnedEnd, PinRecord, kept_depths, pack_pins, unpack_pins
from kvstore.testing.blocks import store_prompt
from kvstore.testing.conformance import BASE, LAYOUT, PROMPT
from kvstore.testing.manual_clock import ManualClock
from kvstore.testing.states import STATES, store_state

MIB = 1 << 20
OTHERS = [[1000 * number, *PROMPT[1:]] for number in range(1, 120)]


def opened(path: Path, clock: ManualClock | None = None) -> Store:
    return open_store(path, host_bytes=MIB, disk_bytes=4 * MIB, free_floor_bytes=0, clock=clock or ManualClock())


def crowd(store: Store) -> None:
    """Store more than host and disk hold, so that whatever may leave has left."""
    for number, prompt in enumerate(OTHERS):
        store_prompt(store, BASE, prompt)
        if number % 8 == 7:
            store.flush()
    assert store.stats().evicted_blocks["disk"]


def test_a_pinned_prefix_stays_over_a_restart_and_no_longer_than_its_pin(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store_prompt(store, BASE, PROMPT)
        pin = store.pin(BASE, PROMPT)
    with opened(tmp_path) as store:
        assert pin.blocks == store.match(BASE, PROMPT).blocks
        assert 1 == store.stats().pins
        crowd(store)
        assert pin.blocks == store.match(BASE, PROMPT).blocks
        assert store.pin(BASE, PROMPT).pin_id > pin.pin_id
        assert store.unpin(pin.pin_id)
        assert not store.unpin(pin.pin_id)
    with opened(tmp_path) as store:
        store.match(BASE, PROMPT)
        assert 1 == store.stats().pins


def test_a_pin_whose_time_is_over_is_not_placed_again(tmp_path: Path) -> None:
    clock = ManualClock()
    with opened(tmp_path, clock) as store:
        store_prompt(store, BASE, PROMPT)
        store.pin(BASE, PROMPT, ttl_seconds=100)
        store.pin(BASE, PROMPT, ttl_seconds=300)
    clock.advance(200)
    with opened(tmp_path, clock) as store:
        store.match(BASE, PROMPT)
        assert 1 == store.stats().pins
        clock.advance(101)
        assert 0 == store.stats().pins
    assert [] == list((tmp_path / "policy").glob("*.pins"))


def test_a_pinned_state_is_pinned_again(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        assert store_state(store, STATES, PROMPT)
        pin = store.pin(STATES, PROMPT)
    with opened(tmp_path) as store:
        assert pin.blocks == store.match(STATES, PROMPT).tokens
        assert 1 == store.stats().pins
        assert 0 == store.evict(STATES, PROMPT)


def test_what_is_left_of_a_pinned_prefix_is_pinned(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store_prompt(store, BASE, PROMPT)
        store.flush()
        longer = [*PROMPT, *range(5000, 5000 + 20 * LAYOUT.block_tokens)]
        store_prompt(store, BASE, longer)
        pin = store.pin(BASE, longer)
        store._flush = lambda: None  # type: ignore[method-assign]  # what was stored last never reaches the disk
    with opened(tmp_path) as store:
        found = store.match(BASE, longer).blocks
        assert 0 < found < pin.blocks
        assert 1 == store.stats().pins
        assert found > store.evict(BASE, PROMPT)


def test_clear_ends_pins_for_good(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store_prompt(store, BASE, PROMPT)
        store.pin(BASE, PROMPT)
        store.clear(BASE)
        store_prompt(store, BASE, PROMPT)
    with opened(tmp_path) as store:
        assert store.match(BASE, PROMPT).blocks
        assert 0 == store.stats().pins


@pytest.mark.parametrize("damage", [b"", b"KVSPINS\0", b"\xff" * 100])
def test_a_damaged_file_costs_the_pins_alone(tmp_path: Path, damage: bytes) -> None:
    with opened(tmp_path) as store:
        store_prompt(store, BASE, PROMPT)
        store.pin(BASE, PROMPT)
    (path,) = (tmp_path / "policy").glob("*.pins")
    path.write_bytes(damage)
    with opened(tmp_path) as store:
        assert store.match(BASE, PROMPT).blocks
        assert (0, 1) == (store.stats().pins, store.stats().disk_faults["refused_snapshot"])


def test_a_pin_that_ended_stays_ended_where_the_file_has_no_room_for_another(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store_prompt(store, BASE, PROMPT)
        pins = [store.pin(BASE, PROMPT).pin_id for _ in range(80)]
        for pin in pins[:5]:
            assert store.unpin(pin)
        assert store._disk.pin_files.file_bytes <= store._disk.pin_files.bytes_max
    with opened(tmp_path) as store:
        store.match(BASE, PROMPT)
        kept = [pin for pin in pins if store.unpin(pin)]
        assert 0 == store.stats().pins
    assert kept
    assert set() == {*kept} & {*pins[:5]}


def test_ids_of_many_pins_are_those_of_no_pin_of_a_later_start(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store_prompt(store, BASE, PROMPT)
        first = store.pin(BASE, PROMPT).pin_id
        store._pins._next_id = count(first + (1 << 20))  # after a million pins that came and went
        last = store.pin(BASE, PROMPT).pin_id
    with opened(tmp_path) as store:
        store.match(BASE, PROMPT)
        new = store.pin(BASE, PROMPT).pin_id
        assert 3 == store.stats().pins
        assert [True] * 3 == [store.unpin(pin) for pin in (first, last, new)]
        assert store.evict(BASE, PROMPT)


def test_pins_of_a_namespace_that_was_given_up_go_with_its_blocks(tmp_path: Path) -> None:
    other = replace(BASE, model="of another run")
    with opened(tmp_path) as store:
        store_prompt(store, other, PROMPT)
        store.pin(other, PROMPT)
    with opened(tmp_path) as store:
        for number in range(400):
            store_prompt(store, BASE, [1000 * number, *PROMPT[1:]])
            if number % 8 == 7:
                store.flush()
        assert 0 == store.match(other, PROMPT).blocks
        assert 0 == store._disk.pin_files.file_bytes
        store_prompt(store, other, PROMPT)
    with opened(tmp_path) as store:
        store.match(other, PROMPT)
        assert 0 == store.stats().pins


PINNING = """
import sys
from pathlib import Path
from kvstore.store import open_store
from kvstore.testing.blocks import store_prompt
from kvstore.testing.conformance import BASE, PROMPT
store = open_store(Path(sys.argv[1]), host_bytes=1 << 20, disk_bytes=4 << 20, free_floor_bytes=0)
store_prompt(store, BASE, PROMPT)
store.flush()
while True:
    pin = store.pin(BASE, PROMPT)
    print(pin.pin_id, flush=True)
    if int(sys.argv[2]) < pin.pin_id % 1000:
        store.unpin(pin.pin_id - 3)
"""


@pytest.mark.kill
@pytest.mark.parametrize("lines", [1, 2, 7])
def test_a_kill_at_any_moment_leaves_each_pin_that_was_answered(tmp_path: Path, lines: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PINNING, str(tmp_path), "1000"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process.stdout:
        for _ in range(lines):
            process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
        answered = lines + len(process.stdout.readlines())
    process.wait()
    with opened(tmp_path) as store:
        assert store.match(BASE, PROMPT).blocks
        assert store.stats().pins in (answered, answered + 1)


def test_the_file_of_pins_is_as_documented() -> None:
    ns_id = b"n" * 16
    pins = [
        PinRecord(7, 1e9, (PinnedEnd(9, b"k" * 16), PinnedEnd(2, b"j" * 16))),
        PinRecord(8, float("inf"), (PinnedEnd(1, b"i" * 16),)),
    ]
    packed = pack_pins(ns_id, pins)
    assert 32 + 2 * 24 + 3 * 24 + 8 == len(packed)
    assert pins == unpack_pins(packed, ns_id)
    for position in range(len(packed)):
        damaged = bytearray(packed)
        damaged[position] ^= 1
        with pytest.raises(StorageFormatError):
            unpack_pins(bytes(damaged), ns_id)
    with pytest.raises(StorageFormatError, match="it is of namespace"):
        unpack_pins(packed, b"m" * 16)


def test_a_record_has_the_whole_depth_first_and_few_more() -> None:
    assert [] == kept_depths(0)
    assert [3, 2, 1] == kept_depths(3)
    assert [800, 700, 600, 500, 400, 300, 200, 100] == kept_depths(800)
