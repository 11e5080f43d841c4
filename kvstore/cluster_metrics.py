"""Metrics of a node among others; a part of kvstore.metrics."""

from __future__ import annotations

from kvstore.source_metric import SourceMetric, by_label, single
from kvstore.stats import ClusterStats, PeerStats

ClusterMetric = SourceMetric[ClusterStats]
PeerMetric = SourceMetric[PeerStats]

CLUSTER_METRICS = (
    ClusterMetric(
        "kvstore_cluster_member",
        "1 while the directory has this node, 0 while it does not or does not answer.",
        lambda cluster: single(int(cluster.is_member)),
    ),
    ClusterMetric(
        "kvstore_cluster_announced_boundaries",
        "Blocks at boundaries that this node holds and has told the directory of.",
        lambda cluster: single(cluster.announced_boundaries),
    ),
    ClusterMetric(
        "kvstore_cluster_waiting_boundaries",
        "Blocks at boundaries that the directory is still to be told of, or that they are gone.",
        lambda cluster: single(cluster.waiting_boundaries),
    ),
    ClusterMetric(
        "kvstore_cluster_announcements_total",
        "Entries written to the directory, repeated ones included.",
        lambda cluster: single(cluster.announcements),
    ),
    ClusterMetric(
        "kvstore_cluster_withdrawals_total",
        "Entries taken back from the directory.",
        lambda cluster: single(cluster.withdrawals),
    ),
    ClusterMetric(
        "kvstore_cluster_snapshots_total",
        "Looks through the whole store for what the directory is to be told.",
        lambda cluster: single(cluster.snapshots),
    ),
    ClusterMetric(
        "kvstore_cluster_directory_failures_total",
        "Calls of the directory that had no answer in time, or a refusal.",
        lambda cluster: single(cluster.failures),
    ),
)

PEER_METRICS = (
    PeerMetric(
        "kvstore_peer_fetches_total",
        "Fetches from peers that have ended, by outcome.",
        lambda peers: by_label(peers.fetches),
        ("outcome",),
    ),
    PeerMetric(
        "kvstore_peer_choices_total",
        "What was decided about prompts that were not all here: fetch, recompute, claimed and so on.",
        lambda peers: by_label(peers.choices),
        ("choice",),
    ),
    PeerMetric("kvstore_peer_received_bytes_total", "Bytes of blocks from peers.", lambda peers: single(peers.bytes)),
    PeerMetric(
        "kvstore_peer_fetched_tokens_total",
        "Tokens of blocks that peers sent and that were not here.",
        lambda peers: single(peers.tokens),
    ),
    PeerMetric(
        "kvstore_peer_claims",
        "Prefixes that engines of this node compute while others wait for them.",
        lambda peers: single(peers.claims),
    ),
    PeerMetric(
        "kvstore_peer_prompts",
        "Prompts that are being brought from peers, or wait for that.",
        lambda peers: single(peers.depth),
    ),
)
NO_PEERS = PeerStats(fetches={}, choices={}, bytes=0, tokens=0, claims=0, depth=0)
