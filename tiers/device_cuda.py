"""Copies by a GPU: one kernel launch for all layers and blocks, or the copy engines where runs are long.

Not yet run on a GPU. CudaLauncher decides everything and knows no library; what it needs of CUDA is GpuRuntime, which
CudaRuntime provides through torch (streams, events, memory), CuPy (the kernels) and the driver (batched copies).
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvstore.errors import InvalidArgumentError, InvalidBufferError, UnavailableError
from kvstore.tiers.device_copies import CopyNotBegunError
from kvstore.tiers.device_driver import CudaDriver
from kvstore.tiers.device_job import CopyJob, Direction
from kvstore.tiers.device_memory import CPU

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvstore.tiers.base import Bytes2D
    from kvstore.tiers.device import DeviceSettings
    from kvstore.tiers.device_copies import Event, Stream, Work
    from kvstore.tiers.device_driver import Argument
    from kvstore.tiers.device_memory import PackedRows
    from kvstore.tiers.device_pages import PagedKv

    Addresses = NDArray[np.uint64]

# What copy_kernels.cuh is written for: one thread block of this size on each multiprocessor.
KERNEL_THREADS = 1024
WARP_THREADS = 32
KERNELS = {Direction.STORE: "kvstore_gather", Direction.LOAD: "kvstore_scatter"}
# A batch of copies names each with three numbers; larger ones are handed over in several.
BATCH_COPIES_MAX = 8192
_CSRC = Path(__file__).with_name("csrc")


@dataclass(frozen=True, slots=True)
class OnDevice:
    """An array in GPU memory, kept by `owner`."""

    owner: object
    address: int


class GpuRuntime(Protocol):
    """What the launcher needs of CUDA. Streams are given by the caller; none of these blocks on their work."""

    @property
    def multiprocessors(self) -> int:
        """Streaming multiprocessors of the device."""
        ...

    @property
    def has_batches(self) -> bool:
        """Whether copy_batch() is there."""
        ...

    def current_stream(self) -> Stream:
        """The stream on which this thread computes."""
        ...

    def new_stream(self) -> Stream:
        """A stream of its own."""
        ...

    def end_event(self, stream: Stream) -> Event:
        """An event behind all work of the stream, on which a thread can block without spinning."""
        ...

    def upload(self, array: NDArray[Any], stream: Stream) -> OnDevice:
        """A copy of a host array in GPU memory, there when the stream gets to it; the array may change at once."""
        ...

    def launch(self, kernel: str, grid: int, arguments: Sequence[Argument], stream: Stream) -> None:
        """Launch `grid` blocks of KERNEL_THREADS threads of a kernel of csrc/copy_kernels.cuh."""
        ...

    def compile(self) -> None:
        """Compile the kernels if they are not yet; launch() needs them."""
        ...

    def copy_batch(self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: Stream) -> None:
        """Copies between host and GPU by the copy engines."""
        ...

    def is_pinned(self, address: int) -> bool:
        """Whether the host memory there is page-locked, so that the GPU reaches it."""
        ...

    def new_rows(self, blocks: int, block_bytes: int) -> Bytes2D:
        """Uninitialised page-locked host memory."""
        ...


def open_launcher(device: str, settings: DeviceSettings) -> CudaLauncher:
    """The launcher of a CUDA device. Raises UnavailableError with what is missing."""
    return CudaLauncher(device, settings, CudaRuntime(device))


class CudaLauncher:
    """Launches copies on a stream for each direction; a lane makes one launch at a time. Thread-safe.

    Tables of pieces are uploaded once for each PagedKv and forgotten with it.
    """

    def __init__(self, device: str, settings: DeviceSettings, runtime: GpuRuntime) -> None:
        self._device = device
        self._settings = settings
        self._runtime = runtime
        self._streams = {direction: runtime.new_stream() for direction in Direction}
        self._tables: weakref.WeakKeyDictionary[PagedKv, OnDevice] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def current_stream(self) -> Stream:
        """The stream on which the calling thread computes."""
        return self._runtime.current_stream()

    def new_rows(self, blocks: int, block_bytes: int) -> Bytes2D:
        """Page-locked host memory."""
        return self._runtime.new_rows(blocks, block_bytes)

    def prepare(self, job: CopyJob) -> None:
        """Check where both sides lie, and have kernels and table at hand."""
        if job.pages.device != self._device:
            raise InvalidBufferError(f"the engine's memory lies on {job.pages.device}, expected {self._device}")
        self._check_rows(job.rows)
        if not self._goes_by_batch(job):
            self._runtime.compile()
            self._table(job.pages)

    def launch(self, job: CopyJob, stream: Stream) -> Work:
        """Put a copy on the stream of its direction, behind what `stream` was given so far.

        Never raises: what fails in front of the copy (GPU memory for the block numbers, say) is a failed copy; what
        fails from there on leaves open what the device still does, so the copy is lost.
        """
        own = self._streams[job.direction]
        try:
            own.wait_event(stream.record_event())
            ids = None if self._goes_by_batch(job) else self._upload_ids(job, own)
        except RuntimeError as error:
            return _Failed(CopyNotBegunError(f"{type(error).__name__}: {error}"), job)
        try:
            if ids is None:
                self._enqueue_batch(job, own)
            else:
                self._enqueue_kernel(job, ids, own)
            return _Launched(self._runtime.end_event(own), (job, ids))
        except (RuntimeError, UnavailableError) as error:
            return _Failed(error, (job, ids))

    def _check_rows(self, rows: PackedRows) -> None:
        place = rows.memory.device
        if place == self._device or rows.count == 0:
            return
        if place != CPU:
            raise InvalidBufferError(f"rows lie on {place}, expected {self._device} or page-locked host memory")
        last_row = rows.address + (rows.count - 1) * rows.stride
        if not (self._runtime.is_pinned(rows.address) and self._runtime.is_pinned(last_row)):
            raise InvalidBufferError(
                "rows lie in ordinary host memory, which a GPU cannot copy from behind the program's back; take them "
                "from BlockCopier.new_rows(), or page-lock them"
            )

    def _goes_by_batch(self, job: CopyJob) -> bool:
        return (
            job.rows.memory.device == CPU
            and self._runtime.has_batches
            and job.pages.run_bytes_min >= self._settings.batch_run_bytes_min
        )

    def _table(self, pages: PagedKv) -> OnDevice:
        with self._lock:
            table = self._tables.get(pages)
            if table is None:
                stream = self._runtime.new_stream()
                table = self._runtime.upload(pages.table.view(np.uint8), stream)
                # Both directions' streams use it from now on without waiting for this one.
                self._runtime.end_event(stream).synchronize()
                self._tables[pages] = table
            return table

    def _upload_ids(self, job: CopyJob, stream: Stream) -> OnDevice:
        return self._runtime.upload(np.concatenate((job.block_ids, job.row_ids)), stream)

    def _enqueue_kernel(self, job: CopyJob, ids: OnDevice, stream: Stream) -> None:
        if job.tiles == 0:
            return
        table = self._table(job.pages)
        rows = job.table_rows
        count = len(job.block_ids)
        arguments = (
            ctypes.c_uint64(table.address + rows.start * job.pages.table.itemsize),
            ctypes.c_uint32(rows.stop - rows.start),
            ctypes.c_uint64(ids.address),
            ctypes.c_uint64(ids.address + count * job.block_ids.itemsize),
            ctypes.c_uint32(count),
            ctypes.c_uint64(job.rows.address),
            ctypes.c_int64(job.rows.stride),
        )
        self._runtime.launch(KERNELS[job.direction], self._grid(job.tiles), arguments, stream)

    def _grid(self, tiles: int) -> int:
        """As many thread blocks as multiprocessors may be taken, but none without work."""
        useful = -(-tiles // (KERNEL_THREADS // WARP_THREADS))
        return min(self._settings.multiprocessors_max, self._runtime.multiprocessors, useful)

    def _enqueue_batch(self, job: CopyJob, stream: Stream) -> None:
        paged, packed, sizes = contiguous_runs(job)
        targets, sources = (packed, paged) if job.direction is Direction.STORE else (paged, packed)
        for first in range(0, len(sizes), BATCH_COPIES_MAX):
            some = slice(first, first + BATCH_COPIES_MAX)
            self._runtime.copy_batch(targets[some], sources[some], sizes[some], stream)


def contiguous_runs(job: CopyJob) -> tuple[Addresses, Addresses, Addresses]:
    """Every contiguous run of a job: its address in the engine, in the rows, and its bytes. O(runs), vectorised."""
    paged: list[NDArray[np.int64]] = []
    packed: list[NDArray[np.int64]] = []
    sizes: list[NDArray[np.int64]] = []
    packed_blocks = job.rows.address + job.row_ids * job.rows.stride
    for piece in job.pages.table[job.table_rows]:
        row = np.arange(int(piece["rows"]), dtype=np.int64)
        blocks = int(piece["address"]) + job.block_ids * int(piece["block_stride"])
        paged.append(np.add.outer(blocks, row * int(piece["row_stride"])).ravel())
        offsets = int(piece["packed_offset"]) + row * int(piece["row_bytes"])
        packed.append(np.add.outer(packed_blocks, offsets).ravel())
        sizes.append(np.full(len(blocks) * len(row), int(piece["row_bytes"]), dtype=np.int64))
    return _joined(paged), _joined(packed), _joined(sizes)


def _joined(arrays: Sequence[NDArray[np.int64]]) -> Addresses:
    return np.concatenate(arrays).astype(np.uint64)


@dataclass(frozen=True, slots=True)
class _Launched:
    """A copy on its way; `keeps` is everything it touches."""

    event: Event
    keeps: object

    @property
    def is_launched(self) -> bool:
        return True

    @property
    def end(self) -> Event | None:
        return self.event

    def wait_ready(self) -> None:
        return

    def run(self) -> None:
        self.event.synchronize()


@dataclass(frozen=True, slots=True)
class _Failed:
    """A launch that failed halfway; `keeps` stays held for good."""

    error: Exception
    keeps: object

    @property
    def is_launched(self) -> bool:
        return True

    @property
    def end(self) -> Event | None:
        raise UnavailableError(f"the copy failed, and its bytes are undefined: {self.error}")

    def wait_ready(self) -> None:
        return

    def run(self) -> None:
        raise self.error


class CudaRuntime:
    """GpuRuntime by torch, CuPy and the driver, all of them imported when the first launcher is opened."""

    def __init__(self, device: str) -> None:
        self._torch = import_cuda_torch(device)
        self._cupy = import_cupy()
        self._device = self._torch.device(device)
        if self._device.index is None or self._device.index >= self._torch.cuda.device_count():
            count = self._torch.cuda.device_count()
            raise InvalidArgumentError(f"device is {device!r}, expected cuda:0 to cuda:{count - 1}")
        self._driver = CudaDriver()
        self._module: Any = None
        self._functions: dict[str, Any] = {}
        self._lock = threading.Lock()

    @property
    def multiprocessors(self) -> int:
        """Streaming multiprocessors of the device."""
        return int(self._torch.cuda.get_device_properties(self._device).multi_processor_count)

    @property
    def has_batches(self) -> bool:
        """Whether the driver has cuMemcpyBatchAsync (CUDA 12.8 and newer)."""
        return self._driver.has_batches

    def current_stream(self) -> Stream:
        """torch's current stream of the device."""
        stream: Stream = self._torch.cuda.current_stream(self._device)
        return stream

    def new_stream(self) -> Stream:
        """A torch stream."""
        stream: Stream = self._torch.cuda.Stream(self._device)
        return stream

    def end_event(self, stream: Stream) -> Event:
        """A blocking event, so that the lane's thread sleeps."""
        event = self._torch.cuda.Event(blocking=True)
        event.record(stream)
        recorded: Event = event
        return recorded

    def upload(self, array: NDArray[Any], stream: Stream) -> OnDevice:
        """By way of page-locked memory, which torch keeps until the stream has read it."""
        with self._torch.cuda.stream(stream):
            # A copy that can be written: torch warns of others.
            pinned = self._torch.from_numpy(array.copy()).pin_memory()
            on_device = pinned.to(self._device, non_blocking=True)
        return OnDevice(on_device, on_device.data_ptr())

    def compile(self) -> None:
        """By NVRTC for this device; CuPy keeps the result on disk."""
        with self._lock, self._cupy.cuda.Device(self._device.index):
            if self._module is None:
                module = self._cupy.RawModule(code=kernel_source(), options=("-std=c++17",))
                self._functions = {name: module.get_function(name).kernel for name in KERNELS.values()}
                self._module = module

    def launch(self, kernel: str, grid: int, arguments: Sequence[Argument], stream: Stream) -> None:
        """Through the driver, on exactly the given stream."""
        with self._torch.cuda.device(self._device):
            self._driver.launch(self._functions[kernel].ptr, grid, KERNEL_THREADS, arguments, _address_of(stream))

    def copy_batch(self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: Stream) -> None:
        """By cuMemcpyBatchAsync."""
        with self._torch.cuda.device(self._device):
            self._driver.copy_batch(targets, sources, sizes, _address_of(stream))

    def is_pinned(self, address: int) -> bool:
        """Asks CUDA, so that memory registered by others counts too."""
        runtime = self._cupy.cuda.runtime
        with self._cupy.cuda.Device(self._device.index):
            return bool(runtime.pointerGetAttributes(address).type == runtime.memoryTypeHost)

    def new_rows(self, blocks: int, block_bytes: int) -> Bytes2D:
        """The memory is torch's; the array keeps it."""
        rows: Bytes2D = self._torch.empty((blocks, block_bytes), dtype=self._torch.uint8, pin_memory=True).numpy()
        return rows


def _address_of(stream: Any) -> int:  # noqa: ANN401  # a torch stream
    return int(stream.cuda_stream)


def kernel_source() -> str:
    """The kernels as one text without includes, for compilers that have no folders."""
    piece = (_CSRC / "copy_piece.cuh").read_text(encoding="utf-8")
    return (_CSRC / "copy_kernels.cuh").read_text(encoding="utf-8").replace('#include "copy_piece.cuh"\n', piece)


def import_cuda_torch(device: str) -> Any:  # noqa: ANN401  # torch is no dependency of the core
    """torch, if it sees a GPU; else UnavailableError that says why `device` cannot be used."""
    try:
        import torch
    except ImportError as err:
        raise UnavailableError(f"copies on {device} need torch, which is not installed") from err
    if not torch.cuda.is_available():
        raise UnavailableError(
            f"copies on {device} need CUDA, and torch {torch.__version__} sees no GPU; use device 'cpu' for CPU tensors"
        )
    return torch


def import_cupy() -> Any:  # noqa: ANN401  # CuPy is no dependency of the core
    """CuPy, or UnavailableError that says how to get it."""
    try:
        import cupy
    except ImportError as err:
        raise UnavailableError(f"copies on a GPU need CuPy ({err}); install prefix-kvstore[cuda]") from err
    return cupy
