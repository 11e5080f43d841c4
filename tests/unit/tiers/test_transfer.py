from __future__ import annotations

import threading
from contextlib import suppress

import pytest

from kvstore.errors import ClosedError
from kvstore.testing.patience import ANSWER_SECONDS
from kvstore.tiers.buffers import AlignedBuffers
from kvstore.tiers.faults import FaultCounts
from kvstore.tiers.file_io import SystemIo
from kvstore.tiers.transfer import SlotTransfer


def test_a_failing_job_ends_the_call_only_when_the_others_have_ended() -> None:
    transfer = SlotTransfer(SystemIo(), FaultCounts(), 2)
    first_failed, ended = threading.Event(), []

    def job(number: int) -> None:
        if number == 0:
            first_failed.set()
            raise AssertionError("a programming error")
        assert first_failed.wait(ANSWER_SECONDS)
        ended.append(number)

    with pytest.raises(AssertionError, match="a programming error"):
        transfer.map(job, [0, 1, 2, 3])
    assert [1, 2, 3] == sorted(ended)
    transfer.close()


def test_a_closed_transfer_refuses_jobs() -> None:
    transfer = SlotTransfer(SystemIo(), FaultCounts(), 1)
    transfer.close()
    transfer.close()
    with pytest.raises(ClosedError):
        transfer.map(print, ["never"])


def test_buffers_are_page_aligned_and_come_back_after_an_error() -> None:
    buffers = AlignedBuffers(2)
    for size_bytes in (4096, 100, 1 << 20):
        with suppress(ZeroDivisionError), buffers.lend(size_bytes) as buffer:
            assert (size_bytes, 0) == (len(buffer), buffer.ctypes.data % 4096)
            assert 1 == buffers.lent_count
            raise ZeroDivisionError
    assert 0 == buffers.lent_count
