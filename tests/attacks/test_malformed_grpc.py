"""Messages that no client of ours sends: each gets a typed error, the server lives, the store stays as it is."""

from __future__ import annotations

import itertools
import queue
import random
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass

import kvstore
from kvstore.testing.blocks import store_prompt, verified_blocks
from kvstore.testing.conformance import BLOCKS, LAYOUT, MIB, PROMPT
from kvstore.testing.patience import ANSWER_SECONDS
from kvstore.testing.serving import ServedStore
from kvstore.tokens import as_token_array
from kvstore.transport.convert import namespace_to_proto, prompt_to_proto
from kvstore.transport.limits import ServiceLimits
from kvstore.types import Namespace
from kvstore.v1 import admin_service_pb2 as admin_pb
from kvstore.v1 import block_pb2
from kvstore.v1 import cache_service_pb2 as pb
from kvstore.v1.admin_service_pb2_grpc import AdminServiceStub
from kvstore.v1.cache_service_pb2_grpc import CacheServiceStub

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NAMESPACE = Namespace(model="model", revision="revision", layout=LAYOUT)
LIMITS = ServiceLimits(message_bytes=MIB, frame_bytes=64 * 1024)
INVALID = grpc.StatusCode.INVALID_ARGUMENT
CLOSED = grpc.StatusCode.FAILED_PRECONDITION
FULL = grpc.StatusCode.RESOURCE_EXHAUSTED
UNKNOWN_SESSION = grpc.StatusCode.UNAUTHENTICATED
SERVICES = (
    pb.DESCRIPTOR.services_by_name["CacheService"],
    admin_pb.DESCRIPTOR.services_by_name["AdminService"],
)
NEEDS_NO_SESSION = (
    "Session",
    "GetStats",
    "ReadEvents",
    "WatchEvents",
    "Unpin",
    "Flush",
    "Verify",
    "Scrub",
    "EvictWriter",
    "ListNodes",
    "Drain",
    "Undrain",
    "ListNamespaces",
    "DeleteNamespace",
    "GetDiagnosis",
    "ResetDiagnosis",
)
METHODS = [method for service in SERVICES for method in service.methods]


class Attacker:
    """A raw session on a server that holds one prompt; what it may name is in its fields."""

    def __init__(self, channel: grpc.Channel, store: kvstore.KvStore) -> None:
        self.channel = channel
        self.store = store
        self.cache = CacheServiceStub(channel)
        self.admin = AdminServiceStub(channel)
        requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        requests.put(pb.SessionRequest())
        self.session = self.cache.Session(iter(requests.get, None))
        self.session_id = next(self.session).session_id
        opened = self.cache.OpenNamespace(
            pb.OpenNamespaceRequest(session_id=self.session_id, namespace=namespace_to_proto(NAMESPACE))
        )
        self.ns_id = opened.ns_id
        tokens = as_token_array(PROMPT)
        self.prompt = prompt_to_proto(opened.ns_id, None, tokens)
        self.lease_id = 1
        self.cache.Lease(
            pb.LeaseRequest(session_id=self.session_id, prompt=self.prompt, blocks=BLOCKS, lease_id=self.lease_id)
        )
        self.stage_ids = itertools.count(1)
        self.new_prompt = prompt_to_proto(opened.ns_id, None, tokens + 1000)

    def stage(self) -> int:
        stage_id = next(self.stage_ids)
        self.cache.Stage(pb.StageRequest(session_id=self.session_id, prompt=self.new_prompt, stage_id=stage_id))
        return stage_id

    def write(self, **start: Any) -> Callable[..., Any]:
        opening = pb.WriteRequest(start=pb.WriteStart(session_id=self.session_id, **start))

        def call(*frames: bytes) -> Any:
            return self.cache.Write(iter([opening, *(pb.WriteRequest(frame=frame) for frame in frames)]))

        return call


@pytest.fixture
def attacker() -> Iterator[Attacker]:
    with kvstore.open(None, host_bytes=4 * MIB) as store:
        store_prompt(store, NAMESPACE, PROMPT)
        with ServedStore(store, limits=LIMITS) as served, grpc.insecure_channel(served.addresses[0]) as channel:
            attacker = Attacker(channel, store)
            yield attacker
            attacker.session.cancel()
            with kvstore.connect(served.addresses[0]) as client:
                assert verified_blocks(client, NAMESPACE, PROMPT) == BLOCKS
            assert served.server.failures == 0
        stats = store.stats()
        assert (stats.stored_blocks, stats.leases, stats.stages, stats.pins) == (BLOCKS, 0, 0, 0)


def refused(call: Callable[[], Any], code: grpc.StatusCode, details: str = "") -> None:
    with pytest.raises(grpc.RpcError) as failed:
        call()
    assert (failed.value.code(), details in failed.value.details()) == (code, True), failed.value.details()


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_bytes_that_are_no_message_are_refused(attacker: Attacker, method: Any):
    path = f"/{method.containing_service.full_name}/{method.name}"
    random_bytes = random.Random(method.name).randbytes
    for raw in (
        b"\xff",
        b"\x0a\xff\xff\xff\xff\x0f",
        b"\x0a" * 7,
        b"\x0b" * 50,
        random_bytes(3000),
        b"\x0a\x02\xff\xfe",
    ):
        code = _code_of_raw(attacker.channel, path, method, raw)
        # Fields nobody knows are skipped, as protobuf wants it; a session's name is then missing.
        assert code in (INVALID, UNKNOWN_SESSION, *((None,) if method.name in NEEDS_NO_SESSION else ())), raw[:10]


def test_unknown_sessions_are_refused_everywhere(attacker: Attacker):
    for session_id in (b"", b"x" * 16, b"x" * 1000):
        for method in METHODS:
            if "session_id" in method.input_type.fields_by_name:
                request = GetMessageClass(method.input_type)(session_id=session_id)
                path = f"/{method.containing_service.full_name}/{method.name}"
                code = _code_of_raw(attacker.channel, path, method, request.SerializeToString())
                assert code is UNKNOWN_SESSION, method.name
        start = pb.WriteRequest(start=pb.WriteStart(session_id=session_id))
        refused(lambda start=start: attacker.cache.Write(iter([start])), UNKNOWN_SESSION)


def test_unknown_namespaces_leases_and_stages_are_refused(attacker: Attacker):
    session_id = attacker.session_id
    for ns_id, code in ((b"", INVALID), (b"x" * 15, INVALID), (b"x" * 16, CLOSED)):
        prompt = block_pb2.Prompt(ns_id=ns_id, tokens=bytes(16))
        refused(lambda p=prompt: attacker.cache.Match(pb.MatchRequest(session_id=session_id, prompt=p)), code)
        refused(lambda p=prompt: attacker.cache.Lease(pb.LeaseRequest(session_id=session_id, prompt=p)), code)
        refused(lambda p=prompt: attacker.cache.Stage(pb.StageRequest(session_id=session_id, prompt=p)), code)
        refused(lambda p=prompt: attacker.admin.Pin(admin_pb.PinRequest(session_id=session_id, prompt=p)), code)
        refused(lambda p=prompt: attacker.admin.Evict(admin_pb.EvictRequest(session_id=session_id, prompt=p)), code)
        refused(lambda n=ns_id: attacker.admin.Clear(admin_pb.ClearRequest(session_id=session_id, ns_id=n)), code)
    for unknown in (0, 999, 2**64 - 1):
        load = pb.LoadRequest(session_id=session_id, lease_id=unknown, blocks=1)
        refused(lambda load=load: list(attacker.cache.Load(load)), CLOSED)
        commit = pb.CommitRequest(session_id=session_id, stage_id=unknown)
        refused(lambda commit=commit: attacker.cache.Commit(commit), CLOSED)
        refused(lambda unknown=unknown: attacker.write(stage_id=unknown, blocks=1)(b"x"), CLOSED)
        attacker.cache.Release(pb.ReleaseRequest(session_id=session_id, lease_id=unknown))
        attacker.cache.Abort(pb.AbortRequest(session_id=session_id, stage_id=unknown))


@pytest.mark.parametrize("tokens", [b"1", b"12345", bytes(17)])
def test_half_a_token_is_refused(attacker: Attacker, tokens: bytes):
    prompt = block_pb2.Prompt(ns_id=attacker.ns_id, tokens=tokens)
    refused(lambda: attacker.cache.Match(pb.MatchRequest(session_id=attacker.session_id, prompt=prompt)), INVALID)
    refused(lambda: attacker.cache.Stage(pb.StageRequest(session_id=attacker.session_id, prompt=prompt)), INVALID)
    refused(lambda: attacker.admin.Pin(admin_pb.PinRequest(session_id=attacker.session_id, prompt=prompt)), INVALID)


def test_namespaces_that_cannot_be_are_refused(attacker: Attacker):
    good = namespace_to_proto(NAMESPACE)
    spoilt: list[Callable[[block_pb2.Namespace], object]] = [
        lambda message: message.ClearField("layout"),
        lambda message: message.ClearField("tenant"),
        lambda message: message.ClearField("revision"),
        lambda message: setattr(message, "model", "x" * 1025),
        lambda message: setattr(message.layout, "layers", 0),
        lambda message: setattr(message.layout, "layers", 2**32 - 1),
        lambda message: setattr(message.layout, "block_tokens", 4097),
        lambda message: setattr(message.layout, "dtype", "float13"),
        lambda message: setattr(message.layout, "kv_form", ""),
        lambda message: setattr(message.layout, "pipeline_parallel", 99),
        lambda message: setattr(message.layout, "engine_layout", 2**31),
    ]
    for spoil in spoilt:
        message = block_pb2.Namespace()
        message.CopyFrom(good)
        spoil(message)
        request = pb.OpenNamespaceRequest(session_id=attacker.session_id, namespace=message)
        refused(lambda request=request: attacker.cache.OpenNamespace(request), INVALID)


@pytest.mark.parametrize("proof", [b"x", b"x" * 32, b"x" * 10_000])
def test_a_proof_made_up_is_refused(attacker: Attacker, proof: bytes):
    request = pb.OpenNamespaceRequest(
        session_id=attacker.session_id, namespace=namespace_to_proto(NAMESPACE), proof=proof
    )
    refused(lambda: attacker.cache.OpenNamespace(request), grpc.StatusCode.PERMISSION_DENIED, "default")


@pytest.mark.parametrize(
    ("sizes", "details"),
    [
        ({"layers": 2**31 - 1, "head_dim": 2**31 - 1}, "bytes"),
        ({"layers": 2**31 - 1, "pipeline_parallel": 2**31 - 1}, "parts"),
        ({"kv_heads": 2**30, "tensor_parallel": 2**30}, "parts"),
    ],
)
def test_layouts_of_absurd_size_are_refused_without_being_counted_out(
    attacker: Attacker, sizes: dict[str, int], details: str
):
    message = namespace_to_proto(NAMESPACE)
    for name, value in sizes.items():
        setattr(message.layout, name, value)
    request = pb.OpenNamespaceRequest(session_id=attacker.session_id, namespace=message)
    refused(lambda: attacker.cache.OpenNamespace(request, timeout=5), INVALID, details)


def test_a_block_of_gigabytes_is_no_reason_to_allocate_them(attacker: Attacker):
    message = namespace_to_proto(NAMESPACE)
    message.layout.head_dim = 2**30
    opened = attacker.cache.OpenNamespace(pb.OpenNamespaceRequest(session_id=attacker.session_id, namespace=message))
    prompt = block_pb2.Prompt(ns_id=opened.ns_id, tokens=bytes(16))
    request = pb.StageRequest(session_id=attacker.session_id, prompt=prompt, stage_id=1)
    assert attacker.cache.Stage(request).blocks == 0
    refused(lambda: attacker.write(stage_id=1, blocks=1)(b"x"), INVALID, "by parts")


def test_loads_outside_of_the_lease_are_refused(attacker: Attacker):
    for from_block, blocks in ((0, BLOCKS + 1), (BLOCKS, 1), (2**32 - 1, 1), (1, 2**32 - 1)):
        load = pb.LoadRequest(
            session_id=attacker.session_id, lease_id=attacker.lease_id, from_block=from_block, blocks=blocks
        )
        refused(lambda load=load: list(attacker.cache.Load(load)), INVALID)
    for part in (1, 2**32 - 1):
        load = pb.LoadRequest(session_id=attacker.session_id, lease_id=attacker.lease_id, blocks=1, part=part)
        refused(lambda load=load: list(attacker.cache.Load(load)), INVALID)
    nothing = pb.LoadRequest(session_id=attacker.session_id, lease_id=attacker.lease_id, from_block=BLOCKS)
    (only,) = attacker.cache.Load(nothing)
    assert (only.summary.blocks, only.summary.requested_blocks) == (0, 0)


def test_a_lease_of_more_blocks_than_the_prompt_has_is_refused(attacker: Attacker):
    for blocks in (BLOCKS + 1, 2**32 - 1):
        request = pb.LeaseRequest(session_id=attacker.session_id, prompt=attacker.prompt, blocks=blocks)
        refused(lambda request=request: attacker.cache.Lease(request), INVALID)


def test_a_hint_that_says_nothing_or_what_cannot_be_is_refused(attacker: Attacker):
    named = {"session_id": attacker.session_id, "prompt": attacker.prompt}
    refused(lambda: attacker.cache.Hint(pb.HintRequest(**named)), INVALID, "the hint says neither")
    for seconds, nanos in ((-1, 0), (0, -1), (10**9, 0), (2**63 - 1, 2**31 - 1), (-(2**63), 0)):
        request = pb.HintRequest(**named)
        request.next.seconds, request.next.nanos = seconds, nanos
        refused(lambda request=request: attacker.cache.Hint(request), INVALID, "seconds is")


def test_a_prefetch_that_waits_for_what_cannot_be_is_refused(attacker: Attacker):
    named = {"session_id": attacker.session_id, "prompt": attacker.prompt}
    refused(lambda: attacker.cache.Prefetch(pb.PrefetchRequest(**named)), INVALID, "prefetch id 0")
    for seconds, nanos in ((-1, 0), (0, -1), (11, 0), (2**63 - 1, 2**31 - 1), (-(2**63), 0)):
        request = pb.PrefetchRequest(**named, prefetch_id=1)
        request.wait.seconds, request.wait.nanos = seconds, nanos
        refused(lambda request=request: attacker.cache.Prefetch(request), INVALID, "wait is")
    nobody = pb.CancelPrefetchRequest(session_id=attacker.session_id, prefetch_id=2**64 - 1)
    attacker.cache.CancelPrefetch(nobody)
    found = attacker.cache.Prefetch(pb.PrefetchRequest(**named, prefetch_id=1))
    assert (BLOCKS, True) == (found.host_blocks, found.done)


def test_a_lease_of_what_is_no_tier_is_refused(attacker: Attacker):
    request = pb.LeaseRequest(session_id=attacker.session_id, prompt=attacker.prompt, blocks=1, lease_id=99)
    for tier in (0, 5, -1, 2**31 - 1):
        del request.tiers[:]
        request.tiers.append(tier)
        refused(lambda: attacker.cache.Lease(request), INVALID, "tiers are")


@pytest.mark.parametrize("lease_id", [0, 1])
def test_an_id_that_is_none_or_in_use_is_refused(attacker: Attacker, lease_id: int):
    request = pb.LeaseRequest(session_id=attacker.session_id, prompt=attacker.prompt, lease_id=lease_id)
    refused(lambda: attacker.cache.Lease(request), INVALID, "lease id")
    stage_id = attacker.stage()
    for used in (0, stage_id):
        again = pb.StageRequest(session_id=attacker.session_id, prompt=attacker.new_prompt, stage_id=used)
        refused(lambda again=again: attacker.cache.Stage(again), INVALID, "stage id")
    attacker.cache.Abort(pb.AbortRequest(session_id=attacker.session_id, stage_id=stage_id))


def test_writes_of_the_wrong_size_end_their_stage_and_leave_nothing(attacker: Attacker):
    row = LAYOUT.block_bytes
    wrong = [
        (bytes(row - 1),),
        (bytes(row + 1),),
        (),
        (b"",),
        (bytes(row), bytes(row)),
        (bytes(LIMITS.frame_bytes + 1),),
    ]
    for frames in wrong:
        stage_id = attacker.stage()
        refused(lambda frames=frames, stage_id=stage_id: attacker.write(stage_id=stage_id, blocks=1)(*frames), INVALID)
        _wait_until_ended(attacker, stage_id)
    assert attacker.store.match(NAMESPACE, [token + 1000 for token in PROMPT]).blocks == 0


def test_writes_outside_of_the_stage_change_nothing(attacker: Attacker):
    row = LAYOUT.block_bytes
    stage_id = attacker.stage()
    for from_block in (BLOCKS, 2**32 - 1):
        assert attacker.write(stage_id=stage_id, from_block=from_block, blocks=1)(bytes(row)).rows == 0
    assert attacker.write(stage_id=stage_id, blocks=0)().rows == 0
    refused(lambda: attacker.write(stage_id=stage_id, blocks=1, part=1)(bytes(row)), INVALID)
    attacker.cache.Abort(pb.AbortRequest(session_id=attacker.session_id, stage_id=stage_id))


def test_a_write_of_four_billion_rows_takes_no_memory_for_them(attacker: Attacker):
    stage_id = attacker.stage()
    refused(lambda: attacker.write(stage_id=stage_id, blocks=2**32 - 1)(b"x"), INVALID, "before the end")


def test_a_write_that_does_not_begin_with_its_start_is_refused(attacker: Attacker):
    stage_id = attacker.stage()
    start = pb.WriteRequest(start=pb.WriteStart(session_id=attacker.session_id, stage_id=stage_id, blocks=1))
    refused(lambda: attacker.cache.Write(iter([pb.WriteRequest(frame=b"x")])), INVALID, "start")
    refused(lambda: attacker.cache.Write(iter([])), INVALID, "start")
    refused(lambda: attacker.cache.Write(iter([start, start])), INVALID)


def test_a_message_beyond_the_limit_is_refused_before_it_is_read(attacker: Attacker):
    prompt = block_pb2.Prompt(ns_id=attacker.ns_id, tokens=bytes(LIMITS.message_bytes))
    refused(lambda: attacker.cache.Match(pb.MatchRequest(session_id=attacker.session_id, prompt=prompt)), FULL)


@pytest.mark.parametrize("seconds", [0, -5, 10**9, 2**62, 2**63 - 1])
def test_pins_of_no_possible_length_are_refused(attacker: Attacker, seconds: int):
    request = admin_pb.PinRequest(session_id=attacker.session_id, prompt=attacker.prompt)
    request.ttl.seconds = seconds
    refused(lambda: attacker.admin.Pin(request), INVALID)
    request.ttl.seconds = 10**9 - 1
    pin = attacker.admin.Pin(request)
    assert attacker.admin.Unpin(admin_pb.UnpinRequest(pin_id=pin.pin_id)).found


def test_event_reads_out_of_range_are_refused(attacker: Attacker):
    refused(lambda: attacker.cache.ReadEvents(pb.ReadEventsRequest(limit=10_001)), INVALID)
    for seconds in (-1, 11, 2**62):
        request = pb.ReadEventsRequest()
        request.wait.seconds = seconds
        refused(lambda request=request: attacker.cache.ReadEvents(request), INVALID)
    assert attacker.cache.ReadEvents(pb.ReadEventsRequest(after=2**64 - 1)).page.gap


def _send_raw(channel: grpc.Channel, path: str, method: Any, raw: bytes) -> None:
    if method.client_streaming and method.server_streaming:
        next(channel.stream_stream(path)(iter([raw]), timeout=ANSWER_SECONDS))
    elif method.client_streaming:
        channel.stream_unary(path)(iter([raw]), timeout=ANSWER_SECONDS)
    elif method.server_streaming:
        stream = channel.unary_stream(path)(raw, timeout=ANSWER_SECONDS)
        next(stream)
        stream.cancel()
    else:
        channel.unary_unary(path)(raw, timeout=ANSWER_SECONDS)


def _code_of_raw(channel: grpc.Channel, path: str, method: Any, raw: bytes) -> grpc.StatusCode | None:
    try:
        _send_raw(channel, path, method, raw)
    except grpc.RpcError as err:
        return err.code()
    return None


def _wait_until_ended(attacker: Attacker, stage_id: int) -> None:
    """A stage ends in the background, soon after its write failed; a commit then finds none."""
    refused(lambda: attacker.cache.Commit(pb.CommitRequest(session_id=attacker.session_id, stage_id=stage_id)), CLOSED)
