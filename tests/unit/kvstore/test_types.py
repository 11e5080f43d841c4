from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvstore.errors import InvalidLayoutError, InvalidNamespaceError
from kvstore.layer_groups import Recurrent, SequenceState, SlidingWindow
from kvstore.types import MARK_BYTES, KvLayout, Namespace, Root

LLAMA = {"layers": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}


def test_block_bytes_are_exact() -> None:
    assert KvLayout(**LLAMA).block_bytes == 32 * 2 * 8 * 128 * 16 * 2
    latent = KvLayout(layers=61, kv_heads=1, head_dim=576, dtype="bfloat16", block_tokens=64, kv_form="latent")
    assert latent.block_bytes == 61 * 576 * 64 * 2


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ({}, 1),
        ({"tensor_parallel": 4}, 4),
        ({"tensor_parallel": 16}, 8),  # two ranks hold each head; one of them writes it
        ({"pipeline_parallel": 3}, 3),
        ({"tensor_parallel": 2, "pipeline_parallel": 2}, 4),
    ],
)
def test_parts_are_the_ranks_that_write_distinct_bytes(sizes: dict[str, int], parts: int) -> None:
    layout = KvLayout(**LLAMA, **sizes)
    assert layout.part_count == parts
    assert sum(layout.part_sizes) == layout.block_bytes == KvLayout(**LLAMA).block_bytes


def test_pipeline_stages_share_uneven_layers() -> None:
    layout = KvLayout(layers=5, kv_heads=1, head_dim=1, dtype="int8", block_tokens=1, pipeline_parallel=2)
    assert layout.part_sizes == (6, 4)


def test_a_latent_has_a_single_writer() -> None:
    layout = KvLayout(layers=1, kv_heads=1, head_dim=8, dtype="int8", kv_form="latent", tensor_parallel=8)
    assert layout.part_count == 1


WINDOW = SlidingWindow(layers=6, window=100, kv_heads=2, head_dim=64, dtype="float16")
STATE = Recurrent(layers=4, state_bytes=4096, heads=4)
WIDE = Recurrent(layers=4, state_bytes=4096, heads=8)


def test_parts_are_numbered_group_by_group_and_the_dense_ones_come_first() -> None:
    layout = KvLayout(**LLAMA, tensor_parallel=4, pipeline_parallel=2, groups=(WINDOW, STATE))
    assert 8 == layout.part_count
    assert [range(8), range(8, 12), range(12, 20)] == [layout.group_parts(group) for group in (None, 0, 1)]
    assert [None] * 8 + [0] * 4 + [1] * 8 == [layout.group_of(part) for part in range(20)]
    assert KvLayout(**LLAMA).block_bytes == layout.block_bytes
    assert sum(layout.group_sizes(0)) == 6 * 2 * 2 * 64 * 16 * 2
    assert sum(layout.group_sizes(1)) == 4 * 4096


def test_each_part_is_written_by_the_first_rank_that_has_it() -> None:
    layout = KvLayout(**LLAMA, tensor_parallel=4, pipeline_parallel=2, groups=(WINDOW, STATE))
    assert list(range(8)) == [layout.part_of(rank) for rank in range(8)]
    assert [8, None, 9, None, 10, None, 11, None] == [layout.part_of(rank, 0) for rank in range(8)]
    assert [12 + rank for rank in range(8)] == [layout.part_of(rank, 1) for rank in range(8)]
    latent = KvLayout(layers=1, kv_heads=1, head_dim=8, dtype="int8", kv_form="latent", tensor_parallel=8)
    assert (0,) == latent.writers


def test_a_part_set_has_the_parts_of_its_ranks_alone() -> None:
    whole = KvLayout(**LLAMA, tensor_parallel=4, pipeline_parallel=2, groups=(WINDOW,))
    halves = [KvLayout(**LLAMA, tensor_parallel=4, pipeline_parallel=2, groups=(WINDOW,), ranks=ranks)
              for ranks in ((0, 1, 2, 3), (4, 5, 6, 7))]  # fmt: skip
    assert [4, 4] == [half.part_count for half in halves]
    assert whole.block_bytes == sum(half.block_bytes for half in halves)
    assert [(0, 1, 2, 3), (4, 5, 6, 7)] == [half.writers for half in halves]


def test_replicated_heads_have_one_writer_each() -> None:
    layout = KvLayout(**LLAMA, tensor_parallel=32)  # 8 heads, each on 4 ranks
    assert 8 == layout.part_count
    assert tuple(range(0, 32, 4)) == layout.writers
    assert [range(4), range(28, 32)] == [layout.parts[0].ranks, layout.parts[7].ranks]
    assert KvLayout(**LLAMA).block_bytes == layout.block_bytes
    assert (6, 8) == KvLayout(**LLAMA, tensor_parallel=32, ranks=(6, 7, 8, 9)).writers


def test_without_full_attention_a_mark_stands_for_the_dense_parts() -> None:
    layout = KvLayout(**{**LLAMA, "layers": 0}, tensor_parallel=4, pipeline_parallel=2, groups=(WINDOW, STATE))
    assert (1, MARK_BYTES) == (layout.part_count, layout.block_bytes)
    assert [range(1), range(1, 5), range(5, 13)] == [layout.group_parts(group) for group in (None, 0, 1)]
    for ranks in ((1, 2, 3), (4, 5), (7,)):
        half = dataclasses.replace(layout, ranks=ranks)
        assert ranks[0] == half.parts[0].writer
        assert ranks[0] in {part.writer for part in half.parts[1:]}


def test_a_sequence_state_is_one_blob_in_pieces() -> None:
    layout = KvLayout(**LLAMA, block_tokens=1, state=SequenceState(piece_bytes=8192))
    assert (1, 8192, (0,)) == (layout.part_count, layout.block_bytes, layout.writers)


def test_what_all_ranks_replicate_is_written_on_every_node() -> None:
    latent = {"layers": 1, "kv_heads": 1, "head_dim": 8, "dtype": "int8", "kv_form": "latent", "tensor_parallel": 8}
    assert [(0,), (4,)] == [KvLayout(**latent, ranks=ranks).writers for ranks in ((0, 1, 2, 3), (4, 5, 6, 7))]


@pytest.mark.parametrize(
    ("part", "blocks", "needed"),
    [
        (0, 10, range(10)),
        (1, 10, range(3, 10)),  # a window of 100 tokens spans 7 blocks of 16
        (1, 4, range(4)),
        (2, 10, range(9, 10)),
        (2, 0, range(0)),
    ],
)
def test_a_match_needs_the_last_blocks_of_a_window_and_the_state_at_its_end(
    part: int, blocks: int, needed: range
) -> None:
    assert needed == KvLayout(**LLAMA, groups=(WINDOW, STATE)).needed_blocks(part, blocks)


@pytest.mark.parametrize(
    ("group", "change", "problem"),
    [
        (SlidingWindow, {"window": 0}, "window is 0"),
        (SlidingWindow, {"dtype": "int3"}, "expected one of float32"),
        (SlidingWindow, {"kv_form": "latent"}, "expected 1 for the latent form"),
        (SequenceState, {"cut": "middle"}, "cut is 'middle', expected one of any, end"),
        (SequenceState, {"piece_bytes": 5000}, "piece_bytes is 5000, expected a multiple of 4096"),
        (SequenceState, {"piece_bytes": 32 << 20}, "up to 16777216"),
        (SequenceState, {"form": "ä"}, "expected ASCII text"),
        (Recurrent, {"state_bytes": 4097}, "expected a multiple of heads"),
        (Recurrent, {"form": 7}, "form is 7"),
        (Recurrent, {"form": "x" * 1025}, "at most 1024 bytes"),
        (Recurrent, {"layers": True}, "layers is True"),
    ],
)
def test_a_contradictory_group_is_refused(group: type, change: dict[str, Any], problem: str) -> None:
    right = {SlidingWindow: WINDOW, Recurrent: STATE, SequenceState: SequenceState()}[group]
    with pytest.raises(InvalidLayoutError, match=problem):
        dataclasses.replace(right, **change)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"groups": [WINDOW]}, "expected a tuple of SlidingWindow and Recurrent"),
        ({"groups": (WINDOW,) * 9}, "9 groups, expected at most 8"),
        ({"groups": (WINDOW,), "tensor_parallel": 8, "pipeline_parallel": 7}, "6 layers, expected at least"),
        ({"groups": (dataclasses.replace(STATE, state_bytes=9, heads=3),), "tensor_parallel": 2}, "has 3 heads"),
        (
            {"groups": (dataclasses.replace(STATE, heads=8),) * 8, "tensor_parallel": 8, "pipeline_parallel": 4},
            "288 parts",
        ),
        ({"ranks": (1, 0), "tensor_parallel": 4}, "in ascending order"),
        ({"ranks": (4,), "tensor_parallel": 4}, "ranks from 0 to 3"),
        ({"ranks": (0, 1), "tensor_parallel": 2}, r"and \(\) for all 2"),
        ({"kv_heads": 2.5}, "layout.kv_heads is 2.5"),
        ({"layers": 0}, "layout.layers is 0, expected a whole number from 1 .*; 0 is for layouts whose layers are all"),
        ({"state": "all"}, "layout.state is a str"),
        ({"state": SequenceState()}, "layout.block_tokens is 16, expected 1: a sequence state is one blob"),
        ({"state": SequenceState(), "block_tokens": 1, "tensor_parallel": 2}, "layout.tensor_parallel is 2"),
        ({"state": SequenceState(), "block_tokens": 1, "groups": (WINDOW,)}, "layout.groups is"),
        ({"block_tokens": 8192}, "at most 4096"),
        ({"dtype": "float13"}, "expected one of float32"),
        ({"dtype": [1, 2]}, r"layout.dtype is \[1, 2\], expected one of float32"),
        ({"kv_form": "odd"}, "expected one of split, latent"),
        ({"kv_form": "latent"}, "expected 1 for the latent form"),
        ({"tensor_parallel": 3}, "a divisor or a multiple of kv_heads"),
        ({"pipeline_parallel": 33}, "at most layers"),
        ({"rope": "x" * 1025}, "layout.rope has 1025 bytes"),
        ({"engine": 3}, "expected a str"),
        ({"engine": "\ud800"}, "layout.engine is no Unicode text"),
        ({"layers": 5000, "pipeline_parallel": 5000}, "5000 parts, expected at most 256"),
        ({"engine_layout": -1}, "engine_layout is -1"),
    ],
)
def test_a_contradictory_layout_is_refused(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidLayoutError, match=problem):
        KvLayout(**{**LLAMA, **change})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"model": ""}, "namespace.model is empty"),
        ({"revision": ""}, "namespace.revision is empty"),
        ({"tenant": 1}, "expected a str"),
        ({"secret": b""}, "namespace.secret must be"),
        ({"secret": "text"}, "namespace.secret must be"),
        ({"layout": None}, "expected a KvLayout"),
    ],
)
def test_an_incomplete_namespace_is_refused(change: dict[str, Any], problem: str) -> None:
    fields = {"model": "m", "revision": "r", "layout": KvLayout(**LLAMA)}
    with pytest.raises(InvalidNamespaceError, match=problem):
        Namespace(**{**fields, **change})


def test_secrets_and_salts_are_never_printed() -> None:
    namespace = Namespace(model="m", revision="r", layout=KvLayout(**LLAMA), secret=b"hidden")
    assert "hidden" not in repr(namespace)
    assert "hidden" not in repr(Root(salt="hidden"))


def test_an_oversize_salt_is_refused() -> None:
    with pytest.raises(InvalidNamespaceError, match=r"root\.salt has 1025 bytes"):
        Root(salt="x" * 1025)
