"""The file of a policy snapshot: read back as it was written by its owner alone, refused by name by all others."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import StorageFormatError
from kvstore.store.snapshot import DOWN_SECONDS_MAX, Moment, PolicySnapshot, SnapshotOwner, unpack_snapshot

OWNER = SnapshotOwner("survival", bytes(range(16)), 16)
SNAPSHOT = PolicySnapshot(OWNER, Moment(1 << 46, 10**15), 2**64 - 1, b"tables" * 9, b"runs" * 10, b"ghosts" * 5)
SECOND = 1_000_000


@given(st.binary(max_size=99), st.binary(max_size=99), st.binary(max_size=99), st.integers(0, 2**64 - 1))
def test_what_was_packed_is_unpacked(tables: bytes, runs: bytes, ghosts: bytes, hash_seed: int) -> None:
    snapshot = PolicySnapshot(OWNER, Moment(5, 7), hash_seed, tables, runs, ghosts)
    assert snapshot == unpack_snapshot(snapshot.pack(), OWNER)


def test_every_flipped_byte_is_refused() -> None:
    packed = SNAPSHOT.pack()
    for place in range(len(packed)):
        damaged = bytearray(packed)
        damaged[place] ^= 0x10
        with pytest.raises(StorageFormatError, match=r"no snapshot|format version|damaged"):
            unpack_snapshot(bytes(damaged), OWNER)


def test_every_cut_and_every_tail_is_refused() -> None:
    packed = SNAPSHOT.pack()
    for cut in [*(packed[:length] for length in range(len(packed))), packed + b"\0", packed + packed]:
        with pytest.raises(StorageFormatError, match=r"no snapshot|damaged"):
            unpack_snapshot(cut, OWNER)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"policy": "lru"}, "policy 'survival'.* expected policy 'lru'"),
        ({"ns_id": b"x" * 16}, f"namespace {OWNER.ns_id.hex()}.* expected .*{(b'x' * 16).hex()}"),
        ({"block_tokens": 32}, "blocks of 16 tokens, expected .*blocks of 32"),
    ],
)
def test_that_of_another_owner_is_refused_by_name(change: dict[str, object], told: str) -> None:
    with pytest.raises(StorageFormatError, match=told):
        unpack_snapshot(SNAPSHOT.pack(), dataclasses.replace(OWNER, **change))


@pytest.mark.parametrize("tick", [1 << 48, 2**64 - 1])
def test_a_moment_after_all_ticks_is_refused(tick: int) -> None:
    packed = dataclasses.replace(SNAPSHOT, taken=Moment(tick, 10**15)).pack()
    with pytest.raises(StorageFormatError, match=f"taken at tick {tick}, expected at most {2**48 - 1}"):
        unpack_snapshot(packed, OWNER)


def test_a_newer_version_is_refused_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.store.snapshot.SNAPSHOT_VERSION", 2)
    packed = SNAPSHOT.pack()
    monkeypatch.undo()
    with pytest.raises(StorageFormatError, match="format version 2, this kvstore reads 1"):
        unpack_snapshot(packed, OWNER)


def test_ages_include_the_time_in_between() -> None:
    saved = Moment.at(900 * SECOND, 5000.0)
    now = Moment.at(2000 * SECOND, 5060.0)
    assert (now.tick - 60 * SECOND) - saved.tick == saved.shift_to(now)


@pytest.mark.parametrize(("unix_seconds", "down_seconds"), [(4000.0, 0), (1e10, DOWN_SECONDS_MAX), (-5.0, 0)])
def test_a_clock_that_was_set_anew_counts_within_limits(unix_seconds: float, down_seconds: int) -> None:
    saved = Moment.at(0, 5000.0)
    assert -down_seconds * SECOND == saved.shift_to(Moment.at(0, unix_seconds))
