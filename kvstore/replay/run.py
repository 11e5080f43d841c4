"""Runs of one trace: a policy and a capacity in, hit rates out, beside the optimum and an infinite cache."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from kvstore.errors import InvalidArgumentError
from kvstore.replay.flops import prefill_costs
from kvstore.replay.node import Node
from kvstore.replay.optimal import FutureUses, optimal_hits
from kvstore.replay.policies import DEFAULT_POLICY, admission_named, make_tree

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from kvstore.clock import Clock
    from kvstore.replay.capacity import Capacity
    from kvstore.replay.trace import Trace
    from kvstore.store.placement import DiskAdmission


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRow:
    """The outcome of one run; the names are those of the JSON and the Parquet file. Rates are 0..1.

    `capacity` is the host tier's, `disk` the disk tier's, as they were given, and `admission` what is written to disk,
    which without one is nothing. `optimal` and `infinite` are block hit
    rates: of MIN with as much room as both tiers together, and of a cache without limit. `flop_hit_rate` is the share
    of the work of prefilling that was spared (flops.py), `infinite_flop_hit_rate` what a cache without limit spares.
    All is counted after the warm-up, except `run_seconds`, the time that the whole run took. `demoted_bytes` are
    written to disk; `demoted_bytes_per_hit_token` is by all tokens found, None where there are none.
    """

    policy: str
    capacity: str
    capacity_blocks: int
    capacity_bytes: int
    disk: str | None
    disk_blocks: int
    disk_bytes: int
    admission: str | None
    requests: int
    blocks: int
    tokens: int
    block_hit_rate: float
    token_hit_rate: float
    host_block_hit_rate: float
    disk_block_hit_rate: float
    host_token_hit_rate: float
    disk_token_hit_rate: float
    optimal: float
    infinite: float
    optimal_token_hit_rate: float
    infinite_token_hit_rate: float
    flop_hit_rate: float
    infinite_flop_hit_rate: float
    host_hit_blocks: int
    disk_hit_blocks: int
    host_hit_tokens: int
    disk_hit_tokens: int
    demoted_bytes: int
    promoted_bytes: int
    demoted_bytes_per_hit_token: float | None
    run_seconds: float


@dataclass(frozen=True, slots=True)
class DiskPart:
    """The disk tier of a run."""

    capacity: Capacity
    admission: DiskAdmission


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What one run found of each counted request, and the blocks it moved meanwhile."""

    host_hits: NDArray[np.int64]
    disk_hits: NDArray[np.int64]
    demoted_blocks: int
    promoted_blocks: int


class Replay:
    """One trace, ready to be run with any policy at any capacity."""

    def __init__(self, trace: Trace, *, block_bytes: int, warm_ratio: float, clock: Clock) -> None:
        """The first `warm_ratio` of the requests are served and not counted; InvalidArgumentError if it is not 0..1."""
        if not 0 <= warm_ratio < 1:
            raise InvalidArgumentError(f"the warm-up is {warm_ratio} of the requests, expected 0 or more, below 1")
        self._trace = trace
        self._block_bytes = block_bytes
        self._clock = clock
        self._first_counted = int(trace.request_count * warm_ratio)
        self._blocks = trace.block_counts()[self._first_counted :]
        self._tokens = trace.input_tokens[self._first_counted :]
        self._uses = FutureUses(trace)
        # Policies share the bounds of a capacity.
        self._optimal_hits = cache(lambda blocks: optimal_hits(self._uses, blocks)[self._first_counted :])

    @property
    def counted_requests(self) -> int:
        """Requests that count."""
        return int(self._tokens.size)

    def run(
        self,
        policy_name: str,
        host: Capacity,
        disk: Capacity | None = None,
        *,
        admission: str = DEFAULT_POLICY,
        before_request: Callable[[int], None] = lambda _request: None,
    ) -> ReplayRow:
        """Replay the whole trace on an empty node. `before_request` is called with the index of each request."""
        rule = admission_named(admission)
        start = self._clock.monotonic()
        node = Node(
            make_tree(policy_name, self._trace.block_tokens),
            host_blocks=self._useful(host),
            disk_blocks=0 if disk is None else self._useful(disk),
            admission=rule,
        )
        outcome = self._drive(node, before_request)
        taken = None if disk is None else DiskPart(disk, rule)
        return self._row(policy_name, host, taken, outcome, run_seconds=self._clock.monotonic() - start)

    def _useful(self, capacity: Capacity) -> int:
        """More room than the whole trace needs changes nothing, and must not be allocated."""
        return min(capacity.blocks, self._trace.unique_blocks)

    def _drive(self, node: Node, before_request: Callable[[int], None]) -> _Outcome:
        warm_demoted = warm_promoted = 0
        hits = np.zeros((2, self._trace.request_count), dtype=np.int64)
        for request in range(self._trace.request_count):
            before_request(request)
            if request == self._first_counted:
                warm_demoted, warm_promoted = node.demoted_blocks, node.promoted_blocks
            found = node.serve(self._trace.prompt(request), float(self._trace.seconds[request]))
            hits[:, request] = found.host_blocks, found.disk_blocks
        return _Outcome(
            host_hits=hits[0, self._first_counted :],
            disk_hits=hits[1, self._first_counted :],
            demoted_blocks=node.demoted_blocks - warm_demoted,
            promoted_blocks=node.promoted_blocks - warm_promoted,
        )

    def _row(
        self, policy_name: str, host: Capacity, disk: DiskPart | None, outcome: _Outcome, *, run_seconds: float
    ) -> ReplayRow:
        disk_blocks = 0 if disk is None else disk.capacity.blocks
        all_hits = outcome.host_hits + outcome.disk_hits
        optimal = self._optimal_hits(min(host.blocks + disk_blocks, self._trace.unique_blocks))
        infinite = self._optimal_hits(self._trace.unique_blocks)
        demoted_bytes = outcome.demoted_blocks * self._block_bytes
        host_tokens, found_tokens = self._found_tokens(outcome.host_hits), self._found_tokens(all_hits)
        return ReplayRow(
            policy=policy_name,
            capacity=host.text,
            capacity_blocks=host.blocks,
            capacity_bytes=host.blocks * self._block_bytes,
            disk=None if disk is None else disk.capacity.text,
            disk_blocks=disk_blocks,
            disk_bytes=disk_blocks * self._block_bytes,
            admission=None if disk is None else disk.admission.value,
            requests=self.counted_requests,
            blocks=int(self._blocks.sum()),
            tokens=int(self._tokens.sum()),
            block_hit_rate=self._block_rate(all_hits),
            token_hit_rate=self._token_rate(all_hits),
            host_block_hit_rate=self._block_rate(outcome.host_hits),
            disk_block_hit_rate=self._block_rate(outcome.disk_hits),
            host_token_hit_rate=self._token_rate(outcome.host_hits),
            disk_token_hit_rate=self._token_rate(all_hits) - self._token_rate(outcome.host_hits),
            optimal=self._block_rate(optimal),
            infinite=self._block_rate(infinite),
            optimal_token_hit_rate=self._token_rate(optimal),
            infinite_token_hit_rate=self._token_rate(infinite),
            flop_hit_rate=self._flop_rate(all_hits),
            infinite_flop_hit_rate=self._flop_rate(infinite),
            host_hit_blocks=int(outcome.host_hits.sum()),
            disk_hit_blocks=int(outcome.disk_hits.sum()),
            host_hit_tokens=host_tokens,
            disk_hit_tokens=found_tokens - host_tokens,
            demoted_bytes=demoted_bytes,
            promoted_bytes=outcome.promoted_blocks * self._block_bytes,
            demoted_bytes_per_hit_token=demoted_bytes / found_tokens if found_tokens else None,
            run_seconds=run_seconds,
        )

    def _block_rate(self, hits: NDArray[np.int64]) -> float:
        return int(hits.sum()) / max(1, int(self._blocks.sum()))

    def _token_rate(self, hits: NDArray[np.int64]) -> float:
        return self._found_tokens(hits) / max(1, int(self._tokens.sum()))

    def _flop_rate(self, hits: NDArray[np.int64]) -> float:
        return float(prefill_costs(self._found(hits)).sum() / max(1, prefill_costs(self._tokens).sum()))

    def _found_tokens(self, hits: NDArray[np.int64]) -> int:
        return int(self._found(hits).sum())

    def _found(self, hits: NDArray[np.int64]) -> NDArray[np.int64]:
        """Found tokens are never more than the prompt has, even where its length is told too short."""
        return np.minimum(hits * self._trace.block_tokens, self._tokens)
