"""`kvstore bench load` against a real sidecar."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

import kvstore
from kvstore.load.plan import LoadPlan, Operation
from kvstore.load.worker import LoadClient, prompt_of
from kvstore.testing.conformance import MIB
from kvstore.testing.patience import ANSWER_SECONDS
from kvstore.testing.serving import ServedStore

if TYPE_CHECKING:
    from pathlib import Path


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "kvstore.cli", "bench", "load", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_SECONDS)


def test_a_load_is_reported_by_operation_and_leaves_nothing_behind(tmp_path: Path):
    with kvstore.open(None, host_bytes=16 * MIB) as store, ServedStore(store, [f"unix://{tmp_path}/s"]) as served:
        flags = ["--clients", "4", "--processes", "2", "--seconds", "1", "--mix", "match=2,load=2,store=1"]
        shape = ["--prompts", "4", "--prompt-tokens", "256", "--block-bytes", "4KiB", "--pid", str(os.getpid())]
        done = bench("--address", served.addresses[0], *flags, *shape, "--json")
        assert (0, "") == (done.returncode, done.stderr)
        told = json.loads(done.stdout)
        assert {"match", "load", "store"} == set(told["operations"])
        for row in told["operations"].values():
            assert row["count"] > 0
            assert row["p50_seconds"] <= row["p90_seconds"] <= row["p99_seconds"] <= row["p99.9_seconds"]
        assert ({}, 0) == (told["errors"], told["lost_processes"])
        assert told["hit_ratio"] > 0
        assert told["loaded_bytes_per_second"] > 0
        assert {"resident_bytes", "open_files", "threads"} == set(told["server"][0])
        stats = store.stats()
        assert (0, 0, 0) == (stats.tiers["host"].blocks, stats.leases, stats.stages)


def test_a_person_reads_a_table(tmp_path: Path):
    with kvstore.open(None, host_bytes=16 * MIB) as store, ServedStore(store, [f"unix://{tmp_path}/s"]) as served:
        done = bench("--address", served.addresses[0], "--seconds", "500ms", "--prompt-tokens", "64")
        assert (0, "") == (done.returncode, done.stderr)
        assert "p99.9 ms" in done.stdout.splitlines()[0]
        assert "errors: none" in done.stdout


@pytest.mark.parametrize("flags", [["--mix", "fetch=1"], ["--clients", "0"], ["--seconds", "soon"], ["--pid", "0"]])
def test_what_cannot_be_is_refused_in_one_line(tmp_path: Path, flags: list[str]):
    with kvstore.open(None, host_bytes=MIB) as store, ServedStore(store, [f"unix://{tmp_path}/s"]) as served:
        done = bench("--address", served.addresses[0], "--seconds", "100ms", *flags)
        assert (1, 1) == (done.returncode, done.stderr.count("\n"))


def test_an_absent_server_is_said_before_anything_begins(tmp_path: Path):
    done = bench("--address", f"unix://{tmp_path}/s")
    assert (1, "") == (done.returncode, done.stdout)
    assert "is `kvstore serve` running there?" in done.stderr


def test_a_server_that_gives_back_other_bytes_is_told_on(tmp_path: Path):
    with kvstore.open(None, host_bytes=16 * MIB) as store, ServedStore(store, [f"unix://{tmp_path}/s"]) as served:
        plan = LoadPlan(served.addresses[0], prompts=1, prompt_tokens=64)
        client = LoadClient(plan, 0)
        rows = np.zeros((plan.prompt_blocks, plan.block_bytes), dtype=np.uint8)  # right in block 0 alone
        with client._client:
            with store.stage(plan.namespace, prompt_of(plan, 0)) as stage:
                stage.write_from(rows)
            client._do(Operation.LOAD)
        assert {"WrongBytesError": 1} == dict(client.tally.errors)
