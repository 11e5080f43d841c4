"""What every KvStore must do, as a test class to inherit.

    class TestMyStore(KvStoreConformance):
        @pytest.fixture
        def open_store(self, tmp_path):
            return lambda host_bytes, disk_bytes=0: my_store(tmp_path, host_bytes, disk_bytes)

The fixture returns a function that opens a fresh store of the given sizes; the class closes what it opened.
Namespaces with a secret use one of SECRETS, so that a served store can be told of them beforehand.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import pytest
import xxhash

from kvstore.api import KvStore
from kvstore.errors import (
    ClosedError,
    InvalidArgumentError,
    InvalidBufferError,
    InvalidNamespaceError,
    InvalidTokensError,
    NoSpaceError,
)
from kvstore.events import EventKind
from kvstore.testing.blocks import expected_rows, store_prompt, verified_blocks
from kvstore.types import KvLayout, Namespace, Root, Tier

OpenStore: TypeAlias = Callable[..., KvStore]

SECRETS = (b"first secret of the tests", b"second secret of the tests")
LAYOUT = KvLayout(layers=2, kv_heads=2, head_dim=8, dtype="float16", block_tokens=4)
BASE = Namespace(model="model", revision="revision", tenant="tenant", secret=SECRETS[0], layout=LAYOUT)
PROMPT = list(range(100, 140))
BLOCKS = len(PROMPT) // LAYOUT.block_tokens
MIB = 1 << 20

OTHER_NAMESPACES = {
    "tenant": dataclasses.replace(BASE, tenant="other"),
    "secret": dataclasses.replace(BASE, secret=SECRETS[1]),
    "no secret": dataclasses.replace(BASE, secret=None),
    "model": dataclasses.replace(BASE, model="other"),
    "revision": dataclasses.replace(BASE, revision="other"),
    "model and revision swapped": dataclasses.replace(BASE, model="revision", revision="model"),
    "dtype of the same size": dataclasses.replace(BASE, layout=dataclasses.replace(LAYOUT, dtype="bfloat16")),
    "axis order": dataclasses.replace(BASE, layout=dataclasses.replace(LAYOUT, axis_order="LKTHD")),
    "rope": dataclasses.replace(BASE, layout=dataclasses.replace(LAYOUT, rope="theta=1e6")),
    "quantisation": dataclasses.replace(BASE, layout=dataclasses.replace(LAYOUT, quantisation="theta=1e6")),
    "world size": dataclasses.replace(BASE, layout=dataclasses.replace(LAYOUT, tensor_parallel=2)),
    "pipeline size": dataclasses.replace(BASE, layout=dataclasses.replace(LAYOUT, pipeline_parallel=2)),
    "engine": dataclasses.replace(BASE, layout=dataclasses.replace(LAYOUT, engine="other")),
    "engine layout": dataclasses.replace(BASE, layout=dataclasses.replace(LAYOUT, engine_layout=2)),
}
OTHER_ROOTS = {
    "adapter": Root(adapter="x"),
    "salt": Root(salt="x"),
    "weights epoch": Root(weights_epoch="x"),
    "empty adapter": Root(adapter=""),
}

# Two blocks of 16 whose XXH3-128 over (any parent, tokens) are equal: a store that trusts such a key mixes them up.
COLLIDING_HEADS = ((29625, 95822, 101446, 35249), (18902, 118794, 112169, 12277))


class KvStoreConformance:
    """Inherit and provide the fixture `open_store`; see the module."""

    @pytest.fixture
    def open_store(self) -> OpenStore:
        """Return a function (host_bytes, disk_bytes=0) -> KvStore."""
        raise pytest.UsageError("a subclass of KvStoreConformance defines the fixture open_store")

    @pytest.fixture
    def store(self, open_store: OpenStore) -> Iterator[KvStore]:
        """A store with ample room."""
        with open_store(64 * MIB, 64 * MIB) as store:
            yield store

    # -- matching ------------------------------------------------------------------------------------------------

    def test_an_empty_store_matches_nothing(self, store: KvStore) -> None:
        match = store.match(BASE, PROMPT)
        assert (match.blocks, match.tokens, match.tiers) == (0, 0, {})

    def test_what_was_stored_is_matched_and_loaded(self, store: KvStore) -> None:
        result = store_prompt(store, BASE, PROMPT)
        assert (result.blocks, result.present_blocks, result.refused_blocks) == (BLOCKS, 0, 0)
        match = store.match(BASE, PROMPT)
        assert (match.blocks, match.tokens, match.tiers) == (BLOCKS, len(PROMPT), {Tier.HOST: BLOCKS})
        assert verified_blocks(store, BASE, PROMPT) == BLOCKS

    def test_a_partial_last_block_is_not_stored(self, store: KvStore) -> None:
        assert store_prompt(store, BASE, PROMPT[:-1]).blocks == BLOCKS - 1
        assert store.match(BASE, PROMPT).blocks == BLOCKS - 1

    def test_a_prompt_shorter_than_a_block_is_a_miss_and_stores_nothing(self, store: KvStore) -> None:
        assert store_prompt(store, BASE, PROMPT[:3]).blocks == 0
        assert store.match(BASE, PROMPT[:3]).blocks == 0
        assert store.match(BASE, []).blocks == 0

    def test_prompts_share_exactly_their_common_whole_blocks(self, store: KvStore) -> None:
        store_prompt(store, BASE, PROMPT)
        for shared in range(len(PROMPT)):
            other = [*PROMPT[:shared], *(t + 1000 for t in PROMPT[shared:])]
            assert store.match(BASE, other).blocks == shared // LAYOUT.block_tokens
        assert store.match(BASE, [*PROMPT, 1, 2, 3, 4]).blocks == BLOCKS

    def test_a_conversation_stores_only_what_is_new(self, store: KvStore) -> None:
        store_prompt(store, BASE, PROMPT[:20])
        result = store_prompt(store, BASE, PROMPT)
        assert (result.blocks, result.present_blocks) == (BLOCKS - 5, 5)
        result = store_prompt(store, BASE, PROMPT, from_block=BLOCKS)
        assert (result.blocks, result.present_blocks) == (0, 0)
        assert verified_blocks(store, BASE, PROMPT) == BLOCKS

    @pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32])
    def test_token_buffers_and_lists_name_the_same_prefix(self, store: KvStore, dtype: type) -> None:
        store_prompt(store, BASE, PROMPT)
        assert store.match(BASE, np.array(PROMPT, dtype=dtype)).blocks == BLOCKS

    def test_token_ids_span_the_whole_of_uint32(self, store: KvStore) -> None:
        prompt = [0, 2**31 - 1, 2**31, 2**32 - 1]
        store_prompt(store, BASE, prompt)
        assert verified_blocks(store, BASE, prompt) == 1

    # -- isolation -----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("field", OTHER_NAMESPACES)
    def test_namespaces_that_differ_in_one_field_never_share(self, store: KvStore, field: str) -> None:
        other = OTHER_NAMESPACES[field]
        store_prompt(store, BASE, PROMPT)
        assert store.match(other, PROMPT).blocks == 0
        store_prompt(store, other, PROMPT)
        assert verified_blocks(store, BASE, PROMPT) == BLOCKS
        assert verified_blocks(store, other, PROMPT) == BLOCKS

    @pytest.mark.parametrize("field", OTHER_ROOTS)
    def test_roots_that_differ_in_one_field_never_share(self, store: KvStore, field: str) -> None:
        store_prompt(store, BASE, PROMPT)
        store_prompt(store, BASE, PROMPT, root=OTHER_ROOTS[field])
        for name, root in [("plain", None), *OTHER_ROOTS.items()]:
            expected = BLOCKS if name in (field, "plain") else 0
            assert verified_blocks(store, BASE, PROMPT, root=root) == expected, name

    def test_blocks_with_equal_xxh3_stay_apart(self, store: KvStore) -> None:
        namespace = dataclasses.replace(BASE, layout=dataclasses.replace(LAYOUT, block_tokens=16))
        first, second = ([*head, *range(12)] for head in COLLIDING_HEADS)
        parent = b"any parent bytes"
        hashes = {xxhash.xxh3_128_digest(parent + np.array(prompt, np.uint32).tobytes()) for prompt in (first, second)}
        assert len(hashes) == 1
        store_prompt(store, namespace, first)
        assert store.match(namespace, second).blocks == 0
        store_prompt(store, namespace, second)
        assert verified_blocks(store, namespace, first) == 1
        assert verified_blocks(store, namespace, second) == 1

    # -- staging -------------------------------------------------------------------------------------------------

    def test_a_stage_is_invisible_until_it_commits(self, store: KvStore) -> None:
        stage = store.stage(BASE, PROMPT)
        assert (stage.from_block, stage.blocks) == (0, BLOCKS)
        stage.write_from(expected_rows(BASE, PROMPT))
        assert store.match(BASE, PROMPT).blocks == 0
        stage.commit()
        assert verified_blocks(store, BASE, PROMPT) == BLOCKS

    def test_an_aborted_stage_leaves_nothing(self, store: KvStore) -> None:
        used = store.stats().tiers["host"].used_bytes
        stage = store.stage(BASE, PROMPT)
        stage.write_from(expected_rows(BASE, PROMPT))
        stage.abort()
        stage.abort()
        assert store.match(BASE, PROMPT).blocks == 0
        stats = store.stats()
        assert (stats.stages, stats.tiers["host"].used_bytes, stats.stored_blocks) == (0, used, 0)

    def test_leaving_the_block_commits_and_an_exception_aborts(self, store: KvStore) -> None:
        with store.stage(BASE, PROMPT[:8]) as stage:
            stage.write_from(expected_rows(BASE, PROMPT[:8]))
        with pytest.raises(ZeroDivisionError), store.stage(BASE, PROMPT) as stage:
            raise ZeroDivisionError(stage.write_from(expected_rows(BASE, PROMPT)))
        assert store.match(BASE, PROMPT).blocks == 2

    def test_only_leading_written_blocks_become_visible(self, store: KvStore) -> None:
        rows = expected_rows(BASE, PROMPT)
        stage = store.stage(BASE, PROMPT)
        assert stage.write_from(rows[:3]) == 3
        assert stage.write_from(rows[5:], from_block=5) == BLOCKS - 5
        result = stage.commit()
        assert (result.blocks, result.refused_blocks) == (3, BLOCKS - 3)
        assert verified_blocks(store, BASE, PROMPT) == 3

    def test_rows_outside_of_the_stage_are_skipped(self, store: KvStore) -> None:
        rows = expected_rows(BASE, PROMPT)
        store_prompt(store, BASE, PROMPT[:8])
        with store.stage(BASE, PROMPT) as stage:
            assert (stage.from_block, stage.blocks) == (2, BLOCKS - 2)
            assert stage.write_from(rows) == BLOCKS - 2
            assert stage.write_from(rows, from_block=BLOCKS) == 0
        assert verified_blocks(store, BASE, PROMPT) == BLOCKS

    def test_a_stage_behind_a_missing_block_is_empty(self, store: KvStore) -> None:
        store_prompt(store, BASE, PROMPT[:8])
        stage = store.stage(BASE, PROMPT, from_block=4)
        assert stage.blocks == 0
        result = stage.commit()
        assert (result.blocks, result.refused_blocks) == (0, BLOCKS - 4)
        assert store.stats().rejected_blocks == {"missing_prefix": BLOCKS - 4}
        assert store.match(BASE, PROMPT).blocks == 2

    def test_concurrent_stores_of_one_prefix_are_single_flight(self, store: KvStore) -> None:
        longer = [*PROMPT, *range(8)]
        first = store.stage(BASE, PROMPT)
        second = store.stage(BASE, longer)
        assert (second.from_block, second.blocks) == (BLOCKS, 2)
        second.write_from(expected_rows(BASE, longer))
        assert second.commit().blocks == 2
        assert store.match(BASE, longer).blocks == 0
        first.write_from(expected_rows(BASE, PROMPT))
        first.commit()
        assert verified_blocks(store, BASE, longer) == BLOCKS + 2

    def test_blocks_below_an_aborted_stage_go_with_it(self, store: KvStore) -> None:
        longer = [*PROMPT, *range(8)]
        first = store.stage(BASE, PROMPT)
        committed = store.stage(BASE, longer)
        committed.write_from(expected_rows(BASE, longer))
        committed.commit()
        pending = store.stage(BASE, [*longer, *range(4)])
        pending.write_from(expected_rows(BASE, [*longer, *range(4)]))
        first.abort()
        assert pending.commit().blocks == 0
        assert store.match(BASE, longer).blocks == 0
        assert store.stats().tiers["host"].used_bytes == 0
        store_prompt(store, BASE, longer)
        assert verified_blocks(store, BASE, longer) == BLOCKS + 2

    @pytest.mark.parametrize("ranks", ["world size", "pipeline size"])
    def test_a_block_commits_when_all_its_parts_are_written(self, store: KvStore, ranks: str) -> None:
        namespace = OTHER_NAMESPACES[ranks]
        layout = namespace.layout
        rows = expected_rows(namespace, PROMPT)
        parts = np.split(rows, np.cumsum(layout.part_sizes)[:-1], axis=1)
        stage = store.stage(namespace, PROMPT)
        stage.write_from(np.ascontiguousarray(parts[0]), part=0)
        stage.write_from(np.ascontiguousarray(parts[1][:4]), part=1)
        assert stage.commit().blocks == 4
        assert verified_blocks(store, namespace, PROMPT) == 4
        with store.lease(store.match(namespace, PROMPT)) as lease:
            loaded = np.zeros((4, layout.part_bytes(1)), dtype=np.uint8)
            assert lease.load_into(loaded, part=1).blocks == 4
        assert np.array_equal(loaded, parts[1][:4])

    # -- leases --------------------------------------------------------------------------------------------------

    def test_a_load_may_start_anywhere_and_fills_as_many_rows_as_there_are(self, store: KvStore) -> None:
        store_prompt(store, BASE, PROMPT)
        rows = np.zeros((3, LAYOUT.block_bytes), dtype=np.uint8)
        with store.lease(store.match(BASE, PROMPT)) as lease:
            done = lease.load_into(rows, from_block=5)
            assert (done.blocks, done.requested_blocks, done.bytes) == (3, 3, rows.nbytes)
            assert np.array_equal(rows, expected_rows(BASE, PROMPT)[5:8])
            assert lease.load_into(rows, from_block=BLOCKS - 1).blocks == 1
            assert lease.load_into(rows, from_block=BLOCKS).blocks == 0

    def test_a_lease_leaves_out_what_vanished_since_the_match(self, store: KvStore) -> None:
        store_prompt(store, BASE, PROMPT)
        match = store.match(BASE, PROMPT)
        assert store.evict(BASE, PROMPT, from_block=3) == BLOCKS - 3
        with store.lease(match) as lease:
            assert lease.blocks == 3
        store.evict(BASE, PROMPT)
        with store.lease(match) as lease:
            assert lease.blocks == 0
            assert lease.load_into(bytearray()).blocks == 0

    def test_leased_blocks_survive_pressure_and_clear(self, open_store: OpenStore) -> None:
        with open_store(MIB) as store:
            store_prompt(store, BASE, PROMPT)
            lease = store.lease(store.match(BASE, PROMPT))
            for start in range(1000, 1000 + 40 * 1000, 40):
                store_prompt(store, BASE, list(range(start, start + 40)))
            assert store.match(BASE, PROMPT).blocks == BLOCKS
            store.clear(BASE)
            assert store.match(BASE, PROMPT).blocks == 0
            rows = np.zeros((BLOCKS, LAYOUT.block_bytes), dtype=np.uint8)
            assert lease.load_into(rows).blocks == BLOCKS
            assert np.array_equal(rows, expected_rows(BASE, PROMPT))
            lease.release()
            lease.release()
            assert store.stats().tiers["host"].used_bytes == 0

    def test_use_after_the_end_is_refused(self, store: KvStore) -> None:
        store_prompt(store, BASE, PROMPT)
        lease = store.lease(store.match(BASE, PROMPT))
        lease.release()
        with pytest.raises(ClosedError):
            lease.load_into(np.zeros((1, LAYOUT.block_bytes), dtype=np.uint8))
        stage = store.stage(BASE, PROMPT)
        stage.commit()
        with pytest.raises(ClosedError):
            stage.write_from(expected_rows(BASE, PROMPT))
        with pytest.raises(ClosedError):
            stage.commit()
        store.close()
        store.close()
        with pytest.raises(ClosedError):
            store.match(BASE, PROMPT)

    # -- room ----------------------------------------------------------------------------------------------------

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
            assert store.match(BASE, prompts[0]).tiers.get(Tier.DISK, 0) > 0
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

    # -- pins, eviction, clearing --------------------------------------------------------------------------------

    def test_a_pinned_prefix_outlives_pressure_until_it_is_unpinned(self, open_store: OpenStore) -> None:
        with open_store(MIB) as store:
            store_prompt(store, BASE, PROMPT)
            pin = store.pin(BASE, PROMPT, ttl_seconds=3600)
            assert pin.blocks == BLOCKS
            assert pin.expires_unix_seconds is not None
            for start in range(1000, 1000 + 40 * 500, 40):
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

    # -- hints ---------------------------------------------------------------------------------------------------

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

    # -- counting ------------------------------------------------------------------------------------------------

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

    # -- arguments -----------------------------------------------------------------------------------------------

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
        with pytest.raises(InvalidArgumentError, match="ttl_seconds"):
            store.pin(BASE, PROMPT, ttl_seconds=0)
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

    # -- concurrency ---------------------------------------------------------------------------------------------

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
