from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from kvstore.transport import frames
from kvstore.v1 import cache_service_pb2 as pb

if TYPE_CHECKING:
    from google.protobuf.message import Message

FRAME_MESSAGES = (pb.LoadResponse, pb.WriteRequest)
LENGTHS = st.integers(0, 400) | st.sampled_from([2**14 - 1, 2**14, 2**21 - 1, 2**21])


def meaning(content: Message | memoryview) -> object:
    """What a reader takes from a message: its frame if it has one, else all of it."""
    if isinstance(content, memoryview):
        return bytes(content)
    return content.frame if content.HasField("frame") else content


def assert_same_meaning(message_type: type[Message], raw: bytes) -> None:
    try:
        expected = meaning(message_type.FromString(raw))
    except DecodeError:
        with pytest.raises(DecodeError):
            frames.decode(message_type, raw)
    else:
        assert expected == meaning(frames.decode(message_type, raw))


@pytest.mark.parametrize("message_type", FRAME_MESSAGES)
@given(length=LENGTHS)
def test_a_frame_is_encoded_as_by_protobuf(message_type: type[Message], length: int):
    frame = np.arange(length, dtype=np.uint32).astype(np.uint8)
    expected = message_type(frame=frame.tobytes()).SerializeToString()
    assert expected == frames.encode_frame(message_type, frame)


@pytest.mark.parametrize("message_type", FRAME_MESSAGES)
@given(length=LENGTHS)
def test_a_frame_is_decoded_in_place(message_type: type[Message], length: int):
    frame = (b"0123456" * (length // 7 + 1))[:length]
    raw = message_type(frame=frame).SerializeToString()
    got = frames.decode(message_type, raw)
    assert isinstance(got, memoryview)
    assert got.obj is raw
    assert frame == got


@pytest.mark.parametrize("message_type", FRAME_MESSAGES)
@given(
    head=st.binary(max_size=8),
    length=st.integers(0, 200),
    tail=st.binary(max_size=4),
)
@example(head=b"\x0a\x81\x00", length=1, tail=b"")  # a length that is longer than need be
@example(head=b"\x12\x81\x00", length=1, tail=b"")
@example(head=b"\x0a\x81\x80\x80\x80\x80\x00", length=1, tail=b"")
@example(head=b"\x0a\x00\x0a", length=1, tail=b"7")  # the field twice
@example(head=b"\x12\x00\x0a", length=0, tail=b"")  # the other field of the oneof behind it
@example(head=b"", length=0, tail=b"")
@example(head=b"\x0a", length=0, tail=b"")
@example(head=b"\x0a\xff", length=0, tail=b"")
def test_any_bytes_mean_what_protobuf_says(message_type: type[Message], head: bytes, length: int, tail: bytes):
    assert_same_meaning(message_type, head + bytes(length) + tail)


@pytest.mark.parametrize("message_type", FRAME_MESSAGES)
@given(length=st.integers(0, 300), flipped=st.integers(0, 5), value=st.integers(0, 255), cut=st.integers(0, 3))
def test_a_damaged_frame_means_what_protobuf_says(
    message_type: type[Message], length: int, flipped: int, value: int, cut: int
):
    raw = bytearray(message_type(frame=bytes(length)).SerializeToString())
    raw[flipped % len(raw)] = value
    assert_same_meaning(message_type, bytes(raw[: len(raw) - cut]))


def test_other_messages_are_parsed_whole():
    message = pb.LoadRequest(session_id=b"\x0a\x01x", lease_id=3)
    assert message == frames.decode(pb.LoadRequest, frames.encode(message))


def test_what_is_encoded_is_left_as_it_is():
    raw = frames.encode_frame(pb.LoadResponse, np.zeros(3, dtype=np.uint8))
    assert frames.encode(raw) is raw
