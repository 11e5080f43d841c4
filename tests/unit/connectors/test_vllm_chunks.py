"""Chunks of vLLM's offloading over real stores: found, loaded and stored from threads as by a dictionary."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvstore
from kvstore.clock import SystemClock
from kvstore.connectors.common import CacheClient, ConnectorCounters, UnsupportedModelError
from kvstore.connectors.vllm import chunks as chunks_module
from kvstore.connectors.vllm.chunks import ChunkParts, Chunks, Job, chunk_layout
from kvstore.connectors.vllm.soundness import Soundness
from kvstore.errors import UnavailableError
from kvstore.types import Namespace

ROWS, ROW_BYTES, TOKENS = 16, 512, 32
WAIT_SECONDS = 30.0


def key_of(number, group=0):
    return number.to_bytes(32, "big") + group.to_bytes(4, "big")


def namespace():
    return Namespace(model="m", revision="r", layout=chunk_layout(ROW_BYTES, TOKENS, "facts"))


class Tier:
    """Chunks and their rows, stepped until what was begun has ended."""

    def __init__(self, store, make_namespace=namespace, weights_version=None):
        self.rows = np.zeros((ROWS, ROW_BYTES), dtype=np.uint8)
        self.counters = ConnectorCounters()
        client = CacheClient(store, self.counters)
        parts = ChunkParts(client, self.counters, SystemClock(), self.rows, make_namespace, weights_version, 20.0)
        self.chunks = Chunks(parts)
        self.chunks.wait_checked(WAIT_SECONDS)
        self.jobs = 0

    def has(self, key, request_id="r"):
        answer = self.chunks.look_up(key, request_id)
        while answer is None:
            self.chunks.flush()
            answer = self.chunks.look_up(key, request_id)
        return answer

    def run(self, submit, keys, row_ids):
        self.jobs += 1
        submit(Job(self.jobs, tuple(keys), tuple(row_ids)))
        self.chunks.drain()
        [outcome] = self.chunks.take_outcomes()
        assert self.jobs == outcome.job.job_id
        return outcome

    def store(self, keys, row_ids):
        return self.run(self.chunks.store, keys, row_ids)

    def load(self, keys, row_ids):
        return self.run(self.chunks.load, keys, row_ids)


@contextmanager
def tier_over(store, **named):
    tier = Tier(store, **named)
    try:
        yield tier
    finally:
        tier.chunks.close()


@pytest.fixture
def real_store():
    with kvstore.open(None, host_bytes=4 << 20) as opened:
        yield opened


def content(number):
    return np.random.default_rng(number).integers(0, 256, ROW_BYTES, dtype=np.uint8)


def test_what_was_stored_is_found_by_another_and_comes_back_bit_for_bit(real_store):
    keys = [key_of(number) for number in range(3)]
    with tier_over(real_store) as first, tier_over(real_store) as second:
        first.rows[:3] = [content(number) for number in range(3)]
        assert first.store(keys, [0, 1, 2]).is_whole
        assert [True, True, True, False] == [second.has(key) for key in [*keys, key_of(9)]]
        assert second.load(keys, [5, 7, 6]).is_whole
        assert [0, 2, 1] == [
            next(number for number in range(3) if np.array_equal(second.rows[row], content(number)))
            for row in (5, 6, 7)
        ]
    assert (0, 0) == (real_store.stats().leases, real_store.stats().stages)


def test_groups_and_weights_versions_share_nothing(real_store):
    with tier_over(real_store) as tier, tier_over(real_store, weights_version="2") as newer:
        tier.store([key_of(1)], [0])
        assert [True, False] == [tier.has(key_of(1)), tier.has(key_of(1, group=1))]
        assert newer.has(key_of(1)) is False


def test_keys_of_another_length_are_never_found_and_not_stored(real_store):
    with tier_over(real_store) as tier:
        outcome = tier.store([b"short", key_of(1)], [0, 1])
        assert (False, (key_of(1),)) == (outcome.is_whole, outcome.keys)
        assert tier.has(b"short") is False


def test_a_lookup_answers_later_and_is_forgotten_with_its_last_request(real_store):
    with tier_over(real_store) as tier:
        assert tier.chunks.look_up(key_of(1), "a") is None
        assert tier.chunks.is_busy
        assert [False, False] == [tier.has(key_of(1), name) for name in ("a", "b")]
        tier.store([key_of(1)], [0])
        tier.chunks.forget("a")
        assert tier.has(key_of(1), "b") is False
        tier.chunks.forget("b")
        assert tier.has(key_of(1), "c") is True


def test_what_vanished_behind_its_lookup_is_reported_and_not_found_again(real_store):
    keys = [key_of(1), key_of(2)]
    with tier_over(real_store) as tier:
        tier.store(keys, [0, 1])
        assert [True, True] == [tier.has(key) for key in keys]
        real_store.clear(namespace())
        assert () == tier.load(keys, [3, 4]).keys
        assert [False, False] == [tier.has(key) for key in keys]


def test_a_load_of_what_nobody_looked_up_fails_and_touches_nothing(real_store):
    with tier_over(real_store) as tier:
        tier.store([key_of(1)], [0])
        tier.rows[5] = 7
        assert () == tier.load([key_of(1)], [5]).keys
        assert {7} == set(tier.rows[5])


def test_stores_beyond_the_bound_end_at_once_with_nothing_stored(real_store, monkeypatch):
    monkeypatch.setattr(chunks_module, "STORES_MAX", 0)
    with tier_over(real_store) as tier:
        assert () == tier.store([key_of(1)], [0]).keys
        assert tier.has(key_of(1)) is False
        assert 1 == tier.counters.snapshot(0).dropped_blocks


def test_without_a_store_there_is_nothing_and_every_job_ends():
    class Gone:
        def __getattr__(self, name):
            raise UnavailableError("gone")

    with tier_over(Gone()) as tier:
        assert Soundness.UNANSWERED is tier.chunks.soundness
        assert tier.has(key_of(1)) is False
        assert [(), ()] == [tier.store([key_of(1)], [0]).keys, tier.load([key_of(1)], [0]).keys]
        assert not tier.chunks.is_busy


def test_weights_without_a_name_keep_it_off(real_store):
    def unnamed():
        raise UnsupportedModelError("no weights")

    with tier_over(real_store, make_namespace=unnamed) as tier:
        assert tier.has(key_of(1)) is False
        assert {"UnsupportedModelError": 1} == tier.counters.snapshot(0).failures


class GatedStore:
    """A store that answers only while its gate is open."""

    def __init__(self, store):
        self.store = store
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def __getattr__(self, name):
        self.entered.set()
        assert self.gate.wait(WAIT_SECONDS)
        return getattr(self.store, name)


def test_a_store_that_hangs_holds_up_no_call_of_the_scheduler(real_store):
    gated = GatedStore(real_store)
    with tier_over(gated) as tier:
        gated.gate.clear()
        assert tier.chunks.look_up(key_of(1), "r") is None
        tier.chunks.flush()
        tier.chunks.store(Job(1, (key_of(1),), (0,)))
        assert [] == tier.chunks.take_outcomes()
        assert tier.chunks.look_up(key_of(1), "r") is None
        gated.gate.set()
        assert tier.has(key_of(1)) in (True, False)


def test_closing_drops_what_waits_and_waits_for_what_runs(real_store):
    gated = GatedStore(real_store)
    tier = Tier(gated)
    gated.gate.clear()
    gated.entered.clear()
    for job_id in range(4):
        tier.chunks.store(Job(job_id, (key_of(job_id),), (0,)))
    assert gated.entered.wait(WAIT_SECONDS)
    closing = threading.Thread(target=tier.chunks.close)
    closing.start()
    waiting = [tier.chunks._stores[job_id][1] for job_id in (1, 2, 3)]
    dropped = threading.Event()
    waiting[-1].add_done_callback(lambda _: dropped.set())
    assert dropped.wait(WAIT_SECONDS)
    gated.gate.set()
    closing.join(WAIT_SECONDS)
    ended = {outcome.job.job_id: len(outcome.keys) for outcome in tier.chunks.take_outcomes()}
    assert {0: 1, 1: 0, 2: 0, 3: 0} == ended


steps = st.tuples(st.sampled_from(["store", "load", "forget"]), st.lists(st.integers(0, 7), min_size=1, max_size=5))


@settings(max_examples=15, deadline=None)
@given(st.lists(steps, max_size=8))
def test_chunks_are_those_of_a_dictionary(commands):
    model = {}
    with kvstore.open(None, host_bytes=4 << 20) as opened, tier_over(opened) as tier:
        for turn, (what, numbers) in enumerate(commands):
            keys, row_ids = [key_of(number) for number in numbers], range(len(numbers))
            if what == "store":
                tier.rows[: len(keys)] = [content(number) for number in numbers]
                assert tier.store(keys, row_ids).is_whole
                model |= {number: content(number) for number in numbers}
            elif what == "load":
                request_id = f"r{turn}"
                assert [number in model for number in numbers] == [tier.has(key, request_id) for key in keys]
                outcome = tier.load(keys, row_ids)
                assert [key for number, key in zip(numbers, keys, strict=True) if number in model] == list(outcome.keys)
                for row, number in enumerate(numbers):
                    assert number not in model or np.array_equal(model[number], tier.rows[row])
                tier.chunks.forget(request_id)


def test_the_layout_has_the_bytes_of_a_row_and_tells_facts_apart():
    assert ROW_BYTES == chunk_layout(ROW_BYTES, TOKENS, "a").block_bytes == chunk_layout(ROW_BYTES, 7, "a").block_bytes
    assert chunk_layout(ROW_BYTES, TOKENS, "a" * 2000) != chunk_layout(ROW_BYTES, TOKENS, "b" * 2000)
