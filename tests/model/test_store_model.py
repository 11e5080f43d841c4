"""The whole embedded store against a set of prefixes, over random steps, restarts included.

With ample room every answer is known exactly. In a tight store, whose namespaces have quotas, blocks may leave at any
time; then what is found must still be right, prefix-closed and no more than was stored, and nothing may leak. Both hold
with slices of any size.
"""

from __future__ import annotations

import functools
import itertools
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias
from unittest import mock

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.radix.tree import RadixTree
from kvstore.store import Quota, StoreSettings, open_store
from kvstore.testing.blocks import expected_rows, store_prompt, verified_blocks
from kvstore.types import KvLayout, Namespace, Root, Tier

if TYPE_CHECKING:
    import kvstore

BLOCK_TOKENS = 2
LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=256, dtype="int8", block_tokens=BLOCK_TOKENS)  # 1 KiB a block
NAMESPACES = tuple(Namespace(model=name, revision="r", layout=LAYOUT) for name in ("a", "b"))
ROOTS = (Root(), Root(salt="x"))
MIB = 1 << 20

Prefix: TypeAlias = tuple[int, ...]
Place: TypeAlias = tuple[Namespace, Root]
places = st.tuples(st.sampled_from(NAMESPACES), st.sampled_from(ROOTS))
prompts = st.lists(st.integers(0, 1), max_size=13)


class StoreMachine(RuleBasedStateMachine):
    """A store with room for everything: the model is the set of stored prefixes of each root."""

    host_bytes = 8 * MIB
    disk_bytes = 64 * MIB
    stretch = 1  # how often a prompt is repeated to make it longer
    quotas: tuple[Quota, ...] = ()
    admission = "worth"

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="kvstore-model-"))
        self.stored: dict[Place, set[Prefix]] = {(ns, root): set() for ns in NAMESPACES for root in ROOTS}
        self.open()

    def open(self) -> None:
        self.store = open_store(
            self.path,
            host_bytes=self.host_bytes,
            disk_bytes=self.disk_bytes,
            settings=StoreSettings(quotas=self.quotas, disk_admission=self.admission),
        )
        self.leases: list[tuple[kvstore.Lease, Place, list[int]]] = []
        self.pins: list[tuple[int, Place, Prefix]] = []

    def teardown(self) -> None:
        self.end_holds()
        for namespace in NAMESPACES:
            self.store.clear(namespace)
        assert self.store.stats().tiers["host"].used_bytes == 0
        assert self.store.stats().tiers["disk"].blocks == 0
        self.store.close()
        shutil.rmtree(self.path)

    def end_holds(self) -> None:
        for lease, _, _ in self.leases:
            lease.release()
        for pin_id, _, _ in self.pins:
            self.store.unpin(pin_id)

    def prompt(self, tokens: list[int]) -> list[int]:
        return [token + 10 * turn for turn in range(self.stretch) for token in tokens]

    def depth(self, place: Place, tokens: list[int]) -> int:
        heads = (tuple(tokens[:end]) for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS))
        return sum(1 for _ in itertools.takewhile(self.stored[place].__contains__, heads))

    def check_found(self, found: int, place: Place, tokens: list[int]) -> None:
        assert found == self.depth(place, tokens)

    @rule(place=places, tokens=prompts)
    def store_whole(self, place: Place, tokens: list[int]) -> None:
        prompt = self.prompt(tokens)
        namespace, root = place
        store_prompt(self.store, namespace, prompt, root=root)
        self.remember(place, prompt, len(prompt) // BLOCK_TOKENS)
        self.check_found(verified_blocks(self.store, namespace, prompt, root=root), place, prompt)

    @rule(place=places, tokens=prompts, written=st.integers(0, 13))
    def store_partly(self, place: Place, tokens: list[int], written: int) -> None:
        prompt = self.prompt(tokens)
        namespace, root = place
        with self.store.stage(namespace, prompt, root=root) as stage:
            rows = expected_rows(namespace, prompt, root)
            stage.write_from(rows[:written])
            ended = min(stage.from_block + stage.blocks, written)
        self.remember(place, prompt, max(ended, 0))

    @rule(place=places, tokens=prompts)
    def abort(self, place: Place, tokens: list[int]) -> None:
        prompt = self.prompt(tokens)
        namespace, root = place
        stage = self.store.stage(namespace, prompt, root=root)
        stage.write_from(expected_rows(namespace, prompt, root))
        stage.abort()

    def remember(self, place: Place, prompt: list[int], blocks: int) -> None:
        self.stored[place] |= {tuple(prompt[: end * BLOCK_TOKENS]) for end in range(1, blocks + 1)}

    @rule(place=places, tokens=prompts)
    def load(self, place: Place, tokens: list[int]) -> None:
        prompt = self.prompt(tokens)
        namespace, root = place
        self.check_found(self.store.match(namespace, prompt, root=root).blocks, place, prompt)
        self.check_found(verified_blocks(self.store, namespace, prompt, root=root), place, prompt)

    @rule(place=places, tokens=prompts)
    def prefetch(self, place: Place, tokens: list[int]) -> None:
        prompt = self.prompt(tokens)
        prefetch = self.store.prefetch(place[0], prompt, root=place[1], wait_seconds=None)
        assert prefetch.done
        self.check_found(prefetch.host_blocks, place, prompt)
        with self.store.lease(self.store.match(place[0], prompt, root=place[1]), tiers={Tier.HOST}) as lease:
            assert prefetch.host_blocks == lease.blocks

    @rule(place=places, tokens=prompts)
    def lease(self, place: Place, tokens: list[int]) -> None:
        prompt = self.prompt(tokens)
        lease = self.store.lease(self.store.match(place[0], prompt, root=place[1]))
        self.leases.append((lease, place, prompt))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def read_and_release(self, data: st.DataObject) -> None:
        lease, (namespace, root), prompt = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        rows = bytearray(lease.blocks * LAYOUT.block_bytes)
        assert lease.load_into(rows).blocks == lease.blocks
        assert rows == expected_rows(namespace, prompt, root)[: lease.blocks].tobytes()
        lease.release()

    @rule(place=places, tokens=prompts)
    def pin(self, place: Place, tokens: list[int]) -> None:
        prompt = self.prompt(tokens)
        pin = self.store.pin(place[0], prompt, root=place[1])
        self.pins.append((pin.pin_id, place, tuple(prompt[: pin.blocks * BLOCK_TOKENS])))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pin_id, _, _ = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        assert self.store.unpin(pin_id)

    @rule(place=places, tokens=prompts, seconds=st.none() | st.floats(0, 1e6))
    def hint(self, place: Place, tokens: list[int], seconds: float | None) -> None:
        prompt = self.prompt(tokens)
        told = self.store.hint_next_use(place[0], prompt, root=place[1], seconds=seconds)
        self.check_told(told, place, tuple(prompt[: len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS]))

    def check_told(self, told: int, place: Place, prefix: Prefix) -> None:
        is_stored = prefix in self.stored[place]
        while len(below := self.children(place, prefix)) == 1:
            prefix = below[0]
        if below or not is_stored:
            assert told == 0
            return
        alone = 0
        while prefix and len(self.children(place, prefix)) <= 1:
            alone += 1
            prefix = prefix[:-BLOCK_TOKENS]
        assert told == alone

    def children(self, place: Place, prefix: Prefix) -> list[Prefix]:
        end = len(prefix)
        return [stored for stored in self.stored[place] if len(stored) == end + BLOCK_TOKENS and stored[:end] == prefix]

    @rule(place=places, tokens=prompts, from_block=st.integers(0, 4))
    def evict(self, place: Place, tokens: list[int], from_block: int) -> None:
        prompt = self.prompt(tokens)
        dropped = self.store.evict(place[0], prompt, root=place[1], from_block=from_block)
        head = tuple(prompt[: (from_block + 1) * BLOCK_TOKENS])
        doomed: set[Prefix] = set()
        if self.depth(place, prompt) > from_block:
            doomed = {prefix for prefix in self.stored[place] if prefix[: len(head)] == head} - self.held(place)
        self.stored[place] -= doomed
        self.check_dropped(dropped, len(doomed))

    def check_dropped(self, dropped: int, expected: int) -> None:
        assert dropped == expected

    def held(self, place: Place) -> set[Prefix]:
        """Every prefix under a lease or pin of blocks that are still in the store."""
        tops = [tuple(prompt[: lease.blocks * BLOCK_TOKENS]) for lease, where, prompt in self.leases if where == place]
        tops += [prefix for _, where, prefix in self.pins if where == place]
        return {top[:end] for top in tops for end in range(BLOCK_TOKENS, len(top) + 1, BLOCK_TOKENS)}

    @precondition(lambda self: not self.leases)
    @rule(namespace=st.sampled_from(NAMESPACES))
    def clear(self, namespace: Namespace) -> None:
        expected = sum(len(prefixes) for (ns, _), prefixes in self.stored.items() if ns == namespace)
        self.check_dropped(self.store.clear(namespace), expected)
        self.pins = [pin for pin in self.pins if pin[1][0] != namespace]
        for root in ROOTS:
            self.stored[namespace, root].clear()

    @rule()
    def flush(self) -> None:
        self.store.flush()

    @rule()
    def restart(self) -> None:
        self.end_holds()
        self.store.close()
        self.open()

    @invariant()
    def every_tree_is_sound(self) -> None:
        for space in self.store._index.spaces():
            assert space.tree.check_integrity() == []

    @invariant()
    def tiers_and_index_agree(self) -> None:
        stats = self.store.stats()
        assert stats.tiers["host"].used_bytes >= stats.tiers["host"].blocks * LAYOUT.block_bytes
        for tier in stats.tiers.values():
            assert tier.used_bytes <= tier.capacity_bytes
        assert (stats.stages, stats.corrupt_blocks) == (0, 0)

    @invariant()
    def no_namespace_is_above_its_limit(self) -> None:
        for space in self.store._index.spaces():
            assert space.host.reserved_bytes <= (space.quota.host_max or self.host_bytes)
            assert space.disk.reserved_bytes <= (space.quota.disk_max or self.disk_bytes)


class TightStoreMachine(StoreMachine):
    """A store in which almost nothing has room: blocks leave host memory, then the disk, all the time."""

    host_bytes = 48 * 1024
    disk_bytes = MIB
    stretch = 4
    quotas = (
        Quota(model="a", host_max=20 * 1024, disk_max=200 * 1024),
        Quota(model="b", host_min=8 * 1024, disk_min=64 * 1024, priority=2.0),
    )

    def check_told(self, told: int, place: Place, prefix: Prefix) -> None:
        assert told <= len(self.stored[place])

    def check_found(self, found: int, place: Place, tokens: list[int]) -> None:
        assert found <= self.depth(place, tokens)

    def check_dropped(self, dropped: int, expected: int) -> None:
        assert dropped <= expected

    @precondition(lambda self: len(self.pins) < 2)
    @rule(place=places, tokens=prompts)
    def pin(self, place: Place, tokens: list[int]) -> None:
        """Pins of a tight store reach their share soon; that they are refused then is tested elsewhere."""
        prompt = self.prompt(tokens)[: 4 * BLOCK_TOKENS]
        pin = self.store.pin(place[0], prompt, root=place[1])
        self.pins.append((pin.pin_id, place, tuple(prompt[: pin.blocks * BLOCK_TOKENS])))


class SlicedStoreMachine(StoreMachine):
    """A store whose trees do next to nothing in one hold of the lock."""

    make_tree = functools.partial(RadixTree, slice_blocks=1, edge_blocks=2)

    def __init__(self) -> None:
        self.patch = mock.patch("kvstore.store.space.RadixTree", self.make_tree)
        self.patch.start()
        super().__init__()

    def teardown(self) -> None:
        self.patch.stop()
        super().teardown()


class TightSlicedStoreMachine(SlicedStoreMachine, TightStoreMachine):
    """Both at once, and the disk takes only what was used twice."""

    admission = "reuse"


class WriteThroughStoreMachine(StoreMachine):
    """A store that writes in the background what it takes."""

    admission = "write_through"


COMMON = settings(max_examples=15, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
TestStore = StoreMachine.TestCase
TestStore.settings = COMMON
TestTightStore = TightStoreMachine.TestCase
TestTightStore.settings = COMMON
TestSlicedStore = SlicedStoreMachine.TestCase
TestSlicedStore.settings = settings(COMMON, max_examples=6)
TestTightSlicedStore = TightSlicedStoreMachine.TestCase
TestTightSlicedStore.settings = settings(COMMON, max_examples=6)
TestWriteThroughStore = WriteThroughStoreMachine.TestCase
TestWriteThroughStore.settings = settings(COMMON, max_examples=3)
