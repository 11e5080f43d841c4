"""Headers sealed and checked in native code, many at a time, against BlockHeader and the reference checksum."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.tiers.base import BlockIdentity
from kvstore.tiers.buffers import PAGE_BYTES, address_of, aligned_bytes
from kvstore.tiers.checksum import array_digest, digest
from kvstore.tiers.faults import DiskFault
from kvstore.tiers.header import BlockHeader, check_headers, seal_headers, unsealed_headers

HEADER = BlockHeader(3, 9, (2 << 40) + 7, 5, b"n" * 16, BlockIdentity(b"r" * 16, b"p" * 16, b"k" * 16, b""), 1, 2, 0, 0)


def header(tokens: int, payload: np.ndarray) -> BlockHeader:
    identity = replace(HEADER.identity, tokens=np.arange(tokens, dtype="<u4").tobytes(), writer=77)
    return replace(HEADER, identity=identity, payload_bytes=len(payload), payload_digest=digest(payload.data))


def test_a_digest_is_that_of_the_reference_at_every_length():
    data = np.random.default_rng(1).integers(0, 256, 5000, dtype=np.uint8)
    lengths = [*range(1200), 2047, 2048, 2049, 5000]
    assert [array_digest(data[:n]) for n in lengths] == [digest(data[:n].data) for n in lengths]


@settings(max_examples=60, deadline=None)
@given(tokens=st.integers(1, 40), size=st.integers(1, 9000), copied=st.booleans(), seed=st.integers(0, 1000))
def test_what_is_sealed_is_what_the_header_packs_and_is_found_right(tokens: int, size: int, copied: bool, seed: int):
    payload = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    page, target = aligned_bytes(PAGE_BYTES), aligned_bytes(3 * PAGE_BYTES)
    page[:] = target[:] = 255
    expected = header(tokens, payload)
    goes_to = address_of(target if copied else payload)
    places = [(address_of(page), address_of(payload), goes_to, size)]

    seal_headers(places, headers := unsealed_headers([replace(expected, payload_digest=0)]), PAGE_BYTES)

    packed = expected.pack()
    assert headers[0].tobytes() == packed
    assert page.tobytes() == packed + bytes(PAGE_BYTES - len(packed))
    if copied:
        whole = -(-size // PAGE_BYTES) * PAGE_BYTES
        assert target[:whole].tobytes() == payload.tobytes() + bytes(whole - size)
        assert (target[whole:] == 255).all()
    found = [(address_of(page), goes_to, goes_to, size)]
    other_writer = replace(expected, identity=replace(expected.identity, writer=1))
    assert check_headers(found, unsealed_headers([other_writer]), PAGE_BYTES) == [None]


@pytest.mark.parametrize(
    ("offset", "fault"),
    [(0, DiskFault.CORRUPT_HEADER), (20, DiskFault.CORRUPT_HEADER), (150, DiskFault.CORRUPT_HEADER), (-1, None)],
)
def test_a_flipped_bit_of_a_page_is_a_corrupt_header_unless_it_is_padding(offset: int, fault: DiskFault | None):
    payload = np.arange(300, dtype=np.uint8)
    page = aligned_bytes(PAGE_BYTES)
    places = [(address_of(page), address_of(payload), address_of(payload), len(payload))]
    headers = unsealed_headers([header(16, payload)])
    seal_headers(places, headers, PAGE_BYTES)
    page[offset] ^= 1
    assert check_headers(places, headers, PAGE_BYTES) == [fault]


@pytest.mark.parametrize("change", [{"slot": 8}, {"sequence": 1}, {"generation": 6}, {"part": 0}, {"ns_id": b"o" * 16}])
def test_another_block_is_told_from_damage(change: dict[str, object]):
    payload = np.arange(300, dtype=np.uint8)
    page = aligned_bytes(PAGE_BYTES)
    places = [(address_of(page), address_of(payload), address_of(payload), len(payload))]
    seal_headers(places, unsealed_headers([header(16, payload)]), PAGE_BYTES)
    wanted = unsealed_headers([replace(header(16, payload), **change)])
    longer = unsealed_headers([header(17, payload)])

    assert check_headers(places, wanted, PAGE_BYTES) == [DiskFault.OTHER_BLOCK]
    assert check_headers(places, longer, PAGE_BYTES) == [DiskFault.OTHER_BLOCK]
    payload[7] ^= 1
    right = unsealed_headers([header(16, payload)])
    assert check_headers(places, right, PAGE_BYTES) == [DiskFault.CORRUPT_PAYLOAD]
