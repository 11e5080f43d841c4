"""The bytes of an arena connection, by which a process on the same host maps host memory; README.md has them.

Headers and errors are those of wire.py. Everything in here is a pure function of bytes. On the wire: numbers are
little-endian and never renumbered.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.transport import wire
from kvstore.transport.wire import WireFormatError

# Descriptors of one message; Linux takes 253 (SCM_MAX_FD).
DESCRIPTORS_MAX = 250
# Extents that one client maps at a time, as many as a host tier has.
MAPPINGS_MAX = 1024
REQUEST_BYTES_MAX = 4 * MAPPINGS_MAX
NO_PART = 2**32 - 1
WORD_BYTES = 8
_PLACE = struct.Struct("<QII")
_BOARD = struct.Struct("<II")
_MAPPINGS = struct.Struct("<II")
_MAPPING = struct.Struct("<IIIIQ")
_PLACED = struct.Struct("<IIII")
_PART = struct.Struct("<III")
# In the frame of the board: what the server knows beyond PLACE and SYNC, which all do.
KNOWS_PLACE_PART = 1

Words = NDArray[np.uint64]
Slots = NDArray[np.uint32]


class ArenaMethod(enum.IntEnum):
    """What a client asks. On the wire: never renumber."""

    PLACE = 1
    SYNC = 2
    PLACE_PART = 3


@dataclass(frozen=True, slots=True)
class LentExtent:
    """An extent that a client is given to map: the slots [first_slot, first_slot + slot_count) of their pool.

    Part p of the slot at index i begins at part_offsets[p] + i * part_sizes[p]. `mapping_id` is its name on this
    connection, new each time that a descriptor is sent.
    """

    mapping_id: int
    first_slot: int
    slot_count: int
    nbytes: int
    part_sizes: tuple[int, ...]
    part_offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Placed:
    """Where the leading blocks of a lease lie; true while word `word` of the board is the id of the lease."""

    word: int
    mapping_ids: tuple[int, ...]
    slots: Slots


@dataclass(frozen=True, slots=True)
class PlacedPart:
    """Where one part of a lease lies: `placed` is of the blocks from `first_block` on.

    `index` is the number of the part among those of the extents. Where `is_sparse` is false, `placed` says where all
    dense parts lie, as an answer to PLACE does.
    """

    placed: Placed
    is_sparse: bool
    first_block: int
    index: int


def encode_place(call_id: int, lease_id: int, part: int | None) -> bytes:
    """Where do the blocks of a lease lie? The part is the one that is read, for the books."""
    body = _PLACE.pack(lease_id, NO_PART if part is None else part, 0)
    return wire.encode_frame(wire.Kind.REQUEST, body, call_id=call_id, code=ArenaMethod.PLACE)


def decode_place(body: bytes) -> tuple[int, int | None]:
    """The id of the lease, and the part. Raises WireFormatError."""
    if len(body) != _PLACE.size:
        raise WireFormatError(f"a PLACE has {len(body)} bytes, expected {_PLACE.size}")
    lease_id, part, _ = _PLACE.unpack(body)
    return lease_id, None if part == NO_PART else part


def encode_place_part(call_id: int, lease_id: int, part: int) -> bytes:
    """Where does this part of a lease lie, dense or sparse? Asked of servers that know it alone."""
    body = _PLACE.pack(lease_id, part, 0)
    return wire.encode_frame(wire.Kind.REQUEST, body, call_id=call_id, code=ArenaMethod.PLACE_PART)


def encode_sync(call_id: int, unmapped_ids: list[int]) -> bytes:
    """These are no longer mapped; which others are wanted back?"""
    return wire.encode_frame(wire.Kind.REQUEST, _numbers(unmapped_ids), call_id=call_id, code=ArenaMethod.SYNC)


def encode_recalled(call_id: int, mapping_ids: list[int]) -> bytes:
    """These are wanted back: the answer to a SYNC."""
    return wire.encode_frame(wire.Kind.RESPONSE, _numbers(mapping_ids), call_id=call_id)


def decode_ids(body: bytes) -> tuple[int, ...]:
    """The mapping ids of a SYNC, or of its answer. Raises WireFormatError."""
    if len(body) % 4 or len(body) > REQUEST_BYTES_MAX:
        raise WireFormatError(f"mapping ids take {len(body)} bytes, expected fours, at most {REQUEST_BYTES_MAX}")
    return tuple(np.frombuffer(body, dtype="<u4").tolist())


def encode_board(word_count: int, knows: int = 0) -> bytes:
    """The first frame of a server; with it come the board and the bell."""
    return wire.encode_frame(wire.Kind.DATA, _BOARD.pack(word_count, knows), call_id=0)


def decode_board(body: bytes) -> tuple[int, int]:
    """How many words the board has, and what its server knows. Raises WireFormatError."""
    if len(body) != _BOARD.size:
        raise WireFormatError(f"a board is announced in {len(body)} bytes, expected {_BOARD.size}")
    words, knows = _BOARD.unpack(body)
    return words, knows


def encode_mappings(call_id: int, lent: list[LentExtent]) -> bytes:
    """Extents to map; their descriptors come with the frame, in this order."""
    assert 0 < len(lent) <= DESCRIPTORS_MAX, len(lent)
    pieces = [_MAPPINGS.pack(len(lent), 0)]
    for one in lent:
        pieces.append(_MAPPING.pack(one.mapping_id, one.first_slot, one.slot_count, len(one.part_sizes), one.nbytes))
        pieces.append(np.array([one.part_sizes, one.part_offsets], dtype="<u8").tobytes())
    return wire.encode_frame(wire.Kind.DATA, b"".join(pieces), call_id=call_id)


def decode_mappings(body: bytes) -> list[LentExtent]:
    """Raises WireFormatError for what no server sends: also for slots that would lie outside of their extent."""
    try:
        count, _ = _MAPPINGS.unpack_from(body)
        at = _MAPPINGS.size
        lent = []
        for _ in range(min(count, DESCRIPTORS_MAX + 1)):
            mapping_id, first_slot, slot_count, part_count, nbytes = _MAPPING.unpack_from(body, at)
            at += _MAPPING.size
            numbers = np.frombuffer(body, dtype="<u8", count=2 * part_count, offset=at).tolist()
            at += 16 * part_count
            sizes, offsets = tuple(numbers[:part_count]), tuple(numbers[part_count:])
            lent.append(LentExtent(mapping_id, first_slot, slot_count, nbytes, sizes, offsets))
    except (struct.error, ValueError) as err:
        raise WireFormatError(f"extents are described in {len(body)} bytes, expected more") from err
    if at != len(body) or not 0 < len(lent) <= DESCRIPTORS_MAX or not all(map(_is_sound, lent)):
        raise WireFormatError(f"{count} extents are described in {len(body)} bytes, in which no slots can lie so")
    return lent


def encode_placed(call_id: int, placed: Placed) -> bytes:
    """The answer to a PLACE."""
    return wire.encode_frame(wire.Kind.RESPONSE, _placed_body(placed), call_id=call_id)


def encode_placed_part(call_id: int, part: PlacedPart) -> bytes:
    """The answer to a PLACE_PART."""
    body = _PART.pack(part.is_sparse, part.first_block, part.index) + _placed_body(part.placed)
    return wire.encode_frame(wire.Kind.RESPONSE, body, call_id=call_id)


def decode_placed(body: bytes) -> Placed:
    """Raises WireFormatError for one that says less, or more, than it announces."""
    if len(body) < _PLACED.size:
        raise WireFormatError(f"places are told in {len(body)} bytes, expected at least {_PLACED.size}")
    word, mapping_count, slot_count, _ = _PLACED.unpack_from(body)
    expected_bytes = _PLACED.size + 4 * (mapping_count + slot_count)
    if len(body) != expected_bytes:
        raise WireFormatError(f"places are told in {len(body)} bytes, expected {expected_bytes}")
    numbers = np.frombuffer(body, dtype="<u4", offset=_PLACED.size)
    return Placed(word, tuple(numbers[:mapping_count].tolist()), numbers[mapping_count:].astype(np.uint32))


def decode_placed_part(body: bytes) -> PlacedPart:
    """Raises WireFormatError for one that says less, or more, than it announces."""
    if len(body) < _PART.size:
        raise WireFormatError(f"places of a part are told in {len(body)} bytes, expected at least {_PART.size}")
    is_sparse, first_block, index = _PART.unpack_from(body)
    if is_sparse > 1:
        raise WireFormatError(f"a part is of kind {is_sparse}, expected 0 (dense) or 1 (sparse)")
    return PlacedPart(decode_placed(body[_PART.size :]), bool(is_sparse), first_block, index)


def _placed_body(placed: Placed) -> bytes:
    head = _PLACED.pack(placed.word, len(placed.mapping_ids), placed.slots.size, 0)
    return head + _numbers(placed.mapping_ids) + placed.slots.astype("<u4", copy=False).tobytes()


def _is_sound(lent: LentExtent) -> bool:
    regions = zip(lent.part_sizes, lent.part_offsets, strict=True)
    fits = all(size > 0 and offset + size * lent.slot_count <= lent.nbytes for size, offset in regions)
    return bool(lent.part_sizes) and lent.slot_count > 0 and fits and lent.nbytes < 2**63


def _numbers(values: list[int] | tuple[int, ...]) -> bytes:
    return np.array(values, dtype="<u4").tobytes()
