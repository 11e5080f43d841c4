"""Requests for parts and ranks that cannot be: each gets a typed error, the server lives, the store stays as it is."""

from __future__ import annotations

import dataclasses
import queue
from typing import TYPE_CHECKING, Any

import grpc
import pytest

import kvstore
from kvstore.testing import conformance_sparse
from kvstore.testing.blocks import store_prompt, verified_blocks
from kvstore.testing.conformance import BLOCKS, MIB, PROMPT
from kvstore.testing.serving import ServedStore
from kvstore.tokens import as_token_array
from kvstore.transport.convert import namespace_to_proto, prompt_to_proto
from kvstore.v1 import block_pb2
from kvstore.v1 import cache_service_pb2 as pb
from kvstore.v1.cache_service_pb2_grpc import CacheServiceStub

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RANKED = dataclasses.replace(conformance_sparse.RANKED, secret=None)
STATE_PART = 2
STATE_BYTES = RANKED.layout.part_bytes(STATE_PART)
INVALID = grpc.StatusCode.INVALID_ARGUMENT


class Attacker:
    """A raw session on a server that holds one prompt of two ranks."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.cache = CacheServiceStub(channel)
        requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        requests.put(pb.SessionRequest())
        self.session = self.cache.Session(iter(requests.get, None))
        self.session_id = next(self.session).session_id
        ns_id = self.open(namespace_to_proto(RANKED)).ns_id
        self.prompt = prompt_to_proto(ns_id, None, as_token_array(PROMPT))
        self.new_prompt = prompt_to_proto(ns_id, None, as_token_array(PROMPT) + 1000)

    def open(self, namespace: block_pb2.Namespace) -> pb.OpenNamespaceResponse:
        return self.cache.OpenNamespace(pb.OpenNamespaceRequest(session_id=self.session_id, namespace=namespace))

    def stage(self, stage_id: int, **fields: Any) -> pb.StageResponse:
        request = pb.StageRequest(session_id=self.session_id, prompt=self.new_prompt, stage_id=stage_id, **fields)
        return self.cache.Stage(request)

    def write(self, frame: bytes, **start: Any) -> int:
        opening = pb.WriteRequest(start=pb.WriteStart(session_id=self.session_id, **start))
        return self.cache.Write(iter([opening, pb.WriteRequest(frame=frame)])).rows


@pytest.fixture
def attacker() -> Iterator[Attacker]:
    with kvstore.open(None, host_bytes=8 * MIB) as store:
        store_prompt(store, RANKED, PROMPT)
        with ServedStore(store) as served:
            with grpc.insecure_channel(served.addresses[0]) as channel:
                attacker = Attacker(channel)
                yield attacker
                attacker.session.cancel()
            with kvstore.connect(served.addresses[0]) as client:
                assert verified_blocks(client, RANKED, PROMPT) == BLOCKS
            assert served.server.failures == 0
        stats = store.stats()
        assert (stats.stored_blocks, stats.leases, stats.stages) == (BLOCKS, 0, 0)
        assert store.verify().problems == ()


def refused(call: Callable[[], Any], details: str) -> None:
    with pytest.raises(grpc.RpcError) as failed:
        call()
    assert (failed.value.code(), details in failed.value.details()) == (INVALID, True), failed.value.details()


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda layout: layout.groups.add(), "no kind"),
        (lambda layout: layout.groups.add().recurrent.SetInParent(), "layers is 0"),
        (lambda layout: setattr(layout.groups[0].recurrent, "state_bytes", 2**32 - 1), "state_bytes is"),
        (lambda layout: setattr(layout.groups[0].recurrent, "heads", 3), "heads"),
        (lambda layout: setattr(layout.groups[0].recurrent, "form", "x" * 1025), "form is"),
        (lambda layout: layout.groups.extend([layout.groups[0]] * 8), "9 groups"),
        (lambda layout: layout.ranks.extend([1, 0]), "ascending"),
        (lambda layout: layout.ranks.append(2), "ranks from 0 to 1"),
        (lambda layout: setattr(layout.groups[0].recurrent, "layers", 2**31 - 1), "bytes, this server takes"),
    ],
)
def test_layouts_whose_groups_cannot_be_are_refused(attacker: Attacker, spoil: Callable[[Any], Any], problem: str):
    message = namespace_to_proto(RANKED)
    if problem.startswith("bytes"):
        message.layout.groups[0].recurrent.state_bytes = 2**30
    spoil(message.layout)
    refused(lambda: attacker.open(message), problem)


def test_ranks_and_turns_that_cannot_be_are_refused(attacker: Attacker):
    refused(lambda: attacker.stage(1, rank=2), "rank is 2")
    refused(lambda: attacker.stage(1, rank=2**32 - 1), "rank is")
    refused(lambda: attacker.stage(1, turn_ends=[41]), "a turn ends at 41")
    refused(lambda: attacker.stage(1, turn_ends=[1] * 5000), "5000 ends")


@pytest.mark.parametrize("part", [4, 2**32 - 1])
def test_parts_that_are_not_there_are_refused(attacker: Attacker, part: int):
    attacker.stage(1)
    refused(lambda: attacker.write(b"x", stage_id=1, blocks=1, part=part), f"part is {part}")
    attacker.cache.Lease(
        pb.LeaseRequest(session_id=attacker.session_id, prompt=attacker.prompt, blocks=BLOCKS, lease_id=1)
    )
    load = pb.LoadRequest(session_id=attacker.session_id, lease_id=1, blocks=1, part=part)
    refused(lambda: list(attacker.cache.Load(load)), f"part is {part}")


def test_a_sparse_part_is_not_loaded_where_it_is_not_held(attacker: Attacker):
    attacker.cache.Lease(
        pb.LeaseRequest(session_id=attacker.session_id, prompt=attacker.prompt, blocks=BLOCKS, lease_id=1)
    )
    load = pb.LoadRequest(session_id=attacker.session_id, lease_id=1, blocks=3, part=STATE_PART)
    refused(lambda: list(attacker.cache.Load(load)), f"expected {BLOCKS - 1}..{BLOCKS}")


def test_sparse_rows_far_beyond_the_prompt_are_skipped(attacker: Attacker):
    attacker.stage(1)
    row = bytes(STATE_BYTES)
    for first in (BLOCKS, 2**31, 2**32 - 1):
        assert attacker.write(row, stage_id=1, from_block=first, blocks=1, part=STATE_PART) == 0
    assert attacker.write(row * (BLOCKS + 5), stage_id=1, blocks=BLOCKS + 5, part=STATE_PART) == 2


def test_a_rank_cannot_write_the_parts_of_another(attacker: Attacker):
    attacker.stage(1, rank=1)
    own = bytes(RANKED.layout.part_bytes(1))
    refused(lambda: attacker.write(own, stage_id=1, blocks=1, part=0), "expected one that rank 1 writes")
