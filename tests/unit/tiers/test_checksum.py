from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvstore.tiers._core import _copy
from kvstore.tiers.checksum import copy_and_digest, digest

MIB = 1 << 20
EDGES = (0, 1, 240, 241, 256, 1023, 1024, 1025, 1088, 4096, 131_072, MIB + 1023, MIB + 1024, MIB + 1025)


def random_bytes(count: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng((seed, count)).integers(0, 256, count, dtype=np.uint8)


@pytest.mark.parametrize("count", EDGES)
def test_a_copy_and_its_digest_are_those_of_separate_passes(count: int) -> None:
    source, target = random_bytes(count), np.zeros(count, dtype=np.uint8)
    assert xxhash.xxh3_64_intdigest(source.data) == copy_and_digest(target, source)
    np.testing.assert_array_equal(source, target)


@given(st.integers(0, 9000), st.integers(0, 70), st.integers(0, 70))
def test_any_length_and_alignment_gives_the_same_digest(count: int, source_skip: int, target_skip: int) -> None:
    source = random_bytes(count + source_skip)[source_skip:]
    outer = np.full(count + target_skip + 64, 7, dtype=np.uint8)
    target = outer[target_skip : target_skip + count]
    assert digest(source.tobytes()) == copy_and_digest(target, source)
    np.testing.assert_array_equal(source, target)
    assert (outer[:target_skip] == 7).all()
    assert (outer[target_skip + count :] == 7).all()


@pytest.mark.parametrize("skip", [0, 1, 32, 64])
def test_large_copies_are_right_at_any_alignment(skip: int) -> None:
    source = random_bytes((3 << 20) + 77)
    target = np.zeros(source.size + skip, dtype=np.uint8)[skip:]
    assert xxhash.xxh3_64_intdigest(source.data) == copy_and_digest(target, source)
    np.testing.assert_array_equal(source, target)


def test_the_native_part_refuses_what_it_does_not_hash() -> None:
    with pytest.raises(ValueError, match="DIGEST_BYTES_MIN"):
        _copy.copy_and_digest(np.zeros(240, dtype=np.uint8), np.zeros(240, dtype=np.uint8))
    with pytest.raises(ValueError, match="length"):
        _copy.copy_and_digest(np.zeros(300, dtype=np.uint8), np.zeros(301, dtype=np.uint8))
