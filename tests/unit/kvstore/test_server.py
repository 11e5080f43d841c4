"""How the sidecar decides what settings leave to it, and the lines of its log. The process itself: test_serve.py."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from kvstore import server
from kvstore.config import load_config
from kvstore.log_lines import JsonFormatter, TextFormatter
from kvstore.quantities import format_size
from kvstore.tiers.memory_limit import MemoryLimit

MIB = 2**20


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (MemoryLimit(1000 * MIB + 5, "test"), 250 * MIB),
        (MemoryLimit(100 * MIB, "test"), 64 * MIB),
        (MemoryLimit(1 << 40, "test"), 64 << 30),
        (None, 64 * MIB),
    ],
)
def test_host_memory_is_a_quarter_of_what_is_left_within_bounds_and_said(monkeypatch, caplog, limit, expected):
    monkeypatch.setattr(server, "memory_limit", lambda: limit)

    with caplog.at_level(logging.INFO, logger="kvstore.server"):
        assert expected == server.host_bytes(load_config(environ={}).config)

    assert [f"capacity={format_size(expected)}"] == [
        word for word in caplog.text.split() if word.startswith("capacity=")
    ]


def test_host_memory_that_is_set_is_taken_as_it_is(monkeypatch):
    monkeypatch.setattr(server, "memory_limit", lambda: MemoryLimit(0, "test"))

    assert 3 * MIB == server.host_bytes(load_config(environ={}, flags={"tiers.host.capacity_bytes": "3MiB"}).config)


def record(with_trace: bool) -> logging.LogRecord:
    made = logging.makeLogRecord(
        {"name": "kvstore.x", "levelno": logging.WARNING, "levelname": "WARNING", "msg": "full: used=%d", "args": (3,),
         "created": 0.25, "msecs": 250.0}
    )  # fmt: skip
    if with_trace:
        try:
            raise ValueError("broken")
        except ValueError:
            made.exc_info = sys.exc_info()
    return made


def test_a_text_line_has_time_level_logger_and_message():
    assert "1970-01-01T00:00:00.250Z WARNING kvstore.x full: used=3" == TextFormatter().format(record(False))


def test_a_json_line_is_one_object_even_with_a_trace():
    line = JsonFormatter().format(record(True))

    row = json.loads(line)
    assert 1 == len(line.splitlines())
    assert ("1970-01-01T00:00:00.250Z", "warning", "kvstore.x", "full: used=3") == (
        row["time"],
        row["level"],
        row["logger"],
        row["message"],
    )
    assert "ValueError: broken" in row["trace"]


class FakeLibrary:
    def __init__(self) -> None:
        self.options: dict[int, int] = {}

    def mallopt(self, option: int, value: int) -> int:
        self.options[option] = value
        return 1


def test_freed_memory_is_kept_in_one_pool_and_within_bounds(monkeypatch):
    library = FakeLibrary()
    monkeypatch.setattr(server.ctypes, "CDLL", lambda _name: library)

    server.keep_freed_memory()

    assert {-8: 1, -3: 32 * MIB, -1: 32 * MIB} == library.options


def test_a_library_without_mallopt_is_left_as_it_is(monkeypatch):
    monkeypatch.setattr(server.ctypes, "CDLL", lambda _name: object())

    server.keep_freed_memory()
