"""Writers killed at random moments: every block that is found again is right, and what was stored is found."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from kvstore.tiers.codecs.base import OPAQUE
from kvstore.tiers.codecs.coding import PoolCoding
from kvstore.tiers.codecs.keys import FileKeys
from kvstore.tiers.codecs.registry import Pipeline, make_codec

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import Blocks, Disk

MIB = 1 << 20
CAPACITY_BYTES = 2 * MIB
BATCH = 6

# For each line it reads, a process of its own that first frees what it finds, then stores runs of blocks, frees old
# ones when the tier is full, and says so after each; until it is killed.
WRITERS = """
import os, sys
import numpy as np
from kvstore.tiers.base import BlockIdentity
from kvstore.tiers.codecs.base import OPAQUE
from kvstore.tiers.codecs.coding import PoolCoding
from kvstore.tiers.codecs.keys import FileKeys
from kvstore.tiers.codecs.registry import Pipeline, make_codec
from kvstore.tiers.disk import DiskTier

path, capacity_bytes, key_path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
SIZES = (5000, 333)

def identity(number):
    tokens = np.full(16, number, dtype="<u4").tobytes()
    return BlockIdentity(b"r" * 16, number.to_bytes(16, "big"), (number + 1).to_bytes(16, "big"), tokens)

def parts(number):
    # With a codec blocks have five bits, so that they get smaller.
    row = np.random.default_rng((number, *SIZES)).integers(0, 32 if key_path else 256, sum(SIZES), dtype=np.uint8)
    return row[:5000], row[5000:]

def write(first):
    keys = FileKeys(key_path) if key_path else None
    tier = DiskTier.open(path, capacity_bytes=capacity_bytes, free_floor_bytes=0, keys=keys)
    pool = tier.pool(b"n" * 16, SIZES, 16)
    if keys is not None:
        tier.use_coding(b"n" * 16, PoolCoding(Pipeline(make_codec("blosc2"), True), (OPAQUE,) * 2))
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

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        write(int(line))
    print("pid", child, flush=True)
    print("dead", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Writers:
    """Starts writers one after the other and kills each."""

    def __init__(self, disk: Disk, key_path: Path | None) -> None:
        keys = "" if key_path is None else str(key_path)
        command = [sys.executable, "-P", "-c", WRITERS, str(disk.path), str(CAPACITY_BYTES), keys]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run_and_kill(self, first: int, after_lines: int) -> tuple[set[int], int]:
        """Numbers of the blocks that were stored and not freed when the writer was killed; and how much it had said."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{first}\n")
        process.stdin.flush()
        held: set[int] = set()
        said = pid = 0
        for line in process.stdout:
            word, number = line.split()
            if word == "dead":
                assert -signal.SIGKILL == int(number)
                break
            numbers = set(range(int(number), int(number) + BATCH))
            if word == "pid":
                pid = int(number)
            else:
                said += 1
                held = held | numbers if word == "stored" else held - numbers
            if pid and said >= after_lines:
                os.kill(pid, signal.SIGKILL)
                after_lines = 1 << 30
        return held, said

    def close(self) -> None:
        self._process.communicate("")
        assert 0 == self._process.returncode


def kill_writers(disk: Disk, blocks: Blocks, turns: int, key_path: Path | None = None) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed={seed}")  # noqa: T201  # shown if the test fails
    generator = random.Random(seed)
    writers = Writers(disk, key_path)
    keys = None if key_path is None else FileKeys(key_path)
    before: set[int] = set()
    for turn in range(turns):
        held, said = writers.run_and_kill(turn * 100_000, generator.choice([0, 1, generator.randrange(2, 70)]))
        if turn % 3 == 2:
            shutil.rmtree(disk.path / "index", ignore_errors=True)
        tier = disk.open(capacity_bytes=CAPACITY_BYTES, keys=keys)
        found = blocks.recovered(tier)
        assert all(found.values()), f"turn={turn}"
        assert held <= set(found), f"turn={turn}"
        # Beside those there is only what was being stored or freed at that moment, and, if the writer had not begun
        # to store, what it had not freed yet.
        others = set(found) - held - (set() if said else before)
        assert len(others) <= 2 * BATCH, f"turn={turn}"
        assert disk.real_bytes() <= CAPACITY_BYTES
        assert len(found) == blocks.pool(tier).used_slots
        before = set(found)
        tier.close()
        disk.tiers.clear()
    writers.close()


@pytest.mark.kill
def test_killed_writers_leave_only_right_blocks(disk: Disk, blocks: Blocks) -> None:
    kill_writers(disk, blocks, 20)


@pytest.fixture
def coded_blocks(blocks_of: Callable[..., Blocks]) -> Blocks:
    return blocks_of(bits=5, coding=PoolCoding(Pipeline(make_codec("blosc2"), True), (OPAQUE,) * 2))


@pytest.fixture
def key_path(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"key {'5a' * 32}\n")
    path.chmod(0o600)
    return path


@pytest.mark.kill
def test_killed_writers_of_coded_slots_leave_only_right_blocks(
    disk: Disk, coded_blocks: Blocks, key_path: Path
) -> None:
    kill_writers(disk, coded_blocks, 6, key_path)


@pytest.mark.kill
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_hundred_killed_writers_of_coded_slots_leave_only_right_blocks(
    disk: Disk, coded_blocks: Blocks, key_path: Path
) -> None:
    kill_writers(disk, coded_blocks, 200, key_path)


@pytest.mark.kill
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_hundred_killed_writers_leave_only_right_blocks(disk: Disk, blocks: Blocks) -> None:
    kill_writers(disk, blocks, 200)
