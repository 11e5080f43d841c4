"""Logs of requests: what is read of them, which lines are named as bad, and that planted causes are found."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.cli import main
from kvstore.doctor import Cause
from kvstore.doctor.offline import examine_log
from kvstore.doctor.request_log import BadLine, LoggedLookup, RequestLog
from kvstore.doctor.tokenizer import LogTokenizer
from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

DICE = random.Random(3)


def ids(count: int) -> list[int]:
    return [DICE.randrange(50_000) for _ in range(count)]


def read(*rows: object) -> list[LoggedLookup | BadLine]:
    return list(RequestLog(None).read(row if isinstance(row, str) else json.dumps(row) for row in rows))


def log_of(path: Path, rows: Iterable[object]) -> str:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return str(path)


def test_a_request_is_read_with_its_owner_its_time_and_what_was_found_of_it():
    usage = {"prompt_tokens": 40, "prompt_tokens_details": {"cached_tokens": 32}}
    row = {"model": "m", "tenant": "t", "cache_salt": "s", "prompt": list(range(40)), "usage": usage, "created": 7}
    (found,) = read(row)
    home = found.lookup.home
    assert ("t", "m", "s") == (home.tenant, home.model, home.root)
    assert (list(range(40)), 32, 16, 7.0) == (
        found.lookup.tokens.tolist(),
        found.lookup.matched_tokens,
        found.lookup.block_tokens,
        found.seconds,
    )


def test_blocks_of_a_trace_become_tokens_that_are_alike_where_the_blocks_are():
    one, other = read(
        {"timestamp": 1500, "input_length": 1030, "hash_ids": [10, 11, 12]},
        {"timestamp": 2000, "input_length": 1024, "hash_ids": [10, 99]},
    )
    assert (1.5, 1030, 1024) == (one.seconds, one.lookup.tokens.size, other.lookup.tokens.size)
    assert one.lookup.tokens[:512].tolist() == other.lookup.tokens[:512].tolist()
    assert not set(one.lookup.tokens[512:].tolist()) & set(other.lookup.tokens[512:].tolist())


BAD = {
    "no JSON": ("{", "it is no JSON"),
    "a list": ("[1]", "it is a list, expected a JSON object"),
    "nothing in it": ({}, "it has no messages, prompt, token_ids or hash_ids"),
    "text without a tokenizer": ({"prompt": "hello"}, "give --tokenizer PATH"),
    "ids that are none": ({"token_ids": [1, -2]}, "expected token ids"),
    "ids of true": ({"prompt": [True]}, "expected token ids"),
    "a model that is none": ({"model": 7, "prompt": [1]}, "its model is 7, expected a text"),
    "a time that is none": ({"created": "now", "prompt": [1]}, "its created is 'now', expected a number"),
    "fewer than no tokens": (
        {"prompt": [1], "usage": {"prompt_tokens_details": {"cached_tokens": -1}}},
        "its cached_tokens are -1",
    ),
    "hashes that are none": ({"hash_ids": ["a"]}, "expected a list of whole numbers"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_line_that_is_no_request_is_named_with_its_number_and_why(what: str):
    row, reason = BAD[what]
    first, bad = read({"prompt": [1]}, row)
    assert (LoggedLookup, 2) == (type(first), bad.number)
    assert reason in bad.reason


@given(
    st.lists(
        st.one_of(
            st.text(max_size=40),
            st.recursive(
                st.none() | st.integers() | st.text(),
                lambda inner: (
                    st.lists(inner)
                    | st.dictionaries(
                        st.sampled_from(["prompt", "messages", "hash_ids", "usage", "model", "created"]), inner
                    )
                ),
                max_leaves=6,
            ).map(json.dumps),
        )
    )
)
def test_no_line_ends_the_reading(lines):
    found = list(RequestLog(None, 16).read(lines))
    assert sum(bool(line.strip()) for line in lines) == len(found)


def test_without_what_was_found_a_cache_of_any_size_is_taken_for_granted():
    system = ids(800)
    rows = [{"prompt": ids(20) + system} for _ in range(10)] + [{"prompt": [*system, 1]}, {"prompt": [*system, 2]}]
    report = examine_log(read(*rows)).report
    assert {Cause.COLD: 1, Cause.VOLATILE: 10, Cause.FOUND: 1} == report.causes


def test_what_had_to_leave_is_told_where_the_log_says_what_was_found():
    usage = {"prompt_tokens_details": {"cached_tokens": 0}}
    rows = [{"prompt": list(range(500)), "usage": usage} for _ in range(5)]
    assert {Cause.COLD: 1, Cause.EVICTED: 4} == examine_log(read(*rows)).report.causes


def test_a_day_is_as_long_as_the_log_says():
    system = ids(1000)
    rows = [{"prompt": ids(20) + system, "created": at * 60} for at in range(11)]
    (finding,) = examine_log(read(*rows)).report.findings
    assert (10, 600.0) == (finding.requests, examine_log(read(*rows)).report.seconds)
    assert 10 * 800 * 144 < finding.tokens_per_day < 10 * 1030 * 144


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    """One of transformers, for which each word of two letters is a token."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("jinja2")
    words = ["?", "user", "system", "go", *(f"{a}{b}" for a in "abcdefghij" for b in "abcdefghij")]
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="?")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    template = "{% for m in messages %}{{ m['role'] + ' ' + m['content'] }} {% endfor %}go"
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, chat_template=template)
    fast.save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


def test_a_chat_becomes_tokens_by_its_template_and_what_it_refuses_is_a_bad_line(tokenizer: str):
    log = RequestLog(LogTokenizer(tokenizer), 16)
    lines = [
        {"messages": [{"role": "user", "content": "ab cd"}]},
        {"messages": [{"role": "user"}, 7]},
        {"prompt": "ab"},
    ]
    chat, bad, text = log.read(json.dumps(line) for line in lines)
    assert (4, 1) == (chat.lookup.tokens.size, text.lookup.tokens.size)
    assert (BadLine, 2) == (type(bad), bad.number)
    assert "the chat template refuses" in bad.reason


def test_a_folder_without_a_tokenizer_is_one_line(tmp_path: Path):
    with pytest.raises(ConfigError, match="give the folder of one"):
        LogTokenizer(str(tmp_path))


def test_the_command_finds_a_planted_cause_and_names_bad_lines(
    tmp_path: Path, tokenizer: str, capsys: pytest.CaptureFixture[str]
):
    def words(count: int) -> str:
        return " ".join(DICE.choice("abcdefghij") + DICE.choice("abcdefghij") for _ in range(count))

    system = words(600)
    rows: list[object] = [
        {"model": "m", "messages": [{"role": "system", "content": f"{words(12)} {system}"}]} for _ in range(10)
    ]
    path = log_of(tmp_path / "log.jsonl", [*rows, "{", {"model": "m"}])
    assert 3 == main(["doctor", path, "--tokenizer", tokenizer, "--json"])
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert (10, 2, {"cold": 1, "volatile": 9}) == (found["requests"], found["bad_lines"], found["causes"])
    assert [f"{path}:11: it is no JSON", f"{path}:12: it has no messages"] == [
        line[: line.index(reason) + len(reason)]
        for line, reason in zip(printed.err.splitlines(), ("no JSON", "no messages"), strict=True)
    ]


def test_a_log_that_has_no_request_fails_and_one_that_is_not_there_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert 1 == main(["doctor", log_of(tmp_path / "bad", ["x"]), "--tokens"])
    assert 1 == main(["doctor", str(tmp_path / "none")])
    assert "cannot be read" in capsys.readouterr().err
    assert 1 == main(["doctor", log_of(tmp_path / "log", [{"prompt": [1]}]), "--block-tokens", "0"])
    assert 1 == main(["doctor", log_of(tmp_path / "log", [{"prompt": [1]}]), "--reset"])
