"""Blocks of every memory layout of an engine become the packed bytes of the model, and back; others stay."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import InvalidArgumentError, InvalidBufferError, LayoutMismatchError
from kvstore.tiers import device
from kvstore.tiers._core import _copy
from kvstore.tiers.device import PagedKv, open_copier
from kvstore.tiers.device_cpu import gather_blocks, scatter_blocks
from kvstore.tiers.device_pages import PIECE_DTYPE
from kvstore.types import KvLayout

CSRC = Path(device.__file__).with_name("csrc")
BLOCKS = 9
IDS = [4, 0, 8, 5]
TOKENS, HEADS, SIZE = 16, 3, 20


def planes_first(new, dtype):
    layers = [new(2, BLOCKS, TOKENS, HEADS, SIZE, dtype=dtype) for _ in range(3)]
    return PagedKv.planes_first(layers), [(layer[0], layer[1]) for layer in layers]


def blocks_first(new, dtype):
    layers = [new(BLOCKS, 2, TOKENS, HEADS, SIZE, dtype=dtype) for _ in range(3)]
    return PagedKv.blocks_first(layers), [(layer[:, 0], layer[:, 1]) for layer in layers]


def all_layers_in_one(new, dtype):
    whole = new(3, 2, BLOCKS, TOKENS, HEADS, SIZE, dtype=dtype)
    return PagedKv.planes_first(list(whole)), [(layer[0], layer[1]) for layer in whole]


def heads_outside_tokens(new, dtype):
    """An engine's view in the order of another memory, permuted back into that of its own."""
    views = [new(2, BLOCKS, HEADS, TOKENS, SIZE, dtype=dtype).transpose(2, 3) for _ in range(2)]
    layers = [view.transpose(2, 3) for view in views]
    return PagedKv.planes_first(layers), [(layer[0], layer[1]) for layer in layers]


def lists_of_pairs(new, dtype):
    layers = [(new(BLOCKS, TOKENS, HEADS, SIZE, dtype=dtype), new(BLOCKS, TOKENS, HEADS, 7)) for _ in range(3)]
    return PagedKv.of_pieces(layers), layers


def latent(new, dtype):
    layers = [new(BLOCKS, TOKENS, 576, dtype=dtype) for _ in range(3)]
    return PagedKv.latent(layers), [(layer,) for layer in layers]


def fp8_with_scales(new, dtype):
    layers = [new(2, BLOCKS, TOKENS, HEADS, SIZE, dtype=torch.float8_e4m3fn) for _ in range(3)]
    scales = [(new(BLOCKS, TOKENS, HEADS), new(BLOCKS, TOKENS, HEADS)) for _ in range(3)]
    pieces = [(layer[0], layer[1], *pair) for layer, pair in zip(layers, scales, strict=True)]
    return PagedKv.planes_first(layers, scales), pieces


def dense_cache(new, dtype):
    """Heads outside of blocks, as in a cache that is not paged: rows of one block lie far apart."""
    layers = [new(HEADS, BLOCKS, TOKENS, SIZE, dtype=dtype) for _ in range(2)]
    pieces = [(layer.transpose(0, 1), layer.transpose(0, 1)[:, :2]) for layer in layers]
    return PagedKv.of_pieces(pieces), pieces


LAYOUTS = [
    planes_first,
    blocks_first,
    all_layers_in_one,
    heads_outside_tokens,
    lists_of_pairs,
    latent,
    fp8_with_scales,
    dense_cache,
]
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.int8]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gathered_blocks_are_those_of_the_model(layout, dtype, random_tensor, packed):
    pages, tensors = layout(random_tensor, dtype)
    rows = np.full((len(IDS), pages.block_bytes), 0xAB, dtype=np.uint8)
    gather_blocks(pages, IDS, rows, threads=2)
    assert np.array_equal(packed(tensors, IDS), rows)


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout is not dense_cache])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scattered_blocks_are_those_of_the_model_and_others_stay(layout, dtype, random_tensor, packed):
    pages, tensors = layout(random_tensor, dtype)
    others = [i for i in range(BLOCKS) if i not in IDS]
    before = packed(tensors, others)
    rows = np.random.default_rng(1).integers(0, 256, (len(IDS), pages.block_bytes), dtype=np.uint8)
    scatter_blocks(pages, IDS, rows, threads=2)
    assert np.array_equal(rows, packed(tensors, IDS))
    assert np.array_equal(before, packed(tensors, others))


@st.composite
def shapes(draw):
    """Strided memory of one piece: dimensions inside a block in one contiguous run, or in two levels with a gap."""
    blocks, rows, row = draw(st.integers(1, 6)), draw(st.integers(1, 5)), draw(st.integers(1, 40))
    row_gap, block_gap = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    rows_outside = draw(st.booleans())
    return blocks, rows, row, row_gap, block_gap, rows_outside, draw(st.integers(0, 15))


@settings(max_examples=150, deadline=None)
@given(st.lists(shapes(), min_size=1, max_size=4), st.data())
def test_any_strides_round_trip(pieces, data):
    blocks = data.draw(st.integers(1, 6))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    views, memories = zip(*(strided(random, blocks, *piece[1:]) for piece in pieces), strict=True)
    pages = PagedKv.of_pieces([views])
    ids = data.draw(st.lists(st.integers(0, blocks - 1), unique=True))
    expected = np.stack([np.concatenate([view[i].ravel() for view in views]) for i in range(blocks)])
    rows = np.zeros((blocks, pages.block_bytes), dtype=np.uint8)
    gather_blocks(pages, ids, rows[: len(ids)], threads=data.draw(st.integers(1, 3)))
    assert np.array_equal(expected[ids], rows[: len(ids)])

    before = [memory.copy() for memory in memories]
    fresh = random.integers(0, 256, (len(ids), pages.block_bytes), dtype=np.uint8)
    scatter_blocks(pages, ids, fresh)
    expected[ids] = fresh
    assert np.array_equal(expected, np.stack([np.concatenate([v[i].ravel() for v in views]) for i in range(blocks)]))
    for view, memory, old in zip(views, memories, before, strict=True):
        view[...] = 0
        untouched = memory != 0
        assert np.array_equal(old[untouched], memory[untouched])


def strided(random, blocks, rows, row, row_gap, block_gap, rows_outside, offset):
    """A view [blocks, rows, row] of bytes with gaps, and the memory it lies in, none of which is 0."""
    row_stride, block_stride = row + row_gap, rows * (row + row_gap) + block_gap
    if rows_outside:
        block_stride, row_stride = row + row_gap, blocks * (row + row_gap) + block_gap
    size = offset + (blocks - 1) * block_stride + (rows - 1) * row_stride + row
    memory = random.integers(1, 256, size, dtype=np.uint8)
    view = np.lib.stride_tricks.as_strided(memory[offset:], (blocks, rows, row), (block_stride, row_stride, 1))
    return view, memory


def test_rows_may_be_strided_and_named(random_tensor, packed):
    pages, tensors = planes_first(random_tensor, torch.float32)
    wide = np.zeros((7, pages.block_bytes + 40), dtype=np.uint8)
    with open_copier() as copier:
        copier.store(pages, IDS, wide[:, : pages.block_bytes], row_ids=[6, 1, 0, 3]).wait()
    assert np.array_equal(packed(tensors, IDS), wide[[6, 1, 0, 3], : pages.block_bytes])
    assert not wide[[2, 4, 5]].any()
    assert not wide[:, pages.block_bytes :].any()


def test_rows_may_be_a_tensor_of_any_shape(random_tensor, packed):
    pages, tensors = planes_first(random_tensor, torch.float32)
    rows = torch.empty(len(IDS), 3, 2, TOKENS, HEADS, SIZE)
    gather_blocks(pages, torch.tensor(IDS), rows)
    assert np.array_equal(packed(tensors, IDS), rows.reshape(len(IDS), -1).view(torch.uint8).numpy())


@pytest.mark.parametrize("row_bytes", [16 << 10, (16 << 10) - 1, 100_003])
@pytest.mark.parametrize("misaligned", [0, 1, 40])
def test_copies_that_go_around_the_caches_are_whole_and_stay_inside(row_bytes, misaligned, random_tensor):
    """From 16 MiB on; rows that end in the middle of a cache line, and begin there."""
    blocks = (17 << 20) // row_bytes
    tensor = random_tensor(blocks, 3 + row_bytes, dtype=torch.uint8)[:, 3:]
    pages = PagedKv.latent([tensor])
    order = np.random.default_rng(1).permutation(blocks)
    memory = np.full(misaligned + blocks * row_bytes + 64, 0xAB, dtype=np.uint8)
    rows = memory[misaligned : misaligned + blocks * row_bytes].reshape(blocks, row_bytes)
    gather_blocks(pages, order, rows, threads=3)
    assert np.array_equal(tensor.numpy()[order], rows)
    rows ^= 0x5A
    expected = rows.copy()
    scatter_blocks(pages, order, rows, threads=3)
    assert np.array_equal(expected, tensor.numpy()[order])
    assert (memory[:misaligned] == 0xAB).all()
    assert (memory[misaligned + rows.size :] == 0xAB).all()


@pytest.mark.parametrize(
    "sanitizer", ["address,undefined", pytest.param("thread", marks=[pytest.mark.slow, pytest.mark.timeout(300)])]
)
def test_copies_by_several_threads_are_right_under_sanitizers(sanitizer, built):
    flags = ["-O1", "-g", "-pthread", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    source = CSRC / "block_copy.cpp"
    program = built("block_copy_threads.cpp", f"block_copy_{sanitizer[:6]}", source, *flags)
    done = subprocess.run([program], capture_output=True, text=True, check=False, timeout=250)
    assert 0 == done.returncode, done.stdout + done.stderr


def test_the_stub_names_what_the_native_module_has():
    stub = Path(device.__file__).with_name("_copy.pyi").read_text()
    assert set(re.findall(r"^(?:def |class )?([A-Za-z]\w+)[:(]", stub, re.MULTILINE)) == {
        name for name in dir(_copy) if not name.startswith("_")
    }
    for name in ("gather", "scatter"):
        parameters = re.findall(r"(\w+): ", stub.split(f"def {name}(")[1].split(")")[0])
        assert parameters == re.findall(r"(\w+): ", (getattr(_copy, name).__doc__ or "").split(" -> ")[0])


def test_the_native_module_and_the_table_agree():
    assert PIECE_DTYPE.itemsize == _copy.PIECE_BYTES


def test_a_layout_of_the_same_bytes_is_accepted(random_tensor):
    pages, _ = planes_first(random_tensor, torch.float32)
    pages.require_layout(KvLayout(layers=3, kv_heads=HEADS, head_dim=SIZE, dtype="float32"))
    quantised, _ = fp8_with_scales(random_tensor, None)
    quantised.require_layout(KvLayout(layers=3, kv_heads=HEADS, head_dim=SIZE + 4, dtype="uint8"))


def test_a_layout_of_other_bytes_is_refused(random_tensor):
    pages, _ = planes_first(random_tensor, torch.float32)
    with pytest.raises(LayoutMismatchError, match="23040 bytes in 3 layers, but part 0 of the layout has 11520"):
        pages.require_layout(KvLayout(layers=3, kv_heads=HEADS, head_dim=SIZE, dtype="float16"))


BAD_PAGES = {
    "no layer": (lambda: PagedKv.of_pieces([]), "no layer at all"),
    "an empty layer": (lambda: PagedKv.of_pieces([[]]), "a layer without tensors"),
    "a list": (lambda: PagedKv.latent([[1, 2]]), "layer 0, piece 0 is a list, expected a torch tensor"),
    "one dimension": (lambda: PagedKv.latent([torch.zeros(4)]), r"has shape \(4,\), expected \[blocks"),
    "no blocks": (lambda: PagedKv.latent([torch.zeros(0, 4)]), r"with one block at least"),
    "empty blocks": (lambda: PagedKv.latent([torch.zeros(4, 0)]), "nothing in a block"),
    "three planes": (lambda: PagedKv.planes_first([torch.zeros(3, 4, 5)]), r"expected \[2, blocks, ...\]"),
    "planes inside": (lambda: PagedKv.blocks_first([torch.zeros(2, 4, 5)]), r"expected \[blocks, 2, ...\]"),
    "other blocks": (lambda: PagedKv.latent([torch.zeros(4, 5), torch.zeros(3, 5)]), "layer 1, piece 0 has 3 blocks"),
    "scales of other layers": (lambda: PagedKv.latent([torch.zeros(4, 5)], [(), ()]), "for 2 layers, expected 1"),
    "expanded blocks": (lambda: PagedKv.latent([torch.zeros(1, 5).expand(4, 5)]), "overlaps itself"),
    "expanded rows": (lambda: PagedKv.latent([torch.zeros(4, 1, 5).expand(4, 3, 5)]), "they overlap"),
    "two gaps": (lambda: PagedKv.latent([torch.zeros(4, 6, 6, 6)[:, :3, :3, :3]]), "gaps at more than one level"),
    "a permuted view": (lambda: PagedKv.latent([torch.zeros(4, 3, 5, 6).transpose(1, 2)]), "permute it"),
    "sparse": (lambda: PagedKv.latent([torch.zeros(4, 5).to_sparse()]), "lazy or sparse"),
    "conjugated": (lambda: PagedKv.latent([torch.zeros(4, 5, dtype=torch.complex64).conj()]), "lazy or sparse"),
    "objects": (lambda: PagedKv.latent([np.zeros((4, 5), dtype=object)]), "holds references"),
    "backwards": (lambda: PagedKv.latent([np.zeros((4, 5))[::-1]]), "none below 0"),
    "meta": (lambda: PagedKv.latent([torch.zeros(4, 5, device="meta")]), "lies on meta"),
}


@pytest.mark.parametrize("case", BAD_PAGES)
def test_memory_that_cannot_be_described_is_refused_by_name(case):
    make, message = BAD_PAGES[case]
    with pytest.raises(InvalidBufferError, match=message):
        make()


READ_ONLY = np.zeros((2, 20), dtype=np.uint8)
READ_ONLY.setflags(write=False)
ROWS = np.zeros((2, 20), dtype=np.uint8)
BAD_COPIES = {
    "a block too far": ([0, 4], ROWS, "block_ids names 4, expected 0..3"),
    "a negative block": ([0, -1], ROWS, "block_ids names -1"),
    "too few blocks": ([0], ROWS, "1 blocks are named for 2 rows"),
    "fractions": ([0.0, 1.0], ROWS, "expected a flat list of integers"),
    "nested": ([[0, 1]], ROWS, "expected a flat list of integers"),
    "ragged": ([[0], [1, 2]], ROWS, "cannot be read as numbers"),
    "booleans": ([True, False], ROWS, "expected a flat list of integers"),
    "bytes": ([0, 1], bytearray(40), "rows is a bytearray, expected a torch tensor or a numpy array"),
    "flat rows": ([0, 1], np.zeros(40, dtype=np.uint8), r"expected \[blocks, 20 bytes in all\]"),
    "short rows": ([0, 1], np.zeros((2, 19), dtype=np.uint8), "expected 20 contiguous bytes"),
    "rows with gaps": ([0, 1], np.zeros((2, 40), dtype=np.uint8)[:, ::2], "expected 20 contiguous bytes"),
    "overlapping rows": ([0, 1], np.broadcast_to(np.zeros(20, dtype=np.uint8), (2, 20)), "overlap"),
    "read-only rows": ([0, 1], READ_ONLY, "read-only"),
}


@pytest.mark.parametrize("case", BAD_COPIES)
def test_a_copy_that_cannot_be_right_is_refused_and_nothing_written(case):
    block_ids, rows, message = BAD_COPIES[case]
    pages = PagedKv.latent([torch.ones(4, 5)])
    with pytest.raises((InvalidArgumentError, InvalidBufferError), match=message):
        gather_blocks(pages, block_ids, rows)
    assert not np.asarray(rows).any()


def test_a_target_named_twice_is_refused():
    pages = PagedKv.latent([torch.ones(4, 5)])
    gather_blocks(pages, [1, 1], ROWS.copy())
    with pytest.raises(InvalidArgumentError, match="block_ids names a target twice"):
        scatter_blocks(pages, [1, 1], ROWS)
    assert bool((torch.ones(4, 5) == pages.layers[0][0].memory.owner).all())


def test_no_blocks_are_no_work():
    pages = PagedKv.latent([torch.ones(4, 5)])
    gather_blocks(pages, [], np.empty((0, 20), dtype=np.uint8))
    scatter_blocks(pages, np.empty(0, dtype=np.int32), torch.empty(0, 5))
