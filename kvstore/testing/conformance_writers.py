"""Conformance of writers: who wrote a block, and dropping what one of them wrote."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

from kvstore.errors import InvalidArgumentError
from kvstore.testing.blocks import expected_part_rows, expected_rows, store_prompt, verified_blocks
from kvstore.testing.conformance_cases import BASE, BLOCKS, LAYOUT, OTHER_NAMESPACES, PROMPT
from kvstore.testing.conformance_sparse import HYBRID
from kvstore.testing.states import STATES, store_state
from kvstore.writers import UNKNOWN_WRITER, WriterPage, WriterRun

if TYPE_CHECKING:
    from kvstore.api import KvStore

_GOOD = 7
_BAD = 2**64 - 1
_HALF = 20


class WriterConformance:
    """What a writer wrote is told from what others wrote, and goes alone with what lies below it."""

    def test_each_block_is_of_who_stored_it_first(self, store: KvStore) -> None:
        store_prompt(store, BASE, PROMPT[:_HALF], writer=_GOOD)
        store_prompt(store, BASE, PROMPT, writer=_BAD)
        half = _HALF // LAYOUT.block_tokens
        runs = (WriterRun(_GOOD, half), WriterRun(_BAD, BLOCKS - half))
        assert store.writers_of(BASE, [*PROMPT, 1, 2, 3, 4]) == runs
        assert store.writers_of(BASE, [9, *PROMPT]) == ()

    def test_a_block_without_a_given_writer_is_of_who_opened_the_store(self, store: KvStore) -> None:
        store_prompt(store, BASE, PROMPT)
        (run,) = store.writers_of(BASE, PROMPT)
        assert run.blocks == BLOCKS
        assert run.writer != UNKNOWN_WRITER

    def test_evicting_a_writer_drops_its_blocks_with_all_below_and_no_others(self, store: KvStore) -> None:
        other = OTHER_NAMESPACES["model"]
        store_prompt(store, BASE, PROMPT[:_HALF], writer=_GOOD)
        store_prompt(store, BASE, PROMPT[: _HALF + 4], writer=_BAD)
        store_prompt(store, BASE, PROMPT, writer=_GOOD)
        store_prompt(store, other, PROMPT, writer=_GOOD)
        store_prompt(store, other, [9, *PROMPT[1:]], writer=_BAD)
        half = _HALF // LAYOUT.block_tokens
        assert store.evict_writer(_BAD) == WriterPage(BLOCKS - half + BLOCKS, 0)
        assert verified_blocks(store, BASE, PROMPT) == half
        assert verified_blocks(store, other, PROMPT) == BLOCKS
        assert store.match(other, [9, *PROMPT[1:]]).blocks == 0
        assert store.evict_writer(_BAD) == WriterPage(0, 0)
        assert store.stats().evicted_blocks["writer"] == BLOCKS - half + BLOCKS
        assert store.verify().problems == ()

    def test_a_writer_that_is_not_known_has_no_blocks(self, store: KvStore) -> None:
        store_prompt(store, BASE, PROMPT, writer=_GOOD)
        assert store.evict_writer(_BAD) == WriterPage(0, 0)
        assert verified_blocks(store, BASE, PROMPT) == BLOCKS

    def test_evicting_a_writer_takes_leased_and_pinned_blocks_and_readers_finish(self, store: KvStore) -> None:
        store_prompt(store, BASE, PROMPT, writer=_BAD)
        store.pin(BASE, PROMPT)
        with store.lease(store.match(BASE, PROMPT)) as lease:
            assert store.evict_writer(_BAD) == WriterPage(BLOCKS, 0)
            assert store.match(BASE, PROMPT).blocks == 0
            assert lease.blocks == BLOCKS
        store_prompt(store, BASE, PROMPT, writer=_GOOD)
        assert verified_blocks(store, BASE, PROMPT) == BLOCKS
        assert store.writers_of(BASE, PROMPT) == (WriterRun(_GOOD, BLOCKS),)
        assert store.verify().problems == ()

    def test_evicting_a_writer_takes_what_went_to_disk(self, store: KvStore) -> None:
        store_prompt(store, BASE, PROMPT, writer=_BAD)
        store.flush()
        assert store.evict_writer(_BAD) == WriterPage(BLOCKS, 0)
        assert store.match(BASE, PROMPT).blocks == 0

    def test_states_go_with_their_writer(self, store: KvStore) -> None:
        store_state(store, STATES, PROMPT, writer=_BAD)
        assert store.writers_of(STATES, PROMPT) == (WriterRun(_BAD, len(PROMPT)),)
        store.evict_writer(_GOOD)
        assert store.match(STATES, PROMPT).tokens == len(PROMPT)
        assert store.evict_writer(_BAD).blocks > 0
        assert store.match(STATES, PROMPT).tokens == 0

    def test_blocks_at_which_a_writer_stored_sparse_parts_go_with_it(self, store: KvStore) -> None:
        with store.stage(HYBRID, PROMPT, writer=_GOOD) as stage:
            stage.write_from(expected_rows(HYBRID, PROMPT))
        store_prompt(store, HYBRID, PROMPT, writer=_BAD)
        assert store.writers_of(HYBRID, PROMPT) == (WriterRun(_GOOD, BLOCKS),)
        assert verified_blocks(store, HYBRID, PROMPT) == BLOCKS
        assert store.evict_writer(_BAD).blocks > 0
        assert store.match(HYBRID, PROMPT).blocks == 0
        assert store.verify().problems == ()

    @pytest.mark.parametrize("writer", [-1, 2**64, True, "1"])
    def test_what_is_no_writer_is_refused(self, store: KvStore, writer: int) -> None:
        with pytest.raises(InvalidArgumentError, match="writer"):
            store.evict_writer(writer)
        with pytest.raises(InvalidArgumentError, match="writer"):
            store.stage(BASE, PROMPT, writer=writer)
        assert store.match(BASE, PROMPT).blocks == 0

    def test_ranks_that_store_together_count_as_who_opened_the_stage(self, store: KvStore) -> None:
        split = dataclasses.replace(BASE, layout=dataclasses.replace(LAYOUT, tensor_parallel=2))
        stages = [store.stage(split, PROMPT, rank=rank, writer=writer) for rank, writer in enumerate((_BAD, _GOOD))]
        for part, stage in enumerate(stages):
            stage.write_from(expected_part_rows(split, PROMPT, part), part=part)
            stage.commit()
        assert store.writers_of(split, PROMPT) == (WriterRun(_BAD, BLOCKS),)
