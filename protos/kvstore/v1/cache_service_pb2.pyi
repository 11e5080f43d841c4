from google.protobuf import duration_pb2 as _duration_pb2
from kvstore.v1 import block_pb2 as _block_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SessionRequest(_message.Message):
    __slots__ = ("client_version", "token")
    CLIENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    client_version: str
    token: str
    def __init__(self, client_version: _Optional[str] = ..., token: _Optional[str] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("session_id", "challenge", "server_version", "limits", "bulk_engines")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    BULK_ENGINES_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    challenge: bytes
    server_version: str
    limits: SessionLimits
    bulk_engines: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, session_id: _Optional[bytes] = ..., challenge: _Optional[bytes] = ..., server_version: _Optional[str] = ..., limits: _Optional[_Union[SessionLimits, _Mapping]] = ..., bulk_engines: _Optional[_Iterable[str]] = ...) -> None: ...

class SessionLimits(_message.Message):
    __slots__ = ("message_bytes", "frame_bytes", "leases", "stages", "namespaces")
    MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FRAME_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    message_bytes: int
    frame_bytes: int
    leases: int
    stages: int
    namespaces: int
    def __init__(self, message_bytes: _Optional[int] = ..., frame_bytes: _Optional[int] = ..., leases: _Optional[int] = ..., stages: _Optional[int] = ..., namespaces: _Optional[int] = ...) -> None: ...

class OpenNamespaceRequest(_message.Message):
    __slots__ = ("session_id", "namespace", "proof")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    namespace: _block_pb2.Namespace
    proof: bytes
    def __init__(self, session_id: _Optional[bytes] = ..., namespace: _Optional[_Union[_block_pb2.Namespace, _Mapping]] = ..., proof: _Optional[bytes] = ...) -> None: ...

class OpenNamespaceResponse(_message.Message):
    __slots__ = ("ns_id", "block_bytes", "part_bytes", "block_symbols")
    NS_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    PART_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SYMBOLS_FIELD_NUMBER: _ClassVar[int]
    ns_id: bytes
    block_bytes: int
    part_bytes: _containers.RepeatedScalarFieldContainer[int]
    block_symbols: int
    def __init__(self, ns_id: _Optional[bytes] = ..., block_bytes: _Optional[int] = ..., part_bytes: _Optional[_Iterable[int]] = ..., block_symbols: _Optional[int] = ...) -> None: ...

class MatchRequest(_message.Message):
    __slots__ = ("session_id", "prompt", "peek", "request_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    PEEK_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    prompt: _block_pb2.Prompt
    peek: bool
    request_id: str
    def __init__(self, session_id: _Optional[bytes] = ..., prompt: _Optional[_Union[_block_pb2.Prompt, _Mapping]] = ..., peek: bool = ..., request_id: _Optional[str] = ...) -> None: ...

class MatchResponse(_message.Message):
    __slots__ = ("blocks", "runs")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    runs: _containers.RepeatedCompositeFieldContainer[_block_pb2.TierRun]
    def __init__(self, blocks: _Optional[int] = ..., runs: _Optional[_Iterable[_Union[_block_pb2.TierRun, _Mapping]]] = ...) -> None: ...

class HintRequest(_message.Message):
    __slots__ = ("session_id", "prompt", "next", "end")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    prompt: _block_pb2.Prompt
    next: _duration_pb2.Duration
    end: SessionEnd
    def __init__(self, session_id: _Optional[bytes] = ..., prompt: _Optional[_Union[_block_pb2.Prompt, _Mapping]] = ..., next: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., end: _Optional[_Union[SessionEnd, _Mapping]] = ...) -> None: ...

class SessionEnd(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HintResponse(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class PrefetchRequest(_message.Message):
    __slots__ = ("session_id", "prompt", "prefetch_id", "wait")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_ID_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    prompt: _block_pb2.Prompt
    prefetch_id: int
    wait: _duration_pb2.Duration
    def __init__(self, session_id: _Optional[bytes] = ..., prompt: _Optional[_Union[_block_pb2.Prompt, _Mapping]] = ..., prefetch_id: _Optional[int] = ..., wait: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class PrefetchResponse(_message.Message):
    __slots__ = ("host_blocks", "done")
    HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    host_blocks: int
    done: bool
    def __init__(self, host_blocks: _Optional[int] = ..., done: bool = ...) -> None: ...

class CancelPrefetchRequest(_message.Message):
    __slots__ = ("session_id", "prefetch_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    prefetch_id: int
    def __init__(self, session_id: _Optional[bytes] = ..., prefetch_id: _Optional[int] = ...) -> None: ...

class CancelPrefetchResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LeaseRequest(_message.Message):
    __slots__ = ("session_id", "prompt", "blocks", "lease_id", "tiers")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    prompt: _block_pb2.Prompt
    blocks: int
    lease_id: int
    tiers: _containers.RepeatedScalarFieldContainer[_block_pb2.Tier]
    def __init__(self, session_id: _Optional[bytes] = ..., prompt: _Optional[_Union[_block_pb2.Prompt, _Mapping]] = ..., blocks: _Optional[int] = ..., lease_id: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[_block_pb2.Tier, str]]] = ...) -> None: ...

class LeaseResponse(_message.Message):
    __slots__ = ("blocks", "state", "deletions")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DELETIONS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    state: LeasedState
    deletions: int
    def __init__(self, blocks: _Optional[int] = ..., state: _Optional[_Union[LeasedState, _Mapping]] = ..., deletions: _Optional[int] = ...) -> None: ...

class LeasedState(_message.Message):
    __slots__ = ("tokens", "state_tokens", "state_bytes")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    STATE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    state_tokens: int
    state_bytes: int
    def __init__(self, tokens: _Optional[int] = ..., state_tokens: _Optional[int] = ..., state_bytes: _Optional[int] = ...) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ("session_id", "lease_id", "from_block", "blocks", "part", "memory", "with_digests")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    FROM_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    WITH_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    lease_id: int
    from_block: int
    blocks: int
    part: int
    memory: FarMemory
    with_digests: bool
    def __init__(self, session_id: _Optional[bytes] = ..., lease_id: _Optional[int] = ..., from_block: _Optional[int] = ..., blocks: _Optional[int] = ..., part: _Optional[int] = ..., memory: _Optional[_Union[FarMemory, _Mapping]] = ..., with_digests: bool = ...) -> None: ...

class FarMemory(_message.Message):
    __slots__ = ("engine", "metadata", "address", "nbytes")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    engine: str
    metadata: bytes
    address: int
    nbytes: int
    def __init__(self, engine: _Optional[str] = ..., metadata: _Optional[bytes] = ..., address: _Optional[int] = ..., nbytes: _Optional[int] = ...) -> None: ...

class LoadResponse(_message.Message):
    __slots__ = ("frame", "summary")
    FRAME_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    frame: bytes
    summary: LoadSummary
    def __init__(self, frame: _Optional[bytes] = ..., summary: _Optional[_Union[LoadSummary, _Mapping]] = ...) -> None: ...

class LoadSummary(_message.Message):
    __slots__ = ("blocks", "requested_blocks", "digests")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    requested_blocks: int
    digests: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, blocks: _Optional[int] = ..., requested_blocks: _Optional[int] = ..., digests: _Optional[_Iterable[int]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("session_id", "lease_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    lease_id: int
    def __init__(self, session_id: _Optional[bytes] = ..., lease_id: _Optional[int] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StageRequest(_message.Message):
    __slots__ = ("session_id", "prompt", "from_block", "stage_id", "turn_ends", "rank", "state_bytes", "writer")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    FROM_BLOCK_FIELD_NUMBER: _ClassVar[int]
    STAGE_ID_FIELD_NUMBER: _ClassVar[int]
    TURN_ENDS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    prompt: _block_pb2.Prompt
    from_block: int
    stage_id: int
    turn_ends: _containers.RepeatedScalarFieldContainer[int]
    rank: int
    state_bytes: int
    writer: int
    def __init__(self, session_id: _Optional[bytes] = ..., prompt: _Optional[_Union[_block_pb2.Prompt, _Mapping]] = ..., from_block: _Optional[int] = ..., stage_id: _Optional[int] = ..., turn_ends: _Optional[_Iterable[int]] = ..., rank: _Optional[int] = ..., state_bytes: _Optional[int] = ..., writer: _Optional[int] = ...) -> None: ...

class StageResponse(_message.Message):
    __slots__ = ("from_block", "blocks", "sparse")
    FROM_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SPARSE_FIELD_NUMBER: _ClassVar[int]
    from_block: int
    blocks: int
    sparse: _containers.RepeatedCompositeFieldContainer[WantedBlocks]
    def __init__(self, from_block: _Optional[int] = ..., blocks: _Optional[int] = ..., sparse: _Optional[_Iterable[_Union[WantedBlocks, _Mapping]]] = ...) -> None: ...

class WantedBlocks(_message.Message):
    __slots__ = ("first_blocks", "blocks")
    FIRST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    first_blocks: _containers.RepeatedScalarFieldContainer[int]
    blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, first_blocks: _Optional[_Iterable[int]] = ..., blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class WriteRequest(_message.Message):
    __slots__ = ("start", "frame")
    START_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    start: WriteStart
    frame: bytes
    def __init__(self, start: _Optional[_Union[WriteStart, _Mapping]] = ..., frame: _Optional[bytes] = ...) -> None: ...

class WriteStart(_message.Message):
    __slots__ = ("session_id", "stage_id", "from_block", "blocks", "part", "memory", "digests")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    STAGE_ID_FIELD_NUMBER: _ClassVar[int]
    FROM_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    stage_id: int
    from_block: int
    blocks: int
    part: int
    memory: FarMemory
    digests: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session_id: _Optional[bytes] = ..., stage_id: _Optional[int] = ..., from_block: _Optional[int] = ..., blocks: _Optional[int] = ..., part: _Optional[int] = ..., memory: _Optional[_Union[FarMemory, _Mapping]] = ..., digests: _Optional[_Iterable[int]] = ...) -> None: ...

class WriteResponse(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: int
    def __init__(self, rows: _Optional[int] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("session_id", "stage_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    STAGE_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    stage_id: int
    def __init__(self, session_id: _Optional[bytes] = ..., stage_id: _Optional[int] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ("blocks", "present_blocks", "refused_blocks")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PRESENT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    present_blocks: int
    refused_blocks: int
    def __init__(self, blocks: _Optional[int] = ..., present_blocks: _Optional[int] = ..., refused_blocks: _Optional[int] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("session_id", "stage_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    STAGE_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    stage_id: int
    def __init__(self, session_id: _Optional[bytes] = ..., stage_id: _Optional[int] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("stats",)
    STATS_FIELD_NUMBER: _ClassVar[int]
    stats: _block_pb2.StoreStats
    def __init__(self, stats: _Optional[_Union[_block_pb2.StoreStats, _Mapping]] = ...) -> None: ...

class ReadEventsRequest(_message.Message):
    __slots__ = ("after", "limit", "wait")
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    after: int
    limit: int
    wait: _duration_pb2.Duration
    def __init__(self, after: _Optional[int] = ..., limit: _Optional[int] = ..., wait: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ReadEventsResponse(_message.Message):
    __slots__ = ("page",)
    PAGE_FIELD_NUMBER: _ClassVar[int]
    page: _block_pb2.EventPage
    def __init__(self, page: _Optional[_Union[_block_pb2.EventPage, _Mapping]] = ...) -> None: ...

class WatchEventsRequest(_message.Message):
    __slots__ = ("after",)
    AFTER_FIELD_NUMBER: _ClassVar[int]
    after: int
    def __init__(self, after: _Optional[int] = ...) -> None: ...

class WatchEventsResponse(_message.Message):
    __slots__ = ("page",)
    PAGE_FIELD_NUMBER: _ClassVar[int]
    page: _block_pb2.EventPage
    def __init__(self, page: _Optional[_Union[_block_pb2.EventPage, _Mapping]] = ...) -> None: ...
