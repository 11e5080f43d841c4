"""What moves the rows of loads and stores, and what an engine for remote memory access (RDMA) must offer to do it.

`BulkTransport` is the seam on the server: one call's rows, whatever carries them. Frames on a socket are one
(`bulk_socket.py`), an engine is the other (`bulk_rows.py`). `BulkCalls` is the seam on the client, with the same two
(`wire_pool.py`, `bulk_client.py`). `BulkEngine` is what stands behind the second of each: regions of memory, peers
known by what they say of themselves, transfers with a deadline that can be cancelled (`nixl_engine.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from kvstore.transport.wire_pool import Grip
    from kvstore.v1 import cache_service_pb2 as pb

# What an engine says of itself to another one. They have a few hundred bytes here, a few thousand with many adapters.
METADATA_BYTES_MAX = 16 * 1024
# Rows of one call through an engine, of which each has a digest in the message.
ROWS_MAX = 4096


class BulkTransport(Protocol):
    """Moves the rows of one call, in order, between this process and the other side. Used by one thread.

    Every method returns after the bytes have moved, and raises an OSError or UnavailableError if they did not. When it
    returns or raises, nothing touches the pieces any more.
    """

    @property
    def digests(self) -> Sequence[int]:
        """XXH3-64 of each row that was sent, for the answer; none where the way itself is checked."""
        ...

    def send(self, pieces: Iterable[memoryview]) -> int:
        """Send the next rows; returns their bytes."""
        ...

    def fill(self, pieces: Iterable[memoryview]) -> None:
        """Receive the next rows into `pieces`."""
        ...

    def skip(self, size_bytes: int) -> None:
        """Pass over rows that the other side has and nobody wants."""
        ...

    def finish(self) -> None:
        """Nothing is expected any more; raises WireFormatError if there is something."""
        ...


class BulkCalls(Protocol):
    """A session's loads and stores of bytes, at its client. Thread-safe; `ends_at` is as in kvstore.transport.link."""

    def load(
        self, message: pb.LoadRequest, target: memoryview, ends_at: float, grip: Grip | None = None
    ) -> tuple[bytes, int]:
        """Do a Load: rows go into `target`. Returns the message that ended it, and how many bytes came."""
        ...

    def write(self, message: pb.WriteStart, source: memoryview, ends_at: float, grip: Grip | None = None) -> bytes:
        """Do a Write of the rows in `source`. Returns the message that ended it."""
        ...

    def end(self) -> None:
        """End all calls under way; idempotent."""
        ...

    def forget(self) -> None:
        """In the child of a fork: let go of what is the parent's."""
        ...


class Move(NamedTuple):
    """`nbytes` bytes between `local`, an address in this process, and `remote`, one in the peer's."""

    local: int
    remote: int
    nbytes: int


class Transfer(Protocol):
    """A list of moves under way. Used by one thread."""

    def wait(self, ends_at: float, is_unwanted: Callable[[], bool]) -> None:
        """Return when all bytes have moved.

        Raises BulkEngineError if they cannot move, if `ends_at` (of time.monotonic()) comes first, or when
        `is_unwanted()`, which is asked now and then, says so. The transfer is then broken off, and the peer with it:
        when the error comes, the engine has let go of the memory.
        """
        ...


class BulkPeer(Protocol):
    """An engine that was reached. Thread-safe."""

    def write(self, moves: Sequence[Move]) -> Transfer:
        """Begin to write local, registered memory to the peer's. Raises BulkEngineError."""
        ...

    def read(self, moves: Sequence[Move]) -> Transfer:
        """Begin to read the peer's memory into local, registered memory. Raises BulkEngineError."""
        ...

    def disconnect(self) -> None:
        """Let the peer go once its last transfer has ended; idempotent."""
        ...


class Region(Protocol):
    """Memory that an engine knows."""

    def deregister(self) -> None:
        """Let the engine forget it; idempotent. No transfer may be using it."""
        ...


class BulkEngine(Protocol):
    """An engine for remote memory access. Thread-safe.

    Nothing of it runs by itself: it moves bytes while somebody waits for a transfer or calls `poll`, on both sides.
    """

    @property
    def name(self) -> str:
        """What it is called in messages: the same on both sides if they can work together."""
        ...

    def register(self, address: int, nbytes: int) -> Region:
        """Make memory known. It must stay mapped until it is deregistered. Raises BulkEngineError."""
        ...

    def metadata(self) -> bytes:
        """What a peer needs to reach this engine and all memory that is registered now."""
        ...

    def connect(self, metadata: bytes) -> BulkPeer:
        """The peer that says this of itself. Raises BulkEngineError if it makes no sense or cannot be reached."""
        ...

    def poll(self) -> None:
        """Do what is to be done for transfers that the peers have begun."""
        ...

    def close(self) -> None:
        """End all connections and forget all memory; idempotent. No transfer may be under way."""
        ...
