"""How the blocks of one pool are stored from now on, and a block on its way there."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from kvstore.tiers.checksum import digest
from kvstore.tiers.codecs.base import NO_ERROR, OPAQUE, CodingError
from kvstore.tiers.codecs.none import NONE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.tiers.base import Bytes1D
    from kvstore.tiers.codecs.base import PartForm
    from kvstore.tiers.codecs.registry import Pipeline

NO_DIGEST = 0


@dataclass(frozen=True, slots=True)
class PoolCoding:
    """What is done to each block that is written; None: nothing, it lies in plain slots. `forms` has one for each part.

    `forms` are asked too when a block is read that another pipeline wrote.
    """

    pipeline: Pipeline | None
    forms: tuple[PartForm, ...]


def no_coding(part_count: int) -> PoolCoding:
    """Plain slots for parts of which nothing is known."""
    return PoolCoding(None, (OPAQUE,) * part_count)


@dataclass(frozen=True, slots=True)
class EncodedPart:
    """One part on its way to a slot, before encryption. Where it stays as it is, `codec` is 0 and `data` the part."""

    raw_bytes: int
    codec: int
    data: Bytes1D
    raw_digest: int
    error: CodingError


@dataclass(frozen=True, slots=True)
class EncodedBlock:
    """One block on its way to a slot, and how long its encoding took."""

    pipeline: Pipeline
    fingerprint: int
    parts: tuple[EncodedPart, ...]
    seconds: float


def encode_block(pipeline: Pipeline, forms: tuple[PartForm, ...], parts: Sequence[Bytes1D]) -> EncodedBlock:
    """Put each part through the pipeline's codec."""
    started = time.perf_counter()
    encoded = tuple(_encode_part(pipeline, form, part) for form, part in zip(forms, parts, strict=True))
    return EncodedBlock(pipeline, fingerprint(pipeline, forms), encoded, time.perf_counter() - started)


@lru_cache(maxsize=1024)
def fingerprint(pipeline: Pipeline, forms: tuple[PartForm, ...]) -> int:
    """See Pipeline.fingerprint."""
    return pipeline.fingerprint(forms)


def _encode_part(pipeline: Pipeline, form: PartForm, part: Bytes1D) -> EncodedPart:
    codec = pipeline.codec
    encoded = codec.encode(part, form)
    if encoded is None:
        return EncodedPart(len(part), NONE.number, part, NO_DIGEST, NO_ERROR)
    raw_digest = NO_DIGEST if codec.lossy else digest(part.data)
    return EncodedPart(len(part), codec.number, encoded.data, raw_digest, encoded.error)
