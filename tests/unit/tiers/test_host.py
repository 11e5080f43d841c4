from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest

from kvstore.errors import ClosedError, LayoutMismatchError, StorageError
from kvstore.tiers.base import SlotRange
from kvstore.tiers.host import POISON, HostTier
from kvstore.tiers.memory_limit import MemoryLimit

NS = b"n" * 16
OTHER_NS = b"o" * 16


def random_rows(count: int, width: int) -> np.ndarray:
    return np.random.default_rng(count * width).integers(0, 256, (count, width), dtype=np.uint8)


def test_rows_come_back_byte_equal_whole_and_by_part() -> None:
    pool = HostTier(1 << 20).pool(NS, (100, 33))
    slots = pool.allocate(10)[::-1]
    rows = random_rows(10, 133)
    pool.write(slots, rows)
    whole, second = np.zeros_like(rows), np.zeros((10, 33), dtype=np.uint8)
    pool.read(slots, whole)
    pool.read(slots, second, part=1)
    np.testing.assert_array_equal(rows, whole)
    np.testing.assert_array_equal(rows[:, 100:], second)


def test_writing_one_part_leaves_the_other_parts() -> None:
    pool = HostTier(1 << 20).pool(NS, (8, 8))
    slots = pool.allocate(2)
    rows = random_rows(2, 16)
    pool.write(slots, rows)
    pool.write(slots, np.zeros((2, 8), dtype=np.uint8), part=0)
    read = np.zeros_like(rows)
    pool.read(slots, read)
    np.testing.assert_array_equal(np.hstack([np.zeros((2, 8)), rows[:, 8:]]), read)


def test_views_show_the_slot_in_place() -> None:
    pool = HostTier(1 << 20).pool(NS, (4, 2))
    slots = pool.allocate(3)
    first, second = pool.views(int(slots[1]))
    first[:], second[:] = 7, 9
    rows = np.zeros((3, 6), dtype=np.uint8)
    pool.read(slots, rows)
    assert [[0] * 6, [7, 7, 7, 7, 9, 9], [0] * 6] == rows.tolist()


def test_a_full_tier_gives_fewer_slots_and_never_exceeds_its_capacity() -> None:
    tier = HostTier(1050, extent_bytes=300)
    pool = tier.pool(NS, (100,))
    assert 10 == len(pool.allocate(50))
    assert 0 == len(pool.allocate(1))
    assert (1000, 1000) == (tier.used_bytes, tier.reserved_bytes)
    assert [3, 3, 3, 1] == [item.count for item in pool.ranges()]


def test_a_block_larger_than_the_capacity_gets_no_slot() -> None:
    assert 0 == len(HostTier(99).pool(NS, (100,)).allocate(1))


def test_a_block_larger_than_an_extent_gets_an_extent_of_one_slot() -> None:
    pool = HostTier(1000, extent_bytes=10).pool(NS, (400,))
    assert 2 == len(pool.allocate(3))
    assert (SlotRange(0, 1), SlotRange(1, 1)) == pool.ranges()


def test_an_extent_given_back_serves_another_namespace_zeroed() -> None:
    tier = HostTier(1000, extent_bytes=500)
    pool, other = tier.pool(NS, (100,)), tier.pool(OTHER_NS, (50,))
    slots = pool.allocate(10)
    pool.write(slots, np.full((10, 100), 255, dtype=np.uint8))
    assert 0 == len(other.allocate(1))
    pool.free(slots[5:])
    assert not pool.give_back(SlotRange(0, 5))
    assert pool.give_back(SlotRange(5, 5))
    taken = other.allocate(20)
    rows = np.ones((10, 50), dtype=np.uint8)
    other.read(taken, rows)
    assert 10 == len(taken)
    assert not rows.any()


def test_memory_of_an_extent_given_back_is_unmapped() -> None:
    tier = HostTier(4 << 20, extent_bytes=1 << 20)
    pool = tier.pool(NS, (1 << 20,))
    before = kvstore_mappings()
    slots = pool.allocate(2)
    assert before + 2 == kvstore_mappings()
    pool.free(slots)
    assert pool.give_back(SlotRange(1, 1))
    assert before + 1 == kvstore_mappings()
    tier.close()
    assert before == kvstore_mappings()


def kvstore_mappings() -> int:
    with open("/proc/self/maps") as maps:
        return sum("memfd:kvstore-host" in line for line in maps)


def test_a_view_survives_its_tier() -> None:
    tier = HostTier(1000)
    pool = tier.pool(NS, (100,))
    (view,) = pool.views(int(pool.allocate(1)[0]))
    view[:] = 5
    tier.close()
    assert [5] * 100 == view.tolist()


def test_freed_slots_are_filled_where_asked() -> None:
    pool = HostTier(1000, freed_fill=0xDD).pool(NS, (4, 4))
    slots = pool.allocate(3)
    views = pool.views(1)
    pool.free(slots[1:2])
    assert [[0xDD] * 4] * 2 == [view.tolist() for view in views]


def test_freeing_twice_is_a_programming_error() -> None:
    pool = HostTier(1000).pool(NS, (100,))
    slots = pool.allocate(1)
    pool.free(slots)
    with pytest.raises(AssertionError):
        pool.free(slots)


def test_a_namespace_has_one_pool_of_one_layout() -> None:
    tier = HostTier(1000)
    assert tier.pool(NS, (100,)) is tier.pool(NS, (100,))
    with pytest.raises(LayoutMismatchError):
        tier.pool(NS, (50, 50))


def test_more_than_the_machine_allows_is_refused_in_one_line() -> None:
    with pytest.raises(StorageError) as caught:
        HostTier(1001, limit=MemoryLimit(1000, "control group"))
    assert "1001 bytes" in str(caught.value)
    assert "1000" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_memory_the_system_refuses_means_fewer_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = HostTier(1000)

    def refuse(name: str, flags: int) -> int:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert 0 == len(tier.pool(NS, (100,)).allocate(1))
    assert (0, 1) == (tier.reserved_bytes, tier.refused_extents)


def test_a_closed_tier_lends_nothing() -> None:
    tier = HostTier(1000)
    pool = tier.pool(NS, (100,))
    pool.allocate(1)
    tier.close()
    tier.close()
    assert 0 == len(pool.allocate(1))
    assert (0, 0) == (tier.used_bytes, tier.reserved_bytes)
    with pytest.raises(ClosedError):
        tier.pool(NS, (100,))


def test_threads_never_share_a_slot() -> None:
    tier = HostTier(64 * 64, extent_bytes=64 * 8)
    failures: list[str] = []

    def work(mark: int) -> None:
        pool = tier.pool(NS, (64,))
        for _ in range(200):
            slots = pool.allocate(5)
            pool.write(slots, np.full((len(slots), 64), mark, dtype=np.uint8))
            rows = np.zeros((len(slots), 64), dtype=np.uint8)
            pool.read(slots, rows)
            if not np.all(rows == mark):
                failures.append(f"thread {mark} read another thread's bytes")
            pool.free(slots)
            for item in pool.ranges()[-1:]:
                pool.give_back(item)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [] == failures
    assert 0 == tier.used_bytes


def test_a_full_tier_says_no_room_at_once_to_many_threads() -> None:
    tier = HostTier(64 * 64, extent_bytes=64 * 8)
    pool, other = tier.pool(NS, (64,)), tier.pool(OTHER_NS, (64,))
    assert 64 == len(pool.allocate(64))
    given: list[int] = []

    def ask() -> None:
        given.extend(len(pool_of.allocate(7)) for _ in range(250) for pool_of in (pool, other))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    cpu_seconds = time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [0] * 4000 == given
    assert 10 > time.process_time() - cpu_seconds  # 4,000 answers take about 0.1 s


def test_a_stale_reader_of_a_freed_slot_sees_the_poison_and_nothing_older() -> None:
    tier = HostTier(1 << 20, freed_fill=POISON)
    pool = tier.pool(NS, (1000, 24))
    slots = pool.allocate(8)
    pool.write(slots, np.full((8, 1024), 7, dtype=np.uint8))
    stale = pool.views(int(slots[3]))
    pool.free(slots[3:4])
    rows = np.zeros((1, 1024), dtype=np.uint8)
    pool.read(slots[3:4], rows)
    assert all((view == POISON).all() for view in stale)
    assert (rows == POISON).all()
    kept = np.zeros((7, 1024), dtype=np.uint8)
    pool.read(np.delete(slots, 3), kept)
    assert (kept == 7).all()
