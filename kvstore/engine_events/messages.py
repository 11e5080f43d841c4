"""KV events as vLLM and SGLang publish them, and what is read of them.

A batch is a msgpack array [time, events, data-parallel rank]. Each event is a map with its class name under "type";
older engines wrote an array that begins with it. Fields and events that are not named here are left alone, so newer
engines can be followed. The format: `vllm/distributed/kv_events.py`, https://docs.vllm.ai/en/latest/api/vllm/distributed/kv_events/.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from kvstore.errors import EngineEventsError
from kvstore.tokens import TOKEN_MAX
from kvstore.types import BLOCK_TOKENS_MAX

TokenId = Annotated[int, msgspec.Meta(ge=0, le=TOKEN_MAX)]
BlockTokens = Annotated[int, msgspec.Meta(ge=1, le=BLOCK_TOKENS_MAX)]
Count = Annotated[int, msgspec.Meta(ge=0)]
EngineHash = int | Annotated[bytes, msgspec.Meta(max_length=64)]  # of a block; engines say no more than that


class BlockStored(msgspec.Struct, frozen=True, tag="BlockStored"):
    """Blocks that follow each other came into some memory of the engine's."""

    block_hashes: list[EngineHash]
    parent_block_hash: EngineHash | None
    token_ids: list[TokenId]
    block_size: BlockTokens
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: Count | None = None
    cache_salt: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag="BlockRemoved"):
    """Blocks left it."""

    block_hashes: list[EngineHash]
    medium: str | None = None
    group_idx: Count | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag="AllBlocksCleared"):
    """The engine holds nothing any more."""


class _StoredArray(msgspec.Struct, frozen=True, tag="BlockStored", array_like=True):
    block_hashes: list[EngineHash]
    parent_block_hash: EngineHash | None
    token_ids: list[TokenId]
    block_size: BlockTokens
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None


class _RemovedArray(msgspec.Struct, frozen=True, tag="BlockRemoved", array_like=True):
    block_hashes: list[EngineHash]
    medium: str | None = None


class _ClearedArray(msgspec.Struct, frozen=True, tag="AllBlocksCleared", array_like=True):
    pass


class _Envelope(msgspec.Struct, frozen=True, array_like=True):
    ts: float
    events: list[msgspec.Raw]


class _Named(msgspec.Struct, frozen=True):
    type: str


EngineEvent = BlockStored | BlockRemoved | AllBlocksCleared
_KNOWN = ("BlockStored", "BlockRemoved", "AllBlocksCleared")
_ENVELOPE = msgspec.msgpack.Decoder(_Envelope)
_NAMED = msgspec.msgpack.Decoder(_Named)
_MAP = msgspec.msgpack.Decoder(EngineEvent)
_ARRAY = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)


class EventBatch(msgspec.Struct, frozen=True):
    """The events of one step of an engine; `published` is its own time of that, `foreign` events of unknown types."""

    published: float
    events: tuple[EngineEvent, ...]
    foreign: int


def read_batch(payload: bytes) -> EventBatch:
    """What a batch says. Raises EngineEventsError where it is not of the form, and then nothing of it counts."""
    try:
        envelope = _ENVELOPE.decode(payload)
        read = [_read_event(raw) for raw in envelope.events]
    except (msgspec.DecodeError, RecursionError, OverflowError, UnicodeDecodeError) as err:
        raise EngineEventsError(
            f"a batch of {len(payload)} bytes is no batch of KV events: {err}; follow an engine that publishes as "
            "vLLM 0.32 does"
        ) from err
    events = tuple(event for event in read if event is not None)
    return EventBatch(envelope.ts, events, len(read) - len(events))


def _read_event(raw: msgspec.Raw) -> EngineEvent | None:
    """One event; None where its type is unknown."""
    first = bytes(memoryview(raw)[:1])
    if first and (first[0] >> 4 == 0x9 or first in (b"\xdc", b"\xdd")):  # an array
        return _read_array(raw)
    return _MAP.decode(raw) if _NAMED.decode(raw).type in _KNOWN else None


def _read_array(raw: msgspec.Raw) -> EngineEvent | None:
    values = msgspec.msgpack.decode(raw)
    if not values or values[0] not in _KNOWN:
        return None
    event = _ARRAY.decode(raw)
    if isinstance(event, _StoredArray):
        return BlockStored(**msgspec.structs.asdict(event))
    return BlockRemoved(**msgspec.structs.asdict(event)) if isinstance(event, _RemovedArray) else AllBlocksCleared()
