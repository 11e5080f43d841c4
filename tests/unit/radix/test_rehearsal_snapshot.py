"""What a tier is rehearsed with comes back in another process: the miniatures, and what they found."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.radix.tree import RadixTree
from kvstore.types import Tier

BLOCK_TOKENS = 64
UNIT_BLOCKS = 2
ROOT = b"r" * 16
SECOND = 1_000_000
CAPACITY = 64


class Disk:
    """A tree over a disk tier of CAPACITY blocks that serves chats."""

    def __init__(self, seed: int = 3) -> None:
        self.tree = RadixTree(BLOCK_TOKENS, ns_key=bytes(16), hash_seed=7, policy="survival")
        self.tick = 0
        self._free = list(range(CAPACITY))
        self._rng = np.random.default_rng(seed)
        self._chats: list[list[int]] = [[1]] * 8
        self._next_block = 10

    def serve(self, requests: int) -> None:
        for _ in range(requests):
            self.tick += SECOND
            chat = int(self._rng.integers(len(self._chats)))
            grown = self._chats[chat] if self._rng.random() < 0.8 else [1]
            new = int(self._rng.integers(1, 7))
            self._chats[chat] = [*grown, *range(self._next_block, self._next_block + new)][:40]
            self._next_block += new
            self.store(np.repeat(np.array(self._chats[chat], dtype=np.uint32), BLOCK_TOKENS))

    def store(self, prompt: np.ndarray) -> None:
        self.tree.touch(self.tree.match(ROOT, prompt), self.tick, prompt.size // BLOCK_TOKENS)
        existing, ids = self.tree.stage(ROOT, prompt, 0, self.tick)
        missing = ids[existing:]
        while len(self._free) < missing.size:
            removed = self.tree.evict(self.tree.take_victims(Tier.DISK, missing.size - len(self._free)), Tier.DISK)
            self._free += removed.slots(Tier.DISK).tolist()
        slots = np.array([self._free.pop() for _ in missing], dtype=np.uint32)
        self.tree.place(missing, Tier.DISK, slots)
        self.tree.release(ids)

    def found_at_other_capacities(self, prompt: np.ndarray) -> list[float]:
        """What one request for this prompt finds in the miniatures of other capacities, more than in the smallest."""
        before = self.tree.rehearsed(Tier.DISK)[2]
        self.tick += SECOND
        self.store(prompt)
        after = self.tree.rehearsed(Tier.DISK)[2]
        found = [now - then for (blocks, then), (_, now) in zip(before, after, strict=True) if blocks != CAPACITY]
        return [each - found[0] for each in found]  # all are off by what the tree itself found, which differs

    def saved(self, requests_between: int = 0) -> tuple[bytes, bytes, bytes]:
        """Tables, runs and ghosts; serves requests between the slices of the tables."""
        takes = (self.tree.save_tables, lambda first: self.tree.save_runs(Tier.DISK, first), self.tree.save_ghosts)
        parts: list[bytes] = []
        for take in takes:
            pieces = []
            first: int | None = 0
            while first is not None:
                piece, first = take(first)
                pieces.append(piece)
                self.serve(requests_between if take == self.tree.save_tables else 0)
            parts.append(b"".join(pieces))
        return parts[0], parts[1], parts[2]


def restored(saved: tuple[bytes, bytes, bytes], tick: int) -> Disk:
    """Another process, whose disk is empty, but which knows what the policy knew."""
    again = Disk()
    again.tick = tick
    again.tree.restore(*saved, shift=0, tick=tick)
    return again


def test_what_was_found_at_other_capacities_is_known_after_a_restart() -> None:
    disk = Disk()
    disk.serve(400)
    again = restored(disk.saved(), disk.tick)
    looked_up, found, capacities = again.tree.rehearsed(Tier.DISK)
    assert disk.tree.rehearsed(Tier.DISK) == (looked_up, found, capacities)
    assert 0 < capacities[0][1] < capacities[4][1] < looked_up


def test_what_is_saved_is_the_same_after_a_restart() -> None:
    disk = Disk()
    disk.serve(400)
    saved = disk.saved()
    assert saved[0] == restored(saved, disk.tick).saved()[0]


def test_miniatures_hold_after_a_restart_what_they_held() -> None:
    disk = Disk()
    disk.serve(400)
    again = restored(disk.saved(), disk.tick)
    prompt = np.repeat(np.array(disk._chats[0], dtype=np.uint32), BLOCK_TOKENS)
    found = [disk.found_at_other_capacities(prompt) for disk in (disk, again)]
    assert found[0] == found[1]
    assert found[0][-1] > 0


def test_requests_between_the_slices_break_nothing() -> None:
    disk = Disk()
    disk.serve(400)
    again = restored(disk.saved(requests_between=7), disk.tick)
    again.serve(200)
    assert [] == again.tree.check_integrity()
    looked_up, _, capacities = again.tree.rehearsed(Tier.DISK)
    assert all(0 <= found <= looked_up for _, found in capacities)


@pytest.fixture(scope="module")
def saved_and_tick() -> tuple[tuple[bytes, bytes, bytes], int]:
    disk = Disk()
    disk.serve(60)
    return disk.saved(), disk.tick


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_damage_is_refused_or_makes_it_estimate_badly_and_nothing_else(
    saved_and_tick: tuple[tuple[bytes, bytes, bytes], int], data: st.DataObject
) -> None:
    (tables, runs, ghosts), tick = saved_and_tick
    damaged = bytearray(tables)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[-data.draw(st.integers(1, min(4000, len(tables))))] = data.draw(st.integers(0, 255))
    with suppress(ValueError):
        again = restored((bytes(damaged), runs, ghosts), tick)
        again.serve(30)
        assert [] == again.tree.check_integrity()


def test_units_that_name_each_other_as_parents_are_forgotten() -> None:
    disk = Disk()
    disk.serve(60)
    tables, runs, ghosts = disk.saved()
    unit_bytes = 2 + 8 + 8 + 1 + 24 + 2 + 1
    units = bytearray(tables[-unit_bytes * 20 :])
    rows = [units[at : at + unit_bytes] for at in range(0, len(units), unit_bytes)]
    assert {b"\xff\xff"} == {bytes(row[:2]) for row in rows}
    for row, other in zip(rows, [*rows[1:], rows[0]], strict=True):
        row[10:19] = other[2:10] + b"\x01"
    again = restored((tables[: -len(units)] + b"".join(rows), runs, ghosts), disk.tick)
    assert len(tables) - len(units) == len(again.saved()[0])
    again.serve(100)
    assert [] == again.tree.check_integrity()


def test_a_tier_that_is_much_smaller_after_a_restart_is_rehearsed_with_a_sample_of_its_own() -> None:
    large = Disk()
    large.tick = SECOND
    large.store(np.arange(1, dtype=np.uint32).repeat(BLOCK_TOKENS))
    blocks = 2 * UNIT_BLOCKS * 4096
    large._free = list(range(1, blocks))
    large.store(np.arange(1, blocks, dtype=np.uint32).repeat(BLOCK_TOKENS))
    large.store(np.arange(7, 20, dtype=np.uint32).repeat(BLOCK_TOKENS))
    assert blocks == large.tree.rehearsed(Tier.DISK)[2][2][0]
    small = restored(large.saved(), large.tick)
    fresh = Disk()
    fresh.tick = large.tick
    for disk in (small, fresh):
        disk.serve(300)
    looked_up, _, expected = fresh.tree.rehearsed(Tier.DISK)
    actual_looked_up, _, actual = small.tree.rehearsed(Tier.DISK)
    assert looked_up == actual_looked_up
    assert [pytest.approx(found, rel=0.3) for _, found in expected] == [found for _, found in actual]
