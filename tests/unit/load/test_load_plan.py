from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import ConfigError
from kvstore.load.plan import LoadPlan, Operation, parse_mix
from kvstore.load.worker import expected_tallies, prompt_of, tallies_of


def test_a_mix_is_read_as_people_write_it():
    assert ((Operation.MATCH, 3), (Operation.STORE, 0)) == parse_mix("match=3, store=0")


@pytest.mark.parametrize("text", ["", "match", "match=-1", "fetch=1", "match=1;load=1"])
def test_a_mix_that_is_none_is_refused(text: str):
    with pytest.raises(ConfigError, match="match=8"):
        parse_mix(text)


@pytest.mark.parametrize(
    "values",
    [
        {"clients": 0},
        {"processes": 5},
        {"seconds": 0},
        {"prompts": 0},
        {"prompt_tokens": 15},
        {"block_bytes": 100},
        {"mix": ((Operation.LOAD, 0),)},
    ],
)
def test_a_plan_that_cannot_be_is_refused_by_name(values: dict[str, Any]):
    with pytest.raises(ConfigError, match=next(iter(values))):
        LoadPlan("127.0.0.1:1", **values)


def test_a_block_has_the_bytes_that_were_asked_for():
    plan = LoadPlan("127.0.0.1:1", block_bytes=64 * 1024, block_tokens=128)
    assert 64 * 1024 == plan.namespace.layout.block_bytes


@given(st.integers(0, 2**48), st.integers(0, 2**48))
def test_prompts_and_what_blocks_hold_differ_from_the_first_block_on(one: int, other: int):
    plan = LoadPlan("127.0.0.1:1", prompt_tokens=64)
    if one != other:
        assert prompt_of(plan, one)[:16].tolist() != prompt_of(plan, other)[:16].tolist()
        assert (expected_tallies(one, 4) != expected_tallies(other, 4)).any()


def test_a_block_whose_ends_differ_has_no_right_tally():
    rows = np.zeros((2, 64), dtype=np.uint8)
    rows[1, -1] = 1
    assert [0, 2**64 - 1] == tallies_of(rows).tolist()
