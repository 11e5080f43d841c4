"""What the eviction policy knew of a namespace, in a file for the next start. Little-endian; on disk: never renumber.

 offset  bytes  field
      0      8  magic "KVSPOLCY"
      8      4  format version, 1
     12      4  block_tokens
     16     16  name of the policy, padded with zeros
     32     16  ns_id
     48      8  hash seed of the tree, which the fingerprints of ghosts were made with
     56      8  tick at which it was taken, in microseconds
     64      8  the same moment in microseconds since 1970
     72     24  bytes of the tables (t), the runs (r) and the ghosts (g)
     96  t+r+g  these, in the form of radix/csrc/snapshot.cpp
             8  XXH3-64 of all bytes before

It says which blocks were used when, and names them by their keys. Which blocks there are the disk alone tells.
"""

from __future__ import annotations

import logging
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.errors import StorageFormatError
from kvstore.radix.tree import TICK_MAX
from kvstore.tiers.checksum import DIGEST_BYTES, is_sealed, sealed
from kvstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.store.index import Index
    from kvstore.store.space import Space
    from kvstore.tiers.persistent import PolicyStorage

logger = logging.getLogger(__name__)

SNAPSHOT_MAGIC = b"KVSPOLCY"
SNAPSHOT_VERSION = 1
# A clock that was set to another year must not make all ages equal by their upper limit.
DOWN_SECONDS_MAX = 366 * 24 * 3600

_FIXED = struct.Struct("<8sII16s16sQQQQQQ")
_MICROSECONDS = 1_000_000


@dataclass(frozen=True, slots=True)
class SnapshotOwner:
    """Whose policy it is: a snapshot of another one means nothing to it."""

    policy: str
    ns_id: bytes
    block_tokens: int


@dataclass(frozen=True, slots=True)
class Moment:
    """The same moment by the ticks of an index and by the clock of the machine, both in microseconds."""

    tick: int
    unix_us: int

    @classmethod
    def at(cls, tick: int, unix_seconds: float) -> Moment:
        """A moment by a clock that counts seconds; times before 1970 are 1970."""
        return cls(tick, max(0, int(unix_seconds * _MICROSECONDS)))

    def shift_to(self, now: Moment) -> int:
        """What ticks from here are later by over there, so that ages include the time in between."""
        down_us = min(max(0, now.unix_us - self.unix_us), DOWN_SECONDS_MAX * _MICROSECONDS)
        return now.tick - down_us - self.tick


@dataclass(frozen=True, slots=True)
class PolicySnapshot:
    """The parts of a snapshot; see kvstore.radix.tree.RadixTree.restore."""

    owner: SnapshotOwner
    taken: Moment
    hash_seed: int
    tables: bytes
    runs: bytes
    ghosts: bytes

    def pack(self) -> bytes:
        """The snapshot as it lies on disk."""
        owner, taken = self.owner, self.taken
        sizes = (len(self.tables), len(self.runs), len(self.ghosts))
        head = _FIXED.pack(
            SNAPSHOT_MAGIC,
            SNAPSHOT_VERSION,
            owner.block_tokens,
            owner.policy.encode(),
            owner.ns_id,
            self.hash_seed,
            taken.tick,
            taken.unix_us,
            *sizes,
        )
        return sealed(b"".join((head, self.tables, self.runs, self.ghosts)))


class PolicySnapshots:
    """Saves and restores what the policies of an index know. What goes wrong is counted and costs that alone."""

    def __init__(self, index: Index) -> None:
        self._index = index

    def save(self, space: Space) -> None:
        """Replace the snapshot of a space; the old one stays where it cannot be written.

        The index lock is held for a slice at a time, so the parts are not of one moment: blocks that move meanwhile
        may be in it or not.
        """
        files = self._files()
        if files is None or space.retired:
            return
        if not space.tree.tier_blocks(Tier.DISK):
            files.remove(space.ns_id)
            return
        tree = space.tree
        tables, ghosts = self._taken(tree.save_tables), self._taken(tree.save_ghosts)
        runs = self._taken(lambda first: tree.save_runs(Tier.DISK, first))
        with self._index.lock:
            taken = Moment.at(self._index.next_tick(), self._index.clock.unix())
        owner = SnapshotOwner(tree.policy_name, space.ns_id, tree.block_tokens)
        packed = PolicySnapshot(owner, taken, space.hash_seed, tables, runs, ghosts).pack()
        if not files.save(space.ns_id, packed):
            logger.warning(
                "policy snapshot not written, the next start knows less: namespace=%s bytes=%d bytes_max=%d",
                space.ns_id.hex(),
                len(packed),
                files.bytes_max,
            )

    def load(self, owner: SnapshotOwner) -> PolicySnapshot | None:
        """What an earlier run saved for this owner; None, said and counted, where it is of no use."""
        files = self._files()
        data = None if files is None else files.load(owner.ns_id)
        if data is None:
            return None
        try:
            return unpack_snapshot(data, owner)
        except StorageFormatError as error:
            self._refuse(owner.ns_id, error)
            return None

    def restore(self, space: Space, saved: PolicySnapshot, tick: int) -> None:
        """Tell the policy of a space that nobody uses yet what was saved, as of `tick`; or leave it cold."""
        shift = saved.taken.shift_to(Moment.at(tick, self._index.clock.unix()))
        try:
            space.tree.restore(saved.tables, saved.runs, saved.ghosts, shift=shift, tick=tick)
        except ValueError as error:
            self._refuse(space.ns_id, error)

    def _files(self) -> PolicyStorage | None:
        return None if self._index.disk is None else self._index.disk.policy_files

    def _taken(self, take: Callable[[int], tuple[bytes, int | None]]) -> bytes:
        """All slices of a part."""
        pieces = []
        first: int | None = 0
        while first is not None:
            with self._index.lock:
                piece, first = take(first)
            pieces.append(piece)
        return b"".join(pieces)

    def _refuse(self, ns_id: bytes, error: Exception) -> None:
        logger.warning("policy snapshot refused, starting cold: namespace=%s cause=%s", ns_id.hex(), error)
        files = self._files()
        if files is not None:
            files.refuse()


def unpack_snapshot(data: bytes, owner: SnapshotOwner) -> PolicySnapshot:
    """Read a snapshot of this owner. Raises StorageFormatError, naming what it is instead, for anything else."""
    if data[: len(SNAPSHOT_MAGIC)] != SNAPSHOT_MAGIC or len(data) < _FIXED.size + DIGEST_BYTES:
        raise StorageFormatError(f"no snapshot of an eviction policy: {len(data)} bytes that begin {data[:8]!r}")
    _, version, block_tokens, policy, ns_id, hash_seed, tick, unix_us, *sizes = _FIXED.unpack_from(data)
    if version != SNAPSHOT_VERSION:
        raise StorageFormatError(f"format version {version}, this kvstore reads {SNAPSHOT_VERSION}")
    if not is_sealed(data) or len(data) != _FIXED.size + sum(sizes) + DIGEST_BYTES:
        raise StorageFormatError(f"damaged: the checksum or the length of {len(data)} bytes is wrong")
    if tick > TICK_MAX:
        raise StorageFormatError(f"taken at tick {tick}, expected at most {TICK_MAX}")
    found = SnapshotOwner(policy.rstrip(b"\0").decode("ascii", "replace"), ns_id, block_tokens)
    if found != owner:
        raise StorageFormatError(f"it is of {_describe(found)}, expected {_describe(owner)}")
    tables_end = _FIXED.size + sizes[0]
    runs_end = tables_end + sizes[1]
    parts = (data[_FIXED.size : tables_end], data[tables_end:runs_end], data[runs_end:-DIGEST_BYTES])
    return PolicySnapshot(found, Moment(tick, unix_us), hash_seed, *parts)


def _describe(owner: SnapshotOwner) -> str:
    return f"policy {owner.policy!r}, namespace {owner.ns_id.hex()}, blocks of {owner.block_tokens} tokens"
