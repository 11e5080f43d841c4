from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from kvstore.errors import NoSpaceError
from kvstore.transport.workers import BufferPool, Workers


def test_a_full_workers_refuses_at_once():
    async def scenario() -> None:
        workers = Workers("test", threads=1, calls=2)
        go = threading.Event()
        calls = [asyncio.ensure_future(workers.run(go.wait)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(NoSpaceError, match="2 test calls"):
            await workers.run(go.wait)
        go.set()
        assert await asyncio.gather(*calls) == [True, True]
        assert await workers.run(lambda: 7) == 7
        workers.close()

    asyncio.run(scenario())


def test_a_place_is_free_again_after_a_failure():
    async def scenario() -> None:
        workers = Workers("test", threads=1, calls=1)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                await workers.run(lambda: 1 // 0)
        workers.close()

    asyncio.run(scenario())


def test_a_result_nobody_waits_for_is_undone():
    async def scenario() -> list[int]:
        workers = Workers("test", threads=1, calls=1)
        started, go = threading.Event(), threading.Event()
        undone: list[int] = []

        def acquire() -> int:
            started.set()
            go.wait()
            return 7

        call = asyncio.ensure_future(workers.run(acquire, undo=undone.append))
        await asyncio.to_thread(started.wait)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        go.set()
        workers.close()
        return undone

    assert asyncio.run(scenario()) == [7]


def test_a_call_cancelled_before_it_began_never_runs():
    async def scenario() -> tuple[list[int], list[int]]:
        workers = Workers("test", threads=1, calls=2)
        go = threading.Event()
        ran: list[int] = []
        undone: list[int] = []
        first = asyncio.ensure_future(workers.run(go.wait))
        second = asyncio.ensure_future(workers.run(lambda: ran.append(1), undo=undone.append))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        go.set()
        await first
        workers.close()
        return ran, undone

    assert asyncio.run(scenario()) == ([], [])


def test_buffers_are_reused_and_large_ones_are_not_kept():
    pool = BufferPool(64)
    first = pool.take(10)
    assert first.size == 64
    pool.give_back(first)
    assert pool.take(64) is first
    large = pool.take(65)
    assert large.size == 65
    pool.give_back(large)
    assert pool.take(65) is not large


def test_a_buffer_in_use_is_never_handed_out_again():
    pool = BufferPool(64)
    buffers = [pool.take(64) for _ in range(8)]
    for buffer in buffers:
        pool.give_back(buffer)
    again = [pool.take(64) for _ in range(8)]
    assert not any(np.shares_memory(a, b) for index, a in enumerate(again) for b in again[:index])
