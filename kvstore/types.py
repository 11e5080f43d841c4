"""The values that every part of kvstore speaks of: layouts, namespaces, roots, matches. Frozen, without behaviour."""

from __future__ import annotations

import enum
from bisect import bisect_left
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import TYPE_CHECKING

from kvstore.errors import InvalidArgumentError, InvalidLayoutError, InvalidNamespaceError
from kvstore.layer_groups import (
    DTYPE_BYTES,
    FIELD_BYTES_MAX,
    LayerGroup,
    LayoutPart,
    Recurrent,
    SequenceState,
    SlidingWindow,
    require_choice,
    stage_layers,
    tensor_writers,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    import numpy as np
    from numpy.typing import NDArray

    TokenArray = NDArray[np.uint32]
    BlockIds = NDArray[np.uint32]
    Slots = NDArray[np.uint32]

SECONDS_MAX = 1e9
BLOCK_TOKENS_MAX = 4096
DIGEST_BYTES = 32
DIGEST_SYMBOLS = DIGEST_BYTES // 4
PARTS_MAX = 256
GROUPS_MAX = 8
MARK_BYTES = 64
RANKS_MAX = 4096
TURN_ENDS_MAX = 4096


class Tier(enum.IntEnum):
    """A kind of place for blocks. On disk and on the wire: never renumber."""

    DEVICE = 1
    HOST = 2
    DISK = 3
    PEER = 4


class Symbols(enum.StrEnum):
    """What a namespace knows of a prompt: its token ids, or only the engine's digest of each block."""

    TOKENS = "tokens"
    DIGESTS = "digests"


class KvForm(enum.StrEnum):
    """How keys and values are kept: two tensors, or one latent per token (multi-head latent attention)."""

    SPLIT = "split"
    LATENT = "latent"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """Everything that gives the bytes of a block meaning; two different layouts never match.

    Inside a part the order is layer-major. With `kv_form="latent"`, `kv_heads` is 1 and `head_dim` is latent + rope.
    `rope` and `quantisation` are canonical texts or fingerprints made by the connector; `engine` and
    `engine_layout` name who lays the bytes out, and which version of that.

    The fields `layers` to `dtype` describe the layers of full attention, whose parts every stored block has; `groups`
    the others, whose *sparse* parts are kept near likely match points only. World sizes split each of them into parts,
    one for each rank that writes distinct bytes. Ranks are numbered pipeline stage first, then tensor-parallel rank.
    Parts are numbered group by group, full attention first, and in each group by rank.

    `layers` is 0 for a model without full attention, all of whose layers are in `groups`: in place of dense parts each
    block has a mark of MARK_BYTES then, written by the store itself, which says that the block is stored.

    `ranks` is the *part set*: the ranks whose parts a store has, all of them where it is empty. A node that has some
    of the ranks of an engine stores under a layout with those, commits when their parts are written and matches what
    they have; who asks several nodes takes the shortest answer.

    With `state` nothing is kept by blocks: each stored prompt has one blob, a *sequence state*, that serves whatever
    shares its beginning (KvStore.stage_state, lease_state). Prompts are matched by single tokens then, so
    `block_tokens` is 1, and what is moved as blocks are the pieces of a blob, of `state.piece_bytes` each.

    With `symbols="digests"` the namespace is *opaque*: its engine hands over no token ids, only a digest of 32 bytes
    for each block, which has to say all that its keys and values depend on (the tokens before it, adapter, salt). A
    prompt is a sequence of digests then, a hit is a hit when all 32 bytes of each are equal, and nothing is shared with
    a namespace of token ids. `block_tokens` still says how many of the engine's tokens a block has, for its size and
    for counts.
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
    groups: tuple[LayerGroup, ...] = ()
    ranks: tuple[int, ...] = ()
    state: SequenceState | None = None
    symbols: str = Symbols.TOKENS.value

    def __post_init__(self) -> None:
        _check_counts(self)
        _check_form(self)
        _check_state(self)
        _check_groups(self)
        _check_ranks(self)
        for name in ("axis_order", "rope", "quantisation", "engine"):
            _check_text(getattr(self, name), f"layout.{name}", InvalidLayoutError)

    @property
    def block_symbols(self) -> int:
        """Numbers by which a block is compared: its token ids, or the eight u32 of its digest."""
        return DIGEST_SYMBOLS if self.symbols == Symbols.DIGESTS else self.block_tokens

    def prompt_tokens(self, symbol_count: int) -> int:
        """Tokens of a prompt of so many symbols."""
        is_opaque = self.symbols == Symbols.DIGESTS
        return symbol_count // DIGEST_SYMBOLS * self.block_tokens if is_opaque else symbol_count

    @property
    def tensor_writers(self) -> int:
        """How many tensor-parallel ranks write distinct bytes: replicated heads and latents have one writer each."""
        return tensor_writers(self.kv_heads, self.tensor_parallel)

    @property
    def parts(self) -> tuple[LayoutPart, ...]:
        """All parts of the part set, in part order."""
        return _parts_of(self)

    @property
    def part_count(self) -> int:
        """Number of dense parts, which every block has: those of full attention."""
        return len(self.group_parts(None))

    def part_bytes(self, part: int) -> int:
        """Exact bytes of one part, dense or sparse."""
        return self._part(part).size_bytes

    @property
    def part_sizes(self) -> tuple[int, ...]:
        """Exact bytes of each dense part, in part order."""
        return self.group_sizes(None)

    @property
    def block_bytes(self) -> int:
        """Exact bytes of a whole block, all dense parts together."""
        return sum(self.part_sizes)

    def group_of(self, part: int) -> int | None:
        """The group to which a part belongs, as a position in `groups`; None for full attention."""
        return self._part(part).group

    def group_parts(self, group: int | None) -> range:
        """The numbers of the parts of one group."""
        numbers = [number for number, part in enumerate(self.parts) if part.group == group]
        return range(numbers[0], numbers[-1] + 1) if numbers else range(0)

    def group_sizes(self, group: int | None) -> tuple[int, ...]:
        """Exact bytes of each part of one group."""
        return tuple(part.size_bytes for part in self.parts if part.group == group)

    def needed_blocks(self, part: int, blocks: int) -> range:
        """The blocks of which a match of `blocks` blocks needs this part."""
        group = self.group_of(part)
        back = blocks if group is None else self.groups[group].blocks_back(self.block_tokens)
        return range(max(0, blocks - back), blocks)

    def part_of(self, rank: int, group: int | None = None) -> int | None:
        """The part of a group that a rank writes; None where another rank writes the same bytes."""
        return next(
            (number for number, part in enumerate(self.parts) if (part.group, part.writer) == (group, rank)), None
        )

    @property
    def writers(self) -> tuple[int, ...]:
        """The ranks that write parts, in ascending order."""
        return tuple(sorted({part.writer for part in self.parts}))

    def _part(self, part: int) -> LayoutPart:
        if not 0 <= part < len(self.parts):
            raise InvalidLayoutError(f"part is {part}, expected 0..{len(self.parts) - 1}")
        return self.parts[part]


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

    `prompt` is a private copy of the whole token ids (or digests) looked up, as kvstore.tokens.as_prompt gives them;
    `runs` covers the matched blocks in order.
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
    def prefix(self) -> TokenArray:
        """What was matched of the prompt."""
        return self.prompt[: self.blocks * self.namespace.layout.block_symbols]

    @property
    def tiers(self) -> dict[Tier, int]:
        """Blocks by the tier of their best copy; that of those whose sparse parts lie on disk alone is the disk."""
        counts: dict[Tier, int] = {}
        for run in self.runs:
            counts[run.tier] = counts.get(run.tier, 0) + run.blocks
        return counts

    @property
    def host_blocks(self) -> int:
        """Leading blocks that lie in host memory: as much as can be loaded without waiting for a disk."""
        return self.runs[0].blocks if self.runs and self.runs[0].tier is Tier.HOST else 0


@dataclass(frozen=True, slots=True)
class StateSize:
    """Of a leased state: the tokens that it serves of the prompt, those it was stored for, and its bytes."""

    tokens: int
    state_tokens: int
    state_bytes: int


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
class Verification:
    """What a check of the index found: how much was looked at, and a sentence for each thing that is wrong."""

    namespaces: int
    blocks: int
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ScrubPage:
    """What one step of a scrub read from disk, how many of these blocks were wrong and dropped, and what is left.

    `next_after` is where the next step begins, None when all was read; `repaired_slots` left quarantine.
    """

    blocks: int
    bytes: int
    dropped_blocks: int
    repaired_slots: int
    remaining_blocks: int
    next_after: int | None


def require_namespace(namespace: object) -> None:
    """Raise InvalidNamespaceError unless it is a Namespace: for interfaces that untyped callers use."""
    if not isinstance(namespace, Namespace):
        raise InvalidNamespaceError(f"namespace is a {type(namespace).__name__}, expected a kvstore.Namespace")


def require_seconds(seconds: object, name: str) -> float:
    """The seconds until something; raises InvalidArgumentError unless they are a number of 0 or more, below 1e9."""
    if isinstance(seconds, (int, float)) and not isinstance(seconds, bool) and 0 <= seconds < SECONDS_MAX:
        return float(seconds)
    raise InvalidArgumentError(f"{name} is {seconds!r}, expected seconds, at least 0 and below 1e9, or None for never")


def require_turn_ends(turn_ends: Iterable[object], prompt_tokens: int) -> tuple[int, ...]:
    """The ends of a prompt's turns, in tokens; raises InvalidArgumentError where they cannot be."""
    ends = tuple(turn_ends)
    if len(ends) > TURN_ENDS_MAX:
        raise InvalidArgumentError(f"turn_ends has {len(ends)} ends, expected at most {TURN_ENDS_MAX}")
    checked = []
    for end in ends:
        if not isinstance(end, int) or isinstance(end, bool) or not 0 <= end <= prompt_tokens:
            raise InvalidArgumentError(f"a turn ends at {end!r}, expected 0..{prompt_tokens} tokens")
        checked.append(end)
    return tuple(checked)


def require_writer(layout: KvLayout, rank: object) -> int:
    """Raise InvalidArgumentError unless a rank writes parts of this layout."""
    if isinstance(rank, int) and not isinstance(rank, bool) and rank in layout.writers:
        return rank
    raise InvalidArgumentError(
        f"rank is {rank!r}, expected one that writes: {', '.join(map(str, layout.writers))}; what the others have is "
        "written by those, or belongs to another part set"
    )


def require_own_part(layout: KvLayout, rank: int, part: int | None) -> None:
    """Raise InvalidArgumentError unless this part is named and the rank's own."""
    own = [number for number, found in enumerate(layout.parts) if found.writer == rank]
    if part not in own and not (part is None and layout.writers == (rank,)):
        raise InvalidArgumentError(f"part is {part}, expected one that rank {rank} writes: {', '.join(map(str, own))}")


def require_state(layout: KvLayout) -> SequenceState:
    """The form of the layout's sequence states; raises InvalidArgumentError where it has none."""
    if layout.state is None:
        raise InvalidArgumentError("the layout has no sequence states; use stage() and lease(), or give it a `state`")
    return layout.state


def require_blocks(layout: KvLayout) -> None:
    """Raise InvalidArgumentError for a layout of sequence states."""
    if layout.state is not None:
        raise InvalidArgumentError("the layout has sequence states; use stage_state() and lease_state()")


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
        least = 0 if name == "layers" and layout.groups else 1
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**31:
            raise InvalidLayoutError(
                f"layout.{name} is {value!r}, expected a whole number from {least} to {2**31 - 1}"
                + ("" if name != "layers" or least == 0 else "; 0 is for layouts whose layers are all in `groups`")
            )
    if layout.block_tokens > BLOCK_TOKENS_MAX:
        raise InvalidLayoutError(f"layout.block_tokens is {layout.block_tokens}, expected at most {BLOCK_TOKENS_MAX}")
    if not isinstance(layout.engine_layout, int) or not 0 <= layout.engine_layout < 2**31:
        raise InvalidLayoutError(f"layout.engine_layout is {layout.engine_layout!r}, expected a whole number")


def _check_form(layout: KvLayout) -> None:
    require_choice(layout.dtype, "layout.dtype", DTYPE_BYTES)
    if layout.kv_form not in tuple(KvForm):
        raise InvalidLayoutError(f"layout.kv_form is {layout.kv_form!r}, expected one of {', '.join(KvForm)}")
    require_choice(layout.symbols, "layout.symbols", tuple(Symbols))
    if layout.kv_form == KvForm.LATENT and layout.kv_heads != 1:
        raise InvalidLayoutError(f"layout.kv_heads is {layout.kv_heads}, expected 1 for the latent form")


def _check_state(layout: KvLayout) -> None:
    if layout.state is None:
        return
    if not isinstance(layout.state, SequenceState):
        raise InvalidLayoutError(f"layout.state is a {type(layout.state).__name__}, expected a SequenceState or None")
    only = {
        "block_tokens": 1,
        "groups": (),
        "tensor_parallel": 1,
        "pipeline_parallel": 1,
        "ranks": (),
        "symbols": Symbols.TOKENS.value,
    }
    for name, value in only.items():
        if getattr(layout, name) != value:
            raise InvalidLayoutError(
                f"layout.{name} is {getattr(layout, name)!r:.80}, expected {value!r}: a sequence state is one blob of "
                "one writer, matched by single tokens"
            )


def _check_groups(layout: KvLayout) -> None:
    groups = layout.groups
    if not isinstance(groups, tuple) or not all(isinstance(group, (SlidingWindow, Recurrent)) for group in groups):
        raise InvalidLayoutError(f"layout.groups is {groups!r:.80}, expected a tuple of SlidingWindow and Recurrent")
    if len(groups) > GROUPS_MAX:
        raise InvalidLayoutError(f"the layout has {len(groups)} groups, expected at most {GROUPS_MAX}")
    for index, group in enumerate(groups):
        name = f"layout.groups[{index}]"
        if group.heads % layout.tensor_parallel and layout.tensor_parallel % group.heads:
            raise InvalidLayoutError(
                f"{name} has {group.heads} heads, expected a divisor or a multiple of "
                f"tensor_parallel ({layout.tensor_parallel})"
            )
        if layout.pipeline_parallel > group.layers:
            raise InvalidLayoutError(
                f"{name} has {group.layers} layers, expected at least pipeline_parallel ({layout.pipeline_parallel})"
            )


def _check_ranks(layout: KvLayout) -> None:
    if layout.kv_heads % layout.tensor_parallel and layout.tensor_parallel % layout.kv_heads:
        raise InvalidLayoutError(
            f"layout.tensor_parallel is {layout.tensor_parallel}, expected a divisor or a multiple of "
            f"kv_heads ({layout.kv_heads})"
        )
    if layout.pipeline_parallel > layout.layers > 0:
        raise InvalidLayoutError(
            f"layout.pipeline_parallel is {layout.pipeline_parallel}, expected at most layers ({layout.layers})"
        )
    heads = (*([layout.kv_heads] if layout.layers else []), *(group.heads for group in layout.groups))
    part_count = sum(tensor_writers(count, layout.tensor_parallel) for count in heads) * layout.pipeline_parallel
    if part_count > PARTS_MAX:
        raise InvalidLayoutError(f"the layout has {part_count} parts, expected at most {PARTS_MAX}")
    _check_part_set(layout)


def _check_part_set(layout: KvLayout) -> None:
    world_size = layout.tensor_parallel * layout.pipeline_parallel
    ranks = layout.ranks
    if not isinstance(ranks, tuple) or not all(isinstance(rank, int) and 0 <= rank < world_size for rank in ranks):
        raise InvalidLayoutError(f"layout.ranks is {ranks!r:.80}, expected a tuple of ranks from 0 to {world_size - 1}")
    if list(ranks) != sorted(set(ranks)):
        raise InvalidLayoutError(f"layout.ranks is {ranks!r:.80}, expected each rank once, in ascending order")
    if len(ranks) > RANKS_MAX or len(ranks) == world_size:
        raise InvalidLayoutError(
            f"layout.ranks has {len(ranks)} ranks, expected at most {RANKS_MAX}, and () for all {world_size}"
        )


@lru_cache(maxsize=1024)
def _parts_of(layout: KvLayout) -> tuple[LayoutPart, ...]:
    """Every part that a rank of the part set holds; the first of them that holds it writes it."""
    if layout.state is not None:
        return (LayoutPart(None, range(1), 0, layout.state.piece_bytes),)
    dense_bytes = _dense_layer_bytes(layout)
    sizes: list[tuple[int | None, int, int, int]] = []
    if layout.layers:
        sizes.append((None, layout.layers, layout.kv_heads, dense_bytes))
    sizes += [
        (index, group.layers, group.heads, group.layer_bytes(layout.block_tokens))
        for index, group in enumerate(layout.groups)
    ]
    parts = [] if layout.layers else [_mark_part(layout)]
    for index, layers, heads, layer_bytes in sizes:
        writers = tensor_writers(heads, layout.tensor_parallel)
        replicas = layout.tensor_parallel // writers
        for place in range(writers * layout.pipeline_parallel):
            ranks = range(place * replicas, (place + 1) * replicas)
            attached = ranks if not layout.ranks else _within(layout.ranks, ranks)
            if attached:
                count = stage_layers(layers, layout.pipeline_parallel, place // writers)
                parts.append(LayoutPart(index, ranks, attached[0], count * layer_bytes // writers))
    return tuple(parts)


def _mark_part(layout: KvLayout) -> LayoutPart:
    """What stands for the dense parts of a layout without layers of full attention."""
    ranks = range(layout.tensor_parallel * layout.pipeline_parallel)
    return LayoutPart(None, ranks, layout.ranks[0] if layout.ranks else 0, MARK_BYTES)


def _within(ascending: tuple[int, ...], numbers: range) -> tuple[int, ...]:
    return ascending[bisect_left(ascending, numbers.start) : bisect_left(ascending, numbers.stop)]


def _dense_layer_bytes(layout: KvLayout) -> int:
    planes = 1 if layout.kv_form == KvForm.LATENT else 2
    return planes * layout.kv_heads * layout.head_dim * layout.block_tokens * DTYPE_BYTES[layout.dtype]


def _check_text(value: object, name: str, error: type[InvalidLayoutError] | type[InvalidNamespaceError]) -> None:
    if not isinstance(value, str):
        raise error(f"{name} is a {type(value).__name__}, expected a str")
    try:
        length = len(value.encode())
    except UnicodeEncodeError as err:
        raise error(f"{name} is no Unicode text: {err.reason} at character {err.start}") from err
    if length > FIELD_BYTES_MAX:
        raise error(f"{name} has {length} bytes, expected at most {FIELD_BYTES_MAX}")
