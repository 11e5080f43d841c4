"""Encryption at rest: AES-256-GCM (NIST SP 800-38D) with nonces that cannot repeat.

A block is sealed in pieces: its header, and its payload in segments of 256 KiB. The 12 bytes of a nonce are the write
sequence of the block and the number of the piece. The key of a piece is not the provider's: it is derived from that by
HKDF-SHA-256 (RFC 5869) with a salt of 16 random bytes that each start of a tier, and each child of a fork, draws anew.
So

- within one start, no sequence is given twice, and no piece has the number of another: they are counted in memory;
- two starts, whether of one directory, of its copies, of a backup that was brought back, or of other directories with
  the same key, share a derived key only if 128 random bits are equal: at 2^32 starts with one key the odds are 2^-65;
- nothing about this is read from a disk that may lie, be old, or have lost what was not synced. What is read is the
  salt in a block's own header, to decrypt with. A wrong one gives another key, and so a miss.

What is not covered is the image of a running machine that is resumed twice: both go on from one counter. Restart the
process behind such a resumption.

Cut into segments, since the library keeps the GIL while it works: 256 KiB take some 60-300 us.
"""

from __future__ import annotations

import os
import struct
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from kvstore.errors import ConfigError
from kvstore.tiers.codecs.keys import KEY_ID_BYTES

if TYPE_CHECKING:
    from kvstore.tiers.base import Bytes1D
    from kvstore.tiers.codecs.keys import Key, KeyProvider

SALT_BYTES = 16
TAG_BYTES = 16
SEGMENT_BYTES = 256 << 10
NO_SALT = bytes(SALT_BYTES)

_NONCE = struct.Struct(">QI")
_INFO = b"kvstore block at rest 1 "
_CIPHERS_MAX = 256


def sealed_bytes(plain_bytes: int) -> int:
    """Bytes of a payload once it is sealed."""
    return plain_bytes + TAG_BYTES * -(-plain_bytes // SEGMENT_BYTES)


class BlockCipher:
    """Seals with the provider's current key and the salt of this start, opens what any of its keys sealed. Thread-safe.

    Derived keys are kept for the 256 pairs of key and salt used last.
    """

    def __init__(self, keys: KeyProvider) -> None:
        """Raises ConfigError where the library is missing."""
        _library()
        self._process = os.getpid()
        self._salt = os.urandom(SALT_BYTES)
        self._keys = keys
        self._lock = threading.Lock()
        self._ciphers: OrderedDict[tuple[Key, bytes], PieceCipher] = OrderedDict()

    def sealer(self) -> tuple[Key, bytes, PieceCipher]:
        """What to write with now: the key, the salt, and the cipher that they give."""
        key = self._keys.current()
        with self._lock:
            if self._process != os.getpid():
                self._process, self._salt = os.getpid(), os.urandom(SALT_BYTES)
            salt = self._salt
        return key, salt, self._cipher(key, salt)

    def opener(self, key_id: bytes, salt: bytes) -> PieceCipher | None:
        """What seals and opens with a key and a salt; None where no such key is there."""
        key = self._keys.find(key_id)
        return None if key is None else self._cipher(key, salt)

    def _cipher(self, key: Key, salt: bytes) -> PieceCipher:
        with self._lock:
            cipher = self._ciphers.get((key, salt))
            if cipher is None:
                cipher = self._ciphers[key, salt] = PieceCipher(_derived(key, salt))
                if len(self._ciphers) > _CIPHERS_MAX:
                    self._ciphers.popitem(last=False)
            else:
                self._ciphers.move_to_end((key, salt))
        return cipher


class PieceCipher:
    """Seals and opens the pieces of blocks with one derived key."""

    def __init__(self, cipher: Any) -> None:  # noqa: ANN401  # the library is an extra
        self._cipher = cipher

    def seal(self, piece: bytes | memoryview, sequence: int, number: int, about: bytes) -> bytes:
        """A sealed piece; `about` must be the same when it is opened."""
        sealed: bytes = self._cipher.encrypt(_NONCE.pack(sequence, number), piece, about)
        return sealed

    def open(self, piece: bytes | memoryview, sequence: int, number: int, about: bytes) -> bytes | None:
        """A piece as it was; None if it is not just that."""
        try:
            opened: bytes = self._cipher.decrypt(_NONCE.pack(sequence, number), piece, about)
        except _invalid_tag():
            return None
        return opened

    def seal_payload(self, plain: Bytes1D, sealed: Bytes1D, sequence: int, number: int, about: bytes) -> int:
        """Seal `plain` into `sealed`, of sealed_bytes(), as pieces from `number` on; returns the next number."""
        done = 0
        for start in range(0, len(plain), SEGMENT_BYTES):
            piece = self.seal(plain[start : start + SEGMENT_BYTES].data, sequence, number, about)
            sealed[done : done + len(piece)] = memoryview(piece)
            done += len(piece)
            number += 1
        return number

    def open_payload(self, sealed: Bytes1D, plain: Bytes1D, sequence: int, number: int, about: bytes) -> bool:
        """Open what seal_payload() sealed; false, and `plain` is undefined, if it is not just that."""
        done = 0
        for start in range(0, len(plain), SEGMENT_BYTES):
            size = min(SEGMENT_BYTES, len(plain) - start)
            piece = self.open(sealed[done : done + size + TAG_BYTES].data, sequence, number, about)
            if piece is None:
                return False
            plain[start : start + size] = memoryview(piece)
            done += size + TAG_BYTES
            number += 1
        return True


def _derived(key: Key, salt: bytes) -> Any:  # noqa: ANN401  # the library is an extra
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    assert len(key.key_id) == KEY_ID_BYTES, key
    return AESGCM(HKDF(algorithm=SHA256(), length=32, salt=salt, info=_INFO + key.key_id).derive(key.secret))


def _invalid_tag() -> type[Exception]:
    from cryptography.exceptions import InvalidTag

    kind: type[Exception] = InvalidTag
    return kind


def _library() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError as err:
        raise ConfigError(
            'encryption "aes-gcm" needs a library: pip install "prefix-kvstore[encryption]", or choose "none"'
        ) from err
