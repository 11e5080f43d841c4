"""The board: a word in shared memory for each lease whose blocks a client reads in place, and what the client sees."""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import TYPE_CHECKING

import numpy as np

from kvstore.tiers._core import _copy
from kvstore.transport.arena_frames import WORD_BYTES

if TYPE_CHECKING:
    from kvstore.transport.arena_frames import Words

_NAME = "kvstore-board"
_F_SEAL_FUTURE_WRITE = 0x10
_SEALS = (fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW, _F_SEAL_FUTURE_WRITE, fcntl.F_SEAL_SEAL)


class Board:
    """Words that a server writes and one client reads. Each is the id of a lease, or 0 once it has ended.

    A word is cleared before the first slot of its lease can be used again. So a client that copies and then still finds
    the id there has copied what was leased: x86 keeps the order of loads and that of stores, and on other machines each
    side takes and gives back a lock in between (the interpreter's), which does so too. Not thread-safe but for `clear`.
    """

    def __init__(self, word_count: int) -> None:
        """Raises OSError where the system has no such memory, or cannot keep others from writing to it."""
        self.word_count = word_count
        nbytes = -(-word_count * WORD_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
        self._fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(self._fd, 0o600)
            os.ftruncate(self._fd, nbytes)
            self._words: Words = _copy.map_shared(self._fd, nbytes, mmap.PAGESIZE).view(np.uint64)
            for seal in _SEALS:
                fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, seal)
        except OSError:
            os.close(self._fd)
            raise
        self._free = list(range(word_count - 1, -1, -1))

    def take_read_only(self) -> int:
        """A descriptor to send, once; the board keeps none. Raises OSError."""
        try:
            return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(self._fd)

    def take(self, lease_id: int) -> int | None:
        """Write a lease onto the board; None where every word is taken."""
        if not self._free:
            return None
        word = self._free.pop()
        self._words[word] = lease_id
        return word

    def clear(self, word: int) -> None:
        """The lease has ended. From any thread; the word stays taken."""
        self._words[word] = 0

    def give_back(self, word: int) -> None:
        """Let another lease have a word that is clear."""
        self._free.append(word)
