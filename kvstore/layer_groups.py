"""What a layout may have besides full attention: sliding windows, recurrent states, states of whole sequences.

A group says what one block of it costs and which blocks a match needs; where parts are kept and which match follows
is decided in kvstore/store/match_rules.py.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

from kvstore.errors import InvalidLayoutError

FIELD_BYTES_MAX = 1024
WHOLE_MAX = 2**31 - 1
PIECE_BYTES = 256 << 10
PIECE_BYTES_MIN = 4 << 10
PIECE_BYTES_MAX = 16 << 20
DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindow:
    """Attention layers that look back `window` tokens: a match needs the last ceil(window / block_tokens) blocks.

    The fields mean what they mean in KvLayout. A block of the group holds the keys and values of its tokens.
    """

    layers: int
    window: int
    kv_heads: int
    head_dim: int
    dtype: str
    kv_form: str = "split"

    def __post_init__(self) -> None:
        for name in ("layers", "window", "kv_heads", "head_dim"):
            require_whole(getattr(self, name), f"sliding window: {name}")
        require_choice(self.dtype, "sliding window: dtype", DTYPE_BYTES)
        require_choice(self.kv_form, "sliding window: kv_form", ("split", "latent"))
        if self.kv_form == "latent" and self.kv_heads != 1:
            raise InvalidLayoutError(f"sliding window: kv_heads is {self.kv_heads}, expected 1 for the latent form")

    @property
    def heads(self) -> int:
        """Over how many heads tensor-parallel ranks may split the group."""
        return self.kv_heads

    def layer_bytes(self, block_tokens: int) -> int:
        """Bytes of one layer of one block, of all ranks together."""
        planes = 1 if self.kv_form == "latent" else 2
        return planes * self.kv_heads * self.head_dim * block_tokens * DTYPE_BYTES[self.dtype]

    def blocks_back(self, block_tokens: int) -> int:
        """How many of the last blocks before its end a match needs."""
        return -(-self.window // block_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrent:
    """Layers with a state of fixed size (state-space models, linear attention): a match needs it at exactly its end.

    `state_bytes` are those of one layer, of all ranks together; ranks split them by `heads`, and with 1 head each rank
    has all of it and one writes it. `form` is a canonical text or fingerprint of what the bytes are (shapes, dtypes,
    the order of convolution and recurrent state). A block of the group holds the state behind the block's last token.
    """

    layers: int
    state_bytes: int
    heads: int = 1
    form: str = ""

    def __post_init__(self) -> None:
        for name in ("layers", "state_bytes", "heads"):
            require_whole(getattr(self, name), f"recurrent: {name}")
        if self.state_bytes % self.heads:
            raise InvalidLayoutError(
                f"recurrent: state_bytes is {self.state_bytes}, expected a multiple of heads ({self.heads})"
            )
        if not isinstance(self.form, str) or len(self.form.encode(errors="replace")) > FIELD_BYTES_MAX:
            raise InvalidLayoutError(f"recurrent: form is {self.form!r:.60}, expected at most {FIELD_BYTES_MAX} bytes")
        if not self.form.isascii():
            raise InvalidLayoutError(f"recurrent: form is {self.form!r:.60}, expected ASCII text")

    def layer_bytes(self, block_tokens: int) -> int:  # noqa: ARG002  # as SlidingWindow
        """Bytes of one layer of one snapshot, of all ranks together."""
        return self.state_bytes

    def blocks_back(self, block_tokens: int) -> int:  # noqa: ARG002  # as SlidingWindow
        """How many of the last blocks before its end a match needs."""
        return 1


class StateCut(enum.StrEnum):
    """Where an engine can end a sequence state: at any of its tokens, or at its own end alone."""

    ANY = "any"
    END = "end"


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceState:
    """The state of a whole sequence, one blob of a size that the engine alone knows (llama.cpp: llama_state_seq_*).

    A state of n tokens serves every prompt that shares its first m tokens, if the engine can cut it down to m
    (llama_memory_seq_rm, https://github.com/ggml-org/llama.cpp/blob/master/include/llama.h): `cut="any"`. A state that
    cannot be cut, as of recurrent layers, serves prompts that begin with all of its tokens: `cut="end"`. `form` is a
    canonical text or fingerprint of what the bytes are. A blob is kept in slots of `piece_bytes`.
    """

    cut: str = StateCut.ANY.value
    form: str = ""
    piece_bytes: int = PIECE_BYTES

    def __post_init__(self) -> None:
        require_choice(self.cut, "sequence state: cut", tuple(StateCut))
        require_whole(self.piece_bytes, "sequence state: piece_bytes")
        if not PIECE_BYTES_MIN <= self.piece_bytes <= PIECE_BYTES_MAX or self.piece_bytes % PIECE_BYTES_MIN:
            raise InvalidLayoutError(
                f"sequence state: piece_bytes is {self.piece_bytes}, expected a multiple of {PIECE_BYTES_MIN} "
                f"up to {PIECE_BYTES_MAX}"
            )
        if not isinstance(self.form, str) or len(self.form.encode(errors="replace")) > FIELD_BYTES_MAX:
            raise InvalidLayoutError(f"sequence state: form must be a text of at most {FIELD_BYTES_MAX} bytes")
        if not self.form.isascii():
            raise InvalidLayoutError(f"sequence state: form is {self.form!r:.60}, expected ASCII text")


LayerGroup: TypeAlias = SlidingWindow | Recurrent


@dataclass(frozen=True, slots=True)
class LayoutPart:
    """One part of a block: its group (None is full attention), the ranks that have it, who writes it, and its bytes."""

    group: int | None
    ranks: range
    writer: int
    size_bytes: int


def require_whole(value: object, name: str) -> None:
    """Raise InvalidLayoutError unless it is a whole number from 1 on."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= WHOLE_MAX:
        raise InvalidLayoutError(f"{name} is {value!r}, expected a whole number from 1 to {WHOLE_MAX}")


def require_choice(value: object, name: str, choices: dict[str, int] | tuple[str, ...]) -> None:
    """Raise InvalidLayoutError unless it is one of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise InvalidLayoutError(f"{name} is {value!r}, expected one of {', '.join(choices)}")


def tensor_writers(heads: int, tensor_parallel: int) -> int:
    """How many tensor-parallel ranks write distinct bytes: replicated heads have one writer each."""
    return min(tensor_parallel, heads)


def stage_layers(layers: int, pipeline_parallel: int, stage: int) -> int:
    """Layers of one pipeline stage: the first stages have one more where they cannot be equal."""
    whole, rest = divmod(layers, pipeline_parallel)
    return whole + (1 if stage < rest else 0)
