"""An engine for remote memory access between processes of one user on one machine, by process_vm_readv(2).

It is real, and there on every Linux: tests of what uses engines need nothing else. It is no transport of the product:
on one machine the kernel's copy costs no less than a socket's.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from typing import TYPE_CHECKING

from kvstore.errors import BulkEngineError
from kvstore.transport.bulk import METADATA_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvstore.transport.bulk import Move

_HEAD = struct.Struct("<4sqI")
_REGION = struct.Struct("<QQ")
_MAGIC = b"kvvm"
_LIBC = ctypes.CDLL(None, use_errno=True)


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class VmEngine:
    """A kvstore.transport.bulk.BulkEngine; see https://man7.org/linux/man-pages/man2/process_vm_readv.2.html."""

    name = "vm"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._regions: dict[int, int] = {}  # guarded by _lock

    def register(self, address: int, nbytes: int) -> VmRegion:
        """Make memory known."""
        with self._lock:
            self._regions[address] = nbytes
        return VmRegion(self, address)

    def deregister(self, address: int) -> None:
        """Forget memory."""
        with self._lock:
            self._regions.pop(address, None)

    def is_known(self, address: int, nbytes: int) -> bool:
        """Whether these bytes are registered."""
        with self._lock:
            return _within(self._regions.items(), address, nbytes)

    @property
    def regions(self) -> int:
        """How many regions are registered."""
        with self._lock:
            return len(self._regions)

    def metadata(self) -> bytes:
        """This process, and the memory that is registered now."""
        with self._lock:
            regions = b"".join(_REGION.pack(address, nbytes) for address, nbytes in self._regions.items())
        return _HEAD.pack(_MAGIC, os.getpid(), len(regions) // _REGION.size) + regions

    def connect(self, metadata: bytes) -> VmPeer:
        """The process that says this of itself. Raises BulkEngineError if it makes no sense."""
        if not _HEAD.size <= len(metadata) <= METADATA_BYTES_MAX:
            raise BulkEngineError(f"the peer's metadata has {len(metadata)} bytes")
        magic, pid, count = _HEAD.unpack_from(metadata)
        if magic != _MAGIC or len(metadata) != _HEAD.size + count * _REGION.size:
            raise BulkEngineError("the peer's metadata is of no vm engine")
        return VmPeer(self, pid, _regions_of(metadata[_HEAD.size :]))

    def poll(self) -> None:
        """The kernel does all."""

    def close(self) -> None:
        """Forget all memory."""
        with self._lock:
            self._regions.clear()


class VmRegion:
    """Registered memory."""

    def __init__(self, engine: VmEngine, address: int) -> None:
        self._engine = engine
        self._address = address

    def deregister(self) -> None:
        """Forget it."""
        self._engine.deregister(self._address)


class VmPeer:
    """Another process, or this one."""

    def __init__(self, engine: VmEngine, pid: int, regions: tuple[tuple[int, int], ...]) -> None:
        self._engine = engine
        self._pid = pid
        self._regions = regions

    def write(self, moves: Sequence[Move]) -> VmTransfer:
        """Write to the peer's memory."""
        return self._begin(_LIBC.process_vm_writev, moves)

    def read(self, moves: Sequence[Move]) -> VmTransfer:
        """Read the peer's memory."""
        return self._begin(_LIBC.process_vm_readv, moves)

    def disconnect(self) -> None:
        """There is no connection."""

    def _begin(self, call: Callable[..., int], moves: Sequence[Move]) -> VmTransfer:
        for move in moves:
            if not self._engine.is_known(move.local, move.nbytes):
                raise BulkEngineError(f"{move.nbytes} bytes of this process are not registered")
            if not _within(self._regions, move.remote, move.nbytes):
                raise BulkEngineError(f"{move.nbytes} bytes of the peer are not registered")
        return VmTransfer(self._pid, call, moves)


class VmTransfer:
    """Moves that are made while somebody waits for them."""

    def __init__(self, pid: int, call: Callable[..., int], moves: Sequence[Move]) -> None:
        self._pid = pid
        self._call = call
        self._moves = moves

    def wait(self, ends_at: float, is_unwanted: Callable[[], bool]) -> None:  # noqa: ARG002  # it ends by itself
        """Move all bytes."""
        for move in self._moves:
            done = 0
            while done < move.nbytes:
                here = _Vector(move.local + done, move.nbytes - done)
                there = _Vector(move.remote + done, move.nbytes - done)
                count = self._call(self._pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
                if count <= 0:
                    error = ctypes.get_errno()
                    raise BulkEngineError(f"process {self._pid} cannot be reached: {os.strerror(error)}")
                done += count


def _regions_of(raw: bytes) -> tuple[tuple[int, int], ...]:
    return tuple((address, nbytes) for address, nbytes in _REGION.iter_unpack(raw))


def _within(regions: Iterable[tuple[int, int]], address: int, nbytes: int) -> bool:
    return any(begin <= address and address + nbytes <= begin + size for begin, size in regions)
