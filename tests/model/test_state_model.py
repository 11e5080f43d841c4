"""Sequence states against a set of paths, over random steps, restarts and losses included.

With ample room every match is known exactly. In a tight store states leave at any time; then what is found must be
right, and no deeper than what was stored.
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

from kvstore.store import open_store
from kvstore.testing.state_model import ModelStates
from kvstore.testing.states import CUT_ANY, CUT_END, PIECE_BYTES, STATE_LAYOUT, blob_of, loaded_state
from kvstore.types import Namespace, Root, Tier

if TYPE_CHECKING:
    import kvstore

MIB = 1 << 20
ROOTS = (Root(), Root(salt="x"))
roots = st.sampled_from(ROOTS)
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=7)
pieces = st.integers(1, 5)


class StateMachine(RuleBasedStateMachine):
    host_bytes = 16 * MIB
    disk_bytes = 64 * MIB
    state = CUT_ANY
    stretch = 1  # how often a size is multiplied to fill what there is

    def __init__(self) -> None:
        super().__init__()
        self.namespace = Namespace(model="m", revision="r", layout=dataclasses.replace(STATE_LAYOUT, state=self.state))
        self.path = Path(tempfile.mkdtemp(prefix="kvstore-model-"))
        self.model = ModelStates(self.state.cut)
        self.sizes: dict[tuple[Root, tuple[int, ...]], set[int]] = {}
        self.leases: list[tuple[kvstore.StateLease, Root, list[int]]] = []
        self.open()

    def open(self) -> None:
        self.store = open_store(self.path, host_bytes=self.host_bytes, disk_bytes=self.disk_bytes)
        self.store.match(self.namespace, [])  # what the disk holds of a namespace is taken at its first use

    def teardown(self) -> None:
        self.release_all()
        self.store.clear(self.namespace)
        stats = self.store.stats()
        assert (0, 0, 0) == (stats.tiers["host"].used_bytes, stats.tiers["disk"].blocks, stats.states)
        space = self.store._index.space(self.namespace)
        assert (0, 0) == (space.host.used_slots, space.disk.used_slots)
        self.store.close()
        shutil.rmtree(self.path)

    def release_all(self) -> None:
        while self.leases:
            lease, root, prompt = self.leases.pop()
            self.check_bytes(lease, root, prompt)
            lease.release()

    def check_found(self, found: int, expected: int) -> None:
        assert expected == found

    def check_wanted(self, is_wanted: bool, expected: bool) -> None:
        assert expected == is_wanted

    def check_bytes(self, lease: kvstore.StateLease, root: Root, prompt: list[int]) -> None:
        blob = np.zeros(lease.state_bytes, dtype=np.uint8)
        assert lease.state_bytes == lease.load_into(blob)
        self.check_blob(root, prompt, (lease.tokens, lease.state_tokens), blob)

    def check_blob(self, root: Root, prompt: list[int], tokens: tuple[int, int], blob: np.ndarray) -> None:
        """The bytes are those of some state that was stored for what shares so much with the prompt."""
        if tokens == (0, 0):
            assert 0 == blob.size
            return
        paths = [
            path
            for (where, path), sizes in self.sizes.items()
            if (where, len(path), list(path[: tokens[0]])) == (root, tokens[1], prompt[: tokens[0]])
            and blob.size in sizes
        ]
        assert any((blob_of(self.namespace, path, blob.size, root) == blob).all() for path in paths)

    @rule(root=roots, prompt=prompts, count=pieces, tail=st.integers(0, 1))
    def write(self, root: Root, prompt: list[int], count: int, tail: int) -> None:
        size = count * PIECE_BYTES * self.stretch - 77 * tail
        with self.store.stage_state(self.namespace, prompt, state_bytes=size, root=root) as stage:
            self.check_wanted(stage.wanted, self.model.store(root, prompt))
            stage.write_from(blob_of(self.namespace, tuple(prompt), size, root))
            self.sizes.setdefault((root, tuple(prompt)), set()).add(size)
        self.read(root, prompt)

    @rule(root=roots, prompt=prompts)
    def abort(self, root: Root, prompt: list[int]) -> None:
        stage = self.store.stage_state(self.namespace, prompt, state_bytes=PIECE_BYTES, root=root)
        stage.write_from(bytes(PIECE_BYTES))
        stage.abort()

    @rule(root=roots, prompt=prompts)
    def read(self, root: Root, prompt: list[int]) -> None:
        tokens, state_tokens, blob = loaded_state(self.store, self.namespace, prompt, root)
        self.check_found(tokens, self.model.match(root, prompt))
        self.check_blob(root, prompt, (tokens, state_tokens), blob)

    @precondition(lambda self: len(self.leases) < 3)
    @rule(root=roots, prompt=prompts)
    def lease(self, root: Root, prompt: list[int]) -> None:
        match = self.store.match(self.namespace, prompt, root=root)
        self.leases.append((self.store.lease_state(match), root, prompt))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease, root, prompt = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.check_bytes(lease, root, prompt)
        lease.release()

    @precondition(lambda self: not self.leases)
    @rule(root=roots, prompt=prompts, data=st.data())
    def evict(self, root: Root, prompt: list[int], data: st.DataObject) -> None:
        from_token = data.draw(st.integers(0, len(prompt)))
        self.store.evict(self.namespace, prompt, root=root, from_block=from_token)
        if from_token < len(prompt):
            for path in self.model.below(root, prompt[: from_token + 1]):
                self.model.lose(root, path)
        self.read(root, prompt)

    @rule()
    def clear(self) -> None:
        self.store.clear(self.namespace)
        self.model = ModelStates(self.state.cut)

    @rule()
    def flush(self) -> None:
        self.store.flush()

    @rule()
    def restart(self) -> None:
        self.release_all()
        self.store.close()
        self.open()
        self.model.keep_longest()

    @rule(root=roots, prompt=prompts)
    def prefetch(self, root: Root, prompt: list[int]) -> None:
        with self.store.prefetch(self.namespace, prompt, root=root, wait_seconds=None) as prefetch:
            assert prefetch.host_blocks <= self.model.match(root, prompt)

    @invariant()
    def the_index_agrees(self) -> None:
        assert () == self.store.verify().problems
        assert self.store.stats().states <= len(self.model.paths)


class EndStateMachine(StateMachine):
    state = CUT_END


class LossyStateMachine(StateMachine):
    """Some piece of one state is lost on disk: that state serves nobody any more, all others what they did."""

    @precondition(lambda self: self.model.paths)
    @rule(data=st.data())
    def lose_one(self, data: st.DataObject) -> None:
        self.restart()
        space = self.store._index.space(self.namespace)
        states = sorted(space.states.all(), key=lambda state: (state.root_key, state.path))
        if not states:
            return
        lost = data.draw(st.sampled_from(states))
        piece = data.draw(st.integers(0, lost.slots[Tier.DISK].size - 1))
        slot = lost.slots[Tier.DISK][piece : piece + 1]
        identity = space.states.records.identities(lost, range(piece + 1, piece + 2))
        assert space.disk.write(slot, identity, [(np.zeros(PIECE_BYTES, dtype=np.uint8),)]).all()
        root = next(root for root in ROOTS if space.root_key(root) == lost.root_key)
        path = tuple(np.frombuffer(lost.path, dtype=">u4").tolist())
        if piece < lost.slots[Tier.DISK].size - 1:  # a piece of the blob: found out by who reads it
            blob = loaded_state(self.store, self.namespace, path, root)[2]
            assert blob.size == piece * PIECE_BYTES
        else:
            self.store.close()
            self.open()
        self.model.lose(root, path)
        self.read(root, list(path))


class EndLossyStateMachine(LossyStateMachine):
    state = CUT_END


class TightStateMachine(StateMachine):
    """States leave both tiers all the time."""

    host_bytes = MIB // 2
    disk_bytes = 4 * MIB
    stretch = 8

    def check_found(self, found: int, expected: int) -> None:
        assert found <= expected

    def check_wanted(self, is_wanted: bool, expected: bool) -> None:
        """Whether there is room decides too."""


COMMON = settings(max_examples=4, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck))
TestStates = StateMachine.TestCase
TestStates.settings = COMMON
TestEndStates = EndStateMachine.TestCase
TestEndStates.settings = COMMON
TestLossyStates = LossyStateMachine.TestCase
TestLossyStates.settings = COMMON
TestEndLossyStates = EndLossyStateMachine.TestCase
TestEndLossyStates.settings = COMMON
TestTightStates = TightStateMachine.TestCase
TestTightStates.settings = COMMON
