"""The rows of one call as frames: they arrive, unwanted ones are passed over, what is too much is refused."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvstore.testing.patience import ANSWER_SECONDS
from kvstore.transport.bulk_socket import SocketTransport
from kvstore.transport.wire import WireFormatError
from kvstore.transport.wire_socket import BulkSocket

if TYPE_CHECKING:
    from collections.abc import Iterator

ROWS = np.random.default_rng(1).integers(0, 256, (6, 1000), dtype=np.uint8)


@pytest.fixture
def pair() -> Iterator[tuple[SocketTransport, SocketTransport]]:
    sockets = [BulkSocket(end) for end in socket.socketpair()]
    for end in sockets:
        end.begin(ANSWER_SECONDS, ANSWER_SECONDS)
    yield SocketTransport(sockets[0], 1), SocketTransport(sockets[1], 1)
    for end in sockets:
        end.close()


def test_rows_arrive_and_those_that_nobody_wants_are_passed_over(pair: tuple[SocketTransport, SocketTransport]):
    here, there = pair
    assert ROWS.nbytes == here.send(row.data for row in ROWS)

    taken = np.zeros((3, 1000), dtype=np.uint8)
    there.skip(2 * 1000)
    there.fill(row.data for row in taken)
    there.skip(1000)
    there.finish()

    assert np.array_equal(ROWS[2:5], taken)
    assert () == here.digests


def test_more_than_was_announced_is_refused(pair: tuple[SocketTransport, SocketTransport]):
    here, there = pair
    here.send([ROWS.reshape(-1).data])
    there.skip(5 * 1000)
    with pytest.raises(WireFormatError, match="1000 bytes more"):
        there.finish()
