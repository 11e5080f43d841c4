"""What is known of an engine against the engine itself: random stores and evictions, and every fault of the stream."""

from __future__ import annotations

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.engine_event_config import EngineEventConfig
from kvstore.engine_events.overlay import DeviceOverlay
from kvstore.types import KvLayout, Namespace, Root

BLOCK_TOKENS = 2
BLOCKS_MAX = 4  # of a prompt
LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=8, dtype="float16", block_tokens=16)  # not the engine's block size
NAMESPACE = Namespace(model="model", revision="revision", layout=LAYOUT)
CONFIG = EngineEventConfig(endpoint="tcp://engine:1", replay_endpoint="tcp://engine:2", model="model")
PATHS = [tuple((path >> depth) & 1 for depth in range(BLOCKS_MAX)) for path in range(2**BLOCKS_MAX)]
SALTS = (None, "salt")


def tokens_of(path: tuple[int, ...]) -> list[int]:
    return [7 * step + place for step in path for place in range(BLOCK_TOKENS)]


class Publisher:
    """An engine: the blocks that it holds, each as often as it does, and the batches that it can repeat."""

    def __init__(self, now: float) -> None:
        self.held: dict[tuple[str | None, tuple[int, ...]], int] = {}
        self.buffer: list[tuple[int, bytes]] = []
        self.next = 0
        self.now = now

    def hash_of(self, salt: str | None, path: tuple[int, ...]) -> int:
        return hash((salt, path)) & (2**64 - 1)

    def publish(self, events: list[object] | None) -> tuple[int, bytes]:
        self.now += 1.0
        batch = (self.next, b"\xc1" if events is None else msgspec.msgpack.encode([self.now, events, 0]))
        self.next += 1
        self.buffer.append(batch)
        return batch

    def store(self, salt: str | None, path: tuple[int, ...], first: int) -> dict[str, object]:
        blocks = [path[: depth + 1] for depth in range(first, len(path))]
        for block in blocks:
            self.held[salt, block] = self.held.get((salt, block), 0) + 1
        extra = [[salt] if salt and first + number == 0 else None for number in range(len(blocks))]
        return {
            "type": "BlockStored",
            "block_hashes": [self.hash_of(salt, block) for block in blocks],
            "parent_block_hash": self.hash_of(salt, path[:first]) if first else None,
            "token_ids": tokens_of(path)[first * BLOCK_TOKENS :],
            "block_size": BLOCK_TOKENS,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": extra,
            "group_idx": 0,
            "later": {"engines": "say more"},
        }

    def remove(self, block: tuple[str | None, tuple[int, ...]]) -> dict[str, object]:
        self.held[block] -= 1
        if not self.held[block]:
            del self.held[block]
        return {"type": "BlockRemoved", "block_hashes": [self.hash_of(*block)], "medium": "GPU", "group_idx": 0}

    def leading(self, salt: str | None, path: tuple[int, ...]) -> int:
        depths = range(1, len(path) + 1)
        return next((depth - 1 for depth in depths if (salt, path[:depth]) not in self.held), len(path))


class EngineEventsMachine(RuleBasedStateMachine):
    """One engine and its follower. `sent` are live batches on their way, which may be lost or come twice."""

    @initialize()
    def begin(self) -> None:
        self.overlay = DeviceOverlay({"engine": CONFIG})
        self.follower = self.overlay.engines[0].follower
        self.publisher = Publisher(0.0)
        self.sent: list[tuple[int, bytes]] = []
        self.wants_replay = self.follower.connected()

    def ask(self, first: int | None) -> None:
        if first is not None:
            for batch in [batch for batch in self.publisher.buffer if batch[0] >= first]:
                self.follower.replayed(*batch)
            self.follower.replay_ended()
        self.wants_replay = None

    def deliver(self) -> None:
        while self.sent:
            if self.wants_replay is not None:
                self.ask(self.wants_replay)
            self.wants_replay = self.follower.live(*self.sent.pop(0))
        self.ask(self.wants_replay)

    @rule(
        path=st.sampled_from(PATHS), length=st.integers(1, BLOCKS_MAX), salt=st.sampled_from(SALTS), copy=st.booleans()
    )
    def store(self, path: tuple[int, ...], length: int, salt: str | None, copy: bool) -> None:
        path = path[:length]
        first = 0 if copy else self.publisher.leading(salt, path)
        if first < length:
            self.sent.append(self.publisher.publish([self.publisher.store(salt, path, first)]))

    @precondition(lambda self: self.publisher.held)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.publisher.held, key=repr)))
        self.sent.append(self.publisher.publish([self.publisher.remove(block)]))

    @precondition(lambda self: self.publisher.held)
    @rule(data=st.data())
    def evict_unseen(self, data: st.DataObject) -> None:
        """What is lost for good may have been a removal."""
        self.deliver()
        block = data.draw(st.sampled_from(sorted(self.publisher.held, key=repr)))
        self.publisher.publish([self.publisher.remove(block)])
        self.publisher.buffer.clear()
        self.arrive()

    @rule()
    def reset(self) -> None:
        self.publisher.held.clear()
        self.sent.append(self.publisher.publish([{"type": "AllBlocksCleared"}]))

    @rule(events=st.sampled_from([[], [{"type": "SomethingNew", "x": 1}], None]))
    def say_nothing_of_use(self, events: list[object] | None) -> None:
        self.sent.append(self.publisher.publish(events))

    @rule(hashes=st.lists(st.integers(0, 9), max_size=2), parent=st.integers(0, 9))
    def tell_of_what_nobody_knows(self, hashes: list[int], parent: int) -> None:
        stored = {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": parent,
            "token_ids": [1] * (BLOCK_TOKENS * len(hashes)),
            "block_size": BLOCK_TOKENS,
            "group_idx": 0,
        }
        events = [stored, {"type": "BlockRemoved", "block_hashes": hashes, "group_idx": 0}]
        self.sent.append(self.publisher.publish(events))

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        del self.sent[data.draw(st.integers(0, len(self.sent) - 1))]

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def come_twice(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.sent) - 1))
        self.sent.insert(place, self.sent[place])

    @rule(kept=st.integers(0, 3))
    def forget_old_batches(self, kept: int) -> None:
        self.publisher.buffer = self.publisher.buffer[len(self.publisher.buffer) - kept :] if kept else []

    @rule()
    def restart_unseen(self) -> None:
        self.deliver()
        self.publisher = Publisher(self.publisher.now)
        self.sent.append(self.publisher.publish([]))
        self.deliver()

    @rule()
    def reconnect(self) -> None:
        self.sent.clear()
        self.wants_replay = self.follower.connected()
        is_whole = len(self.publisher.buffer) == self.publisher.next
        self.ask(self.wants_replay)
        if is_whole:
            assert self.known() == self.true()

    @rule()
    def arrive(self) -> None:
        """What is known is no more than what the engine holds, once the last batch has come."""
        self.sent.append(self.publisher.publish([]))
        self.deliver()
        held = self.true()
        assert {prompt: count for prompt, count in self.known().items() if count > held[prompt]} == {}

    def known(self) -> dict[object, int]:
        return {
            (salt, path): self.overlay.device_tokens(NAMESPACE, [*tokens_of(path), 99], Root(salt=salt)).get(
                "engine", 0
            )
            for salt in SALTS
            for path in PATHS
        }

    def true(self) -> dict[object, int]:
        return {(salt, path): self.publisher.leading(salt, path) * BLOCK_TOKENS for salt in SALTS for path in PATHS}

    @invariant()
    def no_more_is_remembered_than_the_engine_told(self) -> None:
        residency = self.overlay.engines[0].residency
        assert len(residency._held) <= residency.blocks <= 2 * 2**BLOCKS_MAX * BLOCKS_MAX + 10


TestEngineEvents = EngineEventsMachine.TestCase
TestEngineEvents.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
