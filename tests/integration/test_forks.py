"""Children of a fork: they can break nothing of their parent's, and are told at once what they cannot use.

Each case is a program of its own, since what went wrong would end the process: gRPC's state and a store's memory are
shared with the child.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import kvstore
from kvstore.testing.patience import ANSWER_SECONDS
from kvstore.testing.serving import ServedStore, grpc_address

ROOT = Path(__file__).parents[2]
BEGIN = """
import os, sys, threading
import numpy as np
import kvstore
from kvstore.errors import ClosedError, UnavailableError

LAYOUT = kvstore.KvLayout(layers=1, kv_heads=1, head_dim=8, dtype="float32", block_tokens=4)
NAMESPACE = kvstore.Namespace(model="m", revision="r", layout=LAYOUT)
TOKENS = list(range(40))
ROWS = np.arange(10 * LAYOUT.block_bytes, dtype=np.uint32).astype(np.uint8).reshape(10, LAYOUT.block_bytes)

def refusal(call):
    try:
        call()
    except kvstore.KvstoreError as error:
        return type(error).__name__ if "fork" in str(error) else str(error)
    return "none"

def in_child(steps):
    \"\"\"Run steps in a child that ends as programs do; raises if one of them did not give what it should.\"\"\"
    sys.stdout.flush()
    child = os.fork()
    if not child:
        found = {name: found for name, (call, wanted) in steps.items() if (found := refusal(call)) != wanted}
        print(found or "", end="", flush=True)
        sys.exit(1 if found else 0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, f"the child ended with {status}"
"""
EMBEDDED = """
with kvstore.open(sys.argv[1], host_bytes=1 << 22, disk_bytes=1 << 25) as store:
    with store.stage(NAMESPACE, TOKENS) as staged:
        staged.write_from(ROWS)
    lease = store.lease(store.match(NAMESPACE, TOKENS))
    stage = store.stage(NAMESPACE, [7, *TOKENS])
    rows = ROWS.copy()
    pid = os.getpid()
    refused = "ClosedError"
    in_child({
        "match": (lambda: store.match(NAMESPACE, TOKENS), refused),
        "load": (lambda: lease.load_into(rows), refused),
        "write": (lambda: stage.write_from(~ROWS), refused),
        "commit": (stage.commit, refused),
        "stage": (lambda: store.stage(NAMESPACE, [9, *TOKENS]), refused),
        "clear": (lambda: store.clear(NAMESPACE), refused),
        "flush": (store.flush, refused),
        "release": (lease.release, "none"),
        "abort": (stage.abort, "none"),
        "stats": (store.stats, refused),
        "close": (store.close, "none"),
    })
    if os.getpid() != pid:
        sys.exit(0)
    stage.write_from(ROWS)
    assert stage.commit().blocks == 10
    rows[:] = 0
    assert lease.load_into(rows).blocks == 10 and (rows == ROWS).all()
    lease.release()
    with store.lease(store.match(NAMESPACE, [7, *TOKENS])) as lease:
        rows[:] = 0
        assert lease.load_into(rows).blocks == 10 and (rows == ROWS).all()
    store.flush()
    try:
        kvstore.open(sys.argv[1], host_bytes=1 << 22, disk_bytes=1 << 25)
    except kvstore.errors.StorageError:
        print("alive")
"""
SERVED = """
client = kvstore.connect(sys.argv[1])
with client.stage(NAMESPACE, TOKENS) as staged:
    staged.write_from(ROWS)
lease = client.lease(client.match(NAMESPACE, TOKENS))
rows = ROWS.copy()
in_child({
    "match": (lambda: client.match(NAMESPACE, TOKENS), "UnavailableError"),
    "load": (lambda: lease.load_into(rows), "UnavailableError"),
    "another client": (lambda: kvstore.connect(sys.argv[1]).match(NAMESPACE, TOKENS), "UnavailableError"),
    "release": (lease.release, "none"),
    "close": (client.close, "none"),
})
for _ in range(20):
    assert client.match(NAMESPACE, TOKENS).blocks == 10
rows[:] = 0
assert lease.load_into(rows).blocks == 10 and (rows == ROWS).all()
lease.release()
client.close()
print("alive")
"""


def run(program: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-X", "faulthandler", "-c", BEGIN + program, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=ANSWER_SECONDS,
        cwd=ROOT,
    )
    assert 0 == done.returncode, f"{done.stdout}\n{done.stderr}"
    return done.stdout.strip()


def test_a_child_cannot_use_or_harm_the_store_of_its_parent(tmp_path: Path):
    assert "alive" == run(EMBEDDED, tmp_path / "data")


def test_a_child_cannot_use_or_harm_the_grpc_client_of_its_parent(tmp_path: Path):
    with kvstore.open(host_bytes=1 << 22) as store, ServedStore(store, [f"unix://{tmp_path}/s"]) as served:
        assert "alive" == run(SERVED, grpc_address(served.addresses[0]))
