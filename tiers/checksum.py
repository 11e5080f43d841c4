"""The checksum of everything kvstore writes to disk: XXH3-64, unkeyed. On disk: never change."""

from __future__ import annotations

import xxhash

DIGEST_BYTES = 8


def digest(data: bytes | memoryview) -> int:
    """XXH3-64 of `data` as a number. About 10 GB/s; it finds damage, it does not stop forgers."""
    return xxhash.xxh3_64_intdigest(data)


def sealed(data: bytes) -> bytes:
    """`data` followed by its digest, little-endian."""
    return data + digest(data).to_bytes(DIGEST_BYTES, "little")


def is_sealed(data: bytes) -> bool:
    """Whether `data` ends in the digest of what comes before it."""
    return len(data) > DIGEST_BYTES and digest(data[:-DIGEST_BYTES]) == int.from_bytes(data[-DIGEST_BYTES:], "little")
