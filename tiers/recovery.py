"""Finds the blocks that a disk held when it was opened: from the index, or from the headers in the slabs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.tiers.header import unpack_header
from kvstore.tiers.manifest import parse_row_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvstore.tiers.header import BlockHeader
    from kvstore.tiers.slab import Slab
    from kvstore.tiers.transfer import SlotTransfer


@dataclass(frozen=True, slots=True)
class FoundBlock:
    """A slot that holds a block, by the header of its part 0. The payload is verified when it is first read."""

    slab: Slab
    index: int
    header: BlockHeader

    @property
    def place(self) -> tuple[int, int]:
        """Slab and slot number."""
        return self.slab.number, self.index


def blocks_from_rows(
    rows: Iterable[tuple[bytes, bytes]], slabs: Mapping[int, Slab], generations: Mapping[bytes, int]
) -> list[FoundBlock] | None:
    """The blocks that index rows name; rows that are outdated or of a lost slab are left out.

    None if a row is damaged: then others may be missing, and what lies in their slots would be found again later, when
    it may have been dropped elsewhere.
    """
    found = []
    for key, value in rows:
        place = parse_row_key(key)
        header = unpack_header(value)
        if place is None or header is None:
            return None
        slab, index = slabs.get(place[0]), place[1]
        if slab is None:
            continue
        if index >= slab.header.slot_count or not slab.owns(header, index, 0):
            return None
        if _is_current(header, generations):
            found.append(FoundBlock(slab, index, header))
    return found


def blocks_from_slabs(
    slabs: Iterable[Slab], transfer: SlotTransfer, generations: Mapping[bytes, int]
) -> list[FoundBlock]:
    """The blocks that the headers in the slabs tell of; a block counts if the headers of all its parts agree."""

    def scan(slab: Slab) -> list[FoundBlock]:
        found = []
        for index in range(slab.header.slot_count):
            headers = transfer.read_headers(slab, index)
            if headers and _agree(headers) and _is_current(headers[0], generations):
                found.append(FoundBlock(slab, index, headers[0]))
        return found

    return [block for blocks in transfer.map(scan, slabs) for block in blocks]


def newest_copies(found: Iterable[FoundBlock]) -> tuple[list[FoundBlock], list[FoundBlock]]:
    """Of several copies of a block the one written last, and all the others."""
    newest: dict[tuple[bytes, bytes], FoundBlock] = {}
    superseded = []
    for block in found:
        name = (block.header.ns_id, block.header.identity.key)
        other = newest.setdefault(name, block)
        if other is not block:
            older, newest[name] = sorted((other, block), key=lambda copy: copy.header.sequence)
            superseded.append(older)
    return list(newest.values()), superseded


def _agree(headers: list[BlockHeader]) -> bool:
    first = headers[0]
    return all(
        (header.sequence, header.generation, header.identity) == (first.sequence, first.generation, first.identity)
        for header in headers
    )


def _is_current(header: BlockHeader, generations: Mapping[bytes, int]) -> bool:
    return header.generation == generations.get(header.ns_id, 0)
