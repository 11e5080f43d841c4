"""Opening a data directory: lock, folders, slabs, and the blocks that they hold."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from kvstore.errors import ConfigError
from kvstore.tiers.codecs.aes_gcm import BlockCipher
from kvstore.tiers.codecs.known_keys import KnownKeys, require_keys, still_needed
from kvstore.tiers.coded_header import CodedHeader
from kvstore.tiers.coded_transfer import CodedTransfer
from kvstore.tiers.directory import boot_id
from kvstore.tiers.disk_services import DiskServices
from kvstore.tiers.faults import DiskFault, FaultCounts
from kvstore.tiers.further_folders import FOLDERS_MAX, FolderSet
from kvstore.tiers.manifest import Manifest, read_rows, row_key
from kvstore.tiers.persistent import PolicyStorage
from kvstore.tiers.policy_files import PINS_KIND, PolicyFiles
from kvstore.tiers.recovery import SlabScanner, newest_copies
from kvstore.tiers.slab_folder import SlabFolder
from kvstore.tiers.slab_volume import NUMBER_BITS, SlabVolume
from kvstore.tiers.superblock import Superblock, SuperblockFile, load_superblock
from kvstore.tiers.transfer import SlotTransfer

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence
    from contextlib import ExitStack
    from pathlib import Path

    from kvstore.tiers.codecs.keys import KeyProvider
    from kvstore.tiers.directory import DataDirectory
    from kvstore.tiers.file_io import FileIo
    from kvstore.tiers.further_folders import FurtherFolder
    from kvstore.tiers.recovery import FoundBlock
    from kvstore.tiers.slab import Slab

# Sequences carry the start count above these bits, so that they rise over restarts without being written anywhere.
_SEQUENCE_BITS = 40
# LMDB's hard limit, a share of the capacity; the slab folder reckons with less for the rows of its slots.
_INDEX_SHARE = 8
_INDEX_MAP_BYTES_MIN = 1 << 20
_PINS_SHARE = 8  # of what policy files may take
_PINS_BYTES_MIN = 64 << 10  # less only where that is half of it: 200 pins, and the file that replaces theirs


class Place(Protocol):
    """What holds the files of a tier while it is open."""

    @property
    def path(self) -> Path:
        """What messages call it."""
        ...

    def close(self) -> None:
        """Let go of it; idempotent."""
        ...


class HintFiles(PolicyStorage, Protocol):
    """What the tier itself asks of the files of policies and pins."""

    @property
    def file_bytes(self) -> int:
        """Real bytes of all files."""
        ...

    def keep(self, ns_ids: Container[bytes]) -> None:
        """Find what is there; remove what is of other namespaces."""
        ...


@dataclass(frozen=True, slots=True)
class DiskSettings:
    """How a tier is opened; see DiskTier.open."""

    capacity_bytes: int
    further_paths: tuple[Path, ...]
    free_floor_bytes: int | None
    io_threads: int
    keys: KeyProvider | None = None


@dataclass(frozen=True, slots=True)
class DiskFiles:
    """An open data directory, its slabs and the blocks found in them; likewise of a tier in memory."""

    place: Place
    folders: Sequence[FurtherFolder]
    services: DiskServices
    secret: bytes
    policy_files: HintFiles
    pin_files: HintFiles
    slabs: list[Slab]
    _blocks: dict[int, list[FoundBlock]]

    def blocks_of(self, slab: Slab) -> list[FoundBlock]:
        """The blocks of a slab."""
        return self._blocks.get(slab.number, [])

    def quarantined_in(self, slab: Slab) -> list[int]:
        """Slot numbers of a slab that are not to be used."""
        places = self.services.superblock.current.quarantined
        return sorted(slot for number, slot in places if number == slab.number)


def open_files(directory: DataDirectory, settings: DiskSettings, io: FileIo, undo: ExitStack) -> DiskFiles:
    """Find what a locked directory and its further folders hold, write a new index of it, and count the start.

    `undo` closes what was opened, the directory included. Raises OSError, StorageError or StorageFormatError.
    """
    undo.callback(directory.close)
    if len(settings.further_paths) > FOLDERS_MAX:
        raise ConfigError(f"{len(settings.further_paths)} further folders are named, expected at most {FOLDERS_MAX}")
    faults = FaultCounts()
    before = load_superblock(directory.superblock_path)
    if before is not None:
        require_keys(before.keys, settings.keys, directory.path)
    secret = directory.secret(io)
    folders = FolderSet(io, secret, before.folders if before is not None else (), faults)
    undo.callback(folders.close)
    for path in settings.further_paths:
        folders.open(path)
    places = [(0, directory.slabs_path), *((folder.label.number, folder.slabs_path) for folder in folders.folders)]
    volumes = [
        SlabVolume(io, path, faults, number=number, free_floor_bytes=settings.free_floor_bytes)
        for number, path in places
    ]
    folder = SlabFolder(volumes, faults, capacity_bytes=settings.capacity_bytes)
    undo.callback(folder.close)
    transfer = SlotTransfer(io, faults, settings.io_threads * len(volumes))
    undo.callback(transfer.close)
    slabs = folder.open_all()
    if before is None:
        # Without clear generations nobody knows which blocks may be served.
        for slab in slabs:
            folder.remove(slab)
        slabs, before = [], Superblock(0, b"\0" * 16, clean=True)
    # Nothing is written before the superblock of this start is there, so its count is known, and cannot fail to rise.
    next_sequence = itertools.count(before.start_count + 1 << _SEQUENCE_BITS).__next__
    cipher = None if settings.keys is None else BlockCipher(settings.keys)
    coded = CodedTransfer(transfer, io, cipher, next_sequence)
    scanner = SlabScanner(transfer, coded, before.generations)
    found = _find_blocks(directory, before, slabs, scanner, folders)
    kept, superseded = newest_copies(block for block in found if block.place not in before.quarantined)
    manifest = Manifest(directory.index_path, max(_INDEX_MAP_BYTES_MIN, settings.capacity_bytes // _INDEX_SHARE))
    undo.callback(manifest.close)
    rows = [(row_key(block.slab.number, block.index), block.header.pack()) for block in kept]
    if not manifest.put(sorted(rows)):
        faults.add(DiskFault.INDEX_FULL)
    for block in superseded:
        transfer.erase(block.slab, [block.index])
    superblock = SuperblockFile(io, directory.superblock_path, _next_start(before, slabs, folders, found))
    coded.note_keys(KnownKeys(superblock))
    services = DiskServices(folder, transfer, coded, manifest, superblock, faults, next_sequence)
    blocks: dict[int, list[FoundBlock]] = {}
    for block in kept:
        blocks.setdefault(block.slab.number, []).append(block)
    hints = _hint_files(io, directory, folder.policy_bytes_max, faults)
    return DiskFiles(directory, folders.folders, services, secret, *hints, slabs, blocks)


def _hint_files(
    io: FileIo, directory: DataDirectory, bytes_max: int, faults: FaultCounts
) -> tuple[PolicyFiles, PolicyFiles]:
    """Those of policies and of pins."""
    path, pins_bytes = directory.policy_path, min(max(bytes_max // _PINS_SHARE, _PINS_BYTES_MIN), bytes_max // 2)
    policies = PolicyFiles(io, path, faults, bytes_max - pins_bytes)
    return policies, PolicyFiles(io, path, faults, pins_bytes, PINS_KIND)


def _next_start(before: Superblock, slabs: list[Slab], folders: FolderSet, found: Sequence[FoundBlock]) -> Superblock:
    """The superblock of this start. Slots in quarantine are forgotten with their slab, unless that is not there now.

    So are keys with the last block that they encrypted.
    """
    slot_counts = {slab.number: slab.header.slot_count for slab in slabs}
    absent = {record.number for record in folders.records() if not record.was_present}
    return replace(
        before,
        start_count=before.start_count + 1,
        boot_id=boot_id(),
        clean=False,
        quarantined=frozenset(
            (slab, slot)
            for slab, slot in before.quarantined
            if slot < slot_counts.get(slab, 0) or slab >> NUMBER_BITS in absent
        ),
        folders=folders.records(),
        keys=before.keys if absent else still_needed(before.keys, _key_ids(found)),
    )


def _key_ids(found: Iterable[FoundBlock]) -> set[bytes]:
    return {block.header.place.key_id for block in found if isinstance(block.header, CodedHeader)}


def _find_blocks(
    directory: DataDirectory, before: Superblock, slabs: list[Slab], scanner: SlabScanner, folders: FolderSet
) -> list[FoundBlock]:
    """From the index if it can be trusted, else from the headers.

    After another boot without a clean stop the index may have any mixture of old and new pages. Of folders that were
    not there at the last start it says nothing.
    """
    trusted = before.clean or before.boot_id == boot_id()
    rows = read_rows(directory.index_path) if trusted and slabs else None
    returned = folders.returned()
    listed = {slab.number: slab for slab in slabs if slab.number >> NUMBER_BITS not in returned}
    found = None if rows is None else scanner.blocks_from_rows(rows, listed)
    if found is None:
        if slabs:
            scanner.faults.add(DiskFault.LOST_INDEX)
        return scanner.blocks_from_slabs(slabs)
    unlisted = [slab for slab in slabs if slab.number not in listed]
    return [*found, *scanner.blocks_from_slabs(unlisted)]
