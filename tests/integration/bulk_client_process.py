"""A client that moves bytes through an engine, for tests that watch or end it.

python bulk_client_process.py ADDRESS ENGINE BULK_SECONDS once|"go on"
"""

from __future__ import annotations

import sys

import numpy as np

import kvstore
from kvstore.errors import UnavailableError
from kvstore.testing.blocks import expected_rows, store_prompt
from kvstore.types import KvLayout, Namespace

# 1 MiB for each block, 64 of them: a transfer takes some milliseconds, over whatever UCX finds.
LAYOUT = KvLayout(layers=1, kv_heads=8, head_dim=1024, dtype="float16", block_tokens=32)
NAMESPACE = Namespace(model="model", revision="revision", layout=LAYOUT)
BLOCKS = 64
PROMPT = list(range(BLOCKS * LAYOUT.block_tokens))


def say(*words: object) -> None:
    """A line for whoever watches."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def load(lease: kvstore.Lease) -> int:
    """Load the prompt; returns how many blocks came, all of them right."""
    right = expected_rows(NAMESPACE, PROMPT)
    rows = np.zeros_like(right)
    blocks = lease.load_into(rows).blocks
    assert np.array_equal(right[:blocks], rows[:blocks]), "a block holds other bytes than were stored"
    return blocks


def main(address: str, engine: str, bulk_seconds: str, what: str) -> None:
    """Store and load once, and tell how; then load until killed, or until the server is gone, if that is to be done."""
    with kvstore.connect(address, bulk=engine, lookup_seconds=10.0, bulk_seconds=float(bulk_seconds)) as client:
        if client.match(NAMESPACE, PROMPT).blocks < BLOCKS:
            store_prompt(client, NAMESPACE, PROMPT)
        lease = client.lease(client.match(NAMESPACE, PROMPT))
        loaded = load(lease)
        status = client.bulk
        assert status is not None
        say(loaded, status.moved_bytes, status.failures)
        try:
            while what == "go on":
                say(load(lease))
        except UnavailableError:
            say("unavailable")
    say("closed")


if __name__ == "__main__":
    main(*sys.argv[1:])
