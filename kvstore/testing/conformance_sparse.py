"""Conformance of layouts with sliding windows and recurrent states, of part sets, and of ranks that write together."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvstore.errors import ClosedError, InvalidArgumentError
from kvstore.layer_groups import LayerGroup, Recurrent, SlidingWindow
from kvstore.testing.blocks import (
    expected_part_rows,
    expected_rows,
    sparse_parts,
    store_prompt,
    verified_blocks,
    write_sparse,
)
from kvstore.testing.conformance_cases import BASE, BLOCKS, LAYOUT, MIB, PROMPT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.api import KvStore, Stage
    from kvstore.testing.conformance_cases import OpenStore

WINDOW = SlidingWindow(layers=3, window=10, kv_heads=2, head_dim=8, dtype="float16")  # spans 3 blocks of 4
STATE = Recurrent(layers=2, state_bytes=512, heads=2)
HYBRIDS: dict[str, tuple[LayerGroup, ...]] = {
    "sliding window": (WINDOW,),
    "recurrent": (STATE,),
    "both": (WINDOW, STATE),
}
PURE_STATES = dataclasses.replace(BASE, layout=dataclasses.replace(LAYOUT, layers=0, groups=(STATE,)))
HYBRID_LAYOUT = dataclasses.replace(LAYOUT, groups=(WINDOW, STATE))
HYBRID = dataclasses.replace(BASE, layout=HYBRID_LAYOUT)
WINDOW_PART, STATE_PART = 1, 2
RANKED_LAYOUT = dataclasses.replace(LAYOUT, tensor_parallel=2, groups=(STATE,))
RANKED = dataclasses.replace(BASE, layout=RANKED_LAYOUT)


class SparseConformance:
    """A match ends where all parts that it needs are there; losing one shortens it and nothing else."""

    @pytest.mark.parametrize("groups", HYBRIDS)
    @pytest.mark.parametrize("tensor_parallel", [1, 2])
    @pytest.mark.parametrize("layers", [LAYOUT.layers, 0], ids=["beside full attention", "alone"])
    def test_a_prompt_with_groups_is_found_at_its_end(
        self, store: KvStore, groups: str, tensor_parallel: int, layers: int
    ) -> None:
        layout = dataclasses.replace(LAYOUT, layers=layers, groups=HYBRIDS[groups], tensor_parallel=tensor_parallel)
        namespace = dataclasses.replace(BASE, layout=layout)
        store_prompt(store, namespace, PROMPT)
        assert store.match(namespace, [*PROMPT, 1, 2, 3]).blocks == BLOCKS
        assert verified_blocks(store, namespace, PROMPT) == BLOCKS
        assert verified_blocks(store, BASE, PROMPT) == 0

    def test_without_full_attention_only_the_groups_are_written(self, store: KvStore) -> None:
        with store.stage(PURE_STATES, PROMPT, turn_ends=[17]) as stage:
            assert (stage.from_block, stage.blocks) == (0, BLOCKS)
            write_sparse(stage, 1, expected_part_rows(PURE_STATES, PROMPT, 1))
        assert store.match(PURE_STATES, [*PROMPT, 1]).blocks == BLOCKS
        assert store.match(PURE_STATES, [*PROMPT[:18], 1, 2]).blocks == 4
        with store.stage(PURE_STATES, [*PROMPT, *range(8)]) as stage:
            assert (stage.from_block, stage.wanted(1)) == (BLOCKS, (range(BLOCKS, BLOCKS + 2),))
        assert store.match(PURE_STATES, [*PROMPT, *range(8)]).blocks == BLOCKS

    def test_a_match_ends_at_a_point_that_was_kept(self, store: KvStore) -> None:
        store_prompt(store, HYBRID, PROMPT, turn_ends=[17])
        assert store.match(HYBRID, PROMPT[:-1]).blocks == BLOCKS - 1  # for the same prompt, less the token to compute
        for shared, found in ((35, 4), (16, 4), (15, 0)):
            assert verified_blocks(store, HYBRID, [*PROMPT[:shared], *range(30)]) == found
        assert store.stats().shortened_tokens == (8 - 4) * 4 + 3 * 4

    @pytest.mark.parametrize("missing", [WINDOW_PART, STATE_PART])
    def test_what_was_not_written_shortens_the_match_until_it_is(self, store: KvStore, missing: int) -> None:
        stage = store.stage(HYBRID, PROMPT)
        stage.write_from(expected_rows(HYBRID, PROMPT))
        written = WINDOW_PART + STATE_PART - missing
        write_sparse(stage, written, expected_part_rows(HYBRID, PROMPT, written))
        assert stage.commit().blocks == BLOCKS
        assert store.match(HYBRID, PROMPT).blocks == 0
        later = store.stage(HYBRID, PROMPT)
        assert (later.blocks, later.wanted(written)) == (0, ())
        write_sparse(later, missing, expected_part_rows(HYBRID, PROMPT, missing))
        later.commit()
        assert verified_blocks(store, HYBRID, PROMPT) == BLOCKS

    def test_one_block_missing_in_a_window_shortens_the_match(self, store: KvStore) -> None:
        stage = store.stage(HYBRID, PROMPT)
        stage.write_from(expected_rows(HYBRID, PROMPT))
        write_sparse(stage, STATE_PART, expected_part_rows(HYBRID, PROMPT, STATE_PART))
        rows = expected_part_rows(HYBRID, PROMPT, WINDOW_PART)
        assert stage.wanted(WINDOW_PART) == (range(BLOCKS - 4, BLOCKS),)
        assert stage.write_from(rows[:-1], from_block=0, part=WINDOW_PART) == 3
        stage.commit()
        assert verified_blocks(store, HYBRID, PROMPT) == BLOCKS - 1

    def test_rows_of_blocks_that_keep_no_part_are_skipped(self, store: KvStore) -> None:
        with store.stage(HYBRID, PROMPT) as stage:
            assert stage.wanted(0) == (range(BLOCKS),)
            stage.write_from(expected_rows(HYBRID, PROMPT))
            assert stage.write_from(expected_part_rows(HYBRID, PROMPT, STATE_PART), from_block=0, part=STATE_PART) == 2
            rows = expected_part_rows(HYBRID, PROMPT, WINDOW_PART)
            assert stage.write_from(rows, from_block=0, part=WINDOW_PART) == 4
        assert verified_blocks(store, HYBRID, PROMPT) == BLOCKS

    def test_sparse_parts_are_invisible_until_the_commit_and_gone_with_an_abort(self, store: KvStore) -> None:
        with store.stage(HYBRID, PROMPT) as stage:
            stage.write_from(expected_rows(HYBRID, PROMPT))
        pending = store.stage(HYBRID, PROMPT)
        for part in sparse_parts(HYBRID):
            write_sparse(pending, part, expected_part_rows(HYBRID, PROMPT, part))
        assert store.match(HYBRID, PROMPT).blocks == 0
        pending.abort()
        assert store.match(HYBRID, PROMPT).blocks == 0
        assert store.stats().tiers["host"].used_bytes == BLOCKS * LAYOUT.block_bytes

    def test_sparse_parts_below_an_aborted_stage_go_with_their_blocks(self, store: KvStore) -> None:
        longer = [*PROMPT, *range(8)]
        first = store.stage(HYBRID, PROMPT)
        store_prompt(store, HYBRID, longer)
        assert store.stats().sparse_blocks > 0
        first.abort()
        assert (store.stats().sparse_blocks, store.stats().tiers["host"].used_bytes) == (0, 0)
        store_prompt(store, HYBRID, list(range(500, 548)))  # takes the places that came free
        assert store.match(HYBRID, longer).blocks == 0
        store_prompt(store, HYBRID, longer)
        assert verified_blocks(store, HYBRID, longer) == BLOCKS + 2

    def test_sparse_parts_below_a_stage_are_found_when_it_commits(self, store: KvStore) -> None:
        longer = [*PROMPT, *range(8)]
        first = store.stage(HYBRID, PROMPT)
        store_prompt(store, HYBRID, longer)
        first.write_from(expected_rows(HYBRID, PROMPT))
        assert store.match(HYBRID, longer).blocks == 0
        first.commit()
        assert store.match(HYBRID, longer).blocks == 0  # the window reaches back into blocks of the first stage
        store_prompt(store, HYBRID, longer)
        assert verified_blocks(store, HYBRID, longer) == BLOCKS + 2

    def test_a_sparse_part_is_leased_where_the_match_needs_it(self, store: KvStore) -> None:
        store_prompt(store, HYBRID, PROMPT)
        with store.lease(store.match(HYBRID, PROMPT)) as lease:
            row = bytearray(HYBRID_LAYOUT.part_bytes(STATE_PART))
            assert lease.load_into(row, from_block=BLOCKS - 1, part=STATE_PART).blocks == 1
            assert row == expected_part_rows(HYBRID, PROMPT, STATE_PART)[-1].tobytes()
            with pytest.raises(InvalidArgumentError, match="from_block is 3"):
                lease.load_into(row, from_block=3, part=STATE_PART)
            with pytest.raises(InvalidArgumentError, match=r"part is 3, expected 0\.\.2"):
                lease.load_into(row, part=3)

    @pytest.mark.parametrize("turn_ends", [[-1], [41], ["x"]])
    def test_turns_that_end_outside_of_the_prompt_are_refused(self, store: KvStore, turn_ends: list[int]) -> None:
        with pytest.raises(InvalidArgumentError, match="a turn ends at"):
            store.stage(HYBRID, PROMPT, turn_ends=turn_ends)
        assert store.stats().stages == 0

    @pytest.mark.parametrize("disk_bytes", [0, 16 * MIB])
    def test_churn_of_hybrid_prompts_keeps_every_answer_right(self, open_store: OpenStore, disk_bytes: int) -> None:
        wide = dataclasses.replace(WINDOW, head_dim=32), dataclasses.replace(STATE, state_bytes=8192)
        namespace = dataclasses.replace(BASE, layout=dataclasses.replace(LAYOUT, head_dim=64, groups=wide))
        with open_store(MIB, disk_bytes) as store:
            prompts = [[*PROMPT[:16], *range(start, start + 40)] for start in range(0, 40 * 20, 40)]
            for prompt in prompts:
                assert store_prompt(store, namespace, prompt, turn_ends=[16]).refused_blocks == 0
                assert store.match(namespace, prompt).blocks == 14
            found = [store.match(namespace, prompt).blocks for prompt in prompts]
            assert [verified_blocks(store, namespace, prompt) for prompt in prompts[::4]] == found[::4]
            assert store.stats().evicted_blocks["sparse_host"] > 0
            assert set(found) <= {0, 4, 14}
            if disk_bytes:
                assert found == [14] * len(prompts)
            assert store.verify().problems == ()

    def test_clearing_and_evicting_take_sparse_parts_along(self, store: KvStore) -> None:
        store_prompt(store, HYBRID, PROMPT, turn_ends=[20])
        store.flush()
        store.evict(HYBRID, PROMPT, from_block=5)
        assert verified_blocks(store, HYBRID, PROMPT) == 5
        store.clear(HYBRID)
        assert (store.stats().sparse_blocks, store.stats().tiers["host"].used_bytes) == (0, 0)
        store_prompt(store, HYBRID, PROMPT)
        assert verified_blocks(store, HYBRID, PROMPT) == BLOCKS

    def test_part_sets_of_one_layout_store_apart(self, store: KvStore) -> None:
        layout = dataclasses.replace(HYBRID_LAYOUT, tensor_parallel=2)
        halves = [dataclasses.replace(BASE, layout=dataclasses.replace(layout, ranks=(rank,))) for rank in (0, 1)]
        assert np.unique([half.layout.block_bytes for half in halves]).tolist() == [LAYOUT.block_bytes // 2]
        store_prompt(store, halves[0], PROMPT)
        assert [verified_blocks(store, half, PROMPT) for half in halves] == [BLOCKS, 0]
        store_prompt(store, halves[1], PROMPT[:20])
        assert [verified_blocks(store, half, PROMPT) for half in halves] == [BLOCKS, 5]

    # -- ranks ---------------------------------------------------------------------------------------------------

    def test_a_block_commits_when_the_last_rank_does(self, store: KvStore) -> None:
        first = store.stage(RANKED, PROMPT, rank=0)
        write_rank(first, 0)
        assert first.commit().blocks == 0
        assert store.match(RANKED, PROMPT).blocks == 0
        assert store.stats().stages == 1
        second = store.stage(RANKED, PROMPT, rank=1)
        assert (second.from_block, second.blocks) == (0, BLOCKS)
        write_rank(second, 1)
        result = second.commit()
        assert (result.blocks, result.present_blocks, result.refused_blocks) == (BLOCKS, 0, 0)
        assert verified_blocks(store, RANKED, PROMPT) == BLOCKS
        assert store.stats().stages == 0

    def test_ranks_add_to_what_is_stored_and_find_nothing_to_do_twice(self, store: KvStore) -> None:
        store_prompt(store, RANKED, PROMPT[:20])
        for _ in range(2):
            for rank in (1, 0):
                with store.stage(RANKED, PROMPT, rank=rank) as stage:
                    write_rank(stage, rank)
        assert verified_blocks(store, RANKED, PROMPT) == BLOCKS
        stats = store.stats()
        assert (stats.stages, stats.stored_blocks) == (0, BLOCKS)

    def test_prompts_of_ranks_may_be_under_way_side_by_side(self, store: KvStore) -> None:
        prompts = [PROMPT, [*PROMPT, *range(8)], list(range(40))]
        waiting = [store.stage(RANKED, prompt, rank=0) for prompt in prompts]
        for stage, prompt in zip(waiting, prompts, strict=True):
            write_rank(stage, 0, prompt)
            stage.commit()
        for prompt in reversed(prompts):
            with store.stage(RANKED, prompt, rank=1) as stage:
                write_rank(stage, 1, prompt)
        assert [verified_blocks(store, RANKED, prompt) for prompt in prompts] == [10, 12, 10]

    def test_a_rank_that_aborts_takes_the_stage_with_it(self, store: KvStore) -> None:
        first, second = (store.stage(RANKED, PROMPT, rank=rank) for rank in (0, 1))
        write_rank(first, 0)
        first.commit()
        second.abort()
        second.abort()
        assert store.match(RANKED, PROMPT).blocks == 0
        assert (store.stats().stages, store.stats().tiers["host"].used_bytes) == (0, 0)
        for rank in (0, 1):
            with store.stage(RANKED, PROMPT, rank=rank) as stage:
                write_rank(stage, rank)
        assert verified_blocks(store, RANKED, PROMPT) == BLOCKS

    def test_the_parts_of_an_aborted_stage_are_refused_from_all_ranks(self, store: KvStore) -> None:
        first, second = (store.stage(RANKED, PROMPT, rank=rank) for rank in (0, 1))
        first.abort()
        with pytest.raises(ClosedError):
            second.write_from(expected_part_rows(RANKED, PROMPT, 1), part=1)
        with pytest.raises(ClosedError):
            second.commit()

    def test_a_rank_writes_its_own_parts_alone(self, store: KvStore) -> None:
        stage = store.stage(RANKED, PROMPT, rank=1)
        with pytest.raises(InvalidArgumentError, match="part is 0, expected one that rank 1 writes: 1, 3"):
            stage.write_from(expected_part_rows(RANKED, PROMPT, 0), part=0)
        with pytest.raises(InvalidArgumentError, match="part is None"):
            stage.write_from(expected_rows(RANKED, PROMPT))
        stage.abort()

    @pytest.mark.parametrize("rank", [-1, 2, True, "first"])
    def test_a_rank_that_writes_nothing_is_refused(self, store: KvStore, rank: int) -> None:
        with pytest.raises(InvalidArgumentError, match="rank is"):
            store.stage(RANKED, PROMPT, rank=rank)
        assert store.stats().stages == 0

    def test_replicated_heads_have_one_writer_each_and_the_others_nothing_to_write(self, store: KvStore) -> None:
        replicated = dataclasses.replace(BASE, layout=dataclasses.replace(LAYOUT, kv_heads=2, tensor_parallel=4))
        assert replicated.layout.writers == (0, 2)
        stages = [store.stage(replicated, PROMPT, rank=rank) for rank in (2, 0)]
        with pytest.raises(InvalidArgumentError, match="rank is 1, expected one that writes: 0, 2"):
            store.stage(replicated, PROMPT, rank=1)
        for stage, part in zip(stages, (1, 0), strict=True):
            stage.write_from(expected_part_rows(replicated, PROMPT, part), part=part)
        assert [stage.commit().blocks for stage in stages] == [0, BLOCKS]
        assert verified_blocks(store, replicated, PROMPT) == BLOCKS

    def test_each_part_set_commits_and_matches_by_itself(self, store: KvStore) -> None:
        """Two nodes with two ranks each; who asks both takes the shorter answer."""
        whole = dataclasses.replace(LAYOUT, tensor_parallel=2, pipeline_parallel=2, groups=(STATE,))
        nodes = [
            dataclasses.replace(BASE, layout=dataclasses.replace(whole, ranks=ranks)) for ranks in ((0, 1), (2, 3))
        ]
        for node, blocks in zip(nodes, (BLOCKS, 4), strict=True):
            prompt = PROMPT[: 4 * blocks]
            for rank in node.layout.writers:
                with store.stage(node, prompt, rank=rank) as stage:
                    for part, found in enumerate(node.layout.parts):
                        if found.writer == rank:
                            write_sparse(stage, part, expected_part_rows(node, prompt, part))
        assert [store.match(node, PROMPT).blocks for node in nodes] == [BLOCKS, 4]
        assert [verified_blocks(store, node, PROMPT) for node in nodes] == [BLOCKS, 4]
        assert store.match(dataclasses.replace(BASE, layout=whole), PROMPT).blocks == 0
        assert sum(len(node.layout.parts) for node in nodes) == len(whole.parts)

    def test_a_single_writer_needs_no_others(self, store: KvStore) -> None:
        layout = dataclasses.replace(LAYOUT, kv_heads=1, head_dim=16, kv_form="latent", tensor_parallel=4)
        latent = dataclasses.replace(BASE, layout=layout)
        with store.stage(latent, PROMPT, rank=0) as stage:
            stage.write_from(expected_rows(latent, PROMPT))
        assert verified_blocks(store, latent, PROMPT) == BLOCKS


def write_rank(stage: Stage, rank: int, prompt: Sequence[int] = PROMPT) -> None:
    """Write all that a rank has of a prompt."""
    for part, found in enumerate(RANKED_LAYOUT.parts):
        if found.writer == rank:
            write_sparse(stage, part, expected_part_rows(RANKED, prompt, part))
