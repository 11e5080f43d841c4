"""A codec whose blocks have one size, and blocks among them that it cannot take."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvstore.tiers.base import BlockIdentity
from kvstore.tiers.codecs.base import PartForm
from kvstore.tiers.codecs.coding import PoolCoding
from kvstore.tiers.codecs.registry import Pipeline, make_codec
from kvstore.tiers.packed import PackedTier

if TYPE_CHECKING:
    from collections.abc import Iterator

NS = b"n" * 16
TOKENS, CHANNELS = 16, 64
ELEMENTS = 8 * TOKENS * CHANNELS
COUNT = 40
CODING = PoolCoding(Pipeline(make_codec("int8"), False), (PartForm("float16", TOKENS, CHANNELS),))


@pytest.fixture
def tier() -> Iterator[PackedTier]:
    tier = PackedTier.in_memory(16 << 20)
    yield tier
    tier.close()


def identity(number: int) -> BlockIdentity:
    return BlockIdentity(b"r" * 16, number.to_bytes(16, "big"), (number + 1).to_bytes(16, "big"), bytes(4 * TOKENS))


@pytest.mark.parametrize("odd", [(), (0,), (17, 18, 39), tuple(range(COUNT))])
def test_blocks_that_need_another_size_are_stored_as_they_are_and_the_others_in_8_bits(
    tier: PackedTier, odd: tuple[int, ...]
):
    pool = tier.pool(NS, (2 * ELEMENTS,), TOKENS)
    tier.use_coding(NS, CODING)
    values = np.random.default_rng(1).normal(size=(COUNT, ELEMENTS)).astype(np.float16)
    values[list(odd), 5] = np.inf
    rows = values.view(np.uint8)
    numbers = [identity(number) for number in range(COUNT)]
    slots = pool.allocate(COUNT)

    assert pool.write(slots, numbers, [(row,) for row in rows]).all()

    assert len(set(slots.tolist())) == COUNT == pool.used_slots
    found = np.zeros_like(rows)
    assert pool.read(slots, numbers, found).all()
    is_exact = (found == rows).all(axis=1)
    assert np.flatnonzero(is_exact).tolist() == list(odd)
    finite = ~np.isin(np.arange(COUNT), odd)
    error = np.abs(found.view(np.float16)[finite].astype(np.float32) - values[finite])
    assert not error.size or error.max() < 0.05
