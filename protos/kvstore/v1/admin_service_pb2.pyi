from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from kvstore.v1 import block_pb2 as _block_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

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
    __slots__ = ("node_name", "nodes")
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    node_name: str
    nodes: _containers.RepeatedCompositeFieldContainer[Node]
    def __init__(self, node_name: _Optional[str] = ..., nodes: _Optional[_Iterable[_Union[Node, _Mapping]]] = ...) -> None: ...

class Node(_message.Message):
    __slots__ = ("name", "slot", "incarnation", "addresses", "host_bytes", "disk_bytes", "queue")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    slot: int
    incarnation: int
    addresses: _containers.RepeatedScalarFieldContainer[str]
    host_bytes: int
    disk_bytes: int
    queue: int
    def __init__(self, name: _Optional[str] = ..., slot: _Optional[int] = ..., incarnation: _Optional[int] = ..., addresses: _Optional[_Iterable[str]] = ..., host_bytes: _Optional[int] = ..., disk_bytes: _Optional[int] = ..., queue: _Optional[int] = ...) -> None: ...

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
