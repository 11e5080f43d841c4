"""Mooncake Store for bench_bulk.py, in a Python that has it: `python mooncake_peer.py BLOCK_BYTES ALL_BYTES`.

Starts a master and a process that lends a segment, both on the loopback over TCP, and is their client. Answers lines
of `load|store batch|one` with the seconds that all blocks took; its own lines begin with `@`. Loads go into registered
memory, stores come from it; the segment is written once before, so that none pays for fresh pages.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

HOST = "127.0.0.1"
SEGMENT_BYTES = 1 << 30
LOCAL_BYTES = 256 << 20
PACKAGE = "mooncake-transfer-engine-non-cuda"
PATIENCE_SECONDS = 30.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def open_store(master: str, segment_bytes: int) -> Any:  # noqa: ANN401  # a class without types
    """A client of the store; one that lends memory if `segment_bytes` is not 0."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    until = time.monotonic() + PATIENCE_SECONDS
    while store.setup(HOST, "P2PHANDSHAKE", segment_bytes, LOCAL_BYTES, "tcp", "", master) != 0:
        if time.monotonic() > until:
            raise RuntimeError(f"no master answers at {master}")
    return store


def say(text: object) -> None:
    sys.stdout.write(f"@{text}\n")
    sys.stdout.flush()


class Blocks:
    """Blocks of one size in the store, read and written by one client."""

    def __init__(self, store: Any, block_bytes: int, all_bytes: int) -> None:  # noqa: ANN401  # as open_store()
        self._store = store
        self._size = block_bytes
        self._target = np.zeros(all_bytes, dtype=np.uint8)
        self._source = np.random.default_rng(1).integers(0, 256, all_bytes, dtype=np.uint8)
        for memory in (self._source, self._target):
            assert store.register_buffer(memory.ctypes.data, memory.nbytes) == 0
        self._count = all_bytes // block_bytes
        self._keys = [f"block-{index}" for index in range(self._count)]
        self._turn = 0
        assert all(code == 0 for code in self._put(self._keys))
        self.run("load batch")
        assert np.array_equal(self._source, self._target)

    def run(self, what: str) -> float:
        """Seconds that all blocks took; what was stored is removed behind the clock."""
        self._turn += 1
        keys = [f"new-{self._turn}-{index}" for index in range(self._count)]
        start = time.perf_counter()
        if what == "load batch":
            done = self._store.batch_get_into(self._keys, self._addresses(self._target), [self._size] * self._count)
            assert all(size == self._size for size in done), done
        elif what == "load one":
            for key, address in zip(self._keys, self._addresses(self._target), strict=True):
                assert self._store.get_into(key, address, self._size) == self._size
        elif what == "store batch":
            assert all(code == 0 for code in self._put(keys))
        else:
            for key, address in zip(keys, self._addresses(self._source), strict=True):
                assert self._store.put_from(key, address, self._size) == 0
        seconds = time.perf_counter() - start
        if what.startswith("store"):
            for key in keys:
                self._store.remove(key)
        return seconds

    def _put(self, keys: list[str]) -> list[int]:
        return self._store.batch_put_from(keys, self._addresses(self._source), [self._size] * self._count)

    def _addresses(self, memory: np.ndarray) -> list[int]:
        return [memory.ctypes.data + self._size * index for index in range(self._count)]


def lend(master: str) -> None:
    """Lend a segment until stdin ends."""
    store = open_store(master, SEGMENT_BYTES)
    filler = np.zeros(16 << 20, dtype=np.uint8)
    store.register_buffer(filler.ctypes.data, filler.nbytes)
    keys = [f"fill-{index}" for index in range(SEGMENT_BYTES // filler.nbytes * 9 // 10)]
    for key in keys:
        store.put_from(key, filler.ctypes.data, filler.nbytes)
    for key in keys:
        store.remove(key)
    say("lent")
    sys.stdin.read()
    os._exit(0)


def main() -> None:
    """Serve the bench."""
    os.environ["MC_TCP_BIND_ADDRESS"] = HOST
    if sys.argv[1] == "lend":
        lend(sys.argv[2])
    port = free_port()
    package = find_spec("mooncake")
    assert package is not None, "this Python has no Mooncake"
    assert package.origin is not None, package
    program = Path(package.origin).with_name("mooncake_master")  # itself: the command of that name starts a child
    command = [str(program), f"--rpc_port={port}", f"--metrics_port={free_port()}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as master:
        lending = [sys.executable, "-P", __file__, "lend", f"{HOST}:{port}"]
        with subprocess.Popen(lending, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as lender:
            assert lender.stdout is not None
            for line in lender.stdout:
                if line.startswith("@lent"):
                    break
            blocks = Blocks(open_store(f"{HOST}:{port}", 0), int(sys.argv[1]), int(sys.argv[2]))
            say(metadata.version(PACKAGE))
            for line in sys.stdin:
                say(blocks.run(line.strip()))
            lender.kill()
        master.kill()
    os._exit(0)


if __name__ == "__main__":
    main()
