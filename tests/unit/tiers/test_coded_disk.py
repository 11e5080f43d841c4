"""Coded slots on a real disk: every pipeline, damage of every byte, keys that change, and what others can read."""

from __future__ import annotations

import errno
import os
import shutil
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvstore.errors import ConfigError
from kvstore.testing.faulty import FaultyIo, IoCall
from kvstore.tiers.codecs.aes_gcm import BlockCipher
from kvstore.tiers.codecs.base import OPAQUE, PartForm
from kvstore.tiers.codecs.coding import PoolCoding
from kvstore.tiers.codecs.keys import FileKeys
from kvstore.tiers.codecs.registry import CODECS, LOSSY_CODECS, Pipeline, make_codec
from kvstore.tiers.file_io import SystemIo

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import Blocks, Disk

    from kvstore.tiers.disk import DiskTier
    from kvstore.types import Slots

MIB = 1 << 20
ALWAYS = 1 << 30
NUMBERS = list(range(1, 13))
PIPELINES = [(name, encrypts) for name in CODECS for encrypts in (False, True) if name != "none" or encrypts]
LOSSLESS = [(name, encrypts) for name, encrypts in PIPELINES if name not in LOSSY_CODECS]
ENCRYPTED = [("none", True), ("blosc2", True)]


def coded(name: str, encrypts: bool, forms: tuple[PartForm, ...] = (OPAQUE, OPAQUE)) -> PoolCoding:
    return PoolCoding(Pipeline(make_codec(name), encrypts), forms)


@pytest.fixture
def key_path(tmp_path: Path) -> Path:
    return write_keys(tmp_path / "keys", "one")


def write_keys(path: Path, *names: str) -> Path:
    """A file with a key for each name, which follows from the name; replaced as a whole."""
    path.with_name("next").write_text("".join(f"{name} {(name * 64).encode().hex()[:64]}\n" for name in names))
    path.with_name("next").chmod(0o600)
    return path.with_name("next").replace(path)


def drop_key(path: Path, name: str) -> None:
    """Give up what a key wrote, in the file that has the others."""
    path.write_text(path.read_text() + f"{name} dropped\n")


@pytest.fixture
def opened(disk: Disk, key_path: Path) -> Callable[..., DiskTier]:
    """Opens the tier with the keys of the file as it is now."""
    return lambda **settings: disk.open(keys=FileKeys(key_path), **settings)


@pytest.mark.parametrize(("name", "encrypts"), LOSSLESS)
@pytest.mark.parametrize(
    ("part_sizes", "block_tokens", "bits"),
    [
        ((1,), 1, 8),
        ((5000, 333), 16, 3),
        ((70_000,), 2000, 8),
        ((700_000, 9), 16, 1),
        ((257,) * 40, 16, 0),
    ],
)
def test_blocks_come_back_whole_and_by_part_after_restart_and_rebuild(
    opened: Callable[..., DiskTier],
    disk: Disk,
    blocks_of: Callable[..., Blocks],
    name: str,
    encrypts: bool,
    part_sizes: tuple[int, ...],
    block_tokens: int,
    bits: int,
) -> None:
    coding = coded(name, encrypts, (PartForm("bfloat16"),) * len(part_sizes))
    blocks = blocks_of(part_sizes, block_tokens, bits=bits, coding=coding)
    tier = opened(capacity_bytes=24 * MIB)
    pool = blocks.pool(tier)
    numbers = [1, 2, 3]
    slots = blocks.store(pool, numbers)
    assert [True] * 3 == blocks.right(pool, slots, numbers)
    assert [True] * 3 == blocks.right(pool, slots[::-1].copy(), numbers[::-1])
    last = len(part_sizes) - 1
    rows = np.zeros((3, part_sizes[last]), dtype=np.uint8)
    assert pool.read(slots, [blocks.identity(number) for number in numbers], rows, part=last).all()
    np.testing.assert_array_equal(blocks.rows(numbers)[:, -part_sizes[last] :], rows)
    assert (tier.scrub(0, 1 << 40).blocks, tier.scrub(0, 1 << 40).bad) == (3, ())
    assert (0, {}) == (tier.busy_buffers, tier.faults)
    for index in ("kept", "lost"):
        tier.close()
        if index == "lost":
            shutil.rmtree(disk.path / "index")
        tier = opened(capacity_bytes=24 * MIB)
        blocks.pool(tier)
        assert dict.fromkeys(numbers, True) == blocks.recovered(tier)


@pytest.mark.parametrize("encrypts", [False, True])
@pytest.mark.parametrize("name", LOSSY_CODECS)
def test_lossy_pipelines_take_half_and_say_how_far_off_they_are(
    opened: Callable[..., DiskTier], blocks_of: Callable[..., Blocks], name: str, encrypts: bool
) -> None:
    forms = (PartForm("bfloat16", 16, 64), OPAQUE)
    blocks = blocks_of((32 * 16 * 64 * 2, 500), coding=coded(name, encrypts, forms))
    values = np.random.default_rng(1).normal(size=32 * 16 * 64).astype(np.float32)
    dense = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    state = blocks.row(1)[-500:]
    tier = opened()
    pool = blocks.pool(tier)
    slots = pool.allocate(1)
    assert pool.write(slots, [blocks.identity(1)], [(dense, state)]).all()
    rows = np.zeros((1, len(dense) + 500), dtype=np.uint8)
    assert pool.read(slots, [blocks.identity(1)], rows).all()
    np.testing.assert_array_equal(state, rows[0, -500:])
    kept, given = (
        (row.view(np.uint16).astype(np.uint32) << 16).view(np.float32) for row in (dense, rows[0, : len(dense)].copy())
    )
    stats = tier.codec_stats[f"{name}+aes-gcm" if encrypts else name]
    assert stats.max_absolute_error == pytest.approx(np.abs(given - kept).max(), rel=1e-4)
    assert 0 < stats.rms_relative_error < 0.03
    assert stats.slot_bytes == pool.slot_bytes
    assert stats.slot_bytes < 0.65 * stats.raw_bytes
    assert 0 < pool.slot_bytes - (32 * 64 * 18 + 500) < 4096 + 600
    assert 1 == len(pool.slabs)
    assert (1, 1) == (stats.written_blocks, stats.read_blocks)


@pytest.mark.parametrize(("name", "encrypts"), PIPELINES)
def test_a_flipped_bit_anywhere_in_a_slot_is_a_miss(
    opened: Callable[..., DiskTier], disk: Disk, blocks_of: Callable[..., Blocks], name: str, encrypts: bool
) -> None:
    forms = (PartForm("float16", 16, 4), OPAQUE)
    blocks = blocks_of((1024, 333), bits=6, coding=coded(name, encrypts, forms))
    tier = opened()
    pool = blocks.pool(tier)
    slots = pool.allocate(1)
    parts = [np.zeros(1024, dtype=np.uint8), blocks.row(1)[-333:]]
    assert pool.write(slots, [blocks.identity(1)], [parts]).all()
    rows = np.zeros((1, 1357), dtype=np.uint8)
    (path,) = (slab.path for slab in pool.slabs if slab.sequences.any())
    (slab,) = (slab for slab in pool.slabs if slab.sequences.any())
    start = slab.slot_offset(int(np.flatnonzero(slab.sequences)[0]))
    whole = path.read_bytes()[start : start + slab.geometry.slot_bytes]
    used = len(whole.rstrip(b"\0"))
    generator = np.random.default_rng(5)
    with path.open("r+b", buffering=0) as file:
        for position in sorted({*range(90), *generator.integers(0, used, 150).tolist(), used - 1}):
            os.pwrite(file.fileno(), bytes([whole[position] ^ 1 << int(generator.integers(8))]), start + position)
            os.fsync(file.fileno())
            assert not pool.read(slots, [blocks.identity(1)], rows).any(), position
            os.pwrite(file.fileno(), whole[position : position + 1], start + position)
        os.fsync(file.fileno())
    assert pool.read(slots, [blocks.identity(1)], rows).all()
    assert sum(tier.faults.values()) > 200


@pytest.mark.parametrize(("name", "encrypts"), ENCRYPTED)
def test_exchanged_slots_and_old_content_are_misses(
    opened: Callable[..., DiskTier], blocks_of: Callable[..., Blocks], name: str, encrypts: bool
) -> None:
    blocks = blocks_of(coding=coded(name, encrypts))
    tier = opened()
    pool = blocks.pool(tier)
    slots = blocks.store(pool, NUMBERS)
    (slab,) = (slab for slab in pool.slabs if slab.sequences.any())
    size = slab.geometry.slot_bytes
    first, second = slab.slot_offset(0), slab.slot_offset(1)
    fd = os.open(slab.path, os.O_RDWR)
    before = [os.pread(fd, size, place) for place in (first, second)]
    os.pwrite(fd, before[1], first)
    os.pwrite(fd, before[0], second)
    assert [False] * 2 == blocks.right(pool, slots[:2], NUMBERS[:2])
    assert [False] * 2 == blocks.right(pool, slots[:2], NUMBERS[1::-1])
    os.pwrite(fd, before[0], first)
    assert [True] == blocks.right(pool, slots[:1], NUMBERS[:1])
    pool.free(slots[:1])
    again = blocks.store(pool, [99])
    assert again.tolist() == slots[:1].tolist()
    os.pwrite(fd, before[0], first)
    os.close(fd)
    assert [False] == blocks.right(pool, again, [1])
    assert [False] == blocks.right(pool, again, [99])


def test_no_token_key_or_byte_of_a_block_is_readable_in_any_file(
    opened: Callable[..., DiskTier], disk: Disk, blocks_of: Callable[..., Blocks]
) -> None:
    secret = b"what nobody may read"
    for coding in (coded("none", True), coded("blosc2", True)):
        blocks = blocks_of((5000, 333), coding=coding)
        tier = opened(capacity_bytes=2 * MIB)
        pool = blocks.pool(tier)
        slots = pool.allocate(12)
        parts = [tuple(np.frombuffer(secret * 400, dtype=np.uint8)[:size] for size in blocks.part_sizes)] * 12
        assert pool.write(slots, [blocks.identity(1000 + number) for number in NUMBERS], parts).all()
        pool.free(slots[:3])
        tier.policy_files.save(blocks.ns_id, b"a policy")
        tier.flush()
        found = [path.read_bytes() for path in disk.path.rglob("*") if path.is_file()]
        tier.close()
        found += [path.read_bytes() for path in disk.path.rglob("*") if path.is_file()]
        everything = b"".join(found)
        assert len(everything) > 100_000
        for number in NUMBERS:
            named = blocks.identity(1000 + number)
            assert named.tokens not in everything
            assert named.tokens[:8] not in everything
            assert named.key not in everything
            assert named.parent_key not in everything
        assert secret not in everything


def test_the_same_words_are_found_where_nothing_is_encrypted(disk: Disk, blocks_of: Callable[..., Blocks]) -> None:
    blocks = blocks_of(coding=coded("blosc2", False))
    tier = disk.open()
    blocks.store(blocks.pool(tier), [1001])
    tier.close()
    everything = b"".join(path.read_bytes() for path in disk.path.rglob("*") if path.is_file())
    assert blocks.identity(1001).tokens in everything


def test_a_new_key_writes_and_the_old_one_still_reads(
    opened: Callable[..., DiskTier], blocks_of: Callable[..., Blocks], key_path: Path
) -> None:
    blocks = blocks_of(coding=coded("none", True))
    tier = opened()
    pool = blocks.pool(tier)
    old = blocks.store(pool, NUMBERS)
    write_keys(key_path, "two", "one")
    new = blocks.store(pool, [101, 102])
    assert [True] * 14 == [*blocks.right(pool, old, NUMBERS), *blocks.right(pool, new, [101, 102])]
    tier.close()
    drop_key(write_keys(key_path, "two"), "one")
    tier = opened()
    blocks.pool(tier)
    assert {101: True, 102: True} == blocks.recovered(tier)
    assert 12 == tier.faults["unknown_key"]
    tier.close()
    write_keys(key_path, "two")
    opened()


@pytest.mark.parametrize("index", ["kept", "lost"])
@pytest.mark.parametrize(
    ("names", "complaint"),
    [
        (None, "blocks encrypted with the key one, but no key file is named; set tiers.disk.key_file"),
        (
            ["other"],
            "no key one that encrypted blocks .* give up what it wrote by a line 'one dropped'",
        ),
        (["one again"], "the key file has another key one than the one that encrypted blocks"),
    ],
    ids=["no keys", "key gone", "another key of that name"],
)
def test_a_start_without_a_key_that_wrote_is_refused_and_deletes_nothing(
    opened: Callable[..., DiskTier],
    disk: Disk,
    blocks_of: Callable[..., Blocks],
    key_path: Path,
    names: list[str] | None,
    complaint: str,
    index: str,
) -> None:
    blocks = blocks_of(coding=coded("none", True))
    tier = opened()
    blocks.store(blocks.pool(tier), NUMBERS)
    tier.close()
    before = disk.real_bytes()
    if index == "lost":
        shutil.rmtree(disk.path / "index")
        before = disk.real_bytes()
    if names == ["one again"]:
        key_path.write_text(f"one {'ab' * 32}\n")
    elif names:
        write_keys(key_path, *names)
    for _ in range(2):
        with pytest.raises(ConfigError, match=complaint):
            disk.open(keys=FileKeys(key_path) if names else None)
    assert before == disk.real_bytes()
    write_keys(key_path, "one")
    tier = opened()
    blocks.pool(tier)
    assert dict.fromkeys(NUMBERS, True) == blocks.recovered(tier)


@pytest.mark.parametrize("index", ["kept", "lost"])
def test_without_its_key_a_block_is_a_counted_miss_and_its_slot_is_used_again(
    opened: Callable[..., DiskTier], disk: Disk, blocks_of: Callable[..., Blocks], key_path: Path, index: str
) -> None:
    blocks = blocks_of(coding=coded("none", True))
    tier = opened()
    pool = blocks.pool(tier)
    slots = blocks.store(pool, NUMBERS)
    write_keys(key_path, "other")
    assert [False] * 12 == blocks.right(pool, slots, NUMBERS)
    assert 12 == tier.faults["unknown_key"]
    tier.close()
    if index == "lost":
        shutil.rmtree(disk.path / "index")
    drop_key(key_path, "one")
    tier = opened()
    assert ({}, 12) == (blocks_of().recovered(tier), tier.faults["unknown_key"])
    tier.close()
    write_keys(key_path, "other")
    tier = opened()
    pool = blocks.pool(tier)
    again = blocks.store(pool, [201])
    assert [True] == blocks.right(pool, again, [201])


class Recorder(SystemIo):
    """Remembers what is in clear of each header that is written, and fails as often as it is told to."""

    def __init__(self) -> None:
        self.clear: list[bytes] = []
        self.failures = 0
        self.calls: Counter[str] = Counter()

    def read(self, fd: int, pieces: list[np.ndarray], offset: int) -> int:
        self.calls["read"] += 1
        return super().read(fd, pieces, offset)

    def write(self, fd: int, pieces: list[np.ndarray], offset: int) -> int:
        self.calls["write"] += 1
        whole = b"".join(piece.tobytes() for piece in pieces)
        for start in range(0, len(whole), 4096):
            if whole[start : start + 8] == b"KVSCODED":
                self.clear.append(whole[start + 56 : start + 80])
        if self.failures and whole[:8] == b"KVSCODED":
            self.failures -= 1
            raise OSError(errno.EIO, "broken")
        return super().write(fd, pieces, offset)


def test_no_nonce_is_used_twice_over_failures_restarts_copies_and_backups(
    disk: Disk, blocks_of: Callable[..., Blocks], key_path: Path, tmp_path: Path
) -> None:
    blocks = blocks_of(coding=coded("none", True))
    io = Recorder()
    for start in range(3):
        tier = disk.open(keys=FileKeys(key_path), io=io)
        pool = blocks.pool(tier)
        if start == 0:
            pool.free(blocks.store(pool, NUMBERS))
        io.failures = 1
        pool.free(blocks.store(pool, NUMBERS))
        tier.close()
        if start == 0:
            shutil.copytree(disk.path, tmp_path / "backup")
    shutil.rmtree(disk.path)
    shutil.copytree(tmp_path / "backup", disk.path)
    before = len(io.clear)
    for _ in range(2):
        tier = disk.open(keys=FileKeys(key_path), io=io)
        blocks.store(blocks.pool(tier), NUMBERS)
        tier.close()
    assert len(io.clear) - before == 24
    assert before > 48
    assert len(io.clear) == len(set(io.clear))


def test_a_block_is_not_read_as_another_codec_or_form(
    opened: Callable[..., DiskTier], blocks_of: Callable[..., Blocks]
) -> None:
    forms = (PartForm("bfloat16", 16, 8), OPAQUE)
    blocks = blocks_of((4096, 333), bits=5, coding=coded("fp8", False, forms))
    tier = opened()
    pool = blocks.pool(tier)
    slots = pool.allocate(1)
    assert pool.write(slots, [blocks.identity(1)], [blocks.parts(1)]).all()
    rows = np.zeros((1, 4429), dtype=np.uint8)
    for name in CODECS:  # the codec of new blocks says nothing about those that are there
        tier.use_coding(blocks.ns_id, coded(name, False, forms))
        assert pool.read(slots, [blocks.identity(1)], rows).all()
    for other in (PartForm("float16", 16, 8), PartForm("bfloat16", 8, 16), OPAQUE):
        tier.use_coding(blocks.ns_id, coded("fp8", False, (other, OPAQUE)))
        assert not pool.read(slots, [blocks.identity(1)], rows).any()
    assert {"other_codec": 3} == tier.faults


def test_a_changed_codec_holds_for_new_blocks_and_old_ones_stay_readable(
    opened: Callable[..., DiskTier], blocks_of: Callable[..., Blocks]
) -> None:
    plain = blocks_of(bits=3)
    tier = opened()
    held = {1: plain.store(plain.pool(tier), [1])}
    for number, (name, encrypts) in enumerate(LOSSLESS, 2):
        tier.use_coding(plain.ns_id, coded(name, encrypts))
        held[number] = plain.store(plain.pool(tier), [number])
    tier.use_coding(plain.ns_id, PoolCoding(None, (OPAQUE, OPAQUE)))
    held[9] = plain.store(plain.pool(tier), [9])
    assert {0} < {slab.geometry.kind for slab in plain.pool(tier).slabs}
    assert all(plain.right(plain.pool(tier), slots, [number]) == [True] for number, slots in held.items())
    tier.close()
    tier = opened()
    assert dict.fromkeys(held, True) == plain.recovered(tier)


def test_who_encrypts_writes_into_no_plain_slot(
    opened: Callable[..., DiskTier], blocks_of: Callable[..., Blocks]
) -> None:
    blocks = blocks_of()
    tier = opened()
    pool = blocks.pool(tier)
    plain = blocks.store(pool, NUMBERS)
    pool.free(plain)
    blocks = replace(blocks, coding=coded("none", True))
    pool = blocks.pool(tier)
    slots = blocks.store(pool, NUMBERS)
    assert not set(plain.tolist()) & set(slots.tolist())


def test_without_keys_nothing_is_encrypted_by_mistake(disk: Disk, blocks_of: Callable[..., Blocks]) -> None:
    tier = disk.open()
    with pytest.raises(ConfigError, match="the disk tier has no keys"):
        blocks_of(coding=coded("none", True)).pool(tier)


def test_blocks_of_all_sizes_stay_within_the_capacity_and_save_bytes(
    disk: Disk, blocks_of: Callable[..., Blocks]
) -> None:
    generator = np.random.default_rng(7)
    kinds = [blocks_of((30_000, 9_000), bits=bits, coding=coded("blosc2", False)) for bits in (8, 5, 2, 0)]
    tier = disk.open(capacity_bytes=4 * MIB)
    pool = kinds[0].pool(tier)
    held: dict[int, Slots] = {}
    for turn in range(60):
        # At first all alike, then mixed, then others again: slabs go from one size to the next.
        chosen = [kinds[min(3, turn // 15)] if turn % 3 else kinds[int(generator.integers(4))] for _ in range(6)]
        numbers = [turn * 10 + index for index in range(6)]
        slots = pool.allocate(6)
        while len(slots) < 6 and held:
            pool.free(slots)
            pool.free(held.pop(next(iter(held))))
            slots = pool.allocate(6)
        stored = pool.write(
            slots,
            [blocks.identity(number) for blocks, number in zip(chosen, numbers, strict=False)],
            [blocks.parts(number) for blocks, number in zip(chosen, numbers, strict=False)],
        )
        assert len(set(slots.tolist())) == len(slots)
        pool.free(slots[~stored])
        for position in np.flatnonzero(stored).tolist():
            held[numbers[position] * 4 + kinds.index(chosen[position])] = slots[position : position + 1].copy()
        assert disk.real_bytes() <= 4 * MIB
        assert tier.used_bytes <= tier.capacity_bytes
        assert len(held) == pool.used_slots
    for name, slots in held.items():
        assert [True] == kinds[name % 4].right(pool, slots, [name // 4])
    stats = tier.codec_stats["blosc2"]
    assert stats.slot_bytes < 0.75 * stats.raw_bytes
    assert pool.slot_bytes < 39_000
    pool.free(np.concatenate(list(held.values())))
    assert 0 == pool.used_slots
    assert all(pool.give_back(item) for item in pool.ranges())
    assert 0 == pool.reserved_bytes


def test_neighbours_are_written_and_read_as_one_call(disk: Disk, blocks_of: Callable[..., Blocks]) -> None:
    io = Recorder()
    tier = disk.open(io=io, io_threads=1)
    blocks = blocks_of((60_000,), bits=4, coding=coded("blosc2", False, (OPAQUE,)))
    pool = blocks.pool(tier)
    first = blocks.store(pool, NUMBERS)
    written = io.calls["write"]
    slots = blocks.store(pool, [number + 20 for number in NUMBERS])
    assert list(range(int(slots[0]), int(slots[0]) + 12)) == slots.tolist()
    assert 1 == io.calls["write"] - written
    read = io.calls["read"]
    assert [True] * 12 == blocks.right(pool, first, NUMBERS)
    assert 1 == io.calls["read"] - read


@pytest.mark.parametrize("error_number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_is_a_miss_and_leaks_nothing(
    disk: Disk, blocks_of: Callable[..., Blocks], key_path: Path, error_number: int
) -> None:
    io = FaultyIo(SystemIo())
    tier = disk.open(io=io, keys=FileKeys(key_path))
    blocks = blocks_of(bits=4, coding=coded("blosc2", True))
    pool = blocks.pool(tier)
    slots = blocks.store(pool, NUMBERS)
    io.fail(IoCall.READ, errno.EIO)
    assert sum(blocks.right(pool, slots, NUMBERS)) >= 11
    more = pool.allocate(6)
    io.fail(IoCall.WRITE, error_number, times=ALWAYS)
    identities, parts = [blocks.identity(n) for n in range(50, 56)], [blocks.parts(n) for n in range(50, 56)]
    assert not pool.write(more, identities, parts).any()
    io.heal()
    pool.free(more)
    pool.free(slots)
    assert (0, 0) == (tier.busy_buffers, pool.used_slots)
    assert (error_number == errno.EIO) == (pool.quarantined_slots > 0)
    tier.scrub(0, 1 << 40)
    assert 0 == pool.quarantined_slots


def test_a_scrub_finds_damage_and_lost_keys(
    opened: Callable[..., DiskTier], blocks_of: Callable[..., Blocks], key_path: Path
) -> None:
    blocks = blocks_of(coding=coded("none", True))
    tier = opened()
    pool = blocks.pool(tier)
    slots = blocks.store(pool, NUMBERS)
    (slab,) = (slab for slab in pool.slabs if slab.sequences.any())
    with slab.path.open("r+b") as file:
        file.seek(slab.slot_offset(3) + 3000)
        file.write(b"damage")
    assert [int(slots[3])] == [bad.slot for bad in tier.scrub(0, 1 << 40).bad]
    write_keys(key_path, "other")
    assert slots.tolist() == [bad.slot for bad in tier.scrub(0, 1 << 40).bad]


def test_cleared_and_freed_blocks_never_come_back(
    opened: Callable[..., DiskTier], disk: Disk, blocks_of: Callable[..., Blocks]
) -> None:
    blocks = blocks_of(coding=coded("blosc2", True))
    tier = opened()
    pool = blocks.pool(tier)
    slots = blocks.store(pool, NUMBERS)
    pool.free(slots[:4])
    tier.close()
    shutil.rmtree(disk.path / "index")
    tier = opened()
    assert set(NUMBERS[4:]) == set(blocks.recovered(tier))
    tier.clear(blocks.ns_id)
    tier.close()
    shutil.rmtree(disk.path / "index")
    assert {} == blocks.recovered(opened())


def test_the_child_of_a_fork_seals_with_a_salt_of_its_own(key_path: Path) -> None:
    cipher = BlockCipher(FileKeys(key_path))
    _, salt, _ = cipher.sealer()
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writable, cipher.sealer()[1])
        os._exit(0)
    os.waitpid(child, 0)
    others = os.read(readable, 100)
    os.close(readable)
    os.close(writable)
    assert len(salt) == len(others)
    assert salt != others
    assert salt == cipher.sealer()[1]
