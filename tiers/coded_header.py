"""The header of a block in a coded slot. Little-endian; on disk: never renumber, never reorder.

 offset  bytes  field, in clear
      0      8  magic "KVSCODED"
      8      4  format version, 1
     12      4  slab number
     16      4  slot number inside the slab
     20      4  bytes of what follows these 80
     24      8  clear generation of the namespace
     32     16  ns_id
     48      8  key id; zeros where nothing is encrypted
     56     16  salt of the start that wrote it, likewise
     72      8  write sequence, of the tier; salt and sequence are the nonce

 offset  bytes  field, sealed as a whole where the block is encrypted
      0      4  pipeline
      4      8  fingerprint of the pipeline and of all that its bytes depend on
     12      8  writer id; 0 = unknown
     20     16  root_key
     36     16  parent_key
     52     16  key
     68      4  token count n
     72      4  part count p
     76   48*p  for each part: its bytes (8), those stored, tags included (8), codec, 0 = as it is (4),
                largest absolute error (4), relative error (4), zero (4), XXH3-64 of what is stored (8),
                XXH3-64 of the part where a lossless codec stored it, else 0 (8)
76+48*p    4*n  token ids, u32

   then     16  the tag of AES-GCM over the header; XXH3-64 of all before and 8 zeros where nothing is encrypted

The part in clear is what each piece of the block is sealed with besides (its "associated data"), so that what was
sealed for one slot and write opens in no other. The payloads follow, see coded_slot.py.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore.tiers.base import BlockIdentity
from kvstore.tiers.checksum import DIGEST_BYTES, digest
from kvstore.tiers.codecs.aes_gcm import NO_SALT, TAG_BYTES
from kvstore.tiers.codecs.base import CodingError
from kvstore.tiers.codecs.keys import NO_KEY
from kvstore.tiers.faults import DiskFault
from kvstore.tiers.header import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.tiers.codecs.aes_gcm import PieceCipher

CODED_MAGIC = b"KVSCODED"
CODED_VERSION = 1
HEADER_PIECE = 0

_CLEAR = struct.Struct("<8sIIIIQ16s8s16sQ")
_INNER = struct.Struct("<IQQ16s16s16sII")
_PART = struct.Struct("<QQIffIQQ")


@dataclass(frozen=True, slots=True)
class Place:
    """What the part of a header in clear says: where and when a block was written, and with which key."""

    slab: int
    slot: int
    sequence: int
    generation: int
    ns_id: bytes
    key_id: bytes = NO_KEY
    salt: bytes = NO_SALT

    @property
    def encrypts(self) -> bool:
        """Whether the rest is sealed with a key."""
        return self.key_id != NO_KEY


@dataclass(frozen=True, slots=True)
class StoredPart:
    """What a header says of one part."""

    raw_bytes: int
    stored_bytes: int
    codec: int
    error: CodingError
    stored_digest: int
    raw_digest: int


@dataclass(frozen=True, slots=True)
class CodedHeader:
    """What a block in a coded slot says about itself; `packed` is that as it lies on disk."""

    place: Place
    pipeline: int
    fingerprint: int
    identity: BlockIdentity
    parts: tuple[StoredPart, ...]
    packed: bytes = field(repr=False, compare=False)

    @property
    def sequence(self) -> int:
        """The write that put the block there."""
        return self.place.sequence

    @property
    def generation(self) -> int:
        """The clear generation it belongs to."""
        return self.place.generation

    @property
    def ns_id(self) -> bytes:
        """The namespace."""
        return self.place.ns_id

    @property
    def about(self) -> bytes:
        """What all pieces of the block are sealed with besides."""
        return self.packed[: _CLEAR.size]

    def pack(self) -> bytes:
        """The header as it lies on disk, without padding."""
        return self.packed


def coded_header_bytes(part_count: int, block_tokens: int) -> int:
    """Exact bytes of a header without padding."""
    return _CLEAR.size + _rest_bytes(part_count, block_tokens)


def pack_clear(place: Place, part_count: int, block_tokens: int) -> bytes:
    """The part of a header in clear."""
    return _CLEAR.pack(
        CODED_MAGIC,
        CODED_VERSION,
        place.slab,
        place.slot,
        _rest_bytes(part_count, block_tokens),
        place.generation,
        place.ns_id,
        place.key_id,
        place.salt,
        place.sequence,
    )


@dataclass(frozen=True, slots=True)
class Inside:
    """The rest of a header."""

    pipeline: int
    fingerprint: int
    identity: BlockIdentity
    parts: tuple[StoredPart, ...]

    def pack(self) -> bytes:
        """As bytes, not sealed yet."""
        block = self.identity
        tokens = block.tokens
        keys = (block.root_key, block.parent_key, block.key)
        counts = (len(tokens) // TOKEN_BYTES, len(self.parts))
        head = _INNER.pack(self.pipeline, self.fingerprint, block.writer, *keys, *counts)
        return head + b"".join(map(_pack_part, self.parts)) + tokens


def seal_header(clear: bytes, inside: Inside, sequence: int, cipher: PieceCipher | None) -> bytes:
    """The whole header as it lies on disk."""
    packed = inside.pack()
    if cipher is not None:
        return clear + cipher.seal(packed, sequence, HEADER_PIECE, clear)
    whole = clear + packed
    return whole + digest(whole).to_bytes(DIGEST_BYTES, "little") + bytes(TAG_BYTES - DIGEST_BYTES)


def is_coded(page: bytes | memoryview) -> bool:
    """Whether what begins here calls itself a header of this kind."""
    return bytes(page[: len(CODED_MAGIC)]) == CODED_MAGIC


def unpack_coded(
    page: bytes | memoryview, opener: Callable[[bytes, bytes], PieceCipher | None]
) -> CodedHeader | DiskFault:
    """The header at the start of `page`, or why there is none that can be read. `opener` finds a cipher."""
    if len(page) < _CLEAR.size or not is_coded(page):
        return DiskFault.CORRUPT_HEADER
    _, version, slab, slot, rest_bytes, generation, ns_id, key_id, salt, sequence = _CLEAR.unpack_from(page)
    packed = bytes(page[: _CLEAR.size + rest_bytes])
    if version != CODED_VERSION or len(packed) != _CLEAR.size + rest_bytes or rest_bytes < _INNER.size + TAG_BYTES:
        return DiskFault.CORRUPT_HEADER
    place = Place(slab, slot, sequence, generation, ns_id, key_id, salt)
    opened = _open(packed, place, opener)
    if isinstance(opened, DiskFault):
        return opened
    inside = _unpack_inside(opened)
    if inside is None:
        return DiskFault.CORRUPT_HEADER
    return CodedHeader(place, inside.pipeline, inside.fingerprint, inside.identity, inside.parts, packed)


def _open(packed: bytes, place: Place, opener: Callable[[bytes, bytes], PieceCipher | None]) -> bytes | DiskFault:
    if place.encrypts:
        cipher = opener(place.key_id, place.salt)
        if cipher is None:
            return DiskFault.UNKNOWN_KEY
        opened = cipher.open(packed[_CLEAR.size :], place.sequence, HEADER_PIECE, packed[: _CLEAR.size])
        return DiskFault.CORRUPT_HEADER if opened is None else opened
    whole, seal = packed[:-TAG_BYTES], packed[-TAG_BYTES:]
    if digest(whole).to_bytes(DIGEST_BYTES, "little") + bytes(TAG_BYTES - DIGEST_BYTES) != seal:
        return DiskFault.CORRUPT_HEADER
    return whole[_CLEAR.size :]


def _unpack_inside(packed: bytes) -> Inside | None:
    pipeline, fingerprint, writer, root_key, parent_key, key, token_count, part_count = _INNER.unpack_from(packed)
    parts_end = _INNER.size + part_count * _PART.size
    if len(packed) != parts_end + token_count * TOKEN_BYTES:
        return None
    parts = tuple(_unpack_part(fields) for fields in _PART.iter_unpack(packed[_INNER.size : parts_end]))
    return Inside(pipeline, fingerprint, BlockIdentity(root_key, parent_key, key, packed[parts_end:], writer), parts)


def _pack_part(part: StoredPart) -> bytes:
    errors = (part.error.max_absolute, part.error.rms_relative)
    return _PART.pack(part.raw_bytes, part.stored_bytes, part.codec, *errors, 0, part.stored_digest, part.raw_digest)


def _unpack_part(fields: tuple[int, int, int, float, float, int, int, int]) -> StoredPart:
    raw_bytes, stored_bytes, codec, max_absolute, rms_relative, _, stored_digest, raw_digest = fields
    return StoredPart(
        raw_bytes, stored_bytes, codec, CodingError(max_absolute, rms_relative), stored_digest, raw_digest
    )


def _rest_bytes(part_count: int, block_tokens: int) -> int:
    return _INNER.size + part_count * _PART.size + block_tokens * TOKEN_BYTES + TAG_BYTES
