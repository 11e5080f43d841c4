"""A process that has no descriptor or no thread to spare: calls fail by name or work, and work again afterwards.

Programs of their own, since what they do without is the whole process's.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore.testing.patience import ANSWER_SECONDS
from kvstore.testing.serving import ServedStore, grpc_address

PROGRAM = """
import os, resource, sys, threading, time
import numpy as np
import kvstore

LAYOUT = kvstore.KvLayout(layers=1, kv_heads=1, head_dim=8, dtype="float32", block_tokens=4)
NAMESPACE = kvstore.Namespace(model="m", revision="r", layout=LAYOUT)
TOKENS = list(list(range(40)))
ROWS = np.arange(10 * LAYOUT.block_bytes, dtype=np.uint32).astype(np.uint8).reshape(10, LAYOUT.block_bytes)
held = []
start_thread = threading.Thread.start

def refuse(thread):
    raise RuntimeError("can't start new thread")

def take_descriptors():
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    try:
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass

def give_descriptors():
    while held:
        os.close(held.pop())

def take_threads():
    threading.Thread.start = refuse

def give_threads():
    threading.Thread.start = start_thread

take, give = {"descriptors": (take_descriptors, give_descriptors), "threads": (take_threads, give_threads)}[sys.argv[2]]

def store():
    with client.stage(NAMESPACE, TOKENS) as staged:
        staged.write_from(ROWS)

def load():
    rows = np.zeros_like(ROWS)
    with client.lease(client.match(NAMESPACE, TOKENS)) as lease:
        done = lease.load_into(rows)
    assert (rows[: done.blocks] == ROWS[: done.blocks]).all()
    return done.blocks

def attempt_all():
    for call in (lambda: client.match(NAMESPACE, TOKENS), store, load, client.stats,
                 lambda: client.prefetch(NAMESPACE, TOKENS)):
        try:
            call()
        except kvstore.KvstoreError:
            pass

def wait_until_well():
    ends_at = time.monotonic() + 200
    while time.monotonic() < ends_at:
        try:
            store()
            return load()
        except kvstore.UnavailableError:
            time.sleep(0.01)

for _ in range(2):  # without a connection, and with one
    client = kvstore.connect(sys.argv[1], lookup_seconds=5.0, bulk_seconds=10.0)
    take()
    attempt_all()
    give()
    assert wait_until_well() == 10
    take()
    attempt_all()
    client.close()
    give()
print("well")
"""


@pytest.mark.parametrize("scarce", ["descriptors", "threads"])
@pytest.mark.parametrize("lane", ["wire", "grpc"])
def test_calls_fail_by_name_and_work_again_afterwards(lane: str, scarce: str, tmp_path: Path):
    with kvstore.open(host_bytes=1 << 22) as store, ServedStore(store, [f"unix://{tmp_path}/s"]) as served:
        address = served.addresses[0] if lane == "wire" else grpc_address(served.addresses[0])
        done = subprocess.run(
            [sys.executable, "-P", "-c", PROGRAM, address, scarce],
            capture_output=True,
            text=True,
            timeout=ANSWER_SECONDS,
        )
    if (lane, scarce, done.returncode) == ("grpc", "descriptors", -signal.SIGABRT):
        pytest.skip("gRPC itself ends a process in which it gets no descriptor for a poller; try again")
    assert (0, "well") == (done.returncode, done.stdout.strip()), done.stderr


def test_a_disk_that_gets_no_thread_says_so_and_goes_on_when_there_are_some(tmp_path: Path, monkeypatch):
    layout = kvstore.KvLayout(layers=1, kv_heads=1, head_dim=8, dtype="float32", block_tokens=4)
    namespace = kvstore.Namespace(model="m", revision="r", layout=layout)
    rows = np.arange(10 * layout.block_bytes, dtype=np.uint32).astype(np.uint8).reshape(10, layout.block_bytes)
    with kvstore.open(tmp_path, host_bytes=1 << 22, disk_bytes=1 << 25) as store:
        with store.stage(namespace, list(range(40))) as staged:
            staged.write_from(rows)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse_to_start)
            with pytest.raises(kvstore.StorageError, match="no thread is to be had for disk"):
                store.flush()
        store.flush()
    with kvstore.open(tmp_path, host_bytes=1 << 22, disk_bytes=1 << 25) as store:
        loaded = np.zeros_like(rows)
        with store.lease(store.match(namespace, list(range(40)))) as lease:
            assert 10 == lease.load_into(loaded).blocks
    assert (loaded == rows).all()


def refuse_to_start(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")
