"""The typed face of the native code for lookups: a request of Match as a whole frame of the fast lane, in one call.

What an engine waits for is made and taken apart thousands of times a second; as header, delta and message each way it
takes a dozen objects and 20 us where they are not in the processor's caches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.transport._core import _frames

if TYPE_CHECKING:
    from kvstore.transport.wire import Delta

Lookup = _frames.Lookup
read_lookup = _frames.read_lookup
read_response = _frames.read_response
send_now = _frames.send_now


class LookupWriter:
    """Writes the requests of one lookup. `prompt_head` are the bytes of a Prompt without tokens."""

    __slots__ = ("_peek", "_prompt_head", "_request_id", "_session_id")

    def __init__(self, session_id: bytes, prompt_head: bytes, *, peek: bool, request_id: str) -> None:
        self._session_id = session_id
        self._prompt_head = prompt_head
        self._peek = peek
        self._request_id = request_id.encode()

    def whole(self, call_id: int, deadline_ms: int, tokens: bytes) -> bytes:
        """The frame with all tokens. Raises ValueError for 2 GiB of them."""
        return _frames.write_lookup(
            call_id, deadline_ms, self._session_id, self._prompt_head, tokens, self._peek, self._request_id
        )

    def grown(self, call_id: int, deadline_ms: int, delta: Delta, tail: bytes) -> bytes:
        """The frame with those tokens that `delta` does not stand for."""
        return _frames.write_grown_lookup(
            call_id, deadline_ms, self._session_id, self._prompt_head, tail, self._peek, self._request_id, *delta
        )
