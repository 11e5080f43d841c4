from __future__ import annotations

import inspect
import re
import socket
from pathlib import Path

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from kvstore.transport import lookup_frames, wire
from kvstore.transport._core import _frames
from kvstore.transport.lookup_frames import LookupWriter, read_lookup, read_response, send_now
from kvstore.v1 import block_pb2
from kvstore.v1 import cache_service_pb2 as pb

LIMIT = 2**20
U32 = st.integers(0, 2**32 - 1)
ASCII = st.text(st.characters(max_codepoint=127), max_size=20)
DELTAS = st.none() | st.builds(wire.Delta, U32, U32, U32, st.integers(0, 2**64 - 1))
TEXTS = st.text(max_size=20)
ROOTS = st.none() | st.builds(block_pb2.Root, adapter=TEXTS, salt=TEXTS)


@st.composite
def requests(draw: st.DrawFn) -> pb.MatchRequest:
    lengths = st.integers(0, 300) | st.sampled_from([2**14 - 1, 2**14])
    prompt = block_pb2.Prompt(ns_id=draw(st.binary(max_size=16)), tokens=bytes(draw(lengths)))
    root = draw(ROOTS)
    if root is not None:
        prompt.root.CopyFrom(root)
    session_id, request_id = draw(st.binary(max_size=16)), draw(ASCII)
    return pb.MatchRequest(session_id=session_id, prompt=prompt, peek=draw(st.booleans()), request_id=request_id)


def frame_of(body: bytes, delta: wire.Delta | None, call_id: int = 7, deadline_ms: int = 9) -> bytes:
    head = b"" if delta is None else wire.encode_delta(delta)
    flags = 0 if delta is None else wire.FLAG_DELTA
    return wire.encode_frame(
        wire.Kind.REQUEST, head + body, call_id=call_id, code=wire.Method.Match, flags=flags, deadline_ms=deadline_ms
    )


def assert_means(request: pb.MatchRequest, lookup: lookup_frames.Lookup) -> None:
    prompt = request.prompt
    expected = (request.session_id, prompt.ns_id, prompt.tokens, request.peek, request.request_id)
    assert expected == (lookup.session_id, lookup.ns_id, lookup.tokens, lookup.peek, lookup.request_id)
    assert prompt.root == block_pb2.Root.FromString(lookup.root)


def assert_taken_as_by_protobuf(frame: bytes) -> None:
    """What is taken means what protobuf and the functions of wire.py read in it; what is not, costs time alone."""
    lookup = read_lookup(frame, 0, len(frame), LIMIT)
    if lookup is None:
        return
    header = wire.decode_header(frame, 0, LIMIT)
    assert (wire.Kind.REQUEST, wire.Method.Match) == (header.kind, header.code)
    assert (header.call_id, wire.HEADER_BYTES + header.body_bytes) == (lookup.call_id, lookup.frame_bytes)
    body = frame[wire.HEADER_BYTES : lookup.frame_bytes]
    assert lookup.is_grown == bool(header.flags & wire.FLAG_DELTA)
    if lookup.is_grown:
        delta = wire.decode_delta(body)
        assert delta == lookup.delta
        assert delta.prefix_tokens == lookup.prefix_tokens
        body = body[wire.DELTA_BYTES :]
    try:
        request = pb.MatchRequest.FromString(body)
        root = block_pb2.Root.FromString(lookup.root)
    except DecodeError:
        # The root is the only part that is left to a later parser.
        with pytest.raises(DecodeError):
            block_pb2.Root.FromString(lookup.root)
        return
    assert root == request.prompt.root
    assert_means(request, lookup)


@given(request=requests(), delta=DELTAS, call_id=U32, deadline_ms=U32)
def test_a_lookup_is_written_as_protobuf_and_wire_write_it(
    request: pb.MatchRequest, delta: wire.Delta | None, call_id: int, deadline_ms: int
) -> None:
    head = block_pb2.Prompt()
    head.CopyFrom(request.prompt)
    head.ClearField("tokens")
    writer = LookupWriter(
        request.session_id, head.SerializeToString(), peek=request.peek, request_id=request.request_id
    )
    tokens = request.prompt.tokens
    written = (
        writer.whole(call_id, deadline_ms, tokens)
        if delta is None
        else writer.grown(call_id, deadline_ms, delta, tokens)
    )
    request.prompt.SetInParent()
    assert frame_of(request.SerializeToString(), delta, call_id, deadline_ms) == written


@given(request=requests(), delta=DELTAS, behind=st.binary(max_size=20), before=st.integers(0, 5))
def test_a_lookup_is_read_wherever_it_lies(
    request: pb.MatchRequest, delta: wire.Delta | None, behind: bytes, before: int
) -> None:
    frame = frame_of(request.SerializeToString(), delta)
    buffer = bytearray(bytes(before) + frame + behind)
    lookup = read_lookup(buffer, before, len(buffer), LIMIT)
    assert lookup is not None
    assert (7, len(frame)) == (lookup.call_id, lookup.frame_bytes)
    assert (delta is not None, delta or (0, 0, 0, 0)) == (lookup.is_grown, lookup.delta)
    assert_means(request, lookup)
    buffer[:] = bytes(len(buffer))  # the connection goes on receiving
    assert_means(request, lookup)


@given(request=requests(), delta=DELTAS, cut=st.integers(1, 60))
def test_a_frame_that_is_not_whole_is_not_taken(request: pb.MatchRequest, delta: wire.Delta | None, cut: int) -> None:
    frame = frame_of(request.SerializeToString(), delta)
    assert read_lookup(frame, 0, max(0, len(frame) - cut), LIMIT) is None


@given(request=requests(), delta=DELTAS, flips=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 255)), max_size=3))
@example(request=pb.MatchRequest(), delta=wire.Delta(1, 1, 0, 0), flips=[(0, 23)])  # a delta that is cut off
def test_damaged_frames_mean_what_protobuf_says(
    request: pb.MatchRequest, delta: wire.Delta | None, flips: list[tuple[int, int]]
) -> None:
    frame = bytearray(frame_of(request.SerializeToString(), delta))
    for place, value in flips:
        frame[place % len(frame)] = value
    assert_taken_as_by_protobuf(bytes(frame))


@given(body=st.binary(max_size=60))
@example(body=b"\x0a\x81\x00z")  # a length that is longer than need be
@example(body=b"\x0a\x00\x0a\x00")  # a field twice
@example(body=b"\x12\x02\x0a\x00\x0a\x00")  # the second behind the first in another order
@example(body=b"\x18\x02")  # a truth that is written as 2
@example(body=b"\x18")
@example(body=b"\x0a\xff\xff\xff\xff\xff")
@example(body=b"\x0a\xff\xff\xff\xff\x7f")
@example(body=b"\x7a\x02\xc3\x28")  # no UTF-8
@example(body=b"\x12\x04\x12\x02\x0a\xff")  # a root that is none
def test_any_bytes_mean_what_protobuf_says(body: bytes) -> None:
    assert_taken_as_by_protobuf(frame_of(body, None))


@pytest.mark.parametrize(
    "frame",
    [
        wire.encode_frame(wire.Kind.REQUEST, b"", call_id=1, code=wire.Method.Lease),
        wire.encode_frame(wire.Kind.RESPONSE, b"", call_id=1, code=wire.Method.Match),
        wire.encode_frame(wire.Kind.REQUEST, b"", call_id=1, code=wire.Method.Match, flags=2),
        frame_of(pb.MatchRequest(request_id="é").SerializeToString(), None),
        frame_of(bytes(LIMIT + 1), None),
        b"",
    ],
    ids=["another method", "an answer", "unknown flags", "not ASCII", "too long", "nothing"],
)
def test_everything_else_is_left_to_others(frame: bytes) -> None:
    assert read_lookup(frame, 0, len(frame), LIMIT) is None


@pytest.mark.parametrize(("begin", "end"), [(0, 11), (3, 2), (11, 12)])
def test_what_lies_outside_of_the_buffer_is_refused(begin: int, end: int) -> None:
    with pytest.raises(ValueError, match="no part of the buffer"):
        read_lookup(bytes(10), begin, end, LIMIT)


def test_a_frame_is_sent_as_far_as_the_socket_takes_it() -> None:
    here, there = socket.socketpair()
    with here, there:
        assert 5 == send_now(here.fileno(), b"frame")
        assert b"frame" == there.recv(10)
        sent_bytes = send_now(here.fileno(), bytes(16 * 2**20))
        assert 0 < sent_bytes < 16 * 2**20
        assert 0 == send_now(here.fileno(), b"full")
        there.close()
        assert 0 == send_now(here.fileno(), b"gone")


def test_the_stub_names_what_the_native_module_has() -> None:
    stub = (Path(inspect.getfile(lookup_frames)).parent / "_frames.pyi").read_text()
    assert set(re.findall(r"^(?:class|def) (\w+)", stub, re.MULTILINE)) == {
        name for name in dir(_frames) if not name.startswith("_")
    }
    lookup, functions = stub.split("\ndef ", 1)
    assert set(re.findall(r"def (\w+)\(self", lookup)) == {
        name for name in dir(_frames.Lookup) if not name.startswith("_")
    }
    for name, parameters in re.findall(r"(?:^|def )(\w+)\(([^)]*)\)", functions):
        documented = re.findall(r"(\w+): ", (getattr(_frames, name).__doc__ or "").split(" -> ")[0])
        assert documented == re.findall(r"(\w+): ", parameters)


@given(
    kind=st.sampled_from(wire.Kind),
    body=st.binary(max_size=40),
    call_id=st.sampled_from([1, 7]),
    behind=st.binary(max_size=3),
    cut=st.integers(0, 2),
)
def test_a_response_is_taken_only_where_it_is_alone_whole_and_of_its_call(
    kind: wire.Kind, body: bytes, call_id: int, behind: bytes, cut: int
) -> None:
    frame = wire.encode_frame(kind, body, call_id=call_id)
    received = bytearray(frame[: len(frame) - cut] + behind)
    is_it = frame[:12] == received[:12] and len(frame) == len(received) and (wire.Kind.RESPONSE, 7) == (kind, call_id)
    expected = bytes(received[wire.HEADER_BYTES :]) if is_it else None
    assert expected == read_response(received, 0, len(received), 7)
