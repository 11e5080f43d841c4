"""The SGLang connector without SGLang: host pools are plain memory, laid out as SGLang lays out its own."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvstore
from kvstore.connectors.sglang.backend import SglangBackend
from kvstore.connectors.sglang.layout import Rank
from kvstore.connectors.sglang.settings import SglangSettings, parse_settings
from kvstore.errors import ConfigError, UnavailableError
from kvstore.testing.serving import ServedStore

MIB = 1 << 20
PAGE, LAYERS, HEADS, HEAD_DIM = 16, 3, 2, 8
POOL_PAGES = 24
SETTINGS = SglangSettings(buffer_bytes=4 * MIB, lookup_seconds=20.0, bulk_seconds=20.0)
RANK = Rank(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, cp_rank=0, cp_size=1, replicated=False)
# The pieces of a page: a K and a V for each layer, or one of each.
PIECES = {"layer_first": 2 * LAYERS, "page_first": 2, "page_first_direct": 2, "page_head": 2}


class MemoryPool:
    """Pages in one array, shape [pieces, pages, piece_bytes]; `indices` are token indices."""

    def __init__(self, layout="page_first", dtype="torch.float16"):
        self.page_size, self.layout, self.dtype = PAGE, layout, dtype
        self.head_num, self.head_dim, self.layer_num = HEADS, HEAD_DIM, LAYERS
        page_bytes = 2 * LAYERS * HEADS * HEAD_DIM * PAGE * 2
        pieces = PIECES[layout]
        self.memory = np.zeros((pieces, POOL_PAGES, page_bytes // pieces), dtype=np.uint8)

    def get_page_buffer_meta(self, indices):
        assert len(indices) % PAGE == 0
        rows = [
            self.memory[piece, int(index) // PAGE] for index in indices[::PAGE] for piece in range(len(self.memory))
        ]
        return [row.ctypes.data for row in rows], [row.nbytes for row in rows]

    def fill(self, pages, keys):
        for page, key in zip(pages, keys, strict=True):
            self.memory[:, page] = np.frombuffer(
                np.random.default_rng(int(key[:16], 16)).bytes(self.memory[:, page].nbytes), dtype=np.uint8
            ).reshape(self.memory[:, page].shape)

    def holds(self, page, key):
        right = np.random.default_rng(int(key[:16], 16)).bytes(self.memory[:, page].nbytes)
        return self.memory[:, page].tobytes() == right


class Policy(str, Enum):  # noqa: UP042  # as SGLang's own, whose str() is not its value
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


@dataclass
class Transfer:
    name: str
    keys: list[str] | None
    host_indices: object
    hit_policy: Policy = Policy.ALL_PAGES


def hashes(count, seed="", after=None):
    """A chain of page hashes as SGLang makes them: each of the one before it and the page."""
    chain, prior = [], after or ""
    for number in range(count):
        prior = hashlib.sha256(f"{prior} {seed} {number}".encode()).hexdigest()
        chain.append(prior)
    return chain


def at(*pages):
    return np.concatenate([np.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def backend_of(store, pools=None, *, rank=RANK, epoch=lambda: "default", config=SETTINGS, revision="weights"):
    backend = SglangBackend(config, rank, "model", store, epoch=epoch)
    for name, pool in (pools or {"kv": MemoryPool()}).items():
        backend.add_pool(name, pool, at(0))
    if revision is not None:
        backend.use_revision(revision)
    return backend


@pytest.fixture
def store(tmp_path):
    with kvstore.open(tmp_path, host_bytes=64 * MIB) as opened:
        yield opened


@pytest.mark.parametrize("layout", sorted(PIECES))
def test_another_engine_finds_what_one_has_stored(store, layout):
    pool, other, keys = MemoryPool(layout), MemoryPool(layout), hashes(6)
    pool.fill(range(6), keys)
    assert backend_of(store, {"kv": pool}).save("kv", keys, at(*range(6)), []) == [True] * 6
    backend = backend_of(store, {"kv": other})
    assert backend.leading([*keys, *hashes(2, after=keys[-1])], []) == 6
    assert backend.load("kv", keys, at(5, 7, 1, 9, 20, 3), []) == [True] * 6
    assert all(other.holds(page, key) for page, key in zip((5, 7, 1, 9, 20, 3), keys, strict=True))
    assert backend.stats().failures == {}


def test_pages_behind_a_prefix_continue_it(store):
    pool, keys = MemoryPool(), hashes(8)
    backend = backend_of(store, {"kv": pool})
    pool.fill(range(8), keys)
    assert backend.save("kv", keys[:3], at(0, 1, 2), []) == [True] * 3
    assert backend.save("kv", keys[3:], at(*range(3, 8)), keys[:3]) == [True] * 5
    assert (backend.leading(keys, None), backend.leading(keys[5:], keys[:5])) == (8, 3)
    assert backend.load("kv", keys[6:], at(10, 11), keys[:6]) == [True, True]
    assert pool.holds(10, keys[6])
    assert pool.holds(11, keys[7])


def test_pages_whose_prefix_is_not_stored_are_refused_and_counted(store):
    pool, keys = MemoryPool(), hashes(5)
    backend = backend_of(store, {"kv": pool})
    assert backend.save("kv", keys[3:], at(0, 1), keys[:3]) == [False, False]
    assert backend.leading(keys[3:], keys[:3]) == 0
    assert (backend.stats().refused_blocks, store.stats().rejected_blocks["missing_prefix"]) == (2, 2)


def test_pages_without_a_prefix_are_kept_by_themselves_and_found_from_any_of_them_on(store):
    pool, keys = MemoryPool(), hashes(20)
    backend = backend_of(store, {"kv": pool})
    pool.fill(range(20), keys)
    assert backend.save("kv", keys, at(*range(20)), None) == [True] * 20
    assert [backend.leading(keys[first:], None) for first in (0, 1, 19)] == [20, 19, 1]
    assert backend.load("kv", keys[7:9], at(22, 23), None) == [True, True]
    assert pool.holds(22, keys[7])
    assert pool.holds(23, keys[8])


def test_what_a_store_does_not_have_ends_the_pages_that_are_found(store):
    pool, keys = MemoryPool(), hashes(6)
    backend = backend_of(store, {"kv": pool})
    pool.fill(range(6), keys)
    backend.save("kv", keys[:2], at(0, 1), None)
    backend.save("kv", keys[3:], at(3, 4, 5), None)
    assert backend.leading(keys, None) == 2
    assert backend.load("kv", keys, at(*range(6, 12)), None) == [True, True, False, False, False, False]


def test_pages_larger_than_the_buffer_move_some_at_a_time(store):
    pool, keys = MemoryPool(), hashes(10)
    backend = backend_of(store, {"kv": pool}, config=dataclasses.replace(SETTINGS, buffer_bytes=7000))
    pool.fill(range(10), keys)
    assert backend.save("kv", keys, at(*range(10)), []) == [True] * 10
    assert backend.load("kv", keys, at(*range(10, 20)), []) == [True] * 10
    assert all(pool.holds(page + 10, key) for page, key in enumerate(keys))


@pytest.mark.parametrize(
    ("field", "value"),
    [("tp_size", 2), ("tp_rank", 1), ("pp_rank", 1), ("pp_size", 2), ("cp_size", 2), ("replicated", True)],
)
def test_another_rank_or_world_never_gets_these_pages(store, field, value):
    keys = hashes(2)
    backend_of(store).save("kv", keys, at(0, 1), [])
    other = backend_of(store, rank=dataclasses.replace(RANK, **{field: value}))
    assert (backend_of(store).leading(keys, []), other.leading(keys, [])) == (2, 0)


@pytest.mark.parametrize(
    "other",
    [
        {"pools": {"kv": MemoryPool("page_first_direct")}},
        {"pools": {"kv": MemoryPool(dtype="torch.bfloat16")}},
        {"revision": "other weights"},
        {"epoch": lambda: "updated"},
        {"config": dataclasses.replace(SETTINGS, tenant="other")},
    ],
    ids=["memory layout", "dtype of the same size", "weights", "weights updated in place", "tenant"],
)
def test_equal_hashes_of_other_bytes_never_match(store, other):
    keys = hashes(2)
    assert backend_of(store).save("kv", keys, at(0, 1), []) == [True, True]
    assert backend_of(store, **other).leading(keys, []) == 0


def test_of_replicated_pages_one_rank_is_the_writer(store):
    first, second = (dataclasses.replace(RANK, tp_rank=rank, tp_size=2, replicated=True) for rank in (0, 1))
    writer, reader, keys = backend_of(store, rank=first), backend_of(store, rank=second), hashes(2)
    assert (reader.save("kv", keys, at(0, 1), []), reader.leading(keys, [])) == ([True, True], 0)
    assert (writer.save("kv", keys, at(0, 1), []), reader.leading(keys, [])) == ([True, True], 2)


def test_a_length_can_be_restored_where_all_pools_have_what_it_needs(store):
    pools = {"kv": MemoryPool(), "indexer": MemoryPool(), "swa": MemoryPool()}
    backend, keys = backend_of(store, pools), hashes(8)
    backend.save("kv", keys, at(*range(8)), [])
    backend.save("indexer", keys[:6], at(*range(6)), [])
    for page in (1, 2, 3, 6, 7):
        backend.save("swa", [keys[page]], at(page), keys[:page])
    indexer, window = Transfer("indexer", None, None), Transfer("swa", keys[:2], None, Policy.TRAILING_PAGES)
    assert backend.lookup(keys, [indexer], None).pages == 6
    both = backend.lookup(keys, [indexer, window], None)
    assert (both.pages, both.restorable) == (4, [3, 4])
    assert both.pool_pages == {"kv": 8, "indexer": 6, "swa": 8}
    assert backend.lookup(keys, [Transfer("swa", keys[:2], None, Policy.BLOCK_GROUPS)], None).pages == 0


def test_a_pool_that_nobody_registered_or_that_has_no_pages_is_a_miss(store):
    empty = SimpleNamespace(page_size=1, get_page_buffer_meta=lambda _: ([], []))
    backend, keys = backend_of(store, {"kv": MemoryPool(), "mamba": empty}), hashes(1)
    assert backend.save("mamba", keys, at(0), None) == [False]
    assert backend.load("swa", keys, at(0), None) == [False]
    assert backend.stats().failures == {"UnsupportedModelError": 1}


def test_nothing_is_asked_before_the_weights_are_known(store):
    backend, keys = backend_of(store, revision=None), hashes(2)
    assert (backend.save("kv", keys, at(0, 1), []), backend.leading(keys, [])) == ([False, False], 0)
    assert (store.stats().namespaces, backend.stats().failures) == (0, {})


def test_what_is_no_page_hash_is_a_miss_and_counted_by_its_error(store):
    backend = backend_of(store)
    assert backend.leading(["not a hash"], []) == 0
    assert backend.load("kv", ["abcd"], at(0), []) == [False]
    assert backend.stats().failures == {"InvalidTokensError": 2}


def test_pages_elsewhere_than_were_asked_for_are_not_written(store):
    pool, keys = MemoryPool(), hashes(2)
    backend = backend_of(store, {"kv": pool})
    backend.save("kv", keys, at(0, 1), [])
    pool.get_page_buffer_meta = lambda _: ([0], [1 << 40])
    backend._stores["kv"]._pages._locate = pool.get_page_buffer_meta
    assert backend.load("kv", keys, at(0, 1), []) == [False, False]
    assert backend.stats().failures == {"ValueError": 1}


def test_cleared_pages_are_gone(store):
    backend, keys = backend_of(store), hashes(3)
    backend.save("kv", keys, at(0, 1, 2), [])
    backend.clear()
    assert backend.leading(keys, []) == 0


def test_a_store_that_gives_back_other_bytes_stays_off(store, monkeypatch, caplog):
    monkeypatch.setattr("kvstore.connectors.sglang.backend.CacheClient.check", lambda *_: False)
    backend, keys = backend_of(store), hashes(2)
    with caplog.at_level(logging.WARNING):
        assert backend.save("kv", keys, at(0, 1), []) == [False, False]
        assert backend.leading(keys, []) == 0
    assert backend.stats().failures == {"SelfCheckError": 1}
    assert ["SelfCheckError" in line for line in caplog.messages] == [True]


def test_a_server_that_is_down_is_a_miss_and_is_used_when_it_is_back(tmp_path):
    address = f"unix://{tmp_path}/kv.sock"
    client = kvstore.connect(address, lookup_seconds=5.0, bulk_seconds=5.0)
    pool, keys = MemoryPool(), hashes(3)
    backend = backend_of(client, {"kv": pool})
    assert (backend.leading(keys, []), backend.save("kv", keys, at(0, 1, 2), [])) == (0, [False] * 3)
    assert backend.stats().failures == {UnavailableError.__name__: 2}
    with kvstore.open(tmp_path / "data", host_bytes=64 * MIB) as opened, ServedStore(opened, [address]):
        again = backend_of(kvstore.connect(address, lookup_seconds=20.0, bulk_seconds=20.0), {"kv": pool})
        assert again.save("kv", keys, at(0, 1, 2), []) == [True] * 3
        assert again.leading(keys, []) == 3
        again.close()
    backend.close()


def test_batches_moved_are_told_once(store):
    backend, keys = backend_of(store), hashes(3)
    backend.save("kv", keys, at(0, 1, 2), [])
    backend.load("kv", keys[:2], at(3, 4), [])
    assert [(item.is_load, item.pages) for item in backend.take_transfers()] == [(False, 3), (True, 2)]
    assert backend.take_transfers() == []


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(1, 6), st.booleans()), max_size=12))
def test_answers_equal_a_set_of_stored_paths(store, steps):
    pool = MemoryPool()
    backend = backend_of(store, {"kv": pool}, epoch=lambda: str(len(runs)))
    runs.append(None)
    paths: set[tuple[str, ...]] = set()
    for chain, first, count, knows_prefix in steps:
        keys = hashes(12, seed=str(chain))
        some, prefix = keys[first : first + count], keys[:first]
        pool.fill(range(len(some)), some)
        base = tuple(prefix) if knows_prefix else ()
        has_parent = not base or base in paths
        stored = backend.save("kv", some, at(*range(len(some))), prefix if knows_prefix else None)
        assert stored == [has_parent] * len(some)
        if has_parent:
            paths |= (
                {(*base, *some[: end + 1]) for end in range(len(some))} if knows_prefix else {(key,) for key in some}
            )
        expected = _leading(paths, some, base)
        assert backend.leading(some, prefix if knows_prefix else None) == expected
        assert backend.load("kv", some, at(*range(12, 12 + len(some))), prefix if knows_prefix else None) == [
            index < expected for index in range(len(some))
        ]
        assert all(pool.holds(12 + index, some[index]) for index in range(expected))


runs: list[None] = []


def _leading(paths, keys, base):
    """The pages that a reader finds: along a path behind `base`, else along one path after the other."""
    found, begun = 0, base
    while found < len(keys):
        if (*begun, keys[found]) in paths:
            begun = (*begun, keys[found])
            found += 1
        elif begun and not base and (keys[found],) in paths:
            begun = ()
        else:
            break
    return found


def test_settings_are_checked_by_name():
    assert parse_settings({"kvstore": {"lookup_seconds": 1, "buffer_bytes": "8MiB"}}) == dataclasses.replace(
        SglangSettings(), lookup_seconds=1.0, buffer_bytes=8 * MIB
    )
    for wrong in (
        7,
        {"adress": "x"},
        {"lookup_seconds": 0},
        {"bulk_seconds": True},
        {"buffer_bytes": "x"},
        {"tenant": ""},
    ):
        with pytest.raises(ConfigError):
            parse_settings({"kvstore": wrong})


def test_a_secret_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match="secret_file"):
        SglangSettings(secret_file=str(tmp_path / "none")).secret()
