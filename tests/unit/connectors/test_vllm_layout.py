"""Which engines of vLLM are served, and as what layout; read from objects with the attributes of vLLM's own."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from kvstore.connectors.common import UnsupportedModelError
from kvstore.connectors.vllm.layout import (
    cache_groups,
    describe_layout,
    find_revision,
    rank_layout,
    rank_part,
    token_shape,
)
from kvstore.types import KvLayout


@dataclass
class FullAttentionSpec:
    block_size: int = 16
    num_kv_heads: int = 4
    head_size: int = 64
    head_size_v: int = 64
    dtype: str = "torch.bfloat16"
    page_size_padded: int | None = None
    num_head_slots: int | None = None
    state_content_bytes: int | None = None
    tokens_per_state: int = 1
    non_causal: bool = False
    kv_quant_mode: int = 0


@dataclass
class SlidingWindowSpec(FullAttentionSpec):
    sliding_window: int = 128


@dataclass
class MambaSpec(FullAttentionSpec):
    pass


@dataclass
class MLAAttentionSpec(FullAttentionSpec):
    num_kv_heads: int = 1
    head_size: int = 576
    head_size_v: int = 0


@dataclass
class HfConfig:
    rope_parameters: dict = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 1e5})
    _name_or_path: str = "somewhere"
    hidden_size: int = 256

    def to_dict(self):
        return dict(vars(self))


def cache_of(*specs):
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=["layer 0", "layer 1"]) for spec in specs]
    return SimpleNamespace(kv_cache_groups=groups, num_blocks=10)


def engine_of(path="nowhere", **changes):
    plain = {
        "parallel_config": SimpleNamespace(
            tensor_parallel_size=2,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        "speculative_config": None,
        "cache_config": SimpleNamespace(cache_dtype="auto"),
        "load_config": SimpleNamespace(load_format="auto"),
        "model_config": SimpleNamespace(
            get_total_num_kv_heads=lambda: 8,
            hf_text_config=HfConfig(),
            dtype="torch.bfloat16",
            quantization=None,
            model=str(path),
            revision=None,
        ),
    }
    return SimpleNamespace(**plain | changes)


def test_an_engine_of_full_attention_has_a_layout_with_a_part_for_each_rank():
    layout = describe_layout(engine_of(), cache_of(FullAttentionSpec()))
    assert layout == KvLayout(
        layers=2,
        kv_heads=8,
        head_dim=64,
        dtype="bfloat16",
        block_tokens=16,
        axis_order="LHTKD",
        rope='{"rope_theta": 100000.0, "rope_type": "default"}',
        quantisation="auto",
        tensor_parallel=2,
        engine="vllm",
    )
    assert [0, 1] == [rank_part(layout, rank) for rank in range(2)]
    assert [layout.part_bytes(part) for part in range(2)] == [rank_layout(layout).block_bytes] * 2


def test_ranks_that_hold_the_same_heads_have_the_same_part():
    layout = KvLayout(layers=2, kv_heads=2, head_dim=8, dtype="float16", tensor_parallel=4)
    assert [0, 0, 1, 1] == [rank_part(layout, rank) for rank in range(4)]
    assert (0, 2) == layout.writers
    assert layout.part_bytes(0) == rank_layout(layout).block_bytes


def test_layers_with_a_window_are_a_group_of_the_layout_behind_full_attention():
    cache = cache_of(SlidingWindowSpec(), FullAttentionSpec(), SlidingWindowSpec(sliding_window=64))
    layout = describe_layout(engine_of(), cache)
    assert [(group.window, group.kv_heads, group.layers) for group in layout.groups] == [(128, 8, 2), (64, 8, 2)]
    assert [(group.table, group.group) for group in cache_groups(cache)] == [(1, None), (0, 0), (2, 1)]
    assert [rank_part(layout, 1, group) for group in (None, 0, 1)] == [1, 3, 5]
    assert rank_layout(layout).part_bytes(1) == layout.part_bytes(2)


def test_latents_are_one_head_that_one_rank_writes():
    layout = describe_layout(engine_of(), cache_of(MLAAttentionSpec()))
    assert (layout.kv_form, layout.kv_heads, layout.head_dim) == ("latent", 1, 576)
    assert ([rank_part(layout, rank) for rank in range(2)], layout.writers) == ([0, 0], (0,))
    assert token_shape(layout) == (1, 576)


@pytest.mark.parametrize(
    ("said", "engine", "cache"),
    [
        ("2 groups of cache layers", {}, cache_of(FullAttentionSpec(), FullAttentionSpec())),
        ("MambaSpec", {}, cache_of(FullAttentionSpec(), MambaSpec())),
        ("latent layers beside", {}, cache_of(MLAAttentionSpec(), SlidingWindowSpec())),
        ("block_size 32, expected 16", {}, cache_of(FullAttentionSpec(), SlidingWindowSpec(block_size=32))),
        ("9 groups", {}, cache_of(FullAttentionSpec(), *[SlidingWindowSpec() for _ in range(9)])),
        ("SlidingWindowSpec", {}, cache_of(SlidingWindowSpec())),
        ("dtype uint8", {}, cache_of(FullAttentionSpec(dtype="torch.uint8"))),
        ("is quantised", {}, cache_of(FullAttentionSpec(kv_quant_mode=1))),
        ("page_size_padded 4096", {}, cache_of(FullAttentionSpec(page_size_padded=4096))),
        ("head_size_v 32", {}, cache_of(FullAttentionSpec(head_size_v=32))),
        (
            "pipeline_parallel_size is 2",
            {"parallel_config": SimpleNamespace(pipeline_parallel_size=2)},
            cache_of(FullAttentionSpec()),
        ),
        ("'eagle'", {"speculative_config": SimpleNamespace(method="eagle")}, cache_of(FullAttentionSpec())),
    ],
)
def test_an_engine_that_cannot_be_served_is_refused_with_the_reason(said, engine, cache):
    with pytest.raises(UnsupportedModelError, match=said):
        describe_layout(engine_of(**engine), cache)


def test_a_rope_whose_keys_depend_on_the_length_is_refused():
    engine = engine_of()
    engine.model_config.hf_text_config = HfConfig(rope_parameters={"rope_type": "dynamic"})
    with pytest.raises(UnsupportedModelError, match="rope type 'dynamic'"):
        describe_layout(engine, cache_of(FullAttentionSpec()))


def test_the_revision_depends_on_weights_version_and_configuration_but_not_on_where_they_lie(tmp_path):
    seen = []
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"weights")
        engine = engine_of(tmp_path / name)
        engine.model_config.hf_text_config._name_or_path = name
        seen.append(find_revision(engine, "0.32.0"))
    assert seen[0] == seen[1]
    assert seen[0] != find_revision(engine, "0.33.0")
    engine.model_config.hf_text_config.hidden_size = 512
    assert seen[0] != find_revision(engine, "0.32.0")


def test_weights_without_files_need_a_name():
    dummies = engine_of(load_config=SimpleNamespace(load_format="dummy"))
    for engine in (engine_of(), dummies):
        with pytest.raises(UnsupportedModelError, match='"revision"'):
            find_revision(engine, "0.32.0")
