"""What goes where: decisions about blocks, as pure functions of plain values. room.py, lease.py and prefetch.py do it.

No I/O, no locks, no state. The rules, with what they are for:

- `admit_host`: new blocks are taken while the budget of bytes lasts, a prompt's head first, so that a workload that
  never uses anything again costs next to nothing; what continues a stored prefix may spend all of the budget, what
  begins anew leaves a part of it to others.
- `room_price` and `may_leave`: what may leave a tier for what comes. `shortage` says why too little did.
- `admit_disk`: which of the blocks that leave host memory are written to disk, under one of four rules. Whatever the
  rule, a block goes that has another below it on disk, or below which one is written now: a stored prefix has no holes.
- `demote`: in what order they are written, the head of a prefix first, and which copies stay.
- `promote`: how many blocks move up from disk, the head of a prefix first.

Kinds of blocks are told by what the index knows of them: `uses` and `values` are those of kvstore.radix.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Mask = NDArray[np.bool_]
    Indices = NDArray[np.intp]

NEARLY_EQUAL = 1.01  # as the tree compares values: the policy's estimates are no better
REUSED_USES = 2
# Expected uses of a block while it would lie on disk, below which it is not worth the writing. They are taken from the
# highest rate of use that the policy expects over any time, so they are too high, and the bound is no probability.
# Chosen by replaying public traces: kvstore/replay/README.md has the table.
USES_WORTH_WRITING = 0.2
# Of the budget of a namespace: what prompts that continue nothing leave to those that do.
_BUDGET_KEPT_RATIO = 0.25
_BUDGET_PIECE_RATIO = 1 / 16
NO_PARENT = -1  # in arrays of indices


class DiskAdmission(enum.StrEnum):
    """Which blocks are written to disk."""

    DEMOTION = "demotion"  # all that leave host memory
    REUSE = "reuse"  # of those, what at least two requests used
    WORTH = "worth"  # of those, once the disk is full, what is worth more than what it drives out and likely to be used
    WRITE_THROUGH = "write_through"  # all that are stored, soon after that


@dataclass(frozen=True, slots=True)
class StoreRequest:
    """Blocks that somebody wants to store: `count` of `block_bytes` each, behind `present` that are stored already."""

    count: int
    block_bytes: int
    present: int


@dataclass(frozen=True, slots=True)
class Budget:
    """What may be stored now, in bytes, and the most that can gather."""

    left_bytes: float
    most_bytes: float


def admit_host(request: StoreRequest, budget: Budget) -> int:
    """How many blocks, from the first one on, the budget allows.

    None before there is enough for all of them, or for a good piece: a block now and then would cost as much in calls
    and be of no use. A block larger than such a piece is begun with less than it takes.
    """
    kept_bytes = 0.0 if request.present else _BUDGET_KEPT_RATIO * budget.most_bytes
    usable_bytes = budget.left_bytes - kept_bytes
    piece_bytes = min(request.count * request.block_bytes, _BUDGET_PIECE_RATIO * budget.most_bytes)
    if usable_bytes < piece_bytes:
        return 0
    return min(request.count, max(1, int(usable_bytes // request.block_bytes)))


def room_price(worth: float, *, has_disk: bool, is_owed: bool) -> float:
    """What blocks may be worth, at most, that leave host memory for new ones that are worth `worth`.

    Anything where what leaves can go to disk, or where its quota ensures the namespace the room.
    """
    return inf if has_disk or is_owed else worth


def prefetch_price(values: NDArray[np.float64]) -> float:
    """What blocks may be worth, at most, that leave for prefetched ones of these values: less than each of those.

    Nobody has computed those anew, so what is nearly equal stays; policies that only know an order compare exactly.
    """
    return float(values.min()) / NEARLY_EQUAL


def may_leave(worth: float, price: float) -> bool:
    """Whether a block that is worth `worth` may leave for what is worth `price`."""
    return worth <= price * NEARLY_EQUAL


def shortage(givers: Sequence[float], price: float, *, at_limit: bool) -> str:
    """Why too few blocks left host memory, as counters call it; `givers` are what the next of each giver is worth."""
    if givers and not may_leave(min(givers), price):
        return "not_worth"
    return "quota" if at_limit else "host_full"


@dataclass(frozen=True, slots=True)
class Leaving:
    """Blocks that leave host memory, deeper ones first; arrays of one length.

    `carries`: whether something below a block lies on disk. `parents`: the index of the block above it in these
    arrays, NO_PARENT where that is none of them.
    """

    uses: NDArray[np.uint16]
    values: NDArray[np.float64]
    carries: Mask
    parents: Indices


@dataclass(frozen=True, slots=True)
class DiskTerms:
    """What a block meets on disk, as far as it is known.

    `victim_value`: the value of what would leave for it; None where there is room, which costs nobody anything.
    `turnover_seconds`: how long blocks stay, about; None where the policy's values are no uses per second, or nothing
    is known yet.
    """

    victim_value: float | None
    turnover_seconds: float | None


def admit_disk(rule: DiskAdmission, leaving: Leaving, terms: DiskTerms) -> Mask:
    """Which of the blocks are written to disk."""
    admitted = _admitted_alone(rule, leaving, terms) | leaving.carries
    if not admitted.any() or admitted.all():
        return admitted
    for index in range(admitted.size):  # deeper ones first, so what is admitted reaches its head in one pass
        parent = leaving.parents[index]
        if admitted[index] and parent != NO_PARENT:
            admitted[parent] = True
    return admitted


def _admitted_alone(rule: DiskAdmission, leaving: Leaving, terms: DiskTerms) -> Mask:
    match rule:
        case DiskAdmission.DEMOTION | DiskAdmission.WRITE_THROUGH:
            return np.ones(leaving.uses.size, dtype=np.bool_)
        case DiskAdmission.REUSE:
            return np.asarray(leaving.uses >= REUSED_USES)
        case DiskAdmission.WORTH:
            if terms.victim_value is None:
                return np.ones(leaving.uses.size, dtype=np.bool_)
            worth = leaving.values > terms.victim_value
            if terms.turnover_seconds is not None:
                worth &= leaving.values * terms.turnover_seconds >= USES_WORTH_WRITING
            return np.asarray(worth)


def demote(on_disk: Mask, admitted: Mask) -> Indices:
    """Which blocks to write to disk, in that order: those admitted and not there yet, heads first.

    Both are of blocks that leave host memory, deeper ones first. The copy on disk stays until the disk needs its room,
    also when the block moves up again: so a block is written once, however often it moves.
    """
    return np.flatnonzero(admitted & ~on_disk)[::-1]


def promote(on_host: Mask, room_blocks: int) -> Indices:
    """Which blocks of a prefix to move up from disk: the first ones that are missing in host memory, as room allows."""
    return np.flatnonzero(~on_host)[:room_blocks]


def prefetch_blocks(missing_count: int, block_bytes: int, free_bytes: int) -> int:
    """How many blocks, from the head on, a prefetch may bring with what other prefetches leave of the reserve."""
    return max(0, min(missing_count, free_bytes // block_bytes))


def leading(mask: Mask) -> int:
    """How many leading entries are true: as much of a prefix as can be promised."""
    return int(mask.size if mask.all() else mask.argmin())
