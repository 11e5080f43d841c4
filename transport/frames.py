"""Messages on the wire. Those that hold nothing but one raw frame are put together and taken apart by hand.

protobuf copies the bytes of a frame twice each way, which costs as much as all else that is done with them. What is
written here is what protobuf writes, and what is read here is exactly that; anything else, such as a frame beside an
unknown field, is parsed by protobuf.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.v1 import cache_service_pb2 as pb

if TYPE_CHECKING:
    import numpy as np
    from google.protobuf.message import Message
    from numpy.typing import NDArray

_FRAME_FIELDS: dict[type[Message], int] = {
    pb.LoadResponse: pb.LoadResponse.FRAME_FIELD_NUMBER,
    pb.WriteRequest: pb.WriteRequest.FRAME_FIELD_NUMBER,
}
_LENGTH_DELIMITED = 2
_LENGTH_BYTES_MAX = 5


def encode_frame(message_type: type[Message], frame: NDArray[np.uint8]) -> bytes:
    """The bytes of a `message_type` (LoadResponse or WriteRequest) that holds `frame`. One copy."""
    return b"".join((_header(_FRAME_FIELDS[message_type], frame.nbytes), frame.data))


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
    """Tag and length of a field of bytes, the length in groups of seven bits, lowest first."""
    header = bytearray((field << 3 | _LENGTH_DELIMITED,))
    while length > 0x7F:
        header.append(length & 0x7F | 0x80)
        length >>= 7
    header.append(length)
    return bytes(header)


def _length_end(raw: bytes) -> int:
    """Where the length of the first field ends, if `raw` begins with a field of bytes."""
    end = 1
    while end < min(len(raw), _LENGTH_BYTES_MAX) and raw[end] > 0x7F:
        end += 1
    return min(end + 1, len(raw))
