"""What sidecars killed at any moment leave behind, and what the next one makes of it: nothing may pile up."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import kvstore
from kvstore.testing.blocks import store_prompt, verified_blocks
from kvstore.testing.patience import ANSWER_SECONDS
from kvstore.types import KvLayout, Namespace

LAYOUT = KvLayout(layers=2, kv_heads=2, head_dim=32, dtype="float16", block_tokens=4)
NAMESPACE = Namespace(model="model", revision="revision", layout=LAYOUT)
PROMPT = list(range(160))
OLD = 10.0  # seconds since 1970


@contextlib.contextmanager
def sidecar(folder: Path):
    """A sidecar whose sockets, data and temporary files all lie below `folder`; killed at the end."""
    flags = ("--listen", f"unix://{folder}/run/s", "--data-dir", folder / "data", "--disk-bytes", "64MiB")
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "kvstore.cli", "serve", "--host-bytes", "16MiB", *map(str, flags)],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ, "TMPDIR": f"{folder}/tmp"},
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


def ready_address(process: subprocess.Popen) -> str:
    return json.loads(process.stdout.readline())["listen"][0]


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("run", "tmp"):
        (tmp_path / name).mkdir()
    return tmp_path


@pytest.mark.kill
def test_killed_sidecars_leave_nothing_that_a_next_one_does_not_take_away(folder: Path) -> None:
    with sidecar(folder) as process, kvstore.connect(ready_address(process)) as client:
        store_prompt(client, NAMESPACE, PROMPT)
        client.flush()
        process.kill()
    generator = random.Random(7)
    for _ in range(4):
        with sidecar(folder) as process, contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(generator.uniform(0.3, 2.5))
    for made in [*(folder / "run").glob(".kv*"), *(folder / "tmp").glob("kvstore-*")]:
        os.utime(made, (OLD, OLD))
    with sidecar(folder) as process:
        with kvstore.connect(ready_address(process)) as client:
            assert 40 == verified_blocks(client, NAMESPACE, PROMPT)
            store_prompt(client, NAMESPACE, PROMPT[:-40] + [9] * 40)
        assert {"s"} == names(folder / "run")
        assert set() == names(folder / "tmp")
        process.send_signal(signal.SIGTERM)
        assert 0 == process.wait(ANSWER_SECONDS)
    assert set() == names(folder / "run")
    left = names(folder / "data")
    assert [] == sorted(name for name in left if name.endswith(".new") or "probe" in name)
    assert {"LOCK", "index", "policy", "secret", "slabs", "superblock"} == {name for name in left if "/" not in name}


@pytest.mark.kill
def test_the_memory_of_a_killed_sidecar_goes_with_it(folder: Path) -> None:
    with sidecar(folder) as process, kvstore.connect(ready_address(process)) as client:
        store_prompt(client, NAMESPACE, PROMPT)
        inodes = {inode for pid, inode in host_memory() if pid == process.pid}
        assert inodes
        process.kill()
        process.wait(ANSWER_SECONDS)
        assert [] == [pid for pid, inode in host_memory() if inode in inodes]


def host_memory() -> list[tuple[int, int]]:
    """Every descriptor of host memory on this machine: process id and inode."""
    found = []
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # ended, or not ours to see
            if "memfd:kvstore-host" in os.readlink(link):
                found.append((int(link.parts[2]), link.stat().st_ino))
    return found


@pytest.mark.kill
def test_old_folders_of_sockets_are_swept_and_all_else_stays(folder: Path) -> None:
    kept = {
        "run/.kvyoung": "s",
        "run/.kvother": "data",
        "tmp/kvstore-young": "grpc",
        "tmp/kvstore-demo-x": "weights",
        "tmp/else": "grpc",
    }
    swept = {"run/.kvold": "s", "run/.kvempty": None, "tmp/kvstore-old": "grpc"}
    for name, inner in {**kept, **swept}.items():
        (folder / name).mkdir()
        if inner is not None:
            (folder / name / inner).touch()
        if "young" not in name:
            os.utime(folder / name, (OLD, OLD))
    with sidecar(folder) as process:
        ready_address(process)
        for name, inner in kept.items():
            assert (folder / name / inner).exists(), name
        assert [] == [name for name in swept if (folder / name).exists()]
