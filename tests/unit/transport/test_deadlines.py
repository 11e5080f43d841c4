from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvstore
from kvstore.errors import ConfigError
from kvstore.transport.link import Deadlines, Wait, flat_deadlines

README = (Path(__file__).parents[3] / "transport" / "README.md").read_text()


@pytest.mark.parametrize("wait", Wait)
def test_every_deadline_is_documented_with_its_default(wait: Wait):
    assert f"| `{wait.value}` | {Deadlines().of(wait):g} s |" in README


def test_a_transfer_has_the_time_of_its_bytes_on_top():
    assert "its bytes at 100 MB/s on top" in README
    assert (1.0, 1.0 + 2.5) == (Deadlines().moving(0), Deadlines().moving(250_000_000))


@given(st.floats(0.001, 1000), st.integers(0, 2**40))
def test_another_deadline_for_all_calls_is_the_same_for_each(seconds: float, moved_bytes: int):
    flat = flat_deadlines(seconds)
    assert {seconds} == {flat.of(wait) for wait in Wait} | {flat.moving(moved_bytes)}


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), 1e6])
@pytest.mark.parametrize("wait", Wait)
@pytest.mark.parametrize("connect", [kvstore.connect, kvstore.connect_async])
def test_a_deadline_that_cannot_be_is_refused_by_name(connect, wait: Wait, seconds: float):
    with pytest.raises(ConfigError, match=wait.value):
        connect("127.0.0.1:1", **{wait.value: seconds})
    with pytest.raises(ConfigError):
        kvstore.connect("127.0.0.1:1").within(seconds)
