"""Changed files are noticed, read once for each change, and a bad one changes nothing."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from kvstore.errors import ConfigError
from kvstore.testing.manual_clock import ManualClock
from kvstore.transport.private_files import FILE_BYTES_MAX, read_private, signature
from kvstore.transport.reload import Reloadable, Reloader


class Loaded:
    """What was read of a file, each time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.contents: list[str] = []

    def load(self) -> None:
        content = self.path.read_text()
        if content == "bad":
            raise ConfigError("it is bad")
        self.contents.append(content)


@pytest.fixture
def loaded(tmp_path: Path) -> Loaded:
    path = tmp_path / "file"
    path.write_text("first")
    return Loaded(path)


def test_a_change_is_loaded_once_and_a_bad_one_is_told_and_kept_out(loaded: Loaded, caplog: pytest.LogCaptureFixture):
    async def run() -> None:
        reloader = Reloader([Reloadable("it", loaded.load, [loaded.path])], ManualClock())
        assert not await reloader.look()
        for content, changes in (("second", True), ("bad", False), ("third, and last", True)):
            loaded.path.write_text(content)
            os.utime(loaded.path, ns=(0, len(loaded.contents) + len(content)))
            assert changes is await reloader.look()
            assert not await reloader.look()
        assert {("it", "ok"): 2, ("it", "refused"): 1} == reloader.outcomes

    asyncio.run(run())
    assert ["second", "third, and last"] == loaded.contents
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert ["kept what was loaded before: what=it cause=it is bad"] == warned


def test_all_is_loaded_when_asked_for_changed_or_not(loaded: Loaded):
    async def run() -> None:
        reloader = Reloader([Reloadable("it", loaded.load, [loaded.path])], ManualClock())
        assert await reloader.load_all()

    asyncio.run(run())
    assert ["first"] == loaded.contents


def test_what_has_no_file_is_loaded_as_often_as_it_says_and_when_it_is_wanted(loaded: Loaded):
    wanted = False

    async def run() -> None:
        nonlocal wanted
        clock = ManualClock()
        item = Reloadable("keys", loaded.load, seconds=300, is_wanted=lambda: wanted)
        reloader = Reloader([item], clock)
        counts = []
        for seconds, is_wanted in ((299, False), (1, False), (9, True), (1, True), (9, True), (299, False)):
            clock.advance(seconds)
            wanted = is_wanted
            await reloader.look()
            counts.append(len(loaded.contents))
        assert [0, 1, 1, 2, 2, 3] == counts

    asyncio.run(run())


@pytest.mark.parametrize("change", ["written", "replaced", "removed", "touched"])
def test_every_change_of_a_file_changes_its_signature(tmp_path: Path, change: str):
    path = tmp_path / "file"
    path.write_text("before")
    os.utime(path, ns=(0, 0))
    before = signature([path])
    if change == "written":
        path.write_text("after it")
    elif change == "replaced":
        other = tmp_path / "other"
        other.write_text("behind")
        os.utime(other, ns=(0, 0))
        other.rename(path)
    elif change == "removed":
        path.unlink()
    else:
        os.utime(path, ns=(0, 1))
    assert before != signature([path])


def test_a_file_beyond_reason_is_refused(tmp_path: Path):
    path = tmp_path / "file"
    path.touch(mode=0o600)
    path.write_bytes(bytes(FILE_BYTES_MAX + 1))
    with pytest.raises(ConfigError, match=f"more than {FILE_BYTES_MAX} bytes"):
        read_private(path, "it")
