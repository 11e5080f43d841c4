"""Page-aligned buffers for direct I/O, of a bounded number."""

from __future__ import annotations

import mmap
import queue
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from kvstore.tiers.base import Bytes1D

PAGE_BYTES = 4096
_HUGE_PAGE_BYTES = 2 << 20


def whole_pages(size_bytes: int) -> int:
    """`size_bytes` rounded up to whole pages of 4 KiB."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def aligned_bytes(size_bytes: int) -> Bytes1D:
    """Zeroed, page-aligned memory; in huge pages where it is large and the system gives them.

    Direct I/O finds and holds each page by itself, which for 4 KiB pages is most of what it costs the CPU.
    """
    memory = mmap.mmap(-1, whole_pages(size_bytes))
    if size_bytes >= _HUGE_PAGE_BYTES:
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)[:size_bytes]


def address_of(memory: NDArray[np.uint8]) -> int:
    """Where the memory of an array begins."""
    address: int = memory.__array_interface__["data"][0]
    return address


def page_aligned(memory: NDArray[np.uint8]) -> bool:
    """Whether rows or bytes begin at pages and are whole pages long, so that direct I/O may use them in place."""
    address = address_of(memory)
    width, step = (memory.shape[-1], memory.strides[0]) if memory.ndim > 1 else (len(memory), 0)
    return not (address | width | step) % PAGE_BYTES


class AlignedBuffers:
    """Up to `count` buffers at a time; each grows to the largest size it was asked for. Thread-safe."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._idle: queue.LifoQueue[Bytes1D] = queue.LifoQueue()
        for _ in range(count):
            self._idle.put(np.zeros(0, dtype=np.uint8))

    @property
    def lent_count(self) -> int:
        """Buffers in use now."""
        return self._count - self._idle.qsize()

    @contextmanager
    def lend(self, size_bytes: int) -> Iterator[Bytes1D]:
        """A buffer of `size_bytes` with undefined content; waits while all are in use."""
        buffer = self._idle.get()
        try:
            if len(buffer) < size_bytes:
                buffer = aligned_bytes(size_bytes)
            yield buffer[:size_bytes]
        finally:
            self._idle.put(buffer)
