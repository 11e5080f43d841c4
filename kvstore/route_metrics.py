"""Metrics of the proxy; a part of kvstore.metrics."""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.source_metric import Sample, SourceMetric, single
from kvstore.stats import RouteStats

RouteMetric = SourceMetric[RouteStats]


def _outcomes(route: RouteStats) -> Iterator[Sample]:
    for upstream in route.upstreams:
        for outcome, count in sorted(upstream.outcomes.items()):
            yield (upstream.name, outcome), count


ROUTE_METRICS = (
    RouteMetric(
        "kvstore_route_requests_total",
        "Requests sent to a server behind the proxy, by outcome; one that failed was sent to the next.",
        _outcomes,
        ("upstream", "outcome"),
    ),
    RouteMetric("kvstore_route_prompts_total", "Prompts that were routed.", lambda route: single(route.prompts)),
    RouteMetric(
        "kvstore_route_prompt_tokens_total",
        "Tokens of these prompts, estimated where they are not known.",
        lambda route: single(route.prompt_tokens),
    ),
    RouteMetric(
        "kvstore_route_located_tokens_total",
        "Tokens that the chosen servers need not compute, by what was located.",
        lambda route: single(route.located_tokens),
    ),
    RouteMetric(
        "kvstore_route_prompts_without_tokens_total",
        "Prompts that went by the beginning of their text, since their tokens were not known.",
        lambda route: single(route.without_tokens),
    ),
    RouteMetric(
        "kvstore_route_locate_failures_total",
        "Questions that the sidecar did not answer in time, or refused.",
        lambda route: single(route.locate_failures),
    ),
    RouteMetric(
        "kvstore_route_decision_seconds_total",
        "Time from a whole request to the order of servers, tokens and Locate included.",
        lambda route: single(route.decision_seconds),
    ),
    RouteMetric(
        "kvstore_route_upstream_healthy",
        "1 while a server behind the proxy is well.",
        lambda route: [((upstream.name,), int(upstream.is_healthy)) for upstream in route.upstreams],
        ("upstream",),
    ),
    RouteMetric(
        "kvstore_route_waiting_tokens",
        "Tokens that a server has yet to compute, as far as the proxy knows.",
        lambda route: [((upstream.name,), upstream.waiting_tokens) for upstream in route.upstreams],
        ("upstream",),
    ),
)
