"""Lossy: each element in 8 bits, and a scale for each channel of each group of elements.

Stored are the scales, bfloat16 [groups, channels], then the bytes [groups, tokens, channels]; an element is its byte
times its channel's scale, rounded to the type of the part. A scale is the smallest at which the channel's largest
element fits. Parts with an element that is not finite, and parts that are no floating-point numbers of 16 bits or more,
are stored as they are.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from kvstore.layer_groups import DTYPE_BYTES
from kvstore.tiers._core import _copy
from kvstore.tiers.codecs.base import CodingError, Encoded

if TYPE_CHECKING:
    from kvstore.tiers.base import Bytes1D
    from kvstore.tiers.codecs.base import PartForm

_SCALE_BYTES = 2
_ELEMENTS = {"float32": 1, "float16": 2, "bfloat16": 3}


class QuantisedCodec:
    """A Codec. `byte` is the type of the stored bytes, as the native part numbers them."""

    lossy = True

    def __init__(self, name: str, number: int, byte: int) -> None:
        self.name = name
        self.number = number
        self._byte = byte

    def parameters(self, form: PartForm) -> str:
        """What the elements are, and how they lie."""
        return f"dtype={form.dtype},tokens={form.tokens},channels={form.channels}"

    def fixed_bytes(self, part_bytes: int, form: PartForm) -> int | None:
        """Scales and bytes, where these are fewer than there were; else as many."""
        shape = _shape(part_bytes, form)
        return part_bytes if shape is None else min(part_bytes, _packed_bytes(shape))

    def encode(self, part: Bytes1D, form: PartForm) -> Encoded | None:
        """Scales and bytes, and how far they are off; None where the part is not of whole groups of such elements."""
        shape = _shape(len(part), form)
        if shape is None or _packed_bytes(shape) >= len(part):
            return None
        packed = np.empty(_packed_bytes(shape), dtype=np.uint8)
        sums = _copy.quantise(part, packed, _ELEMENTS[form.dtype or ""], self._byte, *shape)
        if sums is None:
            return None
        max_absolute, squared, signal_squared = sums
        rms_relative = math.sqrt(squared / signal_squared) if signal_squared else 0.0
        return Encoded(packed, CodingError(max_absolute, rms_relative))

    def decode(self, stored: Bytes1D, part: Bytes1D, form: PartForm) -> bool:
        """Elements again, false where there are not as many as there were."""
        shape = _shape(len(part), form)
        if shape is None or len(stored) != _packed_bytes(shape):
            return False
        _copy.dequantise(stored, part, _ELEMENTS[form.dtype or ""], self._byte, *shape)
        return True


def _packed_bytes(shape: tuple[int, int, int]) -> int:
    groups, tokens, channels = shape
    return groups * channels * (_SCALE_BYTES + tokens)


def _shape(part_bytes: int, form: PartForm) -> tuple[int, int, int] | None:
    """Groups, tokens and channels of a part; None if it cannot be quantised."""
    if form.dtype not in _ELEMENTS or not form.tokens or not form.channels:
        return None
    groups, rest = divmod(part_bytes, DTYPE_BYTES[form.dtype] * form.tokens * form.channels)
    return None if rest or not groups else (groups, form.tokens, form.channels)
