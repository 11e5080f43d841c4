"""Where the page reads what it shows. All are asked from the page's threads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.clock import Clock
    from kvstore.doctor import Report
    from kvstore.metrics import CallMetrics
    from kvstore.nodes import Node
    from kvstore.stats import PeerStats, StoreStats


@dataclass(frozen=True, slots=True)
class ShownPrefix:
    """A stored prefix as the page names it: whose it is and how long, never what it says."""

    tenant: str
    model: str
    tokens: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class PageSources:
    """What a node tells its page.

    `prefixes` are those worth most of each namespace, the first one most. `nodes` are the living ones of its cluster,
    empty where there is none; it may raise DirectoryUnavailableError. `doctor` says why
    prompts were not found; None where nobody looks.
    """

    stats: Callable[[], StoreStats]
    peers: Callable[[], PeerStats]
    calls: CallMetrics
    prefixes: Callable[[], Sequence[ShownPrefix]]
    nodes: Callable[[], Sequence[Node]]
    node_name: str
    version: str
    clock: Clock
    doctor: Callable[[], Report] | None = None
