"""Which codec the blocks of a namespace get, and what codecs have to know of a layout's parts."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from kvstore.errors import ConfigError
from kvstore.layer_groups import Recurrent, tensor_writers
from kvstore.tiers.codecs.base import OPAQUE, PartForm
from kvstore.tiers.codecs.coding import PoolCoding
from kvstore.tiers.codecs.registry import LOSSY_CODECS, Pipeline, make_codec
from kvstore.types import KvForm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.types import KvLayout, Namespace

ENCRYPTIONS = ("none", "aes-gcm")
_AXES = frozenset("LKHTD")


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecRule:
    """How blocks are stored on disk of each namespace whose tenant and model match patterns; None stands for any.

    `lossy` must be "accept" for a codec that does not give back what was stored. Raises ConfigError for what cannot be,
    and where the library of a codec is missing.
    """

    tenant: str | None = None
    model: str | None = None
    compression: str = "none"
    lossy: str = "refuse"
    encryption: str = "none"

    def __post_init__(self) -> None:
        if self.encryption not in ENCRYPTIONS:
            raise ConfigError(f"codec: encryption is {self.encryption!r}, expected one of {', '.join(ENCRYPTIONS)}")
        if self.lossy not in ("refuse", "accept"):
            raise ConfigError(f"codec: lossy is {self.lossy!r}, expected refuse or accept")
        make_codec(self.compression)
        if self.compression in LOSSY_CODECS and self.lossy != "accept":
            raise ConfigError(
                f"codec: compression is {self.compression!r}, which does not give back just what was stored; "
                'say lossy = "accept" too, or choose "blosc2"'
            )

    @property
    def pipeline(self) -> Pipeline | None:
        """What is done to each block; None for nothing."""
        if (self.compression, self.encryption) == ("none", "none"):
            return None
        return Pipeline(make_codec(self.compression), self.encryption != "none")

    def covers(self, namespace: Namespace) -> bool:
        """Whether it speaks of this namespace."""
        pairs = ((self.tenant, namespace.tenant), (self.model, namespace.model))
        return all(pattern is None or fnmatchcase(name, pattern) for pattern, name in pairs)


def coding(rules: Sequence[CodecRule], namespace: Namespace, group: int | None = None) -> PoolCoding:
    """How the parts of one group of a namespace are stored."""
    rule = next((rule for rule in rules if rule.covers(namespace)), CodecRule())
    return PoolCoding(rule.pipeline, part_forms(namespace.layout, group))


def part_forms(layout: KvLayout, group: int | None) -> tuple[PartForm, ...]:
    """What the bytes of each part of a group are: opaque for states, of which only their maker knows the types.

    Opaque are, too, the pieces of sequence states, among which are the tokens of their paths, and marks: no codec may
    change a bit of these, whatever `dtype` the layout names.

    A channel is one place of `head_dim` of one head in one layer. The elements of one channel can be told apart where
    nothing but heads and places lies inside of the tokens, as in "LKHTD" and "LKTHD"; with another order of axes the
    type of the elements is known, and no more.
    """
    described = layout if group is None else layout.groups[group]
    count = len(layout.group_sizes(group))
    is_marked = group is None and not layout.layers
    if layout.state is not None or is_marked or isinstance(described, Recurrent):
        return (OPAQUE,) * count
    heads = 1
    if described.kv_form != KvForm.LATENT:
        heads = described.kv_heads // tensor_writers(described.kv_heads, layout.tensor_parallel)
    order = layout.axis_order
    inside = order.partition("T")[2]
    if sorted(order) != sorted(_AXES) or not set(inside) <= {"H", "D"}:
        return (PartForm(described.dtype),) * count
    channels = (heads if "H" in inside else 1) * (described.head_dim if "D" in inside else 1)
    return (PartForm(described.dtype, layout.block_tokens, channels),) * count
