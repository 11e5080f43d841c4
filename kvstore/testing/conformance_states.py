"""Conformance of sequence states: one blob for a prompt, which serves whatever shares its beginning."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvstore.errors import ClosedError, InvalidArgumentError, InvalidBufferError
from kvstore.testing.blocks import store_prompt, verified_blocks
from kvstore.testing.conformance_cases import BASE, MIB, OTHER_ROOTS, PROMPT
from kvstore.testing.states import (
    END_STATES,
    PIECE_BYTES,
    STATE_BYTES,
    STATES,
    blob_of,
    loaded_state,
    store_state,
)
from kvstore.types import Tier

if TYPE_CHECKING:
    from kvstore.api import KvStore
    from kvstore.testing.conformance_cases import OpenStore
    from kvstore.types import Namespace

FAR = [*PROMPT, *range(1000, 1040)]
SIZES = {"a byte": 1, "a piece": PIECE_BYTES, "pieces": 3 * PIECE_BYTES, "pieces and a bit": STATE_BYTES}


def finds(store: KvStore, namespace: Namespace, prompt: list[int], path: list[int], size: int = STATE_BYTES) -> int:
    """Tokens of a prompt that the state of `path` serves; its bytes are right."""
    tokens, state_tokens, blob = loaded_state(store, namespace, prompt)
    assert (len(path), size) == (state_tokens, blob.size)
    assert (blob == blob_of(namespace, path, size)).all()
    return tokens


class StateConformance:
    """A match is what the best state serves; a state is found whole and right, or not at all."""

    @pytest.mark.parametrize("size", SIZES)
    def test_a_state_of_any_size_comes_back_as_it_was(self, store: KvStore, size: str) -> None:
        assert store_state(store, STATES, PROMPT, SIZES[size])
        assert store.match(STATES, FAR).tokens == len(PROMPT)
        assert finds(store, STATES, FAR, PROMPT, SIZES[size]) == len(PROMPT)
        assert store.stats().states == 1

    @pytest.mark.parametrize("shared", [1, 7, 39])
    def test_a_state_that_can_be_cut_serves_whatever_shares_its_beginning(self, store: KvStore, shared: int) -> None:
        store_state(store, STATES, PROMPT)
        assert finds(store, STATES, [*PROMPT[:shared], 7, 8], PROMPT) == shared
        assert finds(store, STATES, PROMPT[:shared], PROMPT) == shared
        assert loaded_state(store, STATES, [1, *PROMPT])[0] == 0

    def test_a_state_that_cannot_be_cut_serves_what_goes_on_from_its_end(self, store: KvStore) -> None:
        assert store_state(store, END_STATES, PROMPT)
        assert store_state(store, END_STATES, PROMPT[:10])
        assert not store_state(store, END_STATES, PROMPT[:10])
        assert finds(store, END_STATES, FAR, PROMPT) == len(PROMPT)
        assert finds(store, END_STATES, [*PROMPT[:39], 7], PROMPT[:10]) == 10
        assert store.match(END_STATES, PROMPT[:9]).tokens == 0

    def test_the_state_that_shares_most_is_chosen(self, store: KvStore) -> None:
        paths = [[*PROMPT[:20], 1], [*PROMPT[:30], 2], [*PROMPT[:30], 3], [9, *PROMPT]]
        for path in paths:
            assert store_state(store, STATES, path)
        assert finds(store, STATES, [*PROMPT[:25], 5], paths[1]) == 25
        assert finds(store, STATES, [*PROMPT[:20], 1, 1], paths[0]) == 21
        assert finds(store, STATES, [9, 9], paths[3]) == 1

    def test_a_longer_state_takes_the_place_of_those_that_it_serves(self, store: KvStore) -> None:
        store_state(store, STATES, PROMPT)
        assert store_state(store, STATES, FAR, 1)
        assert store.stats().states == 1
        assert finds(store, STATES, PROMPT, FAR, 1) == len(PROMPT)

    def test_a_state_with_less_is_not_wanted_and_hides_nothing(self, store: KvStore) -> None:
        store_state(store, STATES, FAR)
        assert not store_state(store, STATES, PROMPT)
        assert not store_state(store, STATES, FAR, 1)
        with store.stage_state(STATES, PROMPT, state_bytes=1) as stage:
            assert (stage.wanted, stage.write_from(b"x")) == (False, 0)
            assert stage.commit().present_blocks == 1
        assert finds(store, STATES, FAR, FAR) == len(FAR)

    def test_roots_and_namespaces_share_no_states(self, store: KvStore) -> None:
        store_state(store, STATES, PROMPT)
        for root in OTHER_ROOTS.values():
            assert store.match(STATES, PROMPT, root=root).tokens == 0
        assert store.match(END_STATES, PROMPT).tokens == 0
        assert store.match(BASE, PROMPT).tokens == 0

    def test_what_is_staged_is_invisible_until_its_commit(self, store: KvStore) -> None:
        stage = store.stage_state(STATES, PROMPT, state_bytes=STATE_BYTES)
        other = store.stage_state(STATES, PROMPT, state_bytes=STATE_BYTES)
        assert (stage.wanted, other.wanted) == (True, False)
        stage.write_from(blob_of(STATES, PROMPT, STATE_BYTES))
        assert store.match(STATES, PROMPT).tokens == 0
        assert stage.commit().blocks == 6
        other.abort()
        assert finds(store, STATES, PROMPT, PROMPT) == len(PROMPT)
        with pytest.raises(ClosedError):
            stage.commit()

    @pytest.mark.parametrize("end", ["abort", "exception", "half written"])
    def test_what_was_not_written_and_committed_is_nowhere(self, store: KvStore, end: str) -> None:
        blob = blob_of(STATES, PROMPT, STATE_BYTES)
        stage = store.stage_state(STATES, PROMPT, state_bytes=STATE_BYTES)
        stage.write_from(blob[:PIECE_BYTES] if end == "half written" else blob)
        if end == "exception":
            with pytest.raises(ZeroDivisionError), stage:
                raise ZeroDivisionError
        elif end == "abort":
            stage.abort()
        else:
            assert stage.commit().refused_blocks == 6
        assert store.match(STATES, PROMPT).tokens == 0
        assert store_state(store, STATES, PROMPT)

    def test_what_was_being_stored_when_its_namespace_was_cleared_is_nowhere(self, store: KvStore) -> None:
        stage = store.stage_state(STATES, PROMPT, state_bytes=STATE_BYTES)
        stage.write_from(blob_of(STATES, PROMPT, STATE_BYTES))
        assert store.clear(STATES) == 0
        result = stage.commit()
        assert (result.blocks, result.refused_blocks) == (0, 6)
        assert store.match(STATES, PROMPT).tokens == 0
        assert store_state(store, STATES, PROMPT)

    def test_a_state_is_written_and_loaded_in_pieces(self, store: KvStore) -> None:
        blob = blob_of(STATES, PROMPT, STATE_BYTES)
        with store.stage_state(STATES, PROMPT, state_bytes=STATE_BYTES) as stage:
            assert stage.write_from(blob[2 * PIECE_BYTES :], from_piece=2) == STATE_BYTES - 2 * PIECE_BYTES
            assert stage.write_from(blob[: 2 * PIECE_BYTES]) == 2 * PIECE_BYTES
        with store.lease_state(store.match(STATES, PROMPT)) as lease:
            part = np.zeros(2 * PIECE_BYTES, dtype=np.uint8)
            assert lease.load_into(part, from_piece=1) == part.size
            assert (part == blob[PIECE_BYTES : 3 * PIECE_BYTES]).all()
            rest = np.zeros(200, dtype=np.uint8)
            assert lease.load_into(rest, from_piece=5) == 123
            assert (rest[:123] == blob[5 * PIECE_BYTES :]).all()
            assert not rest[123:].any()
            assert lease.load_into(rest, from_piece=6) == 0

    def test_arguments_that_cannot_be_are_refused_and_change_nothing(self, store: KvStore) -> None:
        store_state(store, STATES, PROMPT)
        match = store.match(STATES, PROMPT)
        for size in (0, -1, 2**40 + 1, 1.5):
            with pytest.raises(InvalidArgumentError, match="state_bytes is"):
                store.stage_state(STATES, FAR, state_bytes=size)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError, match="no tokens"):
            store.stage_state(STATES, [], state_bytes=1)
        for refused in (
            lambda: store.stage_state(BASE, PROMPT, state_bytes=1),
            lambda: store.lease_state(store.match(BASE, PROMPT)),
            lambda: store.stage(STATES, PROMPT),
            lambda: store.lease(match),
        ):
            with pytest.raises(InvalidArgumentError, match="state"):
                refused()
        with store.lease_state(match) as lease:
            with pytest.raises(InvalidBufferError, match="one piece"):
                lease.load_into(bytearray(100))
            with pytest.raises(InvalidArgumentError, match="from_piece is 7"):
                lease.load_into(bytearray(100), from_piece=7)
        assert finds(store, STATES, PROMPT, PROMPT) == len(PROMPT)

    def test_a_lease_keeps_its_state_whatever_becomes_of_it(self, store: KvStore) -> None:
        store_state(store, STATES, PROMPT)
        blob = np.zeros(STATE_BYTES, dtype=np.uint8)
        with store.lease_state(store.match(STATES, PROMPT)) as lease:
            assert store.evict(STATES, PROMPT) == 0
            assert store.clear(STATES) == 1
            assert store.match(STATES, PROMPT).tokens == 0
            assert store_state(store, STATES, PROMPT)
            assert lease.load_into(blob) == STATE_BYTES
            assert (blob == blob_of(STATES, PROMPT, STATE_BYTES)).all()
        with pytest.raises(ClosedError):
            lease.load_into(blob)

    def test_a_lease_of_nothing_has_no_bytes(self, store: KvStore) -> None:
        store_state(store, STATES, PROMPT)
        match = store.match(STATES, PROMPT)
        assert store.evict(STATES, PROMPT) == 1
        with store.lease_state(match) as lease:
            assert (lease.tokens, lease.state_tokens, lease.state_bytes) == (0, 0, 0)
            assert lease.load_into(bytearray(10)) == 0

    def test_a_pinned_state_stays_until_it_is_cleared(self, store: KvStore) -> None:
        store_state(store, STATES, PROMPT)
        pin = store.pin(STATES, PROMPT[:7])
        assert (pin.blocks, store.evict(STATES, PROMPT)) == (7, 0)
        assert store.unpin(pin.pin_id)
        assert store.evict(STATES, PROMPT, from_block=len(PROMPT)) == 0
        assert store.evict(STATES, [*PROMPT[:5], 1], from_block=4) == 1
        assert store.pin(STATES, PROMPT).blocks == 0

    def test_states_survive_a_flush_on_disk_and_clear_ends_them(self, open_store: OpenStore) -> None:
        with open_store(MIB, 16 * MIB) as store:
            store_state(store, STATES, PROMPT, 200_000)
            store.flush()
            paths = [[number, *PROMPT] for number in range(12)]
            for path in paths:
                assert store_state(store, STATES, path, 200_000)
            assert store.match(STATES, PROMPT).tiers == {Tier.DISK: len(PROMPT)}
            assert loaded_state(store, STATES, PROMPT, tiers={Tier.HOST})[0] == 0
            assert finds(store, STATES, PROMPT, PROMPT, 200_000) == len(PROMPT)
            for path in paths:
                assert finds(store, STATES, path, path, 200_000) == len(path)
            assert store.verify().problems == ()
            assert store.clear(STATES) == 13
            assert dict.fromkeys(("host", "disk"), 0) == {t: s.blocks for t, s in store.stats().tiers.items()}

    def test_a_prefetch_brings_up_a_state_that_lies_on_disk_alone(self, open_store: OpenStore) -> None:
        with open_store(4 * MIB, 64 * MIB) as store:
            paths = [[number, *PROMPT] for number in range(20)]
            for path in paths:
                store_state(store, STATES, path, 300_000)
            assert store.match(STATES, paths[0], touch=False).tiers == {Tier.DISK: len(paths[0])}
            for _ in range(3):  # a state that is used takes the place of one that is not
                store.match(STATES, paths[0])
            with store.prefetch(STATES, paths[0], wait_seconds=None) as prefetch:
                assert (prefetch.done, prefetch.host_blocks) == (True, len(paths[0]))
            assert loaded_state(store, STATES, paths[0], tiers={Tier.HOST})[0] == len(paths[0])

    def test_a_state_for_which_there_is_no_room_is_refused(self, open_store: OpenStore) -> None:
        with open_store(MIB) as store:
            store_state(store, STATES, PROMPT)
            with store.stage_state(STATES, FAR, state_bytes=2 * MIB) as stage:
                assert not stage.wanted
                assert stage.commit().refused_blocks == 512
            assert finds(store, STATES, PROMPT, PROMPT) == len(PROMPT)
            with store.lease_state(store.match(STATES, PROMPT)):
                assert not store_state(store, STATES, [1], MIB - PIECE_BYTES)
            assert store_state(store, STATES, [1], MIB - PIECE_BYTES)
            assert store.stats().states == 1

    def test_blocks_and_states_take_room_from_each_other(self, open_store: OpenStore) -> None:
        with open_store(4 * MIB) as store:
            for number in range(40):
                assert store_state(store, STATES, [number, *PROMPT], 200_000)
            assert store_prompt(store, BASE, PROMPT)
            assert verified_blocks(store, BASE, PROMPT) == 10
            for number in range(40):
                assert store_state(store, STATES, [100 + number, *PROMPT], 200_000)
            assert store.verify().problems == ()

    def test_a_conversation_that_is_over_leaves_first(self, open_store: OpenStore) -> None:
        with open_store(MIB) as store:
            store_state(store, STATES, [1, *PROMPT], 400_000)
            store_state(store, STATES, [2, *PROMPT], 400_000)
            assert store.end_session(STATES, [2, *PROMPT]) == len(PROMPT) + 1
            assert store.end_session(STATES, [3]) == 0
            assert store_state(store, STATES, [4, *PROMPT], 400_000)
            assert store.match(STATES, [1, *PROMPT]).tokens == len(PROMPT) + 1
            assert store.match(STATES, [2, *PROMPT]).tokens == 0

    def test_lookups_and_loads_of_states_count_in_tokens(self, store: KvStore) -> None:
        store_state(store, STATES, PROMPT)
        store.match(STATES, [*PROMPT[:30], 1])
        loaded_state(store, STATES, PROMPT[:30])
        stats = store.stats()
        assert (stats.lookups, stats.lookup_tokens, stats.hit_tokens) == (1, 31, {"host": 30})
        assert (stats.loaded_tokens, stats.stored_blocks) == ({"host": 30}, 6)
        assert stats.tiers["host"].blocks == 6
