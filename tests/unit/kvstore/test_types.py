from __future__ import annotations

from typing import Any

import pytest

from kvstore.errors import InvalidLayoutError, InvalidNamespaceError
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


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"layers": 0}, "layout.layers is 0"),
        ({"kv_heads": 2.5}, "layout.kv_heads is 2.5"),
        ({"block_tokens": 8192}, "at most 4096"),
        ({"dtype": "float13"}, "expected one of float32"),
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
