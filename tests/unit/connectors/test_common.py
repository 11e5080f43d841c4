"""The engine-neutral parts of connectors: they bound what a store can cost."""

from __future__ import annotations

import logging
import threading

import numpy as np
import pytest

from kvstore.connectors.common import (
    BackgroundStores,
    CircuitBreaker,
    ConnectorCounters,
    Failure,
    GuardedCalls,
    prefetched,
)
from kvstore.errors import NoSpaceError, StorageError, UnavailableError
from kvstore.store import StoreSettings, open_store
from kvstore.testing.blocks import store_prompt
from kvstore.testing.manual_clock import ManualClock
from kvstore.testing.patience import ANSWER_SECONDS
from kvstore.types import PLAIN_ROOT, KvLayout, Namespace, PrefixMatch, Tier, TierRun


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def guard():
    calls = GuardedCalls("test-guard")
    yield calls
    calls.close()


@pytest.fixture
def failures():
    return []


@pytest.fixture
def stores(failures):
    stores = BackgroundStores("test-stores", failures.append, jobs_max=3, queue_bytes_max=100)
    yield stores
    stores.close(5.0)


def test_breaker_opens_after_failures_in_a_row(clock):
    breaker = CircuitBreaker(clock, failures_max=3)
    for _ in range(2):
        breaker.record_failure(NoSpaceError("full"))
    assert breaker.allows_call()
    breaker.record_failure(NoSpaceError("full"))
    assert not breaker.allows_call()
    assert breaker.openings == 1


def test_success_forgets_earlier_failures(clock):
    breaker = CircuitBreaker(clock, failures_max=2)
    for _ in range(5):
        breaker.record_failure(NoSpaceError("full"))
        breaker.record_success()
    assert breaker.allows_call()
    assert breaker.openings == 0


def test_one_unavailable_error_opens_the_breaker(clock):
    breaker = CircuitBreaker(clock)
    breaker.record_failure(UnavailableError("gone"))
    assert not breaker.allows_call()


def test_open_breaker_lets_one_trial_through_after_the_backoff(clock):
    breaker = CircuitBreaker(clock, backoff_seconds=1.0)
    breaker.record_failure(UnavailableError("gone"))
    clock.advance(1.0)
    assert breaker.allows_call()
    assert not breaker.allows_call()
    breaker.record_success()
    assert breaker.allows_call()


def test_a_trial_that_never_reports_is_followed_by_another(clock):
    breaker = CircuitBreaker(clock, backoff_seconds=1.0)
    breaker.record_failure(UnavailableError("gone"))
    clock.advance(1.0)
    assert breaker.allows_call()
    clock.advance(1.0)
    assert breaker.allows_call()


def test_backoff_doubles_up_to_its_limit(clock):
    breaker = CircuitBreaker(clock, backoff_seconds=1.0, backoff_seconds_max=4.0)
    waits = []
    breaker.record_failure(UnavailableError("gone"))
    for _ in range(4):
        start = clock.monotonic()
        while not breaker.allows_call():
            clock.advance(0.5)
        waits.append(clock.monotonic() - start)
        breaker.record_failure(UnavailableError("gone"))
    assert waits == [1.0, 2.0, 4.0, 4.0]
    assert breaker.openings == 1


def test_guarded_call_hands_back_the_result(guard):
    assert guard.call(lambda: 42, 5.0) == 42


def test_guarded_call_hands_back_the_error(guard):
    error = StorageError("broken")

    def fail():
        raise error

    assert guard.call(fail, 5.0) == Failure(error)


def test_late_call_fails_within_its_deadline_and_blocks_no_later_caller(guard):
    gate, ended = threading.Event(), threading.Event()

    def hang():
        gate.wait(ANSWER_SECONDS)
        ended.set()

    late = guard.call(hang, 0.01)
    busy = guard.call(lambda: 1, 60.0)
    assert isinstance(late.error, UnavailableError)
    assert isinstance(busy.error, UnavailableError)
    gate.set()
    assert ended.wait(ANSWER_SECONDS)


def test_background_jobs_run_in_order(stores):
    ran = []
    for index in range(3):
        assert stores.offer(lambda index=index: ran.append(index), 1)
    assert stores.wait_idle(10)
    assert ran == [0, 1, 2]


def test_full_queue_refuses_at_once_by_jobs_and_by_bytes(stores):
    gate = threading.Event()
    assert stores.offer(lambda: gate.wait(ANSWER_SECONDS), 60)
    assert not stores.has_room(41)
    assert not stores.offer(lambda: None, 41)
    assert stores.offer(lambda: None, 10)
    assert stores.offer(lambda: None, 10)
    assert not stores.offer(lambda: None, 0)
    gate.set()
    assert stores.wait_idle(10)
    assert stores.has_room(100)


def test_failing_job_is_reported_and_the_next_one_runs(stores, failures):
    error, ran = StorageError("broken"), []

    def fail():
        raise error

    stores.offer(fail, 1)
    stores.offer(lambda: ran.append(1), 1)
    assert stores.wait_idle(10)
    assert failures == [error]
    assert ran == [1]


def test_close_finishes_queued_jobs_and_takes_no_more(stores):
    ran = []
    stores.offer(lambda: ran.append(1), 1)
    stores.close(10.0)
    assert ran == [1]
    assert not stores.offer(lambda: ran.append(2), 1)


def test_close_drops_what_a_hanging_job_holds_up(stores):
    gate = threading.Event()
    stores.offer(lambda: gate.wait(ANSWER_SECONDS), 1)
    stores.offer(lambda: None, 1)
    stores.close(0.01)
    gate.set()
    assert stores.wait_idle(10)


def test_failures_are_logged_once_for_each_kind(caplog):
    counters = ConnectorCounters()
    with caplog.at_level(logging.WARNING):
        for error in (NoSpaceError("a"), NoSpaceError("b"), StorageError("c")):
            counters.count_failure(error)
    assert [record.args[0] for record in caplog.records] == ["NoSpaceError", "StorageError"]
    assert counters.snapshot(0).failures == {"NoSpaceError": 2, "StorageError": 1}


def test_what_lies_on_disk_alone_is_in_host_memory_before_it_is_loaded_as_far_as_that_goes(tmp_path, clock):
    layout = KvLayout(layers=1, kv_heads=1, head_dim=8192, dtype="int8", block_tokens=4)  # 64 KiB a block
    namespace = Namespace(model="m", revision="r", layout=layout)
    prompts = [list(range(start, start + 32)) for start in range(0, 40_000, 1000)]
    settings = StoreSettings(eviction_policy="lru", prefetch_ratio=1.0)
    with open_store(tmp_path, host_bytes=8 << 20, disk_bytes=64 << 20, settings=settings, clock=clock) as store:
        for prompt in prompts:
            store_prompt(store, namespace, prompt)
        matches = [store.match(namespace, prompt) for prompt in (*prompts[:2], prompts[-1], [1])]
        assert [0, 0, 8, 0] == [match.host_blocks for match in matches]
        with prefetched(store, matches, 30.0, clock):
            assert [8, 8, 8, 0] == [store.match(m.namespace, m.prompt).host_blocks for m in matches]
        assert {"done": 2} == store.stats().prefetches


def test_where_prefetches_are_refused_the_load_goes_on(clock):
    class Full:
        def prefetch(self, *_arguments, **_named):
            raise NoSpaceError("3 prefetches")

    layout = KvLayout(layers=1, kv_heads=1, head_dim=1, dtype="int8", block_tokens=4)
    match = PrefixMatch(
        Namespace(model="m", revision="r", layout=layout), PLAIN_ROOT, np.arange(4), 1, (TierRun(Tier.DISK, 1),)
    )
    with prefetched(Full(), [match], 30.0, clock):
        pass
