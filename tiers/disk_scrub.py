"""Reading what lies on disk to see whether it is still right, a bounded step at a time.

Positions order all slots by slab and slot number; a position and a step can be repeated, and slots that come and go
meanwhile are simply met or not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore.tiers.persistent import BadBlock, ScrubStep
from kvstore.tiers.slots import SlotRun
from kvstore.tiers.transfer import IO_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvstore.tiers.disk_pool import DiskPool
    from kvstore.tiers.disk_services import DiskServices
    from kvstore.tiers.slab import Slab

_SLOT_BITS = 32


def scrub_step(pools: Mapping[bytes, DiskPool], services: DiskServices, after: int, limit_bytes: int) -> ScrubStep:
    """Verify the blocks behind position `after`; one I/O at a time, so that others find threads and the device free."""
    slabs = sorted(services.folder.open_slabs(), key=lambda slab: slab.number)
    bad: list[BadBlock] = []
    blocks = read_bytes = 0
    position = after
    for run in _runs_behind(slabs, after):
        if blocks and read_bytes + run.count * run.holder.geometry.slot_bytes > limit_bytes:
            return ScrubStep(blocks, read_bytes, tuple(bad), 0, _count_behind(slabs, position), position)
        position = _position(run.holder, run.index + run.count)
        blocks += run.count
        read_bytes += run.count * run.holder.geometry.slot_bytes
        bad.extend(_bad_blocks(pools, services, run))
    repaired = sum(pool.retry_quarantined() for pool in pools.values())
    return ScrubStep(blocks, read_bytes, tuple(bad), repaired, 0, None)


def _bad_blocks(pools: Mapping[bytes, DiskPool], services: DiskServices, run: SlotRun[Slab]) -> Iterator[BadBlock]:
    slab = run.holder
    before = slab.sequences[run.indices].copy()
    check = services.coded.check if slab.geometry.coded else services.transfer.check
    (good,) = services.transfer.map(check, [run])
    # What was freed or written while it was read is not to be judged.
    is_bad = ~good & (before != 0) & (slab.sequences[run.indices] == before)
    pool = pools.get(slab.header.ns_id)
    for index in np.flatnonzero(is_bad).tolist():
        slot = None if pool is None else pool.slot_of(slab, run.index + index)
        if slot is not None:
            yield BadBlock(slab.header.ns_id, slot)


def _runs_behind(slabs: list[Slab], after: int) -> Iterator[SlotRun[Slab]]:
    """Occupied neighbouring slots from a position on, as much as one I/O takes at a time."""
    for slab in slabs:
        first = min(max(0, after - _position(slab, 0)), slab.header.slot_count)
        occupied = np.flatnonzero(slab.sequences[first:]) + first
        edges = np.flatnonzero(np.diff(occupied) != 1) + 1
        for indices in np.split(occupied, edges):
            if len(indices):
                whole = SlotRun(slab, int(indices[0]), 0, len(indices))
                yield from whole.cut(max(1, IO_BYTES_MAX // slab.geometry.slot_bytes))


def _count_behind(slabs: list[Slab], after: int) -> int:
    return sum(int(np.count_nonzero(slab.sequences[max(0, after - _position(slab, 0)) :])) for slab in slabs)


def _position(slab: Slab, index: int) -> int:
    return (slab.number << _SLOT_BITS) + index
