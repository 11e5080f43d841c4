"""The values that every part of kvstore speaks of: layouts, namespaces, roots, matches. Frozen, without behaviour."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from kvstore.errors import InvalidArgumentError, InvalidLayoutError, InvalidNamespaceError

if TYPE_CHECKING:
    from collections.abc import Collection

    import numpy as np
    from numpy.typing import NDArray

    TokenArray = NDArray[np.uint32]
    BlockIds = NDArray[np.uint32]
    Slots = NDArray[np.uint32]

SECONDS_MAX = 1e9
DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
BLOCK_TOKENS_MAX = 4096
FIELD_BYTES_MAX = 1024
PARTS_MAX = 256


class Tier(enum.IntEnum):
    """A kind of place for blocks. On disk and on the wire: never renumber."""

    DEVICE = 1
    HOST = 2
    DISK = 3
    PEER = 4


class KvForm(enum.StrEnum):
    """How keys and values are kept: two tensors, or one latent per token (multi-head latent attention)."""

    SPLIT = "split"
    LATENT = "latent"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """Everything that gives the bytes of a block meaning; two different layouts never match.

    Inside a part the order is layer-major. With `kv_form="latent"`, `kv_heads` is 1 and `head_dim` is latent + rope.
    `rope` and `quantisation` are canonical texts or fingerprints made by the connector; `engine` and
    `engine_layout` name who lays the bytes out, and which version of that. World sizes split a block into parts:
    one for each rank that writes distinct bytes.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    block_tokens: int = 16
    kv_form: str = KvForm.SPLIT.value
    axis_order: str = "LKHTD"
    rope: str = ""
    quantisation: str = ""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    engine: str = "any"
    engine_layout: int = 1

    def __post_init__(self) -> None:
        _check_counts(self)
        _check_form(self)
        _check_ranks(self)
        for name in ("axis_order", "rope", "quantisation", "engine"):
            _check_text(getattr(self, name), f"layout.{name}", InvalidLayoutError)

    @property
    def tensor_writers(self) -> int:
        """How many tensor-parallel ranks write distinct bytes: replicated heads and latents have one writer each."""
        return min(self.tensor_parallel, self.kv_heads)

    @property
    def part_count(self) -> int:
        """Number of parts of a block: distinct tensor-parallel writers x pipeline stages."""
        return self.tensor_writers * self.pipeline_parallel

    def part_bytes(self, part: int) -> int:
        """Exact bytes of one part; parts are numbered pipeline stage first, then tensor-parallel writer."""
        if not 0 <= part < self.part_count:
            raise InvalidLayoutError(f"part is {part}, expected 0..{self.part_count - 1}")
        stage = part // self.tensor_writers
        whole, rest = divmod(self.layers, self.pipeline_parallel)
        stage_layers = whole + (1 if stage < rest else 0)
        planes = 1 if self.kv_form == KvForm.LATENT else 2
        heads = self.kv_heads // self.tensor_writers
        return stage_layers * planes * heads * self.head_dim * self.block_tokens * DTYPE_BYTES[self.dtype]

    @property
    def part_sizes(self) -> tuple[int, ...]:
        """Exact bytes of each part, in part order."""
        return tuple(self.part_bytes(part) for part in range(self.part_count))

    @property
    def block_bytes(self) -> int:
        """Exact bytes of a whole block, all parts together."""
        return sum(self.part_sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """The static unit of isolation, authorisation, quota and metrics.

    `revision` is a fingerprint of the checkpoint, never a name alone. Without a `secret` the store's own generated
    one is used, so that keys cannot be forged from outside. The secret is part of every key and never printed,
    logged or sent.
    """

    model: str
    revision: str
    layout: KvLayout
    tenant: str = "default"
    secret: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ("model", "revision", "tenant"):
            value = getattr(self, name)
            _check_text(value, f"namespace.{name}", InvalidNamespaceError)
            if not value:
                raise InvalidNamespaceError(f"namespace.{name} is empty, expected a text")
        if not isinstance(self.layout, KvLayout):
            raise InvalidNamespaceError(f"namespace.layout is a {type(self.layout).__name__}, expected a KvLayout")
        if self.secret is not None and (
            not isinstance(self.secret, bytes) or not 1 <= len(self.secret) <= FIELD_BYTES_MAX
        ):
            raise InvalidNamespaceError(f"namespace.secret must be 1..{FIELD_BYTES_MAX} bytes, or None")


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """What a request adds to its namespace: adapter (a content digest), cache salt, weights epoch.

    Each root is a tree of its own. Fields are typed, so adapter "x" is not salt "x". The salt is never printed.
    """

    adapter: str | None = None
    salt: str | None = field(default=None, repr=False)
    weights_epoch: str | None = None

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if value is not None:
                _check_text(value, f"root.{item.name}", InvalidNamespaceError)


PLAIN_ROOT = Root()


@dataclass(frozen=True, slots=True)
class TierRun:
    """A run of consecutive blocks whose best copy lies in one tier."""

    tier: Tier
    blocks: int


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest stored prefix of a prompt. It protects nothing: lease it before reading.

    `prompt` is a private copy of the whole token ids looked up; `runs` covers the matched blocks in order.
    """

    namespace: Namespace
    root: Root
    prompt: TokenArray = field(repr=False, compare=False)
    blocks: int
    runs: tuple[TierRun, ...]

    @property
    def tokens(self) -> int:
        """Number of tokens covered: blocks x block_tokens."""
        return self.blocks * self.namespace.layout.block_tokens

    @property
    def tiers(self) -> dict[Tier, int]:
        """Blocks by the tier of their best copy."""
        counts: dict[Tier, int] = {}
        for run in self.runs:
            counts[run.tier] = counts.get(run.tier, 0) + run.blocks
        return counts

    @property
    def host_blocks(self) -> int:
        """Leading blocks that lie in host memory: as much as can be loaded without waiting for a disk."""
        return self.runs[0].blocks if self.runs and self.runs[0].tier is Tier.HOST else 0


@dataclass(frozen=True, slots=True)
class LoadResult:
    """How a load went: the first `blocks` rows are verified; rows behind them are undefined."""

    blocks: int
    requested_blocks: int
    bytes: int


@dataclass(frozen=True, slots=True)
class CommitResult:
    """How a store went: blocks that became visible, and blocks skipped since they were there already."""

    blocks: int
    present_blocks: int
    refused_blocks: int


@dataclass(frozen=True, slots=True)
class Pin:
    """Protection of a prefix by an operator; `expires_unix_seconds` is None when it has no time limit."""

    pin_id: int
    blocks: int
    expires_unix_seconds: float | None


@dataclass(frozen=True, slots=True)
class TierStats:
    """Occupancy of one tier."""

    capacity_bytes: int
    used_bytes: int
    blocks: int


@dataclass(frozen=True, slots=True)
class WhatIf:
    """What a tier with `scale` times its capacity would have found: `hit_rate`, 0..1, of the tokens looked up.

    Hits in the tiers before it count too. An estimate from miniatures of the tier, made since it was full.
    """

    tier: str
    scale: float
    capacity_bytes: int
    hit_rate: float


@dataclass(frozen=True, slots=True)
class StoreStats:
    """A snapshot of what a store holds and has done since its start. Hits are counted in tokens.

    `hit_tokens` and `loaded_tokens` are by tier name, `rejected_blocks` and `evicted_blocks` by reason, `disk_faults`
    by kind: what the disk did wrong, each a miss or a refused store. `prefetches` are by outcome, `written_bytes` those
    of blocks written to disk, and `moves` is what waits or runs in the background. `what_if` is empty until a tier is
    full, and with an eviction policy that does not rehearse.
    """

    tiers: dict[str, TierStats]
    namespaces: int
    lookups: int
    lookup_tokens: int
    hit_tokens: dict[str, int]
    loaded_tokens: dict[str, int]
    stored_blocks: int
    present_blocks: int
    rejected_blocks: dict[str, int]
    evicted_blocks: dict[str, int]
    corrupt_blocks: int
    disk_faults: dict[str, int]
    prefetches: dict[str, int]
    prefetched_blocks: int
    written_bytes: int
    moves: int
    leases: int
    stages: int
    pins: int
    index_bytes: int
    policy_bytes: int
    what_if: tuple[WhatIf, ...] = ()


@dataclass(frozen=True, slots=True)
class Verification:
    """What a check of the index found: how much was looked at, and a sentence for each thing that is wrong."""

    namespaces: int
    blocks: int
    problems: tuple[str, ...]


def require_namespace(namespace: object) -> None:
    """Raise InvalidNamespaceError unless it is a Namespace: for interfaces that untyped callers use."""
    if not isinstance(namespace, Namespace):
        raise InvalidNamespaceError(f"namespace is a {type(namespace).__name__}, expected a kvstore.Namespace")


def require_seconds(seconds: object, name: str) -> float:
    """The seconds until something; raises InvalidArgumentError unless they are a number of 0 or more, below 1e9."""
    if isinstance(seconds, (int, float)) and not isinstance(seconds, bool) and 0 <= seconds < SECONDS_MAX:
        return float(seconds)
    raise InvalidArgumentError(f"{name} is {seconds!r}, expected seconds, at least 0 and below 1e9, or None for never")


def require_tiers(tiers: Collection[Tier] | None) -> frozenset[Tier] | None:
    """The tiers as a set, None for any; raises InvalidArgumentError unless they are some Tiers."""
    if tiers is None:
        return None
    wanted = frozenset(tiers)
    if not wanted or not all(isinstance(tier, Tier) for tier in wanted):
        raise InvalidArgumentError(f"tiers is {tiers!r}, expected at least one kvstore.Tier, or None for any")
    return wanted


def require_root(root: object) -> None:
    """Raise InvalidNamespaceError unless it is a Root or None."""
    if root is not None and not isinstance(root, Root):
        raise InvalidNamespaceError(f"root is a {type(root).__name__}, expected a kvstore.Root or None")


def _check_counts(layout: KvLayout) -> None:
    for name in ("layers", "kv_heads", "head_dim", "block_tokens", "tensor_parallel", "pipeline_parallel"):
        value = getattr(layout, name)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
            raise InvalidLayoutError(f"layout.{name} is {value!r}, expected a whole number from 1 to {2**31 - 1}")
    if layout.block_tokens > BLOCK_TOKENS_MAX:
        raise InvalidLayoutError(f"layout.block_tokens is {layout.block_tokens}, expected at most {BLOCK_TOKENS_MAX}")
    if not isinstance(layout.engine_layout, int) or not 0 <= layout.engine_layout < 2**31:
        raise InvalidLayoutError(f"layout.engine_layout is {layout.engine_layout!r}, expected a whole number")


def _check_form(layout: KvLayout) -> None:
    if layout.dtype not in DTYPE_BYTES:
        raise InvalidLayoutError(f"layout.dtype is {layout.dtype!r}, expected one of {', '.join(DTYPE_BYTES)}")
    if layout.kv_form not in tuple(KvForm):
        raise InvalidLayoutError(f"layout.kv_form is {layout.kv_form!r}, expected one of {', '.join(KvForm)}")
    if layout.kv_form == KvForm.LATENT and layout.kv_heads != 1:
        raise InvalidLayoutError(f"layout.kv_heads is {layout.kv_heads}, expected 1 for the latent form")


def _check_ranks(layout: KvLayout) -> None:
    if layout.kv_heads % layout.tensor_parallel and layout.tensor_parallel % layout.kv_heads:
        raise InvalidLayoutError(
            f"layout.tensor_parallel is {layout.tensor_parallel}, expected a divisor or a multiple of "
            f"kv_heads ({layout.kv_heads})"
        )
    if layout.pipeline_parallel > layout.layers:
        raise InvalidLayoutError(
            f"layout.pipeline_parallel is {layout.pipeline_parallel}, expected at most layers ({layout.layers})"
        )
    if layout.part_count > PARTS_MAX:
        raise InvalidLayoutError(f"the layout has {layout.part_count} parts, expected at most {PARTS_MAX}")


def _check_text(value: object, name: str, error: type[InvalidLayoutError] | type[InvalidNamespaceError]) -> None:
    if not isinstance(value, str):
        raise error(f"{name} is a {type(value).__name__}, expected a str")
    try:
        length = len(value.encode())
    except UnicodeEncodeError as err:
        raise error(f"{name} is no Unicode text: {err.reason} at character {err.start}") from err
    if length > FIELD_BYTES_MAX:
        raise error(f"{name} has {length} bytes, expected at most {FIELD_BYTES_MAX}")
