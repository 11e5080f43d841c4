"""Pages in SGLang's host memory: where their pieces lie, and copies between them and packed rows."""

from __future__ import annotations

import ctypes
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from kvstore.connectors.common import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    Rows = NDArray[np.uint8]
    Pieces = list[tuple[int, int]]


# Token indices of host memory, page after page, as SGLang hands them over: a torch tensor.
Indices: TypeAlias = Any


class HostPool(Protocol):
    """What we use of a host pool of SGLang's."""

    page_size: int

    def get_page_buffer_meta(self, indices: Indices) -> tuple[list[int], list[int]]:
        """Addresses and sizes of the pieces of the pages at these token indices, page after page."""
        ...


class HostPages:
    """The pages of one host pool. In a row the pieces of a page follow each other as SGLang names them.

    That order differs between the memory layouts of SGLang, so each of them is a namespace of its own.
    """

    def __init__(self, pool: HostPool, first_page: Indices) -> None:
        """Raises UnsupportedModelError for a pool whose pages cannot be copied in place."""
        self.page_size = pool.page_size
        try:
            self._locate: Callable[[Indices], tuple[list[int], list[int]]] = pool.get_page_buffer_meta
            found = self._locate(first_page)
        except (AssertionError, AttributeError, NotImplementedError, ValueError) as error:
            raise UnsupportedModelError(f"pages of {type(pool).__name__} cannot be copied in place: {error}") from error
        self.piece_bytes = tuple(int(size) for size in found[1]) if found else ()
        self.page_bytes = sum(self.piece_bytes)
        if not self.page_bytes or len(found[0]) != len(self.piece_bytes):
            raise UnsupportedModelError(f"a page of {type(pool).__name__} has no bytes of its own in host memory")

    def read(self, indices: Indices, rows: Rows) -> None:
        """Copy the pages at `indices` into rows, shape [pages, page_bytes]."""
        for row, (address, size) in zip(_places(rows, self.piece_bytes), self._pieces(indices, len(rows)), strict=True):
            ctypes.memmove(row, address, size)

    def write(self, indices: Indices, rows: Rows) -> None:
        """Copy rows, shape [pages, page_bytes], into the pages at `indices`."""
        for row, (address, size) in zip(_places(rows, self.piece_bytes), self._pieces(indices, len(rows)), strict=True):
            ctypes.memmove(address, row, size)

    def _pieces(self, indices: Indices, pages: int) -> Pieces:
        """Where the pages lie; raises ValueError, with nothing copied, where they are others than were asked for."""
        addresses, sizes = self._locate(indices)
        if tuple(sizes) != self.piece_bytes * pages or len(addresses) != len(sizes):
            raise ValueError(f"SGLang names {len(addresses)} pieces for {pages} pages of {len(self.piece_bytes)} each")
        return list(zip(addresses, sizes, strict=True))


def _places(rows: Rows, piece_bytes: Sequence[int]) -> Iterator[int]:
    """The addresses of all pieces in packed rows."""
    offsets = [sum(piece_bytes[:index]) for index in range(len(piece_bytes))]
    start, step = rows.ctypes.data, rows.strides[0]
    return (start + row * step + offset for row in range(len(rows)) for offset in offsets)


class Bounce:
    """Memory for rows on their way, allocated once and lent to one thread at a time."""

    def __init__(self, buffer_bytes: int) -> None:
        self._buffer_bytes = buffer_bytes
        self._buffer: Rows = np.empty(0, dtype=np.uint8)
        self._lock = threading.Lock()

    @contextmanager
    def rows(self, page_bytes: int, pages: int) -> Iterator[Rows]:
        """As many rows as are wanted and there is room for, shape [rows, page_bytes]; at least one."""
        with self._lock:
            count = max(1, min(pages, self._buffer_bytes // page_bytes))
            if self._buffer.size < count * page_bytes:
                self._buffer = np.empty(max(count * page_bytes, self._buffer_bytes), dtype=np.uint8)
            yield self._buffer[: count * page_bytes].reshape(count, page_bytes)
