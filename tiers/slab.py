"""Slab files: a header page, then slots of equal size. Little-endian; on disk: never renumber.

    offset  bytes  field of the header page
         0      8  magic "KVSSLAB1"
         8      4  format version: 1, or 2 with coded slots
        12      4  slab number
        16     16  ns_id
        32      4  slot count
        36      4  tokens in a block
        40      4  part count n
        44      4  pages of a coded slot; zero where slots are plain
        48    8*n  exact bytes of each part
    48+8*n      8  XXH3-64 of all bytes before

Slot i begins at 4096 + i * slot_bytes. In a plain one, for each part: the header, padded to whole pages, then the
payload, padded to whole pages. A coded one is whole pages, as many as its size class has: see coded_slot.py.
"""

from __future__ import annotations

import struct
import threading
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from kvstore.errors import StorageFormatError
from kvstore.tiers.buffers import PAGE_BYTES, whole_pages
from kvstore.tiers.checksum import DIGEST_BYTES, is_sealed, sealed
from kvstore.tiers.coded_header import coded_header_bytes
from kvstore.tiers.header import TOKEN_BYTES, header_pages_bytes, packed_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from kvstore.tiers.coded_header import CodedHeader
    from kvstore.tiers.header import BlockHeader
    from kvstore.tiers.slab_volume import SlabVolume

SLAB_MAGIC = b"KVSSLAB1"
SLAB_VERSION = 1
CODED_SLAB_VERSION = 2

_FIXED = struct.Struct("<8sII16sIIII")
PARTS_MAX = (PAGE_BYTES - _FIXED.size - DIGEST_BYTES) // 8


@dataclass(frozen=True, slots=True)
class SlotGeometry:
    """Where the parts of a block lie inside a slot; all offsets and sizes are whole pages.

    In a coded slot parts lie where its own header says: there are no offsets.
    """

    part_sizes: tuple[int, ...]
    block_tokens: int
    header_bytes: int
    part_offsets: tuple[int, ...]
    slot_bytes: int

    @property
    def coded(self) -> bool:
        """Whether slots are coded ones."""
        return not self.part_offsets

    @property
    def kind(self) -> int:
        """What tells slots of one pool from each other: 0 for plain ones, their size for coded ones."""
        return self.slot_bytes if self.coded else 0

    @property
    def packed_bytes(self) -> int:
        """Exact bytes of a header, as it lies in the index too."""
        if self.coded:
            return coded_header_bytes(len(self.part_sizes), self.block_tokens)
        return packed_bytes(self.block_tokens)

    @property
    def body_offsets(self) -> tuple[int, ...]:
        """Where the payload of each part begins."""
        return tuple(offset + self.header_bytes for offset in self.part_offsets)

    def span(self, parts: Sequence[int]) -> tuple[int, int]:
        """Offset in the slot and length of neighbouring parts, headers and padding included."""
        start, last = self.part_offsets[parts[0]], parts[-1]
        return start, self.part_offsets[last] + self.header_bytes + whole_pages(self.part_sizes[last]) - start


def slot_geometry(part_sizes: tuple[int, ...], block_tokens: int) -> SlotGeometry:
    """The geometry of slots for blocks with these parts."""
    header_bytes = header_pages_bytes(block_tokens)
    ends = tuple(accumulate(header_bytes + whole_pages(size) for size in part_sizes))
    return SlotGeometry(part_sizes, block_tokens, header_bytes, (0, *ends[:-1]), ends[-1])


def coded_geometry(part_sizes: tuple[int, ...], block_tokens: int, slot_bytes: int) -> SlotGeometry:
    """The geometry of coded slots of one size class."""
    header_bytes = min(slot_bytes, whole_pages(coded_header_bytes(len(part_sizes), block_tokens)))
    return SlotGeometry(part_sizes, block_tokens, header_bytes, (), slot_bytes)


@dataclass(frozen=True, slots=True)
class SlabHeader:
    """What a slab says about itself in its first page."""

    number: int
    ns_id: bytes
    slot_count: int
    part_sizes: tuple[int, ...]
    block_tokens: int
    coded_pages: int = 0

    @property
    def geometry(self) -> SlotGeometry:
        """That of its slots."""
        if self.coded_pages:
            return coded_geometry(self.part_sizes, self.block_tokens, self.coded_pages * PAGE_BYTES)
        return slot_geometry(self.part_sizes, self.block_tokens)

    def pack(self) -> bytes:
        """The header as it lies on disk, without padding."""
        assert len(self.part_sizes) <= PARTS_MAX, len(self.part_sizes)
        version = CODED_SLAB_VERSION if self.coded_pages else SLAB_VERSION
        head = (SLAB_MAGIC, version, self.number, self.ns_id, self.slot_count, self.block_tokens)
        sizes = struct.pack(f"<{len(self.part_sizes)}Q", *self.part_sizes)
        return sealed(_FIXED.pack(*head, len(self.part_sizes), self.coded_pages) + sizes)


def unpack_slab_header(page: bytes, path: Path) -> SlabHeader | None:
    """The header in the first page of a slab; None if there is none or it is damaged.

    Raises StorageFormatError if another version of kvstore wrote it.
    """
    if len(page) < _FIXED.size or page[: len(SLAB_MAGIC)] != SLAB_MAGIC:
        return None
    _, version, number, ns_id, slot_count, block_tokens, part_count, coded_pages = _FIXED.unpack_from(page)
    if version not in (SLAB_VERSION, CODED_SLAB_VERSION):
        raise StorageFormatError(
            f"{path} has format version {version}, this kvstore reads {CODED_SLAB_VERSION}; "
            "use the version that wrote it or another data directory"
        )
    packed_bytes = _FIXED.size + 8 * part_count + DIGEST_BYTES
    packed = page[:packed_bytes]
    if len(packed) != packed_bytes or not is_sealed(packed) or not (slot_count and part_count):
        return None
    if bool(coded_pages) != (version == CODED_SLAB_VERSION):
        return None
    part_sizes = struct.unpack(f"<{part_count}Q", packed[_FIXED.size : -DIGEST_BYTES])
    return SlabHeader(number, ns_id, slot_count, part_sizes, block_tokens, coded_pages)


class Slab:
    """An open slab file and what is known of its slots.

    `sequences` holds the write sequence of each slot's block, 0 where there is none to be read; `generations` the
    clear generation it was written in; `written` whether the slot may hold a header on disk; `suspect` whether its
    I/O failed. The owner of a slot alone changes its entries.
    `open_lock` is held while the file is synced or closed; `removed` says that it is closed.
    """

    def __init__(self, header: SlabHeader, path: Path, fd: int, volume: SlabVolume) -> None:
        self.header = header
        self.path = path
        self.fd = fd
        self.volume = volume
        self.geometry = header.geometry
        self.sequences: NDArray[np.uint64] = np.zeros(header.slot_count, dtype=np.uint64)
        self.generations: NDArray[np.uint64] = np.zeros(header.slot_count, dtype=np.uint64)
        self.written: NDArray[np.bool_] = np.zeros(header.slot_count, dtype=np.bool_)
        self.suspect: NDArray[np.bool_] = np.zeros(header.slot_count, dtype=np.bool_)
        self.open_lock = threading.Lock()
        self.removed = False

    @property
    def number(self) -> int:
        """The slab number, part of its file name."""
        return self.header.number

    def slot_offset(self, index: int) -> int:
        """Where a slot begins in the file."""
        return PAGE_BYTES + index * self.geometry.slot_bytes

    def owns(self, header: BlockHeader, index: int, part: int) -> bool:
        """Whether a header speaks of this very place and of blocks as this slab holds them."""
        return (
            not self.geometry.coded
            and (header.slab, header.slot, header.part) == (self.number, index, part)
            and header.ns_id == self.header.ns_id
            and header.part_count == len(self.header.part_sizes)
            and header.payload_bytes == self.header.part_sizes[part]
            and len(header.identity.tokens) == self.header.block_tokens * TOKEN_BYTES
        )

    def owns_coded(self, header: CodedHeader, index: int) -> bool:
        """The same of the header of a coded slot."""
        place = header.place
        return (
            self.geometry.coded
            and (place.slab, place.slot, place.ns_id) == (self.number, index, self.header.ns_id)
            and tuple(part.raw_bytes for part in header.parts) == self.header.part_sizes
            and len(header.identity.tokens) == self.header.block_tokens * TOKEN_BYTES
        )


def slab_bytes(geometry: SlotGeometry, slot_count: int) -> int:
    """Length of a slab file with `slot_count` slots."""
    return PAGE_BYTES + slot_count * geometry.slot_bytes


def file_bytes(slabs: Iterable[Slab]) -> int:
    """Real bytes of some slab files."""
    return sum(slab_bytes(slab.geometry, slab.header.slot_count) for slab in slabs)
