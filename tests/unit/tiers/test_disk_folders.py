"""Slabs spread over several folders: all are used, one that fails or is missing costs its own blocks alone."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvstore.errors import ConfigError, DirectoryLockedError, StorageError, StorageFormatError
from kvstore.testing.faulty import FaultyIo, IoCall
from kvstore.tiers.file_io import FileSystemSpace, SystemIo

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from conftest import Blocks, Disk

    from kvstore.tiers.base import Bytes1D
    from kvstore.tiers.disk import DiskTier

MIB = 1 << 20
NUMBERS = list(range(120))


class DyingFolder(SystemIo):
    """The system's calls, of which all below one folder fail while it is dead."""

    def __init__(self, dead: Path, error_number: int = errno.EIO) -> None:
        self.dead: Path | None = None
        self._error_number = error_number
        self._folder = dead
        self._paths: dict[int, Path] = {}

    def die(self) -> None:
        self.dead = self._folder

    def _check(self, path: Path) -> None:
        if self.dead is not None and path.is_relative_to(self.dead):
            raise OSError(self._error_number, "dead")

    def open(self, path: Path, flags: int) -> int:
        self._check(path)
        fd = super().open(path, flags)
        self._paths[fd] = path
        return fd

    def read(self, fd: int, pieces: Sequence[Bytes1D], offset: int) -> int:
        self._check(self._paths[fd])
        return super().read(fd, pieces, offset)

    def write(self, fd: int, pieces: Sequence[Bytes1D], offset: int) -> int:
        self._check(self._paths[fd])
        return super().write(fd, pieces, offset)

    def sync(self, fd: int) -> None:
        self._check(self._paths[fd])
        super().sync(fd)

    def space(self, path: Path) -> FileSystemSpace:
        self._check(path)
        return super().space(path)


@pytest.fixture
def more(tmp_path: Path) -> Path:
    return tmp_path / "more"


def slabs_in(folder: Path) -> list[Path]:
    return sorted((folder / "slabs").glob("slab-*.kvs"))


def filled(disk: Disk, blocks: Blocks, more: Path) -> DiskTier:
    tier = disk.open(further_paths=[more])
    blocks.store(blocks.pool(tier), NUMBERS)
    return tier


def test_slabs_are_spread_and_all_blocks_are_found_again(disk: Disk, blocks: Blocks, more: Path) -> None:
    tier = filled(disk, blocks, more)
    assert abs(len(slabs_in(disk.path)) - len(slabs_in(more))) <= 1
    tier.close()
    assert dict.fromkeys(NUMBERS, True) == blocks.recovered(disk.open(further_paths=[more]))


def test_a_large_request_takes_slots_of_all_folders(disk: Disk, blocks_of: Callable[..., Blocks], more: Path) -> None:
    pool = blocks_of(part_sizes=(MIB,)).pool(disk.open(capacity_bytes=64 * MIB, further_paths=[more]))
    pool.free(pool.allocate(12))
    slots = pool.allocate(6)
    assert slots.tolist() == sorted(set(slots.tolist()))
    starts = np.array([item.first for item in pool.ranges()])
    used = {pool.slabs[i].volume.number for i in np.searchsorted(starts, slots, side="right") - 1}
    assert {0, 1} == used


def test_the_capacity_holds_over_all_folders(disk: Disk, blocks: Blocks, more: Path) -> None:
    tier = disk.open(capacity_bytes=4 * MIB, further_paths=[more])
    pool = blocks.pool(tier)
    slots = pool.allocate(10_000)
    numbers = range(len(slots))
    assert pool.write(slots, [blocks.identity(n) for n in numbers], [blocks.parts(n) for n in numbers]).all()
    real_bytes = disk.real_bytes() + sum(path.stat().st_blocks * 512 for path in more.rglob("*") if path.is_file())
    assert 3 * MIB < real_bytes <= 4 * MIB
    tier.close()
    tier = disk.open(capacity_bytes=2 * MIB, further_paths=[more])
    assert tier.used_bytes <= 2 * MIB
    assert all(blocks.recovered(tier).values())


@pytest.mark.parametrize("index", ["kept", "lost"])
def test_exchanged_folders_are_told_by_their_labels(disk: Disk, blocks: Blocks, tmp_path: Path, index: str) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    tier = disk.open(further_paths=[first, second])
    blocks.store(blocks.pool(tier), NUMBERS)
    tier.close()
    first.rename(tmp_path / "other")
    second.rename(first)
    (tmp_path / "other").rename(second)
    if index == "lost":
        shutil.rmtree(disk.path / "index")
    assert dict.fromkeys(NUMBERS, True) == blocks.recovered(disk.open(further_paths=[first, second]))


@pytest.mark.parametrize("loss", ["emptied", "removed"])
def test_a_missing_folder_costs_its_blocks_until_it_is_back(
    disk: Disk, blocks: Blocks, more: Path, tmp_path: Path, loss: str
) -> None:
    filled(disk, blocks, more).close()
    more.rename(tmp_path / "unmounted")
    if loss == "emptied":
        more.mkdir()
    tier = disk.open(further_paths=[more])
    assert 1 == tier.faults["missing_folder"]
    found = blocks.recovered(tier)
    assert 0 < len(found) < len(NUMBERS)
    assert all(found.values())
    blocks.store(blocks.pool(tier), [1000, 1001])
    assert not more.exists() or not any(more.iterdir())
    tier.close()
    shutil.rmtree(more, ignore_errors=True)
    (tmp_path / "unmounted").rename(more)
    assert dict.fromkeys([*NUMBERS, 1000, 1001], True) == blocks.recovered(disk.open(further_paths=[more]))


def test_what_was_cleared_while_a_folder_was_away_stays_away(
    disk: Disk, blocks: Blocks, more: Path, tmp_path: Path
) -> None:
    filled(disk, blocks, more).close()
    more.rename(tmp_path / "unmounted")
    tier = disk.open(further_paths=[more])
    tier.clear(blocks.ns_id)
    tier.close()
    (tmp_path / "unmounted").rename(more)
    assert {} == blocks.recovered(disk.open(further_paths=[more]))


def test_a_folder_left_out_of_the_settings_is_free_to_go(disk: Disk, blocks: Blocks, more: Path) -> None:
    filled(disk, blocks, more).close()
    tier = disk.open()
    assert 0 < len(blocks.recovered(tier)) < len(NUMBERS)
    assert {} == tier.faults
    tier.close()
    shutil.rmtree(more)
    assert {} == disk.open(further_paths=[more]).faults


@pytest.mark.parametrize("kind", ["another store's", "a data directory", "copied", "damaged", "newer", "noise"])
def test_a_folder_that_is_not_ours_is_refused_by_name_and_kept(
    disk: Disk, blocks: Blocks, more: Path, tmp_path: Path, kind: str
) -> None:
    filled(disk, blocks, more).close()
    other = type(disk)(tmp_path / "other")
    further = [more]
    if kind == "another store's":
        other.open(further_paths=[tmp_path / "theirs"]).close()
        further = [tmp_path / "theirs"]
    elif kind == "a data directory":
        other.open().close()
        further = [other.path]
    elif kind == "copied":
        shutil.copytree(more, tmp_path / "copied")
        further = [more, tmp_path / "copied"]
    else:
        offset, content = {"damaged": (20, b"\xff"), "newer": (8, b"\x02"), "noise": (0, b"SOMEBODY")}[kind]
        with (more / "volume").open("r+b") as file:
            file.seek(offset)
            file.write(content)
    before = {path for folder in further for path in folder.rglob("*")}
    with pytest.raises(StorageFormatError, match=further[-1].name):
        disk.open(further_paths=further)
    assert before <= {path for folder in further for path in folder.rglob("*")}


def test_a_folder_that_cannot_be_used_at_its_first_start_is_refused_by_name(disk: Disk, more: Path) -> None:
    more.write_bytes(b"")
    with pytest.raises(StorageError, match=r"cannot use the folder .*more"):
        disk.open(further_paths=[more])
    more.unlink()
    disk.open(further_paths=[more])


def test_more_folders_than_slab_numbers_can_name_are_refused(disk: Disk, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="64 further folders"):
        disk.open(further_paths=[tmp_path / str(i) for i in range(64)])


@pytest.mark.parametrize("name", ["data", "more"])
def test_one_folder_named_twice_is_refused(disk: Disk, more: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(DirectoryLockedError, match=name):
        disk.open(further_paths=[more, tmp_path / name])


def test_a_folder_in_use_by_another_process_is_refused(disk: Disk, more: Path, tmp_path: Path) -> None:
    script = (
        "import sys, time; from kvstore.tiers.disk import DiskTier\n"
        "tier = DiskTier.open(sys.argv[1], capacity_bytes=1 << 24, further_paths=[sys.argv[2]])\n"
        "print('open', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-P", "-c", script, str(tmp_path / "theirs"), str(more)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "open\n" == process.stdout.readline()
        with pytest.raises(DirectoryLockedError, match=str(process.pid)):
            disk.open(further_paths=[more])
        process.communicate("")


@pytest.mark.parametrize("error_number", [errno.EIO, errno.ENOSPC])
def test_a_folder_that_dies_leaves_the_others_serving(
    disk: Disk, blocks: Blocks, more: Path, error_number: int
) -> None:
    io = DyingFolder(more, error_number)
    tier = disk.open(further_paths=[more], io=io)
    pool = blocks.pool(tier)
    slots = blocks.store(pool, NUMBERS)
    starts = np.array([item.first for item in pool.ranges()])
    number_of = [slab.volume.number for slab in pool.slabs]
    at_home = [number_of[i] == 0 for i in np.searchsorted(starts, slots, side="right") - 1]
    io.die()
    assert at_home == blocks.right(pool, slots, NUMBERS)
    home, away = slots[at_home], slots[~np.array(at_home)]
    assert pool.free_for_good(home)
    assert not pool.free_for_good(away)
    for first in range(1000, 1200, 50):
        numbers = range(first, first + 50)
        slots = pool.allocate(50)
        assert 50 == len(slots)
        stored = pool.write(slots, [blocks.identity(n) for n in numbers], [blocks.parts(n) for n in numbers])
        pool.free(slots)
    assert stored.all()
    with pytest.raises(StorageError, match="cannot flush"):
        tier.flush()
    assert 0 == tier.busy_buffers


def test_a_new_slab_goes_where_there_is_room(disk: Disk, blocks: Blocks, more: Path) -> None:
    io = FaultyIo()
    tier = disk.open(further_paths=[more], io=io)
    io.fail(IoCall.ALLOCATE, errno.ENOSPC)
    blocks.store(blocks.pool(tier), [1])
    assert ([], 1) == (slabs_in(disk.path), len(slabs_in(more)))
    assert {"no_space": 1} == tier.faults
