"""Rows between memory and real sockets: cut anywhere, never more than asked, never for ever."""

from __future__ import annotations

import itertools
import socket
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.testing.patience import ANSWER_SECONDS, SLACK_SECONDS, Stopwatch
from kvstore.transport import wire
from kvstore.transport.wire_socket import CHUNK_BYTES, BulkSocket, RowReceiver, chunks, send_chunk, send_rows

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def pair() -> Iterator[tuple[BulkSocket, BulkSocket]]:
    sockets = [BulkSocket(end) for end in socket.socketpair()]
    for end in sockets:
        end.begin(ANSWER_SECONDS, ANSWER_SECONDS)
    yield sockets[0], sockets[1]
    for end in sockets:
        end.close()


def views_of(data: bytes, sizes: list[int]) -> list[memoryview]:
    """`data` cut into pieces of these sizes, the rest last."""
    views = []
    begin = 0
    for size in sizes:
        views.append(memoryview(data)[begin : begin + size])
        begin += size
    return [*views, memoryview(data)[begin:]]


sizes = st.lists(st.integers(0, 5000), max_size=8)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 20_000), sizes, sizes, sizes)
def test_bytes_cut_in_any_way_arrive_in_order(total: int, sent: list[int], frames: list[int], filled: list[int]):
    data = np.random.default_rng(total).integers(0, 256, total, dtype=np.uint8).tobytes()
    target = bytearray(total)
    here, there = (BulkSocket(end) for end in socket.socketpair())
    try:
        for end in (here, there):
            end.begin(ANSWER_SECONDS, ANSWER_SECONDS)
        for view in views_of(data, frames):
            if view.nbytes:
                send_chunk(here, [piece for piece in views_of(bytes(view), sent) if piece.nbytes], 7)
        receiver = RowReceiver(there, 7)
        receiver.fill(memoryview(target)[begin:end] for begin, end in _ranges(total, filled))
        receiver.finish()
    finally:
        here.close()
        there.close()
    assert data == bytes(target)


def _ranges(total: int, cuts: list[int]) -> list[tuple[int, int]]:
    edges = [0]
    for cut in cuts:
        edges.append(min(total, edges[-1] + cut))
    edges.append(total)
    return list(itertools.pairwise(edges))


@settings(deadline=None)
@given(st.lists(st.integers(0, 3 * 2**20), max_size=6))
def test_chunks_hold_every_byte_once_and_are_bounded(pieces: list[int]):
    data = bytes(sum(pieces))
    cut = list(chunks(views_of(data, pieces)))
    assert sum(pieces) == sum(view.nbytes for views in cut for view in views)
    assert all(0 < sum(view.nbytes for view in views) <= CHUNK_BYTES for views in cut)
    assert all(len(views) <= 512 for views in cut)


def test_more_than_a_socket_holds_arrives(pair: tuple[BulkSocket, BulkSocket]):
    data = np.arange(3 * 2**20, dtype=np.uint32)
    target = np.zeros_like(data)
    sender = threading.Thread(target=send_rows, args=(pair[0], [data.view(np.uint8).data], 1))
    sender.start()
    RowReceiver(pair[1], 1).fill([target.view(np.uint8).data])
    sender.join()
    assert np.array_equal(data, target)


def test_more_bytes_than_were_announced_are_noticed(pair: tuple[BulkSocket, BulkSocket]):
    send_rows(pair[0], [memoryview(bytes(10))], 1)
    receiver = RowReceiver(pair[1], 1)
    receiver.fill([memoryview(bytearray(8))])
    with pytest.raises(wire.WireFormatError, match="2 bytes more"):
        receiver.finish()


def test_a_frame_larger_than_its_target_writes_nothing(pair: tuple[BulkSocket, BulkSocket]):
    send_rows(pair[0], [memoryview(b"x" * 10)], 1)
    receiver = RowReceiver(pair[1], 1)
    target = bytearray(8)
    receiver.next_header()
    with pytest.raises(wire.WireFormatError, match="10 bytes where 8"):
        receiver.fill_frame(memoryview(target))
    assert bytes(8) == target


@pytest.mark.parametrize("kind", [kind for kind in wire.Kind if kind is not wire.Kind.DATA])
def test_a_frame_of_another_kind_in_the_middle_of_rows_is_refused(pair: tuple[BulkSocket, BulkSocket], kind: wire.Kind):
    pair[0].send([memoryview(wire.encode_frame(kind, b"x", call_id=1))])
    with pytest.raises(wire.WireFormatError, match=kind.name):
        RowReceiver(pair[1], 1).fill([memoryview(bytearray(8))])


def test_a_frame_of_another_call_is_refused(pair: tuple[BulkSocket, BulkSocket]):
    send_rows(pair[0], [memoryview(b"x")], 2)
    with pytest.raises(wire.WireFormatError, match="call 2, expected 1"):
        RowReceiver(pair[1], 1).next_header()


def test_a_frame_of_no_bytes_cannot_keep_a_receiver_busy(pair: tuple[BulkSocket, BulkSocket]):
    pair[0].send([memoryview(wire.encode_header(wire.Kind.DATA, 0, call_id=1))])
    with pytest.raises(wire.WireFormatError, match="DATA"):
        RowReceiver(pair[1], 1).fill([memoryview(bytearray(8))])


def test_silence_ends_with_the_deadline(pair: tuple[BulkSocket, BulkSocket]):
    watch = Stopwatch()
    pair[1].begin(0.2, ANSWER_SECONDS)
    with pytest.raises(TimeoutError):
        pair[1].receive([memoryview(bytearray(8))])
    pair[0].begin(ANSWER_SECONDS, 0.2)
    with pytest.raises(TimeoutError):
        pair[0].send([memoryview(bytes(2**24))])
    assert watch.seconds < 2 * 0.2 + SLACK_SECONDS


def test_the_end_of_the_other_side_is_an_error_and_not_a_result(pair: tuple[BulkSocket, BulkSocket]):
    pair[0].send([memoryview(b"1234")])
    pair[0].shutdown()
    with pytest.raises(ConnectionError):
        pair[1].receive([memoryview(bytearray(8))])


def test_a_shutdown_wakes_who_waits(pair: tuple[BulkSocket, BulkSocket]):
    failed: list[BaseException] = []

    def receive() -> None:
        try:
            pair[1].receive([memoryview(bytearray(8))])
        except ConnectionError as error:
            failed.append(error)

    waiting = threading.Thread(target=receive)
    waiting.start()
    pair[1].shutdown()
    waiting.join(ANSWER_SECONDS)
    assert 1 == len(failed)


def test_input_is_seen_without_being_taken(pair: tuple[BulkSocket, BulkSocket]):
    assert not pair[1].has_input()
    pair[0].send([memoryview(b"x")])
    assert pair[1].has_input()
    taken = bytearray(1)
    pair[1].receive([memoryview(taken)])
    assert (b"x", False) == (bytes(taken), pair[1].has_input())
