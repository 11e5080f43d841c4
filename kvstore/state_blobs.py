"""Sequence states as the blobs that callers see, over leases and stages whose blocks are their pieces.

A blob is cut into pieces of one size. What fills whole pieces is moved from and to the caller's buffer in place; the
last piece, which the blob seldom fills, goes through a buffer of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from kvstore.buffers import readable_rows, writable_rows
from kvstore.errors import InvalidArgumentError, InvalidBufferError

if TYPE_CHECKING:
    from types import TracebackType

    from numpy.typing import NDArray

    from kvstore.api import BlockBuffer, Lease, Stage
    from kvstore.types import CommitResult, StateSize

STATE_BYTES_MAX = 2**40


class BlobPieces(NamedTuple):
    """Bytes of a caller that are pieces of a blob: `whole` in place, flat, from `first` on, `tail` the last one."""

    first: int
    whole: NDArray[np.uint8]
    tail: NDArray[np.uint8]
    piece_bytes: int

    @property
    def tail_first(self) -> int:
        """The number of the last piece."""
        return self.first + self.whole.size // self.piece_bytes

    def loaded_bytes(self, whole_pieces: int, tail_pieces: int) -> int:
        """Leading bytes that are right, by the pieces that are."""
        if whole_pieces * self.piece_bytes < self.whole.size:
            return whole_pieces * self.piece_bytes
        return self.whole.size + (self.tail.size if tail_pieces else 0)


def readable_pieces(buffer: BlockBuffer, from_piece: int, blob_bytes: int, piece_bytes: int) -> BlobPieces:
    """The bytes of `buffer`, to be written to a blob from a piece on."""
    return _pieces(readable_rows(buffer, 1).reshape(-1), from_piece, blob_bytes, piece_bytes)


def writable_pieces(buffer: BlockBuffer, from_piece: int, blob_bytes: int, piece_bytes: int) -> BlobPieces:
    """The bytes of `buffer`, to be filled from a blob from a piece on."""
    return _pieces(writable_rows(buffer, 1).reshape(-1), from_piece, blob_bytes, piece_bytes)


def require_state_bytes(state_bytes: object) -> int:
    """The size of a blob; raises InvalidArgumentError unless it is one."""
    if isinstance(state_bytes, int) and not isinstance(state_bytes, bool) and 1 <= state_bytes <= STATE_BYTES_MAX:
        return state_bytes
    raise InvalidArgumentError(f"state_bytes is {state_bytes!r}, expected a whole number from 1 to 2^40")


def require_path(tokens: int) -> None:
    """Raise InvalidArgumentError for a state of no tokens, which could serve nobody."""
    if not tokens:
        raise InvalidArgumentError("the prompt of a state has no tokens, expected at least one")


def padded(tail: NDArray[np.uint8], piece_bytes: int) -> NDArray[np.uint8]:
    """The last piece in full."""
    piece = np.zeros(piece_bytes, dtype=np.uint8)
    piece[: tail.size] = tail
    return piece


def _pieces(flat: NDArray[np.uint8], from_piece: int, blob_bytes: int, piece_bytes: int) -> BlobPieces:
    """Bytes behind the blob's end are left alone; a buffer that ends before it ends with a piece."""
    count = -(-blob_bytes // piece_bytes)
    if not 0 <= from_piece <= count:
        raise InvalidArgumentError(f"from_piece is {from_piece}, expected 0..{count} (pieces of {piece_bytes} bytes)")
    rest_bytes = max(0, blob_bytes - from_piece * piece_bytes)
    if flat.size < rest_bytes and flat.size % piece_bytes:
        raise InvalidBufferError(
            f"the buffer has {flat.size} bytes, expected all {rest_bytes} from piece {from_piece} on or a multiple of "
            f"{piece_bytes} (one piece)"
        )
    used = flat[: min(flat.size, rest_bytes)]
    whole_bytes = used.size // piece_bytes * piece_bytes
    return BlobPieces(from_piece, used[:whole_bytes], used[whole_bytes:], piece_bytes)


class BlobLease:
    """A kvstore.api.StateLease over a lease of pieces, which it owns."""

    def __init__(self, rows: Lease, size: StateSize, piece_bytes: int) -> None:
        self._rows = rows
        self._size = size
        self._piece_bytes = piece_bytes

    @property
    def rows(self) -> Lease:
        """The lease of its pieces."""
        return self._rows

    @property
    def tokens(self) -> int:
        """Leading tokens of the prompt that the state serves; 0 where there is none."""
        return self._size.tokens

    @property
    def state_tokens(self) -> int:
        """Tokens that the state was stored for."""
        return self._size.state_tokens

    @property
    def state_bytes(self) -> int:
        """Bytes of the state."""
        return self._size.state_bytes

    def load_into(self, buffer: BlockBuffer, *, from_piece: int = 0) -> int:
        """Copy the state, or pieces of it, into `buffer`; see kvstore.api.StateLease."""
        pieces = writable_pieces(buffer, from_piece, self.state_bytes, self._piece_bytes)
        whole = self._rows.load_into(pieces.whole, from_block=pieces.first).blocks
        done_bytes = pieces.loaded_bytes(whole, 0)
        if not pieces.tail.size or done_bytes < pieces.whole.size:
            return done_bytes
        piece = np.empty(self._piece_bytes, dtype=np.uint8)
        last = self._rows.load_into(piece, from_block=pieces.tail_first).blocks
        pieces.tail[:] = piece[: pieces.tail.size]
        return pieces.loaded_bytes(whole, last)

    def release(self) -> None:
        """End the lease; idempotent."""
        self._rows.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class BlobStage:
    """A kvstore.api.StateStage over a stage of pieces, which it owns."""

    def __init__(self, rows: Stage, state_bytes: int, piece_bytes: int) -> None:
        self._rows = rows
        self._state_bytes = state_bytes
        self._piece_bytes = piece_bytes

    @property
    def rows(self) -> Stage:
        """The stage of its pieces."""
        return self._rows

    @property
    def wanted(self) -> bool:
        """Whether the state is to be written."""
        return self._rows.blocks > 0

    def write_from(self, buffer: BlockBuffer, *, from_piece: int = 0) -> int:
        """Copy the state, or pieces of it, into the stage; see kvstore.api.StateStage."""
        pieces = readable_pieces(buffer, from_piece, self._state_bytes, self._piece_bytes)
        taken = self._rows.write_from(pieces.whole, from_block=pieces.first)
        if pieces.tail.size:
            taken += self._rows.write_from(padded(pieces.tail, self._piece_bytes), from_block=pieces.tail_first)
        return (pieces.whole.size + pieces.tail.size) if taken else 0

    def commit(self) -> CommitResult:
        """Make the state visible if all of it was written; see kvstore.api.StateStage."""
        return self._rows.commit()

    def abort(self) -> None:
        """Drop what was written; idempotent."""
        self._rows.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._rows.__exit__(kind, error, trace)
