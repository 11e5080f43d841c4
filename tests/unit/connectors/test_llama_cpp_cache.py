"""What the llama.cpp connector restores and keeps, with an engine whose KV tells every mistake.

The engine is naive: the KV of a token is a digest of all tokens up to it, and so is what it answers. So a state that is
not that of its prompt, or trimmed to the wrong length, gives other answers than an engine without a store.
"""

from __future__ import annotations

import hashlib
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvstore
from kvstore.connectors.llama_cpp_cache import Limits, PrefixCache
from kvstore.connectors.llama_cpp_states import is_worth_loading, is_worth_storing, load_state, shared_tokens
from kvstore.errors import StorageError, UnavailableError
from kvstore.layer_groups import SequenceState
from kvstore.testing.manual_clock import ManualClock
from kvstore.testing.patience import ANSWER_SECONDS
from kvstore.types import KvLayout, Namespace, Root

ROW_BYTES = 32
LAYOUT = KvLayout(
    layers=2,
    kv_heads=1,
    head_dim=4,
    dtype="float16",
    block_tokens=1,
    engine="naive",
    state=SequenceState(form="naive", piece_bytes=4096),
)
NAMESPACE = Namespace(model="naive", revision="1", layout=LAYOUT)
PATIENT = Limits(lookup_seconds=30.0, load_seconds=30.0, tokens_min=1)


class NaiveEngine:
    """A kvstore.connectors.llama_cpp_cache.Sequence that answers prompts."""

    def __init__(self, room_tokens=2048):
        self.room_tokens = room_tokens
        self.ids = []
        self.kv = np.zeros((0, ROW_BYTES), dtype=np.uint8)
        self.computed_tokens = 0

    @property
    def tokens(self):
        return np.array(self.ids, dtype=np.intc)

    @property
    def state_bytes(self):
        return self.kv.size

    def save(self):
        return self.kv.reshape(-1).copy()

    def restore(self, state, prompt):
        rows = state.blob.reshape(-1, ROW_BYTES)
        if len(rows) != state.state_tokens or len(rows) > self.room_tokens:
            self.cut(0)
            return False
        self.kv, self.ids = rows[: state.tokens].copy(), prompt[: state.tokens].tolist()
        return True

    def cut(self, tokens):
        self.kv, self.ids = self.kv[:tokens], self.ids[:tokens]

    def compute(self, token):
        before = self.kv[-1].tobytes() if len(self.kv) else b""
        row = hashlib.blake2b(before + int(token).to_bytes(4, "little"), digest_size=ROW_BYTES).digest()
        self.kv = np.vstack([self.kv, np.frombuffer(row, dtype=np.uint8)])
        self.ids.append(token)
        self.computed_tokens += 1
        return int(row[0])

    def answer(self, prompt, new_tokens, cache=None):
        """As llama-cpp-python does: goes on from what it holds of the prompt; the last token is not computed."""
        if cache is not None:
            cache.restore(prompt)
        self.cut(min(shared_tokens(self.tokens, np.array(prompt)), len(prompt) - 1))
        for token in prompt[len(self.ids) :]:
            sampled = self.compute(token)
        answer = [sampled]
        while len(answer) < new_tokens:
            answer.append(self.compute(answer[-1]))
        if cache is not None:
            cache.keep()
        return answer


class FaultyStates:
    """A store whose methods raise, wait or change bytes on demand."""

    def __init__(self, store):
        self._store = store
        self.errors = {}
        self.gate = None
        self.flip = False

    def __getattr__(self, name):
        method = getattr(self._store, name)

        def call(*args, **kwargs):
            if self.gate is not None:
                assert self.gate.wait(ANSWER_SECONDS)
            if name in self.errors:
                raise self.errors[name]
            result = method(*args, **kwargs)
            return FlippingLease(result) if name == "lease_state" and self.flip else result

        return call


class FlippingLease:
    def __init__(self, lease):
        self._lease = lease

    def __getattr__(self, name):
        return getattr(self._lease, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._lease.release()

    def load_into(self, buffer, *, from_piece=0):
        size = self._lease.load_into(buffer, from_piece=from_piece)
        buffer[0] ^= 1
        return size


@pytest.fixture
def store():
    with kvstore.open(None, host_bytes=64 << 20) as opened:
        yield FaultyStates(opened)


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def attach(store, clock):
    caches = []

    def make(engine, *, namespace=NAMESPACE, root=None, limits=PATIENT, store=store):
        cache = PrefixCache(engine, store, namespace, root=root or Root(), limits=limits, clock=clock)
        caches.append(cache)
        return cache

    yield make
    for cache in caches:
        cache.close()


def prompt_of(length, seed=0):
    return np.random.default_rng(seed).integers(0, 1000, length).tolist()


def test_a_second_engine_goes_on_from_what_the_first_one_stored(attach):
    prompt = prompt_of(300)
    answers, computed = [NaiveEngine().answer(prompt, 8)], []
    for _ in range(2):
        engine = NaiveEngine()
        cache = attach(engine)
        answers.append(engine.answer(prompt, 8, cache))
        computed.append(engine.computed_tokens)
        assert cache.flush()
    assert answers[0] == answers[1] == answers[2]
    assert [307, 8] == computed
    assert (299, {}, {}) == (cache.stats().loaded_tokens, cache.stats().bypassed, cache.stats().failures)


def test_a_longer_state_is_trimmed_to_what_a_prompt_shares(attach):
    system = prompt_of(200)
    first, second = NaiveEngine(), NaiveEngine()
    cache = attach(first)
    first.answer(system + prompt_of(100, 1), 8, cache)
    assert cache.flush()
    asked = system + prompt_of(50, 2)
    assert NaiveEngine().answer(asked, 8) == second.answer(asked, 8, attach(second))
    assert 57 == second.computed_tokens


def test_the_next_turn_goes_on_from_the_answer_before(attach):
    prompt, turns = prompt_of(100), []
    for turn in range(3):
        engine = NaiveEngine()  # as after a restart: nothing is held from the turn before
        cache = attach(engine)
        answer = engine.answer(prompt, 40, cache)
        assert NaiveEngine().answer(prompt, 40) == answer
        assert cache.flush()
        turns.append(cache.stats().loaded_tokens)
        prompt = prompt + answer + prompt_of(20, turn + 1)
    assert [0, 139, 199] == turns


PROMPTS = st.lists(
    st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=24), st.booleans()), min_size=1, max_size=8
)


@given(prompts=PROMPTS, salt=st.uuids().map(str))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_sequence_of_prompts_gets_an_answer_of_its_own(prompts, salt, store):
    engine = NaiveEngine()
    cache = PrefixCache(engine, store, NAMESPACE, root=Root(salt=salt), limits=PATIENT, clock=ManualClock())
    try:
        for prompt, forgets in prompts:
            if forgets:
                engine.cut(0)
            assert NaiveEngine().answer(prompt, 3) == engine.answer(prompt, 3, cache)
            assert cache.flush()
        assert ({}, {}) == (cache.stats().bypassed, cache.stats().failures)
    finally:
        cache.close()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"root": Root(salt="a")}, {"root": Root(salt="b")}),
        ({"root": Root(adapter="x")}, {}),
        ({"namespace": Namespace(model="naive", revision="2", layout=LAYOUT)}, {}),
        ({"namespace": Namespace(model="naive", revision="1", layout=LAYOUT, tenant="b")}, {}),
    ],
)
def test_engines_that_must_not_share_do_not(one, other, attach):
    prompt = prompt_of(100)
    for place in (one, other):
        engine = NaiveEngine()
        cache = attach(engine, **place)
        engine.answer(prompt, 4, cache)
        assert cache.flush()
        assert 0 == cache.stats().loaded_tokens


def test_what_the_engine_holds_itself_is_not_loaded(attach):
    prompt, engine = prompt_of(100), NaiveEngine()
    cache = attach(engine)
    for _ in range(2):
        engine.answer(prompt, 4, cache)
        assert cache.flush()
    assert (99, 0) == (cache.stats().matched_tokens, cache.stats().loaded_tokens)


def test_a_state_longer_than_the_context_is_left_alone(attach):
    first, second = NaiveEngine(), NaiveEngine(room_tokens=150)
    cache = attach(first)
    first.answer(prompt_of(300), 4, cache)
    assert cache.flush()
    other = attach(second)
    asked = prompt_of(300)[:100]
    assert NaiveEngine().answer(asked, 4) == second.answer(asked, 4, other)
    assert (99, 0) == (other.stats().matched_tokens, other.stats().loaded_tokens)


@pytest.mark.parametrize("method", ["match", "lease_state", "stage_state"])
@pytest.mark.parametrize("error", [UnavailableError("gone"), StorageError("EIO"), RuntimeError("surprise")])
def test_a_failing_store_never_reaches_the_engine(method, error, attach, store):
    prompt, engine = prompt_of(100), NaiveEngine()
    cache = attach(engine)
    engine.answer(prompt[:50], 4, cache)
    assert cache.flush()
    engine.cut(0)
    store.errors[method] = error
    assert NaiveEngine().answer(prompt, 4) == engine.answer(prompt, 4, cache)
    assert cache.flush()
    assert [type(error).__name__] == list(cache.stats().failures)


def test_a_store_that_is_down_from_the_start_serves_once_it_is_back(attach, store, clock):
    prompt, engine = prompt_of(100), NaiveEngine()
    store.errors["stage_state"] = UnavailableError("nobody listens")
    cache = attach(engine)
    engine.answer(prompt, 4, cache)
    del store.errors["stage_state"]
    clock.advance(60)
    engine.answer(prompt_of(100, 1), 4, cache)  # the self-check is made beside it
    assert cache.flush()
    assert {"unverified": 2} == cache.stats().bypassed
    for _ in range(2):
        engine.cut(0)
        engine.answer(prompt, 4, cache)
        assert cache.flush()
    assert 99 == cache.stats().loaded_tokens


def test_a_dead_store_is_not_asked_again_before_the_backoff_ends(attach, store, clock):
    prompt, engine = prompt_of(100), NaiveEngine()
    cache = attach(engine)
    store.errors["match"] = UnavailableError("gone")
    for _ in range(3):
        engine.answer(prompt, 4, cache)
    assert (1, {"store": 3}) == (cache.stats().failures["UnavailableError"], cache.stats().bypassed)
    del store.errors["match"]
    clock.advance(60)
    engine.answer(prompt, 4, cache)
    assert {"store": 3} == cache.stats().bypassed


def test_a_store_that_hangs_costs_the_deadline_alone(attach, store):
    prompt, engine = prompt_of(100), NaiveEngine()
    cache = attach(engine, limits=Limits(lookup_seconds=0.05, load_seconds=0.05))
    store.gate = threading.Event()
    try:
        assert NaiveEngine().answer(prompt, 4) == engine.answer(prompt, 4, cache)
        assert {"store": 1} == cache.stats().bypassed
    finally:
        store.gate.set()


def test_a_store_that_changes_bytes_disables_the_connector(attach, store):
    prompt, engine = prompt_of(100), NaiveEngine()
    store.flip = True
    cache = attach(engine)
    assert NaiveEngine().answer(prompt, 4) == engine.answer(prompt, 4, cache)
    assert ({"unverified": 1}, {"SelfCheckError": 1}) == (cache.stats().bypassed, cache.stats().failures)


def test_a_full_store_is_counted(attach):
    with kvstore.open(None, host_bytes=1 << 20) as small:
        engine = NaiveEngine()
        cache = attach(engine, store=small)
        cache.restore(prompt_of(2, 1))
        engine.ids, engine.kv = prompt_of(50_000), np.zeros((50_000, ROW_BYTES), dtype=np.uint8)
        cache.keep()
        assert cache.flush()
        assert (0, 391) == (cache.stats().stored_blocks, cache.stats().refused_blocks)


def test_a_full_queue_drops_and_counts(attach):
    prompt, engine = prompt_of(100), NaiveEngine()
    cache = attach(engine, limits=Limits(lookup_seconds=30, load_seconds=30, queue_bytes_max=100))
    engine.answer(prompt, 4, cache)
    assert cache.flush()
    assert (0, 1) == (cache.stats().stored_blocks, cache.stats().dropped_blocks)


@pytest.mark.parametrize("place", ["restore", "save"])
def test_a_mistake_of_the_connector_breaks_no_answer_and_turns_it_off(place, attach, monkeypatch):
    prompt, engine = prompt_of(100), NaiveEngine()
    cache = attach(engine)
    engine.answer(prompt[:50], 4, cache)
    assert cache.flush()
    engine.cut(0)
    monkeypatch.setattr(engine, place, lambda *arguments: 1 / 0)
    assert NaiveEngine().answer(prompt, 4) == engine.answer(prompt, 4, cache)
    assert {"ZeroDivisionError": 1} == cache.stats().failures
    engine.answer(prompt, 4, cache)
    assert {"broken": 1} == cache.stats().bypassed


def test_an_engine_that_refuses_a_state_computes_the_prompt(attach, monkeypatch):
    prompt, engine = prompt_of(100), NaiveEngine()
    cache = attach(engine)
    engine.answer(prompt, 4, cache)
    assert cache.flush()
    engine.cut(0)
    monkeypatch.setattr(engine, "restore", lambda state, prompt: False)
    assert NaiveEngine().answer(prompt, 4) == engine.answer(prompt, 4, cache)
    assert ({"refused": 1}, 0) == (cache.stats().bypassed, cache.stats().loaded_tokens)


def test_tokens_that_are_none_are_left_to_the_engine(attach):
    engine = NaiveEngine()
    cache = attach(engine)
    cache.restore([1, -5, 3])
    cache.keep()
    assert {"inputs": 1} == cache.stats().bypassed


def test_nothing_of_a_bypassed_prompt_is_kept(attach):
    engine = NaiveEngine()
    cache = attach(engine)
    cache.restore(prompt_of(100))
    cache.bypass("logits_all")
    engine.ids, engine.kv = prompt_of(100), np.zeros((100, ROW_BYTES), dtype=np.uint8)
    cache.keep()
    assert cache.flush()
    assert (0, {"logits_all": 1}) == (cache.stats().stored_blocks, cache.stats().bypassed)


def test_a_damaged_state_is_a_miss(attach, store):
    prompt, engine = prompt_of(100), NaiveEngine()
    cache = attach(engine)
    engine.answer(prompt, 4, cache)
    assert cache.flush()
    match = store.match(NAMESPACE, prompt)

    class Short(FlippingLease):
        def load_into(self, buffer, *, from_piece=0):
            return 0

    class ShortStore:
        def lease_state(self, match):
            return Short(store.lease_state(match))

    assert load_state(ShortStore(), match, held_tokens=0, tokens_min=1, room_tokens=1000) is None


@pytest.mark.parametrize(
    ("tokens", "state_tokens", "held_tokens", "tokens_min", "worth"),
    [
        (100, 100, 0, 64, True),
        (63, 63, 0, 64, False),
        (100, 100, 36, 64, True),
        (100, 100, 37, 64, False),
        (100, 1600, 0, 64, True),
        (100, 1601, 0, 64, False),
        (0, 0, 0, 0, False),
        (50, 50, 90, 0, False),
    ],
)
def test_a_state_is_loaded_where_it_saves_enough(tokens, state_tokens, held_tokens, tokens_min, worth):
    assert worth == is_worth_loading(tokens, state_tokens, held_tokens, tokens_min)


@pytest.mark.parametrize(
    ("tokens", "stored_tokens", "worth"),
    [(64, 0, True), (63, 0, False), (1000, 936, False), (1000, 875, True), (1000, 876, False), (0, 0, False)],
)
def test_a_state_is_stored_where_it_has_grown_enough(tokens, stored_tokens, worth):
    assert worth == is_worth_storing(tokens, stored_tokens, 64)


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_shared_tokens_are_those_of_the_common_beginning(one, other):
    expected = 0
    while expected < min(len(one), len(other)) and one[expected] == other[expected]:
        expected += 1
    assert expected == shared_tokens(np.array(one, dtype=np.int64), np.array(other, dtype=np.int64))
