"""Lossless: the bits of elements sorted by their weight, then LZ4, by the library Blosc2 (extra `blosc`).

The stored bytes are one Blosc2 frame ("chunk"); see https://www.blosc.org/c-blosc2/format/chunk_format.html.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.errors import ConfigError
from kvstore.layer_groups import DTYPE_BYTES
from kvstore.tiers.codecs.base import Encoded

if TYPE_CHECKING:
    from types import ModuleType

    from kvstore.tiers.base import Bytes1D
    from kvstore.tiers.codecs.base import PartForm

_LEVEL = 5
_FRAME_BYTES_MIN = 32
_SIZES = struct.Struct("<4xI4xI")  # of the bytes inside a frame, and of the frame


class BloscCodec:
    """A Codec. Without the library it cannot be made. Raises ConfigError."""

    name = "blosc2"
    number = 1
    lossy = False

    def __init__(self) -> None:
        self._blosc = _library()
        self._options: dict[str, Any] = {
            "codec": self._blosc.Codec.LZ4,
            "clevel": _LEVEL,
            "nthreads": 1,  # the tier has threads of its own
            "filters": [self._blosc.Filter.BITSHUFFLE],
            "filters_meta": [0],
        }

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BloscCodec)

    def __hash__(self) -> int:
        return self.number

    def parameters(self, form: PartForm) -> str:
        """The width of an element; a frame says the rest of itself."""
        return f"width={_width(form)}"

    def fixed_bytes(self, part_bytes: int, form: PartForm) -> int | None:  # noqa: ARG002  # as Codec
        """None: it depends."""
        return None

    def encode(self, part: Bytes1D, form: PartForm) -> Encoded | None:
        """A frame, unless it is no smaller, or the library has no memory for it."""
        try:
            frame = self._blosc.compress2(part, typesize=_width(form), **self._options)
        except (ValueError, RuntimeError):
            return None
        return Encoded(np.frombuffer(frame, dtype=np.uint8)) if len(frame) < len(part) else None

    def decode(self, stored: Bytes1D, part: Bytes1D, form: PartForm) -> bool:  # noqa: ARG002  # as Codec
        """Decompress in place; the library trusts the sizes that a frame begins with, so they are looked at first."""
        if len(stored) < _FRAME_BYTES_MIN or _SIZES.unpack_from(stored.data) != (len(part), len(stored)):
            return False
        try:
            self._blosc.decompress2(stored, dst=part, nthreads=1)
        except (ValueError, RuntimeError):
            return False
        return True


def _width(form: PartForm) -> int:
    return 1 if form.dtype is None else DTYPE_BYTES[form.dtype]


@lru_cache(maxsize=1)
def _library() -> ModuleType:
    """Blosc2, told to work without the GIL, which it keeps by default."""
    try:
        import blosc2
    except ImportError as err:
        raise ConfigError(
            'codec "blosc2" needs the library of that name: pip install "prefix-kvstore[blosc]", or choose "none"'
        ) from err
    blosc2.set_releasegil(True)
    module: ModuleType = blosc2
    return module
