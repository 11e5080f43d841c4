"""Whether a transfer that was broken off still writes: `python bulk_late_write_process.py` prints what arrived.

One process begins to write ONE to the memory of another, which is stopped in the middle. It gives up, its memory is
then used for TWO, and the other goes on. Nothing of TWO may arrive there: it could be another tenant's.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np

from kvstore.errors import BulkEngineError
from kvstore.tiers.buffers import aligned_bytes
from kvstore.transport.bulk import Move
from kvstore.transport.nixl_engine import NixlEngine

NBYTES = 256 * 2**20
ZERO, ONE, TWO = 0, 1, 2
POLL_SECONDS = 1.0


def say(*words: object) -> None:
    """A line for whoever watches."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def target() -> None:
    """Offer memory; say at the end what is in it."""
    engine, memory = NixlEngine(), aligned_bytes(NBYTES)
    region = engine.register(memory.ctypes.data, memory.nbytes)
    os.set_blocking(sys.stdin.fileno(), False)
    say(engine.metadata().hex(), memory.ctypes.data)
    while sys.stdin.read(1) != "e":
        engine.poll()
    say(*(int(np.count_nonzero(memory == value)) for value in (ZERO, ONE, TWO)))
    region.deregister()
    engine.close()


def main() -> None:
    """Break a transfer off and go on with the memory."""
    command = [sys.executable, __file__, "target"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        metadata, address = other.stdout.readline().split()
        engine, memory = NixlEngine(), aligned_bytes(NBYTES)
        region = engine.register(memory.ctypes.data, memory.nbytes)
        peer = engine.connect(bytes.fromhex(metadata))
        small = Move(memory.ctypes.data, int(address), 4096)
        peer.write([small]).wait(time.monotonic() + 30.0, lambda: False)
        memory[:] = ONE
        os.kill(other.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, other.pid, os.WSTOPPED)
        try:
            whole = Move(memory.ctypes.data, int(address), NBYTES)
            peer.write([whole]).wait(time.monotonic() + POLL_SECONDS, lambda: False)
            say("ended")
        except BulkEngineError:
            say("broken off")
        memory[:] = TWO
        os.kill(other.pid, signal.SIGCONT)
        until = time.monotonic() + POLL_SECONDS
        while time.monotonic() < until:
            engine.poll()
        other.stdin.write("e")
        other.stdin.flush()
        say(other.stdout.readline().strip())
        region.deregister()
        engine.close()


if __name__ == "__main__":
    target() if sys.argv[1:] else main()
