from __future__ import annotations

import numpy as np
import pytest

from kvstore.replay.errors import TraceError
from kvstore.replay.formats import RawRequest
from kvstore.replay.trace import Expansion, assemble_trace, read_trace


def requests(*paths: list[int], tokens_each: int = 4) -> list[RawRequest]:
    return [RawRequest(0.0, len(path) * tokens_each, np.array(path, dtype=np.int64)) for path in paths]


def test_equal_prefixes_have_equal_numbers():
    trace = assemble_trace(requests([5, 6, 7], [5, 6, 8], [9], [], [5, 6, 7, 1]), name="t")

    assert [[0, 1, 2], [0, 1, 3], [4], [], [0, 1, 2, 5]] == [trace.path(at).tolist() for at in range(5)]
    assert 6 == trace.unique_blocks


def test_an_id_behind_different_blocks_is_different_prefixes():
    trace = assemble_trace(requests([1, 2, 3], [2, 3], [1, 2, 3], [3, 3], [2, 3], [3, 3]), name="t")

    paths = [trace.path(at).tolist() for at in range(6)]
    assert [[0, 1, 2], [3, 4], [0, 1, 2], [5, 6], [3, 4], [5, 6]] == paths
    assert 7 == trace.unique_blocks


def test_a_prompt_is_made_of_its_prefix_numbers():
    trace = assemble_trace(requests([8], [8, 9]), name="t")

    assert 4 == trace.block_tokens
    assert [0, 0, 0, 0, 1, 1, 1, 1] == trace.prompt(1).tolist()
    assert np.uint32 == trace.prompt(1).dtype


def test_expansion_cuts_each_block_the_same_way_each_time():
    trace = assemble_trace(requests([8], [9, 8]), name="t", expand=Expansion(4, 2))

    assert (2, 6) == (trace.block_tokens, trace.unique_blocks)
    assert [2, 4] == trace.block_counts().tolist()
    assert [[0, 0, 1, 1], [2, 2, 3, 3, 4, 4, 5, 5]] == [trace.prompt(at).tolist() for at in range(2)]


def test_expansion_of_another_block_size_is_refused():
    with pytest.raises(TraceError, match="blocks of 512 tokens, the trace has 4"):
        assemble_trace(requests([1]), name="t", expand=Expansion(512, 16))


@pytest.mark.parametrize("tokens", [512, 16, 1])
@pytest.mark.parametrize("blocks", [1, 2, 30])
def test_the_size_of_a_block_is_told_by_the_longest_request(tokens, blocks):
    path = np.arange(blocks, dtype=np.int64)
    for rest in (0, tokens // 2):
        made = assemble_trace([RawRequest(0.0, tokens * blocks + rest, path)], name="t")
        assert tokens == made.block_tokens


def test_partial_last_blocks_are_left_out_where_requests_list_them():
    made = [RawRequest(0.0, 9, np.array([1, 2, 3])), RawRequest(0.5, 8, np.array([1, 4]))]
    trace = assemble_trace(made, name="t", block_tokens=4)

    assert [[0, 1], [0, 2]] == [trace.path(at).tolist() for at in range(2)]
    assert ("1 partial last blocks were left out",) == trace.notes


def test_where_lengths_do_not_fit_the_list_holds():
    made = [RawRequest(0.0, 9, np.array([1, 2, 3])), RawRequest(0.5, 9, np.array([1, 4]))]
    trace = assemble_trace(made, name="t", block_tokens=4)

    assert [3, 2] == trace.block_counts().tolist()
    assert ("1 requests list more blocks than their tokens fill; all of them count as whole",) == trace.notes


def test_where_no_request_has_a_time_each_takes_a_second():
    untimed = assemble_trace(requests([1], [2], [3]), name="t")
    assert [0.0, 1.0, 2.0] == untimed.seconds.tolist()
    assert ("the trace tells no times; from one request to the next counts as one second",) == untimed.notes

    made = [RawRequest(at, 4, np.array([1])) for at in (0.0, 0.0, 0.25)]
    assert [0.0, 0.0, 0.25] == assemble_trace(made, name="t").seconds.tolist()


def test_a_trace_without_requests_is_refused(write_lines):
    with pytest.raises(TraceError, match="has no requests"):
        read_trace(write_lines())
    with pytest.raises(TraceError, match="has no requests"):
        read_trace(write_lines("{"), skip_bad_lines=True)


def test_a_trace_that_does_not_tell_the_size_of_a_block_asks_for_it():
    with pytest.raises(TraceError, match="give --block-tokens"):
        assemble_trace(requests([]), name="t")


def test_what_was_left_out_is_noted(write_lines):
    event = {"kind": "stored", "root_key": "r", "tier": "host", "parent_key": "lost", "keys": ["a"]}
    trace = read_trace(write_lines(event, "{"), skip_bad_lines=True)

    assert 16 == trace.block_tokens
    assert [32] == trace.input_tokens.tolist()
    assert "events" == trace.format
    assert ["1 bad lines", "an event log tells", "1 prefixes begin"] == [
        next(start for start in ("1 bad lines", "an event log tells", "1 prefixes begin") if note.startswith(start))
        for note in trace.notes
    ]
