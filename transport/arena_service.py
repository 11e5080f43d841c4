"""Arena connections, on the server: who holds a lease is told where its blocks lie, and gets descriptors to map them.

A client names leases of its own session and mappings of its own connection, and nothing else. What it gets are extents
of the pools of its leases, so of namespaces that it has proven. README.md has the reasons.
"""

from __future__ import annotations

import array
import asyncio
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import grpc
import numpy as np

from kvstore.errors import ClosedError, InvalidArgumentError, KvstoreError, NoSpaceError
from kvstore.transport import arena_frames as frames
from kvstore.transport import wire
from kvstore.transport.arena_board import Board
from kvstore.transport.arena_frames import ArenaMethod, LentExtent, Placed, PlacedPart
from kvstore.transport.calls import INTERNAL_DETAILS
from kvstore.transport.status import status_of
from kvstore.transport.tenants import under_way

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.store.lease import LeasedPlaces
    from kvstore.tiers.extent import ExtentHold
    from kvstore.tiers.host import ExtentPlace, HostPool
    from kvstore.transport.arena_frames import Slots
    from kvstore.transport.peer_process import PeerProcess
    from kvstore.transport.session import Session
    from kvstore.transport.wire_lane import WireLane

# Who has not unmapped by then what was asked back, or what a session that is over left it, is counted as wedged.
PATIENCE_SECONDS = 1.0
_WORDS_MAX = 65_536
_NOWHERE = Placed(0, (), np.zeros(0, dtype=np.uint32))


@runtime_checkable
class Placer(Protocol):
    """A lease whose blocks can be read where they lie; see kvstore.store.lease."""

    def places(self, *, part: int | None) -> LeasedPlaces:
        """Where leading blocks lie."""
        ...

    def watch(self, ended: Callable[[], None]) -> None:
        """Have it told when they may no longer lie there."""
        ...


@dataclass(frozen=True, slots=True)
class ArenaUse:
    """What processes on this host map: how many clients, how much, and how much of it they should have let go."""

    clients: int = 0
    extents: int = 0
    mapped_bytes: int = 0
    quarantined_bytes: int = 0

    def __add__(self, other: ArenaUse) -> ArenaUse:
        return ArenaUse(
            self.clients + other.clients,
            self.extents + other.extents,
            self.mapped_bytes + other.mapped_bytes,
            self.quarantined_bytes + other.quarantined_bytes,
        )


@dataclass(slots=True)
class _Lent:
    """An extent that the client may have mapped."""

    hold: ExtentHold
    recalled_at: float | None = None


class ArenaConnection:
    """One client's arena connection, and what it has mapped. Lives in the event loop; places are found in threads.

    It lasts until nothing is mapped any more: after the session until the client has unmapped, or its process is dead.
    `_lock` guards what is below it, is held for no call elsewhere, and is the last of all locks.
    """

    def __init__(self, lane: WireLane, connected: socket.socket, session: Session, process: PeerProcess) -> None:
        """Raises OSError where no descriptor is to be had, and leaves both to the caller then."""
        connected.setblocking(False)
        self._lane = lane
        self._socket = connected
        self._session = session
        self._process = process
        self._board: Board | None = None
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._words: dict[int, int] = {}  # by lease
        self._lent: dict[int, _Lent] = {}  # by mapping
        self._known: dict[int, int] = {}  # mappings by extent, those that the client is not asked to end
        self._recalled: list[int] = []
        self._last_id = 0
        self._ended_at: float | None = None
        self._is_closed = False

    @property
    def use(self) -> ArenaUse:
        """What the client maps. From any thread."""
        overdue = time.monotonic() - PATIENCE_SECONDS
        with self._lock:
            is_over = self._ended_at is not None and self._ended_at < overdue
            sizes = [lent.hold.nbytes for lent in self._lent.values()]
            wedged = [
                lent.hold.nbytes
                for lent in self._lent.values()
                if is_over or (lent.recalled_at is not None and lent.recalled_at < overdue)
            ]
        return ArenaUse(1, len(sizes), sum(sizes), sum(wedged))

    async def serve(self) -> None:
        """Answer requests until the client has gone and maps nothing."""
        try:
            with suppress(OSError):  # the client has gone, or takes nothing any more
                await self._answer_all()
                self._socket.shutdown(socket.SHUT_RDWR)
            self.end()
            while self._lent and not self._process.has_ended:
                await _readable(self._process.fileno())
        finally:
            self.close()

    def end(self) -> None:
        """The session is over: the client is to unmap everything and say so. Idempotent."""
        self._ended_at = self._ended_at or time.monotonic()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Let go of everything, also of what is mapped; nothing follows it."""
        with self._lock:
            self._is_closed = True
            lent = tuple(self._lent.values())
            self._lent.clear()
        for one in lent:
            one.hold.release()
        os.close(self._bell)
        self._process.close()
        self._socket.close()

    async def _answer_all(self) -> None:
        self._board = board = Board(min(self._lane.state.limits.leases_per_session, _WORDS_MAX))
        shown = board.take_read_only()
        try:
            await self._send(frames.encode_board(board.word_count, frames.KNOWS_PLACE_PART), [shown, self._bell])
        finally:
            os.close(shown)
        while True:
            raw = await self._receive(wire.HEADER_BYTES)
            if raw is None:
                return
            try:
                header = wire.decode_header(raw, 0, frames.REQUEST_BYTES_MAX)
                if header.kind is not wire.Kind.REQUEST or header.code not in tuple(ArenaMethod):
                    raise wire.WireFormatError(f"an arena connection brings {header}, expected a request")
            except wire.WireFormatError:
                self._lane.refuse("malformed")
                return
            body = await self._receive(header.body_bytes)
            if body is None or not await self._answer(header, body):
                return

    async def _answer(self, header: wire.Header, body: bytes) -> bool:
        """Answer one request; false if nothing can follow it."""
        root = self._lane.root
        start = root.begin("Place")
        status = grpc.StatusCode.OK
        goes_on = True
        lent: list[LentExtent] = []
        descriptors: list[int] = []
        try:
            if header.code == ArenaMethod.SYNC:
                answer = frames.encode_recalled(header.call_id, self._sync(frames.decode_ids(body)))
            else:
                place = partial(self._answer_place, header, *frames.decode_place(body), lent, descriptors)
                answer = await self._lane.state.short.run(place)
        except KvstoreError as error:
            if isinstance(error, wire.WireFormatError):
                self._lane.refuse("malformed")
                goes_on = False
            status = status_of(error)[0]
            answer = wire.encode_error(error, header.call_id)
        except Exception as error:  # noqa: BLE001  # see below
            # The root of the call: it is counted and logged there, and the connection ends.
            root.count_failure("Place", error)
            status = grpc.StatusCode.INTERNAL
            answer = wire.encode_failure(status, INTERNAL_DETAILS, header.call_id)
            goes_on = False
        finally:
            root.end("Place", start, status.name)
        await self._send_all(header.call_id, answer, lent, descriptors)
        return goes_on

    async def _send_all(self, call_id: int, answer: bytes, lent: list[LentExtent], descriptors: list[int]) -> None:
        """Send descriptors, as many as a message takes at a time, and then the answer; once the session is over, none.

        What is not sent is not held: a client that leaves can tell of nothing that it never got.
        """
        sent = 0
        try:
            while sent < len(lent) and self._ended_at is None:
                some = slice(sent, sent + frames.DESCRIPTORS_MAX)
                await self._send(frames.encode_mappings(call_id, lent[some]), descriptors[some])
                sent += len(lent[some])
            if self._ended_at is None:
                await self._send(answer, [])
        except OSError:
            return  # gone; what it has said before can still be read
        finally:
            for fd in descriptors:
                os.close(fd)
            self._end_mappings(tuple(one.mapping_id for one in lent[sent:]))

    def _sync(self, unmapped_ids: tuple[int, ...]) -> list[int]:
        """End the holds on what is no longer mapped; returns what is wanted back since the last time."""
        self._end_mappings(unmapped_ids)
        with self._lock:
            recalled, self._recalled = self._recalled, []
        return recalled

    def _end_mappings(self, mapping_ids: tuple[int, ...]) -> None:
        ended: list[_Lent] = []
        with self._lock:
            for mapping_id in mapping_ids:
                lent = self._lent.pop(mapping_id, None)
                if lent is not None:
                    ended.append(lent)
                    self._forget(lent.hold.extent_id, mapping_id)
        for one in ended:
            one.hold.release()

    def _answer_place(
        self, header: wire.Header, lease_id: int, part: int | None, lent: list[LentExtent], descriptors: list[int]
    ) -> bytes:
        """Where the leading blocks of a lease lie; adds what the client is still to map. Runs in a thread."""
        self._session.principal.require("Load")
        with under_way(self._lane.state.tenants, self._session.principal.tenant):
            held = self._session.leases.get(lease_id)
            layout, knows_sparse = held.layout, header.code == ArenaMethod.PLACE_PART
            end = len(layout.parts) if knows_sparse else layout.part_count
            if not (0 <= part < end if part is not None else not knows_sparse):
                raise InvalidArgumentError(f"part is {part}, expected 0..{end - 1} to read in place")
            placed, first_block, index = _NOWHERE, 0, 0
            if isinstance(held.handle, Placer):
                word = self._word(lease_id, held.handle)
                places = held.handle.places(part=part)
                placed = self._lend_all(lease_id, word, places, lent, descriptors)
                first_block, index = places.first_block, places.index
            if not knows_sparse or part is None:
                return frames.encode_placed(header.call_id, placed)
            is_sparse = layout.group_of(part) is not None
            return frames.encode_placed_part(header.call_id, PlacedPart(placed, is_sparse, first_block, index))

    def _lend_all(
        self, lease_id: int, word: int, places: LeasedPlaces, lent: list[LentExtent], descriptors: list[int]
    ) -> Placed:
        """What the client is told of places, and given to map; fewer where it cannot have an extent."""
        slots = places.slots
        mapping_ids = []
        for extent in places.pool.extents_of(slots):
            mapping_id = self._lend(places.pool, extent, lent, descriptors)
            if mapping_id is None:
                slots = slots[: _first_in(extent, slots)]
            else:
                mapping_ids.append(mapping_id)
        self._require_word(lease_id)
        return Placed(word, tuple(mapping_ids), slots)

    def _word(self, lease_id: int, lease: Placer) -> int:
        """The word of a lease, which is cleared when it ends."""
        assert self._board is not None, "requests come behind the board"
        with self._lock:
            word = self._words.get(lease_id)
            if word is not None:
                return word
            word = self._board.take(lease_id)
            if word is None:
                raise NoSpaceError(f"{self._board.word_count} leases are read in place, the most there may be")
            self._words[lease_id] = word
        try:
            lease.watch(partial(self._on_lease_end, self._board, lease_id, word))
        except KvstoreError:
            self._on_lease_end(self._board, lease_id, word)
            raise
        return word

    def _require_word(self, lease_id: int) -> None:
        """Raises ClosedError for a lease that has ended while its places were looked up: they may be others' by now."""
        with self._lock:
            if lease_id not in self._words:
                raise ClosedError(f"lease {lease_id} has ended")

    def _on_lease_end(self, board: Board, lease_id: int, word: int) -> None:
        board.clear(word)
        with self._lock:
            del self._words[lease_id]
            board.give_back(word)
            # What was wanted back while the lease stood was kept for it; the client is to look again.
            if not self._is_closed and any(lent.recalled_at is not None for lent in self._lent.values()):
                self._ring()

    def _lend(self, pool: HostPool, place: ExtentPlace, lent: list[LentExtent], descriptors: list[int]) -> int | None:
        """The mapping of an extent, with a new descriptor if the client has none; None where it cannot have it."""
        with self._lock:
            known = self._known.get(place.extent_id)
            if known is not None:
                return known
            if len(self._lent) >= frames.MAPPINGS_MAX:
                return None
            self._last_id += 1
            mapping_id = self._last_id
        hold = pool.hold(place.extent_id, partial(self._recall, place.extent_id, mapping_id))
        if hold is None:
            return None
        try:
            fd = hold.open_read_only()
        except OSError:
            hold.release()
            return None
        with self._lock:
            is_closed = self._is_closed
            is_recalled = mapping_id in self._recalled
            if not is_closed:
                self._lent[mapping_id] = _Lent(hold, time.monotonic() if is_recalled else None)
            if not is_closed and not is_recalled:
                self._known[place.extent_id] = mapping_id
        if is_closed:
            os.close(fd)
            hold.release()
            return None
        shape = place.geometry
        lent.append(
            LentExtent(
                mapping_id, place.slots.first, place.slots.count, hold.nbytes, shape.part_sizes, shape.part_offsets
            )
        )
        descriptors.append(fd)
        return mapping_id

    def _recall(self, extent_id: int, mapping_id: int) -> None:
        """The extent is wanted back. From any thread, also before the client was told of it."""
        with self._lock:
            if self._is_closed:
                return
            self._recalled.append(mapping_id)
            self._forget(extent_id, mapping_id)
            lent = self._lent.get(mapping_id)
            if lent is not None:
                lent.recalled_at = time.monotonic()
            self._ring()

    def _ring(self) -> None:
        with suppress(OSError):  # a client can fill its own bell, and then hears nothing
            os.eventfd_write(self._bell, 1)

    def _forget(self, extent_id: int, mapping_id: int) -> None:
        if self._known.get(extent_id) == mapping_id:
            del self._known[extent_id]

    async def _receive(self, nbytes: int) -> bytes | None:
        """That many bytes; None if the client has ended the connection, or its process has ended."""
        raw = b""
        while len(raw) < nbytes:
            try:
                received = self._socket.recv(nbytes - len(raw))
            except BlockingIOError:
                if self._process.has_ended:
                    return None
                await _readable(self._socket.fileno(), self._process.fileno())
                continue
            if not received:
                return None
            raw += received
        return raw

    async def _send(self, frame: bytes, descriptors: list[int]) -> None:
        """Send a frame, the descriptors with its first byte."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        unsent = memoryview(frame)
        while unsent:
            try:
                unsent = unsent[self._socket.sendmsg([unsent], rights) :]
            except BlockingIOError:
                await _writable(self._socket.fileno())
            else:
                rights = []


def _first_in(extent: ExtentPlace, slots: Slots) -> int:
    """Position of the first slot that lies in an extent."""
    is_in = (slots >= extent.slots.first) & (slots < extent.slots.first + extent.slots.count)
    return int(is_in.argmax()) if is_in.any() else int(slots.size)


async def _readable(*descriptors: int) -> None:
    """Wait until one of them can be read, or ends."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    for fd in descriptors:
        loop.add_reader(fd, _resolve, ready)
    try:
        await ready
    finally:
        for fd in descriptors:
            loop.remove_reader(fd)


async def _writable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_writer(fd, _resolve, ready)
    try:
        await ready
    finally:
        loop.remove_writer(fd)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
