"""How many bytes a namespace may store: a bucket that fills with time, and faster with what is used again."""

from __future__ import annotations

from functools import cache

import numpy as np

from kvstore.clock import SystemClock
from kvstore.store.placement import Budget

# Bytes that may be stored for each byte that was loaded. To compute a byte of KV takes a GPU of today 0.4-1.5 ns (8B to
# 70B models), to copy one out 0.02 ns (PCIe 5 x16): up to there stores cost less than the loads have saved.
_STORED_PER_LOADED = 20
# Of the bandwidth of memory, what is stored without any reuse: about what a GPU of today computes, so that filling a
# cache ahead of traffic is held back by nothing, and a flood cannot take the machine's memory from the engines. An
# engine on the same cores can be given less; bench/bench_no_reuse.py measures it with 1/400.
_COPY_RATIO = 0.1
_BURST_BYTES_MIN = 256 << 20
_PROBE_BYTES = 32 << 20  # more than caches hold
_PROBE_TRIES = 3


class StoreBudget:
    """The budget of one namespace. Guarded by the index lock.

    Full at first, with as much as host memory holds: to fill what is empty drives nothing out. It belongs to the
    namespace, not to a client's session, so that who connects again gets no second one.
    """

    def __init__(self, bytes_per_second: float, host_bytes: int, now: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._most_bytes = float(max(host_bytes, _BURST_BYTES_MIN))
        self._left_bytes = self._most_bytes
        self._filled_at = now

    def left(self, now: float) -> Budget:
        """What may be stored now."""
        self._add((now - self._filled_at) * self._bytes_per_second)
        self._filled_at = now
        return Budget(self._left_bytes, self._most_bytes)

    def spend(self, stored_bytes: int) -> None:
        """Count what is stored; the last block may take more than was left."""
        self._left_bytes -= stored_bytes

    def refund(self, unused_bytes: int) -> None:
        """Take back what was spent and found no room."""
        self._add(unused_bytes)

    def earn(self, loaded_bytes: int) -> None:
        """Count what was loaded, which is what a cache is for."""
        self._add(loaded_bytes * _STORED_PER_LOADED)

    def _add(self, gained_bytes: float) -> None:
        self._left_bytes = min(self._most_bytes, self._left_bytes + gained_bytes)


@cache
def default_bytes_per_second() -> int:
    """What a namespace may store a second without any reuse: a share of the bandwidth of memory.

    That is what one thread's copies between two buffers that are in memory reach; measured once, in about 50 ms.
    """
    source = np.ones(_PROBE_BYTES, dtype=np.uint8)
    target = np.ones(_PROBE_BYTES, dtype=np.uint8)
    clock = SystemClock()
    best_seconds = 1.0
    for _ in range(_PROBE_TRIES):
        began = clock.monotonic()
        target[...] = source
        best_seconds = min(best_seconds, clock.monotonic() - began)
    return int(_COPY_RATIO * _PROBE_BYTES / max(best_seconds, 1e-6))
