"""What a store counts: values that are read, and change nothing."""

from __future__ import annotations

from dataclasses import dataclass, field


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
class CodecStats:
    """What one codec did since the start, in blocks of all namespaces.

    `slot_bytes` is what `raw_bytes` of blocks took on disk, headers included. The errors are those measured at
    encoding: the largest absolute one, and the mean over blocks of the relative one (the root of the sum of squared
    errors over that of squared elements). Seconds are of all threads together.
    """

    written_blocks: int = 0
    raw_bytes: int = 0
    slot_bytes: int = 0
    read_blocks: int = 0
    max_absolute_error: float = 0.0
    rms_relative_error: float = 0.0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class PeerStats:
    """What a node has brought from its peers since the start.

    `fetches` are by outcome, `choices` count what was decided about prompts that were not all here: fetch, recompute,
    claimed and so on. `bytes` came over the wire, `tokens` are those of the blocks that were new here then. `depth` is
    how many prompts are being brought, or wait for that, now.
    """

    fetches: dict[str, int]
    choices: dict[str, int]
    bytes: int
    tokens: int
    claims: int
    depth: int


@dataclass(frozen=True, slots=True)
class StoreStats:
    """A snapshot of what a store holds and has done since its start. Hits are counted in tokens.

    `hit_tokens` and `loaded_tokens` are by tier name, `rejected_blocks` and `evicted_blocks` by reason, `disk_faults`
    by kind: what the disk did wrong, each a miss or a refused store. `prefetches` are by outcome, `written_bytes` those
    of blocks written to disk, and `moves` is what waits or runs in the background. `what_if` is empty until a tier is
    full, and with an eviction policy that does not rehearse. `quarantined_slots` are places on disk that are not used
    since they could not be read, written or erased. `sparse_blocks` have parts of a layer group, and count once for
    each; `shortened_tokens` were stored in full and not matched, since a sparse part that a match needs was not there.
    `codecs` are by name, empty where none was used, and known in the store's own process alone.
    `states` are sequence states; where blocks are counted, it is their pieces. `node` is what a sidecar is called, and
    `uptime_seconds` how long it serves; an embedded store has neither, and tenants are not told the latter.
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
    quarantined_slots: int = 0
    sparse_blocks: int = 0
    shortened_tokens: int = 0
    codecs: dict[str, CodecStats] = field(default_factory=dict)
    states: int = 0
    node: str = ""
    uptime_seconds: float = field(default=0.0, compare=False)  # a clock, not what was counted


@dataclass(frozen=True, slots=True)
class NamespaceStats:
    """A namespace on one node. Of one that nobody has used since the start, only what the disk tells: no names."""

    ns_id: bytes
    tenant: str = ""
    model: str = ""
    revision: str = ""
    host_blocks: int = 0
    disk_blocks: int = 0
    block_bytes: int = 0
    pins: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """An engine whose KV events a node follows: whether it is there, the blocks it holds, and events by outcome."""

    engine: str
    is_connected: bool
    blocks: int
    events: dict[str, int]


@dataclass(frozen=True, slots=True)
class UpstreamStats:
    """A server behind the proxy: whether it is well, the tokens that it has to compute, and requests by outcome."""

    name: str
    is_healthy: bool
    waiting_tokens: int
    outcomes: dict[str, int]


@dataclass(frozen=True, slots=True)
class RouteStats:
    """What a proxy did since its start. `located_tokens` are those that the chosen servers need not compute."""

    prompts: int
    prompt_tokens: int
    located_tokens: int
    without_tokens: int
    locate_failures: int
    decision_seconds: float
    upstreams: tuple[UpstreamStats, ...]


@dataclass(frozen=True, slots=True)
class ClusterStats:
    """What a node and its directory told each other since the node's start.

    `is_member` says whether its lease stood when it was last renewed. Boundaries are announced ones that it holds, and
    ones that wait to be announced or withdrawn. `snapshots` are looks through the whole store, `failures` calls of the
    directory that had no answer.
    """

    node: str = ""
    is_member: bool = False
    announced_boundaries: int = 0
    waiting_boundaries: int = 0
    announcements: int = 0
    withdrawals: int = 0
    snapshots: int = 0
    failures: int = 0
