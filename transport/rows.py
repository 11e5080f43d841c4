"""Raw frames, cut anywhere, made into whole rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore.errors import InvalidBufferError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray


class RowAssembler:
    """Hands out the rows of a stream of frames: those that a frame holds whole, in place.

    A row that is cut is put together in `buffer`, which has the size of one.
    """

    def __init__(self, buffer: NDArray[np.uint8], rows: int) -> None:
        self._buffer = buffer
        self._rows_left = rows
        self._filled_bytes = 0

    def feed(self, frame: bytes | memoryview) -> Iterator[NDArray[np.uint8]]:
        """Take a frame; yields rows (count, row_bytes), valid until the next step.

        Raises InvalidBufferError for bytes behind the last row.
        """
        rest = np.frombuffer(frame, dtype=np.uint8)
        extra_bytes = self._filled_bytes + rest.size - self._rows_left * self._buffer.size
        if extra_bytes > 0:
            raise InvalidBufferError(f"the frames hold at least {extra_bytes} bytes more than the rows announced")
        if self._filled_bytes:
            rest = self._fill(rest)
            if self._filled_bytes == self._buffer.size:
                self._filled_bytes = 0
                yield self._taken(self._buffer)
        whole_bytes = rest.size // self._buffer.size * self._buffer.size
        if whole_bytes:
            yield self._taken(rest[:whole_bytes])
        self._fill(rest[whole_bytes:])

    def finish(self) -> None:
        """Raises InvalidBufferError if bytes are missing."""
        missing_bytes = self._rows_left * self._buffer.size - self._filled_bytes
        if missing_bytes:
            raise InvalidBufferError(f"the frames ended {missing_bytes} bytes before the end of the rows announced")

    def _fill(self, source: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Copy what the row in the buffer still lacks; returns the rest of `source`."""
        taken = source[: self._buffer.size - self._filled_bytes]
        self._buffer[self._filled_bytes : self._filled_bytes + taken.size] = taken
        self._filled_bytes += taken.size
        return source[taken.size :]

    def _taken(self, flat: NDArray[np.uint8]) -> NDArray[np.uint8]:
        rows = flat.reshape(-1, self._buffer.size)
        self._rows_left -= len(rows)
        return rows


def whole_rows_bytes(limit_bytes: int, row_bytes: int) -> int:
    """The size of frames of whole rows within the limit; the limit itself if a row is larger."""
    return limit_bytes // row_bytes * row_bytes or limit_bytes
