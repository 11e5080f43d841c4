"""What of the blocks that leave host memory goes to disk: what the tree knows of them, put to placement.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvstore.radix.tree import NO_BLOCK, NO_SLOT
from kvstore.store.placement import NO_PARENT, DiskAdmission, Leaving, admit_disk, demote
from kvstore.types import Tier

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvstore.radix.tree import RadixTree
    from kvstore.store.placement import DiskTerms
    from kvstore.types import BlockIds

_TAKES_ALL = (DiskAdmission.DEMOTION, DiskAdmission.WRITE_THROUGH)


class Demotion(NamedTuple):
    """Ids of the blocks to write, in that order, and how many that are not on disk were not admitted."""

    ids: BlockIds
    refused_count: int


def demotion(tree: RadixTree, ids: BlockIds, rule: DiskAdmission, terms: DiskTerms, tick: int) -> Demotion:
    """Of blocks that leave host memory, deeper ones first, those to write to disk. The tree's lock must be held."""
    on_disk = tree.slots(ids, Tier.DISK) != NO_SLOT
    admitted = np.ones(ids.size, dtype=np.bool_)
    if rule not in _TAKES_ALL and not on_disk.all():
        leaving = Leaving(
            uses=tree.uses(ids),
            values=tree.values(ids, tick),
            carries=tree.carries(ids, Tier.DISK),
            parents=_indices_of(tree.parents(ids), ids),
        )
        admitted = admit_disk(rule, leaving, terms)
    return Demotion(ids[demote(on_disk, admitted)], int((~admitted & ~on_disk).sum()))


def _indices_of(parents: BlockIds, ids: BlockIds) -> NDArray[np.intp]:
    """Where each parent lies in `ids`, which are not none; NO_PARENT where it does not."""
    order = np.argsort(ids)
    places = np.searchsorted(ids, parents, sorter=order).clip(max=ids.size - 1)
    indices = order[places]
    return np.where((parents != NO_BLOCK) & (ids[indices] == parents), indices, NO_PARENT)
