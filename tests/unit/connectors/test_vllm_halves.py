"""Both halves of the vLLM connector around a tiny engine with vLLM's life of a request, over real stores; no vLLM."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvstore
from kvstore.clock import SystemClock
from kvstore.connectors.common import CacheClient, ConnectorCounters, UnsupportedModelError, Writer
from kvstore.connectors.vllm.layout import rank_layout, rank_part
from kvstore.connectors.vllm.pages import check_copies, engine_pages
from kvstore.connectors.vllm.plan import BlockJob, PackedTokens, StepPlan
from kvstore.connectors.vllm.scheduler import SchedulerParts, SchedulerSide
from kvstore.connectors.vllm.settings import VllmSettings
from kvstore.connectors.vllm.soundness import Soundness
from kvstore.connectors.vllm.worker import Engine, WorkerParts, WorkerSide
from kvstore.errors import UnavailableError
from kvstore.testing.patience import ANSWER_SECONDS
from kvstore.testing.serving import ServedStore
from kvstore.tiers.device import open_copier
from kvstore.types import KvLayout, Namespace, Root, Tier

MIB = 1 << 20
BLOCK_TOKENS, BLOCKS = 4, 64
LAYOUT = KvLayout(layers=2, kv_heads=2, head_dim=8, dtype="float32", block_tokens=BLOCK_TOKENS, engine="vllm")
SETTINGS = VllmSettings(lookup_seconds=20.0, promote_seconds=5.0, buffer_bytes=MIB)


def new_caches(layout):
    """vLLM's tensors (blocks, heads, tokens, key and value) of each layer; tokens lie before heads in odd ones."""
    heads, width = layout.kv_heads, 2 * layout.head_dim
    return {
        f"layer {layer}": torch.zeros(BLOCKS, heads, BLOCK_TOKENS, width)
        if layer % 2 == 0
        else torch.zeros(BLOCKS, BLOCK_TOKENS, heads, width).transpose(1, 2)
        for layer in range(layout.layers)
    }


class Rank:
    """A worker and its memory. `computed` writes what a model of this rank would have computed."""

    def __init__(self, store, layout, number):
        self.number = number
        self.layout = rank_layout(layout)
        self.caches = new_caches(self.layout)
        self.counters = ConnectorCounters()
        client = CacheClient(store, self.counters)
        ranks = layout.tensor_parallel
        parts = WorkerParts(
            client,
            client,
            self.counters,
            SystemClock(),
            SETTINGS,
            layout,
            self.layout,
            lambda revision: Namespace(model="m", revision=revision, layout=layout),
            Writer() if ranks == 1 else Writer(number, rank_part(layout, number)),
            number in layout.writers,
        )
        pages = engine_pages(self.caches, list(self.caches), BLOCKS, self.layout)
        self.copier = open_copier(pages.device)
        check_copies(self.copier, pages, list(self.caches.values()))
        self.side = WorkerSide(parts, Engine(pages, self.copier))

    def expected(self, tokens, block):
        """Keys and values of a block depend on all tokens before it, on layer, head and rank."""
        seed = hash(tuple(tokens[: (block + 1) * BLOCK_TOKENS])) % 2**31
        values = []
        for layer in range(self.layout.layers):
            generator = torch.Generator().manual_seed((seed + 7919 * layer + 104729 * self.number) % 2**31)
            values.append(torch.rand(self.layout.kv_heads, BLOCK_TOKENS, 2 * self.layout.head_dim, generator=generator))
        return values

    def compute(self, tokens, block, block_id):
        for tensor, values in zip(self.caches.values(), self.expected(tokens, block), strict=True):
            tensor[block_id] = values

    def has(self, tokens, block, block_id):
        pairs = zip(self.caches.values(), self.expected(tokens, block), strict=True)
        return all(torch.equal(tensor[block_id], values) for tensor, values in pairs)

    def close(self):
        self.side.close()
        self.copier.close()


@dataclass
class Request:
    """What the connector reads of vLLM's requests."""

    request_id: str
    prompt_token_ids: list
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    cache_salt: str | None = None
    all_token_ids: list = field(default_factory=list)
    sampling_params: object = None
    pooling_params: object = None
    prompt_embeds: object = None
    lora_request: object = None
    mm_features: tuple = ()
    skip_reading_prefix_cache: bool = False
    resumable: bool = False

    def __post_init__(self):
        self.all_token_ids = list(self.prompt_token_ids)

    @property
    def num_tokens(self):
        return len(self.all_token_ids)

    @property
    def num_prompt_tokens(self):
        return len(self.prompt_token_ids)


class TinyEngine:
    """vLLM's order of calls for requests that run one at a time, without a prefix cache of its own."""

    def __init__(self, store, layout=LAYOUT, settings=SETTINGS, worker_stores=()):
        self.counters = ConnectorCounters()
        parts = SchedulerParts(
            CacheClient(store, self.counters),
            self.counters,
            SystemClock(),
            settings,
            layout,
            lambda revision: Namespace(model="m", revision=revision, layout=layout),
        )
        self.scheduler = SchedulerSide(parts, lambda: "revision")
        stores = worker_stores or [store] * layout.tensor_parallel
        self.ranks = [Rank(store, layout, number) for number, store in enumerate(stores)]
        self.free = list(range(BLOCKS))
        self.waiting_frees = {}
        self.received = set()
        self.invalid = set()
        self.scheduler.wait_started(30)
        for rank in self.ranks:
            rank.side._check.wait(ANSWER_SECONDS)
        self.step()

    def step(self):
        """One step of the workers; what they say of blocks and requests is collected over all ranks."""
        plan = self.scheduler.take_plan()
        worst, sent, received, invalid = Soundness.SOUND, [], [], set()
        for rank in self.ranks:
            rank.side.start_loads(plan)
            rank.side.start_stores(plan)
            ended = rank.side.take_finished()
            sent.append(ended[0])
            received.append(ended[1])
            invalid |= rank.side.take_failed_blocks()
            worst = max(worst, rank.side.soundness)
        self.scheduler.workers_are(worst)
        self.collect(sent, received, invalid)

    def collect(self, sent, received, invalid):
        self.partly = getattr(self, "partly", {"sent": {}, "received": {}})
        whole = {}
        for kind, found in (("sent", sent), ("received", received)):
            counts = self.partly[kind]
            for names in found:
                for name in names:
                    counts[name] = counts.get(name, 0) + 1
            whole[kind] = {name for name, count in counts.items() if count == len(self.ranks)}
            self.partly[kind] = {name: count for name, count in counts.items() if name not in whole[kind]}
        self.scheduler.worker_said(whole["sent"], whole["received"], invalid)
        self.received |= whole["received"]
        self.invalid |= invalid
        for name in whole["sent"]:
            self.free += self.waiting_frees.pop(name)

    def until(self, condition):
        for _ in range(100_000):
            if condition():
                return
            self.step()
        raise AssertionError("the connector did not come to an end")

    def run(self, name, prompt, generated=0, salt=None):
        """A request from its arrival to its end; returns how many tokens were loaded."""
        request = Request(name, prompt, cache_salt=salt)
        self.scheduler.add(request)
        answer = self.ask(request)
        count = -(-(len(prompt) + generated) // BLOCK_TOKENS)
        block_ids = [self.free.pop() for _ in range(count)]
        self.scheduler.allocated(request, (block_ids,), answer)
        loaded = 0
        if answer:
            self.until(lambda: name in self.received)
            bad = [place for place, block_id in enumerate(block_ids) if block_id in self.invalid]
            loaded = bad[0] * BLOCK_TOKENS if bad else answer
            request.num_computed_tokens = loaded
        self.check_loaded(prompt, block_ids, loaded)
        self.compute(request, block_ids, generated)
        if self.scheduler.finished(request, (block_ids,)):
            self.waiting_frees[name] = block_ids
        else:
            self.free += block_ids
        self.until(lambda: not self.scheduler.held_requests and not self.scheduler.leased_requests)
        for rank in self.ranks:
            rank.side._store_thread.submit(lambda: None).result(30)
        return loaded

    def ask(self, request):
        answer = None
        while answer is None:
            answer, is_later = self.scheduler.matched_tokens(request, 0)
            if answer is None:
                self.step()
        assert is_later is (answer > 0)
        return answer

    def check_loaded(self, prompt, block_ids, loaded):
        for block in range(loaded // BLOCK_TOKENS):
            assert all(rank.has(prompt, block, block_ids[block]) for rank in self.ranks)

    def compute(self, request, block_ids, generated):
        """Prefill in two chunks, then a token a step."""
        left = request.num_prompt_tokens - request.num_computed_tokens
        for chunk in [left // 2, left - left // 2, *[1] * generated]:
            before = request.num_computed_tokens
            tokens = request.all_token_ids
            for block in range(before // BLOCK_TOKENS, (before + chunk) // BLOCK_TOKENS):
                for rank in self.ranks:
                    rank.compute(tokens, block, block_ids[block])
            self.scheduler.scheduled(request.request_id, before + chunk, lambda: (block_ids,))
            self.step()
            request.num_computed_tokens += chunk
            if request.num_computed_tokens == request.num_tokens:
                request.all_token_ids.append(request.num_tokens % 97)

    def close(self):
        self.scheduler.close()
        for rank in self.ranks:
            rank.close()


@pytest.fixture
def new_engine():
    with ExitStack() as stack:

        def start(*given, **named):
            engine = TinyEngine(*given, **named)
            stack.callback(engine.close)
            return engine

        yield start


@pytest.fixture
def store():
    with kvstore.open(None, host_bytes=4 * MIB) as opened:
        yield opened


def prompt_of(count, seed=1):
    return np.random.default_rng(seed).integers(0, 1000, count).tolist()


def test_a_second_engine_loads_what_the_first_computed_and_generated(store, new_engine):
    first, second = new_engine(store), new_engine(store)
    prompt = prompt_of(22)
    assert 0 == first.run("a", prompt, generated=10)
    generated = [*prompt, *(number % 97 for number in range(22, 31))]
    assert 20 == second.run("b", prompt)
    assert 28 == second.run("c", [*generated, 5])
    assert {} == first.counters.snapshot(0).failures | second.counters.snapshot(0).failures
    assert (0, 0) == (store.stats().leases, store.stats().stages)
    assert BLOCKS == len(first.free) == len(second.free)
    assert (3, 3) == (store.stats().lookups, sum(e.counters.snapshot(0).lookups for e in (first, second)))


@pytest.mark.parametrize("count", [1, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 3 * BLOCK_TOKENS])
def test_the_engine_keeps_a_token_to_compute_at_every_length(store, new_engine, count):
    engine = new_engine(store)
    assert 0 == engine.run("a", prompt_of(count))
    assert (count - 1) // BLOCK_TOKENS * BLOCK_TOKENS == engine.run("b", prompt_of(count))


def test_other_salts_and_weights_find_nothing(store, new_engine):
    engine = new_engine(store)
    engine.run("a", prompt_of(20), salt="x")
    assert [0, 16] == [engine.run("b", prompt_of(20), salt="y"), engine.run("c", prompt_of(20), salt="x")]
    engine.scheduler.reset()
    assert [0, 16] == [engine.run("d", prompt_of(20), salt="x"), engine.run("e", prompt_of(20), salt="x")]


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 2), st.integers(0, 9)), min_size=1, max_size=8))
def test_what_is_loaded_is_what_a_dictionary_of_prefixes_has(requests):
    stored = set()
    with kvstore.open(None, host_bytes=4 * MIB) as store:
        engine = TinyEngine(store)
        for number, (count, seed, generated) in enumerate(requests):
            prompt = prompt_of(30, seed)[:count]
            naive = 0
            while naive + BLOCK_TOKENS < count and tuple(prompt[: naive + BLOCK_TOKENS]) in stored:
                naive += BLOCK_TOKENS
            assert naive == engine.run(f"r{number}", prompt, generated)
            tokens = [*prompt, *(place % 97 for place in range(count, count + generated))]
            stored |= {tuple(tokens[:end]) for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS)}
        engine.close()


def test_two_ranks_each_have_their_part_over_one_server(tmp_path, store, new_engine):
    layout = KvLayout(
        layers=2, kv_heads=4, head_dim=8, dtype="float32", block_tokens=BLOCK_TOKENS, tensor_parallel=2, engine="vllm"
    )
    address = f"unix://{tmp_path}/s"
    with ServedStore(store, [address]), ExitStack() as stack:
        clients = [stack.enter_context(kvstore.connect(address)) for _ in range(3)]
        engine = new_engine(clients[0], layout, worker_stores=clients[1:])
        assert 0 == engine.run("a", prompt_of(40))
        assert 36 == engine.run("b", prompt_of(40))
        assert [36, 36] == [rank.counters.snapshot(0).loaded_tokens for rank in engine.ranks]
        assert {} == engine.ranks[0].counters.snapshot(0).failures | engine.ranks[1].counters.snapshot(0).failures
        engine.close()


def test_a_load_that_fails_is_reported_and_not_tried_again(store, new_engine):
    engine = new_engine(store)
    engine.run("a", prompt_of(20))
    client = engine.ranks[0].side._parts.client
    client._store = None  # from now on every load of this worker fails
    assert 0 == engine.run("b", prompt_of(20))
    assert 4 == len(engine.invalid)
    assert BLOCKS == len(engine.free)


def test_a_server_that_never_answers_costs_the_deadline_and_no_more(new_engine):
    class Gone:
        def __getattr__(self, name):
            raise UnavailableError("gone")

    engine = new_engine(Gone())
    assert 0 == engine.run("a", prompt_of(20))
    assert {"starting": 1} == engine.counters.snapshot(0).bypassed
    assert 0 == engine.counters.snapshot(0).lookups


def test_the_tier_of_what_was_found_is_told(store, new_engine):
    engine = new_engine(store)
    engine.run("a", prompt_of(20))
    request = Request("b", prompt_of(20))
    engine.scheduler.add(request)
    assert 16 == engine.ask(request)
    engine.scheduler.allocated(request, (list(range(5)),), 16)
    assert {Tier.HOST: 16} == engine.scheduler.hit_tiers(request, 16)
    engine.until(lambda: "b" in engine.received)


@pytest.mark.parametrize("moment", ["new", "asked", "found", "loading", "loaded"])
def test_an_abort_at_any_moment_gives_back_every_lease_and_block(store, new_engine, moment):
    engine = new_engine(store)
    engine.run("a", prompt_of(20))
    request = Request("b", prompt_of(20))
    engine.scheduler.add(request)
    if moment == "asked":
        engine.scheduler.matched_tokens(request, 0)
    elif moment != "new":
        assert 16 == engine.ask(request)
    if moment in ("loading", "loaded"):
        engine.scheduler.allocated(request, (list(range(5)),), 16)
    if moment == "loaded":
        engine.until(lambda: "b" in engine.received)
        request.num_computed_tokens = 16
    assert engine.scheduler.finished(request, (list(range(5)),)) is False
    engine.until(lambda: not engine.scheduler.leased_requests and not store.stats().leases)
    assert 0 == engine.scheduler.held_requests


def test_memory_of_another_shape_is_refused():
    caches = new_caches(LAYOUT)
    with pytest.raises(UnsupportedModelError, match="has no cache tensor of layer other"):
        engine_pages(caches, ["other"], BLOCKS, LAYOUT)
    for changed in ({"layer 0": torch.zeros(BLOCKS, 2, 8, 8)}, {"layer 1": torch.zeros(BLOCKS, 2, 4, 16).half()}):
        with pytest.raises(UnsupportedModelError, match="expected"):
            engine_pages(caches | changed, list(caches), BLOCKS, LAYOUT)


def test_loads_that_cannot_be_begun_are_reported_as_failed(store, new_engine, monkeypatch):
    engine = new_engine(store)
    side = engine.ranks[0].side
    engine.run("a", prompt_of(20))
    monkeypatch.setattr(side._threads, "submit", None)
    none = PackedTokens().first(0)
    plan = StepPlan("revision", loads=[BlockJob("b", Root(), none, 0, (1, 2)), BlockJob("c", Root(), none, 0, (3,))])
    with pytest.raises(TypeError):
        side.start_loads(plan)
    assert (set(), {"b", "c"}) == side.take_finished()
    assert {1, 2, 3} == side.take_failed_blocks()


def test_a_worker_that_is_switched_off_still_says_when_it_reads_no_block_any_more(store, new_engine):
    engine = new_engine(store)
    engine.run("a", prompt_of(20))
    engine.ranks[0].side.switch_off()
    request = Request("b", prompt_of(20, seed=2))
    engine.scheduler.add(request)
    engine.scheduler.scheduled("b", 20, lambda: (list(range(5)),))
    request.num_computed_tokens = 20
    assert engine.scheduler.finished(request, (list(range(5)),)) is True
    engine.waiting_frees["b"] = []
    engine.until(lambda: not engine.scheduler.held_requests)
    assert engine.scheduler._soundness is Soundness.UNSOUND
    assert 0 == engine.run("c", prompt_of(20))


class LayeredEngine(TinyEngine):
    """vLLM's order of calls where loads and stores go by layer: a load is made inside the step that uses it."""

    def __init__(self, store):
        super().__init__(store)
        self.scheduler._parts.by_layer = True
        for rank in self.ranks:
            rank.side._layers = {name: place for place, name in enumerate(rank.caches)}

    def step(self):
        plan = self.scheduler.take_plan()
        side = self.ranks[0].side
        side.start_loads(plan)
        for name in self.ranks[0].caches:
            side.wait_layer(name)
            side.save_layer(name, plan)
        side.start_stores(plan)
        sent, received = side.take_finished()
        assert received == set()  # the request runs: vLLM waits for no load
        ended = side.take_loaded_in_step()
        self.scheduler.workers_are(side.soundness)
        self.collect([sent], [ended], side.take_failed_blocks())
        self.scheduler.layers_said(ended, side.layer_failures)

    def ask(self, request):
        answer = None
        while answer is None:
            answer, is_later = self.scheduler.matched_tokens(request, 0)
            if answer is None:
                self.step()
        assert is_later is False
        return answer


@pytest.fixture
def layered(store):
    with ExitStack() as stack:

        def start():
            engine = LayeredEngine(store)
            stack.callback(engine.close)
            return engine

        yield start


def test_what_is_stored_by_layer_is_loaded_by_layer(store, layered):
    first, second = layered(), layered()
    prompt = prompt_of(22)
    assert [0, 20] == [first.run("a", prompt, generated=10), second.run("b", prompt)]
    assert BLOCKS == len(first.free) == len(second.free)
    second.until(lambda: (store.stats().leases, store.stats().stages) == (0, 0))


def test_nothing_is_stored_that_may_have_been_computed_from_a_load_that_failed(store, layered, monkeypatch):
    first, second = layered(), layered()
    prompt = prompt_of(22)
    first.run("a", prompt)
    side = second.ranks[0].side
    monkeypatch.setattr(side._parts.client, "load_leased", lambda _match, _load: None)
    before = side._parts.counters.snapshot(0).stored_blocks
    plan = StepPlan()
    tokens = packed([*prompt, *prompt_of(8, seed=2)])
    plan.loads.append(BlockJob("b", Root(), tokens, 0, (1, 2, 3, 4, 5)))
    plan.stores.append(BlockJob("b", Root(), tokens, 5, (6, 7)))
    side.start_loads(plan)
    for name in second.ranks[0].caches:
        side.wait_layer(name)
        side.save_layer(name, plan)
    side.start_stores(plan)
    assert {1, 2, 3, 4, 5} == side.take_failed_blocks()
    assert ({"b"}, 1) == (side.take_loaded_in_step(), side.layer_failures)
    unaware = StepPlan(stores=list(plan.stores))
    side.start_stores(unaware)  # planned before anybody knew
    side._store_thread.submit(lambda: None).result(30)
    snapshot = side._parts.counters.snapshot(0)
    assert (before, 4) == (snapshot.stored_blocks, snapshot.dropped_blocks)
    side.start_stores(
        StepPlan(stores=[BlockJob("c", Root(), packed(prompt_of(8, seed=3)), 0, (1, 2))], known_failures=1)
    )
    side._store_thread.submit(lambda: None).result(30)
    assert before + 2 == side._parts.counters.snapshot(0).stored_blocks


def packed(tokens):
    known = PackedTokens()
    known.extend_to(tokens, len(tokens))
    return known.first(len(tokens))
