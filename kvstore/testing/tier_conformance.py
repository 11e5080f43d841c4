"""What every tier below host memory must do (kvstore.tiers.persistent), as a test class to inherit.

    class TestMyTier(TierConformance):
        survives_restart = True

        @pytest.fixture
        def open_tier(self, tmp_path):
            return lambda capacity_bytes: my_tier(tmp_path, capacity_bytes)

The fixture returns a function that opens the tier at one place, time after time; the class closes what it opened.
A tier that keeps nothing over restarts sets `survives_restart` to False.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pytest

from kvstore.errors import ClosedError, LayoutMismatchError
from kvstore.tiers.base import BlockIdentity
from kvstore.tiers.persistent import PersistentPool, PersistentTier

if TYPE_CHECKING:
    from kvstore.types import Slots

OpenTier: TypeAlias = Callable[[int], PersistentTier]

MIB = 1 << 20
NS, OTHER_NS = b"n" * 16, b"o" * 16
PARTS = (5000, 333)
BLOCK_TOKENS = 4
CAPACITY_BYTES = 8 * MIB
NUMBERS = tuple(range(20))


def identity(number: int) -> BlockIdentity:
    """What a numbered block is."""
    tokens = np.full(BLOCK_TOKENS, number, dtype="<u4").tobytes()
    return BlockIdentity(b"r" * 16, number.to_bytes(16, "big"), (number + 1).to_bytes(16, "big"), tokens)


def content(number: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """The bytes of a numbered block, all parts one after the other."""
    return np.random.default_rng(number).integers(0, 256, sum(PARTS), dtype=np.uint8)


def pool_of(tier: PersistentTier, ns_id: bytes = NS) -> PersistentPool:
    """The pool of a namespace."""
    return tier.pool(ns_id, PARTS, BLOCK_TOKENS)


def write(pool: PersistentPool, numbers: Sequence[int]) -> Slots:
    """Store blocks, all of which must fit."""
    slots = pool.allocate(len(numbers))
    assert len(slots) == len(numbers)
    sources = [np.split(content(number), [PARTS[0]]) for number in numbers]
    assert pool.write(slots, [identity(number) for number in numbers], sources).all()
    return slots


def read(pool: PersistentPool, slots: Slots, numbers: Sequence[int]) -> list[bool]:
    """Which blocks can be read; each must have its own bytes."""
    rows = np.zeros((len(numbers), sum(PARTS)), dtype=np.uint8)
    good = pool.read(slots, [identity(number) for number in numbers], rows)
    for position in np.flatnonzero(good):
        np.testing.assert_array_equal(content(numbers[int(position)]), rows[position])
    return [bool(each) for each in good]


def recovered(tier: PersistentTier) -> dict[int, int]:
    """Slots of the blocks from before the start, by number; each must be readable."""
    found = {int.from_bytes(block.identity.parent_key, "big"): block.slot for block in tier.recovered(NS)}
    slots = np.array(list(found.values()), dtype=np.uint32)
    assert all(read(pool_of(tier), slots, list(found)))
    return found


class TierConformance:
    """Inherit and provide the fixture `open_tier`; see the module."""

    survives_restart = True

    @pytest.fixture
    def open_tier(self) -> OpenTier:
        """Return a function (capacity_bytes) -> PersistentTier."""
        raise pytest.UsageError("a subclass of TierConformance defines the fixture open_tier")

    @pytest.fixture
    def reopen(self, open_tier: OpenTier) -> Iterator[Callable[[], PersistentTier]]:
        """Close the tier if it is open, and open it."""
        opened: list[PersistentTier] = []

        def reopened() -> PersistentTier:
            for tier in opened:
                tier.close()
            opened.append(open_tier(CAPACITY_BYTES))
            return opened[-1]

        yield reopened
        for tier in opened:
            tier.close()

    @pytest.fixture
    def tier(self, reopen: Callable[[], PersistentTier]) -> PersistentTier:
        """A fresh tier."""
        return reopen()

    def test_blocks_come_back_whole_and_by_part(self, tier: PersistentTier) -> None:
        """Every byte, in any order of slots."""
        pool = pool_of(tier)
        slots = write(pool, NUMBERS)
        assert [True] * len(NUMBERS) == read(pool, slots[::-1].copy(), NUMBERS[::-1])
        for part, (start, stop) in enumerate(((0, PARTS[0]), (PARTS[0], sum(PARTS)))):
            rows = np.zeros((len(NUMBERS), stop - start), dtype=np.uint8)
            assert pool.read(slots, [identity(number) for number in NUMBERS], rows, part=part).all()
            np.testing.assert_array_equal([content(number)[start:stop] for number in NUMBERS], rows)

    def test_another_block_is_a_miss(self, tier: PersistentTier) -> None:
        """Also one that lay in the slot before, and one that was never written."""
        pool = pool_of(tier)
        slots = write(pool, NUMBERS)
        assert [False] * len(NUMBERS) == read(pool, slots, [number + 100 for number in NUMBERS])
        pool.free(slots)
        again = pool.allocate(len(NUMBERS))
        assert [False] * len(NUMBERS) == read(pool, again, NUMBERS)

    def test_slots_are_counted_and_given_once(self, tier: PersistentTier) -> None:
        """In ascending order, none twice, fewer when there is no room."""
        pool = pool_of(tier)
        slots = pool.allocate(100_000)
        assert slots.tolist() == sorted(set(slots.tolist()))
        assert 0 < len(slots) == pool.used_slots < 100_000
        assert len(pool.allocate(1)) == 0
        assert 0 < tier.used_bytes <= tier.capacity_bytes == CAPACITY_BYTES
        pool.free(slots[::2])
        assert len(slots) - len(slots[::2]) == pool.used_slots
        assert len(slots[::2]) == len(pool.allocate(100_000))

    def test_ranges_cover_all_slots_and_go_back_when_they_are_idle(self, tier: PersistentTier) -> None:
        """One with a used slot stays."""
        pool = pool_of(tier)
        slots = write(pool, NUMBERS)
        covered = {slot for item in pool.ranges() for slot in range(item.first, item.first + item.count)}
        assert set(slots.tolist()) <= covered
        assert pool.reserved_bytes == sum(pool.range_bytes(item) for item in pool.ranges())
        pool.free(slots[1:])
        for item in pool.ranges():
            assert pool.give_back(item) != (item.first <= slots[0] < item.first + item.count)
        pool.free(slots[:1])
        assert all(pool.give_back(item) for item in pool.ranges())
        assert (pool.reserved_bytes, pool.used_slots) == (0, 0)

    def test_a_range_that_goes_back_was_not_kept(self, tier: PersistentTier) -> None:
        """Blocks alone keep none; one that is kept refuses to go."""
        pool = pool_of(tier)
        slots = write(pool, NUMBERS)
        assert not any(pool.is_kept(item) for item in pool.ranges())
        pool.free(slots)
        for item in pool.ranges():
            assert pool.is_kept(item) != pool.give_back(item)

    def test_a_pool_stays_within_its_own_limit(self, tier: PersistentTier) -> None:
        """And says that this, not the tier, is what stops it."""
        pool = tier.pool(NS, PARTS, BLOCK_TOKENS, bytes_max=2 * MIB)
        assert len(pool.allocate(100_000)) > 0
        assert pool.reserved_bytes <= 2 * MIB
        assert pool.at_limit
        assert not pool_of(tier, OTHER_NS).at_limit

    def test_namespaces_are_apart(self, tier: PersistentTier) -> None:
        """The same blocks, cleared in one alone; and one layout for each."""
        pools = [pool_of(tier, ns_id) for ns_id in (NS, OTHER_NS)]
        slots = [write(pool, NUMBERS) for pool in pools]
        tier.clear(NS)
        pools[0].free(slots[0])
        assert all(read(pools[1], slots[1], NUMBERS))
        with pytest.raises(LayoutMismatchError):
            tier.pool(NS, (PARTS[0],), BLOCK_TOKENS)
        tier.forget(OTHER_NS)
        assert all(read(pools[1], slots[1], NUMBERS))

    def test_cleared_blocks_can_be_read_until_they_are_freed(self, tier: PersistentTier) -> None:
        """By whoever holds their slots."""
        pool = pool_of(tier)
        slots = write(pool, NUMBERS)
        tier.clear(NS)
        assert all(read(pool, slots, NUMBERS))

    def test_a_scrub_meets_every_block(self, tier: PersistentTier) -> None:
        """Whatever a step may read."""
        write(pool_of(tier), NUMBERS)
        for limit_bytes in (1, 50_000, 1 << 40):
            seen, after = 0, 0
            while True:
                step = tier.scrub(after, limit_bytes)
                seen += step.blocks
                assert ((), len(NUMBERS) - seen) == (step.bad, step.remaining_blocks)
                if step.next_after is None:
                    break
                after = step.next_after
            assert len(NUMBERS) == seen
        assert tier.quarantined_slots == 0

    def test_random_work_is_like_a_dict(self, tier: PersistentTier) -> None:
        """Stores, frees and reads against the simplest model."""
        chosen = random.Random(11)
        pool = pool_of(tier)
        held: dict[int, int] = {}
        for first in range(0, 400, 10):
            if chosen.random() < 0.4:  # frees a little less than it stores
                gone = [number for number in held if chosen.random() < 0.5]
                pool.free(np.array([held.pop(number) for number in gone], dtype=np.uint32))
            numbers = range(first, first + chosen.randrange(1, 10))
            held |= dict(zip(numbers, write(pool, numbers).tolist(), strict=True))
            some = chosen.sample(sorted(held), min(len(held), 5))
            assert all(read(pool, np.array([held[number] for number in some], dtype=np.uint32), some))
            assert len(held) == pool.used_slots
        assert tier.used_bytes <= tier.capacity_bytes

    def test_what_was_written_is_found_after_a_restart(self, reopen: Callable[[], PersistentTier]) -> None:
        """If anything is to be; handed over once, and what was freed or cleared never."""
        tier = reopen()
        pool = pool_of(tier)
        slots = write(pool, NUMBERS)
        pool.free(slots[:3])
        assert pool.free_for_good(slots[3:5])
        tier.flush()
        secret, start_count = tier.node_secret, tier.start_count
        tier = reopen()
        expected = set(NUMBERS[5:]) if self.survives_restart else set()
        assert {NS: len(expected)} == {item.ns_id: item.blocks for item in tier.recovered_namespaces()} or not expected
        found = recovered(tier)
        assert (expected, {}, len(expected)) == (set(found), recovered(tier), pool_of(tier).used_slots)
        if self.survives_restart:
            assert (secret, start_count + 1) == (tier.node_secret, tier.start_count)
        tier.clear(NS)
        assert recovered(reopen()) == {}

    def test_policy_files_are_kept_within_their_limit(self, tier: PersistentTier) -> None:
        """Replaced as wholes, and removed."""
        files = tier.policy_files
        write(pool_of(tier), NUMBERS)
        assert files.load(NS) is None
        assert files.save(NS, b"first")
        assert not files.save(NS, bytes(files.bytes_max + 1))
        assert (files.load(NS), files.load(OTHER_NS)) == (b"first", None)
        files.remove(NS)
        assert files.load(NS) is None

    def test_a_closed_tier_raises(self, tier: PersistentTier) -> None:
        """Closing it twice does not."""
        tier.close()
        tier.close()
        with pytest.raises(ClosedError):
            pool_of(tier)
        with pytest.raises(ClosedError):
            tier.flush()
