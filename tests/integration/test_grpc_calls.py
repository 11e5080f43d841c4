"""The calls of kvstore.v1 as a client sees them: ours, and one made from the generated stubs alone."""

from __future__ import annotations

import dataclasses
import logging
import queue
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import kvstore
from kvstore.errors import (
    InvalidArgumentError,
    InvalidTokensError,
    NoSpaceError,
    PermissionDeniedError,
    UnavailableError,
)
from kvstore.events import EventKind
from kvstore.hashing import secret_proof
from kvstore.testing.blocks import expected_rows, store_prompt, verified_blocks
from kvstore.testing.conformance import BASE, BLOCKS, LAYOUT, MIB, PROMPT, SECRETS
from kvstore.testing.patience import ANSWER_SECONDS
from kvstore.testing.serving import ServedStore, grpc_address
from kvstore.tokens import PROMPT_TOKENS_MAX
from kvstore.transport.convert import namespace_to_proto
from kvstore.transport.limits import ServiceLimits
from kvstore.types import KvLayout, Namespace, Root
from kvstore.v1 import block_pb2, cache_service_pb2, cache_service_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.api import KvStore
    from kvstore.transport.client import Client

OPEN_NAMESPACE = dataclasses.replace(BASE, secret=None)


class CountingObserver:
    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()

    def observe(self, method: str, seconds: float, status: str) -> None:
        assert seconds >= 0
        self.calls[method, status] += 1


@pytest.fixture
def store() -> Iterator[KvStore]:
    with kvstore.open(None, host_bytes=64 * MIB) as store:
        yield store


@pytest.fixture(params=["127.0.0.1:0", "[::1]:0", "unix"])
def served(request: pytest.FixtureRequest, store: KvStore, tmp_path: Path) -> Iterator[ServedStore]:
    listen = f"unix://{tmp_path}/s" if request.param == "unix" else request.param
    with ServedStore(store, [listen], secrets={"tenant": SECRETS}) as served:
        yield served


@pytest.fixture
def local(store: KvStore) -> Iterator[ServedStore]:
    with ServedStore(store, secrets={"tenant": SECRETS}, observer=CountingObserver()) as served:
        yield served


@pytest.fixture
def client(local: ServedStore) -> Iterator[Client]:
    with kvstore.connect(grpc_address(local.addresses[0])) as client:
        yield client


def test_blocks_cross_every_kind_of_address_unchanged(served: ServedStore):
    with kvstore.connect(grpc_address(served.addresses[0])) as client:
        assert store_prompt(client, BASE, PROMPT).blocks == BLOCKS
        assert verified_blocks(client, BASE, PROMPT) == BLOCKS
        assert client.status().serving
        assert client.status().version == kvstore.__version__


def test_blocks_far_larger_and_smaller_than_a_frame_cross_unchanged(store: KvStore):
    large = dataclasses.replace(BASE, layout=KvLayout(layers=8, kv_heads=8, head_dim=64, dtype="float32"))
    limits = ServiceLimits(frame_bytes=100_001, bulk_buffer_bytes=300_000)
    assert large.layout.block_bytes > limits.bulk_buffer_bytes
    served = ServedStore(store, secrets={"tenant": SECRETS}, limits=limits)
    with served, kvstore.connect(grpc_address(served.addresses[0])) as client:
        assert store_prompt(client, large, list(range(80))).blocks == 5
        assert verified_blocks(client, large, list(range(80))) == 5
        assert store_prompt(client, BASE, list(range(8000))).blocks == 2000
        assert verified_blocks(client, BASE, list(range(8000))) == 2000


def test_a_prompt_of_a_million_tokens_passes(client: Client):
    prompt = np.arange(2**20, dtype=np.int64) * 4093 % 2**32
    namespace = dataclasses.replace(
        BASE, layout=KvLayout(layers=1, kv_heads=1, head_dim=1, dtype="int8", block_tokens=16)
    )
    blocks = prompt.size // 16
    rows = np.random.default_rng(1).integers(0, 256, (blocks, namespace.layout.block_bytes), dtype=np.uint8)
    with client.stage(namespace, prompt) as stage:
        assert stage.write_from(rows) == blocks
    match = client.match(namespace, prompt)
    assert match.blocks == blocks
    loaded = np.zeros_like(rows)
    with client.lease(match) as lease:
        assert lease.load_into(loaded).blocks == blocks
    assert np.array_equal(rows, loaded)


def test_the_longest_prompt_is_taken_and_a_longer_one_refused_before_it_is_sent(client: Client):
    assert client.match(BASE, np.zeros(PROMPT_TOKENS_MAX, dtype=np.uint32)).blocks == 0
    with pytest.raises(InvalidTokensError):
        client.match(BASE, np.zeros(PROMPT_TOKENS_MAX + 1, dtype=np.uint32))


def test_any_configured_secret_of_the_tenant_is_accepted_and_no_other(client: Client):
    for secret in SECRETS:
        assert client.match(dataclasses.replace(BASE, secret=secret), PROMPT).blocks == 0
    for wrong in (
        dataclasses.replace(BASE, secret=b"never configured"),
        dataclasses.replace(BASE, tenant="stranger"),
    ):
        with pytest.raises(PermissionDeniedError, match=rf"tenants\.{wrong.tenant}\.secret_files") as refused:
            client.match(wrong, PROMPT)
        assert "never configured" not in str(refused.value)


def test_a_proof_of_another_session_or_namespace_is_refused(local: ServedStore):
    with grpc.insecure_channel(local.addresses[0]) as channel:
        stub = cache_service_pb2_grpc.CacheServiceStub(channel)
        first, second = RawSession(stub), RawSession(stub)
        for challenge, namespace in (
            (first.challenge, BASE),
            (second.challenge, dataclasses.replace(BASE, revision="other")),
        ):
            proof = secret_proof(SECRETS[0], challenge, namespace)
            with pytest.raises(grpc.RpcError) as refused:
                stub.OpenNamespace(
                    cache_service_pb2.OpenNamespaceRequest(
                        session_id=second.session_id, namespace=namespace_to_proto(BASE), proof=proof
                    )
                )
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


def test_one_session_cannot_use_what_another_has_opened(client: Client, local: ServedStore):
    store_prompt(client, BASE, PROMPT)
    lease = client.lease(client.match(BASE, PROMPT))
    with grpc.insecure_channel(local.addresses[0]) as channel:
        stub = cache_service_pb2_grpc.CacheServiceStub(channel)
        session = RawSession(stub)
        prompt = block_pb2.Prompt(ns_id=client.namespace_id(BASE), tokens=bytes(64))
        for call in (
            lambda: stub.Match(cache_service_pb2.MatchRequest(session_id=session.session_id, prompt=prompt)),
            lambda: list(stub.Load(cache_service_pb2.LoadRequest(session_id=session.session_id, lease_id=1, blocks=1))),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                call()
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert lease.load_into(bytearray(LAYOUT.block_bytes)).blocks == 1


def test_the_id_of_a_namespace_is_that_of_its_events(client: Client, store: KvStore):
    store_prompt(client, OPEN_NAMESPACE, PROMPT)
    ns_id = client.namespace_id(OPEN_NAMESPACE)
    assert ns_id == store.namespace_id(OPEN_NAMESPACE)
    assert {event.ns_id for event in client.events().events} == {ns_id}


def test_waiting_for_events_ends_with_the_first_one_or_the_wait(client: Client, local: ServedStore):
    empty = client.events(wait_seconds=0.01)
    assert empty.events == ()
    store_prompt(client, BASE, PROMPT)
    page = client.events(after=empty.next_after, wait_seconds=60)
    assert [event.kind for event in page.events] == [EventKind.STORED]
    ends = client.events(after=page.next_after, limit=10**6)
    assert ends.events == ()


def test_watching_events_delivers_what_happens_later(client: Client, local: ServedStore):
    with grpc.insecure_channel(local.addresses[0]) as channel:
        stub = cache_service_pb2_grpc.CacheServiceStub(channel)
        watch = stub.WatchEvents(cache_service_pb2.WatchEventsRequest(), timeout=ANSWER_SECONDS)
        store_prompt(client, BASE, PROMPT)
        assert [event.sequence for event in next(watch).page.events] == [1]
        client.clear(BASE)
        kinds = [event.kind for event in next(watch).page.events]
        assert block_pb2.EVENT_KIND_CLEARED in kinds
        watch.cancel()


def test_health_and_reflection_answer(local: ServedStore):
    with grpc.insecure_channel(local.addresses[0]) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "kvstore.v1.CacheService", "kvstore.v1.AdminService"):
            answer = health.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        (listed,) = reflection.ServerReflectionInfo(iter([request]))
        names = {service.name for service in listed.list_services_response.service}
        assert {"kvstore.v1.CacheService", "kvstore.v1.AdminService", "grpc.health.v1.Health"} <= names


def test_calls_are_observed_by_name_and_status(store: KvStore):
    observer = CountingObserver()
    with ServedStore(store, observer=observer) as served, kvstore.connect(grpc_address(served.addresses[0])) as client:
        client.match(OPEN_NAMESPACE, PROMPT)
        client.match(OPEN_NAMESPACE, PROMPT)
        with pytest.raises(InvalidArgumentError):
            client.pin(OPEN_NAMESPACE, PROMPT, ttl_seconds=-1)
    calls = observer.calls
    assert calls["Match", "OK"] == 2
    assert calls["OpenNamespace", "OK"] == 1
    assert calls["Pin", "INVALID_ARGUMENT"] == 1
    assert sum(count for (method, _), count in calls.items() if method == "Session") == 1


def test_a_bug_in_the_store_is_logged_counted_and_not_leaked(caplog: pytest.LogCaptureFixture):
    class BrokenStore:
        def namespace_id(self, namespace: Namespace) -> bytes:
            raise ZeroDivisionError("private detail")

    with ServedStore(BrokenStore()) as served, kvstore.connect(grpc_address(served.addresses[0])) as client:
        with caplog.at_level(logging.ERROR), pytest.raises(UnavailableError, match="INTERNAL") as failed:
            client.match(OPEN_NAMESPACE, PROMPT)
        assert "private detail" not in str(failed.value)
        assert served.server.failures == 1
    assert [record.getMessage() for record in caplog.records] == ["call failed: method=OpenNamespace"]


def test_limits_refuse_at_once_and_leave_the_session_usable(store: KvStore):
    limits = ServiceLimits(
        leases_per_session=2, stages_per_session=1, namespaces_per_session=1, pin_tokens=len(PROMPT), sessions=1
    )
    with ServedStore(store, limits=limits) as served, kvstore.connect(grpc_address(served.addresses[0])) as client:
        store_prompt(client, OPEN_NAMESPACE, PROMPT)
        match = client.match(OPEN_NAMESPACE, PROMPT)
        leases = [client.lease(match) for _ in range(2)]
        with pytest.raises(NoSpaceError, match="2 leases"):
            client.lease(match)
        leases[0].release()
        leases[0] = client.lease(match)
        stage = client.stage(OPEN_NAMESPACE, list(range(8)))
        with pytest.raises(NoSpaceError, match="1 stage"):
            client.stage(OPEN_NAMESPACE, list(range(8)))
        stage.abort()
        with pytest.raises(NoSpaceError, match="1 namespaces"):
            client.match(dataclasses.replace(OPEN_NAMESPACE, model="other"), PROMPT)
        with pytest.raises(NoSpaceError, match="pin"):
            client.pin(OPEN_NAMESPACE, [*PROMPT, 1])
        with (
            kvstore.connect(grpc_address(served.addresses[0])) as another,
            pytest.raises(NoSpaceError, match="1 sessions"),
        ):
            another.stats()
        assert client.pin(OPEN_NAMESPACE, PROMPT).blocks == BLOCKS


def test_a_row_larger_than_the_server_takes_is_refused_and_its_parts_are_not(store: KvStore):
    layout = dataclasses.replace(LAYOUT, tensor_parallel=2)
    namespace = dataclasses.replace(OPEN_NAMESPACE, layout=layout)
    rows = expected_rows(namespace, PROMPT)
    parts = np.split(rows, [layout.part_bytes(0)], axis=1)
    limits = ServiceLimits(row_bytes=layout.part_bytes(0))
    with ServedStore(store, limits=limits) as served, kvstore.connect(grpc_address(served.addresses[0])) as client:
        with pytest.raises(kvstore.InvalidBufferError, match="by parts"), client.stage(namespace, PROMPT) as stage:
            stage.write_from(rows)
        with client.stage(namespace, PROMPT) as stage:
            for part, part_rows in enumerate(parts):
                assert stage.write_from(np.ascontiguousarray(part_rows), part=part) == BLOCKS
        assert client.match(namespace, PROMPT).blocks == BLOCKS


def test_the_answer_to_an_absent_server_comes_at_once_and_says_what_to_do(tmp_path: Path):
    client = kvstore.connect(f"unix://{tmp_path}/s", control_seconds=30)
    with client, pytest.raises(UnavailableError, match=rf"unix://{tmp_path}/s .*`kvstore serve`") as refused:
        client.match(BASE, PROMPT)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("address", ["", "nowhere", "http://x:1"])
def test_an_address_that_is_none_is_refused_before_any_call(address: str):
    with pytest.raises(kvstore.ConfigError):
        kvstore.connect(grpc_address(address))


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_a_deadline_that_is_none_is_refused(seconds: float):
    with pytest.raises(kvstore.ConfigError, match="control_seconds"):
        kvstore.connect("127.0.0.1:1", control_seconds=seconds)


def test_text_that_is_not_unicode_is_refused_before_it_is_sent(client: Client):
    with pytest.raises(InvalidArgumentError):
        client.match(BASE, PROMPT, request_id="\ud800")
    for request_id in (5, b"five"):
        with pytest.raises(InvalidArgumentError, match=f"request_id is {request_id!r}, expected a text"):
            client.match(BASE, PROMPT, request_id=request_id)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError):
        client.match(BASE, PROMPT, root=Root(salt="\ud800"))


class RawSession:
    """A session opened with the generated stubs alone; it lives as long as this object."""

    def __init__(self, stub: cache_service_pb2_grpc.CacheServiceStub) -> None:
        requests: queue.SimpleQueue[cache_service_pb2.SessionRequest] = queue.SimpleQueue()
        requests.put(cache_service_pb2.SessionRequest())
        self.stream = stub.Session(iter(requests.get, None))
        greeting = next(self.stream)
        self.session_id, self.challenge = greeting.session_id, greeting.challenge
