"""Memory of the host tier: reserved and touched ahead, less of it where the system has less, and nothing lost."""

from __future__ import annotations

import errno
import logging
import resource
import subprocess
import sys
import threading
from itertools import chain, repeat

import numpy as np
import pytest

from kvstore.tiers import extent_stock
from kvstore.tiers._core import _copy
from kvstore.tiers.extent import Extent
from kvstore.tiers.extent_stock import ExtentStock, HostMemory
from kvstore.tiers.host import HostTier, default_extent_bytes
from kvstore.tiers.huge_pages import PLAIN_PAGES, PageChoice, PageKind
from kvstore.tiers.memory_limit import MemoryLimit

MIB = 1 << 20
NS = b"n" * 16
RESERVE = HostMemory(huge_pages="never", reserve_from_bytes=1)
LAZY = HostMemory(huge_pages="never", reserve_from_bytes=1 << 60)
PLENTY = MemoryLimit(1 << 50, "test")
WAIT_SECONDS = 60


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def threads_of_stocks() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kvstore-host-memory"]


def test_a_store_into_reserved_memory_meets_no_new_page() -> None:
    with HostTier(32 * MIB, memory=RESERVE) as tier:
        assert tier.wait_ready(WAIT_SECONDS)
        assert (32 * MIB, 8) == (tier.memory().touched_bytes, tier.memory().extents)
        pool = tier.pool(NS, (64 << 10,))
        rows = np.ones((512, 64 << 10), dtype=np.uint8)
        slots = pool.allocate(512)
        before = page_faults()
        pool.write(slots, rows)
        assert 50 > page_faults() - before
    with HostTier(32 * MIB, memory=LAZY) as tier:
        slots = tier.pool(NS, (64 << 10,)).allocate(512)
        before = page_faults()
        tier.pool(NS, (64 << 10,)).write(slots, rows)
        assert 8000 < page_faults() - before


def test_small_tiers_have_no_thread() -> None:
    with HostTier(64 * MIB) as tier:
        assert [] == threads_of_stocks()
        assert tier.wait_ready(0)


def test_the_thread_ends_with_its_tier_closed_or_dropped() -> None:
    tier = HostTier(256 * MIB, memory=RESERVE)
    assert 1 == len(threads_of_stocks())
    tier.close()
    assert [] == threads_of_stocks()
    dropped = HostTier(256 * MIB, memory=RESERVE)
    assert 1 == len(threads_of_stocks())
    del dropped
    assert [] == threads_of_stocks()


def test_a_system_that_gives_no_thread_delays_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with HostTier(16 * MIB, memory=RESERVE) as tier:
        assert tier.wait_ready(0)
        assert 16 == len(tier.pool(NS, (MIB,)).allocate(20))
    assert "can't start new thread" in caplog.text


def test_a_start_and_a_claim_wait_for_no_touching() -> None:
    asked, go_on = threading.Event(), threading.Event()

    def limit() -> MemoryLimit:
        asked.set()
        go_on.wait(WAIT_SECONDS)
        return PLENTY

    stock = ExtentStock(32 * MIB, 4 * MIB, RESERVE, limit)
    assert asked.wait(WAIT_SECONDS)  # the thread is held up in its first piece of work
    first = stock.claim((MIB,), None)
    assert first is not None
    assert 0 == stock.state().touched_bytes
    go_on.set()
    assert stock.wait_ready(WAIT_SECONDS)
    assert 32 * MIB == stock.state().touched_bytes
    stock.close()


def test_lent_and_spare_extents_never_exceed_the_capacity() -> None:
    stock = ExtentStock(16 * MIB, 4 * MIB, RESERVE, lambda: PLENTY)
    assert stock.wait_ready(WAIT_SECONDS)
    sizes = [300_000, 3 * MIB, MIB]
    for size in sizes:
        extent = stock.claim((size,), None)
        assert extent is not None
        assert stock.wait_ready(WAIT_SECONDS)
        assert 16 * MIB + 4096 * len(sizes) >= stock.state().touched_bytes
    stock.close()


def test_what_is_given_back_is_made_anew_and_touched() -> None:
    stock = ExtentStock(16 * MIB, 4 * MIB, RESERVE, lambda: PLENTY)
    extents = [stock.claim((MIB,), None) for _ in range(4)]
    lent = [extent for extent in extents if extent is not None]
    assert 4 == len(lent)
    for extent in lent:
        extent.regions[0][:] = 7
        assert stock.give_back(extent)
    assert stock.wait_ready(WAIT_SECONDS)
    assert (16 * MIB, 0) == (stock.state().touched_bytes, stock.claimed_bytes)
    again = stock.claim((MIB,), None)
    assert again is not None
    assert not again.regions[0].any()
    stock.close()


def test_memory_that_runs_short_means_a_smaller_tier_and_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    left = chain([PLENTY] * 6, repeat(MemoryLimit(10 * MIB, "control group")))
    with caplog.at_level(logging.WARNING):
        stock = ExtentStock(64 * MIB, 4 * MIB, RESERVE, lambda: next(left))
        assert stock.wait_ready(WAIT_SECONDS)
    assert 12 * MIB == stock.capacity_bytes == stock.state().touched_bytes
    claimed = [stock.claim((MIB,), None) for _ in range(4)]
    assert [True, True, True, False] == [extent is not None for extent in claimed]
    assert 1 == len(caplog.records)
    assert "control group" in caplog.text
    assert claimed[0] is not None
    stock.give_back(claimed[0])
    assert stock.wait_ready(WAIT_SECONDS)
    assert 1 == len(caplog.records)
    assert 8 * MIB == stock.capacity_bytes
    stock.close()


def test_extents_in_use_stay_where_touching_them_finds_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_copy, "populate", lambda _address, _nbytes: errno.ENOMEM)
    stock = ExtentStock(8 * MIB, 4 * MIB, LAZY, lambda: PLENTY)
    extent = stock.claim((MIB,), None)
    assert extent is not None
    stock.close()
    touching = ExtentStock(8 * MIB, 4 * MIB, RESERVE, lambda: PLENTY)
    first = touching.claim((MIB,), None)
    assert touching.wait_ready(WAIT_SECONDS)
    assert (0 if first is None else 4 * MIB) == touching.capacity_bytes
    if first is not None:
        first.regions[0][:] = 1
    touching.close()


def test_a_claim_that_memory_has_no_room_for_is_refused_and_counted() -> None:
    stock = ExtentStock(64 * MIB, 32 * MIB, LAZY, lambda: MemoryLimit(40 * MIB, "control group"))
    assert stock.claim((MIB,), None) is None
    assert (0, 1) == (stock.claimed_bytes, stock.state().refused_extents)
    stock.close()


def test_kernels_that_cannot_populate_are_served_by_touching_each_page(monkeypatch: pytest.MonkeyPatch) -> None:
    extent = Extent(MIB, PLAIN_PAGES)
    monkeypatch.setattr(_copy, "populate", lambda _address, _nbytes: errno.EINVAL)
    extent.touch(MIB // 2)
    before = page_faults()
    extent._memory[: MIB // 2] = 3
    assert (MIB // 2, 0) == (extent.touched_bytes, page_faults() - before)
    extent.close()


def test_touching_leaves_what_is_stored() -> None:
    extent = Extent(MIB, PLAIN_PAGES)
    memory = np.frombuffer(extent._memory, dtype=np.uint8)
    memory[:] = 5
    extent.touch(MIB)
    _copy.touch(extent.address, MIB)
    assert (memory == 5).all()
    extent.close()


def test_reserved_huge_pages_that_are_gone_are_replaced_by_plain_ones(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel's own refusal, where no huge page is free; where some are, they are taken."""
    monkeypatch.setattr(extent_stock, "choose_pages", lambda *_: PageChoice(PageKind.RESERVED, "test"))
    for memory in (LAZY, RESERVE):
        caplog.clear()
        stock = ExtentStock(16 * MIB, 4 * MIB, memory, lambda: PLENTY)
        claimed = [stock.claim((MIB,), None) for _ in range(4)]
        assert stock.wait_ready(WAIT_SECONDS)
        assert all(extent is not None for extent in claimed)
        lost = stock.state().pages is PageKind.PLAIN
        assert lost == ("no more reserved huge pages" in caplog.text)
        assert (16 * MIB, 0) == (stock.claimed_bytes, stock.state().refused_extents)
        stock.close()


OUT_OF_ADDRESSES = """
import resource, sys
from kvstore.tiers.extent_stock import HostMemory
from kvstore.tiers.host import HostTier
from kvstore.tiers.memory_limit import MemoryLimit
def size():
    return int(open("/proc/self/statm").read().split()[0]) * 4096
memory = HostMemory(reserve_from_bytes=int(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_AS, (size() + (160 << 20), resource.RLIM_INFINITY))
tier = HostTier(256 << 20, extent_bytes=16 << 20, memory=memory)
tier.wait_ready(60)
pool = tier.pool(b"n" * 16, (1 << 20,))
slots = pool.allocate(256)
for one in slots:
    for view in pool.views(int(one)):
        view[:] = 7
state = tier.memory()
print(len(slots), tier.capacity_bytes >> 20, state.refused_extents)
tier.close()
"""


@pytest.mark.parametrize("reserve_from_bytes", [1, 1 << 60])
def test_a_system_that_refuses_memory_leaves_a_working_smaller_tier(reserve_from_bytes: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OUT_OF_ADDRESSES, str(reserve_from_bytes)], capture_output=True, text=True, check=False
    )
    assert 0 == done.returncode, done.stderr
    slots, capacity_mib, refused = map(int, done.stdout.split())
    assert 16 <= slots < 160
    assert slots <= capacity_mib
    assert refused or capacity_mib < 256


@pytest.mark.parametrize(("capacity", "extent_bytes"), [
    (MIB, 256 << 10), (16 * MIB, 4 * MIB), (128 * MIB, 8 * MIB),
    (64 << 30, 256 * MIB), (256 << 30, 256 * MIB), (1 << 40, 1 << 30),
])  # fmt: skip
def test_extents_are_neither_small_nor_many(capacity: int, extent_bytes: int) -> None:
    assert extent_bytes == default_extent_bytes(capacity)
    assert 1024 >= capacity / extent_bytes
