"""What a codec is: it turns the bytes of one part of a block into other bytes, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvstore.tiers.base import Bytes1D


@dataclass(frozen=True, slots=True)
class PartForm:
    """What the bytes of a part are: elements [groups, tokens, channels] of a type, in that order.

    Elements of one channel of one group, over all tokens, are alike in size: in a cache of keys or values a channel is
    one place of `head_dim` of one head in one layer. `dtype` is None where nobody knows what the bytes mean; `tokens`
    is 0 where it is known of the elements alone.
    """

    dtype: str | None
    tokens: int = 0
    channels: int = 0


OPAQUE = PartForm(None)


@dataclass(frozen=True, slots=True)
class CodingError:
    """How far what a lossy codec gives back is from what it was given.

    `rms_relative` is the root of the sum of squared errors over that of squared elements.
    """

    max_absolute: float
    rms_relative: float


NO_ERROR = CodingError(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Encoded:
    """The bytes of a part as a codec stores them."""

    data: Bytes1D
    error: CodingError = NO_ERROR


class Codec(Protocol):
    """Encodes parts. Stateless and thread-safe; does its work without the GIL."""

    @property
    def name(self) -> str:
        """What settings and statistics call it."""
        ...

    @property
    def number(self) -> int:
        """What headers call it. On disk: never renumber."""
        ...

    @property
    def lossy(self) -> bool:
        """Whether what comes back may differ from what was stored."""
        ...

    def parameters(self, form: PartForm) -> str:
        """Everything beside the number that the stored bytes depend on, as a text: blocks of another one are misses."""
        ...

    def fixed_bytes(self, part_bytes: int, form: PartForm) -> int | None:
        """What every part of this size and form takes, if it is encoded; None where that depends on its bytes."""
        ...

    def encode(self, part: Bytes1D, form: PartForm) -> Encoded | None:
        """The part as it is stored; None where it had better be stored as it is: it is no smaller, or not of this kind.

        Nothing of `part` is kept.
        """
        ...

    def decode(self, stored: Bytes1D, part: Bytes1D, form: PartForm) -> bool:
        """Put back into `part`, contiguous and of its exact size, what was stored; false if these are no such bytes."""
        ...
