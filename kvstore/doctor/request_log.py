"""Requests of a log as lookups: one JSON object a line, in the order in which they came.

Lines as OpenAI's API takes requests (https://platform.openai.com/docs/api-reference/chat): `messages` and `tools`, or
`prompt` as text or token ids, with `model`; `token_ids` in their place; what was found in
`usage.prompt_tokens_details.cached_tokens`; `tenant` and `cache_salt` of those who have them; `timestamp` or `created`
in seconds. Or lines of a Mooncake trace (https://github.com/kvcache-ai/Mooncake): `hash_ids` of blocks of 512 tokens,
`input_length`, `timestamp` in milliseconds.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvstore.doctor.seen import Home, SeenLookup
from kvstore.errors import InvalidArgumentError
from kvstore.tokens import PROMPT_TOKENS_MAX, as_token_array

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvstore.types import TokenArray

_BLOCK_TOKENS = 16
_TRACE_BLOCK_TOKENS = 512
_LINE_CHARACTERS_MAX = 64 << 20


class Tokenizer(Protocol):
    """Turns what a request says into token ids; raises InvalidArgumentError for what it refuses."""

    def chat(self, messages: object, tools: object) -> list[int]:
        """Those of a conversation."""
        ...

    def text(self, prompt: str) -> list[int]:
        """Those of a text."""
        ...


@dataclass(frozen=True, slots=True)
class LoggedLookup:
    """A request of a log: when it came, in seconds from any beginning, if the log says so."""

    lookup: SeenLookup
    seconds: float | None


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is no request: its number from 1 on, and why."""

    number: int
    reason: str


class RequestLog:
    """Reads a log once. Without a tokenizer it knows prompts of token ids alone.

    `block_tokens` are 16 unless they are given, and 512 in a trace.
    """

    def __init__(self, tokenizer: Tokenizer | None, block_tokens: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._block_tokens = block_tokens or _BLOCK_TOKENS
        self._trace_block_tokens = block_tokens or _TRACE_BLOCK_TOKENS
        self._ordinals: dict[int, int] = {}  # of the blocks of a trace

    def read(self, lines: Iterable[str]) -> Iterator[LoggedLookup | BadLine]:
        """Each line as a lookup, or why it is none. Empty ones are skipped."""
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield self._read(number, line)

    def _read(self, number: int, line: str) -> LoggedLookup | BadLine:
        try:
            return self._lookup(_object_of(line))
        except InvalidArgumentError as err:
            return BadLine(number, str(err))

    def _lookup(self, row: dict[str, Any]) -> LoggedLookup:
        home = Home(_text(row, "tenant"), _text(row, "model"), "", "", _text(row, "cache_salt"))
        if "hash_ids" in row:
            seconds = _number(row, "timestamp")
            lookup = SeenLookup(home, self._trace_tokens(row), None, self._trace_block_tokens)
            return LoggedLookup(lookup, None if seconds is None else seconds / 1000)
        tokens = as_token_array(self._ids(row))
        lookup = SeenLookup(home, tokens, _cached_tokens(row), self._block_tokens)
        return LoggedLookup(lookup, _number(row, "timestamp" if "timestamp" in row else "created"))

    def _ids(self, row: dict[str, Any]) -> list[int]:
        for name in ("token_ids", "prompt"):
            if isinstance(row.get(name), list):
                return _checked_ids(row[name], name)
        prompt, messages = row.get("prompt"), row.get("messages")
        if not isinstance(prompt, str) and not isinstance(messages, list):
            raise InvalidArgumentError("it has no messages, prompt, token_ids or hash_ids")
        if self._tokenizer is None:
            raise InvalidArgumentError("its prompt is text; give --tokenizer PATH")
        return (
            self._tokenizer.text(prompt)
            if isinstance(prompt, str)
            else self._tokenizer.chat(messages, row.get("tools"))
        )

    def _trace_tokens(self, row: dict[str, Any]) -> TokenArray:
        """Tokens that stand for the blocks of a trace: equal ones for equal blocks, others for others."""
        ids = row["hash_ids"]
        if not isinstance(ids, list) or not all(isinstance(one, int) for one in ids):
            raise InvalidArgumentError(f"its hash_ids are {ids!r:.60}, expected a list of whole numbers")
        size = self._trace_block_tokens
        if len(ids) > PROMPT_TOKENS_MAX // size:
            raise InvalidArgumentError(f"it has {len(ids)} hash_ids, more than a prompt may have")
        # Beyond so many blocks of a trace their tokens begin again.
        ordinals = [self._ordinals.setdefault(one, len(self._ordinals)) % (2**32 // size) for one in ids]
        length = _number(row, "input_length")
        begins = np.array(ordinals, dtype=np.uint64) * size
        tokens = (begins[:, None] + np.arange(size, dtype=np.uint64)).reshape(-1).astype(np.uint32)
        return tokens if length is None else tokens[: max(0, int(length))]


def _object_of(line: str) -> dict[str, Any]:
    if len(line) > _LINE_CHARACTERS_MAX:
        raise InvalidArgumentError(f"it has {len(line)} characters, expected at most {_LINE_CHARACTERS_MAX}")
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as err:
        raise InvalidArgumentError(f"it is no JSON: {err}") from err
    if not isinstance(row, dict):
        raise InvalidArgumentError(f"it is a {type(row).__name__}, expected a JSON object")
    return row


def _checked_ids(ids: list[Any], name: str) -> list[int]:
    if not all(isinstance(one, int) and not isinstance(one, bool) and 0 <= one < 2**32 for one in ids):
        raise InvalidArgumentError(f"its {name} are {ids!r:.60}, expected token ids of 0..2^32-1")
    return ids


def _text(row: dict[str, Any], name: str) -> str:
    value = row.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidArgumentError(f"its {name} is {value!r:.60}, expected a text")
    return value or ""


def _number(row: dict[str, Any], name: str) -> float | None:
    value = row.get(name)
    if value is None:
        return None
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not -1e15 < value < 1e15:
        raise InvalidArgumentError(f"its {name} is {value!r:.60}, expected a number")
    return float(value)


def _cached_tokens(row: dict[str, Any]) -> int | None:
    """What was found of it, where the log says so."""
    usage = row.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    cached = _number(details, "cached_tokens") if isinstance(details, dict) else None
    if cached is not None and cached < 0:
        raise InvalidArgumentError(f"its cached_tokens are {cached:g}, expected 0 or more")
    return None if cached is None else int(cached)
