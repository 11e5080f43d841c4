"""Host memory for blocks on their way between an engine and a server: rows of one buffer, taken in runs."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.tiers.base import Bytes2D
    from kvstore.tiers.device import BlockCopier


class RowPool:
    """Rows of one buffer, which is made when it is first needed. Thread-safe.

    `_free` are the runs that nobody has, in ascending order, none of them next to another.
    """

    def __init__(self, copier: BlockCopier, row_bytes: int, rows: int) -> None:
        self.count = max(2, rows)
        self._copier = copier
        self._row_bytes = row_bytes
        self._lock = threading.Lock()
        self._buffer: Bytes2D | None = None
        self._free = [range(self.count)]

    def take(self, wanted: int) -> range | None:
        """A run of up to `wanted` rows: the first that is long enough, else the longest; None if there is none."""
        with self._lock:
            if not self._free or wanted < 1:
                return None
            enough = (run for run in self._free if len(run) >= wanted)
            run = next(enough, None) or max(self._free, key=len)
            place = self._free.index(run)
            taken, rest = run[:wanted], run[wanted:]
            self._free[place : place + 1] = [rest] if rest else []
            return taken

    def give_back(self, run: range) -> None:
        """A run that nothing reads or writes any more."""
        with self._lock:
            self._free.append(run)
            self._free.sort(key=lambda free: free.start)
            merged: list[range] = []
            for free in self._free:
                if merged and merged[-1].stop == free.start:
                    merged[-1] = range(merged[-1].start, free.stop)
                else:
                    merged.append(free)
            self._free = merged

    def rows(self, run: range) -> Bytes2D:
        """The memory of a run that was taken: [rows, row bytes]."""
        with self._lock:
            if self._buffer is None:
                self._buffer = self._copier.new_rows(self.count, self._row_bytes)
            return self._buffer[run.start : run.stop]
