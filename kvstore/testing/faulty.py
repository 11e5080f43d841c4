"""File calls that fail on demand, over real files: what a full, dying or suddenly powerless disk does."""

from __future__ import annotations

import enum
import errno
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.tiers.file_io import FileIo, FileSystemSpace, SystemIo

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence
    from pathlib import Path

    from kvstore.tiers.base import Bytes1D


_PAGE_BYTES = 4096
_KEPT_SHARE = 0.5


class IoCall(enum.Enum):
    """Calls of FileIo that can be made to fail."""

    OPEN = "open"
    READ = "read"
    WRITE = "write"
    ALLOCATE = "allocate"
    SYNC = "sync"
    UNLINK = "unlink"
    REPLACE = "replace"
    SPACE = "space"


@dataclass(slots=True)
class _Rule:
    """What happens to the next calls of a kind: `skip` of them go well, then `left` do not."""

    call: IoCall
    skip: int
    left: int
    error_number: int | None = None
    kept_bytes: int | None = None
    reported_whole: bool = False

    def strikes(self) -> bool:
        if self.skip:
            self.skip -= 1
            return False
        self.left -= 1
        return self.left >= 0


class FaultyIo:
    """A FileIo over real files whose calls fail as a test told them to. Thread-safe.

    `cut_power()` undoes slab writes since each file's last sync, all of them or some pages, and lets every later call
    fail with EIO.
    """

    def __init__(self, inner: FileIo | None = None) -> None:
        self._inner = inner or SystemIo()
        self._lock = threading.Lock()
        self._rules: list[_Rule] = []
        self._paths: dict[int, Path] = {}
        self._unsynced: list[tuple[Path, int, bytes]] = []
        self._powerless = False

    def fail(self, call: IoCall, error_number: int, *, skip: int = 0, times: int = 1) -> None:
        """Let `times` calls raise OSError(error_number), after `skip` that go well."""
        self._add(_Rule(call, skip, times, error_number=error_number))

    def shorten(self, call: IoCall, kept_bytes: int, *, skip: int = 0, times: int = 1) -> None:
        """Let reads or writes move only `kept_bytes`, and say so."""
        self._add(_Rule(call, skip, times, kept_bytes=kept_bytes))

    def tear(self, kept_bytes: int, *, skip: int = 0, times: int = 1) -> None:
        """Let writes put down only `kept_bytes` but report that all went well."""
        self._add(_Rule(IoCall.WRITE, skip, times, kept_bytes=kept_bytes, reported_whole=True))

    def heal(self) -> None:
        """Forget all rules."""
        with self._lock:
            self._rules.clear()

    def cut_power(self, kept: random.Random | None = None) -> None:
        """Lose what was not synced; from now on every call fails.

        With `kept`, half of the unsynced pages, chosen by it, have reached the medium all the same.
        """
        with self._lock:
            self._powerless = True
            settled: set[tuple[Path, int]] = set()
            for path, offset, content in reversed(self._unsynced):
                for start in range(0, len(content), _PAGE_BYTES):
                    page = (path, (offset + start) // _PAGE_BYTES)
                    if page in settled or (kept is not None and kept.random() < _KEPT_SHARE):
                        settled.add(page)  # what was written there before is covered
                    elif path.exists():
                        with path.open("r+b") as file:
                            file.seek(offset + start)
                            file.write(content[start : start + _PAGE_BYTES])
            self._unsynced.clear()

    def open(self, path: Path, flags: int) -> int:
        """See FileIo."""
        self._strike(IoCall.OPEN)
        fd = self._inner.open(path, flags)
        with self._lock:
            self._paths[fd] = path
        return fd

    def close(self, fd: int) -> None:
        """See FileIo."""
        with self._lock:
            self._paths.pop(fd)
        self._inner.close(fd)

    def read(self, fd: int, pieces: Sequence[Bytes1D], offset: int) -> int:
        """See FileIo."""
        rule = self._strike(IoCall.READ)
        if rule is None or rule.kept_bytes is None:
            return self._inner.read(fd, pieces, offset)
        with self._path(fd).open("rb") as file:
            file.seek(offset)
            content = file.read(min(rule.kept_bytes, sum(map(len, pieces))))
        start = 0
        for piece in pieces:
            kept = content[start : start + len(piece)]
            piece[: len(kept)] = memoryview(kept)
            start += len(piece)
        return len(content)

    def write(self, fd: int, pieces: Sequence[Bytes1D], offset: int) -> int:
        """See FileIo."""
        size_bytes = sum(map(len, pieces))
        rule = self._strike(IoCall.WRITE)
        self._remember(fd, offset, size_bytes)
        if rule is None or rule.kept_bytes is None:
            return self._inner.write(fd, pieces, offset)
        with self._path(fd).open("r+b") as file:
            file.seek(offset)
            file.write(b"".join(piece.tobytes() for piece in pieces)[: rule.kept_bytes])
        return size_bytes if rule.reported_whole else min(rule.kept_bytes, size_bytes)

    def allocate(self, fd: int, size_bytes: int) -> None:
        """See FileIo."""
        self._strike(IoCall.ALLOCATE)
        self._inner.allocate(fd, size_bytes)

    def sync(self, fd: int) -> None:
        """See FileIo."""
        self._strike(IoCall.SYNC)
        self._inner.sync(fd)
        path = self._path(fd)
        with self._lock:
            self._unsynced = [entry for entry in self._unsynced if entry[0] != path]

    def unlink(self, path: Path) -> None:
        """See FileIo."""
        self._strike(IoCall.UNLINK)
        self._inner.unlink(path)

    def replace(self, source: Path, target: Path) -> None:
        """See FileIo."""
        self._strike(IoCall.REPLACE)
        self._inner.replace(source, target)
        with self._lock:
            self._paths = {fd: target if path == source else path for fd, path in self._paths.items()}

    def space(self, path: Path) -> FileSystemSpace:
        """See FileIo."""
        self._strike(IoCall.SPACE)
        return self._inner.space(path)

    def _add(self, rule: _Rule) -> None:
        with self._lock:
            self._rules.append(rule)

    def _strike(self, call: IoCall) -> _Rule | None:
        """The rule that strikes this call; raises where the rule says so."""
        with self._lock:
            if self._powerless:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            rule = next((rule for rule in self._rules if rule.call is call and rule.left > 0), None)
            if rule is None or not rule.strikes():
                return None
        if rule.error_number is not None:
            raise OSError(rule.error_number, os.strerror(rule.error_number))
        return rule

    def _path(self, fd: int) -> Path:
        with self._lock:
            return self._paths[fd]

    def _remember(self, fd: int, offset: int, size_bytes: int) -> None:
        path = self._path(fd)
        with path.open("rb") as file:
            file.seek(offset)
            content = file.read(size_bytes)
        with self._lock:
            self._unsynced.append((path, offset, content))
