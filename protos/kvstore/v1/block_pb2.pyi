from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_DEVICE: _ClassVar[Tier]
    TIER_HOST: _ClassVar[Tier]
    TIER_DISK: _ClassVar[Tier]
    TIER_PEER: _ClassVar[Tier]

class EventKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EVENT_KIND_UNSPECIFIED: _ClassVar[EventKind]
    EVENT_KIND_STORED: _ClassVar[EventKind]
    EVENT_KIND_REMOVED: _ClassVar[EventKind]
    EVENT_KIND_CLEARED: _ClassVar[EventKind]
TIER_UNSPECIFIED: Tier
TIER_DEVICE: Tier
TIER_HOST: Tier
TIER_DISK: Tier
TIER_PEER: Tier
EVENT_KIND_UNSPECIFIED: EventKind
EVENT_KIND_STORED: EventKind
EVENT_KIND_REMOVED: EventKind
EVENT_KIND_CLEARED: EventKind

class KvLayout(_message.Message):
    __slots__ = ("layers", "kv_heads", "head_dim", "dtype", "block_tokens", "kv_form", "axis_order", "rope", "quantisation", "tensor_parallel", "pipeline_parallel", "engine", "engine_layout", "groups", "ranks", "state", "symbols")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_FORM_FIELD_NUMBER: _ClassVar[int]
    AXIS_ORDER_FIELD_NUMBER: _ClassVar[int]
    ROPE_FIELD_NUMBER: _ClassVar[int]
    QUANTISATION_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SYMBOLS_FIELD_NUMBER: _ClassVar[int]
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    block_tokens: int
    kv_form: str
    axis_order: str
    rope: str
    quantisation: str
    tensor_parallel: int
    pipeline_parallel: int
    engine: str
    engine_layout: int
    groups: _containers.RepeatedCompositeFieldContainer[LayerGroup]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    state: SequenceState
    symbols: str
    def __init__(self, layers: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., dtype: _Optional[str] = ..., block_tokens: _Optional[int] = ..., kv_form: _Optional[str] = ..., axis_order: _Optional[str] = ..., rope: _Optional[str] = ..., quantisation: _Optional[str] = ..., tensor_parallel: _Optional[int] = ..., pipeline_parallel: _Optional[int] = ..., engine: _Optional[str] = ..., engine_layout: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[LayerGroup, _Mapping]]] = ..., ranks: _Optional[_Iterable[int]] = ..., state: _Optional[_Union[SequenceState, _Mapping]] = ..., symbols: _Optional[str] = ...) -> None: ...

class SequenceState(_message.Message):
    __slots__ = ("cut", "form", "piece_bytes")
    CUT_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    PIECE_BYTES_FIELD_NUMBER: _ClassVar[int]
    cut: str
    form: str
    piece_bytes: int
    def __init__(self, cut: _Optional[str] = ..., form: _Optional[str] = ..., piece_bytes: _Optional[int] = ...) -> None: ...

class LayerGroup(_message.Message):
    __slots__ = ("sliding_window", "recurrent")
    SLIDING_WINDOW_FIELD_NUMBER: _ClassVar[int]
    RECURRENT_FIELD_NUMBER: _ClassVar[int]
    sliding_window: SlidingWindow
    recurrent: Recurrent
    def __init__(self, sliding_window: _Optional[_Union[SlidingWindow, _Mapping]] = ..., recurrent: _Optional[_Union[Recurrent, _Mapping]] = ...) -> None: ...

class SlidingWindow(_message.Message):
    __slots__ = ("layers", "window", "kv_heads", "head_dim", "dtype", "kv_form")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_FORM_FIELD_NUMBER: _ClassVar[int]
    layers: int
    window: int
    kv_heads: int
    head_dim: int
    dtype: str
    kv_form: str
    def __init__(self, layers: _Optional[int] = ..., window: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., dtype: _Optional[str] = ..., kv_form: _Optional[str] = ...) -> None: ...

class Recurrent(_message.Message):
    __slots__ = ("layers", "state_bytes", "heads", "form")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    layers: int
    state_bytes: int
    heads: int
    form: str
    def __init__(self, layers: _Optional[int] = ..., state_bytes: _Optional[int] = ..., heads: _Optional[int] = ..., form: _Optional[str] = ...) -> None: ...

class Namespace(_message.Message):
    __slots__ = ("tenant", "model", "revision", "layout")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    model: str
    revision: str
    layout: KvLayout
    def __init__(self, tenant: _Optional[str] = ..., model: _Optional[str] = ..., revision: _Optional[str] = ..., layout: _Optional[_Union[KvLayout, _Mapping]] = ...) -> None: ...

class Root(_message.Message):
    __slots__ = ("adapter", "salt", "weights_epoch")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_EPOCH_FIELD_NUMBER: _ClassVar[int]
    adapter: str
    salt: str
    weights_epoch: str
    def __init__(self, adapter: _Optional[str] = ..., salt: _Optional[str] = ..., weights_epoch: _Optional[str] = ...) -> None: ...

class Prompt(_message.Message):
    __slots__ = ("ns_id", "root", "tokens")
    NS_ID_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ns_id: bytes
    root: Root
    tokens: bytes
    def __init__(self, ns_id: _Optional[bytes] = ..., root: _Optional[_Union[Root, _Mapping]] = ..., tokens: _Optional[bytes] = ...) -> None: ...

class TierRun(_message.Message):
    __slots__ = ("tier", "blocks")
    TIER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    tier: Tier
    blocks: int
    def __init__(self, tier: _Optional[_Union[Tier, str]] = ..., blocks: _Optional[int] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("sequence", "kind", "ns_id", "root_key", "tier", "parent_key", "keys", "last_copy", "first_block", "block_tokens")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    NS_ID_FIELD_NUMBER: _ClassVar[int]
    ROOT_KEY_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    PARENT_KEY_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    LAST_COPY_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    kind: EventKind
    ns_id: bytes
    root_key: bytes
    tier: Tier
    parent_key: bytes
    keys: bytes
    last_copy: bool
    first_block: int
    block_tokens: int
    def __init__(self, sequence: _Optional[int] = ..., kind: _Optional[_Union[EventKind, str]] = ..., ns_id: _Optional[bytes] = ..., root_key: _Optional[bytes] = ..., tier: _Optional[_Union[Tier, str]] = ..., parent_key: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., last_copy: bool = ..., first_block: _Optional[int] = ..., block_tokens: _Optional[int] = ...) -> None: ...

class EventPage(_message.Message):
    __slots__ = ("epoch", "events", "next_after", "gap")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_AFTER_FIELD_NUMBER: _ClassVar[int]
    GAP_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    events: _containers.RepeatedCompositeFieldContainer[Event]
    next_after: int
    gap: bool
    def __init__(self, epoch: _Optional[str] = ..., events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ..., next_after: _Optional[int] = ..., gap: bool = ...) -> None: ...

class TierStats(_message.Message):
    __slots__ = ("capacity_bytes", "used_bytes", "blocks")
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    capacity_bytes: int
    used_bytes: int
    blocks: int
    def __init__(self, capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., blocks: _Optional[int] = ...) -> None: ...

class WhatIf(_message.Message):
    __slots__ = ("tier", "scale", "capacity_bytes", "hit_rate")
    TIER_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    HIT_RATE_FIELD_NUMBER: _ClassVar[int]
    tier: str
    scale: float
    capacity_bytes: int
    hit_rate: float
    def __init__(self, tier: _Optional[str] = ..., scale: _Optional[float] = ..., capacity_bytes: _Optional[int] = ..., hit_rate: _Optional[float] = ...) -> None: ...

class StoreStats(_message.Message):
    __slots__ = ("tiers", "namespaces", "lookups", "lookup_tokens", "hit_tokens", "loaded_tokens", "stored_blocks", "present_blocks", "rejected_blocks", "evicted_blocks", "corrupt_blocks", "leases", "stages", "pins", "index_bytes", "disk_faults", "policy_bytes", "what_if", "sparse_blocks", "shortened_tokens", "quarantined_slots", "prefetches", "prefetched_blocks", "written_bytes", "moves", "states", "codecs", "node", "uptime_seconds")
    class TiersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: TierStats
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[TierStats, _Mapping]] = ...) -> None: ...
    class HitTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class LoadedTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class RejectedBlocksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class EvictedBlocksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class DiskFaultsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class PrefetchesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class CodecsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: CodecStats
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[CodecStats, _Mapping]] = ...) -> None: ...
    TIERS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOADED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STORED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PRESENT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REJECTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    INDEX_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_FAULTS_FIELD_NUMBER: _ClassVar[int]
    POLICY_BYTES_FIELD_NUMBER: _ClassVar[int]
    WHAT_IF_FIELD_NUMBER: _ClassVar[int]
    SPARSE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SHORTENED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    PREFETCHES_FIELD_NUMBER: _ClassVar[int]
    PREFETCHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    tiers: _containers.MessageMap[str, TierStats]
    namespaces: int
    lookups: int
    lookup_tokens: int
    hit_tokens: _containers.ScalarMap[str, int]
    loaded_tokens: _containers.ScalarMap[str, int]
    stored_blocks: int
    present_blocks: int
    rejected_blocks: _containers.ScalarMap[str, int]
    evicted_blocks: _containers.ScalarMap[str, int]
    corrupt_blocks: int
    leases: int
    stages: int
    pins: int
    index_bytes: int
    disk_faults: _containers.ScalarMap[str, int]
    policy_bytes: int
    what_if: _containers.RepeatedCompositeFieldContainer[WhatIf]
    sparse_blocks: int
    shortened_tokens: int
    quarantined_slots: int
    prefetches: _containers.ScalarMap[str, int]
    prefetched_blocks: int
    written_bytes: int
    moves: int
    states: int
    codecs: _containers.MessageMap[str, CodecStats]
    node: str
    uptime_seconds: float
    def __init__(self, tiers: _Optional[_Mapping[str, TierStats]] = ..., namespaces: _Optional[int] = ..., lookups: _Optional[int] = ..., lookup_tokens: _Optional[int] = ..., hit_tokens: _Optional[_Mapping[str, int]] = ..., loaded_tokens: _Optional[_Mapping[str, int]] = ..., stored_blocks: _Optional[int] = ..., present_blocks: _Optional[int] = ..., rejected_blocks: _Optional[_Mapping[str, int]] = ..., evicted_blocks: _Optional[_Mapping[str, int]] = ..., corrupt_blocks: _Optional[int] = ..., leases: _Optional[int] = ..., stages: _Optional[int] = ..., pins: _Optional[int] = ..., index_bytes: _Optional[int] = ..., disk_faults: _Optional[_Mapping[str, int]] = ..., policy_bytes: _Optional[int] = ..., what_if: _Optional[_Iterable[_Union[WhatIf, _Mapping]]] = ..., sparse_blocks: _Optional[int] = ..., shortened_tokens: _Optional[int] = ..., quarantined_slots: _Optional[int] = ..., prefetches: _Optional[_Mapping[str, int]] = ..., prefetched_blocks: _Optional[int] = ..., written_bytes: _Optional[int] = ..., moves: _Optional[int] = ..., states: _Optional[int] = ..., codecs: _Optional[_Mapping[str, CodecStats]] = ..., node: _Optional[str] = ..., uptime_seconds: _Optional[float] = ...) -> None: ...

class CodecStats(_message.Message):
    __slots__ = ("written_blocks", "raw_bytes", "slot_bytes", "read_blocks", "max_absolute_error", "rms_relative_error", "encode_seconds", "decode_seconds")
    WRITTEN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RAW_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    READ_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_ABSOLUTE_ERROR_FIELD_NUMBER: _ClassVar[int]
    RMS_RELATIVE_ERROR_FIELD_NUMBER: _ClassVar[int]
    ENCODE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DECODE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    written_blocks: int
    raw_bytes: int
    slot_bytes: int
    read_blocks: int
    max_absolute_error: float
    rms_relative_error: float
    encode_seconds: float
    decode_seconds: float
    def __init__(self, written_blocks: _Optional[int] = ..., raw_bytes: _Optional[int] = ..., slot_bytes: _Optional[int] = ..., read_blocks: _Optional[int] = ..., max_absolute_error: _Optional[float] = ..., rms_relative_error: _Optional[float] = ..., encode_seconds: _Optional[float] = ..., decode_seconds: _Optional[float] = ...) -> None: ...
