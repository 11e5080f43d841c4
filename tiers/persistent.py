"""What the store relies on in a tier below host memory, and how others' tiers are found.

The one that ships keeps slabs on disk (kvstore.tiers.disk). Another package offers its own by an entry point:

    [project.entry-points."kvstore.tiers"]
    name = "package.module:open_tier"

and users choose it with the setting `tiers.disk.kind`. kvstore.testing.tier_conformance says whether it does what is
asked for here.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from kvstore.errors import ConfigError
from kvstore.tiers.base import Pool, SlotRange

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvstore.stats import CodecStats
    from kvstore.tiers.base import BlockIdentity, Bytes1D, Bytes2D, Mask, RecoveredBlock
    from kvstore.tiers.codecs.coding import PoolCoding
    from kvstore.types import Slots

ENTRY_POINTS = "kvstore.tiers"


@dataclass(frozen=True, slots=True)
class RecoveredNamespace:
    """A namespace that had blocks at the start, and how many of its blocks nobody has taken yet."""

    ns_id: bytes
    part_sizes: tuple[int, ...]
    block_tokens: int
    blocks: int


@dataclass(frozen=True, slots=True)
class BadBlock:
    """A block that is not what was written; its slot in its namespace's pool."""

    ns_id: bytes
    slot: int


@dataclass(frozen=True, slots=True)
class ScrubStep:
    """What one step read, what of it is bad, where the next one goes on (None: nowhere), and what is left to read.

    `repaired_slots` counts slots that left quarantine.
    """

    blocks: int
    read_bytes: int
    bad: tuple[BadBlock, ...]
    repaired_slots: int
    remaining_blocks: int
    next_after: int | None

    def bad_ranges(self) -> list[tuple[bytes, SlotRange]]:
        """What is bad as ranges of neighbouring slots, by namespace."""
        ranges: list[tuple[bytes, SlotRange]] = []
        for block in sorted(self.bad, key=lambda block: (block.ns_id, block.slot)):
            if ranges and (block.ns_id, block.slot) == (ranges[-1][0], ranges[-1][1].first + ranges[-1][1].count):
                ranges[-1] = (block.ns_id, SlotRange(ranges[-1][1].first, ranges[-1][1].count + 1))
            else:
                ranges.append((block.ns_id, SlotRange(block.slot, 1)))
        return ranges


class PersistentPool(Pool, Protocol):
    """Slots of one namespace whose blocks may outlive the process. Thread-safe.

    `bytes_max` bounds what its ranges take, from when it is set on.
    """

    bytes_max: int | None

    def range_bytes(self, slot_range: SlotRange) -> int:
        """Real bytes of a range."""
        ...

    def free_for_good(self, slots: Slots) -> bool:
        """Like `free`, but returns when no restart, and no power cut, brings their blocks back; false if one may."""
        ...

    def write(self, slots: Slots, identities: Sequence[BlockIdentity], sources: Sequence[Sequence[Bytes1D]]) -> Mask:
        """Write blocks; sources[i] has one readable array for each part of block i. True where a block is stored.

        A slot whose write failed still belongs to the caller, who frees it. What goes wrong raises nothing. `slots` is
        changed in place where a block had to go to another slot than it was given, since only now its size is known;
        the caller has that one then, and no longer the other.
        """
        ...

    def read(
        self, slots: Slots, identities: Sequence[BlockIdentity], rows: Bytes2D, *, part: int | None = None
    ) -> Mask:
        """Read blocks into rows: [n, part_bytes] of one part, or [n, block_bytes] with all parts one after the other.

        True only where the slot holds exactly this block, as last written; a wrong block is worse than none.
        """
        ...


@runtime_checkable
class SizingPool(Protocol):
    """What a PersistentPool has besides whose blocks differ in size."""

    @property
    def unfitting_blocks(self) -> int:
        """Blocks for which write() had no slot large enough, since the start: room for them may be made."""
        ...


@runtime_checkable
class KeepingTier(Protocol):
    """What a PersistentTier has besides that tells what it kept before anybody takes it."""

    def recovered_namespaces(self) -> list[RecoveredNamespace]:
        """The namespaces that have blocks from before the start which nobody has taken yet."""
        ...

    def untaken(self, ns_id: bytes) -> list[RecoveredBlock]:
        """What `recovered` would hand over now."""
        ...


@runtime_checkable
class PurgingTier(KeepingTier, Protocol):
    """What a KeepingTier has besides that can drop blocks which nobody has taken yet; it keeps writers, too."""

    def drop_untaken(self, ns_id: bytes, slots: Slots) -> bool:
        """Drop those of a namespace that lie there, unless they were taken; false if a power cut may bring one back."""
        ...


class PolicyStorage(Protocol):
    """A small file for each namespace, of what the eviction policy knew."""

    @property
    def bytes_max(self) -> int:
        """What all of them may take."""
        ...

    def load(self, ns_id: bytes) -> bytes | None:
        """What was saved last; None where there is nothing or it cannot be read."""
        ...

    def save(self, ns_id: bytes, content: bytes) -> bool:
        """Replace it; false where it cannot be written or has no room."""
        ...

    def refuse(self) -> None:
        """Count a file whose content was of no use to its reader."""
        ...

    def remove(self, ns_id: bytes) -> None:
        """Delete what was saved of a namespace, if anything."""
        ...


class PersistentTier(Protocol):
    """A tier below host memory. Thread-safe. What its medium does wrong is a miss, and counted in `faults`."""

    @property
    def policy_files(self) -> PolicyStorage:
        """Where the eviction policies' knowledge is kept."""
        ...

    @property
    def node_secret(self) -> bytes:
        """32 random bytes of this place, made once."""
        ...

    @property
    def start_count(self) -> int:
        """How often the place was opened, this time included."""
        ...

    @property
    def capacity_bytes(self) -> int:
        """Real bytes that it may take."""
        ...

    @property
    def used_bytes(self) -> int:
        """Real bytes that it takes."""
        ...

    @property
    def faults(self) -> dict[str, int]:
        """What went wrong since the start, by kind."""
        ...

    @property
    def quarantined_slots(self) -> int:
        """Slots that are not used since they could not be read, written or erased."""
        ...

    def pool(
        self, ns_id: bytes, part_sizes: tuple[int, ...], block_tokens: int, *, bytes_max: int | None = None
    ) -> PersistentPool:
        """The pool of a namespace, made at the first call. Raises LayoutMismatchError if it has other blocks."""
        ...

    def recovered_namespaces(self) -> list[RecoveredNamespace]:
        """The namespaces that have blocks from before the start which nobody has taken yet."""
        ...

    def recovered(self, ns_id: bytes) -> list[RecoveredBlock]:
        """Hand over the blocks of a namespace from before the start, once. Their slots are used; no two are copies."""
        ...

    def forget(self, ns_id: bytes) -> None:
        """Let go of a namespace's pool; one whose slots are in use stays."""
        ...

    def clear(self, ns_id: bytes) -> None:
        """When this returns, no restart brings back a block written so far. Raises StorageError if it may.

        Slots stay with their holders, who read them until they free them.
        """
        ...

    def scrub(self, after: int, limit_bytes: int) -> ScrubStep:
        """Verify the blocks behind a position, at most `limit_bytes` but at least one."""
        ...

    def flush(self) -> None:
        """Return when all blocks written so far will be found again. Raises StorageError if they cannot be."""
        ...

    def close(self) -> None:
        """Flush and release everything; idempotent."""
        ...


@runtime_checkable
class CodingTier(Protocol):
    """What a PersistentTier has besides that can store blocks compressed or encrypted."""

    @property
    def codec_stats(self) -> dict[str, CodecStats]:
        """What was encoded and decoded since the start, by the names of pipelines."""
        ...

    def use_coding(self, ns_id: bytes, coding: PoolCoding) -> None:
        """How the blocks of a pool are written from now on; those that are there stay, and stay readable.

        Raises ConfigError where it has no key to encrypt with.
        """
        ...


@runtime_checkable
class VolatileTier(Protocol):
    """What a PersistentTier has besides whose blocks end with the process: nothing is flushed to it."""

    @property
    def label(self) -> str:
        """What statistics call it, in place of "disk"."""
        ...


@runtime_checkable
class PinKeepingTier(Protocol):
    """What a PersistentTier has besides over whose restarts pins last."""

    @property
    def pin_files(self) -> PolicyStorage:
        """Where the pins of namespaces are kept."""
        ...


class TierFactory(Protocol):
    """What an entry point names."""

    def __call__(
        self, path: Path, *, capacity_bytes: int, further_paths: Sequence[Path], free_floor_bytes: int | None
    ) -> PersistentTier:
        """Open the tier that lies at `path`; the settings are those of `tiers.disk`. Raises KvStoreError."""
        ...


def find_factory(kind: str) -> TierFactory:
    """The factory that some package offers under a name. Raises ConfigError where there is none, or it fails."""
    offered = metadata.entry_points(group=ENTRY_POINTS)
    names = sorted({point.name for point in offered})
    point = next((point for point in offered if point.name == kind), None)
    if point is None:
        raise ConfigError(f"tiers.disk.kind is {kind!r}, expected one of {', '.join(['slabs', *names])}")
    try:
        factory: TierFactory = point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"tiers.disk.kind is {kind!r}, whose {point.value} cannot be loaded: {error}") from error
    return factory
