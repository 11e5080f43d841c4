"""What a client maps of a server on the same host: extents, the board, and how they come over a socket."""

from __future__ import annotations

import array
import fcntl
import mmap
import os
import socket
import time
import weakref
from typing import TYPE_CHECKING

import numpy as np

from kvstore.tiers._core import _copy
from kvstore.transport import wire
from kvstore.transport.arena_frames import DESCRIPTORS_MAX, WORD_BYTES
from kvstore.transport.wire import WireFormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kvstore.transport.arena_frames import LentExtent, Slots, Words

    Bytes1D = NDArray[np.uint8]

_BODY_BYTES_MAX = 64 << 20
_HUGE_PAGE_BYTES = 2 << 20


class Mapping:
    """An extent, mapped for reading. It is unmapped when the last array that shows it goes, which `unmapped` is told.

    The child of a fork does not have it.
    """

    def __init__(self, lent: LentExtent, fd: int, unmapped: Callable[[int], None]) -> None:
        """Leaves the descriptor to the caller. Raises OSError, and WireFormatError for memory that could shrink."""
        self.lent = lent
        self._memory = map_read_only(fd, lent.nbytes)
        self.address = int(self._memory.ctypes.data)
        mapping_id = lent.mapping_id
        self.watch = weakref.ref(self._memory, lambda _: unmapped(mapping_id))

    def piece(self, part: int, index: int, count: int) -> Bytes1D:
        """One part of neighbouring slots, in place."""
        size = self.lent.part_sizes[part]
        first = self.lent.part_offsets[part] + index * size
        return self._memory[first : first + count * size]


class Reader:
    """Reads slots where they lie, in whichever of some mappings that is. Keeps them mapped. Thread-safe."""

    def __init__(self, mappings: Sequence[Mapping], slots: Slots) -> None:
        """Raises WireFormatError for slots that lie in none of them, and for mappings of different blocks."""
        self._mappings = sorted(mappings, key=lambda mapping: mapping.lent.first_slot)
        self._slots = slots
        self.part_sizes = self._mappings[0].lent.part_sizes if mappings else ()
        if any(mapping.lent.part_sizes != self.part_sizes for mapping in mappings):
            raise WireFormatError("the blocks of a lease lie in extents with different parts")
        lents = [mapping.lent for mapping in self._mappings]
        self._firsts = np.array([lent.first_slot for lent in lents], dtype=np.int64)
        counts = np.array([lent.slot_count for lent in lents], dtype=np.int64)
        self._places = np.searchsorted(self._firsts, slots.astype(np.int64), side="right") - 1
        if slots.size and not (
            (self._places >= 0).all() and (slots - self._firsts[self._places] < counts[self._places]).all()
        ):
            raise WireFormatError("blocks of a lease lie outside of the extents that were sent")
        starts = [[mapping.address + offset for offset in mapping.lent.part_offsets] for mapping in self._mappings]
        self._native = _copy.SlotTable(
            self._firsts,
            counts,
            np.array(starts, dtype=np.uint64).reshape(len(starts), len(self.part_sizes)),
            np.array(self.part_sizes, dtype=np.uint64),
        )

    @property
    def blocks(self) -> int:
        """How many leading blocks can be read."""
        return int(self._slots.size)

    def parts(self, part: int | None) -> range | None:
        """The parts that a row holds; None where they do not lie here."""
        parts = range(len(self.part_sizes)) if part is None else range(part, part + 1)
        return parts if parts.stop <= len(self.part_sizes) else None

    def row_bytes(self, parts: range) -> int:
        """Bytes of a row of them."""
        return sum(self.part_sizes[part] for part in parts)

    def copy(self, first: int, count: int, parts: range, target: Bytes1D) -> None:
        """Copy blocks [first, first + count) to the front of the flat `target`, one row after the other."""
        row_bytes = self.row_bytes(parts)
        assert target.size >= count * row_bytes, (target.size, count, row_bytes)
        slots = np.ascontiguousarray(self._slots[first : first + count])
        self._native.read(slots, target.ctypes.data, row_bytes, parts.start, parts.stop)

    def pieces(self, first: int, count: int, parts: range) -> list[Bytes1D]:
        """The same bytes in place, in that order, each piece as long as it is in memory."""
        slots = self._slots[first : first + count].astype(np.int64)
        places = self._places[first : first + count]
        breaks = np.flatnonzero((np.diff(slots) != 1) | (np.diff(places) != 0)) + 1
        pieces = []
        for run, place in zip(np.split(slots, breaks), np.split(places, breaks), strict=True):
            if not run.size:
                continue
            mapping, index = self._mappings[int(place[0])], int(run[0] - self._firsts[place[0]])
            if len(parts) == 1:
                pieces.append(mapping.piece(parts.start, index, run.size))
            else:
                pieces.extend(mapping.piece(part, index + row, 1) for row in range(run.size) for part in parts)
        return pieces


def map_read_only(fd: int, nbytes: int) -> Bytes1D:
    """Memory that others cannot pull away from under its readers. Raises OSError, WireFormatError."""
    seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    if not seals & fcntl.F_SEAL_SHRINK or os.fstat(fd).st_size < nbytes:
        raise WireFormatError(f"{nbytes} bytes to map have seals {seals:#x} and {os.fstat(fd).st_size} bytes in all")
    return _copy.map_read_only(fd, nbytes, _HUGE_PAGE_BYTES if nbytes >= _HUGE_PAGE_BYTES else mmap.PAGESIZE)


def map_board(fd: int, word_count: int) -> Words:
    """The board of a server."""
    return map_read_only(fd, word_count * WORD_BYTES).view(np.uint64)


def receive_frame(connected: socket.socket, ends_at: float) -> tuple[wire.Header, bytes, list[int]]:
    """The next frame and the descriptors that came with it, which are the caller's.

    All of it is there by `ends_at`, however little comes at a time. Raises OSError (TimeoutError if it is late),
    ConnectionError at the end, WireFormatError.
    """
    descriptors: list[int] = []
    try:
        header = wire.decode_header(_receive(connected, wire.HEADER_BYTES, descriptors, ends_at), 0, _BODY_BYTES_MAX)
        return header, _receive(connected, header.body_bytes, descriptors, ends_at), descriptors
    except BaseException:
        close_all(descriptors)
        raise


def close_all(descriptors: Sequence[int]) -> None:
    """Close descriptors."""
    for fd in descriptors:
        os.close(fd)


def _receive(connected: socket.socket, nbytes: int, descriptors: list[int], ends_at: float) -> bytes:
    raw = bytearray(nbytes)
    unfilled = memoryview(raw)
    room = socket.CMSG_SPACE(4 * DESCRIPTORS_MAX)
    while unfilled:
        left_seconds = ends_at - time.monotonic()
        if left_seconds <= 0:
            raise TimeoutError("a frame of the arena did not come in time")
        connected.settimeout(left_seconds)
        count, ancillary, flags, _ = connected.recvmsg_into([unfilled], room, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors.extend(array.array("i", data[: len(data) // 4 * 4]))
        if flags & socket.MSG_CTRUNC:
            raise OSError("more descriptors came than this process may have open")
        if not count:
            raise ConnectionError("the server has ended the connection")
        unfilled = unfilled[count:]
    return bytes(raw)
