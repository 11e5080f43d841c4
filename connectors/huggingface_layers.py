"""Cache layers of sliding windows that remember enough of what slid out of the window to store it.

transformers keeps the last `window` - 1 tokens of such a layer. A match at the end of a prompt needs whole blocks, and
one at an earlier point what has slid out long since; so these layers also keep what a prompt's forward pass computed,
up to a limit. Masks and lengths are those of transformers, whose classes these are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer, StaticSlidingWindowLayer

States = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Piece:
    """Keys and values (rows, heads, columns, head_dim) of the columns from `start` on."""

    start: int
    keys: torch.Tensor
    values: torch.Tensor

    @property
    def end(self) -> int:
        """The first column behind it."""
        return self.start + self.keys.shape[2]

    def last(self, columns: int) -> Piece:
        """Its last columns, without holding on to the memory of the others."""
        surplus = self.keys.shape[2] - columns
        if surplus <= 0:
            return self
        return Piece(self.start + surplus, self.keys[:, :, surplus:].clone(), self.values[:, :, surplus:].clone())


@dataclass(frozen=True, slots=True)
class Memory:
    """How many columns a window layer remembers: behind the window, and of each forward pass over a prompt."""

    slack_columns: int
    pass_columns: int


def _states(layer: DynamicSlidingWindowLayer | StaticSlidingWindowLayer) -> States:
    assert layer.keys is not None, "the layer was filled"
    assert layer.values is not None, "the layer was filled"
    return layer.keys, layer.values


class WindowLayer(DynamicSlidingWindowLayer):  # type: ignore[no-untyped-call]  # of transformers
    """As DynamicSlidingWindowLayer, and remembers."""

    def __init__(self, sliding_window: int, memory: Memory) -> None:
        super().__init__(sliding_window=sliding_window)
        self._memory = memory
        self._pieces: list[Piece] = []

    def restore(self, keys: torch.Tensor, values: torch.Tensor, length: int) -> None:
        """Continue after `length` columns, the last of which are given: all, or those of the window at least."""
        self.lazy_initialization(keys, values)
        self._pieces.append(Piece(length - keys.shape[2], keys, values))
        self._keep(keys, values)
        self.cumulative_length = length

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any) -> States:  # noqa: ANN401
        """Add columns; returns those that they may look at, as transformers does."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new_columns = key_states.shape[2]
        visible = min(self.cumulative_length, self.sliding_window - 1) + new_columns
        held = _states(self)
        keys, values = (torch.cat(pair, dim=2) for pair in zip(held, (key_states, value_states), strict=True))
        self.cumulative_length += new_columns
        if new_columns > 1:
            whole = Piece(self.cumulative_length - keys.shape[2], keys, values)
            self._pieces.append(whole.last(self._memory.pass_columns))
        self._keep(keys, values)
        return keys[:, :, -visible:], values[:, :, -visible:]

    def take_pieces(self) -> list[Piece]:
        """What it remembers, the oldest first; from then on it is an ordinary layer."""
        keys, values = _states(self)
        pieces, self._pieces = [*self._pieces, Piece(self.cumulative_length - keys.shape[2], keys, values)], []
        self._memory = Memory(0, 0)
        self._keep(keys, values)
        return pieces

    def _keep(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        kept = self.sliding_window - 1 + self._memory.slack_columns
        self.keys, self.values = keys[:, :, -kept:], values[:, :, -kept:]


class StaticWindowLayer(StaticSlidingWindowLayer):  # type: ignore[no-untyped-call]  # of transformers
    """As StaticSlidingWindowLayer, and remembers prompts; of generated tokens only those in the window."""

    def __init__(self, max_cache_len: int, sliding_window: int, memory: Memory) -> None:
        super().__init__(max_cache_len=max_cache_len, sliding_window=sliding_window)
        self._memory = memory
        self._pieces: list[Piece] = []

    def restore(self, keys: torch.Tensor, values: torch.Tensor, length: int) -> None:
        """Continue after `length` columns, the last of which are given: all, or those of the window at least."""
        self._pieces.append(Piece(length - keys.shape[2], keys, values))
        held = min(length, self.max_cache_len)
        super().update(keys[:, :, -held:], values[:, :, -held:])
        self.cumulative_length_int = length

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> States:  # noqa: ANN401
        """Add columns; returns those that they may look at, as transformers does."""
        if key_states.shape[2] > 1:  # never compiled, unlike single tokens
            self._pieces.append(self._passed(key_states, value_states).last(self._memory.pass_columns))
        states: States = super().update(key_states, value_states, *args, **kwargs)
        return states

    def take_pieces(self) -> list[Piece]:
        """What it remembers, the oldest first; from then on it is an ordinary layer."""
        length = self.cumulative_length_int
        held = min(length, self.max_cache_len)
        keys, values = _states(self)
        tail = Piece(length - held, keys[:, :, :held], values[:, :, :held])
        pieces, self._pieces = [*self._pieces, tail], []
        self._memory = Memory(0, 0)
        return pieces

    def _passed(self, keys: torch.Tensor, values: torch.Tensor) -> Piece:
        """The new columns behind some of those before, so that a block across both lies in one piece."""
        start = self.cumulative_length_int
        if not self._pieces or self._pieces[-1].end != start:
            return Piece(start, keys.clone(), values.clone())
        before = self._pieces[-1].last(self._memory.slack_columns)
        joined = [torch.cat(pair, dim=2) for pair in ((before.keys, keys), (before.values, values))]
        return Piece(before.start, *joined)
