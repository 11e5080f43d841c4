"""Sequence states under quotas, rules of disk admission, and limits of leases and stages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.errors import NoSpaceError
from kvstore.store import Quota, StoreSettings, open_store
from kvstore.testing.blocks import store_prompt
from kvstore.testing.conformance import LAYOUT, PROMPT
from kvstore.testing.states import PIECE_BYTES, STATE_LAYOUT, loaded_state, store_state
from kvstore.types import Namespace, Tier

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20
SIZE = 300_000
STATES = Namespace(model="m", revision="r", layout=STATE_LAYOUT)
OTHERS = Namespace(model="o", revision="r", layout=STATE_LAYOUT)
BLOCKS = Namespace(model="b", revision="r", layout=LAYOUT)
PATHS = [[number, *PROMPT] for number in range(40)]


def found(store, namespace: Namespace, paths: list[list[int]]) -> list[list[int]]:
    return [path for path in paths if store.match(namespace, path, touch=False).tokens == len(path)]


def test_states_keep_to_the_quota_of_their_namespace():
    settings = StoreSettings(quotas=(Quota(model="m", host_max=MIB),))
    with open_store(None, host_bytes=16 * MIB, settings=settings) as store:
        for path in PATHS:
            assert store_state(store, STATES, path, SIZE)
            assert store_state(store, OTHERS, path, SIZE)
        assert store._index.space(STATES).host.reserved_bytes <= MIB
        assert PATHS[-3:] == found(store, STATES, PATHS)
        assert 30 < len(found(store, OTHERS, PATHS))
        assert not store_state(store, STATES, [7, 7], MIB + 1)
        assert 1 == store.stats().rejected_blocks["quota"] // (MIB // PIECE_BYTES)


@pytest.mark.parametrize("kind", ["states", "blocks"])
def test_others_take_nothing_of_what_a_quota_ensures(kind: str):
    settings = StoreSettings(quotas=(Quota(model="m", host_min=4 * MIB),))
    with open_store(None, host_bytes=16 * MIB, settings=settings) as store:
        for path in PATHS[:10]:
            assert store_state(store, STATES, path, SIZE)
        for number in range(100):
            if kind == "states":
                store_state(store, OTHERS, [number, *PROMPT], SIZE)
            else:
                store_prompt(store, BLOCKS, list(range(1000 * number, 1000 * number + 800)))
        assert PATHS[:10] == found(store, STATES, PATHS)


def test_two_namespaces_stay_beside_each_other_in_a_small_host_memory():
    with open_store(None, host_bytes=4 * MIB) as store:
        for path in PATHS[:5]:
            assert store_state(store, STATES, path, SIZE)
            assert store_state(store, OTHERS, path, SIZE)
        assert (PATHS[:5], PATHS[:5]) == (found(store, STATES, PATHS), found(store, OTHERS, PATHS))
        assert {} == store.stats().evicted_blocks


def test_what_is_written_through_is_on_disk_before_it_leaves_host_memory(tmp_path: Path):
    settings = StoreSettings(disk_admission="write_through")
    with open_store(tmp_path, host_bytes=16 * MIB, disk_bytes=64 * MIB, settings=settings) as store:
        for path in PATHS[:5]:
            assert store_state(store, STATES, path, SIZE)
        while store.stats().moves:
            pass
        assert 0 < store.stats().tiers["disk"].blocks
        for state in store._index.space(STATES).states.all():
            assert {Tier.HOST, Tier.DISK} == state.slots.keys()


def test_only_what_was_used_again_goes_to_a_disk_that_takes_reused_blocks(tmp_path: Path):
    settings = StoreSettings(disk_admission="reuse")
    with open_store(tmp_path, host_bytes=2 * MIB, disk_bytes=64 * MIB, settings=settings) as store:
        for path in PATHS[:3]:
            assert store_state(store, STATES, path, SIZE)
        store.match(STATES, PATHS[1])
        for path in PATHS[3:]:
            assert store_state(store, STATES, path, SIZE)
        assert [PATHS[1]] == found(store, STATES, PATHS[:3])
        assert (len(PATHS[1]), SIZE) == (
            loaded_state(store, STATES, PATHS[1])[0],
            loaded_state(store, STATES, PATHS[1])[2].size,
        )
        assert 0 < store.stats().rejected_blocks["not_admitted"]


def test_leases_stages_and_pins_of_states_count_with_all_others():
    settings = StoreSettings(leases_max=1, stages_max=1, pinned_ratio_max=0.1)
    with open_store(None, host_bytes=4 * MIB, settings=settings) as store:
        stage = store.stage_state(STATES, PATHS[0], state_bytes=SIZE)
        with pytest.raises(NoSpaceError, match="stages_max"):
            store.stage(BLOCKS, PROMPT)
        stage.abort()
        assert store_state(store, STATES, PATHS[0], SIZE)
        with store.lease_state(store.match(STATES, PATHS[0])), pytest.raises(NoSpaceError, match="leases_max"):
            store.lease(store.match(BLOCKS, PROMPT))
        store.pin(STATES, PATHS[0])
        assert store_state(store, STATES, PATHS[1], SIZE)
        with pytest.raises(NoSpaceError, match="pinned_ratio_max"):
            store.pin(STATES, PATHS[1])
        assert (0, 0, 1) == (store.stats().leases, store.stats().stages, store.stats().pins)


def test_nothing_leaves_for_a_state_that_cannot_fit_beside_what_is_held():
    with open_store(None, host_bytes=4 * MIB) as store:
        assert store_state(store, STATES, PATHS[0], 2 * MIB - PIECE_BYTES)
        store.pin(STATES, PATHS[0])
        for path in PATHS[1:5]:
            assert store_state(store, STATES, path, SIZE)
        assert not store_state(store, OTHERS, PATHS[5], 2 * MIB + 2 * PIECE_BYTES)
        assert PATHS[:5] == found(store, STATES, PATHS)
        assert store_state(store, STATES, PATHS[6], 2 * MIB - PIECE_BYTES)


def test_a_hint_about_no_tokens_says_nothing_of_any_state():
    with open_store(None, host_bytes=4 * MIB) as store:
        assert store_state(store, STATES, PATHS[0], SIZE)
        assert 0 == store.end_session(STATES, [])
        assert [1] == [state.uses for state in store._index.space(STATES).states.all()]
