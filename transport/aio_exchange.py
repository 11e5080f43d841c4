"""Requests and answers on one control connection, in an event loop: any number under way, answered in any order."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, cast

from kvstore.errors import UnavailableError
from kvstore.transport import wire

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.transport.wire_exchange import Answer

_BUFFER_BYTES = 64 * 1024
_BODY_BYTES_MAX = 128 * 2**20
_CALL_ID_MAX = 2**32 - 1


class AsyncExchange(asyncio.BufferedProtocol):
    """The client's end of a control connection, used from its event loop only.

    A call that nobody awaits any more leaves nothing behind: its answer is dropped when it comes.
    """

    def __init__(self, peer: str) -> None:
        self.ended = False
        self._peer = peer
        self._transport: asyncio.Transport | None = None
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._last_id = 0
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._received = bytearray()
        self._writable = asyncio.Event()
        self._writable.set()

    async def ask(self, frame: Callable[[int], bytes], ends_at: float) -> Answer:
        """Send the frame that `frame` makes for a call id, and return what is answered.

        Frames are made in the order they are sent. Raises UnavailableError if nothing is answered in time, and if the
        connection ends.
        """
        try:
            async with asyncio.timeout(max(0.0, ends_at - time.monotonic())):
                await self._writable.wait()
                call_id = self._new_id()
                answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
                self._waiting[call_id] = answer
                try:
                    self.tell(frame, call_id)
                    return await answer
                finally:
                    del self._waiting[call_id]
        except TimeoutError as err:
            raise UnavailableError(f"no answer from {self._peer} within the deadline") from err

    def tell(self, frame: Callable[[int], bytes], call_id: int = 0) -> None:
        """Send a frame without waiting for anything. Raises UnavailableError if the connection has ended."""
        if self.ended or self._transport is None:
            raise UnavailableError(f"the session with {self._peer} has ended, and what it held with it")
        self._transport.write(frame(call_id or self._new_id()))

    def end(self) -> None:
        """End the connection; idempotent. Calls under way raise UnavailableError."""
        self._fail(UnavailableError(f"the session with {self._peer} has ended, and what it held with it"))
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self._transport = cast("asyncio.Transport", transport)  # that of uvloop is no subclass

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop."""
        self._fail(UnavailableError(f"{self._peer} has ended the session ({exc or 'connection closed'})"))

    def pause_writing(self) -> None:
        """Called by the loop when the server takes bytes too slowly: new calls wait."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Called by the loop."""
        self._writable.set()

    def get_buffer(self, _sizehint: int) -> memoryview:
        """Called by the loop."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Called by the loop: hand out what is whole."""
        self._received += self._buffer[:nbytes]
        begin = 0
        try:
            while len(self._received) - begin >= wire.HEADER_BYTES:
                header = wire.decode_header(self._received, begin, _BODY_BYTES_MAX)
                body_begin = begin + wire.HEADER_BYTES
                if len(self._received) < body_begin + header.body_bytes:
                    break
                begin = body_begin + header.body_bytes
                self._hand_out(header, bytes(memoryview(self._received)[body_begin:begin]))
        except wire.WireFormatError as err:
            self._fail(UnavailableError(f"{self._peer} sent what is no answer: {err}"))
            self.end()
        else:
            del self._received[:begin]

    def _hand_out(self, header: wire.Header, body: bytes) -> None:
        if header.call_id == 0 and header.kind is wire.Kind.ERROR:
            error = wire.decode_error(header.code, body, self._peer)
            self._fail(UnavailableError(f"{self._peer} has ended the session ({error})"))
            self.end()
            return
        answer = self._waiting.get(header.call_id)
        if answer is not None and not answer.done():
            answer.set_result((header.kind, header.code, body))

    def _fail(self, error: UnavailableError) -> None:
        self.ended = True
        self._writable.set()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(error)

    def _new_id(self) -> int:
        self._last_id = self._last_id % _CALL_ID_MAX + 1
        while self._last_id in self._waiting:
            self._last_id = self._last_id % _CALL_ID_MAX + 1
        return self._last_id
