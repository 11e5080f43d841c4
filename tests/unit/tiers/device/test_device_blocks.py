"""Blocks that the engine's process keeps in its device's memory: a pool like the others, and rows for its copies."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.errors import InvalidArgumentError, UnavailableError
from kvstore.testing.patience import ANSWER_SECONDS
from kvstore.tiers.base import SlotRange
from kvstore.tiers.device import CopyOutcome, PagedKv
from kvstore.tiers.device_blocks import DeviceBlocks, DeviceExport, MappedBlocks

SLOTS = 10


@pytest.fixture
def blocks():
    return DeviceBlocks(SLOTS * 64 + 63, 64)


def test_the_capacity_is_cut_into_whole_blocks(blocks):
    assert ((SLOTS, 64), torch.uint8) == (tuple(blocks.rows.shape), blocks.rows.dtype)
    assert ((64,), SLOTS, 0) == (blocks.part_sizes, blocks.free_slots, blocks.used_slots)
    assert (SlotRange(0, SLOTS),) == blocks.ranges()


class PoolModel(RuleBasedStateMachine):
    """Slots handed out and given back, compared with a set of numbers."""

    def __init__(self):
        super().__init__()
        self.blocks = DeviceBlocks(SLOTS * 8, 8)
        self.free = set(range(SLOTS))
        self.taken = []

    @rule(count=st.integers(0, SLOTS + 2))
    def allocate(self, count):
        slots = self.blocks.allocate(count).tolist()
        assert sorted(self.free)[:count] == slots
        self.free -= set(slots)
        self.taken += slots

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def free_some(self, data):
        slots = data.draw(st.lists(st.sampled_from(self.taken), min_size=1, unique=True))
        release = data.draw(st.sampled_from([self.blocks.free, lambda some: self.blocks.hold(some).release()]))
        release(np.array(slots, dtype=np.uint32))
        self.free |= set(slots)
        self.taken = [slot for slot in self.taken if slot not in slots]

    @precondition(lambda self: self.taken)
    @rule()
    def close_in_use(self):
        assert not self.blocks.close()

    @invariant()
    def counts_agree(self):
        assert (len(self.free), len(self.taken)) == (self.blocks.free_slots, self.blocks.used_slots)


TestPoolModel = PoolModel.TestCase
TestPoolModel.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)


def test_blocks_survive_the_way_through_device_memory(copier, blocks, random_tensor, packed):
    layers = [random_tensor(2, 7, 2, 2) for _ in range(2)]
    tensors = [(layer[0], layer[1]) for layer in layers]
    pages = PagedKv.planes_first(layers)
    expected = packed(tensors, [3, 1])
    slots = blocks.allocate(2)
    copier.store(pages, [3, 1], blocks.rows, row_ids=slots).wait(ANSWER_SECONDS)
    for layer in layers:
        layer.zero_()
    loaded = copier.load(pages, [0, 6], blocks.rows, row_ids=slots, holds=[blocks.hold(slots)])
    assert CopyOutcome.COPIED is loaded.wait(ANSWER_SECONDS)
    assert np.array_equal(expected, packed(tensors, [0, 6]))
    assert SLOTS == blocks.free_slots


def test_memory_in_use_is_not_given_back(blocks):
    slots = blocks.allocate(1)
    assert not blocks.close()
    blocks.free(slots)
    assert not blocks.give_back(SlotRange(0, SLOTS - 1))
    assert blocks.close()
    assert blocks.close()
    assert ((), 0, 0) == (blocks.ranges(), blocks.free_slots, len(blocks.rows))
    assert 0 == len(blocks.allocate(1))


@pytest.mark.parametrize(("capacity", "block"), [(10, 0), (10, 11), (0, 1), (-5, 1)])
def test_a_capacity_without_a_whole_block_is_refused(capacity, block):
    with pytest.raises(InvalidArgumentError, match=f"{capacity} bytes hold no block of {block} bytes"):
        DeviceBlocks(capacity, block)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_device_memory_and_sharing_say_what_is_missing(blocks):
    with pytest.raises(UnavailableError, match="sees no GPU"):
        DeviceBlocks(640, 64, "cuda:0")
    with pytest.raises(UnavailableError, match="CPU memory cannot be exported; CUDA IPC needs a GPU"):
        blocks.export()
    with pytest.raises(UnavailableError, match="sees no GPU"):
        MappedBlocks(DeviceExport(b"", b"", 0, 1, 64), "cuda:0")


def test_a_handle_to_memory_is_not_printed():
    assert "secret" not in repr(DeviceExport(b"", b"secret", 0, 1, 64))
