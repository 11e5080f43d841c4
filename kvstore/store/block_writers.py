"""Which writer wrote each block of one tree, by the ids of blocks: 2 bytes a block, beside the tree."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from kvstore.writers import UNKNOWN_WRITER, WriterRun

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvstore.types import BlockIds

_WRITERS_MAX = 1 << 16
_GROWTH = 8  # the table grows by this part of itself at least
_LEAST = 1024


class BlockWriters:
    """A number for each block id, and a table that says which writer it stands for. The index lock guards it.

    An id that is used again is noted again, so nothing is done when blocks leave. Beyond 65,535 writers at a time, the
    blocks of further ones count as of an unknown writer.
    """

    def __init__(self) -> None:
        self._numbers: NDArray[np.uint16] = np.zeros(0, dtype=np.uint16)
        self._writers: NDArray[np.uint64] = np.full(1, UNKNOWN_WRITER, dtype=np.uint64)
        self._known: dict[int, int] = {UNKNOWN_WRITER: 0}  # numbers by writer

    @property
    def memory_bytes(self) -> int:
        """What it takes."""
        return self._numbers.nbytes + self._writers.nbytes

    def note(self, ids: BlockIds, writer: int) -> None:
        """These blocks are of that writer."""
        if not ids.size:
            return
        self._reach(int(ids.max()))
        self._numbers[ids] = self._number(writer)

    def note_each(self, ids: BlockIds, writers: Sequence[int]) -> None:
        """Each block is of the writer at its place."""
        done = 0
        for writer, group in groupby(writers):
            count = sum(1 for _ in group)
            self.note(ids[done : done + count], writer)
            done += count

    def of(self, ids: BlockIds) -> NDArray[np.uint64]:
        """The writer of each block."""
        return self._writers[self._numbers[ids]]

    def runs(self, ids: BlockIds) -> tuple[WriterRun, ...]:
        """The writers of consecutive blocks."""
        return tuple(WriterRun(writer, sum(1 for _ in group)) for writer, group in groupby(self.of(ids).tolist()))

    def those_of(self, writer: int, ids: BlockIds) -> BlockIds:
        """Of some blocks those of one writer."""
        number = self._known.get(writer)
        return ids[:0] if number is None else ids[self._numbers[ids] == number]

    def _reach(self, block_id: int) -> None:
        if block_id >= self._numbers.size:
            size = max(block_id + 1, self._numbers.size + self._numbers.size // _GROWTH, _LEAST)
            grown = np.zeros(size, dtype=np.uint16)
            grown[: self._numbers.size] = self._numbers
            self._numbers = grown

    def _number(self, writer: int) -> int:
        number = self._known.get(writer)
        if number is None:
            if self._writers.size == _WRITERS_MAX:
                self._forget_unused()
            if self._writers.size == _WRITERS_MAX:
                return self._known[UNKNOWN_WRITER]
            number = self._known[writer] = self._writers.size
            self._writers = np.append(self._writers, np.uint64(writer))
        return number

    def _forget_unused(self) -> None:
        """Number the writers anew that have blocks, or had the last block of an id."""
        used = np.union1d(self._numbers, np.zeros(1, dtype=np.uint16))
        self._numbers = np.searchsorted(used, self._numbers).astype(np.uint16)
        self._writers = self._writers[used]
        self._known = {writer: number for number, writer in enumerate(self._writers.tolist())}
