"""The header of one part of a block on disk. Little-endian; on disk: never renumber, never reorder.

 offset  bytes  field
      0      8  magic "KVSBLOCK"
      8      4  format version, 1
     12      4  slab number
     16      4  slot number inside the slab
     20      4  token count n
     24      8  write sequence, of the tier
     32      8  clear generation of the namespace
     40      8  writer id; 0 = unknown
     48     16  ns_id
     64     16  root_key
     80     16  parent_key
     96     16  key
    112      2  part index
    114      2  part count
    116      4  codec, 0 = none
    120      8  payload bytes
    128      8  XXH3-64 of the payload
    136    4*n  token ids, u32
136+4*n      8  XXH3-64 of all bytes before
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvstore.tiers._core import _copy
from kvstore.tiers.base import BlockIdentity
from kvstore.tiers.buffers import whole_pages
from kvstore.tiers.checksum import DIGEST_BYTES, is_sealed, sealed
from kvstore.tiers.faults import DiskFault

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from kvstore.tiers.base import Bytes2D

HEADER_MAGIC = b"KVSBLOCK"
HEADER_VERSION = 1
CODEC_NONE = 0
TOKEN_BYTES = 4

_FIXED = struct.Struct("<8sIIIIQQQ16s16s16s16sHHIQQ")
_TOKEN_COUNT = struct.Struct("<20xI")
_FAULTS = (DiskFault.CORRUPT_HEADER, DiskFault.OTHER_BLOCK, DiskFault.CORRUPT_PAYLOAD)

# One part of one block, by addresses: header page, payload, where that goes (the same: it stays); and its bytes.
PartPlace = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """What one part of a block in a slot says about itself."""

    slab: int
    slot: int
    sequence: int
    generation: int
    ns_id: bytes
    identity: BlockIdentity
    part: int
    part_count: int
    payload_bytes: int
    payload_digest: int

    def pack(self) -> bytes:
        """The header as it lies on disk, without padding."""
        return sealed(self.unsealed())

    def unsealed(self) -> bytes:
        """The same without the digest at its end."""
        block = self.identity
        return (
            _FIXED.pack(
                HEADER_MAGIC,
                HEADER_VERSION,
                self.slab,
                self.slot,
                len(block.tokens) // TOKEN_BYTES,
                self.sequence,
                self.generation,
                block.writer,
                self.ns_id,
                block.root_key,
                block.parent_key,
                block.key,
                self.part,
                self.part_count,
                CODEC_NONE,
                self.payload_bytes,
                self.payload_digest,
            )
            + block.tokens
        )


def packed_bytes(block_tokens: int) -> int:
    """Exact bytes of a header without padding."""
    return _FIXED.size + block_tokens * TOKEN_BYTES + DIGEST_BYTES


def header_pages_bytes(block_tokens: int) -> int:
    """Bytes that a header takes in a slot: whole pages."""
    return whole_pages(packed_bytes(block_tokens))


def unpack_header(page: bytes | memoryview) -> BlockHeader | None:
    """The header at the start of `page`; None if there is none, it is damaged, or of another version."""
    if len(page) < _FIXED.size or bytes(page[: len(HEADER_MAGIC)]) != HEADER_MAGIC:
        return None
    (token_count,) = _TOKEN_COUNT.unpack_from(page)
    packed = bytes(page[: packed_bytes(token_count)])
    if len(packed) != packed_bytes(token_count) or not is_sealed(packed):
        return None
    (_, version, slab, slot, _, sequence, generation, writer_id, ns_id, root_key, parent_key, key, *rest) = (
        _FIXED.unpack_from(packed)
    )
    part, part_count, codec, payload_bytes, payload_digest = rest
    if version != HEADER_VERSION or codec != CODEC_NONE:
        return None
    identity = BlockIdentity(root_key, parent_key, key, packed[_FIXED.size : -DIGEST_BYTES], writer_id)
    place = (slab, slot, sequence, generation, ns_id)
    return BlockHeader(*place, identity, part, part_count, payload_bytes, payload_digest)


def unsealed_headers(headers: Iterable[BlockHeader]) -> Bytes2D:
    """Headers of blocks of equally many tokens as rows, whose digests are still to be put in."""
    rows = [header.unsealed() + bytes(DIGEST_BYTES) for header in headers]
    return np.frombuffer(bytearray().join(rows), dtype=np.uint8).reshape(len(rows), -1)


def seal_headers(places: Sequence[PartPlace], headers: Bytes2D, page_bytes: int) -> None:
    """Put payloads where they go, their digests into `headers`, and these, sealed, into their pages of `page_bytes`.

    What is left of pages becomes zero. A payload is read once, also where it is copied. Releases the GIL, for all of it
    once. The memory at the places is the caller's, and contiguous.
    """
    _copy.seal_headers(_table(places), headers, page_bytes)


def check_headers(places: Sequence[PartPlace], headers: Bytes2D, page_bytes: int) -> list[DiskFault | None]:
    """Put payloads where they go; why each is not what its row of `headers` says, by page and digest, None if it is.

    The digests and the writers of `headers` do not count. Where there is a fault, what was copied is undefined.
    """
    verdicts = np.zeros(len(places), dtype=np.uint8)
    _copy.check_headers(_table(places), headers, page_bytes, verdicts)
    return [_FAULTS[verdict - 1] if verdict else None for verdict in verdicts.tolist()]


def _table(places: Sequence[PartPlace]) -> NDArray[np.uint64]:
    return np.array(places, dtype=np.uint64).reshape(-1, 4)
