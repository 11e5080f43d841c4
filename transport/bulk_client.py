"""Loads and stores of a client through an engine: the server writes to, and reads from, memory set aside for it.

    load    the server writes rows to a piece of the landing -> copied to the caller, digests compared on the way
    store   rows copied to a piece, digests made on the way -> the server reads it, and compares

Whatever the engine cannot do goes over the sockets. Cost beside them: a copy of the bytes at memory's speed, and a
request for each 16 MiB.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import numpy as np
from google.protobuf.message import DecodeError

from kvstore.errors import BulkEngineError, ClosedError, UnavailableError
from kvstore.tiers.checksum import copy_and_digest
from kvstore.transport.bulk import ROWS_MAX
from kvstore.transport.bulk_memory import Landing
from kvstore.transport.bulk_polling import Poller
from kvstore.v1 import cache_service_pb2 as pb

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvstore.transport.bulk import BulkCalls, BulkEngine
    from kvstore.transport.wire_pool import Grip

M = TypeVar("M", pb.LoadRequest, pb.WriteStart)
N = TypeVar("N", pb.LoadRequest, pb.WriteStart, contravariant=True)
A = TypeVar("A", pb.LoadResponse, pb.WriteResponse)
# After a failure everything goes over the sockets for so long.
REST_SECONDS = 5.0
# Of the time of a call, what the engine gets: enough is left for the sockets if it cannot.
_ENGINE_SHARE = 0.5
_NOTHING = memoryview(b"")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BulkStatus:
    """How a client's bytes travel: the engine it was given, what that has moved, and how often it could not."""

    engine: str
    moved_bytes: int
    failures: int


class BulkEngineClient:
    """A client's engine with its landing; `over` makes a session's calls of it. Thread-safe.

    `_lock` guards the counters. The engine belongs to the process that made it: in the child of a fork nothing goes
    through it.
    """

    def __init__(self, engine: BulkEngine, landing: Landing | None = None) -> None:
        self.name = engine.name
        self.landing = Landing(engine) if landing is None else landing
        self.poller = Poller(engine)
        self._metadata = engine.metadata()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._moved_bytes = 0
        self._failures = 0
        self._rests_until = 0.0
        self._closed = False
        # Who forgets to close it must not leave the engine to the end of the interpreter.
        self._finalizer = weakref.finalize(self, _close, self.poller, self.landing, engine, self._pid)

    @property
    def status(self) -> BulkStatus:
        """What has gone through the engine."""
        with self._lock:
            return BulkStatus(self.name, self._moved_bytes, self._failures)

    @property
    def is_usable(self) -> bool:
        """Whether calls may go through the engine now."""
        return not self._closed and os.getpid() == self._pid and time.monotonic() >= self._rests_until

    def over(self, sockets: BulkCalls, session: pb.SessionResponse) -> BulkCalls:
        """Loads and stores of a session: through the engine if its server offers the same one."""
        return EngineCalls(self, sockets) if self.name in session.bulk_engines else sockets

    def memory(self, piece: NDArray[np.uint8]) -> pb.FarMemory:
        """Names a piece of the landing to the server."""
        address = int(piece.ctypes.data)
        return pb.FarMemory(engine=self.name, metadata=self._metadata, address=address, nbytes=piece.nbytes)

    def count(self, moved_bytes: int) -> None:
        """Bytes have moved."""
        with self._lock:
            self._moved_bytes += moved_bytes

    def fail(self, error: UnavailableError) -> None:
        """Something went wrong; the sockets do for a while."""
        with self._lock:
            self._failures += 1
            self._rests_until = time.monotonic() + REST_SECONDS
        logger.warning("an engine for bytes failed, using sockets: engine=%s cause=%s", self.name, error)

    def close(self) -> None:
        """End the engine; idempotent. Calls under way must have ended."""
        self._closed = True
        self._finalizer()


class _Done(NamedTuple):
    """How many rows an engine's call has dealt with, and how many of these the server took or had."""

    rows: int
    taken: int


class _Operation(Protocol[N]):
    """A load or a store, some rows at a time, through a piece of the landing."""

    def __call__(self, message: N, first: int, piece: NDArray[np.uint8], ends_at: float) -> _Done:
        """Do it for the rows of `message`, from row `first` of the whole on."""
        ...


class EngineCalls:
    """A kvstore.transport.bulk.BulkCalls: calls through the engine, in pieces, and over sockets where it cannot."""

    def __init__(self, client: BulkEngineClient, sockets: BulkCalls) -> None:
        self._client = client
        self._sockets = sockets

    def load(
        self, message: pb.LoadRequest, target: memoryview, ends_at: float, grip: Grip | None = None
    ) -> tuple[bytes, int]:
        """Do a Load; see kvstore.transport.bulk.BulkCalls. One that asks for digests goes over sockets."""
        if message.with_digests:
            return self._sockets.load(message, target, ends_at, grip)
        asked = message.blocks
        row_bytes = target.nbytes // asked

        def load_some(message: pb.LoadRequest, first: int, piece: NDArray[np.uint8], ends_at: float) -> _Done:
            into = target[first * row_bytes : (first + message.blocks) * row_bytes]
            answer, filled_bytes = self._sockets.load(message, into, ends_at)
            summary = _parsed(pb.LoadResponse, answer).summary
            if not filled_bytes:
                _take(into, piece, row_bytes, summary, message.blocks)
            return _Done(summary.blocks, summary.blocks)

        done = self._by_engine(message, row_bytes, ends_at, load_some, grip)
        loaded, is_short = done.taken, done.rows > done.taken
        if loaded < asked and not is_short:
            rest = _part_of(message, loaded, asked - loaded)
            answer, _ = self._sockets.load(rest, target[loaded * row_bytes :], ends_at, grip)
            loaded += _parsed(pb.LoadResponse, answer).summary.blocks
        summary = pb.LoadSummary(blocks=loaded, requested_blocks=asked)
        return pb.LoadResponse(summary=summary).SerializeToString(), loaded * row_bytes

    def write(self, message: pb.WriteStart, source: memoryview, ends_at: float, grip: Grip | None = None) -> bytes:
        """Do a Write; see kvstore.transport.bulk.BulkCalls."""
        asked = message.blocks
        row_bytes = source.nbytes // asked

        def write_some(message: pb.WriteStart, first: int, piece: NDArray[np.uint8], ends_at: float) -> _Done:
            rows = source[first * row_bytes : (first + message.blocks) * row_bytes]
            message.digests.extend(_put(rows, piece, row_bytes))
            answer = _parsed(pb.WriteResponse, self._sockets.write(message, _NOTHING, ends_at))
            return _Done(message.blocks, answer.rows)

        done = self._by_engine(message, row_bytes, ends_at, write_some, grip)
        taken = done.taken
        if done.rows < asked:
            rest = _part_of(message, done.rows, asked - done.rows)
            try:
                answer = self._sockets.write(rest, source[done.rows * row_bytes :], ends_at, grip)
            except ClosedError as err:
                raise UnavailableError("an engine for bytes broke off a store, and its stage has ended") from err
            taken += _parsed(pb.WriteResponse, answer).rows
        return pb.WriteResponse(rows=taken).SerializeToString()

    def end(self) -> None:
        """End all calls under way."""
        self._sockets.end()

    def forget(self) -> None:
        """In the child of a fork."""
        self._sockets.forget()

    def _by_engine(
        self, message: M, row_bytes: int, ends_at: float, operation: _Operation[M], grip: Grip | None
    ) -> _Done:
        """Go on until all is done, an answer is short, or the engine cannot; a short one counts the rows it lacks.

        A cancel takes effect between two pieces: in the middle of one nobody would know when the server has ended.
        """
        client = self._client
        rows_max = min(ROWS_MAX, client.landing.piece_bytes // row_bytes)
        rows = taken = 0
        engine_ends_at = ends_at - (ends_at - time.monotonic()) * (1 - _ENGINE_SHARE)
        while rows_max and rows < message.blocks and client.is_usable and not (grip is not None and grip.cancelled):
            part = _part_of(message, rows, min(rows_max, message.blocks - rows))
            try:
                done = self._one_piece(part, rows, engine_ends_at, operation)
            except UnavailableError as error:
                client.fail(error)
                if time.monotonic() >= ends_at:
                    raise
                break
            if done is None:
                break
            client.count(done.taken * row_bytes)
            taken += done.taken
            rows += part.blocks
            if done.rows < part.blocks:
                break
        return _Done(rows, taken)

    def _one_piece(self, part: M, first: int, ends_at: float, operation: _Operation[M]) -> _Done | None:
        """One call; None if no piece of the landing is free."""
        with self._client.poller.at_work(), self._client.landing.piece() as piece:
            if piece is None:
                return None
            part.memory.CopyFrom(self._client.memory(piece))
            return operation(part, first, piece, ends_at)


def _take(into: memoryview, piece: NDArray[np.uint8], row_bytes: int, summary: pb.LoadSummary, asked: int) -> None:
    """Copy rows that a server wrote. Raises BulkEngineError where they are not what it says."""
    if summary.blocks > asked or len(summary.digests) != summary.blocks:
        raise BulkEngineError(f"a server wrote {summary.blocks} rows and tells of {len(summary.digests)}")
    target = np.frombuffer(into, dtype=np.uint8)
    for row, digest in enumerate(summary.digests):
        place = slice(row * row_bytes, (row + 1) * row_bytes)
        if copy_and_digest(target[place], piece[place]) != digest:
            raise BulkEngineError(f"row {row} of {summary.blocks} is not what its digest says")


def _put(rows: memoryview, piece: NDArray[np.uint8], row_bytes: int) -> list[int]:
    """Copy rows for a server to read; returns their digests."""
    source = np.frombuffer(rows, dtype=np.uint8)
    places = (slice(begin, begin + row_bytes) for begin in range(0, source.nbytes, row_bytes))
    return [copy_and_digest(piece[place], source[place]) for place in places]


def _part_of(message: M, first: int, blocks: int) -> M:
    """The same request for some of its blocks."""
    part = type(message)()
    part.CopyFrom(message)
    part.from_block, part.blocks = message.from_block + first, blocks
    return part


def _parsed(kind: type[A], answer: bytes) -> A:
    try:
        return kind.FromString(answer)
    except DecodeError as err:
        raise UnavailableError(f"a server sent no {kind.__name__}: {err}") from err


def _close(poller: Poller, landing: Landing, engine: BulkEngine, pid: int) -> None:
    if os.getpid() == pid:  # a child has none of the threads and connections that would have to end
        poller.close()
        landing.close()
        engine.close()
