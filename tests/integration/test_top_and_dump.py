"""`kvstore top`, `status --json` and `debug dump` against a sidecar that runs."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import tarfile
import termios
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest

import kvstore
from kvstore.cli import main
from kvstore.cli.metrics_page import calls_of, read_metrics
from kvstore.cli.top import Reading, frame, rates_between, screen
from kvstore.stats import StoreStats, TierStats
from kvstore.testing.patience import ANSWER_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LAYOUT = kvstore.KvLayout(layers=2, kv_heads=1, head_dim=8, dtype="float32", block_tokens=16)
SALT = "salt-planted-7c1e"
SECRET = "secret-planted-90ab"
PAYLOAD = b"payload-planted-"
TOKEN = 4_123_456_789


class Sidecar(NamedTuple):
    address: str
    metrics: str


def environment(**more: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")} | more


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    folder = tmp_path_factory.mktemp("sidecar")
    (folder / "secret").write_text(SECRET)
    command = [sys.executable, "-P", "-m", "kvstore.cli", "serve", "--host-bytes", "16MiB"]
    command += ["--listen", f"unix://{folder}/s", "--metrics", "127.0.0.1:0"]
    command += ["--set", f"tenants.planted.secret_files={folder}/secret"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment()
    ) as process:
        try:
            ready = json.loads(process.stdout.readline())
            yield Sidecar(ready["listen"][0], ready["metrics"])
        finally:
            process.kill()


@pytest.fixture
def worked(sidecar: Sidecar) -> Sidecar:
    """The sidecar after a lookup, a store and a load of what must be found nowhere."""
    namespace = kvstore.Namespace(model="m", revision="r", layout=LAYOUT, tenant="planted", secret=SECRET.encode())
    root = kvstore.Root(salt=SALT)
    prompt = [TOKEN + at for at in range(64)]
    rows = np.frombuffer(PAYLOAD * (4 * LAYOUT.block_bytes // len(PAYLOAD)), np.uint8).reshape(4, -1)
    with kvstore.connect(sidecar.address) as client:
        client.match(namespace, prompt, root=root)
        with client.stage(namespace, prompt, root=root) as stage:
            stage.write_from(rows[: stage.blocks])
            stage.commit()
        match = client.match(namespace, prompt, root=root)
        with client.lease(match) as lease:
            lease.load_into(np.empty((4, LAYOUT.block_bytes), np.uint8))
    return sidecar


def test_status_tells_everything_as_json(worked: Sidecar, capsys: pytest.CaptureFixture[str]):
    assert 0 == main(["status", "--address", worked.address, "--json"])
    row = json.loads(capsys.readouterr().out)
    assert (True, True, kvstore.__version__) == (row["serving"], row["ready"], row["version"])
    assert 4 == row["tiers"]["host"]["blocks"]
    assert ({"state": "ready", "nodes": 1}, True) == (row["cluster"], row["uptime_seconds"] > 0)


def test_the_dump_has_what_a_report_needs_and_nothing_that_was_planted(
    worked: Sidecar, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    log, token = tmp_path / "log", "kvs_" + "A" * 43
    warning = f"warning: password={SECRET} at valkey://me:{SECRET}@cache:6379 with {token}, salt: {SALT}"
    log.write_text(f"first line\n{warning}\n")
    monkeypatch.setenv("KVSTORE_CLUSTER__DIRECTORY", f"valkey://me:{SECRET}@cache:6379")
    path = tmp_path / "dump.tar.gz"
    asked = ["debug", "dump", str(path), "--address", worked.address, "--metrics", worked.metrics, "--log", str(log)]
    assert 0 == main([*asked, "--json"])
    told = json.loads(capsys.readouterr().out)
    with tarfile.open(path) as archive:
        files = {entry.name: archive.extractfile(entry).read() for entry in archive}
    assert ({f"kvstore-debug/{name}" for name in told["files"]}, 0o600) == (set(files), path.stat().st_mode & 0o777)
    assert {"about.json", "settings.json", "stats.json", "status.json", "nodes.json", "verify.json", "doctor.json"} <= {
        *told["files"]
    }
    assert b"kvstore_call_seconds_bucket" in files["kvstore-debug/metrics.txt"]
    assert b"first line" in files["kvstore-debug/log.txt"]
    assert 4 <= json.loads(files["kvstore-debug/stats.json"])["stored_blocks"]
    found = b"\n".join(files.values())
    for planted in (SALT, SECRET, token, str(TOKEN), str(TOKEN + 1), PAYLOAD.decode(), PAYLOAD.hex()):
        assert planted.encode() not in found, planted


def test_a_dump_goes_over_no_file_and_says_what_it_lacks(worked: Sidecar, tmp_path: Path):
    path = tmp_path / "dump.tar.gz"
    path.write_text("mine")
    asked = ["debug", "dump", "--address", worked.address]
    assert 1 == main([*asked, str(path)])
    assert ("mine", [path]) == (path.read_text(), list(tmp_path.iterdir()))
    other = tmp_path / "other.tar.gz"
    assert 3 == main([*asked, str(other), "--metrics", "127.0.0.1:1"])
    with tarfile.open(other) as archive:
        assert b"no metrics at 127.0.0.1:1" in archive.extractfile("kvstore-debug/metrics.txt").read()


def test_one_reading_is_told_in_lines_with_calls_of_the_metrics_page(
    worked: Sidecar, capsys: pytest.CaptureFixture[str]
):
    asked = ["top", "--address", worked.address, "--metrics", worked.metrics, "--once", "--interval", "100ms"]
    assert 0 == main(asked)
    lines = capsys.readouterr().out.splitlines()
    assert ["kvstore top:", "hit rate", "a second", "open", "host"] == [
        next(line[: len(name)] for line in lines if line.startswith(name))
        for name in ("kvstore top:", "hit rate", "a second", "open", "host")
    ]
    assert 0 == main([*asked, "--json"])
    assert 0 <= json.loads(capsys.readouterr().out)["used_bytes"]["host"]
    assert {"Match", "Commit"} <= set(calls_of(read_metrics(worked.metrics)))


@pytest.mark.parametrize(("flag", "value"), [("--interval", "1ms"), ("--interval", "soon"), ("--metrics", "nowhere")])
def test_what_top_cannot_do_is_one_line(worked: Sidecar, flag: str, value: str, capsys: pytest.CaptureFixture[str]):
    assert 1 == main(["top", "--address", worked.address, "--once", flag, value])
    assert 1 == len(capsys.readouterr().err.splitlines())


def read_until(screen_side: int, text: str) -> str:
    """All that the terminal was sent until this was."""
    heard = ""
    while text not in heard:
        heard += os.read(screen_side, 4096).decode()
    return heard


@pytest.mark.parametrize("ending", [b"q", b"\x03"])
def test_on_a_terminal_it_draws_follows_its_size_and_leaves_it_as_it_was(worked: Sidecar, ending: bytes):
    mine, its = pty.openpty()
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, mine)
        fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        before = termios.tcgetattr(its)
        command = [sys.executable, "-P", "-m", "kvstore.cli", "top", "--address", worked.address, "--interval", "100ms"]
        process = stack.enter_context(
            subprocess.Popen(
                command,
                stdin=its,
                stdout=its,
                env=environment(),
                start_new_session=True,
                preexec_fn=lambda: fcntl.ioctl(its, termios.TIOCSCTTY, 0),
            )
        )
        stack.callback(process.kill)
        assert "\x1b[?1049h" in read_until(mine, "hit rate")
        fcntl.ioctl(mine, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 12, 0, 0))
        read_until(mine, "\x1b[H" + f"kvstore top: {worked.address}"[:12] + "\x1b[K")
        os.write(mine, ending)
        read_until(mine, "\x1b[?25h\x1b[?1049l")
        assert 0 == process.wait(timeout=ANSWER_SECONDS)
        assert before == termios.tcgetattr(its)
        os.close(its)


STATS = StoreStats(
    tiers={"host": TierStats(1000, 250, 5)}, namespaces=1, lookups=10, lookup_tokens=1000,
    hit_tokens={"host": 400}, loaded_tokens={"host": 300}, stored_blocks=7, present_blocks=0, rejected_blocks={},
    evicted_blocks={"space": 2}, corrupt_blocks=0, disk_faults={}, prefetches={}, prefetched_blocks=0, written_bytes=0,
    moves=0, leases=1, stages=2, pins=3, index_bytes=0, policy_bytes=0,
)  # fmt: skip


def test_rates_are_those_between_two_readings_and_of_a_server_that_was_restarted_those_since():
    later = replace(STATS, lookups=30, lookup_tokens=2000, hit_tokens={"host": 900, "disk": 100}, stored_blocks=17)
    rates = rates_between(Reading(1.0, STATS, {"Match": [1, 0]}), Reading(3.0, later, {"Match": [3, 0]}))
    assert (10.0, 0.6, {"host": 0.5, "disk": 0.1}, 5.0) == (
        rates.lookups, rates.hit_ratio, rates.hit_ratios, rates.stored_blocks,
    )  # fmt: skip
    assert {"Match": 1.0} == rates.calls
    restarted = rates_between(Reading(1.0, later, {}), Reading(2.0, STATS, {}))
    assert (10.0, 0.4) == (restarted.lookups, restarted.hit_ratio)
    assert rates_between(Reading(1.0, STATS, {}), Reading(1.0, STATS, {})).hit_ratio is None


def test_a_frame_is_no_larger_than_the_terminal():
    lines = screen("kvstore top: unix:///run/s", STATS, rates_between(Reading(1.0, STATS, {}), Reading(2.0, STATS, {})))
    assert any(re.match(r"host +\[#####\.+\] +25\.0%", line) for line in lines)
    rows = frame(lines, 20, 3).split("\r\n")
    assert 3 == len(rows)
    assert all(len(re.sub(r"\x1b\[[0-9?]*[A-Za-z]", "", row)) <= 20 for row in rows)
