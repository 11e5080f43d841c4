"""Bytes on disk: golden values, so that a change of format cannot go unnoticed, and refusal of damaged input."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import StorageFormatError
from kvstore.tiers.base import BlockIdentity
from kvstore.tiers.checksum import sealed
from kvstore.tiers.header import BlockHeader, header_pages_bytes, packed_bytes, unpack_header
from kvstore.tiers.manifest import parse_row_key, row_key
from kvstore.tiers.slab import SlabHeader, slot_geometry, unpack_slab_header
from kvstore.tiers.superblock import FolderRecord, KeyRecord, Superblock, load_superblock

IDENTITY = BlockIdentity(b"r" * 16, b"p" * 16, b"k" * 16, b"".join(n.to_bytes(4, "little") for n in range(16)))
HEADER = BlockHeader(
    slab=3,
    slot=9,
    sequence=(2 << 40) + 7,
    generation=5,
    ns_id=b"n" * 16,
    identity=IDENTITY,
    part=1,
    part_count=2,
    payload_bytes=333,
    payload_digest=0x0123456789ABCDEF,
)
SLAB_HEADER = SlabHeader(3, b"n" * 16, 50, (5000, 333), 16)
SUPERBLOCK = Superblock(
    4,
    b"b" * 16,
    clean=True,
    generations={b"o" * 16: 1, b"n" * 16: 5},
    quarantined=frozenset({(3, 9), (3, 1)}),
    folders=(FolderRecord(1, was_present=True, folder_id=b"f" * 16, path="/mnt/other"),),
    keys=(KeyRecord(b"key".ljust(8, b"\0"), b"c" * 16),),
)
# As version 1 had it, without quarantined slots and further folders.
SUPERBLOCK_1 = (
    b"KVSSUPER\x01\0\0\0\x01\0\0\0\x04\0\0\0\0\0\0\0" + b"b" * 16 + b"\x02\0\0\0\0\0\0\0"
    + b"n" * 16 + b"\x05\0\0\0\0\0\0\0" + b"o" * 16 + b"\x01\0\0\0\0\0\0\0"
)  # fmt: skip


def digest_of(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def test_the_block_header_is_as_documented() -> None:
    packed = HEADER.pack()
    assert 136 + 64 + 8 == len(packed) == packed_bytes(16)
    assert b"KVSBLOCK\x01\0\0\0\x03\0\0\0\x09\0\0\0\x10\0\0\0" == packed[:24]
    assert b"n" * 16 + b"r" * 16 + b"p" * 16 + b"k" * 16 == packed[48:112]
    assert b"\x01\0\x02\0\0\0\0\0" == packed[112:120]
    assert IDENTITY.tokens == packed[136:200]
    assert "8cd27b0fd1747cbe" == digest_of(packed)


def test_the_block_header_keeps_the_writer() -> None:
    packed = replace(HEADER, identity=replace(IDENTITY, writer=2**63 + 5)).pack()
    assert b"\x05\0\0\0\0\0\0\x80" == packed[40:48]
    read = unpack_header(packed)
    assert read is not None
    assert 2**63 + 5 == read.identity.writer
    assert IDENTITY == read.identity


def test_the_slab_header_is_as_documented() -> None:
    packed = SLAB_HEADER.pack()
    assert 48 + 2 * 8 + 8 == len(packed)
    assert "8f4e2e61f29857a0" == digest_of(packed)


def test_the_superblock_is_as_documented() -> None:
    packed = SUPERBLOCK.pack()
    assert 60 + 2 * 24 + 2 * 8 + 28 + 10 + 24 + 8 == len(packed)
    assert "383fb61255b8f65a" == digest_of(packed)


def test_a_superblock_of_version_1_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "superblock"
    path.write_bytes(sealed(SUPERBLOCK_1))
    assert "b7d9ed028ac75f95" == digest_of(path.read_bytes())
    assert replace(SUPERBLOCK, quarantined=frozenset(), folders=(), keys=()) == load_superblock(path)


def test_a_superblock_of_version_2_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "superblock"
    packed = replace(SUPERBLOCK, keys=()).pack()
    path.write_bytes(sealed(packed[:8] + b"\x02" + packed[9:56] + packed[60:-8]))
    assert "5215186229032bcb" == digest_of(path.read_bytes())
    assert replace(SUPERBLOCK, keys=()) == load_superblock(path)


def test_a_header_comes_back_with_whatever_pads_its_page() -> None:
    assert HEADER == unpack_header(HEADER.pack())
    assert HEADER == unpack_header(memoryview(HEADER.pack() + bytes(4000)))


def test_a_header_with_a_changed_byte_is_none() -> None:
    for position in range(len(HEADER.pack())):
        packed = bytearray(HEADER.pack())
        packed[position] ^= 0x01
        assert unpack_header(bytes(packed) + bytes(100)) is None, position


@pytest.mark.parametrize("length", [0, 7, 135, 136, 207])
def test_a_header_cut_short_is_none(length: int) -> None:
    assert unpack_header(HEADER.pack()[:length]) is None


def test_an_unreasonable_token_count_is_none() -> None:
    packed = bytearray(HEADER.pack())
    packed[20:24] = b"\xff" * 4
    assert unpack_header(bytes(packed)) is None


def test_headers_take_whole_pages() -> None:
    assert 4096 == header_pages_bytes((4096 - 136 - 8) // 4)
    assert 8192 == header_pages_bytes((4096 - 136 - 8) // 4 + 1)


def test_parts_of_a_slot_begin_at_pages() -> None:
    geometry = slot_geometry((5000, 333), 16)
    assert (0, 4096 + 8192) == geometry.part_offsets
    assert 4096 + 8192 + 4096 + 4096 == geometry.slot_bytes
    assert (0, 20_480) == geometry.span((0, 1))
    assert (12_288, 8192) == geometry.span((1,))


def test_a_slab_header_comes_back_and_damage_is_none() -> None:
    packed = SLAB_HEADER.pack()
    path = Path("slab-00000003.kvs")
    assert SLAB_HEADER == unpack_slab_header(packed + bytes(4000), path)
    for position in (*range(8), *range(12, len(packed))):
        damaged = bytearray(packed)
        damaged[position] ^= 0x40
        assert unpack_slab_header(bytes(damaged) + bytes(4000), path) is None
    assert unpack_slab_header(packed[:40], path) is None
    with pytest.raises(StorageFormatError, match=r"slab-00000003\.kvs has format version 3"):
        unpack_slab_header(packed[:8] + b"\x03" + packed[9:], path)


def test_a_superblock_comes_back_and_damage_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "superblock"
    assert load_superblock(path) is None
    path.write_bytes(SUPERBLOCK.pack())
    assert SUPERBLOCK == load_superblock(path)
    for content in (b"", SUPERBLOCK.pack()[:-1], SUPERBLOCK.pack() + b"\0", b"\0" * 100):
        path.write_bytes(content)
        with pytest.raises(StorageFormatError, match="superblock"):
            load_superblock(path)


def test_counts_beyond_the_end_are_refused_whatever_the_checksum(tmp_path: Path) -> None:
    path = tmp_path / "superblock"
    head = SUPERBLOCK.pack()[:40]
    generations, places, folders = b"\xff" * 8, bytes(4), b"\x01\0\0\0"
    path.write_bytes(sealed(head + generations + places + folders + bytes(16)))
    with pytest.raises(StorageFormatError, match="damaged"):
        load_superblock(path)
    slab = SLAB_HEADER.pack()[:-8]
    assert unpack_slab_header(sealed(slab[:40] + b"\xff" * 4 + slab[44:]), path) is None


@pytest.mark.parametrize("empty", [{"slot_count": 0}, {"part_sizes": ()}])
def test_a_slab_that_says_it_holds_nothing_is_none(empty: dict[str, Any]) -> None:
    assert unpack_slab_header(replace(SLAB_HEADER, **empty).pack(), Path("slab")) is None


def test_row_keys_sort_like_the_slots_they_name() -> None:
    assert row_key(1, 300) < row_key(2, 0) < row_key(2, 1)
    assert (2, 1) == parse_row_key(row_key(2, 1))
    assert parse_row_key(b"odd") is None
