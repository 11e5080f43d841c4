from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from kvstore.v1 import block_pb2 as _block_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NodeState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NODE_STATE_UNSPECIFIED: _ClassVar[NodeState]
    NODE_STATE_READY: _ClassVar[NodeState]
    NODE_STATE_DRAINING: _ClassVar[NodeState]
    NODE_STATE_GONE: _ClassVar[NodeState]
NODE_STATE_UNSPECIFIED: NodeState
NODE_STATE_READY: NodeState
NODE_STATE_DRAINING: NodeState
NODE_STATE_GONE: NodeState

class PinRequest(_message.Message):
    __slots__ = ("session_id", "prompt", "ttl")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    prompt: _block_pb2.Prompt
    ttl: _duration_pb2.Duration
    def __init__(self, session_id: _Optional[bytes] = ..., prompt: _Optional[_Union[_block_pb2.Prompt, _Mapping]] = ..., ttl: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class PinResponse(_message.Message):
    __slots__ = ("pin_id", "blocks", "expires")
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_FIELD_NUMBER: _ClassVar[int]
    pin_id: int
    blocks: int
    expires: _timestamp_pb2.Timestamp
    def __init__(self, pin_id: _Optional[int] = ..., blocks: _Optional[int] = ..., expires: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("pin_id",)
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    pin_id: int
    def __init__(self, pin_id: _Optional[int] = ...) -> None: ...

class UnpinResponse(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: bool
    def __init__(self, found: bool = ...) -> None: ...

class EvictRequest(_message.Message):
    __slots__ = ("session_id", "prompt", "from_block")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    FROM_BLOCK_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    prompt: _block_pb2.Prompt
    from_block: int
    def __init__(self, session_id: _Optional[bytes] = ..., prompt: _Optional[_Union[_block_pb2.Prompt, _Mapping]] = ..., from_block: _Optional[int] = ...) -> None: ...

class EvictResponse(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class EvictWriterRequest(_message.Message):
    __slots__ = ("writer",)
    WRITER_FIELD_NUMBER: _ClassVar[int]
    writer: int
    def __init__(self, writer: _Optional[int] = ...) -> None: ...

class EvictWriterResponse(_message.Message):
    __slots__ = ("blocks", "remaining_blocks")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REMAINING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    remaining_blocks: int
    def __init__(self, blocks: _Optional[int] = ..., remaining_blocks: _Optional[int] = ...) -> None: ...

class FindWritersRequest(_message.Message):
    __slots__ = ("session_id", "prompt")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    prompt: _block_pb2.Prompt
    def __init__(self, session_id: _Optional[bytes] = ..., prompt: _Optional[_Union[_block_pb2.Prompt, _Mapping]] = ...) -> None: ...

class FindWritersResponse(_message.Message):
    __slots__ = ("runs",)
    RUNS_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedCompositeFieldContainer[WriterRun]
    def __init__(self, runs: _Optional[_Iterable[_Union[WriterRun, _Mapping]]] = ...) -> None: ...

class WriterRun(_message.Message):
    __slots__ = ("writer", "blocks")
    WRITER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    writer: int
    blocks: int
    def __init__(self, writer: _Optional[int] = ..., blocks: _Optional[int] = ...) -> None: ...

class ClearRequest(_message.Message):
    __slots__ = ("session_id", "ns_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NS_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    ns_id: bytes
    def __init__(self, session_id: _Optional[bytes] = ..., ns_id: _Optional[bytes] = ...) -> None: ...

class ClearResponse(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class FlushRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VerifyResponse(_message.Message):
    __slots__ = ("namespaces", "blocks", "problems")
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    namespaces: int
    blocks: int
    problems: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, namespaces: _Optional[int] = ..., blocks: _Optional[int] = ..., problems: _Optional[_Iterable[str]] = ...) -> None: ...

class ScrubRequest(_message.Message):
    __slots__ = ("after", "limit_bytes")
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    after: int
    limit_bytes: int
    def __init__(self, after: _Optional[int] = ..., limit_bytes: _Optional[int] = ...) -> None: ...

class ScrubResponse(_message.Message):
    __slots__ = ("blocks", "bytes", "dropped_blocks", "repaired_slots", "remaining_blocks", "next_after")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DROPPED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REPAIRED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    REMAINING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NEXT_AFTER_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    bytes: int
    dropped_blocks: int
    repaired_slots: int
    remaining_blocks: int
    next_after: int
    def __init__(self, blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., dropped_blocks: _Optional[int] = ..., repaired_slots: _Optional[int] = ..., remaining_blocks: _Optional[int] = ..., next_after: _Optional[int] = ...) -> None: ...

class ListNodesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListNodesResponse(_message.Message):
    __slots__ = ("node_name", "nodes", "gone")
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    node_name: str
    nodes: _containers.RepeatedCompositeFieldContainer[Node]
    gone: _containers.RepeatedCompositeFieldContainer[Node]
    def __init__(self, node_name: _Optional[str] = ..., nodes: _Optional[_Iterable[_Union[Node, _Mapping]]] = ..., gone: _Optional[_Iterable[_Union[Node, _Mapping]]] = ...) -> None: ...

class Node(_message.Message):
    __slots__ = ("name", "slot", "incarnation", "addresses", "host_bytes", "disk_bytes", "queue", "state", "version", "host_used_bytes", "disk_used_bytes", "leases", "deletions", "age")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    HOST_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    DELETIONS_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    name: str
    slot: int
    incarnation: int
    addresses: _containers.RepeatedScalarFieldContainer[str]
    host_bytes: int
    disk_bytes: int
    queue: int
    state: NodeState
    version: str
    host_used_bytes: int
    disk_used_bytes: int
    leases: int
    deletions: int
    age: _duration_pb2.Duration
    def __init__(self, name: _Optional[str] = ..., slot: _Optional[int] = ..., incarnation: _Optional[int] = ..., addresses: _Optional[_Iterable[str]] = ..., host_bytes: _Optional[int] = ..., disk_bytes: _Optional[int] = ..., queue: _Optional[int] = ..., state: _Optional[_Union[NodeState, str]] = ..., version: _Optional[str] = ..., host_used_bytes: _Optional[int] = ..., disk_used_bytes: _Optional[int] = ..., leases: _Optional[int] = ..., deletions: _Optional[int] = ..., age: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class LocateRequest(_message.Message):
    __slots__ = ("session_id", "prompt")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    prompt: _block_pb2.Prompt
    def __init__(self, session_id: _Optional[bytes] = ..., prompt: _Optional[_Union[_block_pb2.Prompt, _Mapping]] = ...) -> None: ...

class LocateResponse(_message.Message):
    __slots__ = ("matches",)
    MATCHES_FIELD_NUMBER: _ClassVar[int]
    matches: _containers.RepeatedCompositeFieldContainer[NodeMatch]
    def __init__(self, matches: _Optional[_Iterable[_Union[NodeMatch, _Mapping]]] = ...) -> None: ...

class NodeMatch(_message.Message):
    __slots__ = ("node", "tokens", "host_tokens", "disk_tokens", "device_tokens")
    class DeviceTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NODE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DISK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    node: Node
    tokens: int
    host_tokens: int
    disk_tokens: int
    device_tokens: _containers.ScalarMap[str, int]
    def __init__(self, node: _Optional[_Union[Node, _Mapping]] = ..., tokens: _Optional[int] = ..., host_tokens: _Optional[int] = ..., disk_tokens: _Optional[int] = ..., device_tokens: _Optional[_Mapping[str, int]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("order", "wait")
    ORDER_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    order: DrainOrder
    wait: _duration_pb2.Duration
    def __init__(self, order: _Optional[_Union[DrainOrder, _Mapping]] = ..., wait: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class DrainOrder(_message.Message):
    __slots__ = ("limit", "limit_bytes", "targets")
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    limit: _duration_pb2.Duration
    limit_bytes: int
    targets: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, limit: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., limit_bytes: _Optional[int] = ..., targets: _Optional[_Iterable[str]] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("draining", "done", "held", "prefixes", "taken", "taken_bytes", "failures")
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    TAKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    draining: bool
    done: bool
    held: int
    prefixes: int
    taken: int
    taken_bytes: int
    failures: int
    def __init__(self, draining: bool = ..., done: bool = ..., held: _Optional[int] = ..., prefixes: _Optional[int] = ..., taken: _Optional[int] = ..., taken_bytes: _Optional[int] = ..., failures: _Optional[int] = ...) -> None: ...

class UndrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UndrainResponse(_message.Message):
    __slots__ = ("drained",)
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    drained: bool
    def __init__(self, drained: bool = ...) -> None: ...

class ListNamespacesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListNamespacesResponse(_message.Message):
    __slots__ = ("namespaces",)
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceUse]
    def __init__(self, namespaces: _Optional[_Iterable[_Union[NamespaceUse, _Mapping]]] = ...) -> None: ...

class NamespaceUse(_message.Message):
    __slots__ = ("ns_id", "tenant", "model", "revision", "host_blocks", "disk_blocks", "block_bytes", "pins")
    NS_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DISK_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    ns_id: bytes
    tenant: str
    model: str
    revision: str
    host_blocks: int
    disk_blocks: int
    block_bytes: int
    pins: int
    def __init__(self, ns_id: _Optional[bytes] = ..., tenant: _Optional[str] = ..., model: _Optional[str] = ..., revision: _Optional[str] = ..., host_blocks: _Optional[int] = ..., disk_blocks: _Optional[int] = ..., block_bytes: _Optional[int] = ..., pins: _Optional[int] = ...) -> None: ...

class DeleteNamespaceRequest(_message.Message):
    __slots__ = ("ns_id",)
    NS_ID_FIELD_NUMBER: _ClassVar[int]
    ns_id: bytes
    def __init__(self, ns_id: _Optional[bytes] = ...) -> None: ...

class DeleteNamespaceResponse(_message.Message):
    __slots__ = ("epoch", "blocks", "told")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOLD_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    blocks: int
    told: bool
    def __init__(self, epoch: _Optional[int] = ..., blocks: _Optional[int] = ..., told: bool = ...) -> None: ...

class GetDiagnosisRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetDiagnosisResponse(_message.Message):
    __slots__ = ("counted", "requests", "skipped", "causes", "findings")
    class CausesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    CAUSES_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    counted: _duration_pb2.Duration
    requests: int
    skipped: int
    causes: _containers.ScalarMap[str, int]
    findings: _containers.RepeatedCompositeFieldContainer[Finding]
    def __init__(self, counted: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., requests: _Optional[int] = ..., skipped: _Optional[int] = ..., causes: _Optional[_Mapping[str, int]] = ..., findings: _Optional[_Iterable[_Union[Finding, _Mapping]]] = ...) -> None: ...

class Finding(_message.Message):
    __slots__ = ("tenant", "model", "cause", "parted_at", "block", "requests", "share", "tokens_per_day", "advice")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    PARTED_AT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_DAY_FIELD_NUMBER: _ClassVar[int]
    ADVICE_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    model: str
    cause: str
    parted_at: int
    block: int
    requests: int
    share: float
    tokens_per_day: int
    advice: str
    def __init__(self, tenant: _Optional[str] = ..., model: _Optional[str] = ..., cause: _Optional[str] = ..., parted_at: _Optional[int] = ..., block: _Optional[int] = ..., requests: _Optional[int] = ..., share: _Optional[float] = ..., tokens_per_day: _Optional[int] = ..., advice: _Optional[str] = ...) -> None: ...

class ResetDiagnosisRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResetDiagnosisResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
