"""As it is: what is left where a codec makes a part no smaller, and for pipelines that only encrypt."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from kvstore.tiers.base import Bytes1D
    from kvstore.tiers.codecs.base import Encoded, PartForm


class NoCodec:
    """A Codec that never has anything better to store."""

    name = "none"
    number = 0
    lossy = False

    def parameters(self, form: PartForm) -> str:  # noqa: ARG002  # as Codec
        """Nothing."""
        return ""

    def fixed_bytes(self, part_bytes: int, form: PartForm) -> int | None:  # noqa: ARG002  # as Codec
        """As many as there are."""
        return part_bytes

    def encode(self, part: Bytes1D, form: PartForm) -> Encoded | None:  # noqa: ARG002  # as Codec
        """None: the part is stored as it is."""
        return None

    def decode(self, stored: Bytes1D, part: Bytes1D, form: PartForm) -> bool:  # noqa: ARG002  # as Codec
        """A copy, where the sizes agree."""
        if len(stored) != len(part):
            return False
        np.copyto(part, stored)
        return True


NONE = NoCodec()
