from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

import pytest

from kvstore.errors import UnavailableError
from kvstore.transport.address import parse_address
from kvstore.transport.wire_pool import BulkPool, Grip
from kvstore.v1 import cache_service_pb2 as pb

if TYPE_CHECKING:
    from pathlib import Path


def test_nobody_is_dialled_for_a_transfer_that_was_cancelled_before(tmp_path: Path):
    """As by an await that was cancelled while a server that hangs was asked where blocks lie."""
    grip = Grip()
    grip.cancel()
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"{tmp_path}/s")
        silent.listen()
        silent.setblocking(False)
        pool = BulkPool(parse_address(f"unix://{tmp_path}/s"), bytes(16))
        with pytest.raises(UnavailableError, match="the transfer was cancelled"):
            pool.load(pb.LoadRequest(blocks=1), memoryview(bytearray(8)), time.monotonic() + 5.0, grip)
        with pytest.raises(BlockingIOError):
            silent.accept()
