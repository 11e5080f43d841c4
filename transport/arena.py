"""A client's arena: reading leased blocks where they lie in the memory of a server on the same host.

What cannot be read so comes over the connections for bytes, and nobody notices but `status`.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections import deque
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from kvstore.errors import KvstoreError, UnavailableError
from kvstore.transport import arena_frames as frames
from kvstore.transport import wire
from kvstore.transport.address import UnixAddress
from kvstore.transport.arena_frames import PlacedPart
from kvstore.transport.arena_memory import Mapping, Reader, close_all, map_board, receive_frame
from kvstore.transport.link import ArenaStatus
from kvstore.transport.wire_dial import NoFastLaneError, dial

if TYPE_CHECKING:
    from collections.abc import Iterator
    from weakref import ref

    import numpy as np
    from numpy.typing import NDArray

    from kvstore.transport.address import TcpAddress
    from kvstore.transport.arena_frames import Words
    from kvstore.v1 import cache_service_pb2 as pb

    Bytes1D = NDArray[np.uint8]

logger = logging.getLogger(__name__)
# What an answer about places may take of the time of a load, so that the rest is left for the load itself.
_TIME_RATIO = 0.5
_SYNC_SECONDS = 5.0
_RETRY_SECONDS = 5.0
_LEASES_MAX = 1024
_HANGUP = select.POLLRDHUP | select.POLLHUP | select.POLLERR


class _Leased:
    """Where blocks of one lease can be read, those from `first_block` on, until the board says that it has ended.

    Either all dense parts lie here, or a sparse one, which then has number `index` in the slots.
    """

    def __init__(self, board: Words, lease_id: int, reader: Reader, placed: PlacedPart) -> None:
        self._board = board
        self._word = placed.placed.word
        self._lease_id = lease_id
        self._pid = os.getpid()
        self._index = placed.index if placed.is_sparse else None
        self.reader = reader
        self.first_block = placed.first_block

    @property
    def end_block(self) -> int:
        """The block behind the last one that can be read."""
        return self.first_block + self.reader.blocks

    def parts(self, part: int | None) -> range | None:
        """The parts of the slots that rows of a load of `part` hold; None where they do not lie here."""
        return self.reader.parts(part if self._index is None else self._index)

    def shows(self, request: pb.LoadRequest) -> int:
        """How many leading blocks of a load lie here. Of a sparse part all, or none: without one they are of no use."""
        first, end = request.from_block, request.from_block + request.blocks
        if first < self.first_block or (self._index is not None and end > self.end_block):
            return 0
        return max(0, min(end, self.end_block) - first)

    @property
    def stands(self) -> bool:
        """Whether what was read until now is what was leased; see arena_board.py.

        Not so in the child of a fork, which has neither the blocks nor the board.
        """
        return self._pid == os.getpid() and int(self._board[self._word]) == self._lease_id


class Shown:
    """Bytes in place, and the lease that keeps them what they are; none where they cannot be read so."""

    def __init__(self, leased: _Leased | None, pieces: list[Bytes1D]) -> None:
        self._leased = leased
        self.pieces = pieces

    def check(self) -> None:
        """Raises UnavailableError if the lease has ended by now."""
        if self._leased is not None and not self._leased.stands:
            raise UnavailableError(
                "the lease has ended, or this process forked, while its blocks were read in place; what was read is "
                "undefined"
            )


class Arena:
    """The arena of one session. Thread-safe.

    It is opened by the first load. One thread, `kvstore-arena`, then waits for the server to want memory back, or to
    end, and lives until nothing is mapped any more. `_io` orders what is asked; `_lock` guards the other fields, and is
    held for no call elsewhere. Memory is unmapped by who uses it last, so a copy never loses what it reads.
    """

    def __init__(self, address: UnixAddress | TcpAddress, session_id: bytes) -> None:
        self._address = address
        self._session_id = session_id
        self._io = threading.Lock()
        self._lock = threading.Lock()
        self._off = _off_from_the_start(address)
        self._line: _Line | None = None
        self._leases: dict[int, dict[int | None, _Leased]] = {}  # of each the dense parts, under None, and sparse ones
        self._mappings: dict[int, Mapping] = {}
        self._loaded_bytes = 0
        self._fallbacks = 0
        self._retry_at = 0.0

    @property
    def status(self) -> ArenaStatus:
        """What is mapped, and what was loaded so."""
        with self._lock:
            sizes = [mapping.lent.nbytes for mapping in self._mappings.values()]
            return ArenaStatus(self._off, len(sizes), sum(sizes), self._loaded_bytes, self._fallbacks)

    def load(self, request: pb.LoadRequest, target: Bytes1D, ends_at: float) -> int:
        """Copy leading blocks of a load into the flat `target`: how many, 0 where none can be read in place.

        All of them are right: a lease that ends meanwhile makes it 0.
        """
        part = request.part if request.HasField("part") else None
        leased = self._leased(request.lease_id, request.from_block + request.blocks, part, ends_at)
        blocks = 0
        if leased is not None:
            blocks = _copied(leased, request, part, target)
        with self._lock:
            self._loaded_bytes += blocks * (target.size // request.blocks)
            self._fallbacks += blocks < request.blocks
        return blocks

    @contextmanager
    def read_in_place(self, request: pb.LoadRequest, ends_at: float) -> Iterator[list[Bytes1D]]:
        """The bytes of leading blocks in place, none where they cannot be; see RemoteLease.read_in_place."""
        shown = self.show(request, ends_at)
        yield shown.pieces
        shown.check()

    def show(self, request: pb.LoadRequest, ends_at: float) -> Shown:
        """Find the bytes of leading blocks; may wait for the server until `ends_at`."""
        part = request.part if request.HasField("part") else None
        leased = self._leased(request.lease_id, request.from_block + request.blocks, part, ends_at)
        parts = None if leased is None else leased.parts(part)
        if leased is None or parts is None or not leased.stands:
            return Shown(None, [])
        first = request.from_block - leased.first_block
        return Shown(leased, leased.reader.pieces(first, leased.shows(request), parts))

    def end_lease(self, lease_id: int) -> None:
        """A lease is about to end: its places are of no use any more."""
        with self._lock:
            self._leases.pop(lease_id, None)

    def end(self) -> None:
        """The session is over: unmap everything, as soon as nobody uses it. Idempotent, and waits for nobody."""
        self._turn_off("the session is over")

    def forget(self) -> None:
        """In the child of a fork: what was mapped is not mapped here, and the connection stays the parent's."""
        self._io = threading.Lock()
        self._lock = threading.Lock()
        self._off = "the session is the parent's"
        line, self._line = self._line, None
        self._leases.clear()
        self._mappings.clear()
        if line is not None:
            line.forget()

    def _turn_off(self, reason: str) -> None:
        with self._lock:
            self._off = self._off or reason
            leases, self._leases = self._leases, {}
            mappings, self._mappings = self._mappings, {}
            line = self._line
        leases.clear()
        mappings.clear()  # not under the lock: the last user of a mapping tells the line
        if line is not None:
            line.leave()

    def _leased(self, lease_id: int, end_block: int, part: int | None, ends_at: float) -> _Leased | None:
        """The places of a lease, asked for once, and again where more may have come into memory since."""
        with self._lock:
            known = self._leases.get(lease_id, {})
            leased = known.get(part) or known.get(None)
            is_off = bool(self._off)
            line = self._line
        now = time.monotonic()
        is_there = leased is not None and leased.end_block >= end_block
        # A sparse part has places of its own, which older servers do not tell.
        if is_there and leased is not None and leased.parts(part) is None:
            is_there = line is not None and not line.knows_parts
        if is_off or now < self._retry_at or is_there:
            return leased
        asked_until = now + (ends_at - now) * _TIME_RATIO
        if not self._io.acquire(timeout=max(0.0, asked_until - now)):
            return leased
        try:
            line = self._line or self._open(asked_until)
            leased = self._ask(line, lease_id, part, asked_until)
        except (NoFastLaneError, wire.WireFormatError) as error:
            self._give_up(str(error))
            return None
        except TimeoutError:
            self.late(self._line)
            return None
        except KeyboardInterrupt:
            self.late(self._line)  # an answer is under way that nobody will take
            raise
        except KvstoreError:
            if self._line is None:  # no answer yet, as yet
                self._retry_at = time.monotonic() + _RETRY_SECONDS
            return None
        except OSError as error:
            self._give_up(error.strerror or str(error) or type(error).__name__)
            return None
        finally:
            self._io.release()
        return leased

    def _give_up(self, reason: str) -> None:
        """No more reading in place in this session; bytes travel from now on."""
        if not self._off:
            logger.info("blocks are not read in place: address=%s cause=%s", self._address, reason)
        self._turn_off(reason)

    def _open(self, ends_at: float) -> _Line:
        seconds = max(0.001, ends_at - time.monotonic())
        connected, _ = dial(self._address, wire.Lane.ARENA, self._session_id, seconds)
        line = _Line(connected, self, ends_at)
        with self._lock:
            is_off = bool(self._off)
            if not is_off:
                self._line = line
        if is_off or not line.start():
            line.close_if_idle()
            raise NoFastLaneError("the session is over" if is_off else "no thread is to be had")
        return line

    def _ask(self, line: _Line, lease_id: int, part: int | None, ends_at: float) -> _Leased | None:
        try:
            answer = line.place(lease_id, part, ends_at)
        finally:  # what came before an error is mapped, too
            new = line.take_new()
            with self._lock:
                if not self._off:
                    self._mappings.update((mapping.lent.mapping_id, mapping) for mapping in new)
        placed = answer.placed
        with self._lock:
            found = [self._mappings[number] for number in placed.mapping_ids if number in self._mappings]
        if len(found) < len(placed.mapping_ids) or not placed.slots.size:
            return None
        if placed.word >= line.board.size:
            raise wire.WireFormatError(f"a lease has word {placed.word} of a board that has {line.board.size}")
        leased = _Leased(line.board, lease_id, Reader(found, placed.slots), answer)
        with self._lock:
            if not self._off and (lease_id in self._leases or len(self._leases) < _LEASES_MAX):
                self._leases.setdefault(lease_id, {})[part if answer.is_sparse else None] = leased
        return leased

    def sync(self, line: _Line) -> None:
        """Tell the server what is unmapped, and let go of what it wants back; called by the line's thread."""
        with self._io:
            recalled = line.sync(time.monotonic() + _SYNC_SECONDS)
        with self._lock:
            # A lease that stands keeps what it needs until it ends; the server asks for nothing that is leased.
            ended = [lease_id for lease_id, known in self._leases.items() if not all(o.stands for o in known.values())]
            dropped: list[object] = [self._leases.pop(lease_id) for lease_id in ended]
            dropped += [self._mappings.pop(number) for number in recalled if number in self._mappings]
        dropped.clear()

    def closed_if_idle(self, line: _Line) -> bool:
        """Close a line that is left, if nothing is mapped any more; called by the line's thread."""
        with self._io:
            return line.close_if_idle()

    def hung_up(self, reason: str) -> None:
        """The server has ended the connection; called by the line's thread."""
        self._turn_off(reason)

    def late(self, line: _Line | None) -> None:
        """No answer was taken from a line: let go of all there is, and begin anew some other time."""
        self._retry_at = time.monotonic() + _RETRY_SECONDS
        with self._lock:
            if self._line is not line:
                return
            self._line = None
            leases, self._leases = self._leases, {}
            mappings, self._mappings = self._mappings, {}
        leases.clear()
        mappings.clear()
        if line is not None:
            line.leave()


class _Bell:
    """A descriptor that wakes who waits for it; the other side has it too. It is closed when nobody has it any more.

    So who rings it late never writes to another file that has its number by then.
    """

    def __init__(self, fd: int) -> None:
        """Takes the descriptor over."""
        self._fd = fd

    def fileno(self) -> int:
        """Can be read when it was rung."""
        return self._fd

    def ring(self) -> None:
        """Wake who waits."""
        with suppress(OSError):
            os.eventfd_write(self._fd, 1)

    def hear(self) -> None:
        """Take note of all that rang."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def __del__(self) -> None:
        os.close(self._fd)


class _Line:
    """The connection of an arena, its bell, and the thread that listens to both.

    Asked by one thread at a time. The connection is closed by the thread, when nothing is mapped any more.
    """

    def __init__(self, connected: socket.socket, arena: Arena, ends_at: float) -> None:
        self._socket = connected
        self._arena = arena
        self._last_id = 0
        self._new: list[Mapping] = []
        # By mapping; a weak reference must live to be called.
        self._mapped: dict[int, ref[Bytes1D]] = {}
        self._unmapped: deque[int] = deque()  # appended to by who unmaps, in whatever thread and state that is
        self._leaving = False
        self._closing = threading.Lock()
        self._is_closed = False
        self._pid = os.getpid()
        try:
            self.board, bell = self._receive_board(ends_at)
            self._bell: _Bell | None = bell
        except BaseException:
            connected.close()
            raise

    def start(self) -> bool:
        """Begin to listen; false where no thread is to be had."""
        try:
            threading.Thread(target=self._listen, name="kvstore-arena", daemon=True).start()
        except RuntimeError:
            return False
        return True

    @property
    def knows_parts(self) -> bool:
        """Whether the server tells places of sparse parts."""
        return bool(self._knows & frames.KNOWS_PLACE_PART)

    def place(self, lease_id: int, part: int | None, ends_at: float) -> PlacedPart:
        """Where a lease lies; what is to be mapped for that is mapped, and handed out by `take_new`."""
        if part is not None and self.knows_parts:
            asked = frames.encode_place_part(self._next_id(), lease_id, part)
            return frames.decode_placed_part(self._ask(asked, ends_at))
        placed = frames.decode_placed(self._ask(frames.encode_place(self._next_id(), lease_id, part), ends_at))
        return PlacedPart(placed, is_sparse=False, first_block=0, index=0)

    def take_new(self) -> list[Mapping]:
        """What was mapped since the last time."""
        new, self._new = self._new, []
        return new

    def sync(self, ends_at: float) -> tuple[int, ...]:
        """Tell what is unmapped; returns what is wanted back."""
        return frames.decode_ids(self._ask(frames.encode_sync(self._next_id(), self._take_unmapped()), ends_at))

    def leave(self) -> None:
        """Let the thread end, once nothing is mapped. Idempotent, from any thread."""
        with self._closing:
            self._leaving = True
            if not self._is_closed:
                self._ring()

    def forget(self) -> None:
        """In the child of a fork, which has neither the thread nor what was mapped."""
        self._new = []
        self._is_closed = True
        self._socket.close()
        self._bell = None

    def _receive_board(self, ends_at: float) -> tuple[Words, _Bell]:
        header, body, descriptors = receive_frame(self._socket, ends_at)
        try:
            if header.kind is not wire.Kind.DATA or len(descriptors) != 2:
                raise wire.WireFormatError(f"an arena begins with {header} and {len(descriptors)} descriptors")
            word_count, self._knows = frames.decode_board(body)
            board = map_board(descriptors[0], word_count)
            return board, _Bell(os.dup(descriptors[1]))
        finally:
            close_all(descriptors)

    def _next_id(self) -> int:
        self._last_id = self._last_id % (2**32 - 1) + 1
        return self._last_id

    def _ask(self, frame: bytes, ends_at: float) -> bytes:
        """Send a request; returns the body of its answer. Raises OSError where the line is of no use any more."""
        call_id = self._last_id
        self._socket.settimeout(max(0.001, ends_at - time.monotonic()))
        self._socket.sendall(frame)
        while True:
            header, body, descriptors = receive_frame(self._socket, ends_at)
            try:
                if header.call_id != call_id:
                    raise wire.WireFormatError(f"a frame is of call {header.call_id}, expected {call_id}")
                if header.kind is wire.Kind.DATA:
                    self._map(frames.decode_mappings(body), descriptors)
                    continue
            finally:
                close_all(descriptors)
            if header.kind is wire.Kind.RESPONSE:
                return body
            if header.kind is wire.Kind.ERROR:
                raise wire.decode_error(header.code, body, "the arena")
            raise wire.WireFormatError(f"a frame of kind {header.kind.name} came, expected an answer")

    def _map(self, lent: list[frames.LentExtent], descriptors: list[int]) -> None:
        if len(lent) != len(descriptors):
            raise wire.WireFormatError(f"{len(lent)} extents came with {len(descriptors)} descriptors")
        for one, fd in zip(lent, descriptors, strict=True):
            try:
                mapping = Mapping(one, fd, self._on_unmapped)
            except OSError:  # no room in the address space, or a limit: it is as good as unmapped
                self._on_unmapped(one.mapping_id)
                continue
            self._mapped[one.mapping_id] = mapping.watch
            self._new.append(mapping)

    def _on_unmapped(self, mapping_id: int) -> None:
        """Takes no lock: it may run wherever memory is freed."""
        if self._pid == os.getpid():  # which a child of a fork that still has the number is not
            self._unmapped.append(mapping_id)
            self._ring()

    def _ring(self) -> None:
        bell = self._bell
        if bell is not None:
            bell.ring()

    def _take_unmapped(self) -> list[int]:
        unmapped: list[int] = []
        while self._unmapped and len(unmapped) < frames.MAPPINGS_MAX:
            unmapped.append(self._unmapped.popleft())
            self._mapped.pop(unmapped[-1], None)
        return unmapped

    def _listen(self) -> None:
        bell = self._bell
        assert bell is not None, "the thread ends before the line does"
        poller = select.poll()
        poller.register(self._socket, _HANGUP)
        poller.register(bell, select.POLLIN)
        reason = "the session is over"
        while not self._leaving:
            if any(fd == self._socket.fileno() for fd, _ in poller.poll()):
                reason = "the server has ended the connection"
                break
            bell.hear()
            if self._leaving:
                break
            try:
                self._arena.sync(self)
            except TimeoutError:
                self._arena.late(self)
            except (OSError, KvstoreError) as error:
                reason = str(error)
                break
        if not self._leaving:
            self._arena.hung_up(reason)
        self._wind_up(bell)

    def _wind_up(self, bell: _Bell) -> None:
        """Wait until everything is unmapped, tell so, and close. Answers are not waited for."""
        poller = select.poll()
        poller.register(bell, select.POLLIN)
        while not self._arena.closed_if_idle(self):
            poller.poll()
            bell.hear()

    def close_if_idle(self) -> bool:
        """Tell what is unmapped; close, and true, if that is all. Called while nobody asks."""
        self._new = []
        if unmapped := self._take_unmapped():
            with suppress(OSError):
                self._socket.settimeout(_SYNC_SECONDS)
                self._socket.sendall(frames.encode_sync(self._next_id(), unmapped))
        if self._mapped or self._unmapped:
            return False
        with self._closing:
            self._is_closed = True
            self._socket.close()
            self._bell = None
        return True


def _off_from_the_start(address: UnixAddress | TcpAddress) -> str:
    """Why nothing can be read in place at this address; empty if it may."""
    if not isinstance(address, UnixAddress):
        return "the connection is no Unix socket"
    return "" if address.arena == "map" else "the client was told so (arena=off)"


def _copied(leased: _Leased, request: pb.LoadRequest, part: int | None, target: Bytes1D) -> int:
    """Copy what there is of a load; 0 if the lease has ended by the end of it."""
    reader = leased.reader
    parts = leased.parts(part)
    count = leased.shows(request)
    if parts is None or not count or reader.row_bytes(parts) * request.blocks != target.size or not leased.stands:
        return 0
    reader.copy(request.from_block - leased.first_block, count, parts, target)
    return count if leased.stands else 0
