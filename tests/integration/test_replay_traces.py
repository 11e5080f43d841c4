"""Public traces: the figures that are known for LRU, for the offline optimum and for an infinite cache.

Prefix block hits of the second half of the requests, in percent; a capacity is a share of the trace's unique blocks.
The traces are no part of the repository: KVSTORE_TRACES_DIR names a folder that has them.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest

from kvstore.clock import SystemClock
from kvstore.replay.capacity import parse_capacity
from kvstore.replay.run import Replay
from kvstore.replay.trace import read_trace

TOLERANCE = 0.3
KNOWN = [
    ("mooncake_conversation", "1%", 40.7, 25.6, 5.5),
    ("mooncake_conversation", "2%", 40.7, 33.3, 8.0),
    ("mooncake_conversation", "5%", 40.7, 40.7, 20.8),
    ("mooncake_conversation", "10%", 40.7, 40.7, 30.0),
    ("mooncake_conversation", "25%", 40.7, 40.7, 38.3),
    ("mooncake_synthetic", "10%", 87.4, 65.9, 37.9),
    ("lmcache_agents", "1%", 86.9, 61.4, 56.0),
    pytest.param("coding_agents_a", "0.25%", 96.4, 49.5, 24.6, marks=pytest.mark.slow),
    pytest.param("coding_agents_a", "0.5%", 96.4, 70.6, 48.5, marks=pytest.mark.slow),
    pytest.param("coding_agents_a", "1%", 96.4, 87.7, 78.9, marks=pytest.mark.slow),
]


@cache
def opened(path: Path) -> tuple[int, Replay]:
    trace = read_trace(path)
    return trace.unique_blocks, Replay(trace, block_bytes=1, warm_ratio=0.5, clock=SystemClock())


@pytest.mark.parametrize(("name", "capacity", "infinite", "optimal", "lru"), KNOWN)
def test_the_known_figures_come_out(name, capacity, infinite, optimal, lru):
    folder = os.environ.get("KVSTORE_TRACES_DIR")
    if not folder:
        pytest.skip("KVSTORE_TRACES_DIR names no folder with traces")
    path = Path(folder) / f"{name}.jsonl.gz"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    unique_blocks, replay = opened(path)

    row = replay.run("lru", parse_capacity(capacity, unique_blocks=unique_blocks, block_bytes=1))

    assert infinite == pytest.approx(100 * row.infinite, abs=TOLERANCE)
    assert optimal == pytest.approx(100 * row.optimal, abs=TOLERANCE)
    assert lru == pytest.approx(100 * row.block_hit_rate, abs=TOLERANCE)
