from __future__ import annotations

import pytest

from kvstore.store.turnover import Turnover


def test_nothing_is_known_before_something_was_written():
    turnover = Turnover(1000, 0.0)
    assert turnover.seconds(50.0) is None
    turnover.note(19, 60.0)
    assert turnover.seconds(60.0) is None


def test_it_is_the_time_in_which_as_much_is_written_as_there_is_room():
    turnover = Turnover(1000, 0.0)
    for second in range(1, 101):
        turnover.note(2, float(second))
    assert 500 == pytest.approx(turnover.seconds(100.0), rel=0.02)


def test_the_last_quarter_counts_and_a_lull_makes_it_longer():
    turnover = Turnover(1000, 0.0)
    turnover.note(250, 10.0)
    assert 40 == turnover.seconds(10.0)
    turnover.note(250, 110.0)
    assert 400 == turnover.seconds(110.0)
    turnover.note(10, 111.0)
    assert 400 == turnover.seconds(150.0)
    assert 4000 == turnover.seconds(1110.0)
