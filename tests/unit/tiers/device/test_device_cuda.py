"""What the GPU's launcher decides and hands to the driver, without a GPU.

The launcher, its job tables, the marshalling of driver calls and the kernels are the real ones. Streams are threads,
GPU memory is host memory, and the driver is driver_on_host.cpp, which runs the kernels' own text.
"""

from __future__ import annotations

import builtins
import ctypes
import gc
import logging
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from kvstore.errors import InvalidBufferError, UnavailableError
from kvstore.testing.patience import ANSWER_SECONDS
from kvstore.tiers.device import BlockCopier, CopyOutcome, DeviceSettings, PagedKv, open_copier
from kvstore.tiers.device_cuda import KERNEL_THREADS, CudaLauncher, OnDevice, contiguous_runs
from kvstore.tiers.device_driver import CudaDriver
from kvstore.tiers.device_job import Direction, check_job

BLOCKS = 8
IDS = [5, 1, 2]
STREAM = 77


class HostRuntime:
    """GpuRuntime on threads and host memory; `pinned_below` is how far the GPU reaches."""

    def __init__(self, driver, kernels, streams):
        self._driver, self._kernels, self._streams = driver, kernels, streams
        self.multiprocessors = 132
        self.has_batches = True
        self.pinned_below = 2**64
        self.compute = streams()
        self.grids = []
        self.batches = []
        self.uploads = 0
        self.compiled = False
        self.upload_error = None

    def current_stream(self):
        return self.compute

    def new_stream(self):
        return self._streams()

    def end_event(self, stream):
        return stream.record_event()

    def upload(self, array, stream):
        if self.upload_error:
            raise self.upload_error
        self.uploads += 1
        copied, source = np.zeros_like(array), array.copy()
        stream.give(lambda: np.copyto(copied, source))
        return OnDevice(copied, copied.ctypes.data)

    def compile(self):
        self.compiled = True

    def launch(self, kernel, grid, arguments, stream):
        assert self.compiled
        self.grids.append(grid)
        stream.give(lambda: self._driver.launch(self._kernels[kernel], grid, KERNEL_THREADS, arguments, STREAM))

    def copy_batch(self, targets, sources, sizes, stream):
        self.batches.append(len(sizes))
        stream.give(lambda: self._driver.copy_batch(targets, sources, sizes, STREAM))

    def is_pinned(self, address):
        return address < self.pinned_below

    def new_rows(self, blocks, block_bytes):
        return np.empty((blocks, block_bytes), dtype=np.uint8)


@pytest.fixture(scope="module")
def library(built):
    flags = ["-O1", "-shared", "-fPIC"]
    return str(built("driver_on_host.cpp", "libdriver.so", *flags, *toolkit_headers()))


def toolkit_headers():
    """Where cuda.h is, if it is: its declarations then check those of the stand-in."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return []
    folders = [Path("/usr/local/cuda/include"), Path(nvcc).resolve().parent.parent / "include"]
    return [f"-I{folder}" for folder in folders if (folder / "cuda.h").exists()][:1]


@pytest.fixture
def driver(library):
    return CudaDriver(library)


@pytest.fixture
def kernels(library):
    handle = ctypes.CDLL(library).HostKernel
    handle.restype = ctypes.c_void_p
    return {"kvstore_gather": handle(0), "kvstore_scatter": handle(1)}


@pytest.fixture
def runtime(driver, kernels, streams):
    return HostRuntime(driver, kernels, streams)


@pytest.fixture
def layers(random_tensor):
    return [(random_tensor(BLOCKS, 16, 3, 4), random_tensor(BLOCKS, 7), random_tensor(BLOCKS, 5000)) for _ in range(3)]


@pytest.fixture
def pages(layers):
    return PagedKv.of_pieces(layers)


def copier_of(runtime, **settings):
    settings = DeviceSettings(**settings)
    return BlockCopier(CudaLauncher("cpu", settings, runtime), settings)


KERNEL, BATCH = 1 << 30, 1


@pytest.mark.parametrize("batch_run_bytes_min", [KERNEL, BATCH])
def test_stores_and_loads_are_those_of_the_model(batch_run_bytes_min, runtime, pages, layers, packed):
    others = [i for i in range(BLOCKS) if i not in IDS]
    before = packed(layers, others)
    with copier_of(runtime, batch_run_bytes_min=batch_run_bytes_min) as copier:
        rows = np.zeros((6, pages.block_bytes + 3), dtype=np.uint8)[:, : pages.block_bytes]
        handle = copier.store(pages, IDS, rows, row_ids=[4, 0, 2])
        assert CopyOutcome.COPIED is handle.wait(ANSWER_SECONDS)
        assert np.array_equal(packed(layers, IDS), rows[[4, 0, 2]])
        assert not rows[[1, 3, 5]].any()
        fresh = np.random.default_rng(1).integers(0, 256, (3, pages.block_bytes), dtype=np.uint8)
        assert CopyOutcome.COPIED is copier.load(pages, IDS, fresh).wait(ANSWER_SECONDS)
        assert np.array_equal(fresh, packed(layers, IDS))
        assert np.array_equal(before, packed(layers, others))
    assert (batch_run_bytes_min == BATCH) == bool(runtime.batches)
    assert (batch_run_bytes_min == KERNEL) == bool(runtime.grids)


@pytest.mark.parametrize("batch_run_bytes_min", [KERNEL, BATCH])
def test_loads_by_layer_are_those_of_the_model(batch_run_bytes_min, runtime, pages, layers, packed):
    rows = np.random.default_rng(1).integers(0, 256, (3, pages.block_bytes), dtype=np.uint8)
    with copier_of(runtime, batch_run_bytes_min=batch_run_bytes_min) as copier:
        handles = copier.load_by_layer(pages, IDS, rows)
        handles[0].record(runtime.compute)
        runtime.compute.record_event().synchronize()
        assert np.array_equal(rows[:, : pages.layer_bytes(range(1))], packed(layers[:1], IDS))
        assert {CopyOutcome.COPIED} == {handle.wait(ANSWER_SECONDS) for handle in handles}
        assert np.array_equal(rows, packed(layers, IDS))


@pytest.mark.parametrize("direction", Direction)
def test_each_copy_waits_for_the_compute_stream(direction, runtime, pages, layers, packed):
    delayed = threading.Event()
    rows = np.full((3, pages.block_bytes), 0xAB, dtype=np.uint8)
    before = packed(layers, IDS)
    with copier_of(runtime) as copier:
        runtime.compute.give(lambda: delayed.wait(ANSWER_SECONDS))
        runtime.compute.give(lambda: [tensor.fill_(2.5) for layer in layers for tensor in layer])
        copy = copier.store if direction is Direction.STORE else copier.load
        handle = copy(pages, IDS, rows)
        assert not handle.cancel()
        assert (rows == 0xAB).all()
        assert np.array_equal(before, packed(layers, IDS))
        delayed.set()
        assert CopyOutcome.COPIED is handle.wait(ANSWER_SECONDS)
        assert np.array_equal(rows, packed(layers, IDS))


def test_one_launch_copies_all_layers_and_blocks_and_takes_no_more_multiprocessors_than_allowed(runtime, random_tensor):
    pages = PagedKv.latent([random_tensor(BLOCKS, 1 << 16) for _ in range(4)])
    rows = np.zeros((BLOCKS, pages.block_bytes), dtype=np.uint8)
    with copier_of(runtime, multiprocessors_max=3, batch_run_bytes_min=KERNEL) as copier:
        copier.store(pages, range(BLOCKS), rows).wait(ANSWER_SECONDS)
        copier.store(pages, [0], rows[:1], layers=range(1)).wait(ANSWER_SECONDS)
    assert [3, 2] == runtime.grids
    runtime.multiprocessors = 2
    with copier_of(runtime, multiprocessors_max=3, batch_run_bytes_min=KERNEL) as copier:
        copier.store(pages, range(BLOCKS), rows).wait(ANSWER_SECONDS)
    assert 2 == runtime.grids[-1]


def test_large_batches_are_handed_over_in_several(runtime, random_tensor, packed):
    tensor = random_tensor(3000, 4, 2)
    layers = [(tensor[:, :, :1],)]
    pages = PagedKv.of_pieces(layers)
    rows = np.zeros((3000, pages.block_bytes), dtype=np.uint8)
    with copier_of(runtime, batch_run_bytes_min=1) as copier:
        copier.store(pages, range(3000), rows).wait(ANSWER_SECONDS)
    assert [8192, 3808] == runtime.batches
    assert np.array_equal(packed(layers, range(3000)), rows)


def test_short_runs_go_by_kernel_and_so_does_everything_without_batches(runtime, pages):
    rows = np.zeros((3, pages.block_bytes), dtype=np.uint8)
    with copier_of(runtime, batch_run_bytes_min=pages.run_bytes_min + 1) as copier:
        copier.store(pages, IDS, rows).wait(ANSWER_SECONDS)
    runtime.has_batches = False
    with copier_of(runtime, batch_run_bytes_min=1) as copier:
        copier.store(pages, IDS, rows).wait(ANSWER_SECONDS)
    assert (2, 0) == (len(runtime.grids), len(runtime.batches))


def test_the_table_of_pieces_is_uploaded_once_and_forgotten_with_them(runtime, layers):
    pages = PagedKv.of_pieces(layers)
    rows = np.zeros((3, pages.block_bytes), dtype=np.uint8)
    launcher = CudaLauncher("cpu", DeviceSettings(batch_run_bytes_min=KERNEL), runtime)
    with BlockCopier(launcher, DeviceSettings()) as copier:
        for _ in range(3):
            copier.store(pages, IDS, rows).wait(ANSWER_SECONDS)
            copier.load(pages, IDS, rows).wait(ANSWER_SECONDS)
    assert 1 + 6 == runtime.uploads
    del pages
    gc.collect()
    assert 0 == len(launcher._tables)


def test_no_blocks_are_no_launch(runtime, pages):
    with copier_of(runtime, batch_run_bytes_min=KERNEL) as copier:
        handle = copier.store(pages, [], np.zeros((0, pages.block_bytes), dtype=np.uint8))
        assert CopyOutcome.COPIED is handle.wait(ANSWER_SECONDS)
    assert [] == runtime.grids


def test_ordinary_host_memory_is_refused(runtime, pages):
    settings = DeviceSettings()
    launcher = CudaLauncher("cuda:0", settings, runtime)
    on_gpu = PagedKv(pages.layers, pages.blocks, "cuda:0", pages.block_bytes, pages.table)
    rows = np.zeros((3, pages.block_bytes), dtype=np.uint8)
    with BlockCopier(launcher, settings) as copier:
        for runtime.pinned_below in (0, rows[2].ctypes.data):
            with pytest.raises(InvalidBufferError, match="ordinary host memory"):
                copier.store(on_gpu, IDS, rows)
        with pytest.raises(InvalidBufferError, match="engine's memory lies on cpu, expected cuda:0"):
            copier.store(pages, IDS, rows)


def test_no_memory_for_the_block_numbers_is_a_failed_copy_that_lets_go(runtime, pages, caplog):
    released = []
    hold = type("Hold", (), {"release": lambda self: released.append(1)})()
    rows = np.zeros((3, pages.block_bytes), dtype=np.uint8)
    with caplog.at_level(logging.CRITICAL, "kvstore"), copier_of(runtime) as copier:
        copier.store(pages, IDS, rows).wait(ANSWER_SECONDS)
        runtime.upload_error = RuntimeError("CUDA out of memory")
        handle = copier.store(pages, IDS, rows, holds=[hold])
        assert CopyOutcome.FAILED is handle.wait(ANSWER_SECONDS)
        with pytest.raises(UnavailableError, match="the copy is failed and its bytes are undefined"):
            handle.record(runtime.compute)
        runtime.upload_error = None
        assert CopyOutcome.COPIED is copier.store(pages, IDS, rows, holds=[hold]).wait(ANSWER_SECONDS)
    assert [1, 1] == released


def test_a_launch_that_fails_is_a_lost_copy_that_holds_for_good(runtime, pages, caplog):
    released = []
    hold = type("Hold", (), {"release": lambda self: released.append(1)})()

    def fail(*arguments):
        raise UnavailableError("cuLaunchKernel failed with CUDA error 700")

    runtime.launch = fail
    rows = np.zeros((3, pages.block_bytes), dtype=np.uint8)
    with caplog.at_level(logging.CRITICAL, "kvstore"), copier_of(runtime, batch_run_bytes_min=KERNEL) as copier:
        handle = copier.store(pages, IDS, rows, holds=[hold])
        assert CopyOutcome.LOST is handle.wait(ANSWER_SECONDS)
        with pytest.raises(UnavailableError, match="undefined: cuLaunchKernel failed with CUDA error 700"):
            handle.record(runtime.compute)
    assert [] == released


def test_contiguous_runs_cover_a_job_exactly(pages):
    rows = np.zeros((5, pages.block_bytes), dtype=np.uint8)
    job = check_job(Direction.STORE, pages, rows, IDS, row_ids=[4, 0, 2], layers=range(1, 3))
    paged, inside, sizes = contiguous_runs(job)
    assert job.bytes == sizes.sum()
    for address, place, size in zip(paged.tolist(), inside.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(place, address, size)
    expected = np.zeros_like(rows)
    with open_copier() as copier:
        copier.store(pages, IDS, expected, row_ids=[4, 0, 2], layers=range(1, 3)).wait(ANSWER_SECONDS)
    assert np.array_equal(expected, rows)


def test_errors_of_the_driver_name_the_call(driver, library):
    loaded = ctypes.CDLL(library)
    error = ctypes.c_int.in_dll(loaded, "next_error")
    some = np.ones(1, dtype=np.uint64)
    calls = {
        "cuLaunchKernel": lambda: driver.launch(1, 1, 32, (ctypes.c_uint32(1),), STREAM),
        "cuMemcpyBatchAsync_v2": lambda: driver.copy_batch(some, some, some, STREAM),
        "cuMemGetAddressRange": lambda: driver.allocation_base(5000),
    }
    for name, call in calls.items():
        error.value = 700
        with pytest.raises(UnavailableError, match=f"{name} failed with CUDA error 700"):
            call()
    assert 4096 == driver.allocation_base(5000)


def test_copies_go_to_the_stream_that_is_named(driver, kernels, library):
    last = ctypes.c_void_p.in_dll(ctypes.CDLL(library), "last_stream")
    source, target = np.arange(9, dtype=np.uint8), np.zeros(9, dtype=np.uint8)
    addresses = [np.array([array.ctypes.data], dtype=np.uint64) for array in (target, source)]
    driver.copy_batch(*addresses, np.array([9], dtype=np.uint64), 2**40 + 1)
    assert 2**40 + 1 == last.value
    assert np.array_equal(source, target)


def test_a_driver_that_is_not_there_is_said_so():
    with pytest.raises(UnavailableError, match=r"the CUDA driver cannot be loaded: libnothing\.so\.1"):
        CudaDriver("libnothing.so.1")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_copier_for_a_gpu_says_that_there_is_none():
    with pytest.raises(UnavailableError, match=r"copies on cuda:0 need CUDA, and torch .* sees no GPU"):
        open_copier("cuda:0")


@pytest.mark.parametrize(
    ("missing", "message"), [("torch", "need torch, which is not installed"), ("cupy", "need CuPy")]
)
def test_a_missing_library_is_named(missing, message, monkeypatch):
    plain_import = builtins.__import__

    def import_all_but_one(name, *args, **kwargs):
        if name == missing:
            raise ImportError(f"No module named {name!r}")
        return plain_import(name, *args, **kwargs)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(builtins, "__import__", import_all_but_one)
    with pytest.raises(UnavailableError, match=message):
        open_copier("cuda:0")
