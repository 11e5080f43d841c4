"""The data directory: its lock, its secret, and where its files are."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

from kvstore.errors import DirectoryLockedError, StorageFormatError
from kvstore.tiers.file_io import write_file_durably

if TYPE_CHECKING:
    from kvstore.tiers.file_io import FileIo

SECRET_BYTES = 32


class DataDirectory:
    """A folder that this process alone uses until close(). Made (mode 0700) if it is not there.

    Raises DirectoryLockedError if another process has it, OSError if it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.superblock_path = path / "superblock"
        self.secret_path = path / "secret"
        self.index_path = path / "index"
        self.slabs_path = path / "slabs"
        self.policy_path = path / "policy"
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock_fd: int | None = lock_folder(path / "LOCK")
        try:
            self.slabs_path.mkdir(mode=0o700, exist_ok=True)
        except OSError:
            self.close()
            raise

    def secret(self, io: FileIo) -> bytes:
        """The node's 32 random bytes, made at the first call. Raises StorageFormatError if the file is not that."""
        try:
            secret = self.secret_path.read_bytes()
        except FileNotFoundError:
            secret = os.urandom(SECRET_BYTES)
            write_file_durably(io, self.secret_path, secret)
        if len(secret) != SECRET_BYTES:
            raise StorageFormatError(
                f"{self.secret_path} has {len(secret)} bytes, expected {SECRET_BYTES}; "
                "restore it, or delete the data directory"
            )
        return secret

    def close(self) -> None:
        """Let other processes in; idempotent."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


def boot_id() -> bytes:
    """16 bytes that change whenever the machine starts."""
    return UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes


def lock_folder(path: Path) -> int:
    """A descriptor that holds the lock of `path`, with our process id written there for people to read.

    Raises DirectoryLockedError if another process has it, OSError if it cannot be written.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
    except BlockingIOError:
        holder = os.pread(fd, 32, 0).decode(errors="replace") or "unknown"
        os.close(fd)
        raise DirectoryLockedError(
            f"{path.parent} is in use by process {holder}; stop it or choose another data directory"
        ) from None
    except OSError:
        os.close(fd)
        raise
    return fd
