"""Packed memory: what is left of it, what it does when there is no more memory, and what damage costs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvstore.errors import ConfigError
from kvstore.testing.tier_conformance import NS, PARTS, content, identity, pool_of, write
from kvstore.tiers.packed import PackedTier, require_memory

MIB = 1 << 20
CAPACITY_BYTES = 8 * MIB

FILLER = """
import sys, time
from kvstore.testing.tier_conformance import pool_of, write
from kvstore.tiers.packed import PackedTier
tier = PackedTier.in_memory(8 << 20)
write(pool_of(tier), range(200))
print("full", flush=True)
sys.stdin.read()
"""

LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
from kvstore.testing.tier_conformance import pool_of
from kvstore.tiers.packed import PackedTier
tier = PackedTier.in_memory(64 << 20)
print(len(pool_of(tier).allocate(100)), tier.used_bytes, sorted(tier.faults))
tier.close()
"""


def memory_files() -> int:
    """Descriptors of this process that are packed memory."""
    links = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
    return sum(os.readlink(link).startswith("/memfd:kvstore-slab") for link in links if link.is_symlink())


def test_a_process_that_is_killed_leaves_no_file_behind(tmp_path):
    command = [sys.executable, "-c", FILLER]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"full\n"
        links = [os.readlink(f"/proc/{child.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{child.pid}/fd")]
        child.send_signal(signal.SIGKILL)

    assert any(link.startswith("/memfd:kvstore-slab") for link in links)
    assert [link for link in links if link.startswith(str(tmp_path)) or "/dev/shm" in link] == []
    assert list(tmp_path.iterdir()) == []


def test_memory_that_the_system_refuses_is_no_room_and_a_counted_fault():
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=True)

    slots, used_bytes, *faults = done.stdout.split(maxsplit=2)
    assert (slots, used_bytes) == ("0", "0"), done.stderr
    assert faults == ["['write_error']\n"]


@pytest.mark.parametrize("offset", [0, 200, 4096, 4096 + PARTS[0] - 1])
def test_a_damaged_block_is_a_miss_and_its_neighbours_are_not(offset):
    tier = PackedTier.in_memory(CAPACITY_BYTES)
    pool = pool_of(tier)
    slots = write(pool, [1, 2, 3])
    slab = pool.slabs[0]
    place = slab.slot_offset(1) + offset
    os.pwrite(slab.fd, bytes([os.pread(slab.fd, 1, place)[0] ^ 1]), place)
    rows = np.zeros((3, sum(PARTS)), dtype=np.uint8)

    found = pool.read(slots, [identity(number) for number in (1, 2, 3)], rows)

    is_padding = 144 + 4 * 4 <= offset < 4096
    assert found.tolist() == [True, is_padding, True]
    assert (rows[0].tolist(), rows[2].tolist()) == (content(1).tolist(), content(3).tolist())
    assert sum(tier.faults.values()) == (0 if is_padding else 1)
    tier.close()


def test_closing_gives_the_memory_back():
    before = memory_files()
    tier = PackedTier.in_memory(CAPACITY_BYTES)
    pool = pool_of(tier)
    write(pool, range(200))
    during = memory_files()
    tier.clear(NS)
    tier.close()
    tier.close()

    assert during > before
    assert memory_files() == before


def test_slabs_that_are_given_back_free_their_memory():
    tier = PackedTier.in_memory(CAPACITY_BYTES)
    pool = pool_of(tier)
    pool.free(write(pool, range(200)))
    for slot_range in pool.ranges():
        assert pool.give_back(slot_range)

    assert tier.used_bytes == 0
    assert memory_files() == 0
    tier.close()


def test_more_than_the_machine_leaves_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"packed_bytes is \d+ beside 1 bytes of host memory, more than"):
        require_memory(1 << 60, 1)
