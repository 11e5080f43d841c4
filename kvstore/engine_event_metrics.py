"""Metrics of the engines whose KV events a node follows; a part of kvstore.metrics."""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.source_metric import Sample, SourceMetric
from kvstore.stats import EngineStats

Engines = tuple[EngineStats, ...]
EngineMetric = SourceMetric[Engines]


def _events(engines: Engines) -> Iterator[Sample]:
    for engine in engines:
        for outcome, count in sorted(engine.events.items()):
            yield (engine.engine, outcome), count


ENGINE_METRICS = (
    EngineMetric(
        "kvstore_engine_connected",
        "1 while an engine whose KV events are followed is there.",
        lambda engines: [((engine.engine,), int(engine.is_connected)) for engine in engines],
        ("engine",),
    ),
    EngineMetric(
        "kvstore_engine_device_blocks",
        "Blocks that an engine holds in its device's memory, by its KV events.",
        lambda engines: [((engine.engine,), engine.blocks) for engine in engines],
        ("engine",),
    ),
    EngineMetric(
        "kvstore_engine_events_total",
        "KV events of an engine by outcome, and batches that were malformed, missed, or came twice.",
        _events,
        ("engine", "outcome"),
    ),
)
