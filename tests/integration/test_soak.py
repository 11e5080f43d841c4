"""Under load a server stays as it is: memory, open files and threads do not grow."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import kvstore
from kvstore.load.plan import LoadPlan, parse_mix
from kvstore.load.run import ServerSample, run_load, sample_process

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# `make soak` sets ten minutes.
SECONDS = float(os.environ.get("KVSTORE_SOAK_SECONDS", "20"))
RESULT_STEP = 10  # of the samples, one a second
GROWTH_BYTES_MAX = 4 * 2**20  # beside the log of events and what the policy keeps, which have bounds of their own
GROWTH_FILES_MAX = 12  # slabs and connections for bytes are opened as they are needed
GROWTH_THREADS_MAX = 8  # pools grow to their size as they are needed


@pytest.mark.slow
@pytest.mark.kill
def test_a_server_under_load_does_not_grow(
    tmp_path: Path, keep_result: Callable[[str, list[dict[str, object]]], None]
) -> None:
    address = f"unix://{tmp_path}/s"
    serve = [sys.executable, "-P", "-m", "kvstore.cli", "serve", "--data-dir", str(tmp_path / "data")]
    # A log of events that is full at once: it has its own bound, and grows to it.
    sizes = [
        "--listen",
        address,
        "--host-bytes",
        "32MiB",
        "--disk-bytes",
        "64MiB",
        "--set",
        "events.capacity_bytes=1MiB",
    ]
    process = subprocess.Popen([*serve, *sizes], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        mix = parse_mix("match=6,load=3,store=1")
        plan = LoadPlan(
            address, clients=6, processes=2, seconds=SECONDS, mix=mix, prompts=32, prompt_tokens=512, block_bytes=8192
        )
        with kvstore.connect(address) as client:
            learnt: list[int] = []  # what the policy keeps has its own bound, too

            def sample() -> ServerSample:
                learnt.append(client.stats().policy_bytes)
                return sample_process(process.pid)

            report = run_load(plan, sample, lambda _share: None)
    finally:
        process.kill()
        process.communicate()
    told = report.as_json()
    kept = {"server": told["server"][::RESULT_STEP], "policy_bytes": learnt[::RESULT_STEP]}
    keep_result("soak.json", [told | kept])
    assert {} == {kind: count for kind, count in report.tally.errors.items() if kind != "UnavailableError"}
    assert 0 == report.lost_processes
    quarter = len(report.samples) // 4
    early, late = report.samples[quarter : 2 * quarter], report.samples[-quarter - 1 : -1]
    sizes_besides = [one.resident_bytes - kept for one, kept in zip(report.samples, learnt, strict=True)]
    grown = statistics.median(sizes_besides[-quarter - 1 : -1]) - statistics.median(
        sizes_besides[quarter : 2 * quarter]
    )
    assert grown < GROWTH_BYTES_MAX
    assert max(one.open_files or 0 for one in late) <= max(one.open_files or 0 for one in early) + GROWTH_FILES_MAX
    assert max(one.threads or 0 for one in late) <= max(one.threads or 0 for one in early) + GROWTH_THREADS_MAX
