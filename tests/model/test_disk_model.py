"""DiskPool against a dict: whatever happens to the disk, a block is read right or not at all."""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path
from unittest.mock import patch

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.testing.faulty import FaultyIo
from kvstore.tiers import disk_opening
from kvstore.tiers.base import BlockIdentity
from kvstore.tiers.codecs.base import OPAQUE
from kvstore.tiers.codecs.coding import PoolCoding
from kvstore.tiers.codecs.keys import Key
from kvstore.tiers.codecs.none import NONE
from kvstore.tiers.codecs.registry import Pipeline, make_codec
from kvstore.tiers.disk import DiskTier

NS = b"n" * 16
PART_SIZES = (4096, 100)
BLOCK_BYTES = sum(PART_SIZES)
BLOCK_TOKENS = 4
CAPACITY_BYTES = 1 << 20


def identity(number: int) -> BlockIdentity:
    tokens = np.full(BLOCK_TOKENS, number, dtype="<u4").tobytes()
    return BlockIdentity(b"r" * 16, number.to_bytes(16, "big"), (number + 1).to_bytes(16, "big"), tokens)


def row(number: int) -> np.ndarray:
    """Every third block can be compressed."""
    return np.random.default_rng(number).integers(0, 256 if number % 3 else 4, BLOCK_BYTES, dtype=np.uint8)


class OneKey:
    """Keys that do not change."""

    def current(self) -> Key:
        return Key(b"model   ", b"k" * 32)

    def find(self, key_id: bytes) -> Key | None:
        return self.current() if key_id == b"model   " else None

    def is_dropped(self, key_id: bytes) -> bool:
        return False


PIPELINES = st.sampled_from(
    [None, Pipeline(make_codec("blosc2"), False), Pipeline(NONE, True), Pipeline(make_codec("blosc2"), True)]
)


class DiskMachine(RuleBasedStateMachine):
    """`held` maps numbers of stored blocks to slots, `damaged` names blocks whose bytes were changed on disk.

    `flushed` are blocks that a power cut must leave, `ghosts` those that it may bring back.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, int] = {}
        self.empty: set[int] = set()
        self.damaged: set[int] = set()
        self.flushed: set[int] = set()
        self.ghosts: set[int] = set()
        self.next_number = 0
        self.boots = 0
        self.further: list[Path] = []
        self.pipeline: Pipeline | None = None

    @initialize(folders=st.integers(0, 2), pipeline=PIPELINES)
    def start(self, folders: int, pipeline: Pipeline | None) -> None:
        self.pipeline = pipeline
        self.path = Path(tempfile.mkdtemp(prefix="kvstore-model-"))
        self.further = [self.path / f"further{i}" for i in range(folders)]
        self.open()

    def open(self) -> None:
        self.io = FaultyIo()
        with patch.object(disk_opening, "boot_id", lambda: self.boots.to_bytes(16, "big")):
            self.tier = DiskTier.open(
                self.path / "data",
                capacity_bytes=CAPACITY_BYTES,
                further_paths=self.further,
                free_floor_bytes=0,
                io_threads=2,
                io=self.io,
                keys=OneKey(),
            )
        self.pool = self.tier.pool(NS, PART_SIZES, BLOCK_TOKENS)
        self.tier.use_coding(NS, PoolCoding(self.pipeline, (OPAQUE, OPAQUE)))

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.tier.close()
            shutil.rmtree(self.path)

    @rule(count=st.integers(1, 9))
    def store(self, count: int) -> None:
        slots = self.pool.allocate(count)
        numbers = range(self.next_number, self.next_number + len(slots))
        self.next_number += len(slots)
        sources = [np.split(row(number), [PART_SIZES[0]]) for number in numbers]
        stored = self.pool.write(slots, [identity(number) for number in numbers], sources)
        # Where sizes differ the last slots may be too small for some.
        assert stored.all() or (self.pipeline is not None and self.tier.faults["no_slot_of_size"])
        self.pool.free(slots[~stored])
        pairs = zip(numbers, slots.tolist(), stored.tolist(), strict=True)
        self.held |= {number: slot for number, slot, good in pairs if good}

    @rule(pipeline=PIPELINES)
    def change_codec(self, pipeline: Pipeline | None) -> None:
        self.pipeline = pipeline
        self.tier.use_coding(NS, PoolCoding(pipeline, (OPAQUE, OPAQUE)))

    @rule(count=st.integers(1, 3))
    def allocate_without_writing(self, count: int) -> None:
        self.empty |= set(self.pool.allocate(count).tolist())

    @precondition(lambda self: self.held or self.empty)
    @rule(data=st.data(), for_good=st.booleans())
    def free(self, data: st.DataObject, for_good: bool) -> None:
        chosen = data.draw(st.lists(st.sampled_from([*self.held.values(), *sorted(self.empty)]), unique=True))
        if for_good:
            assert self.pool.free_for_good(np.array(chosen, dtype=np.uint32))
        else:
            self.pool.free(np.array(chosen, dtype=np.uint32))
        self.empty -= set(chosen)
        gone = {number for number, slot in self.held.items() if slot in chosen}
        self.held = {number: slot for number, slot in self.held.items() if number not in gone}
        self.ghosts |= set() if for_good else gone
        self.damaged &= {*self.held, *self.ghosts}
        self.flushed -= gone

    @precondition(lambda self: self.held)
    @rule(data=st.data(), part=st.sampled_from([None, 0, 1]))
    def read(self, data: st.DataObject, part: int | None) -> None:
        numbers = data.draw(st.lists(st.sampled_from(sorted(self.held)), min_size=1, unique=True))
        start, stop = {None: (0, BLOCK_BYTES), 0: (0, PART_SIZES[0]), 1: (PART_SIZES[0], BLOCK_BYTES)}[part]
        rows = np.zeros((len(numbers), stop - start), dtype=np.uint8)
        slots = np.array([self.held[number] for number in numbers], dtype=np.uint32)
        good = self.pool.read(slots, [identity(number) for number in numbers], rows, part=part)
        for position, number in enumerate(numbers):
            assert good[position] or number in self.damaged
            if good[position]:
                np.testing.assert_array_equal(row(number)[start:stop], rows[position])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def read_another_block(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.held.values())))
        other = identity(self.next_number + 1)
        rows = np.zeros((1, BLOCK_BYTES), dtype=np.uint8)
        assert not self.pool.read(np.array([slot], dtype=np.uint32), [other], rows).any()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.held)))
        slot = self.held[number]
        slot_range, slab = next(
            (item, slab)
            for item, slab in zip(self.pool.ranges(), self.pool.slabs, strict=True)
            if item.first <= slot < item.first + item.count
        )
        start = slab.slot_offset(slot - slot_range.first)
        offset = data.draw(st.integers(0, slab.geometry.slot_bytes - 1))
        with slab.path.open("r+b") as file:
            file.seek(start + offset)
            byte = file.read(1)[0]
            file.seek(start + offset)
            file.write(bytes([byte ^ 1 << data.draw(st.integers(0, 7))]))
        self.damaged.add(number)

    @rule(limit_bytes=st.sampled_from([1, 50_000, 1 << 30]))
    def scrub(self, limit_bytes: int) -> None:
        after: int | None = 0
        seen, bad = 0, set()
        while after is not None:
            step = self.tier.scrub(after, limit_bytes)
            seen, after = seen + step.blocks, step.next_after
            bad |= {block.slot for block in step.bad}
        assert len(self.held) == seen
        assert bad <= {self.held[number] for number in self.damaged & set(self.held)}

    @rule()
    def give_back_what_is_empty(self) -> None:
        used = {*self.held.values(), *self.empty}
        for slot_range in self.pool.ranges():
            numbers = set(range(slot_range.first, slot_range.first + slot_range.count))
            assert (not numbers & used) == self.pool.give_back(slot_range)

    @rule()
    def clear(self) -> None:
        self.tier.clear(NS)
        self.pool.free(np.array(list(self.held.values()), dtype=np.uint32))
        self.held.clear()
        self.damaged.clear()
        self.flushed.clear()
        self.ghosts.clear()

    @rule()
    def flush(self) -> None:
        self.tier.flush()
        self.flushed = set(self.held)
        self.ghosts.clear()

    @rule(seed=st.integers(0, 1 << 16))
    def lose_power(self, seed: int) -> None:
        self.io.cut_power(random.Random(seed))
        self.tier.close()
        self.boots += 1
        self.open()
        self.held, slots = {}, self.held
        for block in self.tier.recovered(NS):
            number = int.from_bytes(block.identity.parent_key, "big")
            assert number in slots or number in self.ghosts
            self.held[number] = block.slot
        assert self.flushed - set(self.held) <= self.damaged
        rows = np.zeros((1, BLOCK_BYTES), dtype=np.uint8)
        for number, slot in self.held.items():
            if self.pool.read(np.array([slot], dtype=np.uint32), [identity(number)], rows).all():
                np.testing.assert_array_equal(row(number), rows[0])
            else:
                assert number not in self.flushed or number in self.damaged
                self.damaged.add(number)
        self.empty.clear()
        self.damaged &= set(self.held)
        # What was found is on the medium, but for a damaged block that was there by chance.
        self.flushed = set(self.held) - self.damaged
        self.ghosts.clear()

    @rule(lose_index=st.booleans())
    def reopen(self, lose_index: bool) -> None:
        self.tier.close()
        if lose_index:
            shutil.rmtree(self.path / "data" / "index")
        self.open()
        recovered = {int.from_bytes(block.identity.parent_key, "big"): block.slot for block in self.tier.recovered(NS)}
        assert set(recovered) <= set(self.held)
        assert set(self.held) - set(recovered) <= self.damaged
        self.held = recovered
        self.damaged &= set(recovered)
        self.empty.clear()
        self.flushed = set(recovered)
        self.ghosts.clear()

    @invariant()
    def accounts_agree(self) -> None:
        if not hasattr(self, "tier"):
            return
        assert len(self.held) + len(self.empty) == self.pool.used_slots
        real_bytes = sum(path.stat().st_blocks * 512 for path in self.path.rglob("*") if path.is_file())
        assert real_bytes <= CAPACITY_BYTES
        assert 0 == self.tier.busy_buffers


TestDiskMachine = DiskMachine.TestCase
TestDiskMachine.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)
