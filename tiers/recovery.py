"""Finds the blocks that a disk held when it was opened: from the index, or from the headers in the slabs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.tiers.coded_header import CodedHeader, is_coded
from kvstore.tiers.faults import DiskFault
from kvstore.tiers.header import unpack_header
from kvstore.tiers.manifest import parse_row_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvstore.tiers.coded_transfer import CodedTransfer
    from kvstore.tiers.header import BlockHeader
    from kvstore.tiers.slab import Slab
    from kvstore.tiers.transfer import SlotTransfer


@dataclass(frozen=True, slots=True)
class FoundBlock:
    """A slot that holds a block, by the header of its part 0. The payload is verified when it is first read."""

    slab: Slab
    index: int
    header: BlockHeader | CodedHeader

    @property
    def place(self) -> tuple[int, int]:
        """Slab and slot number."""
        return self.slab.number, self.index


class SlabScanner:
    """Reads what index rows and headers say, of plain slots and of coded ones. `generations` are those in force."""

    def __init__(self, transfer: SlotTransfer, coded: CodedTransfer, generations: Mapping[bytes, int]) -> None:
        self.faults = transfer.faults
        self._transfer = transfer
        self._coded = coded
        self._generations = generations

    def blocks_from_rows(
        self, rows: Iterable[tuple[bytes, bytes]], slabs: Mapping[int, Slab]
    ) -> list[FoundBlock] | None:
        """The blocks that index rows name; rows that are outdated, of a lost slab or of a lost key are left out.

        None if a row is damaged: then others may be missing, and what lies in their slots would be found again later,
        when it may have been dropped elsewhere.
        """
        found = []
        for key, value in rows:
            place = parse_row_key(key)
            header = self._coded.unpack(value) if is_coded(value) else unpack_header(value)
            if header is DiskFault.UNKNOWN_KEY:
                self.faults.add(DiskFault.UNKNOWN_KEY)
                continue
            if place is None or header is None or isinstance(header, DiskFault):
                return None
            slab, index = slabs.get(place[0]), place[1]
            if slab is None:
                continue
            if index >= slab.header.slot_count or not _belongs(slab, header, index):
                return None
            if self._is_current(header):
                found.append(FoundBlock(slab, index, header))
        return found

    def blocks_from_slabs(self, slabs: Iterable[Slab]) -> list[FoundBlock]:
        """The blocks that the headers in the slabs tell of; a block counts if the headers of all its parts agree."""
        return [block for blocks in self._transfer.map(self._scan, slabs) for block in blocks]

    def _scan(self, slab: Slab) -> list[FoundBlock]:
        found = []
        for index in range(slab.header.slot_count):
            header = self._header(slab, index)
            if header is not None and self._is_current(header):
                found.append(FoundBlock(slab, index, header))
        return found

    def _header(self, slab: Slab, index: int) -> BlockHeader | CodedHeader | None:
        if slab.geometry.coded:
            return self._coded.read_header(slab, index)
        headers = self._transfer.read_headers(slab, index)
        return headers[0] if headers and _agree(headers) else None

    def _is_current(self, header: BlockHeader | CodedHeader) -> bool:
        return header.generation == self._generations.get(header.ns_id, 0)


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


def _belongs(slab: Slab, header: BlockHeader | CodedHeader, index: int) -> bool:
    if isinstance(header, CodedHeader):
        return slab.owns_coded(header, index)
    return slab.owns(header, index, 0)
