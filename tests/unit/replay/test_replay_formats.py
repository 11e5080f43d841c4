from __future__ import annotations

import json

import numpy as np
import pytest

import kvstore
from kvstore.cli.remote import _event_row
from kvstore.replay.errors import TraceError
from kvstore.replay.formats import EVENTS, MOONCAKE, RequestReader
from kvstore.types import KvLayout, Namespace

RIGHT = {"timestamp": 1500, "input_length": 9, "output_length": 3, "hash_ids": [7, 8], "session_id": 1}


def stored(parent: str, *keys: str, tier: str = "host", root: str = "r") -> dict[str, object]:
    return {
        "epoch": "e",
        "sequence": 1,
        "kind": "stored",
        "root_key": root,
        "tier": tier,
        "parent_key": parent,
        "keys": keys,
    }


def paths(reader: RequestReader) -> list[list[int]]:
    return [request.ids.tolist() for request in reader]


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz", "gzipped-in-spite-of-its-name"])
def test_a_mooncake_trace_is_read(write_lines, name):
    path = write_lines(RIGHT, "", RIGHT | {"timestamp": 2000.5, "hash_ids": []}, name="made.gz").rename(name)
    try:
        reader = RequestReader(path)
        first, second = reader
    finally:
        path.unlink()

    assert MOONCAKE == reader.format
    assert (1.5, 9, [7, 8]) == (first.seconds, first.input_tokens, first.ids.tolist())
    assert (2.0005, 9, []) == (second.seconds, second.input_tokens, second.ids.tolist())


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("{", "Expecting"),
        ("[1]", "expected a JSON object"),
        ("[" * 100_000, "recursion"),
        ({}, "timestamp"),
        (RIGHT | {"timestamp": None}, "timestamp is None"),
        (RIGHT | {"timestamp": True}, "timestamp is True"),
        (RIGHT | {"timestamp": -1}, "timestamp is -1"),
        (RIGHT | {"timestamp": float("nan")}, "timestamp is nan"),
        (RIGHT | {"timestamp": 10**400}, "timestamp"),
        (RIGHT | {"input_length": 2.0}, "input_length is 2.0"),
        (RIGHT | {"input_length": 10**30}, "input_length"),
        (RIGHT | {"hash_ids": "12"}, "hash_ids"),
        (RIGHT | {"hash_ids": [1, True]}, "hash_ids"),
        (RIGHT | {"hash_ids": [1, 2**63]}, "64 bits"),
        ('{"timestamp": "\xff"}', "timestamp"),
    ],
)
def test_a_bad_line_is_named_or_counted(write_lines, bad, reason):
    path = write_lines(RIGHT, bad, RIGHT)

    with pytest.raises(TraceError, match=rf"trace.jsonl:2: .*{reason}"):
        list(RequestReader(path))

    lenient = RequestReader(path, skip_bad_lines=True)
    assert [[7, 8], [7, 8]] == paths(lenient)
    assert 1 == lenient.skipped_lines


def test_bytes_that_are_no_text_are_a_bad_line(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\xff\xfe\n" + json.dumps(RIGHT).encode())

    assert [[7, 8]] == paths(RequestReader(path, skip_bad_lines=True))


def test_an_unknown_format_is_refused_at_its_first_line(write_lines):
    with pytest.raises(TraceError, match="jsonl:1: neither a request with hash_ids nor an event"):
        list(RequestReader(write_lines({"prompt": "hello"})))


def test_a_file_that_cannot_be_read_is_told(tmp_path, write_lines):
    with pytest.raises(TraceError, match="cannot be read"):
        list(RequestReader(tmp_path / "absent.jsonl"))
    cut = write_lines(*[RIGHT] * 100, name="cut.gz")
    cut.write_bytes(cut.read_bytes()[:-12])
    with pytest.raises(TraceError, match="cannot be read"):
        list(RequestReader(cut))


def test_stored_events_of_the_host_tier_are_requests(write_lines):
    removed = stored("r", "a") | {"kind": "removed"}
    promoted = stored("", "a")
    reader = RequestReader(
        write_lines(
            stored("r", "a", "b"),
            stored("b", "c"),
            stored("b", "c", tier="disk"),
            promoted,
            removed,
            {"epoch": "e", "gap": True},
            stored("a", "d"),
        )
    )

    assert [[0, 1], [0, 1, 2], [0, 3]] == paths(reader)
    assert EVENTS == reader.format
    assert 0 == reader.unknown_parents


def test_an_event_after_an_unknown_block_counts_from_there(write_lines):
    reader = RequestReader(write_lines(stored("lost", "a"), stored("a", "b"), stored("lost", "c")))

    assert [[0, 1], [0, 1, 2], [0, 3]] == paths(reader)
    assert 1 == reader.unknown_parents


@pytest.mark.parametrize(
    "bad",
    [{}, stored("b", "a") | {"keys": None}, stored("b", "a") | {"keys": [1]}, stored("b", "a") | {"parent_key": 1}],
)
def test_a_bad_event_is_named(write_lines, bad):
    with pytest.raises(TraceError, match="jsonl:2: "):
        list(RequestReader(write_lines(stored("r", "b"), bad)))


def test_events_that_form_a_ring_are_refused(write_lines):
    with pytest.raises(TraceError, match="jsonl:3: a block is its own ancestor"):
        list(RequestReader(write_lines(stored("a", "b"), stored("b", "a"), stored("b", "c"))))


def test_what_a_store_told_of_its_commits_is_read_back(write_lines):
    layout = KvLayout(layers=1, kv_heads=1, head_dim=4, dtype="int8", block_tokens=2)
    namespace = Namespace(model="m", revision="1", layout=layout)
    prompts = [[1, 1, 2, 2], [1, 1, 2, 2, 3, 3], [4, 4], [1, 1, 5, 5, 6, 6]]
    with kvstore.open(host_bytes=1 << 20) as store:
        for prompt in prompts:
            with store.stage(namespace, prompt) as stage:
                stage.write_from(np.zeros((len(prompt) // 2, layout.block_bytes), dtype=np.uint8))
        page = store.events()
    lines = [json.dumps({"epoch": page.epoch, **_event_row(event)}, default=bytes.hex) for event in page.events]

    assert [[0, 1], [0, 1, 2], [3], [0, 4, 5]] == paths(RequestReader(write_lines(*lines)))
