"""`kvstore replay` as a user types it."""

from __future__ import annotations

import io
import json
import sys

import pytest

from kvstore.cli import main
from kvstore.cli.progress import ProgressBar


@pytest.fixture
def trace(tmp_path) -> str:
    """Two prompts of two blocks of 512 tokens, in turn."""
    path = tmp_path / "small.jsonl"
    lines = [{"timestamp": at, "input_length": 1030, "hash_ids": [at % 2 * 2, at % 2 * 2 + 1]} for at in range(8)]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return str(path)


def rows_of(capsys) -> list[dict[str, object]]:
    return json.loads(capsys.readouterr().out)["rows"]


def test_every_policy_is_run_at_every_capacity(trace, capsys):
    assert 0 == main(["replay", trace, "--capacity", "50%,4,256MiB", "--policies", "lru,default", "--json"])

    rows = rows_of(capsys)
    assert [("lru", "50%", 2), ("default", "50%", 2), ("lru", "4", 4), ("default", "4", 4)] == [
        (row["policy"], row["capacity"], row["capacity_blocks"]) for row in rows[:4]
    ]
    assert 4 == rows[4]["capacity_blocks"]  # a block of 512 tokens has 64 MiB by default
    assert [0, 1] == [rows[0]["block_hit_rate"], rows[2]["block_hit_rate"]]
    assert [1.0, 1024 / 1030] == [rows[0]["infinite"], rows[2]["token_hit_rate"]]


def test_expansion_and_a_disk_tier(trace, capsys):
    flags = ["--capacity", "64", "--disk", "64", "--expand", "512:16", "--block-bytes", "1kB", "--warm", "0", "--json"]
    assert 0 == main(["replay", trace, *flags])

    (row,) = rows_of(capsys)
    assert (8 * 64, 64 * 1000) == (row["blocks"], row["capacity_bytes"])
    assert 6 / 8 == row["block_hit_rate"]
    assert row["disk_block_hit_rate"] > 0


def test_the_table_is_for_people(trace, capsys):
    assert 0 == main(["replay", trace, "--capacity", "4"])

    shown = capsys.readouterr()
    assert "8 requests, 4 unique blocks of 512 tokens and 64MiB (as of an 8B model" in shown.out
    assert "default  4" in shown.out
    assert "" == shown.err


def test_bad_lines_fail_or_are_counted(trace, capsys):
    with open(trace, "a") as file:
        file.write("{}\n")

    assert 1 == main(["replay", trace, "--capacity", "4"])
    assert "kvstore replay: " in (error := capsys.readouterr().err)
    assert f"{trace}:9: " in error

    assert 0 == main(["replay", trace, "--capacity", "4", "--skip-bad-lines"])
    assert "note: 1 bad lines were skipped" in capsys.readouterr().out


def test_files_are_written(trace, tmp_path, capsys):
    pytest.importorskip("pyarrow")
    pytest.importorskip("matplotlib")
    files = [tmp_path / "rows.parquet", tmp_path / "plot.svg"]

    assert 0 == main(["replay", trace, "--capacity", "2,4", "--parquet", str(files[0]), "--plot", str(files[1])])

    assert all(file.stat().st_size for file in files)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--capacity", "x"], "expected a percentage"),
        (["--capacity", "4,,5"], "parted by commas"),
        (["--disk", "0"], "less than one block"),
        (["--policies", "best"], "no policy is called 'best'"),
        (["--admission", "best"], "no rule of admission is called 'best'"),
        (["--warm", "1"], "warm-up"),
        (["--expand", "512"], "--expand '512'"),
        (["--expand", "512:0"], "--expand '512:0'"),
        (["--expand", "512:100"], "--expand '512:100'"),
        (["--expand", "16:4"], "the trace has 512"),
        (["--block-tokens", "0"], "--block-tokens is 0"),
        (["--block-bytes", "much"], "--block-bytes 'much'"),
        (["--block-bytes", "0"], "--block-bytes is 0"),
        (["--speed", "0"], "--speed is 0"),
        (["--plot", "plot.pdf"], "expected a name that ends"),
    ],
)
def test_a_mistake_is_one_line(trace, capsys, flags, reason):
    assert 1 == main(["replay", trace, *flags])

    error = capsys.readouterr().err
    assert reason in error
    assert 1 == error.count("\n")


def test_scaled_time_keeps_the_distance_of_requests(trace, capsys):
    assert 0 == main(["replay", trace, "--capacity", "4", "--speed", "1", "--json"])

    (row,) = rows_of(capsys)
    assert row["run_seconds"] >= 0.007


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_progress_bar_is_wiped_at_the_end(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)

    with ProgressBar(2) as bar:
        bar.advance("lru at 1%")
        bar.advance("lru at 1%")

    half, whole = f"[{'#' * 15}{'.' * 15}]  50 %  lru at 1%", f"[{'#' * 30}] 100 %  lru at 1%"
    assert f"\r{half}\r{whole}\r{' ' * len(whole)}\r" == terminal.getvalue()


def test_without_a_terminal_there_is_no_progress(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)

    with ProgressBar(1) as bar:
        bar.advance("lru at 1%")

    assert "" == stream.getvalue()
