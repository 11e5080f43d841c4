"""Readers of what lies on disk take any bytes: None or a typed error, or a value that is written as it was read."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvstore.errors import StorageFormatError
from kvstore.radix.tree import POLICIES, RadixTree
from kvstore.store.snapshot import Moment, PolicySnapshot, SnapshotOwner, unpack_snapshot
from kvstore.tiers import further_folders, manifest
from kvstore.tiers.base import BlockIdentity
from kvstore.tiers.checksum import DIGEST_BYTES, sealed
from kvstore.tiers.codecs.aes_gcm import PieceCipher
from kvstore.tiers.codecs.base import NO_ERROR, CodingError
from kvstore.tiers.coded_header import Inside, Place, StoredPart, pack_clear, seal_header, unpack_coded
from kvstore.tiers.faults import DiskFault
from kvstore.tiers.further_folders import FolderLabel
from kvstore.tiers.header import BlockHeader, unpack_header
from kvstore.tiers.slab import SlabHeader, slab_bytes, unpack_slab_header
from kvstore.tiers.superblock import FolderRecord, KeyRecord, Superblock, load_superblock
from kvstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from conftest import Fuzz, Mutator

PAGE_BYTES = 4096
IDENTITY = BlockIdentity(b"r" * 16, b"p" * 16, b"k" * 16, bytes(64))
HEADER = BlockHeader(3, 9, (2 << 40) + 7, 5, b"n" * 16, IDENTITY, 1, 2, 333, 0x0123456789ABCDEF)
SUPERBLOCKS = [
    Superblock(4, b"b" * 16, clean=True),
    Superblock(
        2**63,
        b"b" * 16,
        clean=False,
        generations={b"o" * 16: 1, b"n" * 16: 5},
        quarantined=frozenset({(3, 9), (3, 1)}),
        folders=(
            FolderRecord(1, was_present=True, folder_id=b"f" * 16, path="/mnt/other"),
            FolderRecord(2, was_present=False, folder_id=b"g" * 16, path="/mnt/\udcff"),
        ),
        keys=(KeyRecord(b"old".ljust(8, b"\0"), b"c" * 16), KeyRecord(b"new".ljust(8, b"\0"), b"d" * 16)),
    ),
]
SLABS = [
    SlabHeader(3, b"n" * 16, 50, (5000, 333), 16),
    SlabHeader(1 << 24, b"m" * 16, 1, (1,), 1),
    SlabHeader(4, b"n" * 16, 50, (5000, 333), 16, 5),
]
NS_KEY = bytes(range(16))
ROOT = b"r" * 16
BLOCK_TOKENS = 2
FIRST_TICK = 1 << 46
SECOND = 1_000_000
RUNS = 12


def damaged(mutator: Mutator, seeds: Sequence[bytes]) -> bytes:
    """Half of the time with a checksum that is right, so that what lies behind it is reached."""
    raw = mutator.mutated([seed[:-DIGEST_BYTES] for seed in seeds])
    return sealed(raw) if mutator.random.random() < 0.6 else mutator.mutated(seeds)


def test_a_superblock_is_read_or_refused(fuzz: Fuzz, memory_path: Path) -> None:
    path = memory_path / "superblock"

    def target(raw: bytes) -> None:
        path.write_bytes(raw)
        with suppress(StorageFormatError):
            found = load_superblock(path)
            assert found is not None
            path.write_bytes(found.pack())
            assert found == load_superblock(path)

    seeds = [one.pack() for one in SUPERBLOCKS]
    fuzz.run(5_000, lambda mutator: damaged(mutator, seeds), target)


def test_a_slab_header_is_read_or_refused(fuzz: Fuzz) -> None:
    path = Path("slab")

    def target(raw: bytes) -> None:
        with suppress(StorageFormatError):
            found = unpack_slab_header(raw, path)
            if found is not None:
                assert found == unpack_slab_header(found.pack().ljust(PAGE_BYTES, b"\0"), path)
                assert slab_bytes(found.geometry, found.slot_count) > 0

    def make(mutator: Mutator) -> bytes:
        raw = damaged(mutator, [one.pack() for one in SLABS])
        return raw.ljust(PAGE_BYTES, b"\0")[:PAGE_BYTES] if mutator.random.random() < 0.5 else raw

    fuzz.run(10_000, make, target)


def test_a_block_header_is_read_or_refused(fuzz: Fuzz) -> None:
    seeds = [HEADER.pack()]

    def target(raw: bytes) -> None:
        found = unpack_header(memoryview(raw))
        assert found is None or found == unpack_header(found.pack())

    fuzz.run(10_000, lambda mutator: damaged(mutator, seeds), target)


def coded_header(cipher: PieceCipher | None) -> bytes:
    place = Place(3, 9, (2 << 40) + 7, 5, b"n" * 16, *((b"key".ljust(8, b"\0"), b"s" * 16) if cipher else ()))
    parts = (StoredPart(5000, 333, 1, CodingError(0.5, 0.25), 7, 8), StoredPart(9, 9, 0, NO_ERROR, 1, 0))
    clear = pack_clear(place, 2, len(IDENTITY.tokens) // 4)
    return seal_header(clear, Inside(1, 77, IDENTITY, parts), place.sequence, cipher)


def test_a_header_of_a_coded_slot_is_read_or_refused(fuzz: Fuzz) -> None:
    """Half of the time with a checksum that is right. With a key nothing damaged is ever read."""
    seeds = [coded_header(None)]
    cipher = PieceCipher(AESGCM(b"k" * 32))
    sealed_seeds = [coded_header(cipher)]

    def target(raw: bytes) -> None:
        found = unpack_coded(raw, lambda key_id, salt: cipher)
        if not isinstance(found, DiskFault):
            assert found.packed in raw
            assert not found.place.encrypts or found.packed in sealed_seeds
            again = unpack_coded(found.pack(), lambda key_id, salt: cipher)
            assert not isinstance(again, DiskFault)
            assert found.identity == again.identity

    def make(mutator: Mutator) -> bytes:
        if mutator.random.random() < 0.3:
            return mutator.mutated(sealed_seeds)
        raw = mutator.mutated([seed[:-16] for seed in seeds])
        return sealed(raw) + bytes(8) if mutator.random.random() < 0.6 else mutator.mutated(seeds)

    fuzz.run(10_000, make, target)


def test_rows_of_the_index_are_read_or_refused(fuzz: Fuzz) -> None:
    """What a child process that reads a damaged index may write."""
    value = HEADER.pack()
    rows = [manifest._ROW_SIZES.pack(8, len(value)) + manifest.row_key(3, slot) + value for slot in range(2)]
    seeds = [b"".join(rows) + manifest._END, rows[0] + manifest._END, manifest._END]

    def target(raw: bytes) -> None:
        with suppress(ValueError):
            for key, header in manifest._parse_rows(memoryview(raw)):
                manifest.parse_row_key(key)
                unpack_header(header)

    fuzz.run(10_000, lambda mutator: mutator.mutated(seeds), target)


def test_the_label_of_a_further_folder_is_read_or_refused(fuzz: Fuzz) -> None:
    seeds = [FolderLabel(number, b"s" * 16, b"f" * 16).pack() for number in (1, 127)]

    def target(raw: bytes) -> None:
        with suppress(StorageFormatError):
            label = further_folders._unpack(Path("folder"), raw)
            assert label == further_folders._unpack(Path("folder"), label.pack())

    fuzz.run(10_000, lambda mutator: damaged(mutator, seeds), target)


def test_a_policy_snapshot_is_read_or_refused(fuzz: Fuzz) -> None:
    owner = SnapshotOwner("survival", NS_KEY, 16)
    seeds = [PolicySnapshot(owner, Moment(1 << 46, 10**15), 7, b"tables", b"runs", b"ghosts").pack()]

    def target(raw: bytes) -> None:
        with suppress(StorageFormatError):
            found = unpack_snapshot(raw, owner)
            assert found == unpack_snapshot(found.pack(), owner)
            assert abs(found.taken.shift_to(Moment.at(0, 1e9))) < 2**63

    fuzz.run(10_000, lambda mutator: damaged(mutator, seeds), target)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_policy_restores_leaves_its_tree_whole(fuzz: Fuzz, policy: str) -> None:
    """In a tree that has all, some or none of the blocks; afterwards its blocks leave in some order, each once."""
    seeds = saved_parts(policy)

    def make(mutator: Mutator) -> tuple[list[bytes], int, int]:
        parts = [one if mutator.random.random() < 0.4 else mutator.mutated([one, *seeds]) for one in seeds]
        shift = mutator.random.choice((0, -SECOND, SECOND, mutator.number(64) - 2**63))
        return parts, shift, mutator.random.choice((0, 3, RUNS))

    def target(made: tuple[list[bytes], int, int]) -> None:
        parts, shift, prompts = made
        tree = tree_with(policy, prompts)
        blocks = tree.tier_blocks(Tier.DISK)
        with suppress(ValueError):
            tree.restore(*parts, shift=shift, tick=FIRST_TICK + 1000 * SECOND)
        assert [] == tree.check_integrity()
        left = 0
        while (ids := tree.take_victims(Tier.DISK, 1 << 20)).size:
            left += ids.size
            tree.evict(ids, Tier.DISK)
        assert blocks == left

    fuzz.run(1_000, make, target)


def tree_with(policy: str, prompts: int) -> RadixTree:
    """A tree with blocks on disk."""
    tree = RadixTree(BLOCK_TOKENS, ns_key=NS_KEY, hash_seed=7, policy=policy)
    for number in range(prompts):
        tick = FIRST_TICK + number * SECOND
        prompt = np.arange(6 * BLOCK_TOKENS, dtype=np.uint32)
        prompt[BLOCK_TOKENS * (number % 4) :] += 100 * number
        existing, ids = tree.stage(ROOT, prompt, 0, tick)
        tree.place(ids[existing:], Tier.DISK, np.arange(ids.size - existing, dtype=np.uint32) + 10 * number)
        tree.release(ids)
        tree.touch(tree.match(ROOT, prompt), tick + 5 * SECOND, prompt.size // BLOCK_TOKENS)
    return tree


def saved_parts(policy: str) -> list[bytes]:
    """What the policy of such a tree knows, ghosts of blocks that left included."""
    tree = tree_with(policy, RUNS)
    tree.evict(tree.take_victims(Tier.DISK, 6), Tier.DISK)
    parts = []
    for save in (tree.save_tables, lambda first: tree.save_runs(Tier.DISK, first), tree.save_ghosts):
        pieces = []
        first: int | None = 0
        while first is not None:
            piece, first = save(first)
            pieces.append(piece)
        parts.append(b"".join(pieces))
    return parts
