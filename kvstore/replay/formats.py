"""Formats of traces: one JSON object a line, plain or gzipped. Which one it is, is told by its first right line.

*mooncake*: a request a line with `timestamp` (ms), `input_length` (tokens) and `hash_ids`, one for each block of the
prompt; equal ids are equal blocks. Other fields, such as `output_length` and `session_id`, are not used.

*events*: what `kvstore events --json` printed. The log has no lookups, but each commit is told as one `stored` event of
the host tier with the new keys and the key before them, so the whole path is known: that is the request. What the
log cannot tell: prompts that were found entirely (they store nothing, so repeats are understated), times, and the
size of a block. Events of the disk tier are copies made by the store itself and are no requests; a promotion into
host memory names no parent and is none either.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import numpy as np

from kvstore.replay.errors import TraceError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

MOONCAKE = "mooncake"
EVENTS = "events"
_GZIP_MAGIC = b"\x1f\x8b"
_MILLISECONDS_MAX = 2**53
_TOKENS_MAX = 2**40
Record: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RawRequest:
    """One request as its line tells it. `input_tokens` is None where the format does not know it."""

    seconds: float
    input_tokens: int | None
    ids: NDArray[np.int64]


class RequestReader:
    """Iterates over the requests of a file, once. Raises TraceError at a bad line, or counts it when told to skip.

    `format` and the counters are right when the iteration has ended.
    """

    def __init__(self, path: Path, *, skip_bad_lines: bool = False) -> None:
        self._path = path
        self._skip_bad_lines = skip_bad_lines
        self._events = _EventPaths()
        self.format: str | None = None
        self.skipped_lines = 0

    @property
    def unknown_parents(self) -> int:
        """Requests of an event log that begin at a block of which the log does not tell how it came there."""
        return self._events.unknown_parents

    def __iter__(self) -> Iterator[RawRequest]:
        parse: Callable[[Record], RawRequest | None] | None = None
        for number, line in self._lines():
            try:
                record = _record(line)
                parse = parse or self._parser_for(record)
                request = parse(record)
            except (ValueError, OverflowError, RecursionError) as err:
                if not self._skip_bad_lines:
                    raise TraceError(f"{self._path}:{number}: {err}") from err
                self.skipped_lines += 1
                continue
            if request is not None:
                yield request

    def _parser_for(self, record: Record) -> Callable[[Record], RawRequest | None]:
        if "hash_ids" in record:
            self.format = MOONCAKE
            return _mooncake_request
        if "kind" in record or "gap" in record:
            self.format = EVENTS
            return self._events.request
        raise ValueError("neither a request with hash_ids nor an event of `kvstore events --json`")

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        try:
            with self._path.open("rb") as probe:
                packed = probe.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
            with gzip.open(self._path) if packed else self._path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield number, line
        except (OSError, EOFError, zlib.error) as err:
            raise TraceError(f"{self._path} cannot be read: {err}") from err


class _EventPaths:
    """Paths of all blocks that an event log has told of. Ids are given to keys in the order of their appearance."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._parents: dict[int, int] = {}
        self.unknown_parents = 0

    def request(self, record: Record) -> RawRequest | None:
        """The request behind an event, None where there is none."""
        if "kind" not in record and "gap" not in record:
            raise ValueError("no event: it has neither kind nor gap")
        if record.get("kind") != "stored" or record.get("tier") != "host" or not record.get("parent_key"):
            return None
        parent, keys = record["parent_key"], record.get("keys")
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in (parent, *keys)):
            raise ValueError("parent_key and keys must be texts")
        path = [] if parent == record.get("root_key") else self._path_to(parent)
        for key in keys:
            block = self._ids.setdefault(key, len(self._ids))
            if path:
                self._parents[block] = path[-1]
            path.append(block)
        return RawRequest(0.0, None, np.array(path, dtype=np.int64))

    def _path_to(self, key: str) -> list[int]:
        if key not in self._ids:
            self.unknown_parents += 1
        at: int | None = self._ids.setdefault(key, len(self._ids))
        path: list[int] = []
        while at is not None:
            path.append(at)
            at = self._parents.get(at)
            if len(path) > len(self._ids):
                raise ValueError("a block is its own ancestor")
        return path[::-1]


def _record(line: bytes) -> Record:
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError(f"a {type(record).__name__}, expected a JSON object")
    return record


def _mooncake_request(record: Record) -> RawRequest:
    milliseconds = record.get("timestamp")
    if not _is_number(milliseconds) or not 0 <= milliseconds <= _MILLISECONDS_MAX:
        raise ValueError(f"timestamp is {milliseconds!r}, expected milliseconds of at least 0")
    tokens = record.get("input_length")
    if type(tokens) is not int or not 0 <= tokens <= _TOKENS_MAX:
        raise ValueError(f"input_length is {tokens!r}, expected a whole number in 0..{_TOKENS_MAX}")
    ids = record.get("hash_ids")
    if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
        raise ValueError("hash_ids must be a list of whole numbers")
    try:
        return RawRequest(milliseconds / 1000, tokens, np.array(ids, dtype=np.int64))
    except OverflowError as err:
        raise ValueError("a hash id does not fit into 64 bits, signed") from err


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
