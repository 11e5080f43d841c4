"""Bulk connections of the fast lane, on the server: the event loop waits for requests, threads move the bytes.

One call at a time on a connection. Rows are sent straight from, and received straight into, the slots they lie in,
wherever the store can lend them.
"""

from __future__ import annotations

import asyncio
import hmac
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
from google.protobuf.message import DecodeError

from kvstore.errors import InvalidArgumentError, KvstoreError, NoSpaceError, UnavailableError
from kvstore.transport import wire
from kvstore.transport.bulk import ROWS_MAX
from kvstore.transport.bulk_memory import RowDigests
from kvstore.transport.bulk_rows import EngineSeat, TransferEnd
from kvstore.transport.bulk_socket import SocketTransport
from kvstore.transport.calls import INTERNAL_DETAILS
from kvstore.transport.jobs import Lender, LoadJob, WriteJob, load_job, write_job
from kvstore.transport.status import UnknownSessionError, status_of
from kvstore.transport.tenants import under_way
from kvstore.transport.wire_socket import BulkSocket, RowReceiver
from kvstore.v1 import cache_service_pb2 as pb

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from kvstore.transport.bulk import BulkTransport
    from kvstore.transport.session import Session
    from kvstore.transport.wire_lane import WireLane

STALL_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class _Outcome:
    """How a call went, and whether the connection can take another one."""

    method: str
    status: grpc.StatusCode
    reusable: bool
    unended: int = 0


class BulkConnection:
    """One bulk connection of a session. Lives in the event loop; the thread of the call under way uses `_peer`."""

    def __init__(self, lane: WireLane, connected: socket.socket, session: Session) -> None:
        self._lane = lane
        self._socket = connected
        self._peer = BulkSocket(connected)
        self._session = session
        self._seat = EngineSeat(lane.state.bulk_engine)

    async def serve(self) -> None:
        """Answer calls until the connection ends."""
        try:
            while await self._has_request():
                if not await self._answer():
                    return
        finally:
            self._peer.close()
            if self._seat.is_taken:
                await asyncio.to_thread(self._seat.close)

    def end(self) -> None:
        """Let the call under way fail, and the connection end."""
        self._peer.shutdown()

    async def _has_request(self) -> bool:
        """Wait for a request; false if the client ends the connection instead."""
        while True:
            try:
                return bool(self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
            except BlockingIOError:
                await self._readable()  # which may end for nothing, as loops do
            except OSError:
                return False

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        readable = loop.create_future()
        loop.add_reader(self._socket.fileno(), _resolve, readable)
        try:
            await readable
        finally:
            loop.remove_reader(self._socket.fileno())

    async def _answer(self) -> bool:
        root = self._lane.root
        start = root.begin("Load")
        outcome = _Outcome("Load", grpc.StatusCode.INTERNAL, reusable=False)
        workers = self._lane.bulk
        try:
            if self._lane.stopping:
                raise UnavailableError("the server is stopping")
            with workers.place():
                outcome = await workers.call(_BulkCall(self._peer, self._session, self._lane, self._seat).serve)
                self._lane.state.unended_handles += outcome.unended
        except (NoSpaceError, UnavailableError) as error:
            outcome = _Outcome("Load", status_of(error)[0], reusable=False)
            with suppress(OSError):
                self._socket.send(wire.encode_error(error, 0), socket.MSG_DONTWAIT)
        except Exception as error:  # noqa: BLE001  # see below
            # The root of the call: it is counted and logged, and the connection ends.
            root.count_failure("Load or Write", error)
            with suppress(OSError):
                failure = wire.encode_failure(grpc.StatusCode.INTERNAL, INTERNAL_DETAILS, 0)
                self._socket.send(failure, socket.MSG_DONTWAIT)
        finally:
            root.end(outcome.method, start, outcome.status.name)
        return outcome.reusable


def _hasher(request: pb.LoadRequest | pb.WriteStart, row_bytes: int) -> RowDigests | None:
    """What makes the digests that a load asks for."""
    if not isinstance(request, pb.LoadRequest) or not request.with_digests:
        return None
    if request.blocks > ROWS_MAX:
        raise InvalidArgumentError(f"digests of {request.blocks} rows are asked for, expected at most {ROWS_MAX}")
    return RowDigests(row_bytes)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class _BulkCall:
    """One call, from its request to its answer, in one thread."""

    def __init__(self, peer: BulkSocket, session: Session, lane: WireLane, seat: EngineSeat) -> None:
        self._peer = peer
        self._session = session
        self._limits = lane.state.limits
        self._buffers = lane.state.buffers
        self._tenants = lane.state.tenants
        self._seat = seat
        self._method = wire.Method.Load
        self._call_id = 0
        self._unended = 0
        self._until = TransferEnd(0.0, peer.has_input)

    def serve(self) -> _Outcome:
        """Read the request and do it; errors are answered."""
        self._peer.begin(STALL_SECONDS, STALL_SECONDS)
        try:
            request = self._request()
            self._session.principal.require(self._method.name)
            with under_way(self._tenants, self._session.principal.tenant):
                return self._do(request)
        except KvstoreError as error:
            return self._refuse(error)
        except OSError:  # a timeout and a lost connection are among them
            return self._outcome(grpc.StatusCode.CANCELLED, reusable=False)

    def _request(self) -> Message:
        raw = bytearray(wire.HEADER_BYTES)
        self._peer.receive([memoryview(raw)])
        header = wire.decode_header(raw, 0, wire.BULK_REQUEST_BYTES_MAX)
        self._method = wire.method_of(header)
        self._call_id = header.call_id
        if self._method not in wire.BULK_METHODS:
            raise wire.WireFormatError(f"{self._method.name} came on a bulk connection, which takes Load and Write")
        body = RowReceiver(self._peer, self._call_id).body(header)
        seconds = header.deadline_ms / 1000 if header.deadline_ms else self._limits.bulk_seconds_max
        seconds = min(seconds, self._limits.bulk_seconds_max)
        self._peer.begin(seconds, STALL_SECONDS)
        self._until = TransferEnd(time.monotonic() + seconds, self._peer.has_input)
        try:
            return wire.REQUEST_TYPES[self._method].FromString(body)
        except DecodeError as err:
            raise wire.WireFormatError(f"the request is no {self._method.name} message: {err}") from err

    def _do(self, request: Message) -> _Outcome:
        if isinstance(request, pb.WriteStart):
            return self._write(request)
        assert isinstance(request, pb.LoadRequest), request
        return self._load(request)

    def _load(self, request: pb.LoadRequest) -> _Outcome:
        self._check_session(request.session_id)
        job = load_job(self._session, request, self._limits)
        transport = self._transport(request, job.row_bytes)
        next_block, complete = job.from_block, True
        while complete and next_block < job.end_block:
            lent = self._send_lent(transport, job, next_block)
            next_block += lent
            if not lent:
                copied, complete = self._send_copied(transport, job, next_block)
                next_block += copied
        summary = pb.LoadSummary(
            blocks=next_block - job.from_block, requested_blocks=request.blocks, digests=transport.digests
        )
        return self._respond(pb.LoadResponse(summary=summary))

    def _transport(self, request: pb.LoadRequest | pb.WriteStart, row_bytes: int) -> BulkTransport:
        """What moves the rows: an engine if the request names memory for it, else frames behind it."""
        if not request.HasField("memory"):
            return SocketTransport(self._peer, self._call_id, _hasher(request, row_bytes))
        principal = self._session.principal
        transport = self._seat.transport(principal, request.memory, row_bytes, request.blocks, self._until)
        if isinstance(request, pb.WriteStart):
            transport.expect(request.digests)
        return transport

    def _send_lent(self, transport: BulkTransport, job: LoadJob, first: int) -> int:
        """Send the leading blocks that lie in memory, in place; returns how many."""
        if not isinstance(job.lease, Lender):
            return 0
        with job.lease.lend(from_block=first, blocks=job.end_block - first, part=job.part) as pieces:
            return transport.send(piece.data for piece in pieces) // job.row_bytes

    def _send_copied(self, transport: BulkTransport, job: LoadJob, first: int) -> tuple[int, bool]:
        """Have the store copy, and verify, some blocks and send them: how many, and whether all were there."""
        count = min(max(1, self._limits.bulk_buffer_bytes // job.row_bytes), job.end_block - first)
        buffer = self._buffers.take(count * job.row_bytes)
        rows = buffer[: count * job.row_bytes].reshape(count, job.row_bytes)
        blocks = job.lease.load_into(rows, from_block=first, part=job.part).blocks
        transport.send([rows[:blocks].reshape(-1).data])
        self._buffers.give_back(buffer)
        return blocks, blocks == count

    def _write(self, start: pb.WriteStart) -> _Outcome:
        self._check_session(start.session_id)
        job = write_job(self._session, start, self._limits)
        transport = self._transport(start, job.row_bytes)
        try:
            rows = self._receive_rows(transport, job)
        except BaseException:
            # Of a write that broke off nobody knows what arrived, so nothing of it may ever be committed.
            self._unended = self._session.stages.try_to_end(start.stage_id)
            raise
        return self._respond(pb.WriteResponse(rows=rows))

    def _receive_rows(self, transport: BulkTransport, job: WriteJob) -> int:
        if job.is_sparse:
            taken = self._receive_copied(transport, job, job.from_block, job.from_block + job.blocks)
            transport.finish()
            return taken
        wanted_from, wanted_end = job.stage.from_block, job.stage.from_block + job.stage.blocks
        end_block = job.from_block + job.blocks
        begin, end = max(job.from_block, wanted_from), min(end_block, wanted_end)
        if begin >= end:
            begin = end = end_block
        transport.skip((begin - job.from_block) * job.row_bytes)
        if begin < end:
            self._receive_wanted(transport, job, begin, end)
        transport.skip((end_block - end) * job.row_bytes)
        transport.finish()
        return end - begin

    def _receive_wanted(self, transport: BulkTransport, job: WriteJob, begin: int, end: int) -> None:
        if isinstance(job.stage, Lender):
            with job.stage.lend(from_block=begin, blocks=end - begin, part=job.part) as pieces:
                transport.fill(piece.data for piece in pieces)
            return
        self._receive_copied(transport, job, begin, end)

    def _receive_copied(self, transport: BulkTransport, job: WriteJob, begin: int, end: int) -> int:
        """Have the store copy what comes; returns how many rows it took."""
        taken = 0
        count = max(1, self._limits.bulk_buffer_bytes // job.row_bytes)
        buffer = self._buffers.take(count * job.row_bytes)
        for first in range(begin, end, count):
            rows = buffer[: min(count, end - first) * job.row_bytes].reshape(-1, job.row_bytes)
            transport.fill([rows.reshape(-1).data])
            taken += job.stage.write_from(rows, from_block=first, part=job.part)
        self._buffers.give_back(buffer)
        return taken

    def _check_session(self, session_id: bytes) -> None:
        if not hmac.compare_digest(session_id, self._session.session_id):
            raise UnknownSessionError("open a session first")

    def _respond(self, message: Message) -> _Outcome:
        frame = wire.encode_frame(wire.Kind.RESPONSE, message.SerializeToString(), call_id=self._call_id)
        self._peer.send([memoryview(frame)])
        return self._outcome(grpc.StatusCode.OK, reusable=True)

    def _refuse(self, error: KvstoreError) -> _Outcome:
        """Answer with an error. Behind a refused write, and behind bytes that make no sense, nothing can follow."""
        reusable = self._method is wire.Method.Load and not isinstance(error, wire.WireFormatError)
        with suppress(OSError):
            self._peer.begin(STALL_SECONDS, STALL_SECONDS)
            self._peer.send([memoryview(wire.encode_error(error, self._call_id))])
            return self._outcome(status_of(error)[0], reusable=reusable)
        return self._outcome(status_of(error)[0], reusable=False)

    def _outcome(self, status: grpc.StatusCode, *, reusable: bool) -> _Outcome:
        return _Outcome(self._method.name, status, reusable, self._unended)
