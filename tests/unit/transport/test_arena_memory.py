"""What a client maps: the right bytes of each slot, never writable, unmapped by the last who looks, not in a child."""

from __future__ import annotations

import array
import gc
import itertools
import os
import socket
import struct
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.tiers.host import HostPool, HostTier
from kvstore.transport import wire
from kvstore.transport.arena_board import Board
from kvstore.transport.arena_frames import DESCRIPTORS_MAX, LentExtent, decode_board, encode_board
from kvstore.transport.arena_memory import Mapping, Reader, close_all, map_board, map_read_only, receive_frame
from kvstore.transport.peer_process import PeerProcess
from kvstore.transport.wire import WireFormatError

if TYPE_CHECKING:
    from collections.abc import Iterator

PARTS = (300, 41)
COUNT = 40


@pytest.fixture(scope="module")
def pool() -> Iterator[HostPool]:
    """Forty slots in four extents."""
    with HostTier(COUNT * sum(PARTS), extent_bytes=10 * sum(PARTS)) as tier:
        pool = tier.pool(b"n" * 16, PARTS)
        rows = np.random.default_rng(1).integers(0, 256, (COUNT, sum(PARTS)), dtype=np.uint8)
        pool.write(pool.allocate(COUNT), rows)
        yield pool


def mapped(pool: HostPool, unmapped: list[int]) -> list[Mapping]:
    mappings = []
    for number, place in enumerate(pool.extents()):
        hold = pool.hold(place.extent_id)
        assert hold is not None
        shape = place.geometry
        lent = LentExtent(
            number, place.slots.first, place.slots.count, hold.nbytes, shape.part_sizes, shape.part_offsets
        )
        fd = hold.open_read_only()
        mappings.append(Mapping(lent, fd, unmapped.append))
        os.close(fd)
        hold.release()
    return mappings


@given(slots=st.lists(st.integers(0, COUNT - 1)), data=st.data())
def test_a_reader_reads_what_the_pool_does(pool: HostPool, slots: list[int], data: st.DataObject):
    chosen = np.array(slots, dtype=np.uint32)
    reader = Reader(mapped(pool, []), chosen)
    first = data.draw(st.integers(0, len(slots)))
    count = data.draw(st.integers(0, len(slots) - first))
    part = data.draw(st.sampled_from([None, 0, 1]))
    parts = reader.parts(part)
    assert parts is not None
    right = np.zeros((count, reader.row_bytes(parts)), dtype=np.uint8)
    pool.read(chosen[first : first + count], right, part=part)
    copied = np.zeros(right.size, dtype=np.uint8)
    reader.copy(first, count, parts, copied)
    np.testing.assert_array_equal(right.reshape(-1), copied)
    pieces = reader.pieces(first, count, parts)
    assert not any(piece.flags.writeable for piece in pieces)
    np.testing.assert_array_equal(right.reshape(-1), np.concatenate([*pieces, copied[:0]]))


def test_slots_that_lie_in_no_extent_are_refused(pool: HostPool):
    for slot in (COUNT, 2**32 - 1):
        with pytest.raises(WireFormatError, match="outside"):
            Reader(mapped(pool, []), np.array([0, slot], dtype=np.uint32))
        with pytest.raises(WireFormatError, match="outside"):
            Reader([], np.array([slot], dtype=np.uint32))


def test_a_part_that_is_not_there_is_none(pool: HostPool):
    assert Reader(mapped(pool, []), np.array([0], dtype=np.uint32)).parts(2) is None


def test_a_mapping_goes_with_the_last_array_that_shows_it(pool: HostPool):
    unmapped: list[int] = []
    mappings = mapped(pool, unmapped)
    watches = [mapping.watch for mapping in mappings]
    reader = Reader(mappings, np.array([5], dtype=np.uint32))
    kept = reader.pieces(0, 1, range(1))[0][3:7]
    del reader, mappings
    gc.collect()
    assert [1, 2, 3] == sorted(unmapped)
    assert kept.size
    del kept
    assert [0, 1, 2, 3] == sorted(unmapped)
    assert [None] * 4 == [watch() for watch in watches]


def test_a_child_of_a_fork_does_not_have_what_is_mapped(pool: HostPool):
    mappings = mapped(pool, [])
    address = mappings[0].address
    child = os.fork()
    if child == 0:
        lines = Path("/proc/self/maps").read_text().splitlines()
        is_there = any(int(line.split("-")[0], 16) == address for line in lines)
        mappings.clear()
        gc.collect()
        os._exit(is_there)
    assert 0 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_as_many_descriptors_as_a_message_takes_come_with_a_frame_and_none_stays_open():
    before = len(os.listdir("/proc/self/fd"))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sent = [os.memfd_create(str(number)) for number in range(DESCRIPTORS_MAX)]
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", sent))]
        for frame in (encode_board(1), encode_board(2)):
            theirs.sendmsg([frame], rights)
        close_all(sent)
        for words in (1, 2):
            header, body, descriptors = receive_frame(ours, time.monotonic() + 10)
            assert (wire.Kind.DATA, words, DESCRIPTORS_MAX) == (header.kind, decode_board(body)[0], len(descriptors))
            assert not any(map(os.get_inheritable, descriptors))
            close_all(descriptors)
        theirs.sendmsg([b"no frame, and too short"[: wire.HEADER_BYTES]], [(*rights[0][:2], array.array("i", [0]))])
        with pytest.raises(WireFormatError):
            receive_frame(ours, time.monotonic() + 10)
    assert before == len(os.listdir("/proc/self/fd"))


def test_a_frame_that_comes_byte_by_byte_is_late_all_the_same():
    ours, theirs = socket.socketpair()
    frame = encode_board(1)
    with ours, theirs:
        stopped = threading.Event()

        def trickle() -> None:
            for byte in itertools.cycle(frame[:-1]):
                if stopped.wait(0.01):
                    return
                theirs.send(bytes([byte]))

        theirs.send(struct.pack("<IBBHII", 1 << 20, wire.Kind.DATA, 0, 0, 1, 0))
        sender = threading.Thread(target=trickle)
        sender.start()
        began = time.monotonic()
        try:
            with pytest.raises(TimeoutError):
                receive_frame(ours, began + 0.2)
            assert time.monotonic() - began < 5.0
        finally:
            stopped.set()
            sender.join()


def test_memory_that_could_shrink_is_not_mapped():
    fd = os.memfd_create("x", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    with pytest.raises(WireFormatError, match="seals"):
        map_read_only(fd, 4096)
    os.close(fd)
    board = Board(8)
    shown = board.take_read_only()
    with pytest.raises(WireFormatError, match="4096 bytes"):
        map_read_only(shown, 4097)
    os.close(shown)


def test_a_board_shows_leases_until_they_end():
    board = Board(2)
    shown = board.take_read_only()
    words = map_board(shown, board.word_count)
    os.close(shown)
    first, second = board.take(2**63), board.take(7)
    assert first is not None
    assert second is not None
    assert board.take(8) is None
    assert (2**63, 7) == (int(words[first]), int(words[second]))
    board.clear(first)
    assert (0, 7) == (int(words[first]), int(words[second]))
    board.give_back(first)
    assert first == board.take(9)
    assert not words.flags.writeable


def test_nobody_writes_to_a_board_by_its_descriptor():
    board = Board(2)
    shown = board.take_read_only()
    again = os.open(f"/proc/self/fd/{shown}", os.O_RDWR)
    with pytest.raises(PermissionError):
        os.pwrite(again, b"x", 0)
    for fd in (again, shown):
        os.close(fd)


@pytest.mark.parametrize("known", [True, False], ids=["by the socket", "by number"])
def test_a_process_is_known_by_its_socket_until_it_ends(monkeypatch: pytest.MonkeyPatch, known: bool):
    if not known:
        monkeypatch.setattr("kvstore.transport.peer_process._SO_PEERPIDFD", 9999)
    path = f"\0kvstore-test-{os.getpid()}-{known}"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        child = os.fork()
        if child == 0:
            mine = socket.socket(socket.AF_UNIX)
            mine.connect(path)
            mine.recv(1)
            os._exit(0)
        connected, _ = listening.accept()
        process = PeerProcess(connected)
        assert not process.has_ended
        assert not os.get_inheritable(process.fileno())
        connected.close()
        os.waitpid(child, 0)
        assert process.has_ended
        process.close()
        process.close()
