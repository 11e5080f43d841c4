"""Leases and stages of sequence states, for the tasks of an event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import numpy as np

from kvstore.state_blobs import padded, readable_pieces, writable_pieces

if TYPE_CHECKING:
    from types import TracebackType

    from kvstore.api import BlockBuffer
    from kvstore.transport.aio_handles import AsyncLease, AsyncStage
    from kvstore.types import CommitResult


class AsyncStateLease:
    """A kvstore.api.StateLease with awaitable methods, over a lease of pieces."""

    def __init__(self, rows: AsyncLease, piece_bytes: int) -> None:
        self._rows = rows
        self._piece_bytes = piece_bytes

    @property
    def tokens(self) -> int:
        """Leading tokens of the prompt that the state serves; 0 where there is none."""
        return self._rows.size.tokens

    @property
    def state_tokens(self) -> int:
        """Tokens that the state was stored for."""
        return self._rows.size.state_tokens

    @property
    def state_bytes(self) -> int:
        """Bytes of the state."""
        return self._rows.size.state_bytes

    async def load_into(self, buffer: BlockBuffer, *, from_piece: int = 0) -> int:
        """Receive the state, or pieces of it, into `buffer`, which is free again when this returns, however it does."""
        pieces = writable_pieces(buffer, from_piece, self.state_bytes, self._piece_bytes)
        whole = (await self._rows.load_into(pieces.whole, from_block=pieces.first)).blocks
        done_bytes = pieces.loaded_bytes(whole, 0)
        if not pieces.tail.size or done_bytes < pieces.whole.size:
            return done_bytes
        piece = np.empty(self._piece_bytes, dtype=np.uint8)
        last = (await self._rows.load_into(piece, from_block=pieces.tail_first)).blocks
        pieces.tail[:] = piece[: pieces.tail.size]
        return pieces.loaded_bytes(whole, last)

    async def release(self) -> None:
        """End the lease; idempotent, and raises nothing if the server cannot be reached."""
        await self._rows.release()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.release()


class AsyncStateStage:
    """A kvstore.api.StateStage with awaitable methods, over a stage of pieces."""

    def __init__(self, rows: AsyncStage, state_bytes: int, piece_bytes: int) -> None:
        self._rows = rows
        self._state_bytes = state_bytes
        self._piece_bytes = piece_bytes

    @property
    def wanted(self) -> bool:
        """Whether the state is to be written; not awaited, since the server said so when the stage was opened."""
        return self._rows.blocks > 0

    async def write_from(self, buffer: BlockBuffer, *, from_piece: int = 0) -> int:
        """Send the state, or pieces of it. A write that breaks, or is cancelled, aborts the stage."""
        pieces = readable_pieces(buffer, from_piece, self._state_bytes, self._piece_bytes)
        taken = await self._rows.write_from(pieces.whole, from_block=pieces.first)
        if pieces.tail.size:
            tail = padded(pieces.tail, self._piece_bytes)
            taken += await self._rows.write_from(tail, from_block=pieces.tail_first)
        return (pieces.whole.size + pieces.tail.size) if taken else 0

    async def commit(self) -> CommitResult:
        """Make the state visible if all of it was written."""
        return await self._rows.commit()

    async def abort(self) -> None:
        """Drop everything written; idempotent, and raises nothing if the server cannot be reached."""
        await self._rows.abort()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._rows.__aexit__(kind, error, trace)
