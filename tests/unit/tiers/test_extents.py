"""Extents as other processes see them: where slots lie, what can be mapped, and that nobody sees another's bytes."""

from __future__ import annotations

import fcntl
import mmap
import os
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvstore.testing.patience import SLACK_SECONDS, Stopwatch
from kvstore.tiers import extent as extent_module
from kvstore.tiers import host as host_module
from kvstore.tiers.base import SlotRange
from kvstore.tiers.extent import Extent, geometry
from kvstore.tiers.host import HostPool, HostTier
from kvstore.tiers.huge_pages import PLAIN_PAGES

if TYPE_CHECKING:
    from collections.abc import Callable

NS = b"n" * 16
OTHER_NS = b"o" * 16
PAGE = mmap.PAGESIZE


def filled(pool: HostPool, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Slots, and the random rows that they hold."""
    slots = pool.allocate(count)
    rows = np.random.default_rng(count).integers(0, 256, (count, pool.block_bytes), dtype=np.uint8)
    pool.write(slots, rows)
    return slots, rows


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_another_process_finds_each_part_of_a_slot_where_its_place_says() -> None:
    with HostTier(1 << 20) as tier:
        pool = tier.pool(NS, (5000, 333))
        slots, rows = filled(pool, 20)
        place, second = pool.place(int(slots[7]), 0), pool.place(int(slots[7]), 1)
        (extent,) = pool.extents()
        hold = pool.hold(place.extent_id)
        assert hold is not None
        fd = hold.open_read_only()
        script = (
            "import mmap, sys; fd, first, count, second, rest = map(int, sys.argv[1:]);"
            "shown = mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ);"
            "sys.stdout.buffer.write(shown[first:first + count] + shown[second:second + rest])"
        )
        numbers = (fd, place.offset, place.nbytes, second.offset, second.nbytes)
        seen = subprocess.run(
            [sys.executable, "-c", script, *map(str, numbers)], pass_fds=[fd], capture_output=True, check=True
        )
        os.close(fd)
        hold.release()
    assert rows[7].tobytes() == seen.stdout
    assert (place.extent_id, SlotRange(0, extent.slots.count)) == (extent.extent_id, extent.slots)


def test_parts_begin_on_pages_of_their_own() -> None:
    shape = geometry((5000, 333, 4096), 10)
    assert (0, 13 * PAGE, 14 * PAGE, 24 * PAGE) == (*shape.part_offsets, shape.nbytes)


def test_nobody_writes_to_a_lent_extent_by_a_descriptor_nor_by_one_that_is_opened_again() -> None:
    with HostTier(1 << 20) as tier:
        pool = tier.pool(NS, (100,))
        slots, rows = filled(pool, 1)
        with held(pool) as hold:
            fd = hold.open_read_only()
            with pytest.raises(PermissionError):
                mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)  # as the same user may
            with pytest.raises(PermissionError):
                mmap.mmap(again, 0, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            with pytest.raises(PermissionError):
                os.pwrite(again, b"x", 0)
            os.close(again)
            os.close(fd)
        pool.write(slots, rows)  # only the tier still can


def test_a_kernel_without_such_a_seal_lets_nobody_map_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extent_module, "_F_SEAL_FUTURE_WRITE", 1 << 30)  # as EINVAL to us as 0x10 to Linux 5.0
    with HostTier(1 << 20) as tier:
        pool = tier.pool(NS, (100,))
        slots, rows = filled(pool, 3)
        with held(pool) as hold, pytest.raises(OSError, match="kernel"):
            hold.open_read_only()
        read = np.zeros_like(rows)
        pool.read(slots, read)
        np.testing.assert_array_equal(rows, read)


def test_no_descriptor_changes_the_size_of_a_lent_extent() -> None:
    with HostTier(1 << 20) as tier:
        pool = tier.pool(NS, (100,))
        filled(pool, 1)
        with held(pool) as hold:
            fd = hold.open_read_only()
            again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
            for size in (0, hold.nbytes * 2):
                with pytest.raises(PermissionError):
                    os.ftruncate(again, size)
            assert fcntl.F_SEAL_SEAL & fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            os.close(again)
            os.close(fd)


def test_memory_is_private_to_its_user() -> None:
    extent = Extent(PAGE, PLAIN_PAGES)
    assert 0o600 == os.fstat(extent.fd).st_mode & 0o777
    extent.close()


def held(pool: HostPool):
    hold = pool.hold(pool.extents()[0].extent_id)
    assert hold is not None
    return hold


def test_a_held_extent_goes_to_nobody_until_it_is_released() -> None:
    with HostTier(1000, extent_bytes=1000) as tier:
        pool, other = tier.pool(NS, (100,)), tier.pool(OTHER_NS, (100,))
        slots, _ = filled(pool, 10)
        first, second = held(pool), held(pool)
        pool.free(slots)
        (whole,) = pool.ranges()
        assert not pool.give_back(whole)
        first.release()
        first.release()
        assert not pool.give_back(whole)
        assert 0 == len(other.allocate(1))
        second.release()
        assert pool.give_back(whole)
        assert 10 == len(other.allocate(10))


def test_a_retired_extent_counts_until_nobody_maps_it() -> None:
    with HostTier(1000, extent_bytes=1000) as tier:
        pool, other = tier.pool(NS, (100,)), tier.pool(OTHER_NS, (100,))
        slots, _ = filled(pool, 10)
        hold = held(pool)
        (whole,) = pool.ranges()
        assert not pool.retire(whole)
        pool.free(slots)
        assert pool.retire(whole)
        assert ((), 1000, 0) == (pool.ranges(), tier.reserved_bytes, len(other.allocate(1)))
        hold.release()
        assert (0, 10) == (tier.reserved_bytes, len(other.allocate(10)))


def test_an_old_mapping_never_shows_what_another_namespace_stores() -> None:
    with HostTier(1000, extent_bytes=1000) as tier:
        pool, other = tier.pool(NS, (100,)), tier.pool(OTHER_NS, (100,))
        slots, rows = filled(pool, 10)
        hold = held(pool)
        fd = hold.open_read_only()
        mapped = mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ)
        os.close(fd)
        pool.free(slots)
        pool.retire(pool.ranges()[0])
        hold.release()
        theirs = other.allocate(10)
        fresh = np.ones((10, 100), dtype=np.uint8)
        other.read(theirs, fresh)
        other.write(theirs, np.full((10, 100), 0xEE, dtype=np.uint8))
        assert not fresh.any()
        assert rows.tobytes() == mapped[:1000]
        assert hold.extent_id != other.extents()[0].extent_id
        mapped.close()


def test_a_hold_outlives_its_tier() -> None:
    tier = HostTier(1000, extent_bytes=1000)
    pool = tier.pool(NS, (100,))
    _, rows = filled(pool, 10)
    hold = held(pool)
    tier.close()
    fd = hold.open_read_only()
    with mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
        assert rows.tobytes() == mapped[:1000]
    os.close(fd)
    hold.release()
    assert 0 == tier.reserved_bytes


def test_extents_that_a_pool_has_not_cannot_be_held() -> None:
    with HostTier(1000) as tier:
        pool = tier.pool(NS, (100,))
        filled(pool, 1)
        assert pool.hold(pool.extents()[0].extent_id + 1) is None


def test_descriptors_come_back_with_their_extents() -> None:
    before = open_descriptors()
    tier = HostTier(8 << 20, extent_bytes=1 << 20)
    pool = tier.pool(NS, (1000, 24))
    slots, _ = filled(pool, 4096)
    assert before + 4 == open_descriptors()
    with held(pool) as hold:
        os.close(hold.open_read_only())
    pool.free(slots)
    assert all(pool.give_back(one) for one in pool.ranges())
    assert before == open_descriptors()
    filled(pool, 4096)
    tier.close()
    assert before == open_descriptors()


def test_who_holds_an_extent_is_asked_for_it_once() -> None:
    with HostTier(1000, extent_bytes=1000) as tier:
        pool = tier.pool(NS, (100,))
        slots, _ = filled(pool, 10)
        (place,) = pool.extents()
        asked = []
        hold = pool.hold(place.extent_id, lambda: asked.append(place.extent_id))
        assert hold is not None
        for _ in range(2):
            assert pool.is_kept(place.slots)
        assert [place.extent_id] == asked
        pool.free(slots)
        assert not pool.give_back(place.slots)
        hold.release()
        assert pool.give_back(place.slots)


def test_who_does_not_answer_is_waited_for_once_however_many_extents_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "RECALL_SECONDS", 0.5)
    with HostTier(10_000, extent_bytes=1000) as tier:
        pool = tier.pool(NS, (100,))
        filled(pool, 100)
        holds = [pool.hold(place.extent_id, lambda: None) for place in pool.extents()]
        watch, began = Stopwatch(), time.monotonic()
        assert all(pool.is_kept(place.slots) for place in pool.extents())
        assert 0.5 <= time.monotonic() - began
        assert watch.seconds < 0.5 + SLACK_SECONDS
        for hold in holds:
            assert hold is not None
            hold.release()
        assert not any(pool.is_kept(place.slots) for place in pool.extents())


@pytest.mark.parametrize("wanted", [HostPool.is_kept, HostPool.give_back])
def test_an_extent_that_its_holder_lets_go_at_once_is_free_at_once(wanted: Callable[..., bool]) -> None:
    with HostTier(1000, extent_bytes=1000) as tier:
        pool = tier.pool(NS, (100,))
        pool.free(filled(pool, 10)[0])
        (place,) = pool.extents()
        hold = pool.hold(place.extent_id, lambda: threading.Thread(target=hold.release).start())
        assert hold is not None
        assert (wanted is HostPool.give_back) == wanted(pool, place.slots)
        assert not tier.memory().held_extents


def test_who_holds_an_extent_that_is_taken_out_of_use_is_asked_for_it() -> None:
    with HostTier(1000, extent_bytes=1000) as tier:
        pool = tier.pool(NS, (100,))
        pool.free(filled(pool, 10)[0])
        asked: list[bool] = []
        hold = pool.hold(pool.extents()[0].extent_id, lambda: asked.append(True))
        assert hold is not None
        tier.forget(NS)
        assert [True] == asked
        assert 1000 == tier.reserved_bytes
        hold.release()
        assert 0 == tier.reserved_bytes


def test_the_extents_of_some_slots_are_those_that_hold_one() -> None:
    with HostTier(3000, extent_bytes=1000) as tier:
        pool = tier.pool(NS, (100,))
        slots, _ = filled(pool, 30)
        first, _, third = pool.extents()
        assert (first, third) == pool.extents_of(slots[[29, 3, 28]])
        assert () == pool.extents_of(slots[:0])
