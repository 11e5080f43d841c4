"""Values of kvstore to messages of kvstore.v1 and back; decides nothing but whether a message is well formed."""

from __future__ import annotations

from dataclasses import asdict, fields
from functools import lru_cache
from typing import TYPE_CHECKING, cast

from google.protobuf.message import DecodeError

from kvstore.errors import InvalidArgumentError, InvalidLayoutError, InvalidNamespaceError, InvalidTokensError
from kvstore.events import Event, EventKind, EventPage
from kvstore.hashing import KEY_BYTES
from kvstore.layer_groups import FIELD_BYTES_MAX, Recurrent, SequenceState, SlidingWindow
from kvstore.stats import CodecStats, StoreStats, TierStats, WhatIf
from kvstore.tokens import packed_tokens, unpacked_tokens
from kvstore.types import (
    PLAIN_ROOT,
    CommitResult,
    KvLayout,
    Namespace,
    Pin,
    Root,
    StateSize,
    Symbols,
    Tier,
    TierRun,
    require_root,
)
from kvstore.v1 import admin_service_pb2 as admin_pb
from kvstore.v1 import block_pb2, cache_service_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable

    from google.protobuf.duration_pb2 import Duration

    from kvstore.api import Stage
    from kvstore.layer_groups import LayerGroup
    from kvstore.types import TokenArray

PAGE_BYTES = 4 * 2**20
_ROOTS_REMEMBERED = 256
# More than a root takes that has all its fields, and nothing but these.
_ROOT_BYTES_REMEMBERED = 4 * FIELD_BYTES_MAX
_EVENT_OVERHEAD_BYTES = 128
_LAYOUT_FIELDS = tuple(item.name for item in fields(KvLayout) if item.name not in ("groups", "state"))
_WINDOW_FIELDS = tuple(item.name for item in fields(SlidingWindow))
_RECURRENT_FIELDS = tuple(item.name for item in fields(Recurrent))
_STATE_FIELDS = tuple(item.name for item in fields(SequenceState))
_ROOT_FIELDS = tuple(item.name for item in fields(Root))
_TIER_NUMBERS = frozenset(int(tier) for tier in Tier)
_SIMPLE_STATS = (
    "node",
    "uptime_seconds",
    "namespaces",
    "lookups",
    "lookup_tokens",
    "stored_blocks",
    "present_blocks",
    "corrupt_blocks",
    "leases",
    "stages",
    "pins",
    "index_bytes",
    "policy_bytes",
    "quarantined_slots",
    "sparse_blocks",
    "shortened_tokens",
    "states",
    "prefetched_blocks",
    "written_bytes",
    "moves",
)
_MAPPED_STATS = ("hit_tokens", "loaded_tokens", "rejected_blocks", "evicted_blocks", "disk_faults", "prefetches")


def namespace_to_proto(namespace: Namespace) -> block_pb2.Namespace:
    """The public fields; the secret stays here. Raises InvalidNamespaceError for text that is not Unicode."""
    try:
        return block_pb2.Namespace(
            tenant=namespace.tenant,
            model=namespace.model,
            revision=namespace.revision,
            layout=_layout_to_proto(namespace.layout),
        )
    except ValueError as err:
        raise InvalidNamespaceError(f"the namespace cannot be sent: {err}") from err


def namespace_from_proto(message: block_pb2.Namespace, secret: bytes | None) -> Namespace:
    """The checked namespace. Raises InvalidNamespaceError or InvalidLayoutError."""
    if not message.HasField("layout"):
        raise InvalidLayoutError("the namespace has no layout")
    layout = _layout_from_proto(message.layout)
    return Namespace(
        tenant=message.tenant, model=message.model, revision=message.revision, layout=layout, secret=secret
    )


def _layout_to_proto(layout: KvLayout) -> block_pb2.KvLayout:
    message = block_pb2.KvLayout(**{name: getattr(layout, name) for name in _LAYOUT_FIELDS})
    for group in layout.groups:
        if isinstance(group, SlidingWindow):
            message.groups.add().sliding_window.MergeFrom(
                block_pb2.SlidingWindow(**{name: getattr(group, name) for name in _WINDOW_FIELDS})
            )
        else:
            message.groups.add().recurrent.MergeFrom(
                block_pb2.Recurrent(**{name: getattr(group, name) for name in _RECURRENT_FIELDS})
            )
    if layout.state is not None:
        message.state.MergeFrom(
            block_pb2.SequenceState(**{name: getattr(layout.state, name) for name in _STATE_FIELDS})
        )
    return message


def _layout_from_proto(message: block_pb2.KvLayout) -> KvLayout:
    given = {name: getattr(message, name) for name in _LAYOUT_FIELDS}
    given["ranks"] = tuple(message.ranks)
    given["symbols"] = message.symbols or Symbols.TOKENS.value
    state = None
    if message.HasField("state"):
        state = SequenceState(**{name: getattr(message.state, name) for name in _STATE_FIELDS})
    return KvLayout(**given, groups=tuple(_group_from_proto(group) for group in message.groups), state=state)


def _group_from_proto(message: block_pb2.LayerGroup) -> LayerGroup:
    match message.WhichOneof("kind"):
        case "sliding_window":
            return SlidingWindow(**{name: getattr(message.sliding_window, name) for name in _WINDOW_FIELDS})
        case "recurrent":
            return Recurrent(**{name: getattr(message.recurrent, name) for name in _RECURRENT_FIELDS})
    raise InvalidLayoutError("a group of the layout is of no kind that this version knows; upgrade it")


def root_to_proto(root: Root) -> block_pb2.Root:
    """Raises InvalidNamespaceError for text that is not Unicode."""
    try:
        return block_pb2.Root(**{name: getattr(root, name) for name in _ROOT_FIELDS})
    except ValueError as err:
        raise InvalidNamespaceError("a field of the root is not Unicode text") from err


def root_from_proto(message: block_pb2.Root) -> Root:
    """The checked root; all fields absent is the plain root."""
    if not message.ByteSize():
        return PLAIN_ROOT
    given = {name: getattr(message, name) for name in _ROOT_FIELDS if message.HasField(name)}
    return Root(**given) if given else PLAIN_ROOT


def root_from_bytes(raw: bytes) -> Root:
    """The checked root in the bytes of a message. Raises InvalidArgumentError for bytes that are none.

    Those of the usual size are remembered, and no others: a message may have any number of fields that we do not know.
    """
    return _remembered_root(raw) if len(raw) <= _ROOT_BYTES_REMEMBERED else _root_in(raw)


@lru_cache(maxsize=_ROOTS_REMEMBERED)
def _remembered_root(raw: bytes) -> Root:
    return _root_in(raw)


def _root_in(raw: bytes) -> Root:
    try:
        return root_from_proto(block_pb2.Root.FromString(raw))
    except DecodeError as err:
        raise InvalidArgumentError(f"the root of the prompt is no Root message: {err}") from err


def prompt_to_proto(ns_id: bytes, root: Root | None, tokens: TokenArray) -> block_pb2.Prompt:
    """One copy of the token ids."""
    require_root(root)
    packed = packed_tokens(tokens)
    return block_pb2.Prompt(ns_id=ns_id, root=root_to_proto(root) if root is not None else None, tokens=packed)


def tokens_from_proto(packed: bytes) -> TokenArray:
    """A read-only view of packed token ids."""
    if len(packed) % 4:
        raise InvalidTokensError(f"tokens have {len(packed)} bytes, expected packed u32")
    return unpacked_tokens(packed)


def runs_to_proto(runs: Iterable[TierRun]) -> list[block_pb2.TierRun]:
    """Runs of one match."""
    return [block_pb2.TierRun(tier=_tier_to_proto(run.tier), blocks=run.blocks) for run in runs]


def runs_from_proto(messages: Iterable[block_pb2.TierRun]) -> tuple[TierRun, ...]:
    """Runs of one match."""
    return tuple(TierRun(Tier(message.tier), message.blocks) for message in messages)


def stage_to_proto(stage: Stage, layout: KvLayout) -> cache_service_pb2.StageResponse:
    """What a stage wants."""
    message = cache_service_pb2.StageResponse(from_block=stage.from_block, blocks=stage.blocks)
    for part in range(layout.part_count, len(layout.parts)):
        runs = stage.wanted(part)
        message.sparse.add(first_blocks=[run.start for run in runs], blocks=[len(run) for run in runs])
    return message


def wanted_from_proto(message: cache_service_pb2.StageResponse, layout: KvLayout) -> dict[int, tuple[range, ...]]:
    """By sparse part, the blocks of which it is wanted."""
    return {
        layout.part_count + number: tuple(
            range(first, first + count) for first, count in zip(wanted.first_blocks, wanted.blocks, strict=True)
        )
        for number, wanted in enumerate(message.sparse)
    }


def state_to_proto(size: StateSize) -> cache_service_pb2.LeasedState:
    """What a leased state is."""
    return cache_service_pb2.LeasedState(
        tokens=size.tokens, state_tokens=size.state_tokens, state_bytes=size.state_bytes
    )


def state_from_proto(message: cache_service_pb2.LeasedState) -> StateSize:
    """What a leased state is."""
    return StateSize(message.tokens, message.state_tokens, message.state_bytes)


def tiers_from_proto(tiers: Iterable[int]) -> frozenset[Tier] | None:
    """The tiers of a lease, None where none is named. Raises InvalidArgumentError for a number that is no tier's."""
    wanted = frozenset(tiers)
    if not wanted <= _TIER_NUMBERS:
        raise InvalidArgumentError(f"tiers are {sorted(wanted)}, expected some of {sorted(_TIER_NUMBERS)}")
    return frozenset(map(Tier, wanted)) or None


def tiers_to_proto(tiers: Iterable[Tier]) -> list[block_pb2.Tier]:
    """The tiers of a lease."""
    return [_tier_to_proto(tier) for tier in sorted(tiers)]


def commit_to_proto(result: CommitResult) -> cache_service_pb2.CommitResponse:
    """How a store went."""
    return cache_service_pb2.CommitResponse(
        blocks=result.blocks, present_blocks=result.present_blocks, refused_blocks=result.refused_blocks
    )


def commit_from_proto(message: cache_service_pb2.CommitResponse) -> CommitResult:
    """How a store went."""
    return CommitResult(message.blocks, message.present_blocks, message.refused_blocks)


def pin_to_proto(pin: Pin) -> admin_pb.PinResponse:
    """A pin, its end in whole nanoseconds."""
    message = admin_pb.PinResponse(pin_id=pin.pin_id, blocks=pin.blocks)
    if pin.expires_unix_seconds is not None:
        whole = int(pin.expires_unix_seconds)
        message.expires.seconds = whole
        message.expires.nanos = int((pin.expires_unix_seconds - whole) * 1e9)
    return message


def pin_from_proto(message: admin_pb.PinResponse) -> Pin:
    """A pin."""
    expires = message.expires.seconds + message.expires.nanos / 1e9 if message.HasField("expires") else None
    return Pin(message.pin_id, message.blocks, expires)


def set_duration(message: Duration, seconds: float, name: str) -> None:
    """Write `seconds` into `message`; raises InvalidArgumentError if it is no finite number of a sane size."""
    if not -1e9 < seconds < 1e9:
        raise InvalidArgumentError(f"{name} is {seconds!r}, expected seconds below 1e9")
    message.FromNanoseconds(round(seconds * 1e9))


def duration_seconds(message: Duration) -> float:
    """The seconds of a Duration, whatever its fields hold."""
    return float(message.seconds) + float(message.nanos) / 1e9


def hinted_seconds(message: cache_service_pb2.HintRequest) -> float | None:
    """When a prompt will be used again; None is never. Raises InvalidArgumentError if the hint does not say."""
    match message.WhichOneof("use"):
        case "next":
            return duration_seconds(message.next)
        case "end":
            return None
    raise InvalidArgumentError("the hint says neither when the prompt will be used again nor that it will not")


def stats_to_proto(stats: StoreStats) -> block_pb2.StoreStats:
    """All counters."""
    message = block_pb2.StoreStats(
        **{name: getattr(stats, name) for name in (*_SIMPLE_STATS, *_MAPPED_STATS)},
    )
    for name, tier in stats.tiers.items():
        message.tiers[name].MergeFrom(
            block_pb2.TierStats(capacity_bytes=tier.capacity_bytes, used_bytes=tier.used_bytes, blocks=tier.blocks)
        )
    for name, codec in stats.codecs.items():
        message.codecs[name].MergeFrom(block_pb2.CodecStats(**asdict(codec)))
    for row in stats.what_if:
        message.what_if.add(tier=row.tier, scale=row.scale, capacity_bytes=row.capacity_bytes, hit_rate=row.hit_rate)
    return message


def stats_from_proto(message: block_pb2.StoreStats) -> StoreStats:
    """All counters."""
    return StoreStats(
        tiers={
            name: TierStats(tier.capacity_bytes, tier.used_bytes, tier.blocks) for name, tier in message.tiers.items()
        },
        hit_tokens=dict(message.hit_tokens),
        loaded_tokens=dict(message.loaded_tokens),
        rejected_blocks=dict(message.rejected_blocks),
        evicted_blocks=dict(message.evicted_blocks),
        disk_faults=dict(message.disk_faults),
        prefetches=dict(message.prefetches),
        codecs={
            name: CodecStats(**{field.name: getattr(codec, field.name) for field in fields(CodecStats)})
            for name, codec in message.codecs.items()
        },
        what_if=tuple(WhatIf(row.tier, row.scale, row.capacity_bytes, row.hit_rate) for row in message.what_if),
        **{name: getattr(message, name) for name in _SIMPLE_STATS},
    )


def page_to_proto(page: EventPage) -> block_pb2.EventPage:
    """The page, or its beginning: at least one event, and no more than about PAGE_BYTES."""
    message = block_pb2.EventPage(epoch=page.epoch, next_after=page.next_after, gap=page.gap)
    held_bytes = 0
    for event in page.events:
        held_bytes += _EVENT_OVERHEAD_BYTES + KEY_BYTES * len(event.keys)
        if held_bytes > PAGE_BYTES and message.events:
            message.next_after = message.events[-1].sequence
            break
        message.events.append(_event_to_proto(event))
    return message


def page_from_proto(message: block_pb2.EventPage) -> EventPage:
    """The page."""
    events = tuple(_event_from_proto(event) for event in message.events)
    return EventPage(message.epoch, events, message.next_after, message.gap)


def _event_to_proto(event: Event) -> block_pb2.Event:
    return block_pb2.Event(
        sequence=event.sequence,
        kind=cast("block_pb2.EventKind", event.kind.value),
        ns_id=event.ns_id,
        root_key=event.root_key,
        tier=block_pb2.TIER_UNSPECIFIED if event.tier is None else _tier_to_proto(event.tier),
        parent_key=event.parent_key,
        keys=b"".join(event.keys),
        last_copy=event.last_copy,
        first_block=event.first_block,
        block_tokens=event.block_tokens,
    )


def _event_from_proto(message: block_pb2.Event) -> Event:
    keys = message.keys
    return Event(
        sequence=message.sequence,
        kind=EventKind(message.kind),
        ns_id=message.ns_id,
        root_key=message.root_key,
        tier=Tier(message.tier) if message.tier else None,
        parent_key=message.parent_key,
        keys=tuple(keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES)),
        last_copy=message.last_copy,
        first_block=message.first_block,
        block_tokens=message.block_tokens,
    )


def _tier_to_proto(tier: Tier) -> block_pb2.Tier:
    # The numbers of both enums are the same, which a test checks.
    return cast("block_pb2.Tier", tier.value)
