"""Further folders of slabs beside a data directory: which belong to its store, and which are not there.

Each has a lock of its own and a label, `volume`, little-endian; on disk: never renumber.

 offset  bytes  field
      0      8  magic "KVSVOLUM"
      8      4  format version, 1
     12      4  number of the folder among those of its store, from 1 on
     16     16  id of the store, made of the data directory's secret
     32     16  id of the folder, random
     48      8  XXH3-64 of all bytes before
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.errors import StorageError, StorageFormatError
from kvstore.tiers.checksum import is_sealed, sealed
from kvstore.tiers.directory import lock_folder
from kvstore.tiers.faults import DiskFault
from kvstore.tiers.file_io import write_file_durably
from kvstore.tiers.superblock import FolderRecord

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvstore.tiers.faults import FaultCounts
    from kvstore.tiers.file_io import FileIo

logger = logging.getLogger(__name__)

FOLDERS_MAX = 63
LABEL_MAGIC = b"KVSVOLUM"
LABEL_VERSION = 1
_LABEL = struct.Struct("<8sII16s16s")


@dataclass(frozen=True, slots=True)
class FolderLabel:
    """What a folder says about itself."""

    number: int
    store_id: bytes
    folder_id: bytes

    def pack(self) -> bytes:
        """The label as it lies on disk."""
        return sealed(_LABEL.pack(LABEL_MAGIC, LABEL_VERSION, self.number, self.store_id, self.folder_id))


@dataclass(frozen=True, slots=True)
class FurtherFolder:
    """A folder of slabs that this process alone uses until close()."""

    path: Path
    label: FolderLabel
    lock_fd: int

    @property
    def slabs_path(self) -> Path:
        """Where its slabs are."""
        return self.path / "slabs"

    def close(self) -> None:
        """Let other processes in."""
        os.close(self.lock_fd)


def store_id(secret: bytes) -> bytes:
    """The public id of a store, by which its folders know each other."""
    return hashlib.blake2b(secret, digest_size=16, person=b"kvstore folders").digest()


class FolderSet:
    """Opens the further folders of one store, and keeps record of them."""

    def __init__(self, io: FileIo, secret: bytes, known: Sequence[FolderRecord], faults: FaultCounts) -> None:
        self.folders: list[FurtherFolder] = []
        self._io = io
        self._store_id = store_id(secret)
        self._known = known
        self._faults = faults
        self._absent: list[FolderRecord] = []

    def open(self, path: Path) -> None:
        """Lock a folder, and label it if it is new.

        One that was there before and now is not, is empty or cannot be used, is left out this time. Raises
        StorageFormatError by name for a folder of another store, DirectoryLockedError, or StorageError.
        """
        record = next((record for record in self._known if record.path == str(path)), None)
        try:
            self.folders.append(self._opened(path, record))
        except OSError as error:
            if record is None:
                raise StorageError(
                    f"cannot use the folder {path}: {error.strerror or error}; "
                    "check its permissions and free space, or leave it out"
                ) from error
            self._absent.append(record)
            self._faults.add(DiskFault.MISSING_FOLDER)
            logger.warning("folder left out, its blocks are not served until it is back: path=%s cause=%s", path, error)

    def records(self) -> tuple[FolderRecord, ...]:
        """What to remember of all that were opened, for the next start."""
        present = [
            FolderRecord(folder.label.number, was_present=True, folder_id=folder.label.folder_id, path=str(folder.path))
            for folder in self.folders
        ]
        absent = [
            FolderRecord(record.number, was_present=False, folder_id=record.folder_id, path=record.path)
            for record in self._absent
        ]
        return (*present, *absent)

    def returned(self) -> set[int]:
        """Numbers of folders of which the index knows nothing, since they were not there at the last start."""
        seen = {record.folder_id for record in self._known if record.was_present}
        return {folder.label.number for folder in self.folders if folder.label.folder_id not in seen}

    def close(self) -> None:
        """Let other processes in."""
        for folder in self.folders:
            folder.close()
        self.folders.clear()

    def _opened(self, path: Path, record: FolderRecord | None) -> FurtherFolder:
        if record is None:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        elif not (path / "volume").exists():
            raise OSError("it has lost its label; is its file system mounted?")
        lock_fd = lock_folder(path / "LOCK")
        try:
            label = self._label(path)
            (path / "slabs").mkdir(mode=0o700, exist_ok=True)
        except BaseException:
            os.close(lock_fd)
            raise
        return FurtherFolder(path, label, lock_fd)

    def _label(self, path: Path) -> FolderLabel:
        """The label that is there, or a new one."""
        if (path / "superblock").exists():
            raise StorageFormatError(f"{path} is the data directory of a store; name an empty folder")
        try:
            label = _unpack(path, (path / "volume").read_bytes())
        except FileNotFoundError:
            label = FolderLabel(self._free_number(), self._store_id, os.urandom(16))
            write_file_durably(self._io, path / "volume", label.pack())
            return label
        if label.store_id != self._store_id:
            raise StorageFormatError(f"{path} belongs to another store; name its own data directory, or empty it")
        if self._is_taken(label):
            raise StorageFormatError(f"{path} has the number {label.number} of another folder; empty it to begin anew")
        return label

    def _is_taken(self, label: FolderLabel) -> bool:
        opened = {folder.label.number for folder in self.folders}
        known = {record.number: record.folder_id for record in self._known}
        return label.number in opened or known.get(label.number, label.folder_id) != label.folder_id

    def _free_number(self) -> int:
        taken = {record.number for record in self._known} | {folder.label.number for folder in self.folders}
        return next(number for number in range(1, 2 * FOLDERS_MAX + 2) if number not in taken)


def _unpack(path: Path, data: bytes) -> FolderLabel:
    if len(data) < _LABEL.size or data[: len(LABEL_MAGIC)] != LABEL_MAGIC:
        raise StorageFormatError(f"{path / 'volume'} is not a label of kvstore; name an empty folder")
    _, version, number, of_store, folder_id = _LABEL.unpack_from(data)
    if version != LABEL_VERSION:
        raise StorageFormatError(
            f"{path / 'volume'} has format version {version}, this kvstore reads {LABEL_VERSION}; "
            "use the version that wrote it or another folder"
        )
    if not is_sealed(data) or not 0 < number <= 2 * FOLDERS_MAX + 1:
        raise StorageFormatError(f"{path / 'volume'} is damaged; empty the folder (it is a cache) or choose another")
    return FolderLabel(number, of_store, folder_id)
