from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvstore.errors import InvalidLayoutError, InvalidNamespaceError
from kvstore.layer_groups import Recurrent, SlidingWindow
from kvstore.types import KvLayout, Namespace, Root

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
        (Recurrent, {"state_bytes": 4097}, "expected a multiple of heads"),
        (Recurrent, {"form": 7}, "form is 7"),
        (Recurrent, {"form": "x" * 1025}, "at most 1024 bytes"),
        (Recurrent, {"layers": True}, "layers is True"),
    ],
)
def test_a_contradictory_group_is_refused(group: type, change: dict[str, Any], problem: str) -> None:
    right = WINDOW if group is SlidingWindow else STATE
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
        ({"layers": 0}, "layout.layers is 0"),
        ({"kv_heads": 2.5}, "layout.kv_heads is 2.5"),
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
