"""Real file systems that are full, or filled by others: misses and refused stores, never an error or a wrong byte."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import pytest

import kvstore
from kvstore.errors import StorageError
from kvstore.testing.blocks import store_prompt, verified_blocks
from kvstore.tiers.base import BlockIdentity
from kvstore.tiers.disk import DiskTier
from kvstore.types import KvLayout, Namespace

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.tiers.disk_pool import DiskPool

MIB = 1 << 20
LAYOUT = KvLayout(layers=2, kv_heads=2, head_dim=32, dtype="float16", block_tokens=4)
NAMESPACE = Namespace(model="model", revision="revision", layout=LAYOUT)
PROMPTS = [list(range(start, start + 160)) for start in range(0, 60 * 160, 160)]
SIZE = 8000
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts file systems")


@contextmanager
def mounted(path: Path, kind: str, size_bytes: int) -> Iterator[None]:
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "none", str(path)]
    if kind == "ext4":
        image = path.with_suffix(".img")
        image.touch()
        os.truncate(image, size_bytes)
        if not shutil.which("mkfs.ext4", path=f"{os.environ['PATH']}:/sbin:/usr/sbin"):
            pytest.skip("mkfs.ext4 is not installed")
        make = ["mkfs.ext4", "-q", "-F", "-m", "0", str(image)]
        subprocess.run(make, check=True, env={**os.environ, "PATH": f"{os.environ['PATH']}:/sbin:/usr/sbin"})
        command = ["mount", "-o", "loop", str(image), str(path)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip(f"cannot mount {kind} here")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.fixture(params=["tmpfs", "ext4"])
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system of 24 MiB."""
    with mounted(tmp_path / "small", request.param, 24 * MIB):
        yield tmp_path / "small"


def free_bytes(path: Path) -> int:
    state = os.statvfs(path)
    return state.f_bavail * state.f_frsize


def fill_up(path: Path, left_bytes: int = 0) -> None:
    """What others write: all there is, but for some bytes."""
    with path.open("wb", buffering=0) as file:
        if left_bytes:
            os.posix_fallocate(file.fileno(), 0, free_bytes(path.parent) - left_bytes)
            return
        for step in (MIB, 4096):
            with contextlib.suppress(OSError):
                while file.write(b"\1" * step) == step:
                    pass


def identity(number: int) -> BlockIdentity:
    tokens = np.full(4, number, dtype="<u4").tobytes()
    return BlockIdentity(b"r" * 16, number.to_bytes(16, "big"), (number + 1).to_bytes(16, "big"), tokens)


def write(pool: DiskPool, numbers: range) -> np.ndarray:
    slots = pool.allocate(len(numbers))
    sources = [(np.full(SIZE, number % 251, dtype=np.uint8),) for number in numbers]
    stored = pool.write(slots, [identity(number) for number in numbers[: len(slots)]], sources[: len(slots)])
    pool.free(slots[~stored])
    return slots[stored]


def test_a_store_fills_a_file_system_down_to_the_floor_and_serves_on(small: Path) -> None:
    floor_bytes = 8 * MIB
    with kvstore.open(small / "data", host_bytes=256 << 10, disk_bytes=1 << 30, free_floor_bytes=floor_bytes) as store:
        for prompt in PROMPTS:
            store_prompt(store, NAMESPACE, prompt)
            assert 40 == verified_blocks(store, NAMESPACE, prompt)
        assert floor_bytes - MIB <= free_bytes(small)
        assert store.stats().disk_faults["free_floor"] > 0
        assert store.stats().tiers["disk"].blocks > 0
    with kvstore.open(small / "data", host_bytes=256 << 10, disk_bytes=1 << 30) as store:
        found = [verified_blocks(store, NAMESPACE, prompt) for prompt in PROMPTS]
        assert 40 in found


def test_a_file_system_that_others_filled_refuses_stores_and_still_reads(small: Path) -> None:
    with kvstore.open(small / "data", host_bytes=256 << 10, disk_bytes=8 * MIB, free_floor_bytes=0) as store:
        for prompt in PROMPTS[:8]:
            store_prompt(store, NAMESPACE, prompt)
        store.flush()
        fill_up(small / "others")
        for prompt in PROMPTS[8:]:
            store_prompt(store, NAMESPACE, prompt)
            assert 40 == verified_blocks(store, NAMESPACE, prompt)
        assert () == store.verify().problems
        (small / "others").unlink()
        store.flush()


def test_a_full_file_system_is_refused_at_the_start_in_one_line(small: Path) -> None:
    fill_up(small / "others")
    with pytest.raises(StorageError, match="cannot use the data directory") as caught:
        kvstore.open(small / "data", host_bytes=MIB, disk_bytes=8 * MIB)
    assert "\n" not in str(caught.value)


def test_idle_slabs_are_given_back_when_others_fill_the_file_system(small: Path) -> None:
    tier = DiskTier.open(small / "data", capacity_bytes=8 * MIB, free_floor_bytes=12 * MIB)
    pool = tier.pool(b"n" * 16, (SIZE,), 4)
    slots = write(pool, range(200))
    kept = slots[:5]
    used_bytes = tier.used_bytes
    fill_up(small / "others", 11 * MIB)
    pool.free(slots[5:])
    assert tier.used_bytes < used_bytes - MIB
    assert 0 == len(pool.allocate(200)[pool.free_slots + 200 :])
    rows = np.zeros((5, SIZE), dtype=np.uint8)
    assert pool.read(kept, [identity(number) for number in range(5)], rows).all()
    tier.close()


@pytest.mark.parametrize("left_slots", [3, 20])
def test_no_tiny_slab_is_made_where_little_is_left(small: Path, left_slots: int) -> None:
    tier = DiskTier.open(small / "data", capacity_bytes=1 << 30, free_floor_bytes=4 * MIB)
    pool = tier.pool(b"n" * 16, (SIZE,), 4)
    fill_up(small / "others", 4 * MIB + 4096 * 4 + left_slots * (pool.slot_bytes + 4096))
    given = len(pool.allocate(1))
    assert (left_slots > 8) == bool(given)
    assert {"free_floor": 1} == tier.faults
    tier.close()
