"""What the page says, section by section, as HTML. Every text from outside is escaped here."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from kvstore.errors import DirectoryUnavailableError
from kvstore.metrics import CALL_SECONDS_BUCKETS
from kvstore.page import charts
from kvstore.page.quantiles import quantile
from kvstore.page.wording import ago, amount, duration, percent, size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvstore.page.history import History, Step
    from kvstore.page.sources import PageSources
    from kvstore.stats import StoreStats, TierStats, WhatIf

RECENT_SECONDS = 300.0
_METHODS_MAX = 16
_FINDINGS_MAX = 16
TIERS = ("device", "host", "packed", "disk", "peer")  # as a lookup prefers them; volatile tiers have further names


def render(sources: PageSources, history: History) -> dict[str, str]:
    """Every section by its id."""
    stats, steps, recent = sources.stats(), history.steps(), history.last(RECENT_SECONDS)
    return {
        "hits": _hits(stats, steps, recent),
        "occupancy": _occupancy(stats),
        "moved": _moved(steps),
        "latency": _latency(recent),
        "prefixes": _prefixes(sources),
        "what-if": _what_if(stats),
        "doctor": _doctor(sources),
        "nodes": _nodes(sources),
    }


def _hits(stats: StoreStats, steps: Sequence[Step], recent: Step | None) -> str:
    since_start = sum(stats.hit_tokens.values()) / stats.lookup_tokens if stats.lookup_tokens else None
    tiers = _tiers(stats.hit_tokens)
    now = None if recent is None or not recent.lookup_tokens else sum(recent.hit_ratio(tier) or 0 for tier in tiers)
    facts = _facts(
        ("Last 5 minutes", percent(now)),
        ("Since the start", percent(since_start)),
        ("Tokens looked up", amount(stats.lookup_tokens)),
        ("Lookups", amount(stats.lookups)),
    )
    series = [charts.Series(tier, [step.hit_ratio(tier) for step in steps]) for tier in tiers]
    return facts + _over_time("Share of the tokens looked up that were found, by tier", steps, series, percent, top=1.0)


def _moved(steps: Sequence[Step]) -> str:
    tiers = _tiers(steps[-1].ended.loaded_tokens) if steps else _tiers(())
    loaded = [charts.Series(tier, [step.loaded_tokens_per_second(tier) for step in steps]) for tier in tiers]
    written = charts.Series(
        "written to disk", [(step.ended.written_bytes - step.began.written_bytes) / step.seconds for step in steps]
    )
    fetched = charts.Series(
        "from peers", [(step.ended.peer_bytes - step.began.peer_bytes) / step.seconds for step in steps]
    )
    return _over_time("Tokens handed to engines a second, by the tier they came from", steps, loaded, amount) + (
        _over_time("Bytes a second written to disk and fetched from peers", steps, [written, fetched], size)
    )


def _over_time(
    title: str,
    steps: Sequence[Step],
    series: Sequence[charts.Series],
    value_name: Callable[[float], str],
    *,
    top: float | None = None,
) -> str:
    """A chart of the last hour; areas where values are shares of one whole."""
    if not steps:
        return f"<p>{escape(title)}: the first reading is on its way.</p>"
    latest = steps[-1].ended.seconds
    places = [step.ended.seconds for step in steps]
    axes = charts.Axes(title, places, lambda place: ago(latest - place), value_name, top)
    return charts.lines(axes, series) if top is None else charts.stacked_areas(axes, series)


def _occupancy(stats: StoreStats) -> str:
    rows = (
        (escape(name), _meter(name, tier), size(tier.used_bytes), size(tier.capacity_bytes), amount(tier.blocks))
        for name, tier in sorted(stats.tiers.items())
    )
    facts = _facts(
        ("Leases", amount(stats.leases)),
        ("Stores under way", amount(stats.stages)),
        ("Pins", amount(stats.pins)),
        ("Index", size(stats.index_bytes)),
    )
    return _table("What each tier holds", ("Tier", "Used", "Bytes", "Capacity", "Blocks"), rows) + facts


def _meter(name: str, tier: TierStats) -> str:
    share = tier.used_bytes / tier.capacity_bytes if tier.capacity_bytes else 0.0
    return f'<meter min="0" max="1" value="{share:.4f}" aria-label="{escape(name)} used"></meter> {percent(share)}'


def _latency(recent: Step | None) -> str:
    rows: list[tuple[str, ...]] = []
    for method, ended in sorted(recent.ended.calls.items() if recent else ()):
        began = recent.began.calls.get(method) if recent else None
        counts = ended.in_bucket if began is None else [b - a for a, b in zip(began.in_bucket, ended.in_bucket)]  # noqa: B905
        if sum(counts):
            times = (duration(quantile(CALL_SECONDS_BUCKETS, counts, share)) for share in (0.5, 0.99))
            rows.append((escape(method), amount(sum(counts)), *times))
    if not rows:
        return "<p>No call in the last 5 minutes.</p>"
    return _table("Calls of the last 5 minutes", ("Call", "Calls", "p50", "p99"), rows[:_METHODS_MAX])


def _prefixes(sources: PageSources) -> str:
    rows = [
        (escape(one.tenant), escape(one.model), amount(one.tokens), size(one.size_bytes)) for one in sources.prefixes()
    ]
    if not rows:
        return "<p>Nothing is stored yet.</p>"
    return _table(
        "Stored prefixes that the eviction policy holds worth most, by namespace",
        ("Tenant", "Model", "Tokens", "Bytes"),
        rows,
    )


def _what_if(stats: StoreStats) -> str:
    if not stats.what_if:
        return "<p>There is no estimate before a tier is full: until then more room would change nothing.</p>"
    tiers = _ranked({row.tier for row in stats.what_if})
    return "".join(_what_if_of(tier, [row for row in stats.what_if if row.tier == tier]) for tier in tiers)


def _what_if_of(tier: str, found: Sequence[WhatIf]) -> str:
    rows = sorted(found, key=lambda row: row.capacity_bytes)
    today = next((float(row.capacity_bytes) for row in rows if row.scale == 1), None)
    axes = charts.Axes(
        f"Hit rate that the {tier} tier would have with another capacity (today's is marked)",
        [float(row.capacity_bytes) for row in rows],
        size,
        percent,
        top=1.0,
    )
    return charts.lines(axes, [charts.Series(f"{tier} and above", [row.hit_rate for row in rows])], marked=today)


def _doctor(sources: PageSources) -> str:
    """Why prompts were not found, what costs most first."""
    if sources.doctor is None:
        return "<p>Nobody looks at prompts: doctor.enabled is false.</p>"
    report = sources.doctor()
    seen = f"{amount(report.requests)} lookups in {report.seconds / 3600:.1f} hours"
    if report.skipped:
        seen += f", and {amount(report.skipped)} that were not looked at"
    if not report.findings:
        return f"<p>Nothing stands out in {escape(seen)}.</p>"
    rows = [
        (
            escape(one.cause.value),
            escape(f"{one.tenant}, {one.model}"),
            escape(f"token {one.parted_at} (block {one.block})"),
            percent(one.share),
            amount(one.tokens_per_day),
            escape(one.advice),
        )
        for one in report.findings[:_FINDINGS_MAX]
    ]
    head = ("Cause", "Tenant and model", "Where prompts part", "Lookups", "Tokens a day", "What to do")
    return _table(f"What costs tokens, of {seen}", head, rows)


def _nodes(sources: PageSources) -> str:
    try:
        nodes = sources.nodes()
    except DirectoryUnavailableError as error:
        return f'<p class="trouble">The directory does not answer: {escape(str(error))}</p>'
    if not nodes:
        return "<p>This node is in no cluster.</p>"
    rows = [
        (
            escape(node.name) + (" (this one)" if node.name == sources.node_name else ""),
            escape(", ".join(node.addresses)),
            size(node.host_bytes),
            size(node.disk_bytes),
            amount(node.queue),
        )
        for node in sorted(nodes, key=lambda node: node.name)
    ]
    return _table("Living nodes", ("Node", "Addresses", "Host", "Disk", "Transfers waiting"), rows)


def _tiers(counted: Iterable[str]) -> list[str]:
    """The tiers to show: those counted, and the two that every node may have."""
    return _ranked({*counted, "host", "disk"})


def _ranked(tiers: Iterable[str]) -> list[str]:
    """Tiers as a lookup prefers them, those of names of their own last."""
    rank = {tier: number for number, tier in enumerate(TIERS)}
    return sorted(tiers, key=lambda tier: (rank.get(tier, len(TIERS)), tier))


def _facts(*facts: tuple[str, str]) -> str:
    inner = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
    return f'<dl class="facts">{inner}</dl>'


def _table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are HTML already."""
    columns = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>' + "".join(f"<td>{cell}</td>" for cell in row[1:]) + "</tr>" for row in rows
    )
    return f"<table><caption>{escape(caption)}</caption><thead><tr>{columns}</tr></thead><tbody>{body}</tbody></table>"
