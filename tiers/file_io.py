"""The file calls of the disk tier, behind a protocol, so that tests can make them fail."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvstore.tiers.base import Bytes1D

PIECES_MAX = 1024  # of one call: the system's IOV_MAX


@dataclass(frozen=True, slots=True)
class FileSystemSpace:
    """Bytes of a file system: left for us, and in all."""

    free_bytes: int
    total_bytes: int


class FileIo(Protocol):
    """File calls; each one raises OSError as the system does."""

    def open(self, path: Path, flags: int) -> int:
        """A descriptor of `path`; new files get mode 0600."""
        ...

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        ...

    def read(self, fd: int, pieces: Sequence[Bytes1D], offset: int) -> int:
        """Fill pieces of memory one after the other, at most PIECES_MAX.

        Returns the bytes read, fewer than asked for at the end of the file.
        """
        ...

    def write(self, fd: int, pieces: Sequence[Bytes1D], offset: int) -> int:
        """Write pieces of memory one after the other, at most PIECES_MAX; returns the bytes, which may be fewer."""
        ...

    def allocate(self, fd: int, size_bytes: int) -> None:
        """Give the file real, zeroed space up to `size_bytes`."""
        ...

    def sync(self, fd: int) -> None:
        """Return when the file's data is on stable storage."""
        ...

    def unlink(self, path: Path) -> None:
        """Remove a file."""
        ...

    def replace(self, source: Path, target: Path) -> None:
        """Rename atomically, then sync the folder of `target`."""
        ...

    def space(self, path: Path) -> FileSystemSpace:
        """Room on the file system of `path`."""
        ...


class SystemIo:
    """The system's own calls."""

    def open(self, path: Path, flags: int) -> int:
        """os.open with mode 0600; descriptors are not inherited."""
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def close(self, fd: int) -> None:
        """os.close."""
        os.close(fd)

    def read(self, fd: int, pieces: Sequence[Bytes1D], offset: int) -> int:
        """os.preadv; releases the GIL."""
        return os.preadv(fd, [piece.data for piece in pieces], offset)

    def write(self, fd: int, pieces: Sequence[Bytes1D], offset: int) -> int:
        """os.pwritev; releases the GIL."""
        return os.pwritev(fd, [piece.data for piece in pieces], offset)

    def allocate(self, fd: int, size_bytes: int) -> None:
        """os.posix_fallocate."""
        os.posix_fallocate(fd, 0, size_bytes)

    def sync(self, fd: int) -> None:
        """os.fdatasync."""
        os.fdatasync(fd)

    def unlink(self, path: Path) -> None:
        """os.unlink."""
        os.unlink(path)

    def replace(self, source: Path, target: Path) -> None:
        """os.replace, then fsync of the folder."""
        os.replace(source, target)
        fd = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def space(self, path: Path) -> FileSystemSpace:
        """os.statvfs: what an unprivileged process may still take, and the whole."""
        state = os.statvfs(path)
        return FileSystemSpace(state.f_bavail * state.f_frsize, state.f_blocks * state.f_frsize)


def write_file_durably(io: FileIo, path: Path, content: bytes) -> None:
    """Replace `path` by `content`: a crash leaves the old or the new file, whole. Raises OSError."""
    temporary = path.with_name(path.name + ".new")
    fd = io.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        if io.write(fd, [np.frombuffer(content, dtype=np.uint8)], 0) != len(content):
            raise OSError(f"{temporary} was written in part only")
        io.sync(fd)
    finally:
        io.close(fd)
    io.replace(temporary, path)
