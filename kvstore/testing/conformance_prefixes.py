"""Conformance of matching, isolation, staging and leases."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import pytest
import xxhash

from kvstore.errors import (
    ClosedError,
)
from kvstore.testing.blocks import expected_rows, store_prompt, verified_blocks
from kvstore.testing.conformance_cases import (
    BASE,
    BLOCKS,
    COLLIDING_HEADS,
    LAYOUT,
    MIB,
    OTHER_NAMESPACES,
    OTHER_ROOTS,
    PROMPT,
)
from kvstore.types import Tier

if TYPE_CHECKING:
    from kvstore.api import KvStore
    from kvstore.testing.conformance_cases import OpenStore


class PrefixConformance:
    """What is stored is found, whole and by whom it may be found alone."""

    # -- matching ------------------------------------------------------------------------------------------------------

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

    # -- isolation -----------------------------------------------------------------------------------------------------

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

    # -- staging -------------------------------------------------------------------------------------------------------

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

    # -- leases --------------------------------------------------------------------------------------------------------

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
            for start in range(1000, 1000 + 40 * 300, 40):
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
