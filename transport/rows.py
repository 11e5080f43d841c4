"""Raw frames, cut anywhere, put together to whole rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore.errors import InvalidBufferError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray


class RowAssembler:
    """Collects the frames of `rows` rows in `buffer`, and hands rows out as often as the buffer is full."""

    def __init__(self, buffer: NDArray[np.uint8], row_bytes: int, rows: int) -> None:
        self._buffer = buffer
        self._row_bytes = row_bytes
        self._rows_left = rows
        self._filled_bytes = 0

    def feed(self, frame: bytes) -> Iterator[NDArray[np.uint8]]:
        """Take a frame; yields rows (count, row_bytes), valid until the next step.

        Raises InvalidBufferError for bytes behind the last row.
        """
        rest = np.frombuffer(frame, dtype=np.uint8)
        while rest.size:
            goal_bytes = self._goal_bytes()
            if not goal_bytes:
                raise InvalidBufferError(f"the frames hold at least {rest.size} bytes more than the rows announced")
            taken = rest[: goal_bytes - self._filled_bytes]
            self._buffer[self._filled_bytes : self._filled_bytes + taken.size] = taken
            self._filled_bytes += taken.size
            rest = rest[taken.size :]
            if self._filled_bytes == goal_bytes:
                yield self._buffer[:goal_bytes].reshape(-1, self._row_bytes)
                self._rows_left -= goal_bytes // self._row_bytes
                self._filled_bytes = 0

    def finish(self) -> None:
        """Raises InvalidBufferError if bytes are missing."""
        missing_bytes = self._rows_left * self._row_bytes - self._filled_bytes
        if missing_bytes:
            raise InvalidBufferError(f"the frames ended {missing_bytes} bytes before the end of the rows announced")

    def _goal_bytes(self) -> int:
        return min(self._buffer.size // self._row_bytes, self._rows_left) * self._row_bytes
