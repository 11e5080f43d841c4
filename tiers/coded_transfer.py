"""I/O of coded slots: as SlotTransfer does it for plain ones, with encryption and decoding on the same threads."""

from __future__ import annotations

import errno
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from kvstore.stats import CodecStats
from kvstore.tiers.codecs.registry import pipeline_of
from kvstore.tiers.codecs.stats import CodecCounts
from kvstore.tiers.coded_header import Place, is_coded, unpack_coded
from kvstore.tiers.coded_slot import Wanted, lay_out, payload_fault, take_out
from kvstore.tiers.faults import DiskFault
from kvstore.tiers.transfer import Occupant, ShortWriteError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.tiers.base import BlockIdentity, Bytes1D, Bytes2D, Mask
    from kvstore.tiers.codecs.aes_gcm import BlockCipher, PieceCipher
    from kvstore.tiers.codecs.coding import EncodedBlock, PoolCoding
    from kvstore.tiers.codecs.known_keys import KnownKeys
    from kvstore.tiers.coded_header import CodedHeader
    from kvstore.tiers.file_io import FileIo
    from kvstore.tiers.slab import Slab
    from kvstore.tiers.slots import SlotRun
    from kvstore.tiers.transfer import SlotTransfer


@dataclass(frozen=True, slots=True)
class BlockToWrite:
    """What goes into a slot."""

    identity: BlockIdentity
    generation: int
    encoded: EncodedBlock


@dataclass(frozen=True, slots=True)
class WrittenBlock:
    """What became of it: the write sequence, and the packed header."""

    sequence: int
    header: bytes


class CodedTransfer:
    """Reads and writes coded slots, on the threads and with the buffers of a SlotTransfer. Thread-safe.

    Without a cipher nothing is encrypted, and what is cannot be read.
    """

    def __init__(
        self, transfer: SlotTransfer, io: FileIo, cipher: BlockCipher | None, next_sequence: Callable[[], int]
    ) -> None:
        self.counts = CodecCounts()
        self.cipher = cipher
        self._transfer = transfer
        self._faults = transfer.faults
        self._io = io
        self._next_sequence = next_sequence
        self._known_keys: KnownKeys | None = None

    def note_keys(self, known_keys: KnownKeys) -> None:
        """Where keys are written down before they encrypt; before this call nothing can be encrypted."""
        self._known_keys = known_keys

    def write(self, run: SlotRun[Slab], blocks: Sequence[BlockToWrite]) -> list[WrittenBlock | None]:
        """Write one block into each slot of a run; None where it was not written. See SlotTransfer.write.

        Each attempt has a write sequence of its own: no two are sealed with one nonce.
        """

        def together(some: SlotRun[Slab], places: slice) -> list[WrittenBlock | None]:
            return self._write_together(some, blocks[places])

        return self._transfer.write_by(run, together)

    def read(
        self, run: SlotRun[Slab], occupants: Sequence[Occupant], rows: Bytes2D, parts: Sequence[int], coding: PoolCoding
    ) -> Mask:
        """Read parts of the block in each slot of a run; see SlotTransfer.read. Whole slots are read for any part."""
        sizes = run.holder.header.part_sizes
        edges = np.cumsum([0, *(sizes[part] for part in parts)]).tolist()

        def together(some: SlotRun[Slab], places: slice) -> Mask:
            wanted = [
                Wanted(tuple(parts), tuple(row[start:end] for start, end in pairwise(edges))) for row in rows[places]
            ]
            return self._read_together(some, occupants[places], wanted, coding)

        return self._transfer.read_by(run, together)

    def check(self, run: SlotRun[Slab]) -> Mask:
        """Whether each slot holds what it is said to hold, by headers and digests; see SlotTransfer.check.

        What a key encrypted that is not there (any more) is not right: nobody will read it.
        """
        return self._transfer.read_by(run, lambda some, _: self._check_together(some))

    def read_header(self, slab: Slab, index: int) -> CodedHeader | None:
        """The header in a slot, None unless it is whole and says it belongs there."""
        with self._transfer.buffers.lend(slab.geometry.header_bytes) as buffer:
            try:
                got_bytes = self._io.read(slab.fd, [buffer], slab.slot_offset(index))
            except OSError:
                self._faults.add(DiskFault.READ_ERROR)
                return None
            page = buffer[:got_bytes].tobytes()
        if not is_coded(page):
            return None
        header = self.unpack(page)
        if isinstance(header, DiskFault):
            if header is DiskFault.UNKNOWN_KEY:
                self._faults.add(header)
            return None
        return header if slab.owns_coded(header, index) else None

    def unpack(self, page: bytes | memoryview) -> CodedHeader | DiskFault:
        """The header at the start of `page`, or why it cannot be read."""
        return unpack_coded(page, self._opener)

    def _opener(self, key_id: bytes, salt: bytes) -> PieceCipher | None:
        return None if self.cipher is None else self.cipher.opener(key_id, salt)

    def _cipher_of(self, header: CodedHeader) -> PieceCipher | None:
        return self._opener(header.place.key_id, header.place.salt) if header.place.encrypts else None

    def _write_together(self, run: SlotRun[Slab], blocks: Sequence[BlockToWrite]) -> list[WrittenBlock | None]:
        """One I/O for all blocks. Raises OSError if not all of it was written."""
        slab = run.holder
        slot_bytes = slab.geometry.slot_bytes
        slab.written[run.indices] = True
        written: list[WrittenBlock | None] = []
        with self._transfer.buffers.lend(run.count * slot_bytes) as buffer:
            for position, block in enumerate(blocks):
                started = time.perf_counter()
                span = buffer[position * slot_bytes : (position + 1) * slot_bytes]
                written.append(self._lay_out(slab, run.index + position, block, span))
                self._count(block.encoded, slot_bytes, time.perf_counter() - started)
            if self._io.write(slab.fd, [buffer], slab.slot_offset(run.index)) != len(buffer):
                raise ShortWriteError(errno.EIO, "short write")
        slab.volume.worked()
        return written

    def _lay_out(self, slab: Slab, index: int, block: BlockToWrite, span: Bytes1D) -> WrittenBlock:
        sequence = self._next_sequence()
        where = (slab.number, index, sequence, block.generation, slab.header.ns_id)
        if not block.encoded.pipeline.encrypts:
            return WrittenBlock(sequence, lay_out(Place(*where), block.identity, block.encoded, None, span))
        assert self.cipher is not None, "a pipeline that encrypts was accepted without keys"
        assert self._known_keys is not None, "nothing is written while a directory is opened"
        key, salt, sealer = self.cipher.sealer()
        self._known_keys.note(key)
        place = Place(*where, key.key_id, salt)
        return WrittenBlock(sequence, lay_out(place, block.identity, block.encoded, sealer, span))

    def _count(self, block: EncodedBlock, slot_bytes: int, seconds: float) -> None:
        weights = sum(part.raw_bytes for part in block.parts)
        relative = sum(part.error.rms_relative * part.raw_bytes for part in block.parts) / weights
        written = CodecStats(
            written_blocks=1,
            raw_bytes=weights,
            slot_bytes=slot_bytes,
            max_absolute_error=max(part.error.max_absolute for part in block.parts),
            rms_relative_error=relative,
            encode_seconds=block.seconds + seconds,
        )
        self.counts.count_written(block.pipeline.name, written)

    def _read_together(
        self, run: SlotRun[Slab], occupants: Sequence[Occupant], wanted: Sequence[Wanted], coding: PoolCoding
    ) -> Mask:
        """One I/O for all blocks. Raises OSError if it failed as a whole."""
        slab = run.holder
        slot_bytes = slab.geometry.slot_bytes
        good = np.zeros(run.count, dtype=np.bool_)
        with self._transfer.buffers.lend(run.count * slot_bytes) as buffer:
            got_bytes = self._io.read(slab.fd, [buffer], slab.slot_offset(run.index))
            # What lies in memory behind the bytes read is left from an earlier use: it is never looked at.
            whole_count = got_bytes // slot_bytes
            for position in range(min(whole_count, run.count)):
                span = buffer[position * slot_bytes : (position + 1) * slot_bytes]
                fault = self._take(slab, run.index + position, (occupants[position], wanted[position]), coding, span)
                good[position] = fault is None
                if fault is not None:
                    self._faults.add(fault)
        if whole_count < run.count:
            self._faults.add(DiskFault.SHORT_READ, run.count - whole_count)
            slab.suspect[run.index + whole_count : run.index + run.count] = True
        return good

    def _take(
        self, slab: Slab, index: int, asked: tuple[Occupant, Wanted], coding: PoolCoding, span: Bytes1D
    ) -> DiskFault | None:
        """Put the parts of one block where they belong; why not, if they are not what was asked for."""
        started = time.perf_counter()
        occupant, wanted = asked
        header = self.unpack(span.data)
        if isinstance(header, DiskFault):
            return header
        if Occupant(header.identity, header.sequence, header.generation) != occupant:
            return DiskFault.OTHER_BLOCK
        if not slab.owns_coded(header, index):
            return DiskFault.OTHER_BLOCK
        fault = take_out(header, span, wanted, coding, self._cipher_of(header))
        if fault is None:
            pipeline = pipeline_of(header.pipeline)
            assert pipeline is not None, header.pipeline
            self.counts.count_read(pipeline.name, 1, time.perf_counter() - started)
        return fault

    def _check_together(self, run: SlotRun[Slab]) -> Mask:
        """One I/O for all blocks. Raises OSError if it failed as a whole."""
        slab = run.holder
        slot_bytes = slab.geometry.slot_bytes
        good = np.ones(run.count, dtype=np.bool_)
        expected = list(zip(slab.sequences[run.indices].tolist(), slab.generations[run.indices].tolist(), strict=True))
        with self._transfer.buffers.lend(run.count * slot_bytes) as buffer:
            with slab.open_lock:
                if slab.removed:
                    return good
                got_bytes = self._io.read(slab.fd, [buffer], slab.slot_offset(run.index))
            for position, place in enumerate(expected):
                span = buffer[position * slot_bytes : (position + 1) * slot_bytes]
                is_whole = got_bytes >= (position + 1) * slot_bytes
                good[position] = is_whole and self._is_right(slab, run.index + position, span, place)
        return good

    def _is_right(self, slab: Slab, index: int, span: Bytes1D, expected: tuple[int, int]) -> bool:
        header = self.unpack(span.data)
        if isinstance(header, DiskFault) or not slab.owns_coded(header, index):
            return False
        return (header.sequence, header.generation) == expected and payload_fault(header, span) is None
