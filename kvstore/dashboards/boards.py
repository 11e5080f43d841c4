"""The dashboards. Each panel answers one question of an operator; what answers none is not here.

`$instance` and `$__rate_interval` are Grafana's: the nodes chosen, and a window that fits the scrapes.
"""

from __future__ import annotations

from kvstore.dashboards.panels import Board, Form, Panel, Query, Unit

_NODES = 'instance=~"$instance"'


def _rate(metric: str, by: str, labels: str = "") -> str:
    chosen = ",".join(part for part in (_NODES, labels) if part)
    return f"sum by ({by}) (rate({metric}{{{chosen}}}[$__rate_interval]))"


def _now(metric: str, by: str) -> str:
    return f"sum by ({by}) ({metric}{{{_NODES}}})"


_HIT_RATIO = (
    f"{_rate('kvstore_hit_tokens_total', 'tier')} / on () group_left () {_rate('kvstore_lookup_tokens_total', '')}"
)
_CALLS = _rate("kvstore_call_seconds_bucket", "le, method")
_RAW_BYTES = _rate("kvstore_codec_bytes_total", "codec", 'size="raw"')
_SLOT_BYTES = _rate("kvstore_codec_bytes_total", "codec", 'size="slot"')


def _calls(share: float) -> str:
    return f"histogram_quantile({share}, {_CALLS})"


OVERVIEW = Board(
    uid="kvstore-overview",
    title="kvstore: overview",
    panels=(
        Panel(
            "Which share of the tokens that engines ask for is there?",
            (Query(_HIT_RATIO, "{{tier}}"),),
            Unit.RATIO,
            stacked=True,
            advice="Low from the start: see the page of a node, which says what more memory would bring.",
        ),
        Panel(
            "How many tokens are not computed again?",
            (Query(_rate("kvstore_loaded_tokens_total", "tier"), "{{tier}}"),),
            Unit.PER_SECOND,
            stacked=True,
        ),
        Panel(
            "Do engines wait for it?",
            (
                Query(_calls(0.5), "{{method}} p50"),
                Query(_calls(0.99), "{{method}} p99"),
            ),
            Unit.SECONDS,
        ),
        Panel(
            "How full are the tiers?",
            (
                Query(
                    f"{_now('kvstore_tier_used_bytes', 'tier')} / {_now('kvstore_tier_capacity_bytes', 'tier')}",
                    "{{tier}}",
                ),
            ),
            Unit.RATIO,
            Form.BARS,
        ),
        Panel(
            "Which nodes serve, in which version?",
            (Query(_now("kvstore_build_info", "version"), "{{version}}"),),
            Unit.COUNT,
            Form.NUMBER,
        ),
        Panel(
            "Does anything fail?",
            (
                Query(_rate("kvstore_failures_total", "instance"), "{{instance}}: faults of kvstore"),
                Query(_rate("kvstore_corrupt_blocks_total", "instance"), "{{instance}}: corrupt blocks"),
                Query(_rate("kvstore_disk_faults_total", "kind"), "disk: {{kind}}"),
                Query(_rate("kvstore_loop_stalls_total", "instance"), "{{instance}}: stalls"),
            ),
            Unit.PER_SECOND,
            advice="Each of these was a miss, never a wrong block.",
        ),
    ),
)

TIERS = Board(
    uid="kvstore-tiers",
    title="kvstore: tiers",
    panels=(
        Panel(
            "What would another capacity find?",
            (Query(f"avg by (tier, scale) (kvstore_what_if_hit_ratio{{{_NODES}}})", "{{tier}} x {{scale}}"),),
            Unit.RATIO,
            advice="Empty until a tier is full: until then more room changes nothing.",
        ),
        Panel(
            "How many bytes does each tier hold?",
            (Query(_now("kvstore_tier_used_bytes", "tier"), "{{tier}}"),),
            Unit.BYTES,
            stacked=True,
        ),
        Panel(
            "Why do blocks leave?",
            (Query(_rate("kvstore_evicted_blocks_total", "reason"), "{{reason}}"),),
            Unit.PER_SECOND,
            stacked=True,
        ),
        Panel(
            "What is stored, and what is refused?",
            (
                Query(_rate("kvstore_stored_blocks_total", ""), "stored"),
                Query(_rate("kvstore_present_blocks_total", ""), "there already"),
                Query(_rate("kvstore_rejected_blocks_total", "reason"), "refused: {{reason}}"),
            ),
            Unit.PER_SECOND,
        ),
        Panel(
            "How much is written to disk?",
            (Query(_rate("kvstore_disk_written_bytes_total", "instance"), "{{instance}}"),),
            Unit.BYTES_PER_SECOND,
        ),
        Panel(
            "Do prefetches bring in time what is on disk?",
            (
                Query(_rate("kvstore_prefetches_total", "outcome"), "{{outcome}}"),
                Query(_now("kvstore_moves", "instance"), "waiting: {{instance}}"),
            ),
            Unit.PER_SECOND,
        ),
        Panel(
            "What do codecs save?",
            (
                Query(
                    f"{_RAW_BYTES} / {_SLOT_BYTES}",
                    "{{codec}}",
                ),
            ),
            Unit.COUNT,
        ),
        Panel(
            "Which memory do index and policy take?",
            (Query(_now("kvstore_index_bytes", ""), "index"), Query(_now("kvstore_policy_bytes", ""), "policy")),
            Unit.BYTES,
        ),
    ),
)

CLUSTER = Board(
    uid="kvstore-cluster",
    title="kvstore: cluster",
    panels=(
        Panel(
            "Which nodes are members?",
            (Query(_now("kvstore_cluster_member", "instance"), "{{instance}}"),),
            Unit.COUNT,
            Form.NUMBER,
        ),
        Panel(
            "How many tokens come from peers?",
            (Query(_rate("kvstore_peer_fetched_tokens_total", "instance"), "{{instance}}"),),
            Unit.PER_SECOND,
        ),
        Panel(
            "How do fetches end?",
            (Query(_rate("kvstore_peer_fetches_total", "outcome"), "{{outcome}}"),),
            Unit.PER_SECOND,
            stacked=True,
        ),
        Panel(
            "Fetch, or compute again?",
            (Query(_rate("kvstore_peer_choices_total", "choice"), "{{choice}}"),),
            Unit.PER_SECOND,
            stacked=True,
        ),
        Panel(
            "Does the directory keep up?",
            (
                Query(_now("kvstore_cluster_waiting_boundaries", "instance"), "waiting: {{instance}}"),
                Query(_rate("kvstore_cluster_directory_failures_total", "instance"), "failures: {{instance}}"),
            ),
            Unit.COUNT,
        ),
        Panel(
            "How many bytes come from peers?",
            (Query(_rate("kvstore_peer_received_bytes_total", "instance"), "{{instance}}"),),
            Unit.BYTES_PER_SECOND,
        ),
    ),
)

CLIENTS = Board(
    uid="kvstore-clients",
    title="kvstore: engines and tenants",
    panels=(
        Panel("Who is connected?", (Query(_now("kvstore_connections", "lane"), "{{lane}}"),), Unit.COUNT),
        Panel(
            "Who is turned away?",
            (
                Query(_rate("kvstore_tenant_refusals_total", "limit"), "tenant limit: {{limit}}"),
                Query(_rate("kvstore_refused_connections_total", "reason"), "connection: {{reason}}"),
            ),
            Unit.PER_SECOND,
        ),
        Panel(
            "What do calls end with?",
            (Query(_rate("kvstore_call_seconds_count", "status"), "{{status}}"),),
            Unit.PER_SECOND,
            stacked=True,
        ),
        Panel(
            "What is held?",
            (
                Query(_now("kvstore_leases", "instance"), "leases: {{instance}}"),
                Query(_now("kvstore_stages", "instance"), "stores: {{instance}}"),
            ),
            Unit.COUNT,
        ),
        Panel(
            "How much do engines read in place?",
            (Query(_now("kvstore_arena_mapped_bytes", "instance"), "mapped: {{instance}}"),),
            Unit.BYTES,
        ),
    ),
)

_TENANT = "tenant, model"
_TENANT_HITS = _rate("kvstore_tenant_hit_tokens_total", _TENANT)
_TENANT_LOOKUPS = _rate("kvstore_tenant_lookup_tokens_total", _TENANT)

TENANTS = Board(
    uid="kvstore-tenants",
    title="kvstore: tenants and models",
    panels=(
        Panel(
            "Whose prompts are found?",
            (Query(f"{_TENANT_HITS} / {_TENANT_LOOKUPS}", "{{tenant}}: {{model}}"),),
            Unit.RATIO,
            advice="Those named in metrics.tenants and metrics.models have lines of their own, all others one.",
        ),
        Panel(
            "Who asks for how much?",
            (Query(_TENANT_LOOKUPS, "{{tenant}}: {{model}}"),),
            Unit.PER_SECOND,
            stacked=True,
        ),
        Panel(
            "In which tier do they find it?",
            (Query(_rate("kvstore_tenant_hit_tokens_total", "tenant, tier"), "{{tenant}}: {{tier}}"),),
            Unit.PER_SECOND,
            stacked=True,
        ),
        Panel(
            "Who holds how much of each tier?",
            (Query(_now("kvstore_tenant_held_bytes", "tenant, tier"), "{{tenant}}: {{tier}}"),),
            Unit.BYTES,
            stacked=True,
            advice="Blocks count as engines see them; what codecs save is not taken off.",
        ),
    ),
)

BOARDS = (OVERVIEW, TIERS, CLUSTER, CLIENTS, TENANTS)
