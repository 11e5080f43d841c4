"""Conformance of room, pins, hints, counters, arguments and threads."""

from __future__ import annotations

import dataclasses
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvstore.errors import (
    InvalidArgumentError,
    InvalidBufferError,
    InvalidNamespaceError,
    InvalidTokensError,
    NoSpaceError,
)
from kvstore.events import EventKind
from kvstore.testing.blocks import store_prompt, verified_blocks
from kvstore.testing.conformance_cases import (
    BASE,
    BLOCKS,
    LAYOUT,
    MIB,
    OTHER_NAMESPACES,
    PROMPT,
)
from kvstore.types import KvLayout, Root, Tier

if TYPE_CHECKING:
    from kvstore.api import KvStore
    from kvstore.testing.conformance_cases import OpenStore


class LimitConformance:
    """What happens where room is short, and what is told and refused."""

    # -- room ----------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("disk_bytes", [0, 2 * MIB])
    def test_churn_beyond_the_capacity_keeps_every_answer_right(self, open_store: OpenStore, disk_bytes: int) -> None:
        with open_store(MIB, disk_bytes) as store:
            prompts = [[*PROMPT[:16], *range(start, start + 40)] for start in range(0, 40 * 300, 40)]
            for prompt in prompts:
                assert store_prompt(store, BASE, prompt).refused_blocks == 0
            found = sum(verified_blocks(store, BASE, prompt) for prompt in prompts)
            assert found >= len(prompts)
            assert verified_blocks(store, BASE, prompts[-1]) == 14
            for stats in store.stats().tiers.values():
                assert stats.used_bytes <= stats.capacity_bytes

    def test_blocks_beyond_host_memory_are_read_from_disk(self, open_store: OpenStore) -> None:
        with open_store(MIB, 64 * MIB) as store:
            prompts = [list(range(start, start + 400)) for start in range(0, 40 * 400, 400)]
            for prompt in prompts:
                store_prompt(store, BASE, prompt)
            matches = [store.match(BASE, prompt, touch=False) for prompt in prompts]
            assert any(Tier.DISK in match.tiers for match in matches)
            assert [verified_blocks(store, BASE, prompt) for prompt in prompts] == [100] * len(prompts)
            stats = store.stats()
            assert sum(stats.loaded_tokens.values()) == 40 * 400
            assert stats.loaded_tokens["disk"] > 0

    def test_a_block_larger_than_the_store_is_refused_at_once(self, open_store: OpenStore) -> None:
        layout = KvLayout(layers=64, kv_heads=8, head_dim=128, dtype="float32", block_tokens=64)
        namespace = dataclasses.replace(BASE, layout=layout)
        with open_store(MIB) as store:
            stage = store.stage(namespace, list(range(64)))
            assert stage.blocks == 0
            assert stage.commit().refused_blocks == 1
            assert store.stats().rejected_blocks == {"host_full": 1}

    def test_a_cold_namespace_makes_room_for_another_layout(self, open_store: OpenStore) -> None:
        wide = dataclasses.replace(BASE, layout=dataclasses.replace(LAYOUT, head_dim=64))
        with open_store(4 * MIB) as store:
            for start in range(0, 80 * 400, 400):
                store_prompt(store, BASE, list(range(start, start + 400)))
            for start in range(0, 40 * 80, 80):
                assert store_prompt(store, wide, list(range(start, start + 80))).refused_blocks == 0
            assert verified_blocks(store, wide, list(range(39 * 80, 40 * 80))) == 20

    @pytest.mark.parametrize("disk_bytes", [0, 8 * MIB])
    def test_a_cleared_namespace_leaves_its_room_to_others(self, open_store: OpenStore, disk_bytes: int) -> None:
        wide = dataclasses.replace(BASE, layout=dataclasses.replace(LAYOUT, head_dim=64))
        with open_store(4 * MIB, disk_bytes) as store:
            for start in range(0, 80 * 400, 400):
                store_prompt(store, BASE, list(range(start, start + 400)))
            store.flush()
            store.clear(BASE)
            for start in range(0, 40 * 80, 80):
                assert store_prompt(store, wide, list(range(start, start + 80))).refused_blocks == 0
            store.flush()
            assert store.stats().tiers["disk" if disk_bytes else "host"].blocks == 40 * 20

    # -- pins, eviction, clearing --------------------------------------------------------------------------------------

    def test_a_pinned_prefix_outlives_pressure_until_it_is_unpinned(self, open_store: OpenStore) -> None:
        with open_store(MIB) as store:
            store_prompt(store, BASE, PROMPT)
            pin = store.pin(BASE, PROMPT, ttl_seconds=3600)
            assert pin.blocks == BLOCKS
            assert pin.expires_unix_seconds is not None
            for start in range(1000, 1000 + 40 * 300, 40):
                store_prompt(store, BASE, list(range(start, start + 40)))
            assert store.match(BASE, PROMPT, touch=False).blocks == BLOCKS
            assert store.evict(BASE, PROMPT) == 0
            assert store.unpin(pin.pin_id)
            assert not store.unpin(pin.pin_id)
            assert store.evict(BASE, PROMPT) == BLOCKS

    def test_pins_beyond_their_share_are_refused(self, open_store: OpenStore) -> None:
        with open_store(MIB) as store:
            prompt = list(range(4400))
            assert store_prompt(store, BASE, prompt).blocks == 1100
            with pytest.raises(NoSpaceError, match="pinned_ratio_max"):
                store.pin(BASE, prompt)
            assert store.stats().pins == 0

    def test_evicting_a_prefix_takes_what_lies_below_it(self, store: KvStore) -> None:
        store_prompt(store, BASE, PROMPT)
        branch = [*PROMPT[:20], *range(20)]
        store_prompt(store, BASE, branch)
        assert store.evict(BASE, PROMPT[:20], from_block=4) == 1 + (BLOCKS - 5) + 5
        assert store.match(BASE, branch).blocks == 4
        assert store.evict(BASE, branch, from_block=4) == 0

    def test_clear_drops_one_namespace_alone(self, store: KvStore) -> None:
        other = OTHER_NAMESPACES["model"]
        for namespace in (BASE, other):
            store_prompt(store, namespace, PROMPT)
        store_prompt(store, BASE, PROMPT, root=Root(salt="x"))
        store.flush()
        assert store.clear(BASE) == 2 * BLOCKS
        assert store.match(BASE, PROMPT).blocks == 0
        assert store.match(BASE, PROMPT, root=Root(salt="x")).blocks == 0
        assert verified_blocks(store, other, PROMPT) == BLOCKS
        store_prompt(store, BASE, PROMPT)
        assert verified_blocks(store, BASE, PROMPT) == BLOCKS

    # -- hints ---------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("seconds", [0, 0.25, 3600, None])
    def test_a_hint_reaches_what_a_prompt_shares_with_no_other(self, store: KvStore, seconds: float | None) -> None:
        store_prompt(store, BASE, PROMPT)
        assert store.hint_next_use(BASE, PROMPT, seconds=seconds) == BLOCKS
        store_prompt(store, BASE, [*PROMPT[:20], *range(20)])
        assert store.hint_next_use(BASE, PROMPT, seconds=seconds) == BLOCKS - 5
        assert store.hint_next_use(BASE, [*PROMPT, 1], seconds=seconds) == BLOCKS - 5
        assert store.hint_next_use(BASE, PROMPT[:20], seconds=seconds) == 0

    def test_a_hint_for_what_is_not_stored_in_whole_tells_nobody(self, store: KvStore) -> None:
        assert store.end_session(BASE, PROMPT) == 0
        store_prompt(store, BASE, PROMPT)
        assert store.end_session(BASE, [*PROMPT, 1, 2, 3, 4]) == 0
        assert store.end_session(BASE, PROMPT, root=Root(salt="x")) == 0
        assert store.end_session(OTHER_NAMESPACES["model"], PROMPT) == 0
        assert store.end_session(BASE, []) == 0

    def test_a_session_that_ended_leaves_its_blocks_in_place(self, store: KvStore) -> None:
        store_prompt(store, BASE, PROMPT)
        assert store.end_session(BASE, PROMPT) == BLOCKS
        assert verified_blocks(store, BASE, PROMPT) == BLOCKS
        assert store.stats().lookups == 1

    def test_an_expected_prompt_is_not_protected(self, store: KvStore) -> None:
        store_prompt(store, BASE, PROMPT)
        store.hint_next_use(BASE, PROMPT, seconds=1)
        assert store.evict(BASE, PROMPT) == BLOCKS

    def test_room_is_made_of_what_a_session_left_behind(self, open_store: OpenStore) -> None:
        with open_store(MIB) as store:  # room for 2048 blocks
            prompts = [list(range(start, start + 400)) for start in range(0, 20 * 400, 400)]
            for prompt in prompts:
                assert store_prompt(store, BASE, prompt).blocks == 100
            for ended in prompts[10:14]:
                assert store.end_session(BASE, ended) == 100
            for start in range(10_000, 10_000 + 4 * 400, 400):
                assert store_prompt(store, BASE, list(range(start, start + 400))).blocks == 100
            kept = [store.match(BASE, prompt, touch=False).blocks for prompt in prompts]
            assert sum(kept[10:14]) == 48
            assert kept[:10] + kept[14:] == [100] * 16

    @pytest.mark.parametrize("seconds", [-1, -0.001, float("nan"), float("inf"), 1e9, True, "soon"])
    def test_seconds_that_cannot_be_are_refused(self, store: KvStore, seconds: float) -> None:
        store_prompt(store, BASE, PROMPT)
        with pytest.raises(InvalidArgumentError, match="seconds is"):
            store.hint_next_use(BASE, PROMPT, seconds=seconds)

    # -- counting ------------------------------------------------------------------------------------------------------

    def test_stats_count_each_thing_once(self, store: KvStore) -> None:
        store_prompt(store, BASE, PROMPT)
        store_prompt(store, BASE, PROMPT)
        store.match(BASE, [*PROMPT[:8], 7])
        verified_blocks(store, BASE, PROMPT)
        stats = store.stats()
        assert (stats.lookups, stats.lookup_tokens, stats.hit_tokens) == (2, 9 + 40, {"host": 8 + 40})
        assert (stats.stored_blocks, stats.present_blocks) == (BLOCKS, BLOCKS)
        assert stats.loaded_tokens == {"host": 40}
        assert stats.tiers["host"].blocks == BLOCKS
        assert stats.tiers["host"].used_bytes == BLOCKS * LAYOUT.block_bytes
        assert (stats.leases, stats.stages, stats.pins, stats.namespaces) == (0, 0, 0, 1)
        assert (stats.corrupt_blocks, stats.rejected_blocks, stats.evicted_blocks) == (0, {}, {})
        store.flush()
        assert store.stats().tiers["disk"].blocks == BLOCKS

    def test_a_check_of_the_index_counts_what_it_saw_and_finds_nothing_wrong(self, store: KvStore) -> None:
        for namespace in (BASE, OTHER_NAMESPACES["model"]):
            store_prompt(store, namespace, PROMPT)
        with store.lease(store.match(BASE, PROMPT)), store.stage(BASE, list(range(8))):
            found = store.verify()
        assert (found.namespaces, found.blocks, found.problems) == (2, 2 * BLOCKS + 2, ())

    def test_a_request_is_counted_once_and_a_quiet_lookup_never(self, store: KvStore) -> None:
        for _ in range(3):
            store.match(BASE, PROMPT, request_id="request-1")
        store.match(BASE, PROMPT, request_id="request-2")
        store.match(BASE, PROMPT, touch=False)
        stats = store.stats()
        assert (stats.lookups, stats.lookup_tokens) == (2, 2 * len(PROMPT))

    def test_events_tell_what_came_and_went(self, store: KvStore) -> None:
        store_prompt(store, BASE, PROMPT)
        first = store.events()
        assert [event.kind for event in first.events] == [EventKind.STORED]
        stored = first.events[0]
        assert (stored.tier, len(stored.keys), stored.parent_key) == (Tier.HOST, BLOCKS, stored.root_key)
        store_prompt(store, BASE, [*PROMPT, 1, 2, 3, 4])
        store.evict(BASE, PROMPT, from_block=BLOCKS - 1)
        store.clear(BASE)
        page = store.events(after=first.next_after)
        assert [event.kind for event in page.events] == [EventKind.STORED, EventKind.REMOVED, EventKind.CLEARED]
        assert page.events[0].parent_key == stored.keys[-1]
        removed = page.events[1]
        assert removed.last_copy
        assert set(removed.keys) == {stored.keys[-1], *page.events[0].keys}
        assert (page.gap, page.epoch) == (False, first.epoch)
        assert store.events(after=page.next_after).events == ()

    # -- arguments -----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("tokens", [[-1] * 4, [2**32] * 4, [0.5] * 4, [[1, 2]], "text", [True] * 4, None])
    def test_bad_tokens_are_refused(self, store: KvStore, tokens: object) -> None:
        with pytest.raises(InvalidTokensError):
            store.match(BASE, tokens)
        with pytest.raises(InvalidTokensError):
            store.stage(BASE, tokens)
        assert store.stats().lookups == 0

    @pytest.mark.parametrize("names", [(None, None), ("model", None), ({}, None), (BASE, "salt"), (BASE, BASE)])
    def test_anything_but_a_namespace_and_a_root_is_refused(self, store: KvStore, names: tuple[Any, Any]) -> None:
        namespace, root = names
        with pytest.raises(InvalidNamespaceError, match=r"expected a kvstore\."):
            store.match(namespace, PROMPT, root=root)

    def test_bad_arguments_are_refused_and_change_nothing(self, store: KvStore) -> None:
        store_prompt(store, BASE, PROMPT)
        before = store.stats()
        with pytest.raises(InvalidArgumentError, match="from_block"):
            store.stage(BASE, PROMPT, from_block=BLOCKS + 1)
        with pytest.raises(InvalidArgumentError, match="from_block"):
            store.stage(BASE, PROMPT, from_block=-1)
        for ttl_seconds in (0, -1, 1e9, float("nan")):
            with pytest.raises(InvalidArgumentError, match="ttl_seconds"):
                store.pin(BASE, PROMPT, ttl_seconds=ttl_seconds)
        with store.lease(store.match(BASE, PROMPT, touch=False)) as lease:
            with pytest.raises(InvalidBufferError):
                lease.load_into(bytearray(LAYOUT.block_bytes + 1))
            with pytest.raises(InvalidBufferError):
                lease.load_into(bytes(LAYOUT.block_bytes))
            with pytest.raises(InvalidArgumentError):
                lease.load_into(bytearray(LAYOUT.block_bytes), part=1)
            with pytest.raises(InvalidArgumentError):
                lease.load_into(bytearray(LAYOUT.block_bytes), from_block=-1)
        stage = store.stage(BASE, list(range(4)))
        with pytest.raises(InvalidBufferError):
            stage.write_from(bytearray(LAYOUT.block_bytes - 1))
        stage.abort()
        after = dataclasses.replace(store.stats(), index_bytes=before.index_bytes, policy_bytes=before.policy_bytes)
        assert after == before

    # -- concurrency ---------------------------------------------------------------------------------------------------

    def test_threads_never_read_another_blocks_bytes(self, open_store: OpenStore) -> None:
        """Blocks name themselves; eight threads store, read and evict in a store that holds few of them."""
        with open_store(MIB, 2 * MIB) as store:
            problems: list[BaseException] = []

            def work(seed: int) -> None:
                random = np.random.default_rng(seed)
                try:
                    for _ in range(25):
                        family, length = int(random.integers(12)), int(random.integers(20, 200))
                        prompt = [*range(family, family + 24), *range(family * 1000, family * 1000 + length)]
                        if random.random() < 0.5:
                            store_prompt(store, BASE, prompt)
                        elif random.random() < 0.9:
                            verified_blocks(store, BASE, prompt)
                        else:
                            store.evict(BASE, prompt, from_block=int(random.integers(3, 8)))
                except BaseException as problem:  # noqa: BLE001  # handed to the main thread
                    problems.append(problem)

            threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert problems == []
            stats = store.stats()
            assert (stats.leases, stats.stages) == (0, 0)
            store.clear(BASE)
            assert store.stats().tiers["host"].used_bytes == 0
