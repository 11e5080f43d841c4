from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import UnavailableError
from kvstore.testing.patience import ANSWER_SECONDS
from kvstore.transport.breaker import FAILURES_MAX, Breaker, BreakerState, GuardedServer, jittered

STEPS = st.lists(st.sampled_from(["success", "failure", "begin", "well", "ill"]), max_size=40)


def step(state: str, failures: int, event: str) -> tuple[str, int]:
    """The table of states in the module's head, as a function."""
    match state, event:
        case "closed", "success":
            return "closed", 0
        case "closed", "failure":
            return ("open" if failures + 1 == FAILURES_MAX else "closed"), failures + 1
        case (("open" | "half-open"), "failure"):
            return state, failures + 1
        case "open", "begin":
            return "half-open", failures
        case "half-open", "well":
            return "closed", 0
        case "half-open", "ill":
            return "open", failures
    return state, failures


@given(STEPS)
def test_a_breaker_goes_through_the_states_of_its_model(events: list[str]):
    breaker, state, failures, openings = Breaker("server"), "closed", 0, 0
    for event in events:
        if event in ("well", "ill") and state != "half-open":
            continue  # a probe ends only after it has begun
        was = state
        state, failures = step(state, failures, event)
        openings += was == "closed" and state == "open"
        match event:
            case "success":
                breaker.record_success()
            case "failure":
                assert (was == "closed" and state == "open") == breaker.record_failure("cause")
            case "begin":
                breaker.begin_probe()
            case _:
                breaker.end_probe(None if event == "well" else "cause")
        status = breaker.status
        assert (state, failures, openings) == (status.state.value, status.failures, status.openings)
        assert (state == "closed") == breaker.closed


def test_an_open_breaker_says_whom_it_spares_and_why():
    breaker = Breaker("unix:///s", failures_max=1)
    breaker.check()
    breaker.record_failure("no answer")
    with pytest.raises(UnavailableError, match="not asking unix:///s, which failed 1 times: no answer"):
        breaker.check()


@given(st.floats(0.001, 100))
def test_jitter_stays_between_half_and_one_and_a_half(seconds: float):
    assert seconds / 2 <= jittered(seconds) <= seconds * 3 / 2


def test_probes_go_on_until_one_is_answered_and_the_thread_ends(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvstore.transport.breaker.BACKOFF_SECONDS_MIN", 0.001)
    failures = iter([UnavailableError("one"), UnavailableError("two")])
    well = threading.Event()

    def probe() -> bool:
        for failure in failures:
            raise failure
        return True

    def changed(status: object) -> None:
        if guard.breaker.closed:
            well.set()

    guard = GuardedServer("server", probe, changed)
    for _ in range(FAILURES_MAX):
        guard.record_failure(UnavailableError("no"))
    assert well.wait(ANSWER_SECONDS)
    prober = guard._prober
    assert prober is not None
    prober.join()
    assert BreakerState.CLOSED is guard.breaker.status.state
    guard.close()


def test_a_closed_guard_begins_no_probe():
    guard = GuardedServer("server", lambda: True)
    guard.close()
    for _ in range(FAILURES_MAX):
        guard.record_failure(UnavailableError("no"))
    assert guard._prober is None
