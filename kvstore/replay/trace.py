"""A trace in memory: for each request the blocks of its prompt, numbered so that equal numbers are equal prefixes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from kvstore.replay.errors import TraceError
from kvstore.replay.formats import EVENTS, MOONCAKE, RequestReader
from kvstore.types import BLOCK_TOKENS_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from kvstore.replay.formats import RawRequest
    from kvstore.types import TokenArray

DEFAULT_BLOCK_TOKENS = 16
_NUMBERS_MAX = 2**32
_PARTIAL_RATIO_MIN = 0.9


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of the file, whole blocks only.

    A block is a prefix: an id that the file lists behind different blocks is several of them, with numbers of their
    own. `split` blocks are made of each block of the file; `block_tokens` and `unique_blocks` are those of the made
    ones. Where no request has a time, `seconds` counts one for each. `_paths[_starts[i] : _starts[i + 1]]` are the
    prefixes of request i, the shortest first.
    """

    name: str
    format: str
    block_tokens: int
    split: int
    unique_blocks: int
    notes: tuple[str, ...]
    seconds: NDArray[np.float64]
    input_tokens: NDArray[np.int64]
    _starts: NDArray[np.int64]
    _paths: NDArray[np.uint32]

    @property
    def request_count(self) -> int:
        """Number of requests."""
        return int(self.seconds.size)

    def path(self, request: int) -> NDArray[np.uint32]:
        """Numbers of a request's prefixes, in blocks of the file: `split` times as long in replayed blocks."""
        return self._paths[self._starts[request] : self._starts[request + 1]]

    def block_counts(self) -> NDArray[np.int64]:
        """Replayed blocks of each request."""
        return np.diff(self._starts) * self.split

    def prompt(self, request: int) -> TokenArray:
        """Token ids that stand for a request's prompt: every replayed block repeats one token of its own."""
        path = self.path(request)
        if self.split == 1:
            return np.repeat(path, self.block_tokens)
        pieces = path[:, np.newaxis] * np.uint32(self.split) + np.arange(self.split, dtype=np.uint32)
        return np.repeat(pieces.ravel(), self.block_tokens)


@dataclass(frozen=True, slots=True)
class Expansion:
    """Each block of `from_tokens` becomes blocks of `to_tokens`."""

    from_tokens: int
    to_tokens: int


def read_trace(
    path: Path, *, block_tokens: int | None = None, expand: Expansion | None = None, skip_bad_lines: bool = False
) -> Trace:
    """Read a whole trace; see formats.py for what is understood.

    Without `block_tokens` the size of a block is taken from the longest request of a Mooncake trace, as a power of
    two, and is 16 for an event log. Raises TraceError, which names file and line.
    """
    reader = RequestReader(path, skip_bad_lines=skip_bad_lines)
    requests = list(reader)
    if not requests or reader.format is None:
        raise TraceError(f"{path} has no requests")
    trace = assemble_trace(requests, name=path.name, block_tokens=block_tokens, expand=expand)
    return replace(trace, format=reader.format, notes=(*_notes(reader), *trace.notes))


def assemble_trace(
    requests: Sequence[RawRequest], *, name: str, block_tokens: int | None = None, expand: Expansion | None = None
) -> Trace:
    """Make a trace of requests, of which there must be one; as `read_trace` does."""
    file_block_tokens = block_tokens or _block_tokens_of(requests)
    split = _split(file_block_tokens, expand)
    listed = np.array([request.ids.size for request in requests], dtype=np.int64)
    input_tokens = np.array([_input_tokens(request, file_block_tokens) for request in requests], dtype=np.int64)
    whole = _whole_blocks(listed, input_tokens, file_block_tokens)
    starts = np.concatenate([[0], np.cumsum(whole)]).astype(np.int64)
    ids = np.concatenate([request.ids[:count] for request, count in zip(requests, whole.tolist(), strict=True)])
    unique_ids, dense = np.unique(ids, return_inverse=True)
    paths, prefix_count = _number_prefixes(dense, starts, int(unique_ids.size))
    if prefix_count * split > _NUMBERS_MAX:
        raise TraceError(f"{name} has {prefix_count} unique blocks, cut in {split}: more than {_NUMBERS_MAX} in all")
    seconds = np.array([request.seconds for request in requests])
    notes = _block_notes(int((listed - whole).sum()), int((whole * file_block_tokens > input_tokens).sum()))
    if len(requests) > 1 and not seconds.any():
        seconds = np.arange(len(requests), dtype=np.float64)
        notes = (*notes, "the trace tells no times; from one request to the next counts as one second")
    return Trace(
        name=name,
        format=MOONCAKE,
        block_tokens=file_block_tokens // split,
        split=split,
        unique_blocks=prefix_count * split,
        notes=notes,
        seconds=seconds,
        input_tokens=input_tokens,
        _starts=starts,
        _paths=paths,
    )


def _block_tokens_of(requests: Sequence[RawRequest]) -> int:
    """The longest request tells best: its last block may be partial, or a partial one may be left out."""
    longest = max(requests, key=lambda request: request.ids.size)
    if longest.input_tokens is None:
        return DEFAULT_BLOCK_TOKENS
    if not longest.ids.size or not longest.input_tokens:
        raise TraceError("no request tells the size of a block; give --block-tokens")
    # A tenth more, since with a partial last block in the list the quotient is a little low.
    tokens = int(1.1 * longest.input_tokens / longest.ids.size)
    return min(1 << max(0, tokens.bit_length() - 1), BLOCK_TOKENS_MAX)


def _whole_blocks(listed: NDArray[np.int64], input_tokens: NDArray[np.int64], block_tokens: int) -> NDArray[np.int64]:
    """How many of the listed blocks of each request are whole.

    Some public traces list the partial last block of every prompt. Where only some requests seem to, the list is taken
    as it is: their lengths come from another tokenizer.
    """
    whole = input_tokens // block_tokens
    with_rest = input_tokens % block_tokens > 0
    listing_rest = with_rest & (listed > whole)
    if listing_rest.sum() <= _PARTIAL_RATIO_MIN * with_rest.sum():
        return listed
    return np.minimum(listed, whole)


def _input_tokens(request: RawRequest, block_tokens: int) -> int:
    return int(request.ids.size) * block_tokens if request.input_tokens is None else request.input_tokens


def _split(block_tokens: int, expand: Expansion | None) -> int:
    if expand is None:
        return 1
    if expand.from_tokens != block_tokens:
        raise TraceError(f"--expand is for blocks of {expand.from_tokens} tokens, the trace has {block_tokens}")
    return expand.from_tokens // expand.to_tokens


def _number_prefixes(
    dense: NDArray[np.intp], starts: NDArray[np.int64], unique_count: int
) -> tuple[NDArray[np.uint32], int]:
    """The number of each listed block's prefix, and how many prefixes there are.

    Nearly always an id has one parent, so the known part of a request is recognised by whole arrays.
    """
    paths = np.empty(dense.size, dtype=np.uint32)
    number_of = np.full(unique_count, -1, dtype=np.int64)
    parent_of = np.full(dense.size, -1, dtype=np.int64)
    further: dict[tuple[int, int], int] = {}
    count = 0
    for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        ids = dense[start:end]
        known = number_of[ids]
        parents = np.concatenate([[-1], known[:-1]])
        new = np.flatnonzero((known < 0) | (parent_of[known] != parents))
        lead = int(new[0]) if new.size else ids.size
        previous = int(known[lead - 1]) if lead else -1
        for at in range(lead, ids.size):
            block = int(ids[at])
            number = int(number_of[block])
            if number < 0:
                number_of[block] = number = count
            elif parent_of[number] != previous:
                number = further.setdefault((previous, block), count)
            if number == count:
                parent_of[count] = previous
                count += 1
            known[at] = previous = number
        paths[start:end] = known
    return paths, count


def _block_notes(partial_blocks: int, overlong_requests: int) -> tuple[str, ...]:
    noted = (
        (partial_blocks, "partial last blocks were left out"),
        (overlong_requests, "requests list more blocks than their tokens fill; all of them count as whole"),
    )
    return tuple(f"{count} {sentence}" for count, sentence in noted if count)


def _notes(reader: RequestReader) -> tuple[str, ...]:
    notes = []
    if reader.skipped_lines:
        notes.append(f"{reader.skipped_lines} bad lines were skipped")
    if reader.format == EVENTS:
        notes.append("an event log tells stores, not lookups: prompts that were found entirely are missing")
    if reader.unknown_parents:
        notes.append(f"{reader.unknown_parents} prefixes begin before the event log does; they count from there")
    return tuple(notes)
