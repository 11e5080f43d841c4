"""The bytes of the fast lane: golden ones, versions in both directions, and whatever else may arrive."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import errors
from kvstore.errors import KvstoreError, NoSpaceError
from kvstore.transport import arena_frames, wire
from kvstore.transport.frames import encode_matched
from kvstore.transport.lookup_frames import LookupWriter
from kvstore.transport.status import UnknownSessionError
from kvstore.transport.wire import Delta, Kind, Lane, Method, Verdict, WireFormatError
from kvstore.types import PLAIN_ROOT, KvLayout, Namespace, PrefixMatch, Tier, TierRun
from kvstore.v1 import block_pb2
from kvstore.v1 import cache_service_pb2 as pb

GOLDEN = {
    name: bytes.fromhex(text)
    for name, text in json.loads((Path(__file__).parents[2] / "golden" / "wire_frames.json").read_text()).items()
}
SESSION_ID = bytes(range(16))
NS_ID = bytes(range(16, 32))
TOKENS = struct.pack("<4I", 1, 2, 3, 2**32 - 1)
HELLO = wire.decode_client_hello(wire.encode_client_hello(Lane.CONTROL))
NAMESPACE = Namespace(model="m", revision="r", layout=KvLayout(layers=1, kv_heads=1, head_dim=1, dtype="int8"))


LOOKUP = LookupWriter(SESSION_ID, block_pb2.Prompt(ns_id=NS_ID).SerializeToString(), peek=False, request_id="")


def matched(blocks: int, *runs: TierRun) -> PrefixMatch:
    return PrefixMatch(NAMESPACE, PLAIN_ROOT, None, blocks, runs)  # type: ignore[arg-type]  # no prompt is looked at


MADE = {
    "client hello, control": wire.encode_client_hello(Lane.CONTROL),
    "client hello, bulk": wire.encode_client_hello(Lane.BULK, SESSION_ID),
    "server hello, welcome": wire.encode_server_hello(Verdict.OK, HELLO, 4194304),
    "server hello, version": wire.encode_server_hello(Verdict.VERSION, HELLO, 4194304),
    "match": LOOKUP.whole(7, wire.deadline_ms_of(5), TOKENS),
    "match by growth": LOOKUP.grown(8, 5000, Delta(2, 1, 2, 0x0389E2C8892D5450), TOKENS[8:]),
    "matched": wire.encode_frame(Kind.RESPONSE, encode_matched(matched(1, TierRun(Tier.HOST, 1))), call_id=7),
    "prefetch": wire.encode_frame(
        Kind.REQUEST,
        pb.PrefetchRequest(
            session_id=SESSION_ID, prompt=block_pb2.Prompt(ns_id=NS_ID, tokens=TOKENS), prefetch_id=5
        ).SerializeToString(deterministic=True),
        call_id=10, code=Method.Prefetch, deadline_ms=5000,
    ),
    "prefetched": wire.encode_frame(
        Kind.RESPONSE, pb.PrefetchResponse(host_blocks=1, done=True).SerializeToString(), call_id=10
    ),
    "cancel prefetch": wire.encode_frame(
        Kind.REQUEST,
        pb.CancelPrefetchRequest(session_id=SESSION_ID, prefetch_id=5).SerializeToString(),
        call_id=11, code=Method.CancelPrefetch, deadline_ms=5000,
    ),
    "resend": wire.encode_frame(Kind.RESEND, b"", call_id=8),
    "error": wire.encode_error(NoSpaceError("1024 sessions are open"), 9),
    "data": wire.encode_header(Kind.DATA, 4, call_id=1) + b"rows",
    "client hello, arena": wire.encode_client_hello(Lane.ARENA, SESSION_ID),
    "server hello, no arena": wire.encode_server_hello(Verdict.NO_ARENA, HELLO, 4194304),
    "arena: board": arena_frames.encode_board(1024),
    "arena: board that knows PLACE_PART": arena_frames.encode_board(1024, arena_frames.KNOWS_PLACE_PART),
    "arena: place": arena_frames.encode_place(12, 77, 1),
    "arena: place all parts": arena_frames.encode_place(12, 77, None),
    "arena: place part": arena_frames.encode_place_part(12, 77, 3),
    "arena: mappings": arena_frames.encode_mappings(
        12, [arena_frames.LentExtent(3, 100, 50, 28672, (333, 160), (0, 20480))]
    ),
    "arena: placed": arena_frames.encode_placed(
        12, arena_frames.Placed(9, (3, 4), np.array([100, 101, 7], dtype=np.uint32))
    ),
    "arena: placed part": arena_frames.encode_placed_part(
        12,
        arena_frames.PlacedPart(
            arena_frames.Placed(9, (3, 4), np.array([100, 101, 7], dtype=np.uint32)),
            is_sparse=True,
            first_block=2,
            index=1,
        ),
    ),
    "arena: sync": arena_frames.encode_sync(13, [3, 4]),
    "arena: recalled": arena_frames.encode_recalled(13, [5]),
}  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_the_bytes_never_change(name: str):
    assert GOLDEN[name] == MADE[name]


def test_every_golden_frame_is_read_back():
    for name in ("match", "match by growth", "matched", "resend", "error", "data"):
        raw = GOLDEN[name]
        header = wire.decode_header(raw, 0, 1000)
        assert len(raw) == wire.HEADER_BYTES + header.body_bytes, name
    assert Method.Match is wire.method_of(wire.decode_header(GOLDEN["match"], 0, 1000))
    error = wire.decode_error(8, GOLDEN["error"][wire.HEADER_BYTES :], "there")
    assert (NoSpaceError, "1024 sessions are open") == (type(error), str(error))


@pytest.mark.parametrize(
    ("lowest", "highest", "expected"),
    [(1, 1, Verdict.OK), (1, 9, Verdict.OK), (2, 9, Verdict.VERSION), (0, 0, Verdict.VERSION), (9, 1, Verdict.VERSION)],
)
def test_a_server_takes_clients_whose_versions_meet_its_own_and_names_its_own_to_others(
    lowest: int, highest: int, expected: Verdict
):
    raw = struct.pack("<8sHHB3x16s", wire.MAGIC, lowest, highest, 1, bytes(16))
    hello = wire.decode_client_hello(raw)
    assert expected is wire.answer_hello(hello)
    answer = wire.decode_server_hello(wire.encode_server_hello(wire.answer_hello(hello), hello, 0))
    assert (wire.VERSION_LOWEST, wire.VERSION_HIGHEST) == (answer.lowest, answer.highest)
    assert (1 if expected is Verdict.OK else 0) == answer.version


def test_a_lane_that_is_not_there_is_refused():
    raw = struct.pack("<8sHHB3x16s", wire.MAGIC, 1, 1, 4, bytes(16))
    assert Verdict.VERSION is wire.answer_hello(wire.decode_client_hello(raw))


@given(st.binary(max_size=40))
def test_other_bytes_are_no_hello(raw: bytes):
    if not raw.startswith(wire.MAGIC):
        with pytest.raises(WireFormatError, match="fast lane"):
            wire.decode_client_hello(raw)
        with pytest.raises(WireFormatError, match="fast lane"):
            wire.decode_server_hello(raw)


@given(st.binary(min_size=wire.HEADER_BYTES, max_size=64), st.integers(0, 2**20))
def test_a_header_is_read_as_it_is_written_or_refused(raw: bytes, body_bytes_max: int):
    try:
        header = wire.decode_header(raw, 0, body_bytes_max)
    except WireFormatError:
        return
    assert header.body_bytes <= body_bytes_max
    assert raw[: wire.HEADER_BYTES] == wire.encode_header(
        header.kind,
        header.body_bytes,
        call_id=header.call_id,
        code=header.code,
        flags=header.flags,
        deadline_ms=header.deadline_ms,
    )
    if header.kind is Kind.REQUEST:
        try:
            assert header.code == wire.method_of(header)
        except WireFormatError:
            assert not 1 <= header.code <= len(Method)


@given(st.integers(0, 255), st.binary(max_size=64))
def test_an_error_frame_is_an_error_of_ours_whatever_it_holds(code: int, body: bytes):
    assert isinstance(_error_of(code, body), KvstoreError)


def _error_of(code: int, body: bytes) -> KvstoreError:
    try:
        return wire.decode_error(code, body, "there")
    except WireFormatError as error:
        return error


@pytest.mark.parametrize(
    "kind",
    [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, KvstoreError) and value is not KvstoreError
    ],
)
def test_every_error_crosses_as_what_it_is(kind: type[KvstoreError]):
    raw = wire.encode_error(kind("what happened"), 5)
    header = wire.decode_header(raw, 0, 1000)
    error = wire.decode_error(header.code, raw[wire.HEADER_BYTES :], "there")
    assert (kind, "what happened", 5) == (type(error), str(error), header.call_id)


def test_an_unknown_session_crosses_as_what_it_is():
    raw = wire.encode_error(UnknownSessionError("open a session first"), 5)
    code = wire.decode_header(raw, 0, 1000).code
    assert isinstance(wire.decode_error(code, raw[wire.HEADER_BYTES :], "there"), UnknownSessionError)


def test_a_failure_without_a_name_crosses_as_its_status():
    raw = wire.encode_failure(grpc.StatusCode.DEADLINE_EXCEEDED, "late", 5)
    header = wire.decode_header(raw, 0, 1000)
    error = wire.decode_error(header.code, raw[wire.HEADER_BYTES :], "there")
    assert (errors.UnavailableError, "no answer from there within the deadline") == (type(error), str(error))


@given(st.builds(Delta, *(st.integers(0, 2**32 - 1) for _ in range(3)), st.integers(0, 2**64 - 1)))
def test_a_delta_is_read_as_it_is_written(delta: Delta):
    assert delta == wire.decode_delta(wire.encode_delta(delta) + b"message")


def test_a_body_too_short_for_a_delta_is_refused():
    with pytest.raises(WireFormatError, match="23 bytes, expected at least 24"):
        wire.decode_delta(bytes(23))


@pytest.mark.parametrize(("seconds", "expected"), [(5.0, 5000), (0.0001, 1), (1e9, 2**32 - 1)])
def test_a_deadline_is_never_none(seconds: float, expected: int):
    assert expected == wire.deadline_ms_of(seconds)


@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.builds(TierRun, st.sampled_from([Tier.HOST, Tier.DISK]), st.integers(1, 2**32 - 1)), max_size=5),
)
def test_an_answer_made_by_hand_is_what_protobuf_reads(blocks: int, runs: list[TierRun]):
    found = pb.MatchResponse.FromString(encode_matched(matched(blocks, *runs)))
    expected = (blocks, [(run.tier.value, run.blocks) for run in runs])
    assert expected == (found.blocks, [(run.tier, run.blocks) for run in found.runs])


def test_every_method_has_its_messages_and_the_number_it_had():
    names = (
        "Session OpenNamespace Match Lease Release Load Stage Write Commit Abort GetStats ReadEvents Pin Unpin Evict "
        "Clear Flush Verify Check Hint Scrub Prefetch CancelPrefetch ListNodes Locate EvictWriter FindWriters "
        "Drain Undrain ListNamespaces DeleteNamespace GetDiagnosis ResetDiagnosis"
    )
    assert names.split() == [method.name for method in Method]
    assert list(range(1, 34)) == [method.value for method in Method]
    assert set(Method) == set(wire.REQUEST_TYPES)
    assert [1, 2, 3, 4, 5] == [Kind[name] for name in ("REQUEST", "RESPONSE", "ERROR", "RESEND", "DATA")]
