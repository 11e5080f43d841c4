"""Ctrl-C at any moment of a call: no wrong byte, nothing held on the server, and the client goes on.

A program of its own is interrupted again and again; when, the seed says.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import kvstore
from kvstore.testing.patience import ANSWER_SECONDS
from kvstore.testing.serving import ServedStore, grpc_address

SEED = 301
PROGRAM = """
import faulthandler, os, random, signal, sys, threading, time
import numpy as np
import kvstore
from kvstore.transport import client as clients
from kvstore.transport.link import Deadlines

clients.DEFAULT_DEADLINES = Deadlines(lookup_seconds=10.0, bulk_seconds=30.0)  # not speed is asked
faulthandler.dump_traceback_later(80, exit=True)
INTERRUPTS = 60
LAYOUT = kvstore.KvLayout(layers=1, kv_heads=1, head_dim=8, dtype="float32", block_tokens=4)
NAMESPACE = kvstore.Namespace(model="m", revision="r", layout=LAYOUT)
TOKENS = list(range(40))
ROWS = np.arange(10 * LAYOUT.block_bytes, dtype=np.uint32).astype(np.uint8).reshape(10, LAYOUT.block_bytes)
client = kvstore.connect(sys.argv[1])
ended = threading.Event()
armed = False
turn = 0

def interrupt(number, frame):
    global armed
    if armed:
        armed = False  # so that counting one interrupt is not interrupted by the next
        raise KeyboardInterrupt

def store(tokens):
    with client.stage(NAMESPACE, tokens) as staged:
        staged.write_from(ROWS)

def load():
    rows = np.zeros_like(ROWS)
    with client.lease(client.match(NAMESPACE, TOKENS)) as lease:
        assert lease.load_into(rows).blocks == 10
    assert (rows == ROWS).all()

def pester():
    waits = random.Random(int(sys.argv[2]))
    while not ended.wait(waits.random() * 0.03):
        os.kill(os.getpid(), signal.SIGINT)

def work():
    global armed, turn
    armed = True
    while True:
        turn += 1
        (load, lambda: store([turn, *range(39)]), client.stats)[turn % 3]()

store(TOKENS)
interrupts = 0
signal.signal(signal.SIGINT, interrupt)
pest = threading.Thread(target=pester, daemon=True)
pest.start()
while interrupts < INTERRUPTS:
    try:
        work()
    except KeyboardInterrupt:
        interrupts += 1
    except kvstore.UnavailableError:
        pass
signal.signal(signal.SIGINT, signal.SIG_IGN)
ended.set()
pest.join()
while True:
    try:
        stats = client.stats()
        break
    except kvstore.UnavailableError:
        time.sleep(0.01)
load()
with kvstore.connect(sys.argv[1]) as other:
    while (stats := other.stats()).leases + stats.stages:
        time.sleep(0.01)
print("well", flush=True)
os._exit(0)  # gRPC may wait at the end of a program for what an interrupt left locked
"""


@pytest.mark.parametrize("lane", ["wire", "grpc"])
def test_an_interrupt_at_any_moment_of_a_call_leaves_a_client_that_goes_on(lane: str, tmp_path: Path):
    with kvstore.open(host_bytes=1 << 22) as store, ServedStore(store, [f"unix://{tmp_path}/s"]) as served:
        address = served.addresses[0] if lane == "wire" else grpc_address(served.addresses[0])
        done = subprocess.run(
            [sys.executable, "-P", "-c", PROGRAM, address, str(SEED)],
            capture_output=True,
            text=True,
            timeout=ANSWER_SECONDS,
        )
    assert (0, "well") == (done.returncode, done.stdout.strip()), done.stderr
