"""Files that say what the eviction policy knew of a namespace, or what was pinned: one each, replaced as a whole.

They keep to a share of their own, and are hints. One that is missing, damaged or too large costs the policy its memory,
or pins, and never a block.
"""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING

from kvstore.tiers.buffers import whole_pages
from kvstore.tiers.faults import DiskFault
from kvstore.tiers.file_io import write_file_durably

if TYPE_CHECKING:
    from collections.abc import Container
    from pathlib import Path

    from kvstore.tiers.faults import FaultCounts
    from kvstore.tiers.file_io import FileIo

SNAPSHOT_KIND = "snapshot"
PINS_KIND = "pins"
_SUFFIX_UNFINISHED = ".new"


class PolicyFiles:
    """The files of one kind in the folder `policy/` of a data directory. Thread-safe: one change at a time.

    All files together, and the one being written, take at most `bytes_max`.
    """

    def __init__(self, io: FileIo, path: Path, faults: FaultCounts, bytes_max: int, kind: str = SNAPSHOT_KIND) -> None:
        """Makes the folder where it is missing. Raises OSError."""
        self.bytes_max = bytes_max
        self._io = io
        self._kind = kind
        self._name = re.compile(rf"([0-9a-f]{{32}})\.{kind}")
        self._path = path
        self._faults = faults
        self._lock = threading.Lock()
        path.mkdir(mode=0o700, exist_ok=True)
        self._sizes: dict[bytes, int] = {}

    @property
    def file_bytes(self) -> int:
        """Real bytes of all files."""
        return sum(self._sizes.values())

    def keep(self, ns_ids: Container[bytes]) -> None:
        """Find what is there; remove what is of other namespaces, was never finished, or is beyond a share that is
        smaller than it was, the largest first. Raises OSError."""
        with self._lock:
            for path in self._path.iterdir():
                match = self._name.fullmatch(path.name)
                ns_id = bytes.fromhex(match[1]) if match else b""
                if match and ns_id in ns_ids:
                    self._sizes[ns_id] = whole_pages(path.stat().st_size)
                elif match or path.name.endswith(_SUFFIX_UNFINISHED):
                    self._io.unlink(path)
            while self.file_bytes > self.bytes_max:
                largest = max(self._sizes, key=self._sizes.__getitem__)
                self._io.unlink(self._file(largest))
                del self._sizes[largest]

    def load(self, ns_id: bytes) -> bytes | None:
        """What was saved last of a namespace; None where there is nothing or it cannot be read."""
        with self._lock:
            if ns_id not in self._sizes:
                return None
            try:
                return self._file(ns_id).read_bytes()
            except OSError:
                self._faults.add(DiskFault.READ_ERROR)
                return None

    def save(self, ns_id: bytes, content: bytes) -> bool:
        """Replace it durably: a crash leaves the old or the new one, whole. False where it cannot be written or has
        no room; then the old one is there still."""
        size = whole_pages(len(content))
        with self._lock:
            if self.file_bytes + size > self.bytes_max:
                self._faults.add(DiskFault.NO_SPACE)
                return False
            try:
                write_file_durably(self._io, self._file(ns_id), content)
            except OSError:
                self._faults.add(DiskFault.WRITE_ERROR)
                self._unlink(self._file(ns_id).with_name(self._file(ns_id).name + _SUFFIX_UNFINISHED))
                return False
            self._sizes[ns_id] = size
        return True

    def refuse(self) -> None:
        """Count a file whose content was of no use to its reader. It stays until it is replaced."""
        self._faults.add(DiskFault.REFUSED_SNAPSHOT)

    def remove(self, ns_id: bytes) -> None:
        """Delete what was saved of a namespace, if anything."""
        with self._lock:
            if ns_id in self._sizes and self._unlink(self._file(ns_id)):
                del self._sizes[ns_id]

    def _file(self, ns_id: bytes) -> Path:
        return self._path / f"{ns_id.hex()}.{self._kind}"

    def _unlink(self, path: Path) -> bool:
        try:
            self._io.unlink(path)
        except FileNotFoundError:
            return True
        except OSError:
            self._faults.add(DiskFault.WRITE_ERROR)
            return False
        return True
