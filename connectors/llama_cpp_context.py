"""The one sequence of a llama-cpp-python engine, over llama_state_seq_* and llama_memory_seq_* of llama.cpp.

https://github.com/ggml-org/llama.cpp/blob/master/include/llama.h describes these. The engine remembers which tokens its
context holds (`n_tokens`, `input_ids`), and goes on from those that a prompt shares with them.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import llama_cpp
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvstore.connectors.llama_cpp_states import LoadedState
    from kvstore.types import TokenArray

_SEQUENCE = 0  # llama-cpp-python has one for each engine
_BYTES = ctypes.POINTER(ctypes.c_uint8)


class ContextSequence:
    """A kvstore.connectors.llama_cpp_cache.Sequence; owns nothing, the context is the engine's."""

    def __init__(self, llm: llama_cpp.Llama) -> None:
        self._llm = llm

    @property
    def tokens(self) -> NDArray[np.intc]:
        """The tokens whose KV the context holds; a copy."""
        return np.array(self._llm.input_ids[: self._llm.n_tokens])

    @property
    def room_tokens(self) -> int:
        """How many tokens the context can hold."""
        return int(self._llm.n_ctx())

    @property
    def state_bytes(self) -> int:
        """How large the state is now."""
        return int(llama_cpp.llama_state_seq_get_size(self._llm.ctx, _SEQUENCE))

    def save(self) -> NDArray[np.uint8] | None:
        """The state; None where the context holds other positions than those of `tokens`, as after an error."""
        if not self._holds(self._llm.n_tokens):
            return None
        blob = np.empty(self.state_bytes, dtype=np.uint8)
        written = llama_cpp.llama_state_seq_get_data(self._llm.ctx, _pointer(blob), blob.size, _SEQUENCE)
        return blob if written == blob.size else None

    def restore(self, state: LoadedState, prompt: TokenArray) -> bool:
        """Hold the first `state.tokens` of `prompt`; see kvstore.connectors.llama_cpp_cache.Sequence."""
        llm, memory = self._llm, self._memory
        read = llama_cpp.llama_state_seq_set_data(llm.ctx, _pointer(state.blob), state.blob.size, _SEQUENCE)
        fits = read == state.blob.size and self._holds(state.state_tokens)
        if fits and llama_cpp.llama_memory_seq_rm(memory, _SEQUENCE, state.tokens, -1) and self._holds(state.tokens):
            llm.input_ids[: state.tokens] = prompt[: state.tokens]
            llm.n_tokens = state.tokens
            llm._requires_eval = True  # noqa: SLF001  # what load_state() does: there are no logits yet
            return True
        llama_cpp.llama_memory_seq_rm(memory, _SEQUENCE, -1, -1)
        llm.reset()
        return False

    @property
    def _memory(self) -> llama_cpp.llama_memory_t:
        return llama_cpp.llama_get_memory(self._llm.ctx)

    def _holds(self, tokens: int) -> bool:
        """Whether the positions in the context are 0 to `tokens` - 1."""
        first = llama_cpp.llama_memory_seq_pos_min(self._memory, _SEQUENCE)
        last = llama_cpp.llama_memory_seq_pos_max(self._memory, _SEQUENCE)
        return (first, last) == ((0, tokens - 1) if tokens else (-1, -1))


def _pointer(blob: NDArray[np.uint8]) -> ctypes._Pointer[ctypes.c_uint8]:
    return blob.ctypes.data_as(_BYTES)
