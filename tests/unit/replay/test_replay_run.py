from __future__ import annotations

import numpy as np
import pytest

from kvstore.clock import SystemClock
from kvstore.errors import InvalidArgumentError
from kvstore.radix.tree import EVEN_TOKENS
from kvstore.replay.capacity import Capacity
from kvstore.replay.formats import RawRequest
from kvstore.replay.run import Replay
from kvstore.replay.trace import Trace, assemble_trace, read_trace
from kvstore.testing.manual_clock import ManualClock


def trace_of(*paths: list[int]) -> Trace:
    """Blocks of 4 tokens; each prompt has one token more than its blocks."""
    made = [RawRequest(0.0, 4 * len(path) + 1, np.array(path, dtype=np.int64)) for path in paths]
    return assemble_trace(made, name="t", block_tokens=4)


def replay(trace: Trace, warm_ratio: float = 0.5) -> Replay:
    return Replay(trace, block_bytes=100, warm_ratio=warm_ratio, clock=ManualClock())


def test_only_requests_after_the_warm_up_count():
    row = replay(trace_of([1, 2], [9], [1, 2], [1, 3])).run("lru", Capacity("8", 8))

    assert (2, 4, 18) == (row.requests, row.blocks, row.tokens)
    assert 3 / 4 == row.block_hit_rate == row.host_block_hit_rate == row.optimal == row.infinite
    assert 12 / 18 == row.token_hit_rate == row.optimal_token_hit_rate
    assert ("lru", "8", 8, 800, None, 0) == (
        row.policy,
        row.capacity,
        row.capacity_blocks,
        row.capacity_bytes,
        row.disk,
        row.disk_blocks,
    )


def test_what_lies_deep_counts_for_more_of_the_work_that_was_spared():
    half = EVEN_TOKENS // 8  # blocks of 4 tokens
    row = replay(trace_of([1] * (2 * half), [1] * half + [2] * half)).run("lru", Capacity("9999999", 9_999_999))

    tokens = 8 * half + 1
    cost = tokens + tokens**2 / (2 * EVEN_TOKENS)
    assert (4 * half + 4 * half / 4) / cost == pytest.approx(row.flop_hit_rate)
    assert row.infinite_flop_hit_rate == row.flop_hit_rate < row.token_hit_rate


def test_rates_by_tier_add_up_and_moves_are_told_in_bytes():
    made = replay(trace_of([1, 2], [3, 4], [1, 2], [3, 4], [3, 4]), warm_ratio=0.0)
    row = made.run("lru", Capacity("2", 2), Capacity("50%", 2))

    assert row.disk_block_hit_rate > 0
    assert row.block_hit_rate == pytest.approx(row.host_block_hit_rate + row.disk_block_hit_rate)
    assert row.token_hit_rate == pytest.approx(row.host_token_hit_rate + row.disk_token_hit_rate)
    assert (200, 0) == (row.demoted_bytes, row.promoted_bytes)
    assert ("50%", 2, 200) == (row.disk, row.disk_blocks, row.disk_bytes)


def test_each_rule_of_admission_writes_what_it_takes():
    # The first prompt is used twice before it leaves host memory, the others once.
    made = replay(trace_of([1, 2], [1, 2], [3, 4], [5, 6], [7, 8], [1, 2]), warm_ratio=0.0)
    rows = {
        rule: made.run("survival", Capacity("2", 2), Capacity("20", 20), admission=rule)
        for rule in ("demotion", "worth", "reuse", "write_through")
    }

    written = {rule: row.demoted_bytes // 100 for rule, row in rows.items()}
    assert {"demotion": 6, "worth": 6, "reuse": 2, "write_through": 8} == dict(written.items())
    assert list(rows) == [row.admission for row in rows.values()]
    for row in rows.values():
        assert (2, 2) == (row.host_hit_blocks, row.disk_hit_blocks)
        assert (8, 8) == (row.host_hit_tokens, row.disk_hit_tokens)
        assert row.demoted_bytes / 16 == row.demoted_bytes_per_hit_token


def test_moves_of_the_warm_up_do_not_count():
    row = replay(trace_of([1, 2], [3, 4], [3, 4], [3, 4])).run("lru", Capacity("2", 2), Capacity("2", 2))

    assert 0 == row.demoted_bytes


def test_no_policy_beats_the_optimum_and_more_room_never_hurts_it(write_lines, chats):
    made = replay(read_trace(write_lines(*chats)), warm_ratio=0.0)
    rows = [made.run("lru", Capacity(str(blocks), blocks)) for blocks in (3, 10, 30, 100, 10**9)]

    assert all(0 < row.block_hit_rate <= row.optimal <= row.infinite for row in rows)
    assert sorted(row.optimal for row in rows) == [row.optimal for row in rows]
    assert rows[-1].block_hit_rate == rows[-1].infinite


def test_a_request_larger_than_the_capacity_is_served():
    row = replay(trace_of([1, 2, 3], [1, 2, 3])).run("lru", Capacity("1", 1))

    assert 1 / 3 == row.block_hit_rate == row.optimal


def test_a_trace_without_blocks_has_rates_of_zero():
    row = replay(trace_of([], [])).run("lru", Capacity("1", 1))

    assert 0 == row.block_hit_rate == row.token_hit_rate == row.optimal == row.infinite


def test_who_watches_is_called_before_each_request():
    seen: list[int] = []
    replay(trace_of([1], [1], [1])).run("lru", Capacity("1", 1), before_request=seen.append)

    assert [0, 1, 2] == seen


@pytest.mark.parametrize("ratio", [-0.1, 1.0, float("nan")])
def test_a_warm_up_that_leaves_nothing_is_refused(ratio):
    with pytest.raises(InvalidArgumentError, match="warm-up"):
        Replay(trace_of([1]), block_bytes=1, warm_ratio=ratio, clock=SystemClock())
