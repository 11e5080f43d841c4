"""Layouts with sliding windows and recurrent states against sets of prefixes, over random steps, restarts included.

With ample room every match is known exactly, whatever single parts were lost on the way. In a tight store blocks and
sparse parts leave at any time; then what is found must be right, and no deeper than what was stored.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.layer_groups import Recurrent, SlidingWindow
from kvstore.store import open_store
from kvstore.testing.blocks import expected_part_rows, expected_rows, sparse_parts, verified_blocks
from kvstore.testing.sparse_model import ModelSparseStore
from kvstore.types import KvLayout, Namespace, Root, Tier

if TYPE_CHECKING:
    import kvstore

MIB = 1 << 20
BLOCK_TOKENS = 2
GROUPS = (
    SlidingWindow(layers=1, window=3, kv_heads=1, head_dim=256, dtype="int8"),  # spans 2 blocks, 1 KiB each
    Recurrent(layers=1, state_bytes=2048),
)
LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=256, dtype="int8", block_tokens=BLOCK_TOKENS, groups=GROUPS)
NAMESPACE = Namespace(model="m", revision="r", layout=LAYOUT)
PURE = Namespace(model="m", revision="r", layout=dataclasses.replace(LAYOUT, layers=0))
ROOTS = (Root(), Root(salt="x"))
roots = st.sampled_from(ROOTS)
prompts = st.lists(st.integers(0, 1), max_size=13)
ends = st.lists(st.integers(0, 13), max_size=3)


class SparseMachine(RuleBasedStateMachine):
    host_bytes = 16 * MIB
    disk_bytes = 64 * MIB
    namespace = NAMESPACE
    stretch = 1  # how often a prompt is repeated to make it longer

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="kvstore-model-"))
        self.model = ModelSparseStore(self.namespace.layout)
        self.open()

    def open(self) -> None:
        self.store = open_store(self.path, host_bytes=self.host_bytes, disk_bytes=self.disk_bytes)
        self.store.match(self.namespace, [])  # what the disk holds of a namespace is taken at its first use
        self.leases: list[tuple[kvstore.Lease, Root, list[int]]] = []

    def teardown(self) -> None:
        self.release_all()
        self.store.clear(self.namespace)
        stats = self.store.stats()
        assert (0, 0, 0) == (stats.tiers["host"].used_bytes, stats.tiers["disk"].blocks, stats.sparse_blocks)
        assert [0, 0] == [group.disk.used_slots for group in self.groups()]
        self.store.close()
        shutil.rmtree(self.path)

    def release_all(self) -> None:
        while self.leases:
            self.leases.pop()[0].release()

    def groups(self) -> tuple:
        return self.store._index.space(self.namespace).sparse.groups

    def prompt(self, tokens: list[int]) -> list[int]:
        return [token + 10 * turn for turn in range(self.stretch) for token in tokens]

    @rule(root=roots, tokens=prompts, turn_ends=ends, data=st.data())
    def write_all(self, root: Root, tokens: list[int], turn_ends: list[int], data: st.DataObject) -> None:
        self.write(root, self.prompt(tokens), turn_ends, None)

    @rule(root=roots, tokens=prompts, turn_ends=ends, data=st.data())
    def write_some(self, root: Root, tokens: list[int], turn_ends: list[int], data: st.DataObject) -> None:
        self.write(root, self.prompt(tokens), turn_ends, data)

    def write(self, root: Root, prompt: list[int], turn_ends: list[int], data: st.DataObject | None) -> None:
        """Store a prompt: all that is wanted, or without `data` some of it."""
        turn_ends = [end for end in turn_ends if end <= len(prompt)]
        blocks = len(prompt) // BLOCK_TOKENS
        stage = self.store.stage(self.namespace, prompt, root=root, turn_ends=turn_ends)
        dense = self.dense_blocks(blocks, data)
        stage.write_from(expected_rows(self.namespace, prompt, root)[:dense])
        dense = max(stage.from_block, min(dense, stage.from_block + stage.blocks))
        written = []
        for group, part in enumerate(sparse_parts(self.namespace)):
            wanted = [block for run in stage.wanted(part) for block in run]
            self.check_wanted(wanted, self.model.wanted(group, root, prompt, turn_ends))
            chosen = wanted if data is None else [block for block in wanted if data.draw(st.booleans())]
            rows = expected_part_rows(self.namespace, prompt, part, root)
            written.append(
                [block for block in chosen if stage.write_from(rows[block : block + 1], from_block=block, part=part)]
            )
        stage.commit()
        self.model.store(root, prompt, dense, written)
        self.check_match(root, prompt)

    def dense_blocks(self, blocks: int, data: st.DataObject | None) -> int:
        """How many blocks get their dense parts."""
        return blocks if data is None else data.draw(st.integers(0, blocks))

    def check_wanted(self, wanted: list[int], expected: list[int]) -> None:
        assert expected == wanted

    def check_found(self, found: int, expected: int) -> None:
        assert expected == found

    @rule(root=roots, tokens=prompts)
    def read(self, root: Root, tokens: list[int]) -> None:
        self.check_match(root, self.prompt(tokens))

    def check_match(self, root: Root, prompt: list[int]) -> None:
        self.check_found(verified_blocks(self.store, self.namespace, prompt, root=root), self.model.match(root, prompt))

    @rule(root=roots, tokens=prompts)
    def lease(self, root: Root, tokens: list[int]) -> None:
        prompt = self.prompt(tokens)
        self.leases.append((self.store.lease(self.store.match(self.namespace, prompt, root=root)), root, prompt))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def read_leased(self, data: st.DataObject) -> None:
        lease, root, prompt = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        rows = bytearray(lease.blocks * self.namespace.layout.block_bytes)
        assert lease.blocks == lease.load_into(rows).blocks
        assert expected_rows(self.namespace, prompt, root)[: lease.blocks].tobytes() == rows
        for part in sparse_parts(self.namespace):
            needed = self.namespace.layout.needed_blocks(part, lease.blocks)
            rows = bytearray(len(needed) * self.namespace.layout.part_bytes(part))
            assert len(needed) == lease.load_into(rows, from_block=needed.start, part=part).blocks
            right = expected_part_rows(self.namespace, prompt, part, root)
            assert right[needed.start : needed.stop].tobytes() == rows
        lease.release()

    @precondition(lambda self: any(self.model.sparse))
    @rule(data=st.data())
    def lose_one_part(self, data: st.DataObject) -> None:
        """What a failed disk does; every other answer stays what it was."""
        number = data.draw(st.sampled_from([index for index, held in enumerate(self.model.sparse) if held]))
        root, prefix = data.draw(st.sampled_from(sorted(self.model.sparse[number], key=repr)))
        space = self.store._index.space(self.namespace)
        ids = space.tree.match(space.root_key(root), np.array(prefix, dtype=np.uint32))
        group = space.sparse.groups[number]
        if len(ids) == len(prefix) // BLOCK_TOKENS:
            for freed in group.forget(group.find([int(ids[-1])])):
                freed.pool.free(freed.slots)
        self.model.sparse[number].discard((root, prefix))
        for _, other in sorted(self.model.dense, key=repr)[:10]:
            self.check_match(root, list(other))

    @rule(root=roots, tokens=prompts, from_block=st.integers(0, 4))
    def evict(self, root: Root, tokens: list[int], from_block: int) -> None:
        prompt = self.prompt(tokens)
        self.store.evict(self.namespace, prompt, root=root, from_block=from_block)
        if self.model.present(root, prompt) > from_block:
            head = tuple(prompt[: (from_block + 1) * BLOCK_TOKENS])
            below = {block for block in self.model.dense if block[0] == root and block[1][: len(head)] == head}
            self.model.drop(below - self.held())

    def held(self) -> set:
        return {
            block for lease, root, prompt in self.leases for block in self.model.blocks(root, prompt)[: lease.blocks]
        }

    @precondition(lambda self: not self.leases)
    @rule()
    def clear(self) -> None:
        self.store.clear(self.namespace)
        self.model = ModelSparseStore(self.namespace.layout)

    @rule()
    def flush(self) -> None:
        self.store.flush()

    @rule()
    def restart(self) -> None:
        self.release_all()
        self.store.close()
        self.open()

    @invariant()
    def index_and_tables_agree(self) -> None:
        assert () == self.store.verify().problems

    @invariant()
    def every_slot_has_its_block(self) -> None:
        if self.leases:  # what was dropped and is leased still has its slots
            return
        for group in self.groups():
            for tier in (Tier.HOST, Tier.DISK):
                assert sum(tier in block.slots for block in group.blocks()) == group.pool(tier).used_slots
                assert not any(block.holds for block in group.blocks())

    @invariant()
    def as_much_is_kept_as_the_model_says(self) -> None:
        self.check_found(self.store.stats().sparse_blocks, sum(map(len, self.model.sparse)))


class TightSparseMachine(SparseMachine):
    """A store in which almost nothing has room."""

    host_bytes = 64 * 1024
    disk_bytes = MIB
    stretch = 4

    def check_wanted(self, wanted: list[int], expected: list[int]) -> None:
        """Which blocks are there already, and find room, is not known here."""
        assert sorted(set(wanted)) == wanted

    def check_found(self, found: int, expected: int) -> None:
        assert found <= expected


class PureSparseMachine(SparseMachine):
    """No layer of full attention: blocks are there as soon as they are staged and committed."""

    namespace = PURE

    def dense_blocks(self, blocks: int, data: st.DataObject | None) -> int:
        return blocks


class TightPureSparseMachine(PureSparseMachine, TightSparseMachine):
    host_bytes = 256 * 1024


COMMON = settings(max_examples=12, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))
TestSparse = SparseMachine.TestCase
TestSparse.settings = COMMON
TestTightSparse = TightSparseMachine.TestCase
TestTightSparse.settings = settings(COMMON, max_examples=8)
TestPureSparse = PureSparseMachine.TestCase
TestPureSparse.settings = settings(COMMON, max_examples=4)
TestTightPureSparse = TightPureSparseMachine.TestCase
TestTightPureSparse.settings = settings(COMMON, max_examples=4)
