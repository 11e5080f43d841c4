"""What stands in a prompt besides its tokens: images and the like, in the keys of the blocks that they touch. No vLLM.

vLLM gives each item an identifier, a hash of its content, and puts placeholder tokens where it stands
(vllm/v1/core/kv_cache_utils.py, `_gen_mm_extra_hash_keys`). A block that an item touches is known to the store not by
its tokens but by a digest of them and, of each item in it, its kind, identifier, length and distance from the block's
beginning. Blocks without one keep their tokens, so prompts share what lies before their first image.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvstore.types import DIGEST_SYMBOLS

if TYPE_CHECKING:
    from collections.abc import Sequence

# Set in each number of such a block. No vocabulary has tokens of that size, so a block of tokens is never equal to one.
NO_TOKEN = 1 << 31
_PERSON = b"kvstore contents"


@dataclass(frozen=True, slots=True)
class Content:
    """An item of a prompt: its kind ("image"), what it is, and the tokens that stand for it."""

    kind: str
    identifier: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class ContentKeys:
    """The items of one prompt, in the order of their offsets, and its size of blocks (at least DIGEST_SYMBOLS)."""

    contents: tuple[Content, ...]
    block_tokens: int

    def keyed(self, tokens: array[int], first_token: int) -> array[int]:
        """What the store compares of `tokens`, whole blocks of the prompt from `first_token` on.

        248 bits of a BLAKE2b digest stand for each block that an item touches. O(tokens in those blocks).
        """
        touched: dict[int, list[Content]] = {}
        end = first_token + len(tokens)
        for content in self.contents:
            first = max(first_token, content.offset // self.block_tokens * self.block_tokens)
            for start in range(first, min(end, content.offset + content.length), self.block_tokens):
                touched.setdefault(start, []).append(content)
        for start, contents in touched.items():
            place = slice(start - first_token, start - first_token + self.block_tokens)
            tokens[place] = self._symbols(tokens[place], start, contents)
        return tokens

    def _symbols(self, tokens: array[int], start: int, contents: list[Content]) -> array[int]:
        digest = hashlib.blake2b(_field(tokens.tobytes()), digest_size=4 * DIGEST_SYMBOLS, person=_PERSON)
        for content in contents:
            digest.update(_field(content.kind.encode()) + _field(content.identifier.encode()))
            digest.update(_number(content.offset - start) + _number(content.length))
        words = array("I", digest.digest())
        rest = self.block_tokens - len(words)
        return array("I", [NO_TOKEN | word for word in words] + [NO_TOKEN] * rest)


def have_keys(features: Sequence[Any], block_tokens: int) -> bool:
    """Whether all items of a request have identifiers and tokens, and its blocks are long enough for a digest."""
    return not features or (
        block_tokens >= DIGEST_SYMBOLS
        and all(feature.identifier and feature.mm_position.length > 0 for feature in features)
    )


def contents_of(features: Sequence[Any], block_tokens: int) -> ContentKeys | None:
    """The items of a request of vLLM's that have keys, by its `mm_features`; None without any."""
    if not features:
        return None
    found = [
        Content(feature.modality, feature.identifier, feature.mm_position.offset, feature.mm_position.length)
        for feature in features
    ]
    return ContentKeys(tuple(sorted(found, key=lambda content: content.offset)), block_tokens)


def _field(value: bytes) -> bytes:
    return _number(len(value)) + value


def _number(value: int) -> bytes:
    return value.to_bytes(8, "little", signed=True)
