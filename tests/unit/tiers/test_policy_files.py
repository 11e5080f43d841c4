"""Files of the eviction policy: whole or absent, within their share, and none that nobody asks for."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

from kvstore.tiers.faults import FaultCounts
from kvstore.tiers.file_io import SystemIo
from kvstore.tiers.policy_files import PolicyFiles

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvstore.tiers.base import Bytes1D

PAGE = 4096
ONE, OTHER = b"1" * 16, b"2" * 16

WRITER = """
import sys
from pathlib import Path
from kvstore.tiers.faults import FaultCounts
from kvstore.tiers.file_io import SystemIo
from kvstore.tiers.policy_files import PolicyFiles

files = PolicyFiles(SystemIo(), Path(sys.argv[1]), FaultCounts(), 1 << 30)
number = 0
while True:
    number = number % 200 + 1
    assert files.save(b"1" * 16, bytes([number]) * (number * 10_007))
    print(number, flush=True)
"""


class FullDisk(SystemIo):
    """Takes half of what it is given, and then no more."""

    def write(self, fd: int, pieces: Sequence[Bytes1D], offset: int) -> int:
        super().write(fd, [piece[: piece.size // 2] for piece in pieces], offset)
        raise OSError(errno.ENOSPC, "no space")


def opened(path: Path, *known: bytes, bytes_max: int = 10 * PAGE) -> tuple[PolicyFiles, FaultCounts]:
    faults = FaultCounts()
    files = PolicyFiles(SystemIo(), path, faults, bytes_max)
    files.keep(known)
    return files, faults


def test_what_was_saved_last_is_loaded(tmp_path: Path) -> None:
    files, faults = opened(tmp_path / "policy")
    assert files.load(ONE) is None
    assert (True, True) == (files.save(ONE, b"first"), files.save(ONE, b"second" * 1000))
    assert b"second" * 1000 == files.load(ONE)
    assert b"second" * 1000 == opened(tmp_path / "policy", ONE)[0].load(ONE)
    assert (2 * PAGE, {}) == (files.file_bytes, faults.snapshot())


def test_all_files_and_the_one_being_written_stay_within_the_limit(tmp_path: Path) -> None:
    files, faults = opened(tmp_path, bytes_max=4 * PAGE)
    assert files.save(ONE, bytes(2 * PAGE))
    assert not files.save(ONE, bytes(2 * PAGE + 1))
    assert files.save(OTHER, bytes(2 * PAGE))
    assert not files.save(OTHER, b"1")
    assert (bytes(2 * PAGE), bytes(2 * PAGE)) == (files.load(ONE), files.load(OTHER))
    assert {"no_space": 2} == faults.snapshot()


def test_files_of_namespaces_without_blocks_and_unfinished_ones_are_removed(tmp_path: Path) -> None:
    files, _ = opened(tmp_path)
    files.save(ONE, b"one")
    files.save(OTHER, b"other")
    (tmp_path / f"{ONE.hex()}.snapshot.new").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("not ours")
    again, _ = opened(tmp_path, ONE)
    assert (b"one", None) == (again.load(ONE), again.load(OTHER))
    assert {f"{ONE.hex()}.snapshot", "notes.txt"} == {path.name for path in tmp_path.iterdir()}


def test_a_removed_file_is_gone_and_its_room_is_free(tmp_path: Path) -> None:
    files, _ = opened(tmp_path)
    files.save(ONE, b"one")
    files.remove(ONE)
    files.remove(ONE)
    assert (0, None, []) == (files.file_bytes, files.load(ONE), list(tmp_path.iterdir()))


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    opened(tmp_path)[0].save(ONE, b"old")
    faults = FaultCounts()
    files = PolicyFiles(FullDisk(), tmp_path, faults, 10 * PAGE)
    files.keep([ONE])
    assert not files.save(ONE, b"new")
    assert (b"old", {"write_error": 1}) == (files.load(ONE), faults.snapshot())
    assert [f"{ONE.hex()}.snapshot"] == [path.name for path in tmp_path.iterdir()]


def test_a_smaller_share_than_before_keeps_what_fits(tmp_path: Path) -> None:
    files, _ = opened(tmp_path, ONE, OTHER)
    assert (True, True) == (files.save(ONE, b"large" * PAGE), files.save(OTHER, b"small"))
    files, _ = opened(tmp_path, ONE, OTHER, bytes_max=2 * PAGE)
    assert (None, b"small", PAGE) == (files.load(ONE), files.load(OTHER), files.file_bytes)
    assert [f"{OTHER.hex()}.snapshot"] == [path.name for path in tmp_path.iterdir()]


def test_a_killed_writer_leaves_a_whole_file(tmp_path: Path) -> None:
    for after_lines in (1, 7, 40, 90):
        with subprocess.Popen([sys.executable, "-c", WRITER, tmp_path], stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            lines = [writer.stdout.readline() for _ in range(after_lines)]
            writer.send_signal(signal.SIGKILL)
        content = opened(tmp_path, ONE, bytes_max=1 << 30)[0].load(ONE)
        assert content is not None
        assert len(content) >= int(lines[-1]) * 10_007
        assert bytes([content[0]]) * (content[0] * 10_007) == content
        assert [f"{ONE.hex()}.snapshot"] == [path.name for path in tmp_path.iterdir()]
