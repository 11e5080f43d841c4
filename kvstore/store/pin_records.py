"""The pins of a namespace, in a file for the next start. Little-endian; on disk: never renumber.

 offset  bytes  field
      0      8  magic "KVSPINS\\0"
      8      4  format version, 1
     12      4  number of pins
     16     16  ns_id
     32         the pins, each:
                pin id (8), when it ends in seconds since 1970 (8, a float; infinite for never), number of keys k (4),
                zero (4), then k times: blocks or tokens up to there (8), key (16), the deepest first
             8  XXH3-64 of all bytes before

A pin names a few blocks of its prefix, or its state, by their keys: the deepest that is on disk after a start is pinned
again.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from kvstore.errors import StorageFormatError
from kvstore.tiers.checksum import DIGEST_BYTES, is_sealed, sealed

PINS_MAGIC = b"KVSPINS\0"
PINS_VERSION = 1
KEYS_MAX = 8

_FIXED = struct.Struct("<8sII16s")
_PIN = struct.Struct("<QdII")
_KEY = struct.Struct("<Q16s")


@dataclass(frozen=True, slots=True)
class PinnedEnd:
    """A place in what is pinned: how many blocks, or tokens of a state, end there, and the key of the last."""

    depth: int
    key: bytes


@dataclass(frozen=True, slots=True)
class PinRecord:
    """One pin. `ends_at` is in seconds since 1970, infinite for one without a limit; `ends` begin with the deepest."""

    pin_id: int
    ends_at: float
    ends: tuple[PinnedEnd, ...]


def kept_depths(blocks: int) -> list[int]:
    """The depths of a prefix of which a record has the keys: the whole, and shorter ones at about equal distances."""
    return sorted({blocks - blocks * number // KEYS_MAX for number in range(KEYS_MAX)} - {0}, reverse=True)


def pack_pins(ns_id: bytes, pins: list[PinRecord]) -> bytes:
    """The pins as they lie on disk."""
    packed = [_FIXED.pack(PINS_MAGIC, PINS_VERSION, len(pins), ns_id)]
    for pin in pins:
        packed.append(_PIN.pack(pin.pin_id, pin.ends_at, len(pin.ends), 0))
        packed += [_KEY.pack(end.depth, end.key) for end in pin.ends]
    return sealed(b"".join(packed))


def unpack_pins(data: bytes, ns_id: bytes) -> list[PinRecord]:
    """The pins of a namespace. Raises StorageFormatError, naming what it is instead, for anything else."""
    if data[: len(PINS_MAGIC)] != PINS_MAGIC or len(data) < _FIXED.size + DIGEST_BYTES:
        raise StorageFormatError(f"no file of pins: {len(data)} bytes that begin {data[:8]!r}")
    _, version, count, found = _FIXED.unpack_from(data)
    if version != PINS_VERSION:
        raise StorageFormatError(f"format version {version}, this kvstore reads {PINS_VERSION}")
    if not is_sealed(data):
        raise StorageFormatError(f"damaged: the checksum of {len(data)} bytes is wrong")
    if found != ns_id:
        raise StorageFormatError(f"it is of namespace {found.hex()}, expected {ns_id.hex()}")
    try:
        pins, end = _unpack_all(data, count)
    except struct.error:
        pins, end = [], 0
    if end != len(data) - DIGEST_BYTES:
        raise StorageFormatError(f"damaged: {len(data)} bytes are not the length of {count} pins")
    return pins


def _unpack_all(data: bytes, count: int) -> tuple[list[PinRecord], int]:
    """Raises struct.error where they end too early."""
    pins, place = [], _FIXED.size
    for _ in range(count):
        pin_id, ends_at, key_count, _ = _PIN.unpack_from(data, place)
        place += _PIN.size
        ends = tuple(PinnedEnd(*_KEY.unpack_from(data, place + number * _KEY.size)) for number in range(key_count))
        place += key_count * _KEY.size
        pins.append(PinRecord(pin_id, ends_at, ends))
    return pins, place
