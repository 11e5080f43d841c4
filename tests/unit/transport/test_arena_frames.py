"""The bytes of arena connections: what is written is read back, anything else is refused and nothing else happens."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.transport import arena_frames as frames
from kvstore.transport import wire
from kvstore.transport.arena_frames import LentExtent, Placed
from kvstore.transport.wire import WireFormatError

if TYPE_CHECKING:
    from collections.abc import Callable

GOLDEN = {
    name.removeprefix("arena: "): bytes.fromhex(text)[wire.HEADER_BYTES :]
    for name, text in json.loads((Path(__file__).parents[2] / "golden" / "wire_frames.json").read_text()).items()
    if name.startswith("arena: ")
}
U32 = st.integers(0, 2**32 - 1)
SOUND = LentExtent(3, 100, 50, 28672, (333, 160), (0, 20480))


def body(frame: bytes) -> bytes:
    return frame[wire.HEADER_BYTES :]


def test_the_golden_frames_are_read_back():
    assert (1024, 0) == frames.decode_board(GOLDEN["board"])
    assert (1024, frames.KNOWS_PLACE_PART) == frames.decode_board(GOLDEN["board that knows PLACE_PART"])
    assert (77, 1) == frames.decode_place(GOLDEN["place"])
    assert (77, 3) == frames.decode_place(GOLDEN["place part"])
    assert (77, None) == frames.decode_place(GOLDEN["place all parts"])
    assert [SOUND] == frames.decode_mappings(GOLDEN["mappings"])
    placed = frames.decode_placed(GOLDEN["placed"])
    assert (9, (3, 4), [100, 101, 7]) == (placed.word, placed.mapping_ids, placed.slots.tolist())
    part = frames.decode_placed_part(GOLDEN["placed part"])
    assert (True, 2, 1, [100, 101, 7]) == (part.is_sparse, part.first_block, part.index, part.placed.slots.tolist())
    assert (3, 4) == frames.decode_ids(GOLDEN["sync"])
    assert (5,) == frames.decode_ids(GOLDEN["recalled"])


@given(word=U32, mapping_ids=st.lists(U32, max_size=9), slots=st.lists(U32, max_size=99))
def test_places_are_read_as_they_are_written(word: int, mapping_ids: list[int], slots: list[int]):
    frame = frames.encode_placed(1, Placed(word, tuple(mapping_ids), np.array(slots, dtype=np.uint32)))
    read = frames.decode_placed(body(frame))
    assert (word, tuple(mapping_ids), slots) == (read.word, read.mapping_ids, read.slots.tolist())


@pytest.mark.parametrize(
    "decode",
    [
        frames.decode_board,
        frames.decode_place,
        frames.decode_mappings,
        frames.decode_placed,
        frames.decode_placed_part,
        frames.decode_ids,
    ],
)
@given(raw=st.binary(max_size=200))
def test_other_bytes_are_read_or_refused(decode: Callable[[bytes], object], raw: bytes):
    try:
        decode(raw)
    except WireFormatError:
        return


@given(data=st.data())
def test_no_cut_or_longer_description_of_extents_is_taken(data: st.DataObject):
    count = data.draw(st.integers(1, 4))
    whole = body(frames.encode_mappings(1, [SOUND] * count))
    assert count == len(frames.decode_mappings(whole))
    cut = data.draw(st.integers(0, len(whole) - 1))
    for raw in (whole[:cut], whole + b"\0" * (cut + 1)):
        with pytest.raises(WireFormatError):
            frames.decode_mappings(raw)


@pytest.mark.parametrize(
    "lent",
    [
        LentExtent(1, 0, 0, 4096, (10,), (0,)),
        LentExtent(1, 0, 10, 4096, (), ()),
        LentExtent(1, 0, 10, 4096, (0,), (0,)),
        LentExtent(1, 0, 10, 4096, (410,), (0,)),
        LentExtent(1, 0, 10, 4096, (10,), (4000,)),
        LentExtent(1, 0, 2**32 - 1, 2**64 - 1, (1,), (0,)),
        LentExtent(1, 0, 2**32 - 1, 4096, (2**63,), (2**63,)),
    ],
)
def test_slots_outside_of_their_extent_are_refused(lent: LentExtent):
    with pytest.raises(WireFormatError, match="lie"):
        frames.decode_mappings(body(frames.encode_mappings(1, [lent])))


def test_more_extents_than_descriptors_fit_into_a_message_are_refused():
    raw = struct.pack("<II", 2**32 - 1, 0) + body(frames.encode_mappings(1, [SOUND] * 250))[8:]
    with pytest.raises(WireFormatError):
        frames.decode_mappings(raw)
