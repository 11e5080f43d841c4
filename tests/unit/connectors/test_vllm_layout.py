"""Which engines of vLLM are served, and as what layout; read from objects with the attributes of vLLM's own."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from kvstore.connectors.common import UnsupportedModelError
from kvstore.connectors.vllm.layout import describe_layout, find_revision, rank_layout, rank_part
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


@pytest.mark.parametrize(
    ("said", "engine", "cache"),
    [
        ("2 groups of cache layers", {}, cache_of(FullAttentionSpec(), SlidingWindowSpec())),
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
