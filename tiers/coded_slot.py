"""A block in a coded slot: the header, and right behind it all payloads, one after the other.

A payload is what the pipeline's codec made of a part, or the part itself, and, where the pipeline encrypts, that sealed
in segments (codecs/aes_gcm.py), whose pieces are numbered through the block from 1 on. Zeros follow, to the slot's end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvstore.tiers.checksum import copy_and_digest, digest
from kvstore.tiers.codecs.aes_gcm import SEGMENT_BYTES, TAG_BYTES, sealed_bytes
from kvstore.tiers.codecs.coding import NO_DIGEST, fingerprint
from kvstore.tiers.codecs.none import NONE
from kvstore.tiers.codecs.registry import pipeline_of
from kvstore.tiers.coded_header import HEADER_PIECE, Inside, StoredPart, coded_header_bytes, pack_clear, seal_header
from kvstore.tiers.faults import DiskFault

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.tiers.base import BlockIdentity, Bytes1D
    from kvstore.tiers.codecs.aes_gcm import PieceCipher
    from kvstore.tiers.codecs.base import Codec
    from kvstore.tiers.codecs.coding import EncodedBlock, PoolCoding
    from kvstore.tiers.coded_header import CodedHeader, Place


@dataclass(frozen=True, slots=True)
class Wanted:
    """Parts of a block that are read, and where each belongs."""

    parts: tuple[int, ...]
    targets: tuple[Bytes1D, ...]


def block_bytes(block: EncodedBlock, block_tokens: int) -> int:
    """What a block takes of a slot."""
    payload_bytes = sum(_stored_bytes(len(part.data), block.pipeline.encrypts) for part in block.parts)
    return coded_header_bytes(len(block.parts), block_tokens) + payload_bytes


def block_bytes_max(part_sizes: Sequence[int], block_tokens: int, *, encrypts: bool) -> int:
    """What a block takes of a slot whose parts no codec makes smaller."""
    payload_bytes = sum(_stored_bytes(size, encrypts) for size in part_sizes)
    return coded_header_bytes(len(part_sizes), block_tokens) + payload_bytes


def usual_bytes(coding: PoolCoding, part_sizes: Sequence[int], block_tokens: int) -> int | None:
    """What a block takes of a slot if its pipeline makes all blocks of one size; None where it does not."""
    pipeline = coding.pipeline
    if pipeline is None:
        return None
    fixed = [pipeline.codec.fixed_bytes(size, form) for size, form in zip(part_sizes, coding.forms, strict=True)]
    known = [size for size in fixed if size is not None]
    if len(known) < len(fixed):
        return None
    return block_bytes_max(known, block_tokens, encrypts=pipeline.encrypts)


def lay_out(
    place: Place, identity: BlockIdentity, block: EncodedBlock, cipher: PieceCipher | None, span: Bytes1D
) -> bytes:
    """Fill the memory of a slot; returns the packed header. Digests are of the bytes as they are copied."""
    block_tokens = len(identity.tokens) // 4
    clear = pack_clear(place, len(block.parts), block_tokens)
    start = coded_header_bytes(len(block.parts), block_tokens)
    piece = HEADER_PIECE + 1
    parts = []
    for part in block.parts:
        end = start + _stored_bytes(len(part.data), cipher is not None)
        stored = span[start:end]
        if cipher is None:
            stored_digest = copy_and_digest(stored, part.data)
        else:
            piece = cipher.seal_payload(part.data, stored, place.sequence, piece, clear)
            stored_digest = digest(stored.data)
        sizes = (part.raw_bytes, end - start, part.codec)
        parts.append(StoredPart(*sizes, part.error, stored_digest, part.raw_digest))
        start = end
    inside = Inside(block.pipeline.number, block.fingerprint, identity, tuple(parts))
    packed = seal_header(clear, inside, place.sequence, cipher)
    span[: len(packed)] = memoryview(packed)
    span[start:] = 0
    return packed


def payload_fault(header: CodedHeader, span: Bytes1D) -> DiskFault | None:
    """Whether what is stored of all parts is what was written, as their digests tell."""
    for part, stored in zip(header.parts, _payloads(header, span), strict=True):
        if len(stored) != part.stored_bytes or digest(stored.data) != part.stored_digest:
            return DiskFault.CORRUPT_PAYLOAD
    return None


def take_out(
    header: CodedHeader, span: Bytes1D, wanted: Wanted, coding: PoolCoding, cipher: PieceCipher | None
) -> DiskFault | None:
    """Decrypt and decode parts of a block whose header was verified; None if each is what was stored."""
    pipeline = pipeline_of(header.pipeline)
    if pipeline is None or pipeline.encrypts != (cipher is not None):
        return DiskFault.OTHER_CODEC
    if fingerprint(pipeline, coding.forms) != header.fingerprint:
        return DiskFault.OTHER_CODEC
    payloads = _payloads(header, span)
    for part, target in zip(wanted.parts, wanted.targets, strict=True):
        about, stored = header.parts[part], payloads[part]
        if len(stored) != about.stored_bytes or about.codec not in (NONE.number, pipeline.codec.number):
            return DiskFault.CORRUPT_PAYLOAD
        if cipher is None:
            if digest(stored.data) != about.stored_digest:
                return DiskFault.CORRUPT_PAYLOAD
        else:
            opened = _opened(header, part, stored, cipher)
            if opened is None:
                return DiskFault.CORRUPT_PAYLOAD
            stored = opened
        codec: Codec = NONE if about.codec == NONE.number else pipeline.codec
        if not codec.decode(stored, target, coding.forms[part]):
            return DiskFault.CORRUPT_PAYLOAD
        if about.raw_digest != NO_DIGEST and digest(target.data) != about.raw_digest:
            return DiskFault.CORRUPT_PAYLOAD
    return None


def _opened(header: CodedHeader, part: int, stored: Bytes1D, cipher: PieceCipher) -> Bytes1D | None:
    piece = HEADER_PIECE + 1 + sum(_pieces(before.stored_bytes) for before in header.parts[:part])
    plain = np.empty(len(stored) - TAG_BYTES * _pieces(len(stored)), dtype=np.uint8)
    done = cipher.open_payload(stored, plain, header.sequence, piece, header.about)
    return plain if done else None


def _payloads(header: CodedHeader, span: Bytes1D) -> list[Bytes1D]:
    start = coded_header_bytes(len(header.parts), len(header.identity.tokens) // 4)
    payloads = []
    for part in header.parts:
        payloads.append(span[start : start + part.stored_bytes])
        start += part.stored_bytes
    return payloads


def _stored_bytes(plain_bytes: int, encrypts: bool) -> int:
    return sealed_bytes(plain_bytes) if encrypts else plain_bytes


def _pieces(stored_bytes: int) -> int:
    return -(-stored_bytes // (SEGMENT_BYTES + TAG_BYTES))
