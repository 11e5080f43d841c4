"""Messages on the wire. Those that hold nothing but one raw frame are put together and taken apart by hand.

So is the answer of a lookup, and the lookup itself in lookup_frames.py: engines wait for them.
protobuf copies the bytes of a frame twice each way, which costs as much as all else that is done with them. What is
written here is what protobuf writes, and what is read here is exactly that; anything else, such as a frame beside an
unknown field, is parsed by protobuf.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from kvstore.v1 import block_pb2
from kvstore.v1 import cache_service_pb2 as pb

if TYPE_CHECKING:
    import numpy as np
    from google.protobuf.message import Message
    from numpy.typing import NDArray

    from kvstore.types import PrefixMatch, TierRun

_FRAME_FIELDS: dict[type[Message], int] = {
    pb.LoadResponse: pb.LoadResponse.FRAME_FIELD_NUMBER,
    pb.WriteRequest: pb.WriteRequest.FRAME_FIELD_NUMBER,
}
_LENGTH_DELIMITED = 2
_ANSWERS_REMEMBERED = 1024
_LENGTH_BYTES_MAX = 5


def encode_frame(message_type: type[Message], frame: NDArray[np.uint8]) -> bytes:
    """The bytes of a `message_type` (LoadResponse or WriteRequest) that holds `frame`. One copy."""
    return b"".join((_header(_FRAME_FIELDS[message_type], frame.nbytes), frame.data))


def encode_matched(match: PrefixMatch) -> bytes:
    """The bytes of the MatchResponse that tells of `match`."""
    return _matched(match.blocks, match.runs)


@lru_cache(maxsize=_ANSWERS_REMEMBERED)
def _matched(blocks: int, runs: tuple[TierRun, ...]) -> bytes:
    parts = [_number(pb.MatchResponse.BLOCKS_FIELD_NUMBER, blocks)] if blocks else []
    for run in runs:
        body = _number(block_pb2.TierRun.TIER_FIELD_NUMBER, run.tier.value) + _number(
            block_pb2.TierRun.BLOCKS_FIELD_NUMBER, run.blocks
        )
        parts.append(_header(pb.MatchResponse.RUNS_FIELD_NUMBER, len(body)) + body)
    return b"".join(parts)


def encode(message: Message | bytes) -> bytes:
    """The bytes of a message, which may be encoded already."""
    return message if isinstance(message, bytes) else message.SerializeToString()


def decode(message_type: type[Message], raw: bytes) -> Message | memoryview:
    """The message in `raw`; of one that holds nothing but a frame, the frame itself, without a copy.

    Raises DecodeError for bytes that are no such message.
    """
    field = _FRAME_FIELDS.get(message_type)
    if field is not None:
        end = _length_end(raw)
        if raw[:end] == _header(field, len(raw) - end):
            return memoryview(raw)[end:]
    return message_type.FromString(raw)


def _header(field: int, length: int) -> bytes:
    """Tag and length of a field of bytes."""
    return _tagged(field << 3 | _LENGTH_DELIMITED, length)


def _number(field: int, value: int) -> bytes:
    """A field of a whole number that is not 0."""
    return _tagged(field << 3, value)


def _tagged(tag: int, value: int) -> bytes:
    """A tag and a number, the number in groups of seven bits, lowest first."""
    if value <= 0x7F:
        return bytes((tag, value))
    groups = bytearray((tag,))
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)


def _length_end(raw: bytes) -> int:
    """Where the length of the first field ends, if `raw` begins with a field of bytes."""
    end = 1
    while end < min(len(raw), _LENGTH_BYTES_MAX) and raw[end] > 0x7F:
        end += 1
    return min(end + 1, len(raw))
