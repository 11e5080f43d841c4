"""Copies by a GPU give the bytes of the model, in the order of its streams, and hold what they touch until they end."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import torch

from kvstore.errors import InvalidBufferError
from kvstore.tiers.device import CopyOutcome, PagedKv
from kvstore.tiers.device_driver import CudaDriver
from kvstore.tiers.slots import SlotMap

pytestmark = pytest.mark.gpu

BLOCKS = 40
IDS = [5, 1, 39, 20, 0, 7]
# About 0.3 s on the GPUs of 2020 to 2026.
DELAY_CYCLES = 500_000_000
WAYS = {
    "kernel": {"batch_run_bytes_min": 2**31 - 1},
    "kernel on one multiprocessor": {"batch_run_bytes_min": 2**31 - 1, "multiprocessors_max": 1},
    "copy engines": {"batch_run_bytes_min": 1},
}


def planes_first(new):
    layers = [new(2, BLOCKS, 16, 8, 128) for _ in range(3)]
    return PagedKv.planes_first(layers), [(layer[0], layer[1]) for layer in layers]


def blocks_first(new):
    layers = [new(BLOCKS, 2, 16, 8, 128) for _ in range(3)]
    return PagedKv.blocks_first(layers), [(layer[:, 0], layer[:, 1]) for layer in layers]


def lists_of_pairs(new):
    layers = [(new(BLOCKS, 16, 8, 128), new(BLOCKS, 16, 8, 64)) for _ in range(3)]
    return PagedKv.of_pieces(layers), layers


def latent(new):
    layers = [new(BLOCKS, 16, 576) for _ in range(3)]
    return PagedKv.latent(layers), [(layer,) for layer in layers]


def fp8_with_scales(new):
    layers = [new(2, BLOCKS, 16, 8, 128, dtype=torch.float8_e4m3fn) for _ in range(3)]
    scales = [(new(BLOCKS, 16, 8, dtype=torch.float32), new(BLOCKS, 16, 8, dtype=torch.float32)) for _ in range(3)]
    tensors = [(layer[0], layer[1], *some) for layer, some in zip(layers, scales, strict=True)]
    return PagedKv.planes_first(layers, scales), tensors


def heads_outside(new):
    layers = [new(2, 8, BLOCKS, 16, 128).transpose(1, 2) for _ in range(3)]
    return PagedKv.planes_first(layers), [(layer[0], layer[1]) for layer in layers]


def odd_and_misaligned(new):
    memory = new(BLOCKS, 5, 4999, dtype=torch.uint8)
    layers = [(memory[:, :, 1:],), (new(BLOCKS, 3, dtype=torch.uint8),), (new(BLOCKS, 4097, dtype=torch.uint8),)]
    return PagedKv.of_pieces(layers), layers


LAYOUTS = [planes_first, blocks_first, lists_of_pairs, latent, fp8_with_scales, heads_outside, odd_and_misaligned]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_host_copies_are_those_of_the_model_and_others_stay(layout, way, new_copier, random_tensor, packed):
    pages, tensors = layout(random_tensor)
    copier = new_copier(**WAYS[way])
    rows = copier.new_rows(len(IDS) + 2, pages.block_bytes)
    rows[...] = 0xAB
    assert CopyOutcome.COPIED is copier.store(pages, IDS, rows, row_ids=range(1, 7)).wait(60)
    assert np.array_equal(packed(tensors, IDS), rows[1:7])
    assert (rows[[0, 7]] == 0xAB).all()

    others = [i for i in range(BLOCKS) if i not in IDS]
    before = packed(tensors, others)
    rows[1:7] ^= 0x5A
    assert CopyOutcome.COPIED is copier.load(pages, IDS, rows, row_ids=range(1, 7)).wait(60)
    assert np.array_equal(rows[1:7], packed(tensors, IDS))
    assert np.array_equal(before, packed(tensors, others))


@pytest.mark.parametrize("misaligned", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_inside_gpu_memory_are_those_of_the_model(layout, misaligned, new_copier, random_tensor, packed):
    pages, tensors = layout(random_tensor)
    copier = new_copier()
    stride = pages.block_bytes + misaligned
    memory = torch.full((misaligned + len(IDS) * stride,), 0xAB, dtype=torch.uint8, device="cuda:0")
    rows = memory[misaligned:].view(len(IDS), stride)[:, : pages.block_bytes]
    assert CopyOutcome.COPIED is copier.store(pages, IDS, rows).wait(60)
    assert np.array_equal(packed(tensors, IDS), rows.cpu().numpy())
    assert bool((memory[:misaligned] == 0xAB).all())
    backwards = IDS[::-1]
    expected = rows.cpu().numpy()
    assert CopyOutcome.COPIED is copier.load(pages, backwards, rows).wait(60)
    assert np.array_equal(expected, packed(tensors, backwards))


def test_this_driver_takes_batches():
    """Else the way "copy engines" has measured the kernel twice."""
    assert CudaDriver().has_batches


@pytest.mark.parametrize("way", WAYS)
def test_a_store_waits_for_what_the_compute_stream_was_given(way, engine, new_copier, packed):
    pages, tensors = engine
    copier = new_copier(**WAYS[way])
    rows = copier.new_rows(len(IDS), pages.block_bytes)
    warm_up(copier, pages, rows)
    torch.cuda._sleep(DELAY_CYCLES)
    for layer in tensors:
        for tensor in layer:
            tensor.fill_(1.5)
    handle = copier.store(pages, IDS, rows)
    assert CopyOutcome.PENDING is handle.outcome
    assert CopyOutcome.COPIED is handle.wait(60)
    assert (torch.from_numpy(rows).view(torch.bfloat16) == 1.5).all()


@pytest.mark.parametrize("way", WAYS)
def test_a_load_waits_for_what_the_compute_stream_was_given(way, engine, new_copier, packed):
    pages, tensors = engine
    copier = new_copier(**WAYS[way])
    rows = copier.new_rows(len(IDS), pages.block_bytes)
    warm_up(copier, pages, rows)
    rows[...] = 0x3F
    torch.cuda._sleep(DELAY_CYCLES)
    for layer in tensors:
        for tensor in layer:
            tensor.fill_(1.5)
    assert CopyOutcome.COPIED is copier.load(pages, IDS, rows).wait(60)
    assert np.array_equal(rows, packed(tensors, IDS))


def warm_up(copier, pages, rows):
    """Compile and allocate, so that what follows is submitted without a wait."""
    copier.store(pages, IDS, rows).wait(60)
    copier.load(pages, IDS, rows).wait(60)
    torch.cuda.synchronize()


def test_compute_after_record_sees_the_blocks_without_the_host_waiting(engine, new_copier):
    pages, tensors = engine
    copier = new_copier()
    rows = copier.new_rows(len(IDS), pages.block_bytes)
    warm_up(copier, pages, rows)
    torch.from_numpy(rows).view(torch.bfloat16).fill_(2.0)
    handles = copier.load_by_layer(pages, IDS, rows)
    stream = copier.current_stream()
    sums = []
    for handle, layer in zip(handles, tensors, strict=True):
        handle.record(stream)
        sums.append(sum(tensor[IDS].float().sum() for tensor in layer))
    expected = 2.0 * 2 * len(IDS) * 16 * 8 * 128
    assert [expected] * len(tensors) == [float(value) for value in sums]


def test_copies_run_beside_a_stream_that_is_not_theirs(engine, new_copier):
    pages, _ = engine
    copier = new_copier()
    rows = copier.new_rows(len(IDS), pages.block_bytes)
    warm_up(copier, pages, rows)
    idle = torch.cuda.Stream()
    torch.cuda._sleep(4 * DELAY_CYCLES)
    busy = torch.cuda.Event()
    busy.record()
    assert CopyOutcome.COPIED is copier.store(pages, IDS, rows, stream=idle).wait(60)
    assert not busy.query()


def test_a_launched_copy_cannot_be_cancelled_and_holds_until_its_end(engine, new_copier):
    pages, _ = engine
    copier = new_copier()
    rows = copier.new_rows(len(IDS), pages.block_bytes)
    warm_up(copier, pages, rows)
    released = threading.Event()
    hold = type("Hold", (), {"release": lambda self: released.set()})()
    torch.cuda._sleep(DELAY_CYCLES)
    handle = copier.store(pages, IDS, rows, holds=[hold])
    assert (False, False) == (handle.cancel(), released.is_set())
    assert CopyOutcome.COPIED is handle.wait(60)
    assert released.is_set()


def test_cancelling_1000_copies_at_random_moments_loses_and_reuses_nothing(engine, new_copier, packed):
    pages, tensors = engine
    copier = new_copier(copies_max=32)
    expected = packed(tensors, range(BLOCKS))
    rows = copier.new_rows(64, pages.block_bytes)
    slots = SlotMap()
    slots.add(64)
    lock = threading.Lock()
    choose = random.Random(4)
    wrong = []

    class Checked:
        def __init__(self, taken, block_ids):
            self._taken, self._block_ids = taken, block_ids

        def release(self):
            if not np.array_equal(expected[self._block_ids], rows[self._taken]):
                wrong.append(self._block_ids)
            rows[self._taken] = 0xAB
            with lock:
                slots.release(self._taken)

    handles = []
    while len(handles) < 1000:
        with lock:
            taken = slots.take(choose.randint(1, 4))
        if not len(taken) or sum(handle.outcome is CopyOutcome.PENDING for handle in handles[-40:]) >= 30:
            with lock:
                slots.release(taken)
            handles[-1].wait(60)
            continue
        block_ids = choose.sample(range(BLOCKS), len(taken))
        handles.append(copier.store(pages, block_ids, rows, row_ids=taken, holds=[Checked(taken, block_ids)]))
        choose.choice(handles[-3:]).cancel()
    assert {CopyOutcome.COPIED} == {handle.wait(60) for handle in handles}
    assert copier.close()
    assert ([], 64) == (wrong, slots.free_slots)


def test_ordinary_host_memory_is_refused(engine, new_copier):
    pages, _ = engine
    with pytest.raises(InvalidBufferError, match="ordinary host memory"):
        new_copier().store(pages, [0], np.zeros((1, pages.block_bytes), dtype=np.uint8))


def test_gpu_memory_does_not_grow_with_copies(engine, new_copier):
    pages, _ = engine
    copier = new_copier()
    rows = copier.new_rows(len(IDS), pages.block_bytes)
    warm_up(copier, pages, rows)
    before = torch.cuda.memory_allocated()
    for _ in range(200):
        handle = copier.store(pages, IDS, rows)
    handle.wait(60)
    assert copier.close()
    assert before >= torch.cuda.memory_allocated()
