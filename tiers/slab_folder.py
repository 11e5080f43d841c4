"""All slab files of a store: which there are, and that together they never exceed the capacity in real bytes."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kvstore.tiers.buffers import PAGE_BYTES, whole_pages
from kvstore.tiers.faults import DiskFault
from kvstore.tiers.manifest import INDEX_BYTES_MIN, row_bytes_max
from kvstore.tiers.slab import SlabHeader, slab_bytes
from kvstore.tiers.slab_volume import NUMBER_BITS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvstore.tiers.faults import FaultCounts
    from kvstore.tiers.slab import Slab, SlotGeometry
    from kvstore.tiers.slab_volume import SlabVolume

SLAB_BYTES_MAX = 64 << 20
# Slabs are a sixteenth of the capacity where a pool has, or asks for, as much of a kind of slots, and smaller at first,
# but no less than this share: many namespaces, each with several sizes of slots, have room beside each other then.
_LARGEST_SHARE = 16
_SMALLEST_SHARE = 256
# Superblock, secret and lock, with their temporary files.
METADATA_BYTES = 128 << 10
# Lock and label of each further folder, with their temporary files.
FOLDER_METADATA_BYTES = 16 << 10
# What policy files may take of the capacity: 40 bytes for each run of blocks, twice while one is replaced.
POLICY_SHARE = 128
# Where a file system is nearly full, a slab for fewer slots is not worth its file.
SLOTS_MIN = 8


class SlabFolder:
    """Makes, finds and removes slab files within `capacity_bytes`. Thread-safe: one change at a time.

    The capacity covers the slabs in all folders, what the index may need for their slots, and the other files of the
    store. Each new slab goes to the folder with the fewest bytes of slabs that has room; one whose calls fail comes
    last.
    """

    def __init__(self, volumes: Sequence[SlabVolume], faults: FaultCounts, *, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.volumes = tuple(volumes)
        self._faults = faults
        self._lock = threading.Lock()
        self._open_slabs: dict[int, Slab] = {}
        self._closed = False
        self._row_bytes = INDEX_BYTES_MIN

    @property
    def direct_io(self) -> bool:
        """Whether all slabs are read and written past the page cache."""
        return all(volume.direct_io for volume in self.volumes)

    @property
    def policy_bytes_max(self) -> int:
        """Bytes that no slab is made of, for the files of the eviction policy."""
        return self.capacity_bytes // POLICY_SHARE

    @property
    def file_bytes(self) -> int:
        """Real bytes of all slab files."""
        return sum(volume.file_bytes for volume in self.volumes)

    def create(
        self, ns_id: bytes, geometry: SlotGeometry, *, needed_bytes: int, bytes_max: int | None = None
    ) -> Slab | None:
        """A new, preallocated slab of at most `bytes_max`, and of `needed_bytes` where that is a usual size.

        None when that, the capacity or the file systems have no room for one, and after close().
        """
        with self._lock:
            wanted_count = 0 if self._closed else self._allowed_slots(geometry, needed_bytes)
            if bytes_max is not None:
                wanted_count = min(wanted_count, (bytes_max - slab_bytes(geometry, 0)) // geometry.slot_bytes)
            if wanted_count <= 0:
                return None
            for volume in sorted(self.volumes, key=lambda volume: (volume.failing, volume.file_bytes)):
                slab = self._create_in(volume, ns_id, geometry, wanted_count)
                if slab is not None:
                    return slab
            return None

    def remove(self, slab: Slab) -> None:
        """Delete a slab's file; a no-op after close(). Its bytes stay charged if the system refuses."""
        with self._lock:
            if self._open_slabs.pop(slab.number, None) is None:
                return
            slab.volume.settle(slab)
            slab.volume.close(slab)
            if slab.volume.unlink(slab.path):
                self._charge(slab.volume, slab.geometry, -slab.header.slot_count)

    def close(self) -> None:
        """Close all slab files; from now on no file is made or removed. Idempotent."""
        with self._lock:
            self._closed = True
            for slab in self._open_slabs.values():
                slab.volume.close(slab)
            self._open_slabs.clear()

    def open_slabs(self) -> tuple[Slab, ...]:
        """The slabs that are open now."""
        with self._lock:
            return tuple(self._open_slabs.values())

    def open_all(self) -> list[Slab]:
        """The slabs that are there, by number. Damaged ones, strays and those beyond the capacity are deleted.

        Raises OSError, or StorageFormatError if another version wrote one.
        """
        found = [
            (number % (1 << NUMBER_BITS), number, volume, path)
            for volume in self.volumes
            for number, path in volume.found()
        ]
        slabs: list[Slab] = []
        for _, number, volume, path in sorted(found, key=lambda entry: entry[:2]):
            slab = self._open_slab(volume, number, path)
            if slab is not None:
                slabs.append(slab)
            else:
                self._faults.add(DiskFault.DROPPED_SLAB)
                volume.unlink(path)
        return sorted(slabs, key=lambda slab: slab.number)

    def _create_in(self, volume: SlabVolume, ns_id: bytes, geometry: SlotGeometry, wanted_count: int) -> Slab | None:
        slot_count = self._fitting_slots(volume, geometry, wanted_count)
        if slot_count <= 0:
            return None
        number = volume.next_number()
        if number in self._open_slabs:
            return None
        coded_pages = geometry.kind // PAGE_BYTES
        header = SlabHeader(number, ns_id, slot_count, geometry.part_sizes, geometry.block_tokens, coded_pages)
        self._charge(volume, geometry, slot_count)
        try:
            slab = volume.make(header, slab_bytes(geometry, slot_count))
        except OSError:
            if volume.discard(header):
                self._charge(volume, geometry, -slot_count)
            return None
        self._open_slabs[number] = slab
        return slab

    def _open_slab(self, volume: SlabVolume, number: int, path: Path) -> Slab | None:
        header = volume.read_header(path)
        if header is None or header.number != number or number >> NUMBER_BITS != volume.number:
            return None
        geometry = header.geometry
        if _charged_bytes(geometry, header.slot_count) > self._left_bytes():
            return None
        slab = volume.open(header, path)
        slab.written[:] = True
        self._charge(volume, geometry, header.slot_count)
        self._open_slabs[number] = slab
        return slab

    def _allowed_slots(self, geometry: SlotGeometry, needed_bytes: int) -> int:
        """Slots of the next slab: the usual size, at least one slot, at most what the capacity leaves."""
        usual_count = max(1, (self._usual_bytes(needed_bytes) - PAGE_BYTES) // geometry.slot_bytes)
        empty_bytes = _charged_bytes(geometry, 0)
        slot_bytes = _charged_bytes(geometry, 1) - empty_bytes
        return max(0, min(usual_count, (self._left_bytes() - empty_bytes) // slot_bytes))

    def _fitting_slots(self, volume: SlabVolume, geometry: SlotGeometry, wanted_count: int) -> int:
        """As many as a file system has room for above its floor; none if these are few and more are wanted."""
        empty_bytes = _charged_bytes(geometry, 0)
        fitting_count = (volume.left_bytes() - empty_bytes) // (_charged_bytes(geometry, 1) - empty_bytes)
        if fitting_count >= wanted_count:
            return wanted_count
        self._faults.add(DiskFault.FREE_FLOOR)
        return fitting_count if fitting_count >= min(wanted_count, SLOTS_MIN) else 0

    def _usual_bytes(self, needed_bytes: int) -> int:
        least_bytes = self.capacity_bytes // _SMALLEST_SHARE
        most_bytes = min(SLAB_BYTES_MAX, self.capacity_bytes // _LARGEST_SHARE)
        return whole_pages(min(most_bytes, max(least_bytes, needed_bytes)))

    def _left_bytes(self) -> int:
        other_bytes = METADATA_BYTES + FOLDER_METADATA_BYTES * (len(self.volumes) - 1) + self.policy_bytes_max
        return self.capacity_bytes - other_bytes - self._row_bytes - self.file_bytes

    def _charge(self, volume: SlabVolume, geometry: SlotGeometry, slot_count: int) -> None:
        """Charge a slab, or refund it where `slot_count` is negative."""
        sign = 1 if slot_count > 0 else -1
        file_bytes = slab_bytes(geometry, abs(slot_count))
        volume.file_bytes += sign * file_bytes
        self._row_bytes += sign * (_charged_bytes(geometry, abs(slot_count)) - file_bytes)


def _charged_bytes(geometry: SlotGeometry, slot_count: int) -> int:
    """What a slab costs: its file, a page for the file's extent tree, and the index rows of its slots."""
    rows_bytes = slot_count * row_bytes_max(geometry.packed_bytes)
    return slab_bytes(geometry, slot_count) + PAGE_BYTES + rows_bytes
