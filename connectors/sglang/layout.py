"""What gives the bytes of SGLang's pages meaning, which its page hashes do not say: one namespace per pool and rank."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvstore.connectors.common import UnsupportedModelError
from kvstore.layer_groups import FIELD_BYTES_MAX
from kvstore.types import BLOCK_TOKENS_MAX, KvForm, KvLayout, Symbols

if TYPE_CHECKING:
    from kvstore.connectors.sglang.pages import HostPages, HostPool

ENGINE = "sglang"
ENGINE_LAYOUT = 1
KV_POOL = "kv"

# Pools of which SGLang stores the last pages before a stop point only: windows, recurrent and compressor states.
TRAILING_POOLS = frozenset(
    {
        "mamba",
        "swa",
        "auxiliary_swa",
        "draft_swa",
        "deepseek_v4_c4_state",
        "deepseek_v4_c4_indexer_state",
        "deepseek_v4_c128_state",
    }
)
# Split over tensor-parallel ranks even where the KV itself is the same on all of them.
_ALWAYS_SHARDED_POOLS = frozenset({"mamba"})

_GEOMETRY = (
    "dtype", "head_num", "head_dim", "v_head_dim", "kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim", "layer_num",
    "target_layer_num", "start_layer", "end_layer", "storage_format_tag", "indexer_dtype", "temporal_dtype",
    "conv_dtype", "num_mamba_layers",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """Which share of the pages this process holds. `replicated`: all tensor-parallel ranks hold the same (MLA)."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    cp_rank: int
    cp_size: int
    replicated: bool

    @classmethod
    def of_config(cls, config: Any) -> Rank:  # noqa: ANN401  # SGLang's HiCacheStorageConfig
        """The rank in SGLang's configuration; raises UnsupportedModelError for one whose pages are shared otherwise."""
        if getattr(config, "dcp_size", 1) != 1:
            raise UnsupportedModelError("decode context parallelism splits pages, and SGLang refuses it here, too")
        return cls(
            tp_rank=config.tp_rank,
            tp_size=config.tp_size,
            pp_rank=config.pp_rank,
            pp_size=config.pp_size,
            cp_rank=getattr(config, "attn_cp_rank", 0),
            cp_size=getattr(config, "attn_cp_size", 1),
            replicated=config.is_mla_model,
        )

    def shares(self, pool_name: str) -> bool:
        """Whether all tensor-parallel ranks have the same pages in this pool; one of them writes these then."""
        return self.replicated and pool_name not in _ALWAYS_SHARDED_POOLS

    def writes(self, pool_name: str) -> bool:
        """Whether this rank is the one that stores the pages of a pool."""
        return not self.shares(pool_name) or self.tp_rank == 0

    def text(self, pool_name: str) -> str:
        """The share of a pool, as it stands in the namespace."""
        tensor = "all" if self.shares(pool_name) else f"{self.tp_rank}/{self.tp_size}"
        return f"tp={tensor} pp={self.pp_rank}/{self.pp_size} cp={self.cp_rank}/{self.cp_size}"


def page_layout(pool_name: str, pool: HostPool, pages: HostPages, rank: Rank) -> KvLayout:
    """The layout of one pool's pages: opaque bytes, told from all others by a text of what SGLang says about them."""
    tokens = pages.page_size
    if not 1 <= tokens <= BLOCK_TOKENS_MAX or pages.page_bytes % tokens:
        tokens = 1  # a snapshot of states, not a number of tokens
    return KvLayout(
        layers=1,
        kv_heads=1,
        head_dim=pages.page_bytes // tokens,
        dtype="uint8",
        block_tokens=tokens,
        kv_form=KvForm.LATENT.value,
        axis_order=_bounded(_describe(pool_name, pool, pages, rank)),
        engine=ENGINE,
        engine_layout=ENGINE_LAYOUT,
        symbols=Symbols.DIGESTS.value,
    )


def _describe(pool_name: str, pool: HostPool, pages: HostPages, rank: Rank) -> str:
    geometry = {name: value for name in _GEOMETRY if (value := getattr(pool, name, None)) is not None}
    sizes = hashlib.blake2b(repr(pages.piece_bytes).encode(), digest_size=8).hexdigest()
    facts = {
        "pool": pool_name,
        "class": type(pool).__name__,
        "layout": getattr(pool, "layout", "?"),
        "page": pages.page_size,
        **geometry,
        "pieces": f"{len(pages.piece_bytes)}:{sizes}",
    }
    return " ".join(f"{name}={value}" for name, value in facts.items()) + " " + rank.text(pool_name)


def _bounded(text: str) -> str:
    """The text, or its beginning and a digest of all of it where it is longer than a field may be."""
    if len(text.encode()) <= FIELD_BYTES_MAX:
        return text
    return f"{text[: FIELD_BYTES_MAX // 8]}... {hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"
