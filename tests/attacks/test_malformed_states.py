"""Requests for sequence states that cannot be: each gets a typed error, the server lives, the store stays as it is."""

from __future__ import annotations

import queue
from typing import TYPE_CHECKING, Any

import grpc
import pytest

import kvstore
from kvstore.testing.conformance import LAYOUT, MIB, PROMPT
from kvstore.testing.serving import ServedStore
from kvstore.testing.states import PIECE_BYTES, STATE_BYTES, STATE_LAYOUT, blob_of, loaded_state, store_state
from kvstore.tokens import as_token_array
from kvstore.transport.convert import namespace_to_proto, prompt_to_proto
from kvstore.types import Namespace
from kvstore.v1 import block_pb2
from kvstore.v1 import cache_service_pb2 as pb
from kvstore.v1.cache_service_pb2_grpc import CacheServiceStub

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STATES = Namespace(model="m", revision="r", layout=STATE_LAYOUT)
BLOCKS = Namespace(model="m", revision="r", layout=LAYOUT)
INVALID = grpc.StatusCode.INVALID_ARGUMENT
PIECES = -(-STATE_BYTES // PIECE_BYTES)


class Attacker:
    """A raw session on a server that holds one state."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.cache = CacheServiceStub(channel)
        requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        requests.put(pb.SessionRequest())
        self.session = self.cache.Session(iter(requests.get, None))
        self.session_id = next(self.session).session_id
        self.ns_ids = {name: self.open(namespace_to_proto(name)).ns_id for name in (STATES, BLOCKS)}

    def open(self, namespace: block_pb2.Namespace) -> pb.OpenNamespaceResponse:
        return self.cache.OpenNamespace(pb.OpenNamespaceRequest(session_id=self.session_id, namespace=namespace))

    def stage(self, namespace: Namespace = STATES, first: int = 1000, **fields: Any) -> pb.StageResponse:
        tokens = [] if first is None else [first, *PROMPT]
        prompt = prompt_to_proto(self.ns_ids[namespace], None, as_token_array(tokens))
        request = pb.StageRequest(session_id=self.session_id, prompt=prompt, stage_id=1, **fields)
        return self.cache.Stage(request)

    def lease(self) -> pb.LeaseResponse:
        prompt = prompt_to_proto(self.ns_ids[STATES], None, as_token_array(PROMPT))
        request = pb.LeaseRequest(session_id=self.session_id, prompt=prompt, blocks=len(PROMPT), lease_id=1)
        return self.cache.Lease(request)

    def write(self, frame: bytes, **start: Any) -> int:
        opening = pb.WriteRequest(start=pb.WriteStart(session_id=self.session_id, stage_id=1, **start))
        return self.cache.Write(iter([opening, pb.WriteRequest(frame=frame)])).rows

    def load(self, **fields: Any) -> list[pb.LoadResponse]:
        return list(self.cache.Load(pb.LoadRequest(session_id=self.session_id, lease_id=1, **fields)))


@pytest.fixture
def attacker() -> Iterator[Attacker]:
    with kvstore.open(None, host_bytes=8 * MIB) as store:
        store_state(store, STATES, PROMPT)
        with ServedStore(store) as served:
            with grpc.insecure_channel(served.addresses[0]) as channel:
                attacker = Attacker(channel)
                yield attacker
                attacker.session.cancel()
            with kvstore.connect(served.addresses[0]) as client:
                tokens, _, blob = loaded_state(client, STATES, PROMPT)
            assert (len(PROMPT), blob_of(STATES, PROMPT, STATE_BYTES).tobytes()) == (tokens, blob.tobytes())
            assert served.server.failures == 0
        stats = store.stats()
        assert (stats.states, stats.stored_blocks, stats.leases, stats.stages) == (1, PIECES, 0, 0)


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(grpc.RpcError) as raised:
        call()
    assert raised.value.code() is INVALID
    return raised.value.details()


@pytest.mark.parametrize("size", [0, 2**40 + 1, 2**64 - 1])
def test_a_state_of_a_size_that_cannot_be_is_refused(attacker: Attacker, size: int):
    assert f"state_bytes is {size}" in refused(lambda: attacker.stage(state_bytes=size))


def test_a_state_larger_than_everything_finds_no_room(attacker: Attacker):
    assert 0 == attacker.stage(state_bytes=2**40).blocks
    request = pb.CommitRequest(session_id=attacker.session_id, stage_id=1)
    assert 2**40 // PIECE_BYTES == attacker.cache.Commit(request).refused_blocks


def test_states_and_blocks_are_not_stored_as_each_other(attacker: Attacker):
    assert "use stage_state()" in refused(attacker.stage)
    assert "has no sequence states" in refused(lambda: attacker.stage(BLOCKS, state_bytes=1))
    assert "no tokens" in refused(lambda: attacker.stage(first=None, state_bytes=1))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda layout: layout.state.ClearField("cut"), "cut is ''"),
        (lambda layout: setattr(layout.state, "piece_bytes", 0), "piece_bytes is 0"),
        (lambda layout: setattr(layout.state, "piece_bytes", 2**32 - 1), "piece_bytes is 4294967295"),
        (lambda layout: setattr(layout.state, "form", "x" * 1025), "at most 1024 bytes"),
        (lambda layout: setattr(layout, "block_tokens", 16), "layout.block_tokens is 16, expected 1"),
        (lambda layout: layout.ranks.append(0), "layout.ranks"),
        (lambda layout: setattr(layout, "layers", 0), "layout.layers is 0"),
    ],
)
def test_a_contradictory_layout_is_refused(attacker: Attacker, change: Callable[[Any], Any], problem: str):
    message = namespace_to_proto(STATES)
    change(message.layout)
    assert problem in refused(lambda: attacker.open(message))


@pytest.mark.parametrize("fields", [{"from_block": 1}, {"blocks": PIECES + 1}, {"blocks": 1, "part": 1}])
def test_a_load_beyond_the_state_is_refused(attacker: Attacker, fields: dict[str, int]):
    leased = attacker.lease()
    assert (PIECES, len(PROMPT), len(PROMPT), STATE_BYTES) == (
        leased.blocks,
        leased.state.tokens,
        leased.state.state_tokens,
        leased.state.state_bytes,
    )
    refused(lambda: attacker.load(**{"blocks": PIECES, **fields}))
    assert PIECES == attacker.load(blocks=PIECES)[-1].summary.blocks


@pytest.mark.parametrize(
    "start", [{"from_block": 1, "blocks": 1}, {"from_block": 2**32 - 1, "blocks": 1}, {"from_block": 0, "blocks": 1}]
)
def test_pieces_that_are_not_wanted_are_left_out(attacker: Attacker, start: dict[str, int]):
    assert 1 == attacker.stage(state_bytes=1).blocks
    taken = attacker.write(bytes(PIECE_BYTES), **start)
    assert (start["from_block"] == 0) == bool(taken)
    attacker.cache.Abort(pb.AbortRequest(session_id=attacker.session_id, stage_id=1))


@pytest.mark.parametrize("size", [1, PIECE_BYTES - 1, PIECE_BYTES + 1])
def test_a_write_of_half_a_piece_ends_the_stage(attacker: Attacker, size: int):
    attacker.stage(state_bytes=STATE_BYTES)
    refused(lambda: attacker.write(bytes(size), blocks=1))
