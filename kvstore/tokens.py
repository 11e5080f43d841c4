"""Token ids and digests as they come from callers, made into one flat uint32 array."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

from kvstore.errors import InvalidTokensError
from kvstore.types import DIGEST_BYTES, DIGEST_SYMBOLS, Symbols, require_namespace

if TYPE_CHECKING:
    from kvstore.types import Namespace, TokenArray

TOKEN_MAX = 2**32 - 1
PROMPT_TOKENS_MAX = 4 * 2**20
_PACKED = np.dtype("<u4")

# Any flat int32/int64/uint32 buffer (numpy, torch on the CPU, array, memoryview) or a sequence of ints; of a namespace
# of digests, a sequence of `bytes` of 32 each.
Tokens: TypeAlias = Any


def as_prompt(namespace: Namespace, tokens: Tokens) -> TokenArray:
    """What `namespace` compares of a prompt, as `as_token_array` gives it: token ids, or eight numbers for each digest.

    Raises InvalidTokensError for token ids where digests are expected, for digests where token ids are, and for what is
    neither; InvalidNamespaceError for what is no namespace. What this function gave it gives back as it is, and
    whole digests of that as a copy.
    """
    require_namespace(namespace)
    return _as_digests(tokens) if namespace.layout.symbols == Symbols.DIGESTS else as_token_array(tokens)


def as_token_array(tokens: Tokens) -> TokenArray:
    """Return a private, contiguous, read-only uint32 copy of `tokens`.

    Raises InvalidTokensError for anything that is not a flat sequence of whole numbers in 0..2^32-1, for bools and
    floats, and for prompts of more than PROMPT_TOKENS_MAX tokens. O(tokens), one allocation for buffers. What lies in
    `bytes`, which nobody can change, is returned as it is: what this function gave, for one.
    """
    is_packed = _is_packed(tokens)
    array = tokens if is_packed else _as_integers(tokens)
    if array.ndim != 1:
        raise InvalidTokensError(f"tokens have shape {array.shape}, expected one flat sequence")
    if array.size > PROMPT_TOKENS_MAX:
        raise InvalidTokensError(f"the prompt has {array.size} tokens, expected at most {PROMPT_TOKENS_MAX}")
    if is_packed:
        return array
    if array.size and not _fits_uint32(array):
        bad = next(int(value) for value in array if not 0 <= int(value) <= TOKEN_MAX)
        raise InvalidTokensError(f"token id {bad} is out of range, expected 0..{TOKEN_MAX}")
    return unpacked_tokens(array.astype(_PACKED, copy=False).tobytes())


def unpacked_tokens(packed: bytes) -> TokenArray:
    """The ids in little-endian u32, whose bytes are a multiple of 4. No copy."""
    return np.frombuffer(packed, dtype=_PACKED)


def packed_tokens(prompt: TokenArray) -> bytes:
    """Token ids as little-endian u32, one after the other; no copy of what `as_token_array` gave."""
    if _is_packed(prompt):
        return cast("bytes", prompt.base)
    return prompt.astype(_PACKED, copy=False).tobytes()


def _as_digests(digests: Tokens) -> TokenArray:
    if _is_packed(digests) or _is_part_of_packed(digests):
        packed: TokenArray = digests if _is_packed(digests) else unpacked_tokens(digests.tobytes())
        if packed.size % DIGEST_SYMBOLS:
            raise InvalidTokensError(f"the digests have {packed.nbytes} bytes, expected {DIGEST_BYTES} for each block")
    else:
        packed = unpacked_tokens(b"".join(_checked_digests(digests)))
    if packed.size > PROMPT_TOKENS_MAX:
        count, most = packed.size // DIGEST_SYMBOLS, PROMPT_TOKENS_MAX // DIGEST_SYMBOLS
        raise InvalidTokensError(f"the prompt has {count} digests, expected at most {most}")
    return packed


def _checked_digests(digests: Tokens) -> list[bytes]:
    if isinstance(digests, (str, bytes, bytearray)):
        raise InvalidTokensError(
            f"digests are one {type(digests).__name__}, expected a sequence of {DIGEST_BYTES} bytes each"
        )
    try:
        listed = list(digests)
    except TypeError as err:
        raise InvalidTokensError(f"digests are a {type(digests).__name__}, expected a sequence of bytes") from err
    for digest in listed:
        if not isinstance(digest, bytes) or len(digest) != DIGEST_BYTES:
            what = f"{len(digest)} bytes" if isinstance(digest, bytes) else f"a {type(digest).__name__}"
            raise InvalidTokensError(
                f"a digest is {what}, expected {DIGEST_BYTES} bytes: this namespace knows its blocks by digests alone"
            )
    return listed


def _is_packed(tokens: Tokens) -> bool:
    """Whether these are the ids in a `bytes` object, all of them in their order."""
    return (
        type(tokens) is np.ndarray
        and isinstance(tokens.base, bytes)
        and tokens.dtype == _PACKED
        and tokens.ndim == 1
        and tokens.nbytes == len(tokens.base)
        and tokens.flags.c_contiguous
    )


def _is_part_of_packed(tokens: Tokens) -> bool:
    """Whether these are some neighbours of such ids."""
    return (
        type(tokens) is np.ndarray
        and _is_packed(tokens.base)
        and tokens.dtype == _PACKED
        and tokens.ndim == 1
        and bool(tokens.flags.c_contiguous)
    )


def _as_integers(tokens: Tokens) -> np.ndarray[Any, np.dtype[Any]]:
    if isinstance(tokens, (str, bytes, bytearray)):
        raise InvalidTokensError(f"tokens are a {type(tokens).__name__}, expected token ids; tokenize the text first")
    try:
        array = np.asarray(tokens)
    except (TypeError, ValueError, RuntimeError, OverflowError) as err:
        raise InvalidTokensError(f"tokens cannot be read as integers: {err}") from err
    if array.size == 0 and array.dtype == np.float64 and not isinstance(tokens, np.ndarray):
        return array.astype(np.uint32)  # an empty list has no type of its own
    if array.dtype.kind not in "iu":
        raise InvalidTokensError(f"tokens have type {array.dtype}, expected integers in 0..{TOKEN_MAX}")
    return array


def _fits_uint32(array: np.ndarray[Any, np.dtype[Any]]) -> bool:
    if array.dtype.kind == "i" and int(array.min()) < 0:
        return False
    return array.dtype.itemsize <= 4 or int(array.max()) <= TOKEN_MAX
