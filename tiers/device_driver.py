"""The few calls of the CUDA driver that torch and CuPy do not offer in all their versions, by ctypes.

Signatures are those of the CUDA driver API reference: cuLaunchKernel, cuMemGetAddressRange, cuMemHostRegister and
cuMemcpyBatchAsync (since 12.8; from 13.0 on cuMemcpyBatchAsync_v2, without the index of the failed copy). The caller
makes a context current.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from kvstore.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    Addresses = NDArray[np.uint64]
    Argument = ctypes.c_uint64 | ctypes.c_int64 | ctypes.c_uint32

DRIVER_LIBRARY = "libcuda.so.1"
_SOURCE_IN_STREAM_ORDER = 1
_PREFER_OVERLAP_WITH_COMPUTE = 1
_REGISTER_PORTABLE = 0x01  # known to all contexts of the process
_REGISTER_READ_ONLY = 0x08


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", ctypes.c_uint),
    )


class CudaDriver:
    """Calls into the driver; a call that fails raises UnavailableError with the driver's number for the error."""

    def __init__(self, library: str = DRIVER_LIBRARY) -> None:
        try:
            self._library = ctypes.CDLL(library)
        except OSError as err:
            raise UnavailableError(f"the CUDA driver cannot be loaded: {err}") from err
        self._batch_without_index = getattr(self._library, "cuMemcpyBatchAsync_v2", None)
        self._batch_with_index = getattr(self._library, "cuMemcpyBatchAsync", None)

    @property
    def has_batches(self) -> bool:
        """Whether copy_batch() is there."""
        return self._batch_without_index is not None or self._batch_with_index is not None

    def launch(self, function: int, grid: int, threads: int, arguments: Sequence[Argument], stream: int) -> None:
        """Launch `grid` blocks of `threads` threads of a CUfunction on `stream`, a CUstream."""
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        sizes = (ctypes.c_uint(size) for size in (grid, 1, 1, threads, 1, 1, 0))
        code = self._library.cuLaunchKernel(
            ctypes.c_void_p(function), *sizes, ctypes.c_void_p(stream), pointers, ctypes.c_void_p(None)
        )
        _check(code, "cuLaunchKernel")

    def copy_batch(self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: int) -> None:
        """Queue copies on `stream` (a CUstream of the current context, not the default one), in any order."""
        attributes = _Attributes(source_access_order=_SOURCE_IN_STREAM_ORDER, flags=_PREFER_OVERLAP_WITH_COMPUTE)
        first = ctypes.c_size_t(0)
        arguments = [
            *(ctypes.c_void_p(array.ctypes.data) for array in (targets, sources, sizes)),
            ctypes.c_size_t(len(sizes)),
            ctypes.byref(attributes),
            ctypes.byref(first),
            ctypes.c_size_t(1),
        ]
        if self._batch_without_index is not None:
            _check(self._batch_without_index(*arguments, ctypes.c_void_p(stream)), "cuMemcpyBatchAsync_v2")
        elif self._batch_with_index is not None:
            failed = ctypes.c_size_t(0)
            code = self._batch_with_index(*arguments, ctypes.byref(failed), ctypes.c_void_p(stream))
            _check(code, f"cuMemcpyBatchAsync, copy {failed.value}")
        else:
            raise UnavailableError("the CUDA driver has no cuMemcpyBatchAsync; it needs CUDA 12.8 or newer")

    def allocation_base(self, address: int) -> int:
        """Where the allocation begins that holds an address of GPU memory."""
        base, size = ctypes.c_uint64(0), ctypes.c_size_t(0)
        code = self._library.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        _check(code, "cuMemGetAddressRange")
        return base.value

    def register_host(self, address: int, nbytes: int, *, read_only: bool) -> None:
        """Page-lock host memory, whole pages, for copies by the GPU; `read_only` for what the process cannot write."""
        flags = _REGISTER_PORTABLE | (_REGISTER_READ_ONLY if read_only else 0)
        code = self._library.cuMemHostRegister_v2(
            ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_uint(flags)
        )
        _check(code, f"cuMemHostRegister of {nbytes} bytes")

    def unregister_host(self, address: int) -> None:
        """Undo register_host() of the range that begins at `address`."""
        _check(self._library.cuMemHostUnregister(ctypes.c_void_p(address)), "cuMemHostUnregister")


def _check(code: int, call: str) -> None:
    if code != 0:
        raise UnavailableError(f"{call} failed with CUDA error {code}")
