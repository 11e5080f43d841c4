"""Between the caches of transformers and buffers of blocks. The only place that knows both shapes.

A block of one part is (layers, 2, heads, block_tokens, head_dim), keys before values; a cache layer holds keys and
values as (rows, heads, columns, head_dim). Column c of a row that is padded on the left by p holds its token c - p.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache, GenerationMixin, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

from kvstore.connectors.huggingface_layers import Memory, Piece, States, StaticWindowLayer, WindowLayer
from kvstore.errors import InvalidBufferError
from kvstore.layer_groups import DTYPE_BYTES
from kvstore.tiers.device import PagedKv
from kvstore.tiers.device_cpu import gather_blocks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transformers import Cache, PreTrainedConfig

# Every name that transformers has had for the cache handed to a model, the newest first, and the one it has here.
CACHE_ARGUMENTS = ("cache", "past_key_values")
_PARAMETERS = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE_ARGUMENT = next(name for name in CACHE_ARGUMENTS if name in _PARAMETERS)
_EVERYTHING = 1 << 40  # columns: more than any prompt has


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSet:
    """The layers of a model that make up one part of a block, as positions in its cache.

    With a `window` they look back so many tokens. Part 0 is the dense one; where all layers have a window, it holds
    one of them, of which every block is stored.
    """

    part: int
    layers: tuple[int, ...]
    window: int | None
    kv_heads: int
    head_dim: int
    dtype: str

    def needed_blocks(self, blocks: int, block_tokens: int) -> range:
        """Which of the first `blocks` blocks the layers need to go on behind them."""
        back = blocks if self.window is None else -(-self.window // block_tokens)
        return range(max(0, blocks - back), blocks)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in all of these layers."""
        return len(self.layers) * 2 * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]


def new_blocks(layers: LayerSet, block_tokens: int, blocks: int) -> torch.Tensor:
    """An uninitialised CPU buffer of whole blocks: (blocks, layers, 2, heads, block_tokens, head_dim)."""
    shape = (blocks, len(layers.layers), 2, layers.kv_heads, block_tokens, layers.head_dim)
    return torch.empty(shape, dtype=getattr(torch, layers.dtype))


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    """Which caches to make for a model: its layer sets, and how much its window layers remember.

    `one_logit` are the arguments by which its forward() computes the logits of the last token alone.
    """

    config: PreTrainedConfig
    sets: tuple[LayerSet, ...]
    block_tokens: int
    window_bytes_max: int
    one_logit: Mapping[str, int]

    def dynamic(self, rows: int) -> DynamicCache:
        """An empty cache that grows."""
        cache = DynamicCache(config=self.config)
        for layer, window, memory in self._windows(rows):
            cache.layers[layer] = WindowLayer(window, memory)
        return cache

    def static(self, rows: int, columns: int) -> StaticCache:
        """An empty cache of a fixed size."""
        cache = StaticCache(config=self.config, max_cache_len=columns)
        for layer, window, memory in self._windows(rows):
            cache.layers[layer] = StaticWindowLayer(columns, window, memory)
        return cache

    @property
    def has_windows(self) -> bool:
        """Whether some layers see a window alone."""
        return any(layers.window is not None for layers in self.sets)

    def can_fill(self, cache: object) -> bool:
        """Whether a cache of the caller can be filled: empty, and all of it layers of full attention."""
        if type(cache) not in (DynamicCache, StaticCache) or self.has_windows or getattr(cache, "offloading", False):
            return False
        assert isinstance(cache, (DynamicCache, StaticCache))
        is_plain = all(type(layer) in (DynamicLayer, StaticLayer) for layer in cache.layers)
        return is_plain and int(cache.get_seq_length()) == 0

    def _windows(self, rows: int) -> list[tuple[int, int, Memory]]:
        slack = 3 * self.block_tokens  # the end of a prompt, whole blocks before it, and the block before those
        sparse_bytes = rows * sum(layers.token_bytes for layers in self.sets if layers.part and layers.window)
        found = []
        for layers in self.sets:
            if layers.window is None:
                continue
            least = layers.window + slack
            kept = max(least, self.window_bytes_max // max(1, sparse_bytes))
            memory = Memory(slack, kept) if layers.part else Memory(_EVERYTHING, _EVERYTHING)
            found += [(layer, layers.window, memory) for layer in layers.layers]
        return found


@dataclass(frozen=True, slots=True)
class Source:
    """Keys and values of a row in one layer: (heads, tokens, head_dim), or with tokens as (blocks, block_tokens)."""

    first_token: int
    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class RowKv:
    """What is known of a row before its prompt is computed: its padding, the tokens covered, a source for each layer.

    Of a layer with a window a source has the last tokens alone. Without tokens there are no sources.
    """

    pad: int
    tokens: int
    sources: dict[int, Source]

    def first_column(self, sets: Sequence[LayerSet]) -> int:
        """The first column that is there in all layers with a window."""
        windows = [self.sources[layers.layers[0]] for layers in sets if layers.window and self.sources]
        return self.pad + max((source.first_token for source in windows), default=0)


def row_of_blocks(sets: Sequence[LayerSet], parts: Sequence[torch.Tensor], block_tokens: int, blocks: int) -> RowKv:
    """An unpadded row that covers `blocks` blocks; `parts` holds the needed blocks of each layer set."""
    sources = {}
    for layers, rows in zip(sets, parts, strict=True):
        first = layers.needed_blocks(blocks, block_tokens).start * block_tokens
        for place, layer in enumerate(layers.layers):
            keys, values = (rows[:, place, plane].transpose(0, 1) for plane in range(2))
            sources[layer] = Source(first, keys, values)
    return RowKv(0, blocks * block_tokens, sources if blocks else {})


def row_of_cache(cache: Cache, sets: Sequence[LayerSet]) -> RowKv:
    """The only row of a cache made by a CachePlan, after a forward pass. The cache is used up."""
    length = int(cache.get_seq_length())
    sources = {}
    for layers in sets:
        for layer in layers.layers:
            piece = max(_pieces(cache, layer), key=lambda piece: (piece.end, piece.keys.shape[2]))
            sources[layer] = Source(piece.start, piece.keys[0], piece.values[0])
    return RowKv(0, length, sources)


def fill(cache: Cache, sets: Sequence[LayerSet], rows: Sequence[RowKv], columns: int, device: torch.device) -> None:
    """Put the first `columns` columns of each row into an empty cache; what is padding there stays 0."""
    for layers in sets:
        dtype = getattr(torch, layers.dtype)
        for layer in layers.layers:
            # All columns that full attention looks at, or a window does, and others that are there.
            least = 0 if layers.window is None else columns - layers.window
            start = max(0, min([least, *(_first_column(row, layer, columns) for row in rows)]))
            shape = (len(rows), layers.kv_heads, columns - start, layers.head_dim)
            states = [torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)]
            for index, row in enumerate(rows):
                if row.sources and row.pad < columns:
                    source = row.sources[layer]
                    offset = row.pad + source.first_token - start
                    _copy_tokens(states[0][index, :, offset:], source.keys)
                    _copy_tokens(states[1][index, :, offset:], source.values)
            keys, values = (state.to(device) for state in states)
            _restore(cache, layer, (keys, values), columns)


def _first_column(row: RowKv, layer: int, columns: int) -> int:
    return row.pad + row.sources[layer].first_token if row.sources else columns


def _copy_tokens(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy into `target` (heads, tokens, head_dim) as many of the source's tokens as it has."""
    if source.ndim == 3:
        count = min(target.shape[1], source.shape[1])
        target[:, :count] = source[:, :count]
        return
    block_tokens = source.shape[2]
    whole, rest = divmod(min(target.shape[1], source.shape[1] * block_tokens), block_tokens)
    if whole:
        torch.unflatten(target[:, : whole * block_tokens], 1, (whole, block_tokens)).copy_(source[:, :whole])
    if rest:
        target[:, whole * block_tokens : whole * block_tokens + rest] = source[:, whole, :rest]


def _restore(cache: Cache, layer: int, states: States, columns: int) -> None:
    window_layer = cache.layers[layer] if layer < len(cache.layers) else None
    if isinstance(window_layer, (WindowLayer, StaticWindowLayer)):
        window_layer.restore(states[0], states[1], columns)
    else:
        cache.update(states[0], states[1], layer)


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive blocks of one part, from `first` on."""

    first: int
    blocks: torch.Tensor


class ComputedKv:
    """What a cache holds after a generate(), in pieces of columns. Made once; the cache's layers forget theirs."""

    def __init__(self, cache: Cache, sets: Sequence[LayerSet], block_tokens: int) -> None:
        self.columns = int(cache.get_seq_length())
        self._block_tokens = block_tokens
        self._pieces = {layer: _pieces(cache, layer) for layers in sets for layer in layers.layers}

    def matches(self, sets: Sequence[LayerSet], rows: int) -> bool:
        """Whether all tensors are of these layer sets and of so many rows."""
        return all(
            tensor.shape[:2] == (rows, layers.kv_heads)
            and tensor.shape[3] == layers.head_dim
            and tensor.dtype == getattr(torch, layers.dtype)
            for layers in sets
            for layer in layers.layers
            for piece in self._pieces[layer]
            for tensor in (piece.keys, piece.values)
        )

    def spans(self, layers: LayerSet, pad: int, valid_column: int, blocks: range) -> list[tuple[int, range]]:
        """Which of a row's blocks the pieces hold, in ascending order: the number of a piece and a range of blocks.

        The row is padded by `pad`, and its columns before `valid_column` hold nothing where layers have a window.
        """
        size = self._block_tokens
        valid_column = valid_column if layers.window else 0
        spans, done = [], blocks.start
        for number, piece in enumerate(self._pieces[layers.layers[0]]):
            first = max(done, -(-(max(piece.start, valid_column) - pad) // size))
            last = min(blocks.stop, (min(piece.end, self.columns) - pad) // size)
            if first < last:
                spans.append((number, range(first, last)))
                done = last
        return spans

    def copy(self, layers: LayerSet, row: int, pad: int, span: tuple[int, range]) -> Run:
        """A private copy of blocks that spans() gave."""
        number, blocks = span
        size = self._block_tokens
        by_block = (len(blocks), size)
        pieces = []
        for layer in layers.layers:
            piece = self._pieces[layer][number]
            columns = slice(pad + blocks.start * size - piece.start, pad + blocks.stop * size - piece.start)
            pair = (piece.keys, piece.values)
            pieces.append([torch.unflatten(tensor[row, :, columns], 1, by_block).transpose(0, 1) for tensor in pair])
        rows = new_blocks(layers, size, len(blocks))
        _gather(pieces, rows)
        return Run(blocks.start, rows)


def _gather(pieces: list[list[torch.Tensor]], rows: torch.Tensor) -> None:
    try:
        # One call of our own threads: torch's meet after each of 2 copies a layer, which is slow where cores are busy.
        gather_blocks(PagedKv.of_pieces(pieces), range(len(rows)), rows, threads=torch.get_num_threads())
    except InvalidBufferError:  # on another device, or in an order of its own: torch copies anything
        for layer, pair in enumerate(pieces):
            for plane, piece in enumerate(pair):
                rows[:, layer, plane] = piece


def _pieces(cache: Cache, layer: int) -> list[Piece]:
    held: Any = cache.layers[layer]
    if isinstance(held, (WindowLayer, StaticWindowLayer)):
        return held.take_pieces()
    columns = int(cache.get_seq_length())
    return [Piece(0, held.keys[:, :, :columns], held.values[:, :, :columns])]


def filled_layers(cache: Cache) -> list[Any] | None:
    """The layers of a dynamic cache; None unless each holds keys and values of all tokens, or of those in a window."""
    layers: list[Any] = list(cache.layers)
    # A subclass keeps something else besides, or not all tokens.
    known = (DynamicLayer, DynamicSlidingWindowLayer)
    if not layers or any(type(layer) not in known or layer.keys is None or layer.values is None for layer in layers):
        return None
    return layers
