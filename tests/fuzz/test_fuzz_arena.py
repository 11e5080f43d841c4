"""What comes on an arena connection, from either side: a value that is written as it was read, or WireFormatError."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvstore.transport import arena_frames as frames
from kvstore.transport import wire
from kvstore.transport.arena_frames import LentExtent, Placed, PlacedPart
from kvstore.transport.wire import WireFormatError

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Fuzz

LENT = [LentExtent(3, 100, 50, 28672, (333, 160), (0, 20480)), LentExtent(4, 0, 1, 4096, (4096,), (0,))]
SLOTS = np.arange(20, dtype=np.uint32)


def body(frame: bytes) -> bytes:
    return frame[wire.HEADER_BYTES :]


def lent_again(raw: bytes) -> bytes:
    lent = frames.decode_mappings(raw)
    for one in lent:  # whose slots a client is going to read
        for size, offset in zip(one.part_sizes, one.part_offsets, strict=True):
            assert 0 <= offset < offset + size * one.slot_count <= one.nbytes
    return frames.encode_mappings(0, lent)


AGAIN: dict[str, tuple[list[bytes], Callable[[bytes], bytes]]] = {
    "mappings": ([frames.encode_mappings(0, LENT), frames.encode_mappings(0, LENT[:1])], lent_again),
    "placed": (
        [frames.encode_placed(0, Placed(9, (3, 4), SLOTS)), frames.encode_placed(0, Placed(0, (), SLOTS[:0]))],
        lambda raw: frames.encode_placed(0, frames.decode_placed(raw)),
    ),
    "place": (
        [frames.encode_place(0, 77, 1), frames.encode_place(0, 2**64 - 1, None)],
        lambda raw: frames.encode_place(0, *frames.decode_place(raw)),
    ),
    "placed part": (
        [frames.encode_placed_part(0, PlacedPart(Placed(9, (3, 4), SLOTS), True, 2, 1))],
        lambda raw: frames.encode_placed_part(0, frames.decode_placed_part(raw)),
    ),
    "ids": (
        [frames.encode_sync(0, [1, 2, 2**32 - 1]), frames.encode_sync(0, [])],
        lambda raw: frames.encode_sync(0, list(frames.decode_ids(raw))),
    ),
    "board": ([frames.encode_board(1024)], lambda raw: frames.encode_board(*frames.decode_board(raw))),
}


@pytest.mark.parametrize("name", AGAIN)
def test_a_body_is_read_or_refused(fuzz: Fuzz, name: str) -> None:
    seeds, again = AGAIN[name]

    def target(raw: bytes) -> None:
        with suppress(WireFormatError):
            written = body(again(raw))
            assert len(raw) == len(written)
            assert written == body(again(written))

    fuzz.run(4_000, lambda mutator: mutator.mutated([body(seed) for seed in seeds]), target)
