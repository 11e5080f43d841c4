"""Copies between an engine's paged KV memory and blocks, on a GPU or without one, for those who know no CUDA.

    pages = PagedKv.planes_first(kv_caches)             # where the engine keeps its blocks
    copier = open_copier(pages.device)                  # "cuda:0", or "cpu"
    rows = copier.new_rows(len(block_ids), pages.block_bytes)

    handle = copier.store(pages, block_ids, rows)       # engine -> rows, after what the engine computes now
    handle.wait()                                       # rows can be read

    handle = copier.load(pages, block_ids, rows, holds=[lease])   # rows -> engine; the lease ends with the copy
    handle.record(copier.current_stream())              # what the engine computes from now on sees the blocks

Every copy first waits for an event recorded on the engine's compute stream when it is submitted: the stream given, or
the current one. What it touches stays held until it has really ended, also when it is cancelled or nobody waits.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Protocol, Self

from kvstore.errors import ConfigError, InvalidArgumentError
from kvstore.tiers.device_copies import CopyHandle, CopyLane, CopyOutcome
from kvstore.tiers.device_cpu import CpuLauncher
from kvstore.tiers.device_job import CopyJob, Direction, check_job
from kvstore.tiers.device_memory import CPU
from kvstore.tiers.device_pages import PagedKv

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from kvstore.tiers.base import Bytes2D
    from kvstore.tiers.device_copies import LaneStats, Releasable, Stream, Work

__all__ = ["BlockCopier", "CopyHandle", "CopyOutcome", "DeviceSettings", "PagedKv", "open_copier"]

CLOSE_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSettings:
    """Limits of the copies of one engine process.

    `multiprocessors_max`: streaming multiprocessors that a copy kernel takes at most; the others keep computing.
    `copies_max`: copies under way in each direction, one for each layer of those made by layer.
    `batch_run_bytes_min`: from this length on, contiguous runs between host and GPU go by the copy engines, where the
    driver takes them in batches. `cpu_threads`: threads of one copy between CPU tensors.
    """

    multiprocessors_max: int = 12
    copies_max: int = 1024
    batch_run_bytes_min: int = 32 << 10
    cpu_threads: int = 4

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
                raise ConfigError(f"device setting {item.name} is {value!r}, expected 1 to {2**31 - 1}")


class Launcher(Protocol):
    """What differs between a GPU and the CPU."""

    def current_stream(self) -> Stream:
        """The stream that the engine computes on now."""
        ...

    def prepare(self, job: CopyJob) -> None:
        """All that can fail before anything is begun."""
        ...

    def launch(self, job: CopyJob, stream: Stream) -> Work:
        """Begin a prepared copy, or queue it, behind what `stream` was given so far. Never raises halfway."""
        ...

    def new_rows(self, blocks: int, block_bytes: int) -> Bytes2D:
        """Uninitialised memory for packed blocks that copies reach fast."""
        ...


def open_copier(device: str = CPU, settings: DeviceSettings | None = None) -> BlockCopier:
    """A copier for the memory of one device: "cpu", or a CUDA device such as "cuda:0".

    Raises UnavailableError if CUDA, torch with CUDA, or CuPy is missing, InvalidArgumentError for another device.
    """
    settings = settings or DeviceSettings()
    if device == CPU:
        return BlockCopier(CpuLauncher(settings.cpu_threads), settings)
    if device.startswith("cuda"):
        from kvstore.tiers.device_cuda import open_launcher  # it asks for a GPU

        return BlockCopier(open_launcher(device, settings), settings)
    raise InvalidArgumentError(f"device is {device!r}, expected 'cpu' or 'cuda:<number>'")


class BlockCopier:
    """Stores and loads blocks of one device's memory. Thread-safe. Made by open_copier().

    Loads do not queue behind stores: each direction has a stream (on a GPU) and a thread, which makes the copies on the
    CPU and waits for their end on a GPU.
    """

    def __init__(self, launcher: Launcher, settings: DeviceSettings) -> None:
        self._launcher = launcher
        self._lanes = {
            direction: CopyLane(f"kvstore-device-{direction.value}", settings.copies_max) for direction in Direction
        }

    def current_stream(self) -> Stream:
        """The stream that the engine computes on now; on the CPU the calling thread."""
        return self._launcher.current_stream()

    def new_rows(self, blocks: int, block_bytes: int) -> Bytes2D:
        """Uninitialised host memory [blocks, block_bytes]; page-locked where there is a GPU."""
        return self._launcher.new_rows(blocks, block_bytes)

    def store(
        self,
        pages: PagedKv,
        block_ids: object,
        rows: object,
        *,
        row_ids: object = None,
        layers: range | None = None,
        stream: Stream | None = None,
        holds: Sequence[Releasable] = (),
    ) -> CopyHandle:
        """Copy blocks of the engine into rows: block block_ids[i] into row row_ids[i], or row i.

        `rows` are [n, block_bytes] of host memory (page-locked with a GPU), or of the GPU. `layers` limits the copy to
        some neighbouring layers, for engines that hand over one layer after the other. On success the copier owns
        `holds` and releases them when the copy has ended. Raises InvalidBufferError, InvalidArgumentError, NoSpaceError
        when `copies_max` are under way, UnavailableError or ClosedError; then nothing was begun, and the holds stay the
        caller's.
        """
        job = check_job(Direction.STORE, pages, rows, block_ids, row_ids=row_ids, layers=layers)
        return self._submit([job], stream, holds)[0]

    def load(
        self,
        pages: PagedKv,
        block_ids: object,
        rows: object,
        *,
        row_ids: object = None,
        layers: range | None = None,
        stream: Stream | None = None,
        holds: Sequence[Releasable] = (),
    ) -> CopyHandle:
        """Copy rows into blocks of the engine; otherwise as store()."""
        job = check_job(Direction.LOAD, pages, rows, block_ids, row_ids=row_ids, layers=layers)
        return self._submit([job], stream, holds)[0]

    def load_by_layer(
        self,
        pages: PagedKv,
        block_ids: object,
        rows: object,
        *,
        row_ids: object = None,
        stream: Stream | None = None,
        holds: Sequence[Releasable] = (),
    ) -> tuple[CopyHandle, ...]:
        """As load(), with a launch and a handle for each layer, so that the first can be computed while others load.

        The holds are released when the last layer has ended.
        """
        job = check_job(Direction.LOAD, pages, rows, block_ids, row_ids=row_ids)
        return self._submit([job.of_layer(layer) for layer in job.layers], stream, holds)

    def stats(self) -> dict[Direction, LaneStats]:
        """What was copied, cancelled, lost and refused in each direction."""
        return {direction: lane.stats() for direction, lane in self._lanes.items()}

    def close(self, timeout_seconds: float = CLOSE_SECONDS) -> bool:
        """Take no more copies and wait for those under way; false if some have not ended in time. Idempotent."""
        closed = [lane.close(timeout_seconds) for lane in self._lanes.values()]
        return all(closed)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _submit(
        self, jobs: Sequence[CopyJob], stream: Stream | None, holds: Sequence[Releasable]
    ) -> tuple[CopyHandle, ...]:
        compute = stream or self._launcher.current_stream()
        for job in jobs:
            self._launcher.prepare(job)
        launches = [partial(self._launcher.launch, job, compute) for job in jobs]
        return self._lanes[jobs[0].direction].submit(launches, [job.bytes for job in jobs], holds)
