"""Which pages host memory gets: reserved huge pages, transparent ones, or plain ones.

The kernel's admin guides say what the files mean: hugetlbpage.rst and transhuge.rst,
https://docs.kernel.org/admin-guide/mm/. Huge pages are touched and locked several times as fast as plain ones, and
need one entry of the processor's address caches where plain ones need 512.
"""

from __future__ import annotations

import enum
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstore.tiers.extent import Extent

HUGE_PAGE_BYTES = 2 << 20
HUGE_PAGES = ("auto", "never", "required")
_POOL = Path("sys/kernel/mm/hugepages/hugepages-2048kB")
_TRANSPARENT = Path("sys/kernel/mm/transparent_hugepage")
_GRANTING = ("always", "within_size", "advise", "force")


class PageKind(enum.Enum):
    """How the pages of an extent are asked for."""

    RESERVED = "reserved huge pages"
    TRANSPARENT = "transparent huge pages"
    PLAIN = "plain pages"


@dataclass(frozen=True, slots=True)
class PageChoice:
    """What kind of pages, and why, in words for the log."""

    kind: PageKind
    reason: str

    @property
    def page_bytes(self) -> int:
        """What sizes and addresses must be multiples of."""
        return HUGE_PAGE_BYTES if self.kind is PageKind.RESERVED else mmap.PAGESIZE


PLAIN_PAGES = PageChoice(PageKind.PLAIN, "nothing else was asked for")


def choose_pages(wanted: str, capacity_bytes: int, root: Path = Path("/")) -> PageChoice:
    """The best pages that this system gives for a tier of `capacity_bytes`; `root` is where /sys is looked for.

    `wanted` is one of HUGE_PAGES: "auto" takes what there is, "never" plain pages. Raises StorageError for "required"
    where there are no huge ones, ConfigError for any other word.
    """
    if wanted not in HUGE_PAGES:
        raise ConfigError(f"huge_pages is {wanted!r}, expected one of {', '.join(HUGE_PAGES)}")
    if wanted == "never":
        return PageChoice(PageKind.PLAIN, "huge pages are switched off (store.huge_pages)")
    free_bytes = _free_pool_bytes(root)
    if capacity_bytes <= free_bytes:
        return PageChoice(PageKind.RESERVED, f"the system has {free_bytes} free bytes of them")
    policy = _shared_memory_policy(root)
    if policy in _GRANTING and capacity_bytes >= HUGE_PAGE_BYTES:
        return PageChoice(PageKind.TRANSPARENT, f"shmem_enabled is {policy}")
    reason = f"{free_bytes} bytes of reserved huge pages are free and shmem_enabled is {policy}"
    if wanted == "required":
        raise StorageError(
            f"store.huge_pages is required, but {reason}; reserve {capacity_bytes // HUGE_PAGE_BYTES + 1} pages "
            f"(vm.nr_hugepages), or write advise to /{_TRANSPARENT}/shmem_enabled"
        )
    return PageChoice(PageKind.PLAIN, reason)


def huge_bytes(extents: Iterable[Extent]) -> int:
    """How many bytes of extents lie in huge pages now. Reads the process's whole memory map: some ms."""
    ranges = sorted((extent.address, extent.address + extent.nbytes) for extent in extents)
    return _mapped_huge_bytes(Path("/proc/self/smaps").read_text(), ranges) if ranges else 0


def _mapped_huge_bytes(smaps: str, ranges: list[tuple[int, int]]) -> int:
    found = 0
    inside = False
    for line in smaps.splitlines():
        name, _, rest = line.partition(":")
        first, dash, _ = name.partition(" ")[0].partition("-")
        if dash:
            address = int(first, 16)
            inside = any(start <= address < stop for start, stop in ranges)
        elif inside and name in ("ShmemPmdMapped", "FilePmdMapped", "Shared_Hugetlb", "Private_Hugetlb"):
            found += int(rest.split()[0]) * 1024
    return found


def _free_pool_bytes(root: Path) -> int:
    """Reserved huge pages that nobody uses or was promised."""
    free, promised = (_text(root / _POOL / name) for name in ("free_hugepages", "resv_hugepages"))
    if not free.isdigit() or not promised.isdigit():
        return 0
    return max(0, int(free) - int(promised)) * HUGE_PAGE_BYTES


def _shared_memory_policy(root: Path) -> str:
    """The word in brackets: for huge pages of this size if they have a rule of their own, else for all."""
    own = _chosen(_text(root / _TRANSPARENT / "hugepages-2048kB/shmem_enabled"))
    general = _chosen(_text(root / _TRANSPARENT / "shmem_enabled"))
    return general if own in ("", "inherit") or general in ("deny", "force") else own


def _chosen(text: str) -> str:
    return text.partition("[")[2].partition("]")[0]


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
