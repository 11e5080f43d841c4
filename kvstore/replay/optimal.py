"""The offline optimum: what a cache of a given size could have hit, had it known all requests.

MIN for prefix-closed sets: after each request keep, of the cached blocks and the request's own path, those with the
nearest next use; among equal ones the shallower. A block's next use is the next request whose path contains it, so a
parent's is never later than its child's and what is kept is prefix-closed by itself. Since all blocks have one size
and a request may leave its blocks out (bypass), this is exact over the whole trace. Counted on the second half alone it
is near-exact: hits given up in the first half could at best gain a little there.

The blocks whose next use is request j are a stretch of j's path without gaps: those that no earlier request uses. So
the cache is a table of stretches by next use, and a request costs O(log stretches) for each stretch of its path.
"""

from __future__ import annotations

import heapq
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvstore.replay.trace import Trace


class FutureUses:
    """For each request, in which later request each block of its path is used next. Made once for all capacities."""

    def __init__(self, trace: Trace) -> None:
        """O(blocks of all requests)."""
        next_use = np.full(trace.unique_blocks // trace.split, -1, dtype=np.int64)
        self._stretches: list[list[tuple[int, int, int]]] = []
        for request in range(trace.request_count - 1, -1, -1):
            path = trace.path(request)
            self._stretches.append(_stretches(next_use[path], trace.split))
            next_use[path] = request
        self._stretches.reverse()

    @property
    def request_count(self) -> int:
        """Number of requests."""
        return len(self._stretches)

    def stretches(self, request: int) -> list[tuple[int, int, int]]:
        """(first block, end, request of the next use), from the root on; what is never used again is left out."""
        return self._stretches[request]


def optimal_hits(uses: FutureUses, capacity_blocks: int) -> NDArray[np.int64]:
    """Blocks that MIN finds for each request with room for `capacity_blocks`."""
    hits = np.zeros(uses.request_count, dtype=np.int64)
    cached: dict[int, tuple[int, int]] = {}  # next use -> stretch of that request's path
    latest_first: list[int] = []
    used_blocks = 0
    for request in range(uses.request_count):
        first, end = cached.pop(request, (0, 0))
        assert first == 0, (request, first)
        hits[request] = end
        used_blocks -= end
        for start, stop, next_use in uses.stretches(request):
            below = cached.get(next_use)
            if below is None:
                heapq.heappush(latest_first, -next_use)
            else:
                assert below[0] == stop, (request, next_use, below)
            cached[next_use] = (start, stop if below is None else below[1])
            used_blocks += stop - start
        used_blocks -= _trim(cached, latest_first, used_blocks - capacity_blocks)
    return hits


def _trim(cached: dict[int, tuple[int, int]], latest_first: list[int], excess_blocks: int) -> int:
    """Drop so many blocks, those of the latest next use first and of these the deepest. Returns how many went."""
    left = excess_blocks
    # Past requests stay in the heap, but below every future one; what exceeds the capacity is used in the future.
    while left > 0:
        latest = -latest_first[0]
        start, end = cached[latest]
        dropped = min(left, end - start)
        left -= dropped
        if dropped < end - start:
            cached[latest] = (start, end - dropped)
        else:
            heapq.heappop(latest_first)
            del cached[latest]
    return max(0, excess_blocks)


def _stretches(next_use: NDArray[np.int64], split: int) -> list[tuple[int, int, int]]:
    edges = [0, *(np.flatnonzero(np.diff(next_use)) + 1).tolist(), next_use.size]
    return [
        (start * split, end * split, int(next_use[start]))
        for start, end in pairwise(edges)
        if start < end and next_use[start] >= 0
    ]
