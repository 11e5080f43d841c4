"""A writer killed at a random moment: every block that is found again is right, and most are found."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Blocks, Disk

MIB = 1 << 20
CAPACITY_BYTES = 2 * MIB

# Stores runs of blocks, frees old ones when the tier is full, and reports each run that was stored or freed.
WRITER = """
import sys
import numpy as np
from kvstore.tiers.base import BlockIdentity
from kvstore.tiers.disk import DiskTier

path, capacity_bytes, first = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
SIZES = (5000, 333)

def identity(number):
    tokens = np.full(16, number, dtype="<u4").tobytes()
    return BlockIdentity(b"r" * 16, number.to_bytes(16, "big"), (number + 1).to_bytes(16, "big"), tokens)

def parts(number):
    row = np.random.default_rng((number, *SIZES)).integers(0, 256, sum(SIZES), dtype=np.uint8)
    return row[:5000], row[5000:]

tier = DiskTier.open(path, capacity_bytes=capacity_bytes, free_floor_bytes=0)
pool = tier.pool(b"n" * 16, SIZES, 16)
for block in tier.recovered(b"n" * 16):
    pool.free(np.array([block.slot]))
held = []
number = first
while True:
    slots = pool.allocate(6)
    while len(slots) < 6:
        pool.free(slots)
        old_number, old_slots = held.pop(0)
        print("free", old_number, flush=True)
        pool.free(old_slots)
        slots = pool.allocate(6)
    numbers = range(number, number + 6)
    assert pool.write(slots, [identity(n) for n in numbers], [parts(n) for n in numbers]).all()
    print("stored", number, flush=True)
    held.append((number, slots))
    number += 6
"""


def run_and_kill(disk: Disk, first: int, after_lines: int) -> set[int]:
    """Numbers of the blocks that were stored, and not freed, when the writer was killed."""
    command = [sys.executable, "-P", "-c", WRITER, str(disk.path), str(CAPACITY_BYTES), str(first)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        lines = [line for _, line in zip(range(after_lines), writer.stdout, strict=False)]
        writer.send_signal(signal.SIGKILL)
        lines += writer.stdout.read().splitlines()
    assert -signal.SIGKILL == writer.returncode
    held: set[int] = set()
    for line in lines:
        if len(fields := line.split()) == 2:
            numbers = set(range(int(fields[1]), int(fields[1]) + 6))
            held = held | numbers if fields[0] == "stored" else held - numbers
    return held


@pytest.mark.kill
@pytest.mark.timeout(120)
def test_a_killed_writer_leaves_only_right_blocks(disk: Disk, blocks: Blocks) -> None:
    seed = random.randrange(1 << 32)
    generator = random.Random(seed)
    first = 0
    for turn in range(10):
        held = run_and_kill(disk, first, generator.randrange(1, 70))
        first += 100_000
        if turn % 3 == 2:
            shutil.rmtree(disk.path / "index")
        tier = disk.open(capacity_bytes=CAPACITY_BYTES)
        found = blocks.recovered(tier)
        assert all(found.values()), f"seed={seed} turn={turn}"
        assert held <= set(found), f"seed={seed} turn={turn}"
        # Beside those there is only what was being stored or freed when a writer was killed, six blocks at a time.
        assert len(found) <= len(held) + 12 * (turn + 1), f"seed={seed} turn={turn}"
        assert disk.real_bytes() <= CAPACITY_BYTES
        assert len(found) == blocks.pool(tier).used_slots
        tier.close()
