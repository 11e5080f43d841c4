"""Processes of the demo are spoken to in JSON lines, their failures are told in one line, and none stays behind."""

from __future__ import annotations

import sys

import pytest

from kvstore.demo.errors import DemoError
from kvstore.demo.processes import DemoProcess

ECHO = """
import json, sys
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    if "end" in line:
        sys.exit("asked to end")
    print(line, end="", flush=True)
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    (tmp_path / "echo_module.py").write_text(ECHO)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return lambda module="echo_module": DemoProcess("thing", module, [], tmp_path / "log")


def test_requests_are_answered_and_the_process_is_gone_afterwards(start):
    with start() as process:
        assert process.receive() == {"ready": True}
        process.send({"ask": "a"})
        assert process.receive() == {"ask": "a"}
    assert process._process.returncode is not None


def test_the_process_is_gone_after_an_exception_too(start):
    with pytest.raises(KeyboardInterrupt), start() as process:
        raise KeyboardInterrupt
    assert process._process.returncode is not None


def test_a_process_that_ends_is_told_with_what_it_said(start):
    with start() as process:
        process.receive()
        process.send({"end": 1})
        with pytest.raises(DemoError, match="the thing ended with code 1: asked to end"):
            process.receive()


def test_a_killed_process_takes_no_request(start):
    with start() as process:
        process.kill()
        with pytest.raises(DemoError, match="the thing ended with code -9: it said nothing"):
            process.send({"ask": "a" * 100_000})


def test_a_module_that_is_missing_is_told(start):
    with start("no_such_module") as process, pytest.raises(DemoError, match="No module named no_such_module"):
        process.receive()


def test_an_answer_that_never_comes_ends_the_process(start, monkeypatch):
    monkeypatch.setattr(sys.modules[DemoProcess.__module__], "ANSWER_SECONDS_MAX", 0.01)
    with start("json.tool") as process, pytest.raises(DemoError, match="code -9"):
        process.receive()  # json.tool waits for the end of stdin
