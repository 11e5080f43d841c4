"""Page-locking memory in pieces, by the kernel (mlock) or by CUDA, so that a refusal costs the rest and not the start.

Locked memory is never swapped out; memory registered with CUDA is copied by the GPU directly. Both work on any mapping
of this process: the sidecar locks its own, an engine's process registers the extents that it maps. See mlock(2), and
cuMemHostRegister in the CUDA driver API reference.
"""

from __future__ import annotations

import math
import mmap
import os
import resource
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvstore.errors import UnavailableError
from kvstore.tiers._core import _copy

if TYPE_CHECKING:
    from kvstore.tiers.device_driver import CudaDriver

PIECE_BYTES = 64 << 20


class PageLocker(Protocol):
    """Locks whole pages. Raises OSError or UnavailableError, and then has changed nothing."""

    def lock(self, address: int, nbytes: int) -> None:
        """Lock [address, address + nbytes)."""
        ...

    def unlock(self, address: int, nbytes: int) -> None:
        """Undo one call of lock() with the same arguments."""
        ...


@dataclass(frozen=True, slots=True)
class LockedMemory:
    """What was locked, from the beginning on: `sizes` of the pieces, and why there are no more, if something failed."""

    address: int
    sizes: tuple[int, ...]
    failure: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes locked in all."""
        return sum(self.sizes)


def lock_in_pieces(locker: PageLocker, address: int, nbytes: int, *, piece_bytes: int = PIECE_BYTES) -> LockedMemory:
    """Lock as much as is granted; stops at the first refusal and keeps what it has. Undo with unlock_pieces()."""
    sizes: list[int] = []
    done = 0
    while done < nbytes:
        size = min(piece_bytes, nbytes - done)
        try:
            locker.lock(address + done, size)
        except (OSError, UnavailableError) as error:
            return LockedMemory(address, tuple(sizes), str(error))
        sizes.append(size)
        done += size
    return LockedMemory(address, tuple(sizes))


def unlock_pieces(locker: PageLocker, locked: LockedMemory) -> None:
    """Unlock, in the reverse order, before the memory is unmapped."""
    end = locked.address + locked.nbytes
    for size in reversed(locked.sizes):
        end -= size
        locker.unlock(end, size)


def piece_of_whole_slots(slot_bytes: int, wanted_bytes: int = PIECE_BYTES) -> int:
    """The size near `wanted_bytes` that is both whole pages and whole slots, at least one of them.

    A single copy must not span two registrations, so no slot may lie in two pieces.
    """
    least = math.lcm(slot_bytes, mmap.PAGESIZE)
    return max(1, wanted_bytes // least) * least


class KernelLocker:
    """mlock(2), within RLIMIT_MEMLOCK, whose soft limit is raised as far as the hard one lets it."""

    def __init__(self) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))

    def lock(self, address: int, nbytes: int) -> None:
        """Lock, and bring in what is not there yet. Raises OSError, which names the limit."""
        error = _copy.lock_pages(address, nbytes)
        if error:
            _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
            limit = "none" if hard == resource.RLIM_INFINITY else f"{hard} bytes"
            raise OSError(error, f"{os.strerror(error)}; the limit of locked memory (RLIMIT_MEMLOCK) is {limit}")

    def unlock(self, address: int, nbytes: int) -> None:
        """munlock(2). Raises OSError."""
        error = _copy.unlock_pages(address, nbytes)
        if error:
            raise OSError(error, os.strerror(error))


class CudaLocker:
    """Registers memory with CUDA for all contexts of the process. The caller makes a context current.

    `read_only` registers mappings that cannot be written; the device must have
    CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED.
    """

    def __init__(self, driver: CudaDriver, *, read_only: bool = False) -> None:
        self._driver = driver
        self._read_only = read_only

    def lock(self, address: int, nbytes: int) -> None:
        """Register. Raises UnavailableError with the driver's number for the error."""
        self._driver.register_host(address, nbytes, read_only=self._read_only)

    def unlock(self, address: int, nbytes: int) -> None:  # noqa: ARG002  # as PageLocker has it
        """Unregister the piece that begins at `address`. Raises UnavailableError."""
        self._driver.unregister_host(address)
