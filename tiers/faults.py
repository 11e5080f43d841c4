"""What can go wrong with the disk while it serves, counted by kind."""

from __future__ import annotations

import enum
import threading
from collections import Counter


class DiskFault(enum.StrEnum):
    """Kinds of disk faults; in blocks where a block is concerned. Each was a miss or a refused store."""

    READ_ERROR = "read_error"
    SHORT_READ = "short_read"
    WRITE_ERROR = "write_error"
    SHORT_WRITE = "short_write"
    SYNC_ERROR = "sync_error"
    NO_SPACE = "no_space"
    FREE_FLOOR = "free_floor"
    INDEX_FULL = "index_full"
    CORRUPT_HEADER = "corrupt_header"
    CORRUPT_PAYLOAD = "corrupt_payload"
    OTHER_BLOCK = "other_block"
    OTHER_CODEC = "other_codec"
    UNKNOWN_KEY = "unknown_key"
    NO_SLOT_OF_SIZE = "no_slot_of_size"
    QUARANTINED_SLOT = "quarantined_slot"
    DROPPED_SLAB = "dropped_slab"
    LOST_INDEX = "lost_index"
    MISSING_FOLDER = "missing_folder"
    REFUSED_SNAPSHOT = "refused_snapshot"


class FaultCounts:
    """Counters of faults since the start. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[DiskFault] = Counter()

    def add(self, fault: DiskFault, count: int = 1) -> None:
        """Count `count` faults of a kind."""
        with self._lock:
            self._counts[fault] += count

    def snapshot(self) -> dict[str, int]:
        """Counts of the kinds that happened, by name."""
        with self._lock:
            return {fault.value: count for fault, count in self._counts.items() if count}
