"""The model of prefill: what it says, and that reports teach it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.cluster.prefill import PrefillFit, PrefillModel
from kvstore.errors import InvalidArgumentError

MODEL = PrefillModel(5e-5, 1.3e-9)


@pytest.mark.parametrize(
    ("expected", "cached", "new"),
    [(0.0, 0, 0), (0.0, 1000, 0), (5.0 + 5.0, 0, 10), (5.0 + 15.0, 10, 10)],
)
def test_tokens_cost_by_themselves_and_by_those_before_them(expected: float, cached: int, new: int) -> None:
    assert expected == PrefillModel(0.5, 0.1).seconds(cached, new)


@given(st.integers(0, 10**6), st.integers(0, 10**5), st.integers(0, 10**5))
def test_computing_in_two_steps_takes_as_long_as_in_one(cached: int, first: int, second: int) -> None:
    in_steps = MODEL.seconds(cached, first) + MODEL.seconds(cached + first, second)
    assert math.isclose(MODEL.seconds(cached, first + second), in_steps, rel_tol=1e-9, abs_tol=1e-12)


@given(
    st.floats(1e-6, 1e-2),
    st.floats(1e-12, 1e-6),
    st.lists(st.tuples(st.integers(0, 50_000), st.integers(1, 50_000)), min_size=8, max_size=40, unique=True),
)
def test_reports_teach_it_what_they_say(a: float, b: float, lengths: list[tuple[int, int]]) -> None:
    true = PrefillModel(a, b)
    fit = PrefillFit(MODEL)
    for cached, new in lengths:
        fit.report(cached, new, true.seconds(cached, new))
    for cached, new in lengths:
        assert math.isclose(true.seconds(cached, new), fit.model.seconds(cached, new), rel_tol=0.05)


def test_reports_that_are_all_alike_still_teach_it_how_long_those_take():
    fit = PrefillFit(MODEL)
    for _ in range(20):
        fit.report(0, 1000, 3.0)
    assert math.isclose(3.0, fit.model.seconds(0, 1000), rel_tol=1e-6)


def test_a_few_reports_change_nothing():
    fit = PrefillFit(MODEL)
    for _ in range(7):
        fit.report(0, 1000, 3.0)
    assert MODEL == fit.model


def test_a_faster_engine_is_believed_soon():
    fit = PrefillFit(MODEL)
    for seconds in [10.0] * 200 + [1.0] * 200:
        fit.report(0, 1000, seconds)
    assert fit.model.seconds(0, 1000) < 1.1


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 10**6), st.floats(1e-6, 1e6)), min_size=8))
def test_no_reports_make_it_promise_negative_times(reports: list[tuple[int, int, float]]) -> None:
    fit = PrefillFit(MODEL)
    for report in reports:
        fit.report(*report)
    assert fit.model.seconds_per_token >= 0
    assert fit.model.seconds_per_pair >= 0


@pytest.mark.parametrize("report", [(-1, 10, 1.0), (0, 0, 1.0), (0, 10, 0.0), (0, 10, math.inf), (0, 10, math.nan)])
def test_reports_that_cannot_be_are_refused_by_name(report: tuple[int, int, float]) -> None:
    fit = PrefillFit(MODEL)
    with pytest.raises(InvalidArgumentError, match="expected at least 1, 0, above 0"):
        fit.report(*report)


@pytest.mark.parametrize("name", ["seconds_per_token", "seconds_per_pair"])
@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
def test_a_model_of_impossible_times_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(InvalidArgumentError, match=name):
        PrefillModel(**{name: value})
