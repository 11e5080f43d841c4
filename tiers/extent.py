"""An extent: one piece of shared memory, cut into a region for each part of a block while it is lent to a namespace.

Its life, driven by kvstore.tiers.extent_stock:

    made -> touched piece by piece -> lent (geometry fixed, size sealed) -> retired -> closed, once no hold is left
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import mmap
import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

from kvstore.tiers._core import _copy
from kvstore.tiers.huge_pages import HUGE_PAGE_BYTES, PageKind

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from kvstore.tiers.base import Bytes2D
    from kvstore.tiers.huge_pages import PageChoice

MEMORY_NAME = "kvstore-host"
# From Linux 5.1 on; Python's fcntl has it from 3.14 on. See F_ADD_SEALS in fcntl(2).
_F_SEAL_FUTURE_WRITE = 0x10
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_ids = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Geometry:
    """How an extent is cut: part i of slot s begins at part_offsets[i] + s * part_sizes[i]. Slots have no gaps.

    Each part begins on a page of its own, so that a process maps and page-locks only the parts that it needs.
    """

    part_sizes: tuple[int, ...]
    part_offsets: tuple[int, ...]
    slot_count: int
    nbytes: int


def geometry(part_sizes: tuple[int, ...], slot_count: int) -> Geometry:
    """The geometry of `slot_count` slots, in as few bytes as whole pages for each part allow."""
    offsets = []
    end = 0
    for size in part_sizes:
        offsets.append(end)
        end += -(-size * slot_count // mmap.PAGESIZE) * mmap.PAGESIZE
    return Geometry(part_sizes, tuple(offsets), slot_count, end)


class Extent:
    """A memfd (mode 0600) and its mapping, zeroed when it is made; `extent_id` is never used again in this process.

    Owned by the ExtentStock that made it; all but `regions` and the hold count is fixed once it is lent. Views of the
    regions keep the mapping alive on their own.
    """

    def __init__(self, nbytes: int, pages: PageChoice) -> None:
        """Raises OSError where the system refuses."""
        self.extent_id = next(_ids)
        self.nbytes = -(-nbytes // pages.page_bytes) * pages.page_bytes
        self.pages = pages
        self.touched_bytes = 0
        self.locked_bytes = 0
        self.geometry: Geometry | None = None
        self.regions: tuple[Bytes2D, ...] = ()
        self.is_sealed = False
        flags = os.MFD_HUGETLB | os.MFD_HUGE_2MB if pages.kind is PageKind.RESERVED else 0
        self._fd = os.memfd_create(MEMORY_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
        try:
            os.fchmod(self._fd, 0o600)
            os.ftruncate(self._fd, self.nbytes)
            large = self.nbytes >= HUGE_PAGE_BYTES
            self._memory = _copy.map_shared(self._fd, self.nbytes, HUGE_PAGE_BYTES if large else mmap.PAGESIZE)
        except (OSError, OverflowError):
            os.close(self._fd)
            raise
        self.address = int(self._memory.ctypes.data)
        if pages.kind is PageKind.TRANSPARENT:
            _copy.advise_huge(self.address, self.nbytes)  # what was got is seen in the memory map, not here

    @property
    def fd(self) -> int:
        """The memfd; stays the extent's own."""
        return self._fd

    def cut(self, shape: Geometry) -> None:
        """Give it a geometry, cut off what is not needed for that, and seal it.

        From then on nobody changes its size, and nobody but this mapping its bytes, whoever gets a descriptor of it:
        `is_sealed` says so. A kernel that does not know such a seal keeps the size alone.
        """
        assert self.geometry is None, self.extent_id
        assert shape.nbytes <= self.nbytes, (shape, self.nbytes)
        whole = -(-shape.nbytes // self.pages.page_bytes) * self.pages.page_bytes
        if whole < self.nbytes:
            os.ftruncate(self._fd, whole)
            self.nbytes = whole
            # An array of its own, so that who follows a view to all of its memory finds nothing beyond the end.
            self._memory = np.frombuffer(self._memory.data[:whole], dtype=np.uint8)
            self.touched_bytes = min(self.touched_bytes, whole)
            self.locked_bytes = min(self.locked_bytes, whole)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SIZE_SEALS)
        with suppress(OSError):
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
            self.is_sealed = True
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
        self.geometry = shape
        self.regions = tuple(
            self._memory[offset : offset + size * shape.slot_count].reshape(shape.slot_count, size)
            for size, offset in zip(shape.part_sizes, shape.part_offsets, strict=True)
        )

    def touch(self, nbytes: int) -> None:
        """Bring in up to `nbytes` more, from where the last call ended; what is stored there stays. Raises OSError.

        Costs what the first store would pay otherwise: 1.9 GB/s with plain pages, 6.6 GB/s with huge ones.
        """
        count = min(nbytes, self.nbytes - self.touched_bytes)
        memory = self._memory  # keeps the mapping, whoever closes the extent meanwhile
        error = _copy.populate(self.address + self.touched_bytes, count)
        if error == errno.EINVAL:  # a kernel older than 5.14
            os.posix_fallocate(self._fd, self.touched_bytes, count)
            _copy.touch(self.address + self.touched_bytes, count)
        elif error:
            raise OSError(error, f"{os.strerror(error)} (touching {count} of {memory.size} bytes)")
        self.touched_bytes += count

    def close(self) -> None:
        """Give the descriptor back; only its stock calls this. The memory goes with the last array that shows it."""
        os.close(self._fd)
        self._fd = -1


class ExtentHold:
    """Keeps an extent from being lent on or closed, for as long as another process maps its `nbytes`, from 0 on.

    Descriptors that it opens belong to the caller; they can be sent (SCM_RIGHTS), at most 250 in one message. `recall`
    is called, from any thread and at most once, when the extent is wanted back: it must not wait.
    """

    def __init__(
        self, extent: Extent, release: Callable[[ExtentHold, Extent], None], recall: Callable[[], None] | None
    ) -> None:
        self.extent_id = extent.extent_id
        self.nbytes = extent.nbytes
        self._lock = threading.Lock()
        self._extent: Extent | None = extent
        self._release = release
        self._recall = recall

    def open_read_only(self) -> int:
        """A descriptor by which the memory can be mapped for reading alone, also by who opens it anew.

        Raises OSError, also where the kernel cannot promise that.
        """
        with self._lock:
            assert self._extent is not None, f"the hold on extent {self.extent_id} was released"
            if not self._extent.is_sealed:
                raise OSError(errno.EOPNOTSUPP, "this kernel cannot keep others from writing to it (Linux 5.1 can)")
            return os.open(f"/proc/self/fd/{self._extent.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def ask(self) -> bool:
        """Ask for the extent; false if that was done before, or nobody can be asked."""
        with self._lock:
            recall, self._recall = self._recall, None
        if recall is None:
            return False
        recall()
        return True

    def release(self) -> None:
        """End the hold: nobody maps the extent any more, or who did is dead. Idempotent."""
        with self._lock:
            extent, self._extent = self._extent, None
        if extent is not None:
            self._release(self, extent)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
