from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from kvstore.errors import InvalidArgumentError, StorageError
from kvstore.replay import report as reports
from kvstore.replay.capacity import Capacity
from kvstore.replay.errors import MissingExtraError
from kvstore.replay.run import Replay
from kvstore.replay.trace import read_trace
from kvstore.testing.manual_clock import ManualClock

if TYPE_CHECKING:
    from collections.abc import Callable

    MakeReport = Callable[..., reports.Report]


@pytest.fixture
def make_report(write_lines, chats) -> MakeReport:
    trace = read_trace(write_lines(*chats))
    replay = Replay(trace, block_bytes=1 << 30, warm_ratio=0.5, clock=ManualClock())

    def make(disk: Capacity | None = None) -> reports.Report:
        rows = [
            replay.run(name, Capacity(f"{blocks}", blocks), disk) for blocks in (20, 5) for name in ("lru", "default")
        ]
        return reports.Report(
            trace=trace, block_bytes=1 << 30, block_bytes_source="as given", warm_ratio=0.5, rows=rows
        )

    return make


def test_the_heading_says_what_was_replayed(make_report):
    heading = reports.heading(make_report())

    for part in ("trace.jsonl (mooncake)", "120 requests", "4 tokens", "1GiB (as given)", "first 50%"):
        assert part in heading


def test_the_table_has_a_row_for_each_run_in_percent(make_report):
    report = make_report()
    header, cells = reports.table(report)

    assert ["lru", "default", "lru", "default"] == [row[0] for row in cells]
    assert {len(header)} == {len(row) for row in cells}
    assert round(100 * report.rows[0].block_hit_rate, 1) == cells[0][header.index("block hit %")]
    assert "disk hit %" not in header


def test_the_table_tells_of_the_disk_where_there_is_one(make_report):
    report = make_report(Capacity("30", 30))
    header, cells = reports.table(report)

    assert {len(header)} == {len(row) for row in cells}
    assert report.rows[0].demoted_bytes / 2**30 == cells[0][header.index("demoted GiB")]


def test_json_has_the_rates_under_their_agreed_names(make_report):
    shown = json.loads(json.dumps(reports.as_json(make_report())))

    assert {"policy", "capacity", "block_hit_rate", "token_hit_rate", "optimal", "infinite"} <= set(shown["rows"][0])
    assert "exact" in shown["optimal"]


def test_footnotes_say_what_the_optimum_is(make_report):
    assert reports.footnotes(make_report())[0].startswith("optimal: MIN")


def test_parquet_holds_the_rows(make_report, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    report = make_report()

    reports.write_parquet(report, tmp_path / "rows.parquet")

    rows = parquet.read_table(tmp_path / "rows.parquet").to_pylist()
    assert [row.block_hit_rate for row in report.rows] == [row["block_hit_rate"] for row in rows]
    assert {"trace.jsonl"} == {row["trace"] for row in rows}


@pytest.mark.parametrize(("name", "magic"), [("plot.png", b"\x89PNG"), ("plot.svg", b"<?xml")])
def test_the_plot_is_a_picture_of_the_asked_kind(make_report, tmp_path, name, magic):
    pytest.importorskip("matplotlib")

    reports.write_plot(make_report(), tmp_path / name)

    assert (tmp_path / name).read_bytes().startswith(magic)


@pytest.mark.parametrize(("write", "module"), [(reports.write_parquet, "pyarrow"), (reports.write_plot, "matplotlib")])
def test_a_file_that_cannot_be_written_is_told(make_report, tmp_path, write, module):
    pytest.importorskip(module)
    with pytest.raises(StorageError, match="cannot be written"):
        write(make_report(), tmp_path / "absent" / "file.png")


def test_outputs_are_checked_before_the_work(tmp_path, monkeypatch):
    reports.check_outputs(parquet=None, plot=None)
    with pytest.raises(InvalidArgumentError, match=r"\.png or \.svg"):
        reports.check_outputs(parquet=None, plot=tmp_path / "plot.pdf")

    monkeypatch.setattr(reports, "find_spec", lambda _module: object())
    with pytest.raises(InvalidArgumentError, match="there is no folder"):
        reports.check_outputs(parquet=tmp_path / "absent" / "rows.parquet", plot=None)

    monkeypatch.setattr(reports, "find_spec", lambda _module: None)
    with pytest.raises(MissingExtraError, match=r"needs matplotlib: pip install 'prefix-kvstore\[plot\]'"):
        reports.check_outputs(parquet=None, plot=tmp_path / "plot.svg")
