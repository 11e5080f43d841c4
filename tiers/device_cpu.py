"""Copies between an engine's paged KV memory and packed blocks on the CPU, by the native gather and scatter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvstore.errors import InvalidBufferError
from kvstore.tiers._core import _copy
from kvstore.tiers.device_job import CopyJob, Direction, check_job
from kvstore.tiers.device_memory import CPU

if TYPE_CHECKING:
    from kvstore.tiers.base import Bytes2D
    from kvstore.tiers.device_copies import Event, Stream, Work
    from kvstore.tiers.device_memory import PackedRows
    from kvstore.tiers.device_pages import PagedKv

_COPIES = {Direction.STORE: _copy.gather, Direction.LOAD: _copy.scatter}


def gather_blocks(pages: PagedKv, block_ids: object, rows: object, *, threads: int = 1) -> None:
    """Copy blocks of an engine on the CPU into `rows` [blocks, block_bytes], here and now.

    Up to `threads` threads work on it, this one included; the GIL is released. Raises InvalidBufferError or
    InvalidArgumentError before anything is written.
    """
    _copy_now(Direction.STORE, pages, block_ids, rows, threads)


def scatter_blocks(pages: PagedKv, block_ids: object, rows: object, *, threads: int = 1) -> None:
    """Copy `rows` [blocks, block_bytes] into blocks of an engine on the CPU; otherwise as gather_blocks()."""
    _copy_now(Direction.LOAD, pages, block_ids, rows, threads)


def _copy_now(direction: Direction, pages: PagedKv, block_ids: object, rows: object, threads: int) -> None:
    job = check_job(direction, pages, rows, block_ids)
    _require_cpu(pages, job.rows)
    _run(job, threads)


class CpuLauncher:
    """Makes copies on the thread of their lane, helped by up to `threads` - 1 others."""

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def current_stream(self) -> Stream:
        """The calling thread, whose work so far is done already."""
        return CallerThread()

    def prepare(self, job: CopyJob) -> None:
        """Check that both sides lie where this launcher reaches them."""
        _require_cpu(job.pages, job.rows)

    def launch(self, job: CopyJob, stream: Stream) -> Work:
        """A copy that begins after what `stream` was given so far."""
        return _CpuWork(job, stream.record_event(), self._threads)

    def new_rows(self, blocks: int, block_bytes: int) -> Bytes2D:
        """Uninitialised memory for packed blocks."""
        return np.empty((blocks, block_bytes), dtype=np.uint8)


class CallerThread:
    """The calling thread as a stream: its work is done when it goes on, and to wait is to block."""

    def record_event(self) -> Event:
        """An event that has come already."""
        return _Past()

    def wait_event(self, event: Event) -> None:
        """Block until the event comes."""
        event.synchronize()


class _Past:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


@dataclass(frozen=True, slots=True)
class _CpuWork:
    job: CopyJob
    after: Event
    threads: int

    @property
    def is_launched(self) -> bool:
        return False

    @property
    def end(self) -> Event | None:
        return None

    def wait_ready(self) -> None:
        self.after.synchronize()

    def run(self) -> None:
        _run(self.job, self.threads)


def _run(job: CopyJob, threads: int) -> None:
    rows = job.pages.table[job.table_rows]
    pieces = rows.view(np.uint8).reshape(len(rows), _copy.PIECE_BYTES)
    _COPIES[job.direction](pieces, job.block_ids, job.row_ids, job.rows.address, job.rows.stride, threads)


def _require_cpu(pages: PagedKv, rows: PackedRows) -> None:
    if pages.device != CPU or rows.memory.device != CPU:
        raise InvalidBufferError(
            f"the engine's memory lies on {pages.device} and rows on {rows.memory.device}, expected both on the CPU"
        )
