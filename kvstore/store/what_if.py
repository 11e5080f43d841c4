"""What other capacities would bring, from what the trees of all namespaces rehearse (kvstore.radix.tree.rehearsed)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.stats import WhatIf
from kvstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvstore.store.space import Space

SCALES = (0.25, 0.5, 1.0, 2.0, 4.0)


@dataclass(slots=True)
class _Sum:
    """All namespaces with a full tier, each with `scale` times what it has of it."""

    capacity_bytes: int = 0
    looked_up_tokens: float = 0.0
    found_tokens: float = 0.0


def what_if(spaces: Iterable[Space]) -> tuple[WhatIf, ...]:
    """Estimates for each tier that is full, by scale; the index lock must be held."""
    spaces = list(spaces)
    return tuple(row for tier in (Tier.HOST, Tier.DISK) for row in _rows(tier, spaces))


def _rows(tier: Tier, spaces: list[Space]) -> Iterator[WhatIf]:
    sums = [_Sum() for _ in SCALES]
    for space in spaces:
        looked_up, _, capacities = space.tree.rehearsed(tier)
        for total, (blocks, found) in zip(sums, capacities, strict=False):  # none where the tier is not full
            total.capacity_bytes += blocks * space.layout.block_bytes
            total.looked_up_tokens += looked_up * space.layout.block_tokens
            total.found_tokens += found * space.layout.block_tokens
    for scale, total in zip(SCALES, sums, strict=True):
        if total.looked_up_tokens:
            yield WhatIf(tier.name.lower(), scale, total.capacity_bytes, total.found_tokens / total.looked_up_tokens)
