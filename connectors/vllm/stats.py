"""The connector's counts on their way to vLLM's log and its /metrics, through vLLM's own hooks."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

if TYPE_CHECKING:
    from kvstore.connectors.common import ConnectorCounters

# Counters by their name in vLLM's /metrics, where they are `vllm:prefix_kvstore_<name>_total`, with what they count.
COUNTERS = {
    "lookups": "Lookups that connectors made",
    "lookup_tokens": "Prompt tokens that were looked up",
    "matched_tokens": "Prompt tokens that the store said it has",
    "loaded_tokens": "Tokens whose KV was loaded and verified, of each rank",
    "stored_blocks": "Blocks that became visible in the store",
    "present_blocks": "Blocks that the store had already",
    "refused_blocks": "Blocks for which the store had no room",
    "dropped_blocks": "Blocks that were not even offered to the store",
}
LABELLED_COUNTERS = {
    "bypassed": ("reason", "Requests that were computed without the store"),
    "failures": ("kind", "Errors of the store and the connector, all of them harmless to requests"),
}
_PREFIX = "vllm:prefix_kvstore_"
_SEPARATOR = ":"


class KvstoreStats(KVConnectorStats):  # type: ignore[misc]  # vLLM has no types here
    """What was counted since the last report: a flat dict of whole numbers, labels behind a colon."""

    def reset(self) -> None:
        """Forget everything."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add what another rank, or another step, has counted."""
        self.data = dict(Counter(self.data) + Counter(other.data))
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log line."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class StatsReporter:
    """Gives out what was counted since it was asked last."""

    def __init__(self, counters: ConnectorCounters) -> None:
        self._counters = counters
        self._reported: Counter[str] = Counter()

    def take(self) -> KvstoreStats | None:
        """What is new; None if nothing is."""
        now = _flat(asdict(self._counters.snapshot(breaker_openings=0)))
        new = now - self._reported
        self._reported = now
        return KvstoreStats(data=dict(new)) if new else None


class KvstorePromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # vLLM has no types here
    """The counters in vLLM's /metrics."""

    def __init__(self, *arguments: Any) -> None:  # noqa: ANN401  # whatever vLLM hands to its base class
        super().__init__(*arguments)
        self._plain = {
            name: self._counter_cls(name=_PREFIX + name, documentation=text, labelnames=self._labelnames)
            for name, text in COUNTERS.items()
        }
        self._labelled = {
            name: self._counter_cls(name=_PREFIX + name, documentation=text, labelnames=[*self._labelnames, label])
            for name, (label, text) in LABELLED_COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what one engine has counted."""
        values = self.per_engine_labelvalues[engine_idx]
        for key, amount in transfer_stats_data.items():
            name, _, label = key.partition(_SEPARATOR)
            if name in self._plain:
                self._plain[name].labels(*values).inc(amount)
            elif name in self._labelled:
                self._labelled[name].labels(*values, label).inc(amount)


def _flat(fields: dict[str, Any]) -> Counter[str]:
    flat: Counter[str] = Counter()
    for name, value in fields.items():
        if isinstance(value, dict):
            flat.update({f"{name}{_SEPARATOR}{label}": amount for label, amount in value.items()})
        elif name in COUNTERS:
            flat[name] = value
    return flat
