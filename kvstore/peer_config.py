"""Settings of how a node takes blocks from its peers; a part of kvstore.config."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.setting_values import Kind, setting

_COUNT_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerConfig:
    """Fetches from peers, and what this node shows them."""

    fetches_max: int = setting(
        8, Kind.COUNT, "Prompts that are brought from peers at a time.", minimum=1, maximum=_COUNT_MAX
    )
    fetches_waiting_max: int = setting(
        64,
        Kind.COUNT,
        "Prompts that are brought or wait for it; more are not asked for.",
        minimum=1,
        maximum=_COUNT_MAX,
    )
    fetches_per_holder_max: int = setting(
        4, Kind.COUNT, "Of those, from one peer at a time.", minimum=1, maximum=_COUNT_MAX
    )
    fetch_seconds_max: float = setting(10.0, Kind.DURATION, "How long it is tried for one prompt.", maximum=3600)
    answer_seconds_max: float = setting(
        2.0, Kind.DURATION, "How long one answer of a peer, or one chunk of it, may take.", maximum=3600
    )
    fetch_chunk_bytes: int = setting(
        8 << 20, Kind.SIZE, "What is fetched, verified and kept at a time.", minimum=1, maximum=1 << 30
    )
    peer_bytes_per_second: int = setting(
        1 << 30, Kind.SIZE, "What a peer is taken to send until that was measured.", minimum=1, maximum=1 << 50
    )
    peer_latency_seconds: float = setting(
        0.002, Kind.DURATION, "How long a peer is taken to need for an answer until that was measured.", maximum=60
    )
    prefill_tokens_per_second: int = setting(
        20_000, Kind.COUNT, "Tokens that an engine computes in a second, but for attention.", minimum=1, maximum=10**12
    )
    prefill_pairs_per_second: int = setting(
        800_000_000,
        Kind.COUNT,
        "Pairs of tokens that its attention takes in a second; with the former it tells fetch or recompute.",
        minimum=1,
        maximum=10**18,
    )
    gpu_weight: float = setting(
        1.0,
        Kind.FACTOR,
        "Seconds of waiting for a fetch that one second of an engine's prefill is worth, on top of it.",
    )
    handover_seconds: float = setting(
        0.0,
        Kind.DURATION,
        "How long a node that stops asks others to take what is worth most and they lack; 0s: not at all.",
        maximum=3600,
    )
    handover_bytes: int = setting(4 << 30, Kind.SIZE, "What it hands over at most.", minimum=1, maximum=1 << 50)
    secret_file: str = setting(
        "",
        Kind.TEXT,
        "File with a secret that all nodes share: namespaces without one of their own are kept under it.",
    )
    tls_ca: str = setting("", Kind.TEXT, "PEM file with the CA of the peers' certificates; empty: the system's.")
    tls_cert: str = setting("", Kind.TEXT, "PEM file with the certificate that this node shows its peers.")
    tls_key: str = setting("", Kind.TEXT, "PEM file with the key of cluster.tls_cert.")
    token_file: str = setting(
        "", Kind.TEXT, "File with the token that this node shows its peers; they need role read for it."
    )
