from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.errors import ConfigError, StorageError
from kvstore.tiers.extent import Extent
from kvstore.tiers.extent_stock import HostMemory
from kvstore.tiers.host import HostTier
from kvstore.tiers.huge_pages import PageChoice, PageKind, _mapped_huge_bytes, choose_pages, huge_bytes

MIB = 1 << 20
POOL = "sys/kernel/mm/hugepages/hugepages-2048kB"
TRANSPARENT = "sys/kernel/mm/transparent_hugepage"


def system(root: Path, *, free: int = 0, promised: int = 0, policy: str = "never", own: str = "inherit") -> Path:
    files = {
        f"{POOL}/free_hugepages": f"{free}\n",
        f"{POOL}/resv_hugepages": f"{promised}\n",
        f"{TRANSPARENT}/shmem_enabled": " ".join(
            f"[{word}]" if word == policy else word
            for word in ("always", "within_size", "advise", "never", "deny", "force")
        ),
        f"{TRANSPARENT}/hugepages-2048kB/shmem_enabled": " ".join(
            f"[{word}]" if word == own else word for word in ("always", "inherit", "within_size", "advise", "never")
        ),
    }
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"free": 32}, PageKind.RESERVED),
        ({"free": 31, "policy": "advise"}, PageKind.TRANSPARENT),
        ({"free": 40, "promised": 9, "policy": "advise"}, PageKind.TRANSPARENT),
        ({"policy": "always"}, PageKind.TRANSPARENT),
        ({"policy": "within_size"}, PageKind.TRANSPARENT),
        ({"policy": "force", "own": "never"}, PageKind.TRANSPARENT),
        ({"policy": "never", "own": "advise"}, PageKind.TRANSPARENT),
        ({"policy": "advise", "own": "never"}, PageKind.PLAIN),
        ({"policy": "deny", "own": "always"}, PageKind.PLAIN),
        ({"free": 31}, PageKind.PLAIN),
    ],
)
def test_the_best_pages_that_the_system_gives_are_taken(tmp_path: Path, given: dict, kind: PageKind) -> None:
    assert kind is choose_pages("auto", 64 * MIB, system(tmp_path, **given)).kind


def test_a_system_that_tells_nothing_has_plain_pages(tmp_path: Path) -> None:
    assert PageKind.PLAIN is choose_pages("auto", 64 * MIB, tmp_path).kind


def test_never_means_plain_pages_whatever_there_is(tmp_path: Path) -> None:
    assert PageKind.PLAIN is choose_pages("never", MIB, system(tmp_path, free=1000, policy="always")).kind


def test_required_huge_pages_that_are_not_there_are_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"reserve 33 pages \(vm.nr_hugepages\)") as caught:
        choose_pages("required", 64 * MIB, system(tmp_path))
    assert "shmem_enabled is never" in str(caught.value)
    assert PageKind.RESERVED is choose_pages("required", 64 * MIB, system(tmp_path, free=32)).kind


def test_other_words_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'yes', expected one of auto, never, required"):
        choose_pages("yes", MIB, tmp_path)


def test_a_tier_takes_pages_of_the_kind_asked_for() -> None:
    with HostTier(4 * MIB, memory=HostMemory(huge_pages="never")) as tier:
        assert PageKind.PLAIN is tier.memory().pages


def test_an_extent_that_asks_for_transparent_pages_works_with_whatever_it_gets() -> None:
    extent = Extent(4 * MIB, PageChoice(PageKind.TRANSPARENT, "test"))
    extent.touch(4 * MIB)
    assert 0 == extent.address % (2 * MIB)
    assert huge_bytes([extent]) in range(0, 4 * MIB + 1, 2 * MIB)
    extent.close()


def test_huge_pages_are_counted_in_the_ranges_asked_for_alone() -> None:
    smaps = (
        "7f0000000000-7f0000800000 rw-s 00000000 00:01 1 /memfd:kvstore-host (deleted)\n"
        "Size:               8192 kB\nShmemPmdMapped:     4096 kB\nVmFlags: rd wr sh\n"
        "7f0000800000-7f0000a00000 rw-s 00000000 00:0f 2 /memfd:kvstore-host (deleted)\n"
        "Shared_Hugetlb:     2048 kB\nPrivate_Hugetlb:       0 kB\n"
        "7f1000000000-7f1000800000 rw-s 00000000 00:01 3 /memfd:other (deleted)\n"
        "ShmemPmdMapped:     8192 kB\n"
    )
    assert 4 * MIB == _mapped_huge_bytes(smaps, [(0x7F0000000000, 0x7F0000800000)])
    assert 6 * MIB == _mapped_huge_bytes(smaps, [(0x7F0000000000, 0x7F0000A00000)])
    assert 0 == _mapped_huge_bytes(smaps, [(0x7F2000000000, 0x7F2000800000)])
