"""Moves blocks between memory and slots of slab files, many at a time, and verifies every byte that comes back."""

from __future__ import annotations

import errno
from concurrent.futures import Future, wait
from dataclasses import dataclass
from itertools import accumulate, count, pairwise
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from kvstore.errors import ClosedError, StorageError, UnavailableError
from kvstore.thread_pool import ThreadPool
from kvstore.tiers.buffers import PAGE_BYTES, AlignedBuffers, address_of, aligned_bytes, page_aligned
from kvstore.tiers.checksum import digest
from kvstore.tiers.faults import DiskFault
from kvstore.tiers.file_io import PIECES_MAX
from kvstore.tiers.header import BlockHeader, check_headers, seal_headers, unpack_header, unsealed_headers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvstore.tiers.base import BlockIdentity, Bytes1D, Bytes2D, Mask
    from kvstore.tiers.faults import FaultCounts
    from kvstore.tiers.file_io import FileIo
    from kvstore.tiers.header import PartPlace
    from kvstore.tiers.slab import Slab
    from kvstore.tiers.slots import SlotRun

IO_BYTES_MIN = 1 << 20
IO_BYTES_MAX = 4 << 20

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)

Job = TypeVar("Job")
Outcome = TypeVar("Outcome")


class ShortWriteError(OSError):
    """The system wrote less than it was given."""


@dataclass(frozen=True, slots=True)
class Occupant:
    """The block in a slot, the write that put it there, and the clear generation it belongs to."""

    identity: BlockIdentity
    sequence: int
    generation: int


class SlotTransfer:
    """Runs the I/O of slots on a bounded number of threads, each with an aligned buffer. Thread-safe.

    What a disk does wrong raises nothing: it is counted, and the slots are reported as failed. Slots whose I/O
    failed for another reason than a lack of space become suspect.
    """

    def __init__(self, io: FileIo, faults: FaultCounts, thread_count: int) -> None:
        self.faults = faults
        self.buffers = AlignedBuffers(thread_count)
        self._io = io
        self._thread_count = thread_count
        self._zero_page = aligned_bytes(PAGE_BYTES)
        self._executor = ThreadPool(thread_count, "disk")

    @property
    def busy_buffers(self) -> int:
        """Buffers in use now; 0 when nothing moves."""
        return self.buffers.lent_count

    def map(self, call: Callable[[Job], Outcome], jobs: Iterable[Job]) -> list[Outcome]:
        """Outcomes of all jobs, in order. Raises ClosedError after close(), StorageError if no thread is to be had.

        However it ends, no job runs any more: jobs use memory that is the caller's again afterwards.
        """
        waiting = list(jobs)
        outcomes: dict[int, Outcome] = {}
        take = count().__next__

        def work() -> None:
            """One thread's share: to hand over each job by itself takes as long as to do it."""
            while (number := take()) < len(waiting):
                outcomes[number] = call(waiting[number])

        futures: list[Future[None]] = []
        try:
            for _ in range(min(self._thread_count, len(waiting))):
                futures.append(self._executor.submit(work))  # noqa: PERF401  # those submitted must be known
        except RuntimeError as error:
            raise ClosedError("the disk tier is closed") from error
        except UnavailableError as error:
            raise StorageError(str(error)) from error
        finally:
            wait(futures)
        for future in futures:
            future.result()
        return [outcomes[number] for number in range(len(waiting))]

    def close(self) -> None:
        """Wait for what runs and end the threads; idempotent."""
        self._executor.shutdown()

    def pieces(self, runs: Iterable[SlotRun[Slab]]) -> Iterator[SlotRun[Slab]]:
        """Cut runs into single I/Os: 1-4 MiB where the run is that long, so that all threads have work."""
        for run in runs:
            slot_bytes = run.holder.geometry.slot_bytes
            share = max(-(-run.count // self._thread_count), IO_BYTES_MIN // slot_bytes)
            yield from run.cut(max(1, min(share, IO_BYTES_MAX // slot_bytes)))

    def write(
        self, run: SlotRun[Slab], occupants: Sequence[Occupant], sources: Sequence[Sequence[Bytes1D]]
    ) -> list[bytes | None]:
        """Write one block into each slot of a run; sources[i] has one array for each part of block i.

        Returns the packed header of part 0 of each block, None where the block was not written.
        """

        def together(some: SlotRun[Slab], places: slice) -> list[bytes | None]:
            return self._write_together(some, occupants[places], sources[places])

        return self.write_by(run, together)

    def write_by(
        self, run: SlotRun[Slab], together: Callable[[SlotRun[Slab], slice], list[Outcome | None]]
    ) -> list[Outcome | None]:
        """Write a run by `together`, one I/O, or slot by slot where it raises OSError: None where that does, too.

        `together` is given a run and its places in the whole.
        """
        try:
            return together(run, slice(0, run.count))
        except OSError as error:
            if error.errno in _NO_SPACE or run.count == 1:
                return self._unwritten(run, error)
        # One bad sector must not cost the neighbours that share its I/O; so in read_by().
        written: list[Outcome | None] = []
        for position, single in enumerate(run.cut(1)):
            try:
                written += together(single, slice(position, position + 1))
            except OSError as error:
                written += self._unwritten(single, error)
        return written

    def read(self, run: SlotRun[Slab], occupants: Sequence[Occupant], rows: Bytes2D, parts: Sequence[int]) -> Mask:
        """Read parts of the block in each slot of a run.

        Row i is right where the answer is true, and undefined elsewhere. Unless `parts` are all of a block, the run
        has one slot only.
        """

        def together(some: SlotRun[Slab], places: slice) -> Mask:
            return self._read_together(some, occupants[places], rows[places], parts)

        return self.read_by(run, together)

    def read_by(self, run: SlotRun[Slab], together: Callable[[SlotRun[Slab], slice], Mask]) -> Mask:
        """Read a run by `together`, one I/O, or slot by slot where it raises OSError: false where that does, too."""
        try:
            return together(run, slice(0, run.count))
        except OSError:
            if run.count == 1:
                return self._unreadable(run)
        good = []
        for position, single in enumerate(run.cut(1)):
            try:
                good.append(together(single, slice(position, position + 1)))
            except OSError:
                good.append(self._unreadable(single))
        return np.concatenate(good)

    def check(self, run: SlotRun[Slab]) -> Mask:
        """Whether each slot holds, whole and right, a block of the sequence and generation it is said to hold.

        True too of a slab that was removed meanwhile, since there is nothing left to be wrong.
        """
        return self.read_by(run, lambda some, _: self._check_together(some))

    def try_slot(self, slab: Slab, index: int) -> bool:
        """Whether a slot that holds nothing takes zeros and gives them back. It is not suspect any more then."""
        slot_bytes = slab.geometry.slot_bytes
        with self.buffers.lend(slot_bytes) as buffer:
            buffer[:] = 0
            try:
                is_written = self._io.write(slab.fd, [buffer], slab.slot_offset(index)) == slot_bytes
                self._io.sync(slab.fd)
                buffer[:] = 1
                works = is_written and self._io.read(slab.fd, [buffer], slab.slot_offset(index)) == slot_bytes
            except OSError:
                return False
            works = works and not buffer.any()
        slab.suspect[index] = not works
        slab.written[index] = not works
        return works

    def erase(self, slab: Slab, indices: Sequence[int]) -> Mask:
        """Overwrite the first header page of slots, so that no rebuild finds their blocks; true where that is done.

        Part 0 is enough: a block is rebuilt only if the headers of all its parts are there and agree.
        """
        erased = np.zeros(len(indices), dtype=np.bool_)
        for position, index in enumerate(indices):
            try:
                done = not slab.written[index] or self._erase(slab, index)
            except OSError:
                done = False
            if done:
                slab.written[index] = False
                erased[position] = True
            else:
                self.faults.add(DiskFault.WRITE_ERROR)
        return erased

    def read_headers(self, slab: Slab, index: int) -> list[BlockHeader] | None:
        """The headers of all parts in a slot, None unless each is whole and says it belongs there."""
        headers = []
        for part, offset in enumerate(slab.geometry.part_offsets):
            header = self._read_header(slab, slab.slot_offset(index) + offset)
            if header is None or not slab.owns(header, index, part):
                return None
            headers.append(header)
        return headers

    def sync(self, slab: Slab) -> bool:
        """Return when the slab's data is on stable storage; false if the system says it is not."""
        with slab.open_lock:
            if slab.removed:
                return True
            try:
                self._io.sync(slab.fd)
            except OSError:
                self.faults.add(DiskFault.SYNC_ERROR)
                return False
        return True

    def _unwritten(self, run: SlotRun[Slab], error: OSError) -> list[Outcome | None]:
        full = error.errno in _NO_SPACE
        short = isinstance(error, ShortWriteError)
        fault = DiskFault.SHORT_WRITE if short else DiskFault.NO_SPACE if full else DiskFault.WRITE_ERROR
        self.faults.add(fault, run.count)
        run.holder.suspect[run.indices] |= not full
        if not full:
            run.holder.volume.failed()
        return [None] * run.count

    def _unreadable(self, run: SlotRun[Slab]) -> Mask:
        self.faults.add(DiskFault.READ_ERROR)
        run.holder.suspect[run.index] = True
        run.holder.volume.failed()
        return np.zeros(1, dtype=np.bool_)

    def _erase(self, slab: Slab, index: int) -> bool:
        return self._io.write(slab.fd, [self._zero_page], slab.slot_offset(index)) == PAGE_BYTES

    def _read_header(self, slab: Slab, offset: int) -> BlockHeader | None:
        with self.buffers.lend(slab.geometry.header_bytes) as buffer:
            try:
                got_bytes = self._io.read(slab.fd, [buffer], offset)
            except OSError:
                self.faults.add(DiskFault.READ_ERROR)
                return None
            return unpack_header(buffer[:got_bytes].data)

    def _write_together(
        self, run: SlotRun[Slab], occupants: Sequence[Occupant], sources: Sequence[Sequence[Bytes1D]]
    ) -> list[bytes | None]:
        """One I/O for all blocks. Raises OSError if not all of it was written."""
        slab, geometry = run.holder, run.holder.geometry
        slab.written[run.indices] = True
        part_count = len(geometry.part_sizes)
        headers = _headers(run, occupants, range(part_count))
        with self.buffers.lend(run.count * geometry.slot_bytes) as buffer:
            places, in_place = _write_places(run, sources, address_of(buffer))
            seal_headers(places, headers, geometry.header_bytes)
            if self._io.write(slab.fd, _pieces(buffer, in_place), slab.slot_offset(run.index)) != len(buffer):
                raise ShortWriteError(errno.EIO, "short write")
        slab.volume.worked()
        return [header.tobytes() for header in headers[::part_count]]

    def _read_together(
        self, run: SlotRun[Slab], occupants: Sequence[Occupant], rows: Bytes2D, parts: Sequence[int]
    ) -> Mask:
        """One I/O for all blocks. Raises OSError if it failed as a whole."""
        slab, part_count = run.holder, len(parts)
        offset, stride = slab.geometry.span(parts)
        assert stride == slab.geometry.slot_bytes or run.count == 1, "parts of one block at a time"
        headers = _headers(run, occupants, parts)
        good = np.zeros(run.count, dtype=np.bool_)
        with self.buffers.lend(run.count * stride) as buffer:
            places, in_place = _read_places(run, rows, parts, address_of(buffer))
            got_bytes = self._io.read(slab.fd, _pieces(buffer, in_place), slab.slot_offset(run.index) + offset)
            # What lies in memory behind the bytes read is left from an earlier use: it is never looked at.
            whole_count = min(got_bytes // stride, run.count)
            looked_at = slice(0, whole_count * part_count)
            found = check_headers(places[looked_at], headers[looked_at], slab.geometry.header_bytes)
        for position in range(whole_count):
            faults = found[position * part_count : (position + 1) * part_count]
            fault = next((fault for fault in faults if fault is not None), None)
            good[position] = fault is None
            if fault is not None:
                self.faults.add(fault)
        if whole_count < run.count:
            self.faults.add(DiskFault.SHORT_READ, run.count - whole_count)
            slab.suspect[run.index + whole_count : run.index + run.count] = True
        return good

    def _check_together(self, run: SlotRun[Slab]) -> Mask:
        """One I/O for all blocks. Raises OSError if it failed as a whole."""
        slab = run.holder
        geometry = slab.geometry
        good = np.ones(run.count, dtype=np.bool_)
        expected = list(zip(slab.sequences[run.indices].tolist(), slab.generations[run.indices].tolist(), strict=True))
        with self.buffers.lend(run.count * geometry.slot_bytes) as buffer:
            with slab.open_lock:
                if slab.removed:
                    return good
                got_bytes = self._io.read(slab.fd, [buffer], slab.slot_offset(run.index))
            for position, (sequence, generation) in enumerate(expected):
                span = buffer[position * geometry.slot_bytes : (position + 1) * geometry.slot_bytes]
                is_whole = got_bytes >= (position + 1) * geometry.slot_bytes
                good[position] = is_whole and _is_right(slab, run.index + position, span, (sequence, generation))
        return good


def _headers(run: SlotRun[Slab], occupants: Sequence[Occupant], parts: Sequence[int]) -> Bytes2D:
    """What the headers of a run say, or must say, block by block; their digests are not in them yet."""
    slab = run.holder
    sizes = slab.geometry.part_sizes
    return unsealed_headers(
        BlockHeader(
            slab=slab.number,
            slot=run.index + position,
            sequence=occupant.sequence,
            generation=occupant.generation,
            ns_id=slab.header.ns_id,
            identity=occupant.identity,
            part=part,
            part_count=len(sizes),
            payload_bytes=sizes[part],
            payload_digest=0,
        )
        for position, occupant in enumerate(occupants)
        for part in parts
    )


def _write_places(
    run: SlotRun[Slab], sources: Sequence[Sequence[Bytes1D]], start: int
) -> tuple[list[PartPlace], list[tuple[int, Bytes1D]]]:
    """Where the parts of blocks go in a buffer at `start`, and those that stay where they are, by their offsets in it.

    Of what is copied the checksum is that of the copy; if something that stays is changed before it is written, its
    first read finds that out.
    """
    geometry = run.holder.geometry
    may_stay = _fits_one_call(run, len(geometry.part_sizes))
    spans = list(zip(geometry.part_offsets, geometry.body_offsets, geometry.part_sizes, strict=True))
    places: list[PartPlace] = []
    in_place: list[tuple[int, Bytes1D]] = []
    for position, block in enumerate(sources):
        begin = position * geometry.slot_bytes
        for (offset, body, size), source in zip(spans, block, strict=True):
            assert source.shape == (size,), (source.shape, size)
            assert source.flags.c_contiguous, "payloads lie in one piece"
            address = target = address_of(source)
            if may_stay and not (address | size) % PAGE_BYTES:
                in_place.append((begin + body, source))
            else:
                target = start + begin + body
            places.append((start + begin + offset, address, target, size))
    return places, in_place


def _read_places(
    run: SlotRun[Slab], rows: Bytes2D, parts: Sequence[int], start: int
) -> tuple[list[PartPlace], list[tuple[int, Bytes1D]]]:
    """Where the parts of blocks come from a buffer at `start`, and what may be read to where it belongs, likewise."""
    geometry = run.holder.geometry
    first, stride = geometry.span(parts)
    assert rows.strides[1] == 1, "rows lie in one piece each"
    may_stay = _fits_one_call(run, len(parts))
    columns = list(accumulate((geometry.part_sizes[part] for part in parts), initial=0))
    targets = [rows[:, begin:end] for begin, end in pairwise(columns)]
    spans = [
        (geometry.part_offsets[part] - first, target, address_of(target), may_stay and page_aligned(target))
        for part, target in zip(parts, targets, strict=True)
    ]
    places: list[PartPlace] = []
    in_place: list[tuple[int, Bytes1D]] = []
    for position in range(run.count):
        for offset, target, address, stays in spans:
            begin = position * stride + offset
            row = address + position * rows.strides[0]
            if stays:
                in_place.append((begin + geometry.header_bytes, target[position]))
            source = row if stays else start + begin + geometry.header_bytes
            places.append((start + begin, source, row, target.shape[1]))
    return places, in_place


def _fits_one_call(run: SlotRun[Slab], part_count: int) -> bool:
    """Whether payloads may lie apart from their headers: the system takes so many pieces of memory at a time."""
    return 2 * run.count * part_count < PIECES_MAX


def _pieces(buffer: Bytes1D, in_place: Sequence[tuple[int, Bytes1D]]) -> list[Bytes1D]:
    """The memory of one I/O in order: `buffer`, but for the ranges that lie elsewhere, by their offsets in it."""
    pieces = []
    done = 0
    for offset, elsewhere in in_place:
        if offset > done:
            pieces.append(buffer[done:offset])
        pieces.append(elsewhere)
        done = offset + len(elsewhere)
    if done < len(buffer):
        pieces.append(buffer[done:])
    return pieces


def _is_right(slab: Slab, index: int, span: Bytes1D, expected: tuple[int, int]) -> bool:
    """Whether a slot's bytes are, in every part, a block of this place, sequence and generation."""
    geometry = slab.geometry
    for part, (start, body) in enumerate(zip(geometry.part_offsets, geometry.body_offsets, strict=True)):
        header = unpack_header(span[start:body].data)
        if header is None or not slab.owns(header, index, part):
            return False
        payload = span[body : body + geometry.part_sizes[part]]
        if (header.sequence, header.generation) != expected or digest(payload.data) != header.payload_digest:
            return False
    return True
