"""Which codecs there are, and pipelines of them: first one that makes parts smaller, then encryption."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.errors import ConfigError
from kvstore.tiers.checksum import digest
from kvstore.tiers.codecs.blosc import BloscCodec
from kvstore.tiers.codecs.fp8 import FP8
from kvstore.tiers.codecs.int8 import INT8
from kvstore.tiers.codecs.none import NONE

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.tiers.codecs.base import Codec, PartForm

# On disk: never renumber.
ENCRYPTED = 1 << 16
_CODEC_BITS = 0xFFFF

_MAKERS: dict[str, Callable[[], Codec]] = {
    NONE.name: lambda: NONE,
    BloscCodec.name: BloscCodec,
    FP8.name: lambda: FP8,
    INT8.name: lambda: INT8,
}
_NAMES = {NONE.number: NONE.name, BloscCodec.number: BloscCodec.name, FP8.number: FP8.name, INT8.number: INT8.name}
CODECS = tuple(_MAKERS)
LOSSY_CODECS = (FP8.name, INT8.name)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What becomes of each part of a block on its way to a slot."""

    codec: Codec
    encrypts: bool

    @property
    def number(self) -> int:
        """What headers call it."""
        return self.codec.number | (ENCRYPTED if self.encrypts else 0)

    @property
    def name(self) -> str:
        """What statistics call it."""
        return f"{self.codec.name}+aes-gcm" if self.encrypts else self.codec.name

    def fingerprint(self, forms: tuple[PartForm, ...]) -> int:
        """Of all that the bytes of these parts depend on, the pipeline's number included."""
        parameters = ";".join(self.codec.parameters(form) for form in forms)
        return digest(f"{self.number}:{self.codec.name}:{parameters}".encode())


def make_codec(name: str) -> Codec:
    """The codec of a name. Raises ConfigError where there is none, or its library is missing."""
    maker = _MAKERS.get(name)
    if maker is None:
        raise ConfigError(f"codec is {name!r}, expected one of {', '.join(CODECS)}")
    return maker()


def pipeline_of(number: int) -> Pipeline | None:
    """The pipeline that wrote a header; None for a number that means nothing here, or whose library is missing."""
    name = _NAMES.get(number & _CODEC_BITS)
    if name is None or number & ~(ENCRYPTED | _CODEC_BITS):
        return None
    try:
        return Pipeline(make_codec(name), bool(number & ENCRYPTED))
    except ConfigError:
        return None
