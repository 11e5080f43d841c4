"""The real bytes of a tier's files never exceed its capacity: not while it works, not over restarts with less."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstore.tiers.base import BlockIdentity
from kvstore.tiers.codecs.base import OPAQUE
from kvstore.tiers.codecs.coding import PoolCoding
from kvstore.tiers.codecs.registry import Pipeline, make_codec
from kvstore.tiers.disk import DiskTier

KIB = 1 << 10
# Layouts by namespace: parts of odd sizes, small and large blocks.
LAYOUTS = {b"a" * 16: (4096,), b"b" * 16: (100, 9000, 1), b"c" * 16: (200_000,), b"d" * 16: (60_000, 5000)}
CODED = (b"d" * 16,)
CAPACITIES = st.sampled_from([1024 * KIB, 1536 * KIB, 3072 * KIB])


def identity(number: int) -> BlockIdentity:
    tokens = np.full(4, number, dtype="<u4").tobytes()
    return BlockIdentity(b"r" * 16, number.to_bytes(16, "big"), (number + 1).to_bytes(16, "big"), tokens)


def source(ns_id: bytes, number: int) -> tuple[np.ndarray, ...]:
    """Blocks of many sizes once they are coded."""
    sizes = LAYOUTS[ns_id]
    whole = np.full(sum(sizes), 7, dtype=np.uint8)
    whole[: len(whole) * (number % 5) // 4] = np.random.default_rng(1).integers(
        256, size=len(whole) * (number % 5) // 4
    )
    return tuple(np.split(whole, np.cumsum(sizes)[:-1]))


class CapacityMachine(RuleBasedStateMachine):
    """`held` maps namespaces to slots by number of the block that they hold."""

    def __init__(self) -> None:
        super().__init__()
        self.further: list[Path] = []
        self.held: dict[bytes, dict[int, int]] = {ns_id: {} for ns_id in LAYOUTS}
        self.next_number = 0

    @initialize(capacity_bytes=CAPACITIES, folders=st.integers(0, 2))
    def start(self, capacity_bytes: int, folders: int) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="kvstore-capacity-"))
        self.further = [self.path / f"further{i}" for i in range(folders)]
        self.open(capacity_bytes)

    def open(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.tier = DiskTier.open(
            self.path / "data",
            capacity_bytes=capacity_bytes,
            further_paths=self.further,
            free_floor_bytes=0,
            io_threads=1,
        )
        self.pools = {ns_id: self.tier.pool(ns_id, sizes, 4) for ns_id, sizes in LAYOUTS.items()}
        for ns_id in CODED:
            self.tier.use_coding(
                ns_id, PoolCoding(Pipeline(make_codec("blosc2"), False), (OPAQUE,) * len(LAYOUTS[ns_id]))
            )

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.tier.close()
            shutil.rmtree(self.path)

    @rule(ns_id=st.sampled_from(sorted(LAYOUTS)), count=st.integers(1, 60))
    def store(self, ns_id: bytes, count: int) -> None:
        slots = self.pools[ns_id].allocate(count)
        numbers = range(self.next_number, self.next_number + len(slots))
        self.next_number += len(slots)
        identities, sources = [identity(number) for number in numbers], [source(ns_id, number) for number in numbers]
        stored = self.pools[ns_id].write(slots, identities, sources)
        assert stored.all() or (ns_id in CODED and self.tier.faults["no_slot_of_size"])
        self.pools[ns_id].free(slots[~stored])
        pairs = zip(numbers, slots.tolist(), stored.tolist(), strict=True)
        self.held[ns_id] |= {number: slot for number, slot, good in pairs if good}

    @rule(ns_id=st.sampled_from(sorted(LAYOUTS)), share=st.sampled_from([0.3, 1.0]))
    def free(self, ns_id: bytes, share: float) -> None:
        numbers = list(self.held[ns_id])[: int(len(self.held[ns_id]) * share)]
        slots = [self.held[ns_id].pop(number) for number in numbers]
        self.pools[ns_id].free(np.array(slots, dtype=np.uint32))
        for slot_range in self.pools[ns_id].ranges():
            self.pools[ns_id].give_back(slot_range)

    @rule(ns_id=st.sampled_from(sorted(LAYOUTS)), size=st.integers(1, 20_000))
    def save_policy(self, ns_id: bytes, size: int) -> None:
        self.tier.policy_files.save(ns_id, b"p" * size)

    @rule(capacity_bytes=CAPACITIES, lose_index=st.booleans())
    def reopen(self, capacity_bytes: int, lose_index: bool) -> None:
        self.tier.close()
        if lose_index:
            shutil.rmtree(self.path / "data" / "index")
        self.open(capacity_bytes)
        for ns_id, held in self.held.items():
            found = {int.from_bytes(b.identity.parent_key, "big"): b.slot for b in self.tier.recovered(ns_id)}
            assert set(found) <= set(held)
            self.held[ns_id] = found

    @invariant()
    def real_bytes_are_within_the_capacity(self) -> None:
        if not hasattr(self, "tier"):
            return
        real_bytes = sum(path.stat().st_blocks * 512 for path in self.path.rglob("*") if path.is_file())
        assert real_bytes <= self.capacity_bytes
        for ns_id, held in self.held.items():
            assert len(held) == self.pools[ns_id].used_slots


TestCapacityMachine = CapacityMachine.TestCase
TestCapacityMachine.settings = settings(max_examples=12, stateful_step_count=15, deadline=None)
