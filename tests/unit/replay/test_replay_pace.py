from __future__ import annotations

from kvstore.replay.pace import Pacer
from kvstore.testing.manual_clock import ManualClock


def test_requests_keep_their_distance_divided_by_the_speed():
    clock = ManualClock()
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.advance(seconds)

    pacer = Pacer(10.0, clock=clock, sleep=sleep)
    for moment in (100.0, 110.0, 110.0, 105.0, 130.0):
        pacer.wait_for(moment)

    assert [1.0, 2.0] == slept


def test_a_late_replay_does_not_wait():
    clock = ManualClock()
    slept: list[float] = []
    pacer = Pacer(1.0, clock=clock, sleep=slept.append)
    pacer.wait_for(0.0)
    clock.advance(5.0)

    pacer.wait_for(4.0)

    assert [] == slept
