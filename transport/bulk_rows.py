"""The rows of one call through an engine, on the server: written to, or read from, memory that the client has named.

The server begins every transfer, so no key to its memory is ever given away, and it knows by itself when one has ended:
slots are held until then, whatever becomes of the client.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from kvstore.errors import BulkEngineError, InvalidArgumentError, PermissionDeniedError
from kvstore.transport.bulk import METADATA_BYTES_MAX, ROWS_MAX
from kvstore.transport.bulk_memory import RegisteredMemory, RowDigests
from kvstore.transport.wire_socket import chunks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvstore.transport.bulk import BulkEngine, BulkPeer, Move, Transfer
    from kvstore.transport.principal import Principal
    from kvstore.v1 import cache_service_pb2 as pb

EVERY_TENANT = "*"
_ADDRESS_MAX = 2**63


class BulkEngineHost:
    """A server's engine, and who may use it. Thread-safe; `_lock` guards the counters.

    Callers that are held to one tenant may use it if theirs is among `tenants`, or that has `*`; all others may.
    """

    def __init__(self, engine: BulkEngine, tenants: Sequence[str]) -> None:
        self._engine = engine
        self._tenants = frozenset(tenants)
        self._memory = RegisteredMemory(engine)
        self._lock = threading.Lock()
        self._moved_bytes: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()

    @property
    def engine_name(self) -> str:
        """What requests call the engine."""
        return self._engine.name

    @property
    def moved_bytes(self) -> dict[str, int]:
        """Bytes moved, by whether they were loaded or stored."""
        with self._lock:
            return dict(self._moved_bytes)

    @property
    def failures(self) -> dict[str, int]:
        """What the engine could not do: connect, load or store."""
        with self._lock:
            return dict(self._failures)

    @property
    def registered_mappings(self) -> int:
        """Mappings of this process that the engine knows."""
        return self._memory.count

    def offer(self, principal: Principal) -> tuple[str, ...]:
        """The engines that a caller may name."""
        return (self._engine.name,) if self.admits(principal) else ()

    def admits(self, principal: Principal) -> bool:
        """Whether a caller may use the engine."""
        return principal.tenant is None or EVERY_TENANT in self._tenants or principal.tenant in self._tenants

    def connect(self, metadata: bytes) -> BulkPeer:
        """The peer that says this of itself. Raises BulkEngineError, which is counted."""
        try:
            return self._engine.connect(metadata)
        except BulkEngineError:
            self.count_failure("connect")
            raise

    def moves(self, pieces: Iterable[memoryview], remote: int) -> list[Move]:
        """How to move pieces of this process's memory to or from `remote` on."""
        return self._memory.moves(pieces, remote)

    def count(self, what: str, moved_bytes: int) -> None:
        """Bytes have moved."""
        with self._lock:
            self._moved_bytes[what] += moved_bytes

    def count_failure(self, what: str) -> None:
        """The engine could not do what was asked."""
        with self._lock:
            self._failures[what] += 1

    def close(self) -> None:
        """End the engine; no call may be under way."""
        self._memory.clear()
        self._engine.close()


class EngineSeat:
    """What one bulk connection has of the engine: the peer that it named last. Used by one thread at a time."""

    def __init__(self, host: BulkEngineHost | None) -> None:
        self._host = host
        self._metadata = b""
        self._peer: BulkPeer | None = None

    @property
    def is_taken(self) -> bool:
        """Whether there is a peer, so that close() has something to do, which may take some milliseconds."""
        return self._peer is not None

    def transport(
        self, principal: Principal, memory: pb.FarMemory, row_bytes: int, rows: int, until: TransferEnd
    ) -> EngineTransport:
        """What moves the rows of one call. Nothing has moved, or been changed, if it raises."""
        host = self._host
        if host is None:
            raise InvalidArgumentError("the request names memory for an engine, and this server has none; use frames")
        if not host.admits(principal):
            raise PermissionDeniedError(f"{principal.name!r} may not use an engine for bytes; use frames")
        _check(memory, host.engine_name, row_bytes * rows, rows)
        if self._peer is None or self._metadata != memory.metadata:
            self.close()
            self._peer = host.connect(memory.metadata)
            self._metadata = memory.metadata
        return EngineTransport(self, host, self._peer, FarRows(memory.address, row_bytes), until)

    def close(self) -> None:
        """Let the peer go; idempotent."""
        peer, self._peer = self._peer, None
        if peer is not None:
            peer.disconnect()


class FarRows(NamedTuple):
    """Where the rows of a call begin in the client's memory, and how many bytes each has."""

    address: int
    row_bytes: int


class TransferEnd:
    """When a call gives up: at `ends_at`, of time.monotonic(), or when nobody waits for it any more."""

    def __init__(self, ends_at: float, is_unwanted: Callable[[], bool]) -> None:
        self.ends_at = ends_at
        self.is_unwanted = is_unwanted


class EngineTransport:
    """A kvstore.transport.bulk.BulkTransport. Rows are whole in all that it is given.

    Cost: a pass over the rows for their digests, about 10 GB/s, while the engine moves what was begun.
    """

    def __init__(
        self, seat: EngineSeat, host: BulkEngineHost, peer: BulkPeer, rows: FarRows, until: TransferEnd
    ) -> None:
        self._seat = seat
        self._host = host
        self._peer = peer
        self._address, self._row_bytes = rows
        self._until = until
        self._done_bytes = 0
        self._expected: Sequence[int] = ()
        self._digests: list[int] = []

    @property
    def digests(self) -> Sequence[int]:
        """Of each row that was sent."""
        return self._digests

    def expect(self, digests: Sequence[int]) -> None:
        """What the rows that come have."""
        self._expected = digests

    def send(self, pieces: Iterable[memoryview]) -> int:
        """Write the next rows to the client's memory."""
        hasher = RowDigests(self._row_bytes)
        sent_bytes = 0
        for views in chunks(pieces):
            transfer = self._begin("load", self._peer.write, views)
            for view in views:
                self._digests += hasher.take(view)
            sent_bytes += self._end("load", transfer, views)
        return sent_bytes

    def fill(self, pieces: Iterable[memoryview]) -> None:
        """Read the next rows from the client's memory, and compare their digests with what the client said."""
        hasher = RowDigests(self._row_bytes)
        row = self._done_bytes // self._row_bytes
        for views in chunks(pieces):
            self._end("store", self._begin("store", self._peer.read, views), views)
            for view in views:
                digests = hasher.take(view)
                if digests != list(self._expected[row : row + len(digests)]):
                    self._fail("store")
                    raise BulkEngineError(f"rows from {row} on are not what their digests say; nothing was taken")
                row += len(digests)

    def skip(self, size_bytes: int) -> None:
        """Pass over rows that nobody wants: they stay where they are."""
        self._done_bytes += size_bytes

    def finish(self) -> None:
        """Nothing is on its way."""

    def _begin(self, what: str, begin: Callable[[Sequence[Move]], Transfer], views: list[memoryview]) -> Transfer:
        try:
            return begin(self._host.moves(views, self._address + self._done_bytes))
        except BulkEngineError:
            self._fail(what)
            raise

    def _end(self, what: str, transfer: Transfer, views: list[memoryview]) -> int:
        try:
            transfer.wait(self._until.ends_at, self._until.is_unwanted)
        except BulkEngineError:
            self._fail(what)
            raise
        moved_bytes = sum(view.nbytes for view in views)
        self._done_bytes += moved_bytes
        self._host.count(what, moved_bytes)
        return moved_bytes

    def _fail(self, what: str) -> None:
        """Count it, and let the peer go: the next call connects again."""
        self._host.count_failure(what)
        self._seat.close()


def _check(memory: pb.FarMemory, engine: str, needed_bytes: int, rows: int) -> None:
    if memory.engine != engine:
        raise InvalidArgumentError(f"memory is of engine {memory.engine[:64]!r}, expected {engine!r}")
    if not 0 < len(memory.metadata) <= METADATA_BYTES_MAX:
        raise InvalidArgumentError(f"metadata has {len(memory.metadata)} bytes, expected 1..{METADATA_BYTES_MAX}")
    if rows > ROWS_MAX:
        raise InvalidArgumentError(f"{rows} rows are asked of an engine at once, expected at most {ROWS_MAX}")
    if memory.nbytes < needed_bytes:
        raise InvalidArgumentError(f"memory has {memory.nbytes} bytes, the rows need {needed_bytes}")
    if memory.address + memory.nbytes > _ADDRESS_MAX:
        raise InvalidArgumentError(f"memory ends beyond address {_ADDRESS_MAX}")
