"""Page-locking in pieces: the kernel's own limit, and CUDA's calls as its driver gets them (on a fake driver)."""

from __future__ import annotations

import mmap
import os
import resource
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvstore.errors import UnavailableError
from kvstore.tiers.device_driver import CudaDriver
from kvstore.tiers.extent import Extent
from kvstore.tiers.huge_pages import PLAIN_PAGES
from kvstore.tiers.page_lock import (
    CudaLocker,
    KernelLocker,
    LockedMemory,
    lock_in_pieces,
    piece_of_whole_slots,
    unlock_pieces,
)

MIB = 1 << 20
PAGE = mmap.PAGESIZE


@dataclass
class CountingLocker:
    """Grants so many bytes."""

    granted_bytes: int
    held: dict[int, int] = field(default_factory=dict)

    def lock(self, address: int, nbytes: int) -> None:
        if sum(self.held.values()) + nbytes > self.granted_bytes:
            raise OSError(12, "Cannot allocate memory")
        self.held[address] = nbytes

    def unlock(self, address: int, nbytes: int) -> None:
        assert nbytes == self.held.pop(address)


@pytest.mark.parametrize("granted", [0, 3, 4, 9, 10, 100])
def test_a_refused_piece_leaves_the_pieces_before_it(granted: int) -> None:
    locker = CountingLocker(granted * PAGE)
    locked = lock_in_pieces(locker, 16 * PAGE, 10 * PAGE, piece_bytes=4 * PAGE)
    pieces = {0: (), 3: (), 4: (4,), 9: (4, 4), 10: (4, 4, 2), 100: (4, 4, 2)}[granted]
    assert tuple(pages * PAGE for pages in pieces) == locked.sizes
    assert (granted >= 10) == (locked.failure is None)
    assert sum(locker.held.values()) == locked.nbytes
    unlock_pieces(locker, locked)
    assert {} == locker.held


@pytest.mark.parametrize(("slot_bytes", "piece_bytes"), [
    (256 << 10, 64 * MIB), (100 * MIB, 100 * MIB), (3 * MIB, 63 * MIB), (6000, 86 * 768_000),
])  # fmt: skip
def test_no_slot_lies_in_two_pieces(slot_bytes: int, piece_bytes: int) -> None:
    assert piece_bytes == piece_of_whole_slots(slot_bytes)
    assert (0, 0) == (piece_bytes % slot_bytes, piece_bytes % PAGE)


LOCK_WITHIN = """
import os, resource, sys
from kvstore.tiers.extent_stock import HostMemory
from kvstore.tiers.host import HostTier
import logging
logging.basicConfig(stream=sys.stdout, level=logging.WARNING, format="%(message)s")
soft, hard, capacity = (int(text) << 20 for text in sys.argv[1:])
resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))
if os.geteuid() == 0:
    os.setuid(65534)  # root locks beyond the limit
def locked():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmLck")).split()[1]) << 10
before = locked()
tier = HostTier(capacity, extent_bytes=1 << 20, memory=HostMemory(lock_memory=True, reserve_from_bytes=1))
tier.wait_ready(60)
print(tier.memory().locked_bytes, locked() - before, tier.memory().touched_bytes)
pool = tier.pool(b"n" * 16, (1 << 20,))
assert len(pool.allocate(capacity >> 20)) == capacity >> 20
tier.close()
"""


@pytest.mark.parametrize(
    ("soft", "hard", "capacity", "locked"), [(1, 4, 16, 4), (0, 0, 16, 0), (1, 7, 6, 6)], ids=["some", "none", "all"]
)
def test_a_limit_of_locked_memory_costs_the_rest_and_one_warning(
    soft: int, hard: int, capacity: int, locked: int
) -> None:
    """All in MiB. The soft limit is raised as far as the hard one lets it."""
    allowed = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    if allowed != resource.RLIM_INFINITY and allowed < hard * MIB:
        pytest.skip(f"this process may lock {allowed} bytes only")
    numbers = map(str, (soft, hard, capacity))
    done = subprocess.run([sys.executable, "-c", LOCK_WITHIN, *numbers], capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stderr
    *warned, counts = done.stdout.splitlines()
    assert [locked * MIB, locked * MIB, capacity * MIB] == list(map(int, counts.split()))
    assert (0 if locked == capacity else 1) == len(warned)
    assert all("RLIMIT_MEMLOCK" in line for line in warned)


def test_the_kernel_says_why_it_refuses() -> None:
    with pytest.raises(OSError, match="RLIMIT_MEMLOCK"):
        KernelLocker().lock(PAGE, PAGE)  # nothing is mapped there


def test_locked_memory_is_unlocked_again() -> None:
    extent = Extent(MIB, PLAIN_PAGES)
    locker = KernelLocker()
    locked = lock_in_pieces(locker, extent.address, MIB, piece_bytes=MIB // 4)
    if locked.failure is not None:
        pytest.skip(f"this system locks no memory: {locked.failure}")
    assert 4 == len(locked.sizes)
    unlock_pieces(locker, locked)
    extent.close()


# Registers up to so many bytes, as cuMemHostRegister does: error 712 for what is registered already, 2 for no memory.
FAKE_DRIVER = """
#include <stddef.h>
static struct { void* address; size_t bytes; unsigned flags; } held[64];
static size_t total;
size_t held_bytes(void) { return total; }
unsigned flags_of(void* address) {
  for (int i = 0; i < 64; ++i) if (held[i].address == address) return held[i].flags;
  return 0;
}
int cuMemHostRegister_v2(void* address, size_t bytes, unsigned flags) {
  if (total + bytes > LIMIT) return 2;
  for (int i = 0; i < 64; ++i) if (held[i].address == address) return 712;
  for (int i = 0; i < 64; ++i) {
    if (held[i].address) continue;
    held[i].address = address; held[i].bytes = bytes; held[i].flags = flags; total += bytes;
    return 0;
  }
  return 2;
}
int cuMemHostUnregister(void* address) {
  for (int i = 0; i < 64; ++i) {
    if (held[i].address != address) continue;
    total -= held[i].bytes; held[i].address = 0;
    return 0;
  }
  return 713;
}
"""


@pytest.fixture
def cuda(tmp_path: Path) -> CudaDriver:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    source, library = tmp_path / "driver.c", tmp_path / "libcuda.so"
    source.write_text(FAKE_DRIVER)
    subprocess.run([compiler, "-shared", "-fPIC", f"-DLIMIT={10 * MIB}", "-o", library, source], check=True)
    return CudaDriver(str(library))


def test_memory_is_registered_with_cuda_in_pieces_until_it_refuses(cuda: CudaDriver) -> None:
    locker = CudaLocker(cuda)
    locked = lock_in_pieces(locker, 64 * MIB, 16 * MIB, piece_bytes=4 * MIB)
    assert ((4 * MIB, 4 * MIB), 8 * MIB) == (locked.sizes, cuda._library.held_bytes())
    assert locked.failure == f"cuMemHostRegister of {4 * MIB} bytes failed with CUDA error 2"
    unlock_pieces(locker, locked)
    assert 0 == cuda._library.held_bytes()


@pytest.mark.parametrize(("read_only", "flags"), [(False, 1), (True, 9)])
def test_registrations_hold_for_all_contexts_and_say_what_cannot_be_written(
    cuda: CudaDriver, read_only: bool, flags: int
) -> None:
    CudaLocker(cuda, read_only=read_only).lock(PAGE, PAGE)
    assert flags == cuda._library.flags_of(PAGE)


def test_what_was_not_registered_is_an_error_by_name(cuda: CudaDriver) -> None:
    with pytest.raises(UnavailableError, match="cuMemHostUnregister failed with CUDA error 713"):
        unlock_pieces(CudaLocker(cuda), LockedMemory(PAGE, (PAGE,)))


def test_a_machine_without_cuda_has_no_driver() -> None:
    with pytest.raises(UnavailableError, match="cannot be loaded"):
        CudaDriver(f"/nowhere/{os.getpid()}/libcuda.so.1")
