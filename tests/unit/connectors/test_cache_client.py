"""What connectors see of a store that fails: misses."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from dataclasses import replace

import pytest

import kvstore
from kvstore.clock import SystemClock
from kvstore.connectors.common import CacheClient, ConnectorCounters, Promise
from kvstore.errors import UnavailableError
from kvstore.testing.blocks import expected_rows
from kvstore.testing.conformance import BLOCKS, LAYOUT, MIB, PROMPT
from kvstore.testing.serving import ServedStore


class GoneLease:
    """A lease of a server that is gone."""

    def release(self):
        raise UnavailableError("gone")


NAMESPACE = kvstore.Namespace(model="model", revision="revision", layout=LAYOUT)
CALLS = {
    "match": lambda cache, match, rows: cache.match(NAMESPACE, PROMPT).blocks,
    "load": lambda cache, match, rows: cache.load(match, rows),
    "store": lambda cache, match, rows: cache.store(NAMESPACE, [9, *PROMPT], rows).blocks,
    "promise": lambda cache, match, rows: cache.promise(match, 0.0, SystemClock()).blocks,
    "release": lambda cache, match, rows: cache.release(Promise(match, 1, GoneLease())) or 0,
    "load_leased": lambda cache, match, rows: cache.load_leased(match, lambda lease: None) or 0,
    "check": lambda cache, match, rows: cache.check(NAMESPACE) or 0,
}


@pytest.fixture
def counters():
    return ConnectorCounters()


def test_a_store_that_works_is_used_and_counted(counters):
    with kvstore.open(None, host_bytes=MIB) as store:
        cache = CacheClient(store, counters)
        rows = expected_rows(NAMESPACE, PROMPT)
        assert 0 == cache.match(NAMESPACE, PROMPT).blocks
        assert BLOCKS == cache.store(NAMESPACE, PROMPT, rows).blocks
        match = cache.match(NAMESPACE, PROMPT)
        loaded = bytearray(BLOCKS * LAYOUT.block_bytes)
        assert BLOCKS == cache.load(match, loaded)
        assert rows.tobytes() == bytes(loaded)
    stats = counters.snapshot(0)
    assert (2, 80, 40, 40) == (stats.lookups, stats.lookup_tokens, stats.matched_tokens, stats.loaded_tokens)
    assert (BLOCKS, {}) == (stats.stored_blocks, stats.failures)


def test_each_method_has_a_call_that_must_not_raise():
    public = {name for name, _ in inspect.getmembers(CacheClient, inspect.isfunction) if not name.startswith("_")}
    assert public == set(CALLS)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("lane", ["", "grpc+"])
def test_a_server_that_is_gone_is_a_miss(counters, tmp_path, name, lane):
    address = f"unix://{tmp_path}/s"
    with kvstore.connect(lane + address) as client, kvstore.open(None, host_bytes=MIB) as store:
        cache = CacheClient(client, counters)
        with ServedStore(store, [address]):
            cache.store(NAMESPACE, PROMPT, expected_rows(NAMESPACE, PROMPT))
            match = cache.match(NAMESPACE, PROMPT)
            assert BLOCKS == match.blocks
        for _ in range(5):
            assert 0 == CALLS[name](cache, match, expected_rows(NAMESPACE, PROMPT))
    assert {"UnavailableError": 5} == counters.snapshot(0).failures


@pytest.mark.parametrize("tokens", [[-1], "text", None])
def test_a_mistake_in_the_arguments_is_a_miss_that_is_counted(counters, tokens):
    with kvstore.open(None, host_bytes=MIB) as store:
        cache = CacheClient(store, counters)
        assert 0 == cache.match(NAMESPACE, tokens).blocks
        assert 0 == cache.store(NAMESPACE, tokens, b"").blocks
    assert {"InvalidTokensError": 2} == counters.snapshot(0).failures


def test_an_error_that_is_a_bug_is_a_miss_too(counters):
    cache = CacheClient(None, counters)
    assert 0 == cache.match(NAMESPACE, PROMPT).blocks
    assert {"AttributeError": 1} == counters.snapshot(0).failures


def test_what_is_promised_stays_until_it_is_released_and_is_loaded_from_there(counters):
    with kvstore.open(None, host_bytes=MIB) as store:
        cache = CacheClient(store, counters)
        rows = expected_rows(NAMESPACE, PROMPT)
        cache.store(NAMESPACE, PROMPT, rows)
        promise = cache.promise(cache.match(NAMESPACE, PROMPT), 0.0, SystemClock())
        assert (BLOCKS, 1) == (promise.blocks, store.stats().leases)
        assert 0 == store.evict(NAMESPACE, PROMPT)
        loaded = bytearray(rows.nbytes)
        cache.load_leased(promise.match, lambda lease: lease.load_into(loaded))
        assert rows.tobytes() == bytes(loaded)
        cache.release(promise)
        assert (0, BLOCKS) == (store.stats().leases, store.evict(NAMESPACE, PROMPT))


def test_a_store_that_gives_back_other_bytes_is_found_out(counters):
    with kvstore.open(None, host_bytes=MIB) as store:
        cache = CacheClient(store, counters)
        assert cache.check(NAMESPACE) is True
        assert 0 == store.stats().stages + store.stats().leases
        assert CacheClient(FlippingStore(store), counters).check(NAMESPACE) is False


class FlippingStore:
    """A store that works, but for one bit of all that is loaded."""

    def __init__(self, store):
        self._store = store

    def __getattr__(self, name):
        return getattr(self._store, name)

    @contextmanager
    def lease(self, match):
        with self._store.lease(match) as lease:
            yield FlippingLease(lease)


class FlippingLease:
    def __init__(self, lease):
        self._lease = lease

    def load_into(self, buffer, *, part=None):
        result = self._lease.load_into(buffer, part=part)
        buffer[0] ^= 1
        return result


def test_a_store_that_takes_no_block_says_nothing_either_way(counters):
    large = replace(LAYOUT, layers=8192)
    with kvstore.open(None, host_bytes=MIB) as store:
        assert CacheClient(store, counters).check(replace(NAMESPACE, layout=large)) is None
