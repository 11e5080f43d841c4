"""What all pools of a disk tier use together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.tiers.coded_transfer import CodedTransfer
    from kvstore.tiers.faults import FaultCounts
    from kvstore.tiers.manifest import SlotIndex
    from kvstore.tiers.slab_folder import SlabFolder
    from kvstore.tiers.superblock import SuperblockFile
    from kvstore.tiers.transfer import SlotTransfer


@dataclass(frozen=True, slots=True)
class DiskServices:
    """Parts of the tier, which owns them."""

    folder: SlabFolder
    transfer: SlotTransfer
    coded: CodedTransfer
    manifest: SlotIndex
    superblock: SuperblockFile
    faults: FaultCounts
    next_sequence: Callable[[], int]
