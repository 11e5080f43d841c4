from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvstore.tiers.base import BlockIdentity
from kvstore.tiers.disk import DiskTier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from kvstore.tiers.base import Bytes1D, Bytes2D
    from kvstore.tiers.codecs.coding import PoolCoding
    from kvstore.tiers.disk_pool import DiskPool
    from kvstore.types import Slots

MIB = 1 << 20


@dataclass(frozen=True)
class Blocks:
    """Numbered blocks whose bytes follow from their number; each has `bits` random bits. `coding` is their pool's."""

    part_sizes: tuple[int, ...] = (5000, 333)
    block_tokens: int = 16
    ns_id: bytes = b"n" * 16
    bits: int = 8
    coding: PoolCoding | None = None

    def identity(self, number: int) -> BlockIdentity:
        tokens = np.full(self.block_tokens, number, dtype="<u4").tobytes()
        return BlockIdentity(b"r" * 16, number.to_bytes(16, "big"), (number + 1).to_bytes(16, "big"), tokens)

    def number(self, identity: BlockIdentity) -> int:
        return int.from_bytes(identity.parent_key, "big")

    def row(self, number: int) -> Bytes1D:
        generator = np.random.default_rng((number, *self.part_sizes))
        return generator.integers(0, 1 << self.bits, sum(self.part_sizes), dtype=np.uint8)

    def rows(self, numbers: Iterable[int]) -> Bytes2D:
        return np.stack([self.row(number) for number in numbers])

    def parts(self, number: int) -> tuple[Bytes1D, ...]:
        return tuple(np.split(self.row(number), np.cumsum(self.part_sizes)[:-1]))

    def pool(self, tier: DiskTier) -> DiskPool:
        pool = tier.pool(self.ns_id, self.part_sizes, self.block_tokens)
        if self.coding is not None:
            tier.use_coding(self.ns_id, self.coding)
        return pool

    def store(self, pool: DiskPool, numbers: Sequence[int]) -> Slots:
        """Allocate and write; all must fit."""
        slots = pool.allocate(len(numbers))
        assert len(numbers) == len(slots)
        stored = pool.write(slots, [self.identity(n) for n in numbers], [self.parts(n) for n in numbers])
        assert stored.all()
        return slots

    def right(self, pool: DiskPool, slots: Slots, numbers: Sequence[int]) -> list[bool]:
        """Which slots give their blocks; every block given must be byte-equal."""
        rows = np.zeros((len(numbers), sum(self.part_sizes)), dtype=np.uint8)
        good = pool.read(slots, [self.identity(number) for number in numbers], rows)
        for position in np.flatnonzero(good):
            np.testing.assert_array_equal(self.row(numbers[position]), rows[position])
        return good.tolist()

    def recovered(self, tier: DiskTier) -> dict[int, bool]:
        """Numbers of the recovered blocks, and whether each one can be read."""
        found = tier.recovered(self.ns_id)
        if not found:
            return {}
        numbers = [self.number(block.identity) for block in found]
        assert len(numbers) == len(set(numbers))
        slots = np.array([block.slot for block in found], dtype=np.uint32)
        return dict(zip(numbers, self.right(self.pool(tier), slots, numbers), strict=True))


@dataclass
class Disk:
    """Opens tiers in one directory and closes what a test left open."""

    path: Path
    tiers: list[DiskTier] = field(default_factory=list)

    def open(self, *, capacity_bytes: int = 16 * MIB, **settings: object) -> DiskTier:
        opener = partial(DiskTier.open, self.path, capacity_bytes=capacity_bytes)
        tier: DiskTier = opener(**{"free_floor_bytes": 0, **settings})  # type: ignore[arg-type]
        self.tiers.append(tier)
        return tier

    def slab_paths(self) -> list[Path]:
        return sorted((self.path / "slabs").glob("slab-*.kvs"))

    def real_bytes(self) -> int:
        return sum(path.stat().st_blocks * 512 for path in self.path.rglob("*") if path.is_file())


@pytest.fixture
def blocks() -> Blocks:
    return Blocks()


@pytest.fixture
def blocks_of() -> Callable[..., Blocks]:
    return Blocks


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    opened = Disk(tmp_path / "data")
    yield opened
    for tier in opened.tiers:
        tier.close()
