"""Memory that engines move: what a server has registered of its arena, and what a client sets aside for rows."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from kvstore.errors import KvstoreError, UnavailableError
from kvstore.tiers.buffers import aligned_bytes
from kvstore.transport.bulk import Move

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from kvstore.transport.bulk import BulkEngine, Region
    from kvstore.v1 import cache_service_pb2 as pb

PIECE_BYTES = 16 * 2**20
PIECES = 4


def address_of(view: memoryview) -> int:
    """Where the bytes of a view begin."""
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)


def whole_memory(view: memoryview) -> NDArray[np.generic]:
    """The array that owns the memory, or stands for its whole mapping, of which `view` shows a part."""
    array: object = view.obj
    assert isinstance(array, np.ndarray), type(array)
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


class RegisteredMemory:
    """What an engine knows of the memory that rows lie in. Thread-safe; `_lock` guards both tables.

    Whole mappings are registered, when the first row of one is to be moved: an extent of the arena at a time. Nothing
    here keeps memory alive. When a mapping goes its registration is stale, and it is taken back before anything else
    is looked up: memory that lies at the same address later is never taken for it.
    """

    def __init__(self, engine: BulkEngine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._regions: dict[int, Region] = {}  # by id() of the array that stands for the mapping
        self._stale: deque[int] = deque()  # appended to by finalizers, wherever they run

    def moves(self, pieces: Iterable[memoryview], remote: int) -> list[Move]:
        """How to move pieces one behind the other, to or from `remote` on; registers what is not yet."""
        moves = []
        for piece in pieces:
            self._register(whole_memory(piece))
            moves.append(Move(address_of(piece), remote, piece.nbytes))
            remote += piece.nbytes
        return moves

    @property
    def count(self) -> int:
        """Mappings that are registered."""
        with self._lock:
            return len(self._regions) - len(self._stale)

    def clear(self) -> None:
        """Take all back; no transfer may be under way."""
        with self._lock:
            for region in self._regions.values():
                region.deregister()
            self._regions.clear()
            self._stale.clear()

    def _register(self, memory: NDArray[np.generic]) -> None:
        with self._lock:
            while self._stale:
                region = self._regions.pop(self._stale.popleft(), None)
                if region is not None:
                    region.deregister()
            key = id(memory)
            if key not in self._regions:
                self._regions[key] = self._engine.register(int(memory.ctypes.data), memory.nbytes)
                weakref.finalize(memory, self._stale.append, key).atexit = False


class RowDigests:
    """XXH3-64 of rows whose bytes come in pieces, cut anywhere. O(bytes), about 10 GB/s."""

    def __init__(self, row_bytes: int) -> None:
        self._row_bytes = row_bytes
        self._hasher = xxhash.xxh3_64()
        self._left_bytes = row_bytes

    def take(self, piece: memoryview) -> list[int]:
        """The digests of the rows that end in `piece`."""
        digests = []
        while piece.nbytes:
            taken = piece[: self._left_bytes]
            self._hasher.update(taken)
            self._left_bytes -= taken.nbytes
            piece = piece[taken.nbytes :]
            if not self._left_bytes:
                digests.append(self._hasher.intdigest())
                self._hasher.reset()
                self._left_bytes = self._row_bytes
        return digests


def right_rows(summary: pb.LoadSummary, target: NDArray[np.uint8], row_bytes: int) -> int:
    """How many leading rows of a load into the flat `target` are what their digests say; O(bytes)."""
    rows = range(min(summary.blocks, len(summary.digests)))
    for row in rows:
        received = target[row * row_bytes : (row + 1) * row_bytes]
        if xxhash.xxh3_64_intdigest(received.data) != summary.digests[row]:
            return row
    return len(rows)


class Landing:
    """Memory of a client that servers may write to and read from: a few pieces, each of one call at a time.

    Thread-safe; `_lock` guards `_free`. Rows are copied from and to it, so that no server ever reaches the caller's
    own memory, and a server that was given up writes to nothing that anybody uses: the piece of a call whose end is
    not known is never used again. The memory is touched when it is used first.
    """

    def __init__(self, engine: BulkEngine, *, piece_bytes: int = PIECE_BYTES, pieces: int = PIECES) -> None:
        self.piece_bytes = piece_bytes
        self._memory = aligned_bytes(piece_bytes * pieces)
        self._region = engine.register(int(self._memory.ctypes.data), self._memory.nbytes)
        self._lock = threading.Lock()
        self._free = list(self._memory.reshape(pieces, piece_bytes))

    @property
    def free_pieces(self) -> int:
        """Pieces that nobody uses now."""
        with self._lock:
            return len(self._free)

    @contextmanager
    def piece(self) -> Iterator[NDArray[np.uint8] | None]:
        """A piece of one's own for a time; None if there is none.

        It is never used again if the block raises what does not tell that nothing moves any more.
        """
        with self._lock:
            piece = self._free.pop() if self._free else None
        try:
            yield piece
        except BaseException as error:
            if isinstance(error, UnavailableError) or not isinstance(error, KvstoreError):
                piece = None
            raise
        finally:
            if piece is not None:
                with self._lock:
                    self._free.append(piece)

    def close(self) -> None:
        """Let the engine forget the memory; nobody may use a piece."""
        self._region.deregister()
