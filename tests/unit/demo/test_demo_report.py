"""The demo's result tells what held and what did not, and so does its exit code."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

from kvstore.demo import command
from kvstore.demo.command import DemoOptions, run
from kvstore.demo.errors import DemoError
from kvstore.demo.flow import DemoReport, DemoRow, _broken_promises, _Counts, _Seen
from kvstore.demo.report import as_json, as_table

MACHINE = {"processor": "CPU", "engine_threads": 2, "torch": "2", "transformers": "5"}


def row_of(**changes):
    values = {
        "engine": "A",
        "question": "How?",
        "answer": "So.",
        "prompt_tokens": 2000,
        "reused_tokens": 1984,
        "stored_blocks": 3,
        "ttft_cold_seconds": 4.0,
        "ttft_kvstore_seconds": 0.5,
        "identical": True,
        "tiers": ("host",),
        "broken": (),
    }
    return DemoRow(**values | changes)


def report_of(*rows, restart=None):
    return DemoReport(rows=list(rows), restart=restart or row_of(tiers=("disk",)), seconds=60.0, machine=MACHINE)


def answer_of(prompt, tokens, **changes):
    values = {"reused_tokens": 0, "stored_blocks": 0, "present_blocks": 0, "failures": {}}
    return {"prompt": prompt, "tokens": tokens} | values | changes


def test_the_table_shows_ratio_tier_and_identity():
    table = as_table(report_of(row_of(), row_of(tiers=("disk", "host"))))
    assert "4000 ms        500 ms   8.0x  host" in table
    assert "disk+host" in table
    assert "NO" not in table


def test_a_difference_shows_in_table_json_and_verdict():
    report = report_of(row_of(identical=False, broken=("generated tokens: [1], expected [2]",)))
    assert "NO" in as_table(report)
    assert "A: generated tokens: [1], expected [2]" in as_table(report)
    assert as_json(report)["identical"] is False
    assert not report.holds


def test_the_json_is_one_object_with_the_agreed_fields():
    fields = json.loads(json.dumps(as_json(report_of(row_of()))))
    assert {"identical", "rows", "restart", "machine"} <= fields.keys()
    assert fields["rows"][0]["ratio"] == 8.0
    assert fields["restart"]["tiers"] == ["disk"]


def test_long_questions_keep_the_columns_aligned():
    lines = as_table(report_of(row_of(question="why " * 40), row_of())).splitlines()
    assert lines[1].index("2000") == lines[2].index("2000")


PROMPT = list(range(40))
TOKENS = list(range(100, 110))


def test_a_first_question_must_store_all_whole_blocks():
    answer = answer_of(PROMPT, TOKENS, stored_blocks=3)
    assert _broken_promises(answer, answer, _Counts(3, 0, {"host": 0}), _Seen()) == ()


def test_a_repeated_question_must_reuse_all_but_one_token_and_store_nothing():
    answer = answer_of(PROMPT, TOKENS, reused_tokens=32, present_blocks=1)
    assert _broken_promises(answer, answer, _Counts(0, 1, {"host": 32}), _Seen([PROMPT + TOKENS[:-1]])) == ()


@pytest.mark.parametrize(
    ("answer", "counted", "broken"),
    [
        (answer_of(PROMPT, [1], stored_blocks=2), _Counts(2, 0, {}), ["generated tokens"]),
        (
            answer_of(PROMPT, TOKENS, stored_blocks=3, failures={"E": 1}),
            _Counts(3, 0, {}),
            ["failures of the connector"],
        ),
        (answer_of(PROMPT, TOKENS, stored_blocks=3), _Counts(3, 0, {"host": 16}), ["tokens the sidecar loaded"]),
        (answer_of(PROMPT, TOKENS, stored_blocks=3), _Counts(4, 0, {}), ["blocks the sidecar stored"]),
        (answer_of(PROMPT, TOKENS, stored_blocks=2), _Counts(2, 0, {}), ["blocks stored"]),
        (answer_of(PROMPT, TOKENS, stored_blocks=3), _Counts(3, 1, {}), ["blocks the sidecar had already"]),
    ],
)
def test_every_promise_is_checked(answer, counted, broken):
    found = _broken_promises(answer, answer_of(PROMPT, TOKENS), counted, _Seen())
    assert [sentence.split(":")[0] for sentence in found] == broken


@pytest.mark.parametrize(("broken", "code"), [((), 0), (("tokens reused: 0, expected 16",), 1)])
def test_the_exit_code_is_the_verdict(broken, code, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "prepare_weights", lambda folder, progress: folder)
    monkeypatch.setattr(command, "run_flow", lambda plan, progress: report_of(row_of(broken=broken)))
    assert run(DemoOptions(cache_dir=tmp_path, json=True)) == code
    assert json.loads(capsys.readouterr().out)["holds"] is (code == 0)


def test_missing_packages_are_told_with_the_command_that_helps(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DemoError, match=r'pip install "prefix-kvstore\[demo\]"'):
        run(DemoOptions(cache_dir=tmp_path))


def test_the_command_imports_no_engine():
    code = "import sys, kvstore.demo.command; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
